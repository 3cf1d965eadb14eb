//! The runs of a folder, read as they grow. All clients share what was read.
//!
//! Each run has its own lock, so that a request waits only for the runs that it shows. All of this blocks, except
//! [`Runs::look`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use kintsugi_run::RunState;
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::find::find;
use super::prediction::{Predictions, RunPrediction};
use super::tuning::WatchedTuning;
use crate::page::json;
use crate::run::ReportRun;
use crate::runs::report;
use crate::{Context, Detail, Report};

/// Largest number of runs on one page.
const MAX_SHOWN: usize = 8;
/// Files are looked at no more often than this, however many clients ask.
const OFTEN: Duration = Duration::from_millis(900);

/// A run in the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct ListedRun {
    name: String,
    state: RunState,
    step: Option<f64>,
    loss: Option<f64>,
    tokens_per_s: Option<f64>,
}

/// The runs of a folder.
pub struct Runs {
    folder: PathBuf,
    /// The runs by name; nothing before the first look at the files.
    known: Mutex<Option<BTreeMap<String, Arc<WatchedRun>>>>,
    /// Held while files are looked at: when that was last done.
    looked: Arc<tokio::sync::Mutex<Option<Instant>>>,
    predictions: Predictions,
    tuning: WatchedTuning,
    /// Counts the changes of all runs.
    changes: AtomicU64,
}

struct WatchedRun {
    name: String,
    /// Locked for writing while its files are read. Who locks several runs does so in the order of their names.
    folder: RwLock<ReportRun>,
    listed: Mutex<ListedRun>,
    prediction: Arc<RunPrediction>,
    /// The count of changes when its files last changed.
    version: AtomicU64,
}

/// What a client has been sent.
#[derive(Default)]
pub struct ClientState {
    list: String,
    shown: Option<Vec<ShownRun>>,
    /// The trials of the tuning in the last report.
    trials: usize,
}

/// A run in a report: what decides whether the report has changed.
#[derive(PartialEq)]
struct ShownRun {
    name: String,
    version: u64,
    pending: bool,
}

/// What is new for a client, as JSON.
pub struct News {
    /// The list of runs, if it has changed.
    pub list: Option<String>,
    /// The report of the chosen runs, if it has changed.
    pub report: Option<String>,
    /// What the client has seen with these.
    pub seen: ClientState,
}

impl Runs {
    /// The runs of a folder. Their files are not read yet.
    pub fn new(folder: &Path, context: Context<'static>) -> Self {
        Runs {
            folder: folder.to_owned(),
            known: Mutex::default(),
            looked: Arc::default(),
            predictions: Predictions::new(context),
            tuning: WatchedTuning::new(folder),
            changes: AtomicU64::default(),
        }
    }

    /// Looks at the files, if the last look was a while ago. Waits for another look only if there was none before.
    pub async fn look(self: &Arc<Self>) {
        let mut looked = match Arc::clone(&self.looked).try_lock_owned() {
            Ok(looked) => looked,
            Err(_) if lock(&self.known).is_some() => return,
            Err(_) => Arc::clone(&self.looked).lock_owned().await,
        };
        if looked.is_some_and(|looked| looked.elapsed() < OFTEN) {
            return;
        }
        let runs = Arc::clone(self);
        let look = spawn_blocking(move || {
            runs.update();
            *looked = Some(Instant::now());
        });
        // After a panic, which was printed, the files are looked at again.
        look.await.ok();
    }

    /// Reads what is new in the files.
    fn update(&self) {
        self.tuning.update();
        let found = find(&self.folder);
        let mut runs = lock(&self.known).clone().unwrap_or_default();
        runs.retain(|name, _| found.iter().any(|(found, _)| found == name));
        for (name, path) in found {
            let new = || Arc::new(WatchedRun::new(ReportRun::at(path, name.clone())));
            let run = runs.entry(name.clone()).or_insert_with(new);
            if run.update() {
                run.version.store(self.changes.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
        }
        *lock(&self.known) = Some(runs);
    }

    /// What is new for a client.
    pub fn news(&self, chosen: &[String], mut seen: ClientState) -> News {
        let runs = lock(&self.known).clone().unwrap_or_default();
        let mut list: Vec<ListedRun> = runs.values().map(|run| lock(&run.listed).clone()).collect();
        list.sort_by_key(|run| run.state != RunState::Running);
        // Without a choice, the first of the list.
        let first = list.first().map(|run| run.name.clone());
        let chosen = if chosen.is_empty() { first.as_slice() } else { chosen };
        let list = json(&list);
        let list = (list != seen.list).then_some(list);
        if let Some(list) = &list {
            seen.list.clone_from(list);
        }
        let report = self.report(&runs, chosen, &mut seen);
        News { list, report, seen }
    }

    /// The report of the chosen runs, if it has changed.
    fn report(
        &self,
        runs: &BTreeMap<String, Arc<WatchedRun>>,
        chosen: &[String],
        seen: &mut ClientState,
    ) -> Option<String> {
        let position = |name: &String| chosen.iter().position(|chosen| chosen == name);
        let mut chosen: Vec<_> = runs.iter().filter_map(|(name, run)| Some((position(name)?, run))).collect();
        chosen.sort_by_key(|(position, _)| *position);
        chosen.truncate(MAX_SHOWN);
        // In the order of their names, and then as they were chosen.
        chosen.sort_by_key(|(_, run)| &run.name);
        let mut locked: Vec<_> =
            chosen.iter().map(|&(position, run)| (position, run, run.folder())).collect();
        locked.sort_by_key(|(position, ..)| *position);
        let mut notes = Vec::new();
        let (mut shown, mut predictions) = (Vec::new(), Vec::new());
        for (_, run, folder) in &locked {
            let (predicted, pending) = self.predictions.get(&run.prediction, folder);
            if pending {
                notes.push(format!(
                    "the plan of {} is being predicted; its part of the page comes later",
                    run.name
                ));
            }
            shown.push(ShownRun {
                name: run.name.clone(),
                version: run.version.load(Ordering::Relaxed),
                pending,
            });
            predictions.push(predicted);
        }
        let (trials, of_tuning) = self.tuning.sections();
        if seen.shown.as_ref() == Some(&shown) && seen.trials == trials {
            return None;
        }
        (seen.shown, seen.trials) = (Some(shown), trials);
        let pairs = locked.iter().zip(&predictions);
        let pairs: Vec<_> =
            pairs.map(|((.., folder), predicted)| (&**folder, predicted.as_deref())).collect();
        if pairs.is_empty() && trials > 0 {
            let title = "Tuning".to_owned();
            return Some(json(&Report { title, sections: of_tuning, ..Report::default() }));
        }
        if pairs.is_empty() {
            return Some(json(&Report { title: "No run yet".to_owned(), ..Report::default() }));
        }
        let mut report = report(&pairs, Detail::Live);
        report.notes.extend(notes);
        report.sections.splice(0..0, of_tuning);
        Some(json(&report))
    }
}

impl WatchedRun {
    fn new(folder: ReportRun) -> Self {
        WatchedRun {
            name: folder.name.clone(),
            listed: Mutex::new(ListedRun::of(&folder)),
            folder: RwLock::new(folder),
            prediction: Arc::default(),
            version: AtomicU64::default(),
        }
    }

    fn folder(&self) -> RwLockReadGuard<'_, ReportRun> {
        self.folder.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads its files that have changed since the last call. Returns whether any has.
    fn update(&self) -> bool {
        let mut folder = self.folder.write().unwrap_or_else(PoisonError::into_inner);
        // A file that cannot be read now may be there at the next look.
        let changed = folder.update().unwrap_or(false);
        let now = ListedRun::of(&folder);
        let before = std::mem::replace(&mut *lock(&self.listed), now.clone());
        changed || now.state != before.state
    }
}

impl ListedRun {
    fn of(folder: &ReportRun) -> Self {
        let steps = &folder.steps;
        let last = |values: &[f64]| values.last().copied().filter(|value| value.is_finite());
        ListedRun {
            name: folder.name.clone(),
            state: folder.state(),
            step: last(&steps.step),
            loss: last(&steps.loss),
            tokens_per_s: last(&steps.tokens_per_s),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
