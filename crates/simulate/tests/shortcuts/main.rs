//! Every shortcut equals the full play.

mod clock;
mod layouts;
mod screen;
