//! Lines for people that a transport prints while its callers wait.

use std::sync::OnceLock;

static PRINTER: OnceLock<fn(&str)> = OnceLock::new();

/// Sets how lines are printed. By default they go to stderr.
pub fn print_notices_by(printer: fn(&str)) {
    PRINTER.set(printer).ok();
}

pub(crate) fn print_notice(line: &str) {
    match PRINTER.get() {
        Some(print) => print(line),
        None => eprintln!("{line}"),
    }
}
