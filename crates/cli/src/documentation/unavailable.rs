//! The rows of `docs/coming-from.md` that say that something is not available.
//!
//! Such a row names keys or values that the program refuses, so a feature that arrives makes it fail here. A row about something
//! that has no key is in [`REVIEWED`].

use kintsugi_plan::config::ConfigError;

use super::Finding;
use super::keys::NamedKey;
use super::markdown::{Code, Page, Row, codes};

/// The page.
pub const PAGE: &str = "docs/coming-from.md";

/// The first cells of rows that name no key: reviewed by a person, last on 2026-11-19.
const REVIEWED: [&str; 13] = [
    "`--lr-wsd-decay-style linear`, `minus_sqrt`",
    "TF32",
    "CPU or NVMe offload",
    "label smoothing, loss masks per token",
    "recomputing only some layers",
    "… `\"ZBVZeroBubble\"`, `\"DualPipeV\"`, `pipeline_parallel_schedule_csv`",
    "`--rampup-batch-size`",
    "`--reset-position-ids`, `--eod-mask-loss`",
    "chat templates, loss on answers only",
    "`save_only_model`",
    "early stopping",
    "`compute_metrics`, callbacks",
    "`bias = False`",
];

/// The rows of the page that do not hold, and reviewed rows that the page no longer has.
pub fn findings(pages: &[Page]) -> Vec<Finding> {
    let page = pages.iter().find(|page| page.name == PAGE).unwrap_or_else(|| panic!("there is no {PAGE}"));
    let mut findings = of_rows(page);
    for reviewed in REVIEWED {
        if !denying(page).iter().any(|row| row.cells[0] == reviewed) {
            let what =
                format!("REVIEWED has the row {reviewed:?}, which does not say \"not available\" here");
            findings.push(Finding::new(page, 1, what));
        }
    }
    findings
}

/// The rows that do not hold.
pub fn of_rows(page: &Page) -> Vec<Finding> {
    let rows = denying(page);
    let problems =
        rows.iter().flat_map(|row| problems(row).into_iter().map(|what| Finding::new(page, row.line, what)));
    problems.collect()
}

/// Keys and values that the page says are refused, with their lines.
pub fn denied(page: &Page) -> Vec<(usize, String)> {
    let of_row = |row: &Row| named(row).into_iter().map(|code| (code.line, code.text)).collect::<Vec<_>>();
    denying(page).iter().flat_map(of_row).collect()
}

/// The rows that say that something is not available.
fn denying(page: &Page) -> Vec<Row<'_>> {
    let mut rows = page.rows();
    rows.retain(|row| row.cells.last().is_some_and(|cell| denial(cell).is_some()));
    rows
}

/// The part of a cell that says what is not available: that before a semicolon.
fn denial(cell: &str) -> Option<&str> {
    cell.split(';').find(|part| part.contains("not available"))
}

/// The keys and values that a row says are refused.
fn named(row: &Row) -> Vec<Code> {
    let denial = row.cells.last().and_then(|cell| denial(cell));
    let list = denial.and_then(|denial| denial.split_once("not available:"));
    list.map_or_else(Vec::new, |(_, list)| codes(row.line, None, list))
}

fn problems(row: &Row) -> Vec<String> {
    let named = named(row);
    if named.is_empty() && !REVIEWED.contains(&row.cells[0]) {
        let what = format!(
            "{}: name a key or value that is refused, as in \"not available: `parallel.ep`\", or add the row to REVIEWED",
            row.cells[0]
        );
        return vec![what];
    }
    named.iter().filter_map(|code| not_refused(&code.text)).collect()
}

/// What is wrong with a key or value that should be refused, if it is not.
fn not_refused(code: &str) -> Option<String> {
    let Some(key) = NamedKey::of(code) else {
        return Some(format!("`{code}` is no key of the configuration"));
    };
    match key.check() {
        Ok(()) => Some(format!("`{code}` is available")),
        Err(ConfigError::UnknownKey { .. }) => {
            Some(format!("`{code}` is refused only because there is no such key"))
        }
        Err(_) => None,
    }
}
