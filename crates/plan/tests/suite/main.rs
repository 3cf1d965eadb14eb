//! Configurations, programs and schedules. One binary, since every binary links all crates.

mod config;
mod config_errors;
mod config_random;
mod deadlock;
mod in_order_streams;
mod pages;
mod programs;
mod schedules;
mod sharding;
mod support;
