//! The results as text.

use std::fmt::Write;

use kintsugi_spec::units;

use super::Results;
use super::operations::Group;
use super::rates::{Rate, Rates};
use super::training::Training;
use crate::table::Table;

/// Failures of one kind that are listed.
const LISTED: usize = 10;

/// What a person reads, and attaches to a report.
pub fn text(results: &Results) -> String {
    let Results { device, seed, compiled, not_compiled, operations, training, rates, passed, seconds } =
        results;
    let mut parts = vec![format!("device   {device}\nseed     {seed}\n")];
    let all = compiled + not_compiled.len();
    if all > 0 {
        parts.push(format!("kernels  {compiled} of {all} files compile\n"));
        parts.push(failures(not_compiled));
    }
    parts.extend(["\n".to_owned(), operations_table(operations)]);
    parts.extend(operations.iter().map(|group| failures(&group.failed)));
    parts.push("\n".to_owned());
    parts.extend(training.iter().map(training_line));
    parts.push("\n".to_owned());
    parts.push(match rates {
        Ok(rates) => rates_table(rates),
        Err(message) => format!("  ✗ rates: {message}\n"),
    });
    let verdict = if *passed { "all agrees with the CPU" } else { "something does not agree with the CPU" };
    parts.push(format!("\n{verdict}, in {seconds:.0} s\n"));
    parts.concat()
}

fn failures(failed: &[String]) -> String {
    let mut text = failed.iter().take(LISTED).fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "  ✗ {line}");
        text
    });
    if failed.len() > LISTED {
        let _ = writeln!(text, "  ✗ and {} more", failed.len() - LISTED);
    }
    text
}

fn operations_table(groups: &[Group]) -> String {
    let mut table = Table::new(["operations", "cases", "agree", "largest error, share of the bound"]);
    for Group { name, cases, worst, failed } in groups {
        table.row(vec![
            (*name).to_owned(),
            cases.to_string(),
            (cases - failed.len()).to_string(),
            format!("{worst:.2}"),
        ]);
    }
    table.to_string()
}

fn training_line(Training { precision, difference, failure }: &Training) -> String {
    let found = difference.as_ref().map_or_else(String::new, |difference| {
        format!(": loss {:.1e}, gradients {:.1e} from the CPU's", difference.loss, difference.all_gradients)
    });
    match failure {
        None => format!("  ✓ training in {precision}{found}\n"),
        Some(reason) => format!("  ✗ training in {precision}{found}; {reason}\n"),
    }
}

fn rates_table(rates: &Rates) -> String {
    let mut table = Table::new(["rate", "measured", "by the profile"]);
    let mut row = |rate: &Rate, text: fn(f64) -> String| {
        let predicted = rate.predicted.map_or_else(|| "–".to_owned(), text);
        table.row(vec![rate.what.clone(), text(rate.measured), predicted]);
    };
    row(&rates.copies, |rate| format!("{}/s", units::bytes(rate as u64)));
    for rate in rates.products.iter().chain(&rates.attention) {
        row(rate, flops);
    }
    table.to_string()
}

fn flops(rate: f64) -> String {
    if rate < 1e12 { format!("{:.2} GFLOP/s", rate / 1e9) } else { format!("{:.1} TFLOP/s", rate / 1e12) }
}
