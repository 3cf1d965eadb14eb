//! The page of a tuning: its trajectory, which settings matter, and every trial.

use kintsugi_draw::chart::{Axis, Chart, Mark, MarkKind, Scale, Series, Style, Unit};
use kintsugi_spec::units;
use kintsugi_tune::trials::{Importance, Record, Values, importance, in_words};

use crate::thin::rounded;
use crate::{Item, Report, Section, TableData, TextData};

/// The page of some trials.
pub fn report(records: &[Record]) -> Report {
    let task = records.first().map_or("no trial yet", |record| record.task.as_str());
    let mut report = Report {
        title: "Tuning".to_owned(),
        subtitle: task.to_owned(),
        sections: Vec::new(),
        ..Report::default()
    };
    report.sections = sections(records);
    report
}

/// The sections of the page.
pub fn sections(records: &[Record]) -> Vec<Section> {
    if records.is_empty() {
        return Vec::new();
    }
    let found = important_settings(records);
    let mut importance: Vec<Item> = importance_chart(&found).map(Item::from).into_iter().collect();
    if !found.is_empty() {
        let text = in_words(&found);
        importance.push(Item::Text(TextData { title: "In words".to_owned(), text }));
    }
    let of = |title: &str, items: Vec<Item>| Section { title: title.to_owned(), items };
    let trajectory = vec![trajectory_chart(records).into(), prediction_chart(records).into()];
    let sections = [
        of("Trials", trajectory),
        of("What matters", importance),
        of("Every trial", vec![table(records).into()]),
    ];
    sections.into_iter().filter(|section| !section.items.is_empty()).collect()
}

/// Tokens per second of a trial that was measured.
fn speed(record: &Record) -> Option<f64> {
    let seconds = record.measured.step_s.filter(|_| record.outcome.is_measured())?;
    Some(record.tokens as f64 / seconds)
}

/// The speed of every trial, the best so far, and what was predicted. Failures are marked.
pub fn trajectory_chart(records: &[Record]) -> Chart {
    let number = |record: &Record| record.trial as f64;
    let measured = records.iter().filter_map(|record| Some((number(record), Some(rounded(speed(record)?)))));
    let predicted = records.iter().filter_map(|record| {
        Some((number(record), Some(rounded(record.tokens as f64 / record.predicted.step_s?))))
    });
    let mut best: Option<f64> = None;
    let best_so_far = records.iter().map(|record| {
        best = best.into_iter().chain(speed(record)).reduce(f64::max);
        (number(record), best.map(rounded))
    });
    let best_so_far = Series::new("best so far", Style::Line, 0).points(best_so_far.collect::<Vec<_>>());
    let mut trials = Series::new("a trial", Style::Points, 0).points(measured);
    trials.labels = records.iter().filter(|record| speed(record).is_some()).map(describe).collect();
    let failed = records.iter().filter(|record| speed(record).is_none());
    let marks = failed.map(|record| Mark {
        x: number(record),
        kind: MarkKind::NotPossible,
        text: format!("{}: {}", record.outcome.word(), describe(record)),
        run: None,
    });
    Chart {
        title: "Trajectory".to_owned(),
        question: "How fast was each trial, and when was the best found?".to_owned(),
        caption: "× is a trial that failed".to_owned(),
        x: Axis::of("trial", Unit::Number),
        y: Axis::of("tokens per second", Unit::Rate),
        series: vec![Series::new("predicted", Style::Points, 7).points(predicted), best_so_far, trials],
        marks: marks.collect(),
    }
}

/// Measured over predicted time.
fn prediction_chart(records: &[Record]) -> Chart {
    let pairs = || {
        let pair = |record: &'_ Record| {
            speed(record)?;
            Some((record.predicted.step_s?, record.measured.step_s?))
        };
        records.iter().filter_map(move |record| Some((record, pair(record)?)))
    };
    let points = pairs().map(|(_, (predicted, measured))| (rounded(predicted), Some(rounded(measured))));
    let mut trials = Series::new("a trial", Style::Points, 0).points(points);
    trials.labels = pairs().map(|(record, _)| describe(record)).collect();
    let least = pairs().map(|(_, (predicted, _))| predicted).fold(f64::INFINITY, f64::min);
    let most = pairs().map(|(_, (predicted, _))| predicted).fold(0.0, f64::max);
    let diagonal = [least, most].map(|seconds| (seconds, Some(seconds)));
    let axis = |label: &str| Axis { scale: Scale::Log, ..Axis::of(label, Unit::Seconds) };
    let mut series = vec![trials];
    if most > 0.0 {
        series.push(Series::new("as predicted", Style::Guide, 7).points(diagonal));
    }
    Chart {
        title: "Measured and predicted".to_owned(),
        question: "Where is the planner wrong?".to_owned(),
        x: axis("predicted time of a step"),
        y: axis("measured"),
        series,
        ..Chart::default()
    }
}

/// Which settings matter for the speed, by the trials that worked.
pub fn important_settings(records: &[Record]) -> Vec<Importance> {
    let value = |record: &Record| Some((record.settings.clone(), 1.0 / speed(record)?));
    importance(&records.iter().filter_map(value).collect::<Vec<_>>())
}

/// The effect of every setting, with its interval; nothing if none is known.
pub fn importance_chart(found: &[Importance]) -> Option<Chart> {
    if found.is_empty() {
        return None;
    }
    let percent = |effect: f64| Some(rounded(effect.exp_m1()));
    let points = |of: &dyn Fn(&Importance) -> f64| -> Vec<(f64, Option<f64>)> {
        found.iter().enumerate().map(|(i, one)| (i as f64, percent(of(one)))).collect()
    };
    Some(Chart {
        title: "Importance".to_owned(),
        question: "Which settings change the speed of a trial, and by how much?".to_owned(),
        caption: "mean size of the Shapley values, with the range of nine in ten selections of the trials"
            .to_owned(),
        x: Axis::of_categories("", found.iter().map(|one| short(&one.key)).collect()),
        y: Axis::from_zero("change of the time of a trial", Unit::Share),
        series: vec![
            Series::new("effect", Style::Bars, 0).points(points(&|one| one.effect)),
            Series::new("low", Style::Points, 7).points(points(&|one| one.interval[0])),
            Series::new("high", Style::Points, 1).points(points(&|one| one.interval[1])),
        ],
        ..Chart::default()
    })
}

/// Every trial, in the order in which they ended.
fn table(records: &[Record]) -> TableData {
    let keys = varying(records);
    let names = keys.iter().map(|key| short(key));
    let figures = ["outcome", "step", "predicted", "tokens/s", "memory", "seconds"].map(str::to_owned);
    let seconds = |seconds: Option<f64>| seconds.map_or_else(|| "–".to_owned(), units::seconds);
    let row = |record: &Record| {
        let settings = keys.iter().map(|key| value(&record.settings, key));
        let figures = [
            record.outcome.word().to_owned(),
            seconds(record.measured.step_s),
            seconds(record.predicted.step_s),
            speed(record).map_or_else(|| "–".to_owned(), |speed| format!("{speed:.0}")),
            record.measured.reserved_bytes.map_or_else(|| "–".to_owned(), units::bytes),
            format!("{:.1}", record.wall_s),
        ];
        [record.trial.to_string()].into_iter().chain(settings).chain(figures).collect()
    };
    TableData {
        title: "Trials".to_owned(),
        question: "What was tried, and what came of it?".to_owned(),
        header: ["trial".to_owned()].into_iter().chain(names).chain(figures).collect(),
        rows: records.iter().map(row).collect(),
        ..TableData::default()
    }
}

/// The keys that are not the same in all trials.
fn varying(records: &[Record]) -> Vec<String> {
    let mut keys: Vec<&String> = records.iter().flat_map(|record| record.settings.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let differs = |key: &&String| {
        let mut values = records.iter().map(|record| record.settings.get(*key));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    keys.into_iter().filter(differs).cloned().collect()
}

fn describe(record: &Record) -> String {
    let of_layout =
        ["parallel.tp", "parallel.pp", "parallel.dp", "batch.micro", "sharding.zero", "memory.recompute"];
    let words = of_layout.map(|key| format!("{} {}", short(key), value(&record.settings, key)));
    format!("trial {}: {}", record.trial, words.join(", "))
}

fn value(settings: &Values, key: &str) -> String {
    settings.get(key).cloned().unwrap_or_else(|| "–".to_owned())
}

/// The last part of a key, in words.
fn short(key: &str) -> String {
    key.rsplit('.').next().unwrap_or(key).replace('_', " ")
}
