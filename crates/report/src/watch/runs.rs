//! The runs of a folder, read as they grow. All clients share what was read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::run::{RunFolder, RunState, is_run};
use crate::runs::{PredictedRun, report};
use crate::{Context, Detail, Report};

/// Folders between the one that is watched and a run.
const DEPTH: usize = 3;
/// Largest number of runs in the list.
const MOST_RUNS: usize = 1000;
/// Largest number of runs on one page.
const MOST_SHOWN: usize = 8;
/// Files are looked at no more often than this, however many clients ask.
const OFTEN: Duration = Duration::from_millis(900);

/// A run in the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ListedRun {
    name: String,
    state: RunState,
    step: Option<f64>,
    loss: Option<f64>,
    tokens_per_s: Option<f64>,
}

/// The runs of a folder.
pub struct Runs {
    folder: PathBuf,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    runs: BTreeMap<String, WatchedRun>,
    looked: Option<Instant>,
}

struct WatchedRun {
    folder: RunFolder,
    predicted: Option<PredictedRun>,
    /// The configuration that `predicted` was computed from.
    config: Option<String>,
    /// Grows with every change.
    version: u64,
    state: RunState,
}

/// The runs in a folder, with the names that they have in the list.
pub fn find(folder: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    if is_run(folder) {
        let name = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name =
            name.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned());
        found.push((name, folder.to_owned()));
        return found;
    }
    search(folder, "", DEPTH, &mut found);
    found
}

fn search(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<(String, PathBuf)>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut inside: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    inside.sort();
    for path in inside {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let name = format!("{prefix}{name}");
        if found.len() >= MOST_RUNS {
            return;
        }
        if is_run(&path) {
            found.push((name, path));
        } else if depth > 1 {
            search(&path, &format!("{name}/"), depth - 1, found);
        }
    }
}

impl Runs {
    /// The runs of a folder. Their files are not read yet.
    pub fn new(folder: &Path) -> Self {
        Runs { folder: folder.to_owned(), known: Mutex::default() }
    }

    /// What is known, after a look at the files if the last one was a while ago.
    fn known(&self) -> MutexGuard<'_, Known> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.looked.is_none_or(|looked| looked.elapsed() >= OFTEN) {
            let found = find(&self.folder);
            known.runs.retain(|name, _| found.iter().any(|(found, _)| found == name));
            for (name, path) in found {
                let run = known.runs.entry(name.clone()).or_insert_with(|| WatchedRun::new(&path, name));
                run.update();
            }
            known.looked = Some(Instant::now());
        }
        known
    }

    /// The list, those that run first.
    pub fn list(&self) -> Vec<ListedRun> {
        let known = self.known();
        let mut list: Vec<ListedRun> = known.runs.values().map(WatchedRun::listed).collect();
        list.sort_by_key(|run| run.state != RunState::Running);
        list
    }

    /// The report of the chosen runs, or of the first in the list, and its version; `None` if the client already has this version.
    pub fn report(
        &self,
        chosen: &[String],
        version: Option<u64>,
        context: &Context,
    ) -> Option<(u64, Report)> {
        let first = || self.list().first().map(|run| vec![run.name.clone()]).unwrap_or_default();
        let chosen = if chosen.is_empty() { first() } else { chosen.to_vec() };
        let mut known = self.known();
        let mut now = 1;
        for run in known.runs.iter_mut().filter(|(name, _)| chosen.contains(name)).map(|(_, run)| run) {
            now += run.version;
            run.predict(context);
        }
        if version == Some(now) {
            return None;
        }
        let shown = chosen.iter().filter_map(|name| known.runs.get(name)).take(MOST_SHOWN);
        let shown: Vec<_> = shown.map(|run| (&run.folder, run.predicted.as_ref())).collect();
        if shown.is_empty() {
            let none = Report { title: "No run yet".to_owned(), ..Report::default() };
            return Some((now, none));
        }
        Some((now, report(&shown, Detail::Live)))
    }
}

impl WatchedRun {
    fn new(path: &Path, name: String) -> Self {
        let folder = RunFolder::new(path, name);
        WatchedRun { folder, predicted: None, config: None, version: 0, state: RunState::Running }
    }

    fn update(&mut self) {
        // A file that cannot be read now may be there at the next look.
        let changed = self.folder.update().unwrap_or(false);
        let state = self.folder.state();
        self.version += u64::from(changed || state != self.state);
        self.state = state;
    }

    /// Predicts the plan, once for each configuration.
    fn predict(&mut self, context: &Context) {
        if self.config.as_ref() != Some(&self.folder.config) {
            self.predicted = self.folder.plan.as_ref().map(|plan| PredictedRun::of(plan, context));
            self.config = Some(self.folder.config.clone());
        }
    }

    fn listed(&self) -> ListedRun {
        let steps = &self.folder.steps;
        let last = |values: &[f64]| values.last().copied().filter(|value| value.is_finite());
        ListedRun {
            name: self.folder.name.clone(),
            state: self.state,
            step: last(&steps.step),
            loss: last(&steps.loss),
            tokens_per_s: last(&steps.tokens_per_s),
        }
    }
}
