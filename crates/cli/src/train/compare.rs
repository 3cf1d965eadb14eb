//! Predicted and measured figures side by side.

use std::collections::BTreeSet;

use kintsugi_rank::StepMetrics;
use kintsugi_spec::{Level, units};

use crate::describe::{CommBytes, worst, worst_transport};
use crate::table::Table;

/// Shown if there is no figure.
const NONE: &str = "–";

/// The row of the memory that the transport itself holds, an estimate.
const TRANSPORT: &str = "transport";

/// Predicted memory of the largest rank.
pub fn memory_table(figures: &StepMetrics) -> String {
    let mut table = Table::new(["memory of the largest rank", ""]);
    for (name, bytes) in worst(&figures.peak_bytes) {
        table.row([name.to_owned(), units::bytes(bytes)]);
    }
    let transport = worst_transport(&figures.peak_bytes);
    if transport > 0 {
        table.row([TRANSPORT.to_owned(), units::bytes(transport)]);
    }
    table.to_string()
}

/// Predicted and measured figures, with their difference.
pub fn table(predicted: &StepMetrics, measured: &StepMetrics) -> String {
    let mut table = Table::new(["", "predicted", "measured", "difference"]);
    table.row(["memory of the largest rank"]);
    for ((name, before), (_, after)) in
        worst(&predicted.peak_bytes).into_iter().zip(worst(&measured.peak_bytes))
    {
        table.row(bytes_row(name, before, after));
    }
    let [before, after] = [predicted, measured].map(|figures| worst_transport(&figures.peak_bytes));
    if before.max(after) > 0 {
        table.row(bytes_row(TRANSPORT, before, after));
    }
    table.row(["traffic of a step, over all ranks"]);
    for (name, [before, after]) in merged(&predicted.comm_bytes, &measured.comm_bytes) {
        table.row(bytes_row(&name, before, after));
    }
    if let Some((before, after)) = predicted.replication.as_ref().zip(measured.replication.as_ref()) {
        table.row(["copying the states of all ranks"]);
        for (name, [before, after]) in merged(&before.comm_bytes, &after.comm_bytes) {
            table.row(bytes_row(&name, before, after));
        }
        table.row(bytes_row("memory of a node", before.node_bytes, after.node_bytes));
        table.row(row("time", duration, before.seconds, after.seconds));
    }
    table.row(["time"]);
    let rate = |x: f64| units::count(x.round());
    table.row(row("step", duration, predicted.step_s, measured.step_s));
    table.row(row("tokens/s", rate, predicted.tokens_per_s, measured.tokens_per_s));
    if predicted.energy_j.or(measured.energy_j).is_some() {
        table.row(row("energy", |x| format!("{}J", units::count(x)), predicted.energy_j, measured.energy_j));
    }
    format!("{table}\n")
}

fn row(
    name: &str,
    show: impl Fn(f64) -> String,
    predicted: Option<f64>,
    measured: Option<f64>,
) -> [String; 4] {
    let difference = match (predicted, measured) {
        (Some(before), Some(after)) => format!("{:+.1} %", 100.0 * (after / before - 1.0)),
        _ => String::new(),
    };
    let shown = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), &show);
    [format!("  {name}"), shown(predicted), shown(measured), difference]
}

/// The traffic of both, with the names of either, innermost level first.
fn merged(predicted: &CommBytes, measured: &CommBytes) -> Vec<(String, [u64; 2])> {
    let bytes = |comm: &CommBytes, level: Level, operation: &str| {
        comm.get(level.name()).and_then(|operations| operations.get(operation)).copied().unwrap_or(0)
    };
    let mut rows = Vec::new();
    for level in Level::ALL {
        let named = [predicted, measured].into_iter().filter_map(|comm| comm.get(level.name()));
        let operations: BTreeSet<&str> = named.flat_map(|operations| operations.keys().copied()).collect();
        rows.extend(operations.into_iter().map(|operation| {
            let both = [predicted, measured].map(|comm| bytes(comm, level, operation));
            (format!("{} {operation}", level.name()), both)
        }));
    }
    rows
}

fn bytes_row(name: &str, predicted: u64, measured: u64) -> [String; 4] {
    [format!("  {name}"), units::bytes(predicted), units::bytes(measured), difference(predicted, measured)]
}

/// `none`, or the difference of measured and predicted.
fn difference(predicted: u64, measured: u64) -> String {
    match measured.cmp(&predicted) {
        std::cmp::Ordering::Equal => "none".to_owned(),
        std::cmp::Ordering::Greater => format!("+{}", units::bytes(measured - predicted)),
        std::cmp::Ordering::Less => format!("-{}", units::bytes(predicted - measured)),
    }
}

/// `12.3 ms` or `4.56 s`.
pub fn duration(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}
