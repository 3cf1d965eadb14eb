//! The loop of a tuning: propose, run, record, until there are enough trials.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use kintsugi_run::now;

use super::acquire::{Known, Models};
use super::executor::{AnyError, Executor, ExecutorError, TrialReport, TrialRequest};
use super::objective::{Constraints, Objective};
use super::processes::is_full_disk;
use super::record::{Ending, Journal, Record, SCHEMA, StepFigures};
use super::space::{Proposal, Space, Values};

/// A point that may be tried.
#[derive(Clone, Debug)]
pub struct TrialCandidate {
    /// Its settings.
    pub settings: Values,
    /// What the planner predicts.
    pub predicted: StepFigures,
    /// The predicted memory of the fullest rank, as a share of what it may take.
    pub memory: Option<f64>,
    /// Its ranks.
    pub ranks: usize,
    /// Tokens of a step.
    pub tokens: u64,
}

/// What to tune.
pub struct Tuning<'a> {
    /// The model, the batch and the machine, as a line that identifies them.
    pub task: &'a str,
    /// The points that may be tried.
    pub candidates: &'a [TrialCandidate],
    /// The configuration of a candidate as TOML, or why it has none.
    pub config: &'a (dyn Fn(usize) -> Result<String, AnyError> + Sync),
    /// The index of the planner's first choice, which is tried first.
    pub first: Option<usize>,
    /// What is optimised.
    pub objective: Objective,
    /// What a trial must keep.
    pub constraints: Constraints,
    /// Trials in all, those of an interrupted tuning included.
    pub trials: usize,
    /// Trials of other tunings. They teach, but are not results of this one.
    pub others: &'a [Record],
    /// A trial is stopped if its steps take so many times as long as the best's.
    pub stop_factor: f64,
    /// Decides between points that are worth the same.
    pub seed: u64,
}

/// What happens during a tuning.
pub enum TuneEvent<'a> {
    /// A trial begins.
    Begins {
        /// Its number.
        trial: usize,
        /// The index of its candidate.
        candidate: usize,
    },
    /// A trial has ended, and its line is on the disk.
    Ended(&'a Record),
}

/// Why a tuning ends early. Every trial that ended before is in the file.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// The file of trials cannot be written.
    #[error("cannot write {path}: {error}; the same command continues with the trials that it has")]
    Journal {
        /// Its path.
        path: String,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// A trial has no outcome.
    #[error("{0}; the same command continues with the trials that have ended")]
    Executor(#[from] ExecutorError),
    /// The disk is full.
    #[error("the disk is full: {0}; the same command continues with the trials that have ended")]
    FullDisk(String),
    /// The file has trials of something else.
    #[error(
        "{path} has trials of another task ({other}); choose another folder with --out, or learn from it with --from"
    )]
    OtherTask {
        /// Its path.
        path: String,
        /// The task.
        other: String,
    },
}

/// What is known of the candidates, for the models.
struct Knowledge {
    space: Space,
    /// The candidates by their settings.
    index: HashMap<Values, usize>,
    /// What other tunings know, by the index of points behind the candidates.
    others: Vec<(usize, Known)>,
}

impl Knowledge {
    fn new(tuning: &Tuning) -> Self {
        let Tuning { candidates, objective, constraints, .. } = tuning;
        let of_candidate = |candidate: &TrialCandidate| Proposal {
            values: candidate.settings.clone(),
            predicted: objective.value(&candidate.predicted, candidate.ranks, candidate.tokens),
            memory: candidate.memory,
        };
        let of_record = |record: &Record| Proposal {
            values: record.settings.clone(),
            predicted: objective.value(&record.predicted, record.ranks, record.tokens),
            memory: None,
        };
        let mut proposals: Vec<Proposal> = candidates.iter().map(of_candidate).collect();
        // Without a prediction, a value of another task is not on the scale of this one.
        let usable = tuning
            .others
            .iter()
            .filter(|other| other.task == tuning.task || of_record(other).predicted.is_some());
        let usable: Vec<&Record> = usable.collect();
        proposals.extend(usable.iter().map(|record| of_record(record)));
        let known =
            |record: &Record| objective.of_trial(record, constraints).map_or(Known::Failure, Known::Value);
        let indexed = candidates.iter().enumerate();
        Knowledge {
            index: indexed.map(|(i, candidate)| (candidate.settings.clone(), i)).collect(),
            others: (candidates.len()..).zip(usable).map(|(i, record)| (i, known(record))).collect(),
            space: Space::new(&proposals),
        }
    }

    /// The points that are known, with those under way.
    fn trials(&self, tuning: &Tuning, records: &[Record], pending: &[usize]) -> Vec<(usize, Known)> {
        let of_record = |record: &Record| {
            let value = tuning.objective.of_trial(record, &tuning.constraints);
            Some((*self.index.get(&record.settings)?, value.map_or(Known::Failure, Known::Value)))
        };
        let own = records.iter().filter_map(of_record);
        let pending = pending.iter().map(|&index| (index, Known::Pending));
        own.chain(pending).chain(self.others.iter().copied()).collect()
    }
}

/// The models of what a tuning knows, for importance and other questions about them.
pub fn models(tuning: &Tuning, records: &[Record]) -> (Space, Models) {
    let knowledge = Knowledge::new(tuning);
    let models = Models::fit(&knowledge.space, &knowledge.trials(tuning, records, &[]));
    (knowledge.space, models)
}

/// The best trial of those that keep the constraints.
pub fn best<'a>(tuning: &Tuning, records: &'a [Record]) -> Option<(&'a Record, f64)> {
    let value = |record: &'a Record| Some((record, tuning.objective.of_trial(record, &tuning.constraints)?));
    records.iter().filter_map(value).min_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// Runs trials until there are as many as the tuning wants, or until nothing is left to try.
pub fn tune(
    tuning: &Tuning,
    journal: &mut Journal,
    executor: &dyn Executor,
    on_event: &mut dyn FnMut(TuneEvent),
) -> Result<(), TuneError> {
    let path = journal.path().display().to_string();
    if let Some(other) = journal.records().iter().find(|record| record.task != tuning.task) {
        return Err(TuneError::OtherTask { path, other: other.task.clone() });
    }
    let failed = |error| TuneError::Journal { path: path.clone(), error };
    let knowledge = Knowledge::new(tuning);
    let (sender, receiver) = mpsc::channel::<(TrialRequest, Result<TrialReport, ExecutorError>)>();
    thread::scope(|scope| {
        let mut pending: Vec<usize> = Vec::new();
        let mut next = journal.last_trial() + 1;
        let mut failure: Option<TuneError> = None;
        loop {
            let wanted = tuning.trials.saturating_sub(journal.records().len());
            while failure.is_none() && pending.len() < wanted.min(executor.slots()) {
                let trials = knowledge.trials(tuning, journal.records(), &pending);
                let Some(candidate) = propose(tuning, &knowledge, &trials) else { break };
                if let Err(error) = journal.reserve(pending.len() + 1) {
                    failure = Some(failed(error));
                    break;
                }
                let request = match request(tuning, journal.records(), next, candidate) {
                    Ok(request) => request,
                    Err(error) => {
                        failure = Some(error.into());
                        break;
                    }
                };
                on_event(TuneEvent::Begins { trial: next, candidate });
                pending.push(candidate);
                next += 1;
                let sender = sender.clone();
                scope.spawn(move || {
                    let report = executor.run(&request);
                    sender.send((request, report)).ok();
                });
            }
            if pending.is_empty() {
                return failure.map_or(Ok(()), Err);
            }
            let (request, report) = receiver.recv().expect("a trial that runs has a sender");
            pending.retain(|&candidate| candidate != request.candidate);
            match report {
                Ok(report) if report.message.as_deref().is_some_and(is_full_disk) => {
                    failure = Some(TuneError::FullDisk(report.message.unwrap_or_default()));
                }
                Ok(report) => {
                    let record = record(tuning, &request, report);
                    match journal.append(record, pending.len()) {
                        Ok(()) => {
                            on_event(TuneEvent::Ended(journal.records().last().expect("it was added")));
                        }
                        Err(error) => failure = Some(failed(error)),
                    }
                }
                Err(error) => failure = Some(error.into()),
            }
        }
    })
}

fn propose(tuning: &Tuning, knowledge: &Knowledge, trials: &[(usize, Known)]) -> Option<usize> {
    let is_known = |index: usize| trials.iter().any(|&(other, _)| other == index);
    if let Some(first) = tuning.first.filter(|&first| !is_known(first)) {
        return Some(first);
    }
    let models = Models::fit(&knowledge.space, trials);
    let seed = tuning.seed.wrapping_add(trials.len() as u64);
    models.propose(&knowledge.space, trials, 1, seed).into_iter().next()
}

fn request(
    tuning: &Tuning,
    records: &[Record],
    trial: usize,
    candidate: usize,
) -> Result<TrialRequest, ExecutorError> {
    let TrialCandidate { ranks, tokens, .. } = tuning.candidates[candidate];
    let config = (tuning.config)(candidate).map_err(|error| ExecutorError::Config { trial, error })?;
    let most = best(tuning, records).and_then(|(_, value)| tuning.objective.step_s(value, ranks, tokens));
    let stop_above = most.map(|seconds| seconds * tuning.stop_factor);
    Ok(TrialRequest { trial, candidate, config, ranks, stop_above })
}

fn record(tuning: &Tuning, request: &TrialRequest, report: TrialReport) -> Record {
    let candidate = &tuning.candidates[request.candidate];
    let measured = report.measured;
    // A measurement without what is optimised is none.
    let is_whole = tuning.objective.value(&measured, candidate.ranks, candidate.tokens).is_some();
    let (outcome, message) = match report.ending {
        ending if ending.is_measured() && !is_whole => {
            (Ending::Garbage, Some("it did not report what is optimised".to_owned()))
        }
        ending => (ending, report.message),
    };
    Record {
        schema: SCHEMA,
        task: tuning.task.to_owned(),
        trial: request.trial,
        settings: candidate.settings.clone(),
        outcome,
        message,
        ranks: candidate.ranks,
        tokens: candidate.tokens,
        measured,
        steps: report.steps,
        predicted: candidate.predicted,
        wall_s: report.wall_s,
        ended: now(),
    }
}

/// The time that is left, as long as trials take as long as they took so far.
pub fn seconds_left(tuning: &Tuning, records: &[Record], begun: Instant, before: usize) -> Option<f64> {
    let done = records.len().checked_sub(before).filter(|&done| done > 0)?;
    let wanted = tuning.trials.min(tuning.candidates.len());
    Some(begun.elapsed().as_secs_f64() / done as f64 * wanted.saturating_sub(records.len()) as f64)
}
