//! Lines for people that a transport prints while its callers wait, and the failure of a job.

use std::sync::OnceLock;

use crate::RankFailure;

static PRINTER: OnceLock<fn(&str)> = OnceLock::new();

/// Sets how lines are printed. By default they go to stderr.
pub fn print_notices_by(printer: fn(&str)) {
    PRINTER.set(printer).ok();
}

static REPORTER: OnceLock<fn(&RankFailure)> = OnceLock::new();

/// Sets how the failure of a job is reported, in the one process that reports it. By default it is printed as an error.
pub fn report_failures_by(reporter: fn(&RankFailure)) {
    REPORTER.set(reporter).ok();
}

pub(crate) fn report_failure(failure: &RankFailure) {
    match REPORTER.get() {
        Some(report) => report(failure),
        None => print_notice(&format!("error: {failure}")),
    }
}

pub(crate) fn print_notice(line: &str) {
    match PRINTER.get() {
        Some(print) => print(line),
        None => eprintln!("{line}"),
    }
}
