//! The page of one or several runs: how they train, how fast, what they take, and how they differ.

use std::collections::BTreeMap;

use kintsugi_draw::chart::{Axis, Chart, Mark, MarkKind, Series, Style, Unit};
use kintsugi_plan::Plan;
use kintsugi_run::{Columns, Figures};
use kintsugi_simulate::{Consumption, Coverage, predict, time};
use kintsugi_spec::Level;
use kintsugi_tensor::Device;

use crate::overview::{RUNS_AS_ROWS, differences, notes, overview};
use crate::plan::{by_category, memory_bars, owned, timeline, traffic_chart};
use crate::run::ReportRun;
use crate::thin::{Detail, means, thin};
use crate::{Item, Report, RunAxis, TableData, TextData, TimelineData};

/// What a page of runs needs beside their files.
pub struct Context<'a> {
    /// Describes a plan, line by line: a name and a text.
    pub facts: &'a (dyn Fn(&Plan) -> Vec<(String, String)> + Sync),
    /// The device that a plan is for.
    pub device: &'a (dyn Fn(&Plan) -> Device + Sync),
}

/// What a plan predicts for its run: the part of a page that does not change while a run goes on.
#[derive(Clone, Debug, Default)]
pub struct PredictedRun {
    figures: Figures,
    pub(crate) facts: Vec<(String, String)>,
    timeline: Option<TimelineData>,
    pp: usize,
}

/// Marks of one chart.
const MAX_MARKS: usize = 300;
/// Runs whose memory, traffic and schedule are shown beside each other.
const MAX_DETAILED: usize = 4;

impl PredictedRun {
    /// The prediction for a run's plan.
    pub fn of(plan: &Plan, context: &Context) -> Self {
        let prediction = predict(plan, (context.device)(plan), Coverage::quick(plan));
        let timing = time(plan);
        let figures = prediction.figures();
        PredictedRun {
            figures: Figures {
                peak_bytes: figures.peak_bytes.iter().map(by_category).collect(),
                comm_bytes: owned(&figures.comm_bytes),
                step_s: timing.map(|timing| timing.step_s),
                tokens_per_s: timing.map(|timing| plan.tokens_per_step() as f64 / timing.step_s),
                energy_j: timing.and_then(|timing| Consumption::new(plan, &timing)).map(|used| used.joules),
            },
            facts: (context.facts)(plan),
            timeline: timeline(plan),
            pp: plan.mesh.pp(),
        }
    }
}

/// The page of some runs, each with its prediction if its plan is known.
pub fn report(runs: &[(&ReportRun, Option<&PredictedRun>)], detail: Detail) -> Report {
    let bins = detail.bins();
    let names: Vec<&str> = runs.iter().map(|(run, _)| run.name.as_str()).collect();
    let mut report = Report {
        title: match names[..] {
            [one] => format!("Run {one}"),
            _ => format!("{} runs", names.len()),
        },
        subtitle: if names.len() == 1 || names.len() >= RUNS_AS_ROWS {
            String::new()
        } else {
            names.join(", ")
        },
        runs: runs.iter().map(|(run, _)| RunAxis::new(&run.name, &run.steps, detail)).collect(),
        notes: runs.iter().flat_map(|(run, _)| notes(run)).collect(),
        ..Report::default()
    };
    report.section("Overview", overview(runs).into_iter().map(Item::from).collect());
    if runs.len() > 1 && runs.iter().any(|(run, _)| !run.config.is_empty()) {
        report.section("What differs", vec![differences(runs).into()]);
    }
    report.section("Training", training(runs, bins));
    report.section("Speed", speed(runs, bins));
    report.section("Energy", energy(runs, bins));
    let detailed = &runs[..runs.len().min(MAX_DETAILED)];
    report.section(
        "Memory and traffic: predicted and measured",
        detailed.iter().flat_map(|&(run, predicted)| resources(run, predicted, runs.len() > 1)).collect(),
    );
    report.section(
        "Schedule of a step",
        detailed.iter().flat_map(|&(run, predicted)| schedules(run, predicted, runs.len() > 1)).collect(),
    );
    let texts = runs
        .iter()
        .map(|(run, _)| TextData { title: format!("config.toml of {}", run.name), text: run.config.clone() });
    report.section("Configuration", texts.map(Item::Text).collect());
    report
}

/// A metric over the steps of all runs; nothing if no run has it. A `noisy` one can be smoothed.
fn over_steps(
    runs: &[(&ReportRun, Option<&PredictedRun>)],
    (title, question, label, unit): (&str, &str, &str, Unit),
    bins: usize,
    noisy: bool,
    values: impl Fn(&Columns) -> Vec<f64>,
) -> Option<Chart> {
    let series = runs.iter().enumerate().filter_map(|(i, (run, _))| {
        let values = values(&run.steps);
        if !values.iter().any(|value| value.is_finite()) {
            return None;
        }
        let name = if runs.len() == 1 { label.to_owned() } else { run.name.clone() };
        let mut series = Series::new(name, Style::Line, i);
        (series.x, series.y) = thin(&run.steps.step, &values, bins);
        (series.run, series.noisy) = (Some(i), noisy);
        if noisy {
            series.means = means(&run.steps.step, &values, bins);
        }
        Some(series)
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| Chart {
        title: title.to_owned(),
        question: question.to_owned(),
        x: Axis::of("step", Unit::Step),
        y: Axis::of(label, unit),
        series,
        ..Chart::default()
    })
}

/// Adds a dashed line for each run whose prediction has a value.
fn with_predictions(
    chart: Option<Chart>,
    runs: &[(&ReportRun, Option<&PredictedRun>)],
    value: impl Fn(&ReportRun, &Figures) -> Option<f64>,
) -> Option<Chart> {
    let mut chart = chart?;
    for (i, &(run, predicted)) in runs.iter().enumerate() {
        let figures = predicted_figures(run, predicted);
        let ends = run.steps.step.first().zip(run.steps.step.last());
        if let (Some(value), Some((first, last))) = (figures.and_then(|figures| value(run, figures)), ends) {
            let name =
                if runs.len() == 1 { "predicted".to_owned() } else { format!("{}, predicted", run.name) };
            let guide = Series::guide(name, if runs.len() == 1 { 1 } else { i }, [*first, *last], value);
            chart.series.push(Series { run: Some(i), ..guide });
        }
    }
    Some(chart)
}

/// What the run itself predicted, else what its plan predicts.
fn predicted_figures<'a>(run: &'a ReportRun, predicted: Option<&'a PredictedRun>) -> Option<&'a Figures> {
    let own = run.summary.as_ref().map(|summary| &summary.predicted);
    own.or_else(|| predicted.map(|predicted| &predicted.figures))
}

fn training(runs: &[(&ReportRun, Option<&PredictedRun>)], bins: usize) -> Vec<Item> {
    let one = runs.len() == 1;
    let about = ("Loss", "Does it learn, and how far is it?", "training loss", Unit::Number);
    let mut loss = over_steps(runs, about, bins, true, |steps| steps.loss.clone());
    if let Some(chart) = &mut loss {
        "loss, nats per token".clone_into(&mut chart.y.label);
        for (i, (run, _)) in runs.iter().enumerate() {
            chart.series.extend(validation(run, i, one, bins));
            let floor = run.summary.as_ref().and_then(|summary| summary.loss_floor);
            let ends = run.steps.step.first().zip(run.steps.step.last());
            if let (true, Some(floor), Some((first, last))) = (one, floor, ends) {
                let guide = Series::guide("a perfect model", 7, [*first, *last], floor);
                chart.series.push(Series { run: Some(i), ..guide });
            }
        }
        chart.marks = runs.iter().enumerate().flat_map(|(i, (run, _))| marks(run, i, one)).collect();
    }
    let norm = ("Gradient norm", "Is training stable?", "norm before clipping", Unit::Number);
    let rate = ("Learning rate", "Which schedule was followed?", "learning rate", Unit::Number);
    let scale = ("Loss scale", "Does fp16 overflow?", "loss scale", Unit::Count);
    let varies = |steps: &Columns| {
        let first = steps.loss_scale.first().copied().unwrap_or(1.0);
        let any = steps.loss_scale.iter().any(|&scale| scale.to_bits() != first.to_bits()) || first > 1.0;
        if any { steps.loss_scale.clone() } else { Vec::new() }
    };
    let charts = [
        loss,
        over_steps(runs, norm, bins, true, |steps| steps.grad_norm.clone()),
        over_steps(runs, rate, bins, false, |steps| steps.lr.clone()),
        over_steps(runs, scale, bins, false, varies),
    ];
    charts.into_iter().flatten().map(Item::from).collect()
}

/// The validation losses of a run: the mean, and of one run also each source.
fn validation(run: &ReportRun, i: usize, one: bool, bins: usize) -> Vec<Series> {
    let mut found = Vec::new();
    for (n, (source, (steps, losses))) in run.steps.validation.iter().enumerate() {
        if !source.is_empty() && !one {
            continue;
        }
        let name = match (one, source.as_str()) {
            (true, "") => "validation loss".to_owned(),
            (true, source) => format!("validation, {source}"),
            (false, _) => format!("{}, validation", run.name),
        };
        let style = if one { Style::Line } else { Style::Guide };
        let mut series = Series::new(name, style, if one { 1 + n } else { i });
        (series.x, series.y) = thin(steps, losses, bins);
        series.run = Some(i);
        found.push(series);
    }
    found
}

/// Checkpoints and skipped steps: the last of them if there are very many.
fn marks(run: &ReportRun, i: usize, one: bool) -> Vec<Mark> {
    let of = if one { String::new() } else { format!(" of {}", run.name) };
    let steps = &run.steps;
    let last = |count: usize| count.saturating_sub(MAX_MARKS);
    let saved = steps.checkpoints[last(steps.checkpoints.len())..].iter().map(|&(step, seconds)| Mark {
        x: step,
        kind: MarkKind::Checkpoint,
        text: format!("checkpoint{of} at step {step}, training paused for {}", Unit::Seconds.format(seconds)),
        run: Some(i),
    });
    let skipped = steps.skipped[last(steps.skipped.len())..].iter().map(|&step| Mark {
        x: step,
        kind: MarkKind::Skipped,
        text: format!("step {step}{of} was skipped: a number was not finite"),
        run: Some(i),
    });
    saved.chain(skipped).collect()
}

fn speed(runs: &[(&ReportRun, Option<&PredictedRun>)], bins: usize) -> Vec<Item> {
    let tokens =
        ("Tokens per second", "How fast is it, and is it as fast as predicted?", "tokens/s", Unit::Rate);
    let mfu = ("Model FLOPs utilisation", "Which share of the device's peak is used?", "MFU", Unit::Share);
    let step = ("Time of a step", "Are there slow steps?", "time of a step", Unit::Seconds);
    let charts = [
        with_predictions(
            over_steps(runs, tokens, bins, true, |steps| steps.tokens_per_s.clone()),
            runs,
            |_, figures| figures.tokens_per_s,
        ),
        with_predictions(
            over_steps(runs, mfu, bins, true, |steps| steps.mfu.clone()),
            runs,
            |run, figures| run.plan.as_ref()?.mfu(figures.step_s?),
        ),
        with_predictions(
            over_steps(runs, step, bins, true, |steps| steps.step_s.clone()),
            runs,
            |_, figures| figures.step_s,
        ),
    ];
    charts.into_iter().flatten().map(Item::from).collect()
}

fn energy(runs: &[(&ReportRun, Option<&PredictedRun>)], bins: usize) -> Vec<Item> {
    let energy = (
        "Energy of a step",
        "What does a step consume, beside the prediction?",
        "energy of a step",
        Unit::Joules,
    );
    let power = ("Power", "How much power do all ranks draw?", "power", Unit::Watts);
    let watts = |steps: &Columns| -> Vec<f64> {
        steps.energy_j.iter().zip(&steps.step_s).map(|(joules, seconds)| joules / seconds).collect()
    };
    let charts = [
        with_predictions(
            over_steps(runs, energy, bins, true, |steps| steps.energy_j.clone()),
            runs,
            |_, figures| figures.energy_j,
        ),
        with_predictions(over_steps(runs, power, bins, true, watts), runs, |_, figures| {
            Some(figures.energy_j? / figures.step_s?)
        }),
    ];
    charts.into_iter().flatten().map(Item::from).collect()
}

/// Memory and traffic of a run beside its prediction, and both in a table.
fn resources(run: &ReportRun, predicted: Option<&PredictedRun>, several: bool) -> Vec<Item> {
    let Some(before) = predicted_figures(run, predicted) else { return Vec::new() };
    let after = run.summary.as_ref().map(|summary| &summary.measured);
    let of = if several { format!(", {}", run.name) } else { String::new() };
    let pp = predicted.map_or(1, |predicted| predicted.pp.max(1));
    let mut items = Vec::new();
    let (mut names, mut bars) = (Vec::new(), Vec::new());
    for stage in 0..pp {
        for (what, figures) in [("predicted", Some(before)), ("measured", after)] {
            let Some(memory) = figures.and_then(|figures| fullest(&figures.peak_bytes, stage, pp)) else {
                continue;
            };
            names.push(format!("{stage} {what}"));
            bars.push(memory.clone());
        }
    }
    if !bars.is_empty() {
        let mut chart = memory_bars(names, &bars);
        chart.title = format!("Memory of the fullest rank of each stage{of}");
        "stage".clone_into(&mut chart.x.label);
        items.push(chart.into());
    }
    let mut compared = vec![("predicted", &before.comm_bytes)];
    compared.extend(after.map(|after| ("measured", &after.comm_bytes)));
    if let Some(mut chart) = traffic_chart(&compared) {
        chart.title += &of;
        items.push(chart.into());
    }
    items.extend(after.map(|after| comparison(before, after, &of).into()));
    items
}

/// The memory of the rank of a stage that has most.
fn fullest(ranks: &[BTreeMap<String, u64>], stage: usize, pp: usize) -> Option<&BTreeMap<String, u64>> {
    let each = ranks.len() / pp;
    let taken = |memory: &&BTreeMap<String, u64>| {
        ["reserved", "transport"].iter().filter_map(|name| memory.get(*name)).sum::<u64>()
    };
    ranks.get(stage * each..(stage + 1) * each)?.iter().max_by_key(taken)
}

/// Predicted and measured figures, and the difference.
fn comparison(before: &Figures, after: &Figures, of: &str) -> TableData {
    let largest = |figures: &Figures, name: &str| {
        figures.peak_bytes.iter().filter_map(|memory| memory.get(name)).max().map(|&bytes| bytes as f64)
    };
    let sent = |figures: &Figures, level: Level| {
        figures
            .comm_bytes
            .get(level.name())
            .map(|operations| operations.values().map(|&bytes| bytes as f64).sum::<f64>())
    };
    let mut rows = Vec::new();
    let mut row = |name: &str, unit: Unit, before: Option<f64>, after: Option<f64>| {
        let shown = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| unit.format(value));
        let difference = match (before, after) {
            (Some(before), Some(after)) if before.to_bits() == after.to_bits() => "none".to_owned(),
            (Some(before), Some(after)) if before > 0.0 => {
                format!("{:+.2} %", 100.0 * (after / before - 1.0))
            }
            _ => "–".to_owned(),
        };
        if before.or(after).is_some() {
            rows.push(vec![name.to_owned(), shown(before), shown(after), difference]);
        }
    };
    for name in ["total", "reserved"] {
        row(&format!("memory, {name}"), Unit::Bytes, largest(before, name), largest(after, name));
    }
    for level in Level::ALL {
        row(&format!("traffic, {}", level.name()), Unit::Bytes, sent(before, level), sent(after, level));
    }
    row("time of a step, mean", Unit::Seconds, before.step_s, after.step_s);
    row("tokens/s, mean", Unit::Rate, before.tokens_per_s, after.tokens_per_s);
    row("energy of a step, mean", Unit::Joules, before.energy_j, after.energy_j);
    TableData {
        title: format!("Predicted and measured{of}"),
        question: "Was the prediction right? Measured times, speeds and energies are means over the steps since the run \
                   last started, without the first."
            .to_owned(),
        header: ["", "predicted", "measured", "difference"].map(str::to_owned).to_vec(),
        rows,
        ..TableData::default()
    }
}

/// The measured step, if it was traced, and the predicted one.
fn schedules(run: &ReportRun, predicted: Option<&PredictedRun>, several: bool) -> Vec<Item> {
    let of = if several { format!(", {}", run.name) } else { String::new() };
    let measured = run.trace.as_ref().map(|trace| {
        let mut timeline = TimelineData::new(&format!("Measured schedule{of}"), trace, "seconds");
        "What did each rank do in the traced step?".clone_into(&mut timeline.question);
        timeline
    });
    let predicted = predicted.and_then(|predicted| predicted.timeline.clone()).map(|mut timeline| {
        timeline.title += &of;
        timeline
    });
    measured.into_iter().chain(predicted).map(Item::from).collect()
}

#[cfg(test)]
mod tests {
    use kintsugi_run::FolderPath;

    use super::*;

    #[test]
    fn a_run_of_a_million_steps_is_a_small_page() {
        let mut run = ReportRun::at(FolderPath::new("run".as_ref()), "long".to_owned());
        let count = 1_000_000;
        let noise = |seed: u64| -> Vec<f64> {
            (0..count).map(|i: u64| 1.0 + (i.wrapping_mul(seed) % 1_000_003) as f64 / 1_000_003.0).collect()
        };
        run.folder.steps = Columns {
            step: (0..count).map(|i| (i + 1) as f64).collect(),
            time: noise(5),
            loss: noise(7919),
            grad_norm: noise(104_729),
            lr: noise(611_953),
            tokens: noise(3),
            tokens_per_s: noise(15_485_863),
            step_s: noise(32_452_843),
            mfu: noise(49_979_687),
            loss_scale: noise(67_867_967),
            energy_j: noise(86_028_121),
            skipped: (0..count).step_by(1000).map(|i| i as f64).collect(),
            checkpoints: (0..count).step_by(500).map(|i| (i as f64, 0.1)).collect(),
            ..Columns::default()
        };
        run.folder.steps.loss[654_321] = 77.0;
        let page = crate::page::file(&report(&[(&run, None)], Detail::File));
        assert!(page.len() < 5_000_000, "{} bytes", page.len());
        assert!(page.contains("77.0"), "the spike is on the page");
    }
}
