//! The progress of a tuning: a line for each trial, with the best so far, its gain, and the time left.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use indicatif::HumanDuration;
use kintsugi_tune::trials::{Ending, Record, TuneEvent, Tuning, best, seconds_left};

use super::candidates::Candidates;
use crate::output::Output;
use crate::progress::Progress;

/// Shows trials as they end.
pub struct TrialProgress<'a> {
    tuning: &'a Tuning<'a>,
    candidates: &'a Candidates,
    output: Output,
    bar: Progress,
    begun: Instant,
    /// Trials of an earlier tuning.
    before: usize,
    records: RefCell<Vec<Record>>,
}

impl<'a> TrialProgress<'a> {
    /// The progress after the trials so far.
    pub fn new(
        tuning: &'a Tuning<'a>,
        candidates: &'a Candidates,
        records: &[Record],
        output: Output,
    ) -> Self {
        let bar = Progress::new("trials", tuning.trials as u64);
        let records = records.to_vec();
        TrialProgress {
            tuning,
            candidates,
            output,
            bar,
            begun: Instant::now(),
            before: records.len(),
            records: records.into(),
        }
    }

    /// Shows an event.
    pub fn tell(&self, event: &TuneEvent) {
        match *event {
            TuneEvent::Begins { trial, candidate } => {
                let settings = &self.tuning.candidates[candidate].settings;
                let words = format!("trial {trial}: {}", self.candidates.describe(settings));
                self.bar.set(self.records.borrow().len() as u64, self.tuning.trials as u64, &words);
            }
            TuneEvent::Ended(record) => {
                self.records.borrow_mut().push(record.clone());
                let line = self.line(record);
                // That stdout is closed ends no tuning: the trials are in their file.
                self.bar.suspend(|| self.output.text(&line)).ok();
                self.bar.set(self.records.borrow().len() as u64, self.tuning.trials as u64, "");
            }
        }
    }

    fn line(&self, record: &Record) -> String {
        let records = self.records.borrow();
        let tuning = self.tuning;
        let value = tuning.objective.of_trial(record, &tuning.constraints);
        let result = match (value, &record.message) {
            (Some(value), _) => tuning.objective.show(value),
            (None, None) if record.outcome.is_measured() => "outside of the constraints".to_owned(),
            (None, None) => record.outcome.word().to_owned(),
            (None, Some(message)) => {
                let first = message.lines().next().unwrap_or_default();
                format!("{}: {first}", record.outcome.word())
            }
        };
        let is_stopped = value.is_some() && record.outcome == Ending::Stopped;
        let stopped = if is_stopped { ", stopped" } else { "" };
        let best = best(tuning, &records).map_or(String::new(), |(best, value)| {
            let gain = gain(tuning, &records).map_or(String::new(), |gain| {
                format!(", {:+.1} % over the planner's first choice", 100.0 * gain)
            });
            if best.trial == record.trial {
                format!("; the best so far{gain}")
            } else {
                format!("; best {}{gain}", tuning.objective.show(value))
            }
        });
        let left = seconds_left(tuning, &records, self.begun, self.before)
            .filter(|&seconds| seconds > 0.5)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .map_or(String::new(), |left| format!("; {} left", HumanDuration(left)));
        let settings = self.candidates.describe(&record.settings);
        format!("trial {:>3}  {settings}: {result}{stopped}{best}{left}\n", record.trial)
    }
}

/// How much better the best is than the planner's first choice, if both were measured: 0.1 for 10 % more tokens.
pub fn gain(tuning: &Tuning, records: &[Record]) -> Option<f64> {
    let first = &tuning.candidates[tuning.first?].settings;
    let record = records.iter().find(|record| record.settings == *first)?;
    let first = tuning.objective.of_trial(record, &tuning.constraints)?;
    Some(first / best(tuning, records)?.1 - 1.0)
}
