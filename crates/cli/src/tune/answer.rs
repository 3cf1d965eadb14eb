//! The result of a tuning: the best trials beside their predictions.

use std::fmt::Write as _;
use std::path::Path;

use kintsugi_report::tuning::important_settings;
use kintsugi_spec::units;
use kintsugi_tune::trials::{Constraints, Importance, Objective, Record, TRIALS, Tuning, in_words, models};
use serde::Serialize;

use super::candidates::Candidates;
use super::learn::LearnedErrors;
use super::progress::gain;
use crate::table::{Fit, Table};

/// What is found.
#[derive(Serialize)]
pub struct Answer<'a> {
    task: &'a str,
    candidates: usize,
    trials: usize,
    failed: usize,
    /// The best trial.
    best: Option<&'a Record>,
    /// How much better it is than the planner's first choice, as a share; `null` if that did not work.
    gain: Option<f64>,
    /// The exponent of predictions that the trials show: measured times are as this power of predicted ones.
    exponent: Option<f64>,
    /// Which settings matter for the speed.
    importance: Vec<Importance>,
    /// What was learned, with --learn.
    pub learned: Option<LearnedErrors>,
    /// The trials that worked, best first.
    #[serde(skip)]
    ranked: Vec<(&'a Record, f64)>,
    #[serde(skip)]
    objective: Objective,
    #[serde(skip)]
    has_constraints: bool,
}

/// Trials that are listed.
const LISTED: usize = 10;

impl<'a> Answer<'a> {
    /// The result after some trials.
    pub fn new(tuning: &Tuning<'a>, candidates: &Candidates, records: &'a [Record]) -> Self {
        let value =
            |record: &'a Record| Some((record, tuning.objective.of_trial(record, &tuning.constraints)?));
        let mut ranked: Vec<(&Record, f64)> = records.iter().filter_map(value).collect();
        ranked.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let exponent = if ranked.len() > 2 { models(tuning, records).1.slope() } else { None };
        Answer {
            task: tuning.task,
            candidates: candidates.all.len(),
            trials: records.len(),
            failed: records.len() - ranked.len(),
            best: ranked.first().map(|&(record, _)| record),
            gain: gain(tuning, records),
            exponent,
            importance: important_settings(records),
            learned: None,
            ranked,
            objective: tuning.objective,
            has_constraints: tuning.constraints != Constraints::default(),
        }
    }

    /// The table of the best trials, and where the files are.
    pub fn text(&self, out: &Path, candidates: &Candidates) -> String {
        let mut text = String::new();
        if !self.ranked.is_empty() {
            let header = ["trial", "settings", "step", "predicted", "ratio", "memory", "result"];
            let mut table = Table::new(header);
            for &(record, value) in self.ranked.iter().take(LISTED) {
                table.row(row(record, value, self.objective, candidates));
            }
            table.fit_terminal(Fit { least: &["memory", "ratio", "predicted"], sentences: Some("settings") });
            write!(text, "\n{table}").expect("a string");
        }
        let failed = match self.failed {
            0 => String::new(),
            some if self.has_constraints => {
                format!(", {some} of which failed or are outside of the constraints")
            }
            some => format!(", {some} of which failed"),
        };
        writeln!(text, "\ntrials   {}{failed}: {}", self.trials, out.join(TRIALS).display())
            .expect("a string");
        if let Some(gain) = self.gain {
            let gain = 100.0 * gain;
            writeln!(text, "gain     {gain:+.1} % over the planner's first choice").expect("a string");
        }
        if !self.importance.is_empty() {
            writeln!(text, "matters  {}", in_words(&self.importance)).expect("a string");
        }
        if self.best.is_some() {
            writeln!(text, "best     {}: kintsugi train takes it", out.join("best.toml").display())
                .expect("a string");
        }
        text
    }
}

fn row(record: &Record, value: f64, objective: Objective, candidates: &Candidates) -> Vec<String> {
    let seconds = |seconds: Option<f64>| seconds.map_or("–".to_owned(), units::seconds);
    let ratio = record.measured.step_s.zip(record.predicted.step_s);
    vec![
        record.trial.to_string(),
        candidates.describe(&record.settings),
        seconds(record.measured.step_s),
        seconds(record.predicted.step_s),
        ratio.map_or("–".to_owned(), |(measured, predicted)| format!("{:.2}", measured / predicted)),
        record.measured.reserved_bytes.map_or("–".to_owned(), units::bytes),
        objective.show(value),
    ]
}
