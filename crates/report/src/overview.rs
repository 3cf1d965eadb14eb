//! The tables at the top of a page of runs: what they are, how far they got, and how their configurations differ.

use std::collections::BTreeMap;

use kintsugi_draw::chart::Unit;
use kintsugi_run::MAX_METRICS;
use kintsugi_spec::units;

use crate::run::ReportRun;
use crate::runs::PredictedRun;
use crate::{TableData, config};

/// With this many runs or more, tables have a row for each run. With fewer, they have a column for each.
pub(crate) const RUNS_AS_ROWS: usize = 4;
/// In place of what is not known.
const MISSING: &str = "–";

/// What a reader should know of a run.
pub(crate) fn notes(run: &ReportRun) -> Vec<String> {
    let failure = run.summary.as_ref().and_then(|summary| summary.failure.as_ref());
    let failed = failure.map(|failure| format!("{} failed: {failure}", run.name));
    let unread = run.steps.damaged + usize::from(run.steps.partial);
    let damaged = (unread > 0).then(|| {
        let lines = if unread == 1 { "1 line" } else { &format!("{unread} lines") };
        let last = if run.steps.partial { "; the last line is not complete" } else { "" };
        format!("{lines} of {}/metrics.jsonl cannot be read{last}", run.name)
    });
    let summary = run.summary_error.as_ref().map(|error| {
        format!("{}/summary.json cannot be read, so nothing that was measured over the whole run is shown: {error}", run.name)
    });
    let unknown = (run.plan.is_none() && !run.config.is_empty()).then(|| {
        format!("the configuration of {} cannot be planned here, so nothing is predicted for it", run.name)
    });
    let refused = run.config_refused.then(|| {
        let name = &run.name;
        format!("config.toml of {name} is not a configuration that this version can read, so it is not shown and nothing is predicted for it")
    });
    let cut = run.steps.cut.then(|| {
        let most = units::bytes(MAX_METRICS);
        format!("metrics.jsonl of {} is longer than {most}; the rest is not read", run.name)
    });
    [failed, damaged, cut, summary, refused, unknown].into_iter().flatten().collect()
}

/// Tables of what the runs are and how far they got: a column for each of few runs, a row for each of many.
pub(crate) fn overview(runs: &[(&ReportRun, Option<&PredictedRun>)]) -> Vec<TableData> {
    let table = |header: Vec<String>, rows: Vec<Vec<String>>| TableData {
        question: "What was run, and how far did it get?".to_owned(),
        header,
        rows,
        ..TableData::default()
    };
    let names = runs.iter().map(|(run, _)| run.name.clone());
    let planned: Vec<Facts> =
        runs.iter().map(|(_, predicted)| predicted.map(|it| it.facts.clone()).unwrap_or_default()).collect();
    let reached: Vec<Facts> = runs.iter().map(|(run, _)| progress(run)).collect();
    if runs.len() < RUNS_AS_ROWS {
        let all: Vec<Facts> = planned.into_iter().zip(reached).map(|(a, b)| [a, b].concat()).collect();
        let row = |name: String| {
            let values = all.iter().map(|facts| value(facts, &name));
            std::iter::once(name.clone()).chain(values).collect()
        };
        let header = std::iter::once(String::new()).chain(names).collect();
        return vec![table(header, keys(&all).into_iter().map(row).collect())];
    }
    let (same, different): (Vec<String>, Vec<String>) = keys(&planned)
        .into_iter()
        .partition(|name| planned.iter().all(|facts| value(facts, name) == value(&planned[0], name)));
    let columns = [keys(&reached), different].concat();
    let rows = names.zip(planned.iter().zip(&reached)).map(|(name, (planned, reached))| {
        let all = [reached.clone(), planned.clone()].concat();
        std::iter::once(name).chain(columns.iter().map(|column| value(&all, column))).collect()
    });
    let header = std::iter::once("run".to_owned()).chain(columns.clone()).collect();
    let of_runs = TableData { of_runs: true, ..table(header, rows.collect()) };
    let same: Vec<Vec<String>> =
        same.into_iter().map(|name| vec![name.clone(), value(&planned[0], &name)]).collect();
    let common = TableData {
        question: "What do all of these runs have in common?".to_owned(),
        header: vec![String::new(); 2],
        rows: same,
        ..TableData::default()
    };
    std::iter::once(of_runs).chain(Some(common).filter(|table| !table.rows.is_empty())).collect()
}

/// Names and what is known of each.
type Facts = Vec<(String, String)>;

/// All names, in the order in which they first appear.
fn keys(each: &[Facts]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (name, _) in each.iter().flatten() {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

fn value(facts: &[(String, String)], name: &str) -> String {
    facts.iter().find(|(known, _)| known == name).map_or_else(|| MISSING.to_owned(), |(_, text)| text.clone())
}

/// How far a run got.
fn progress(run: &ReportRun) -> Facts {
    let steps = &run.steps;
    let mut facts = Facts::new();
    let mut add = |name: &str, text: String| facts.push((name.to_owned(), text));
    let state = serde_json::to_value(run.state()).expect("a word");
    add("state", state.as_str().unwrap_or_default().to_owned());
    let of = run.plan.as_ref().map(|plan| format!(" of {}", plan.run.steps)).unwrap_or_default();
    add("steps", format!("{}{of}", steps.step.last().map_or(0.0, |step| *step)));
    let tokens = steps.tokens.last().filter(|tokens| tokens.is_finite());
    add("tokens", tokens.map_or_else(|| MISSING.to_owned(), |&tokens| units::count(tokens)));
    if let (Some(first), Some(last)) = (steps.loss.first(), steps.loss.last()) {
        add("loss", format!("{} → {}", loss(*first), loss(*last)));
    }
    if let Some((_, losses)) = steps.validation.get("") {
        add("validation loss", losses.last().map_or_else(String::new, |&last| loss(last)));
    }
    let recent = &steps.tokens_per_s[steps.tokens_per_s.len().saturating_sub(100)..];
    if let Some(median) = median(recent) {
        let speed = units::count(median.round());
        add("median speed", format!("{speed} tokens/s, over the last {} steps", recent.len()));
    }
    if let (Some(first), Some(last)) = (steps.time.first(), steps.time.last())
        && first.is_finite()
        && last.is_finite()
    {
        add("time", format!("{} to {}", date(*first), date(*last)));
    }
    let joules: f64 = steps.energy_j.iter().filter(|joules| joules.is_finite()).sum();
    if joules > 0.0 {
        add("energy", Unit::Joules.format(joules));
    }
    for (source, epochs) in &steps.epochs {
        let shown = if epochs.is_finite() { format!("{epochs:.3}") } else { MISSING.to_owned() };
        add(&format!("epochs of {source}"), shown);
    }
    add("skipped steps", steps.skipped.len().to_string());
    if steps.rollbacks > 0 {
        add("returns to a checkpoint after spikes", steps.rollbacks.to_string());
    }
    for straggler in &steps.stragglers {
        add("straggler", straggler.to_string());
    }
    add("checkpoints", steps.checkpoints.len().to_string());
    facts
}

/// A loss; a number that is not finite is `null` in the metrics.
fn loss(value: f64) -> String {
    if value.is_finite() { format!("{value:.4}") } else { "not finite".to_owned() }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Seconds since 1970 as a date of the Gregorian calendar, in UTC.
fn date(seconds: f64) -> String {
    // Between the years 1 and 9000, whatever a file says.
    let seconds = seconds.clamp(-6e10, 2.2e11);
    let (days, second) = ((seconds / 86400.0).floor() as i64, seconds.rem_euclid(86400.0) as u64);
    // Days since 1 March 0000, in eras of 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = year + 400 * era + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", second / 3600, second / 60 % 60, second % 60)
}

/// The keys of the configurations that differ, each with its values.
pub(crate) fn differences(runs: &[(&ReportRun, Option<&PredictedRun>)]) -> TableData {
    let configs: Vec<BTreeMap<String, String>> =
        runs.iter().map(|(run, _)| config::values(&run.config)).collect();
    let names: Vec<String> = runs.iter().map(|(run, _)| run.name.clone()).collect();
    let found = config::differences(&configs);
    let of_runs = runs.len() >= RUNS_AS_ROWS;
    let (header, rows) = if of_runs {
        let row = |(i, name): (usize, &String)| {
            std::iter::once(name.clone()).chain(found.iter().map(|(_, values)| values[i].clone())).collect()
        };
        let header = std::iter::once("run".to_owned()).chain(found.iter().map(|(key, _)| key.clone()));
        (header.collect(), names.iter().enumerate().map(row).collect())
    } else {
        let rows = found.iter().map(|(key, values)| [&[key.clone()][..], values].concat());
        (std::iter::once("key".to_owned()).chain(names).collect(), rows.collect())
    };
    TableData {
        title: "Keys of the configuration".to_owned(),
        question: match found.len() {
            0 => "Nothing was changed: the configurations of these runs are the same.".to_owned(),
            _ => "What was changed between these runs?".to_owned(),
        },
        header: if found.is_empty() { Vec::new() } else { header },
        rows: if found.is_empty() { Vec::new() } else { rows },
        of_runs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0.0), "1970-01-01 00:00:00 UTC");
        assert_eq!(date(951_827_696.0), "2000-02-29 12:34:56 UTC");
        assert_eq!(date(1_794_844_928.6), "2026-11-16 16:02:08 UTC");
    }
}
