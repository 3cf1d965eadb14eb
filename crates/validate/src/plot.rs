//! Predicted over measured time of all sets as a chart, and the runs that are furthest off.

use kintsugi_draw::chart::{Axis, Chart, Scale, Series, Style, Unit};

use super::score::Report;
use super::validated::ValidatedRun;

/// The ratio of predicted to measured time over the measured time, a series for each set. Outliers are hollow.
pub fn scatter(reports: &[Report]) -> Chart {
    let mut chart = Chart {
        title: "Predicted over measured time".to_owned(),
        caption: "1 is exact. Hollow: a slot took over twice as long as with the same layout elsewhere."
            .to_owned(),
        x: Axis { scale: Scale::Log, ..Axis::of("measured", Unit::Seconds) },
        y: Axis { scale: Scale::Log, ..Axis::of("predicted / measured", Unit::Number) },
        ..Chart::default()
    };
    for (colour, report) in reports.iter().enumerate() {
        let runs: Vec<&ValidatedRun> = report.runs.iter().filter(|run| ratio(run).is_some()).collect();
        let points = runs.iter().map(|run| (run.measured_s.unwrap_or(0.0), ratio(run)));
        let mut series = Series::new(&report.set, Style::Points, colour).points(points);
        series.labels = runs.iter().map(|run| run.name.clone()).collect();
        series.hollow = runs.iter().map(|run| run.is_outlier).collect();
        chart.series.push(series);
    }
    let measured = chart.series.iter().flat_map(|series| series.x.iter().copied());
    let (least, most) = measured.fold((f64::INFINITY, 0.0_f64), |(a, b), x| (a.min(x), b.max(x)));
    chart.series.push(Series::guide("exact", reports.len(), [least, most], 1.0));
    chart
}

/// The healthy runs whose predicted time is furthest from the measured one.
pub fn worst(report: &Report, count: usize) -> Vec<&ValidatedRun> {
    let mut runs: Vec<&ValidatedRun> =
        report.runs.iter().filter(|run| !run.is_outlier && ratio(run).is_some()).collect();
    let distance = |run: &ValidatedRun| ratio(run).map_or(0.0, |ratio| ratio.ln().abs());
    runs.sort_by(|a, b| distance(b).total_cmp(&distance(a)));
    runs.truncate(count);
    runs
}

fn ratio(run: &ValidatedRun) -> Option<f64> {
    run.measured_s
        .map(|measured| run.predicted_s / measured)
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
}
