//! What people look at: pages about runs, plans, searches and tunings, live or as one file, and TensorBoard's event files.
//!
//! A page is a [`Report`]: sections of charts, timelines, tables and texts. [`page`] makes one HTML file of it that needs no
//! network; [`watch`] serves the same page while runs go on. Charts are those of `kintsugi_draw::chart`, which the command
//! line draws as SVG.
#![forbid(unsafe_code)]

mod config;
mod overview;
pub mod page;
pub mod plan;
mod report;
mod run;
mod run_axis;
pub mod runs;
pub mod search;
pub mod sweep;
pub mod tensorboard;
mod thin;
mod timeline;
pub mod tuning;
pub mod watch;

pub use report::{Item, Report, Section, TableData, TextData};
pub use run::ReportRun;
pub use run_axis::RunAxis;
pub use runs::Context;
pub use thin::Detail;
pub use timeline::TimelineData;
