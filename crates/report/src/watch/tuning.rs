//! The tuning in the folder that is watched, read as it grows.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use kintsugi_run::FolderPath;
use kintsugi_tune::trials::{TRIALS, parse_trials};

use crate::Section;
use crate::tuning::sections;

/// Largest size of a file of trials.
const MAX_BYTES: u64 = 64 << 20;

/// The trials of a folder.
pub struct WatchedTuning {
    folder: FolderPath,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Size and time of the file when it was last read.
    stamp: Option<(u64, Option<SystemTime>)>,
    /// How many trials were read.
    trials: usize,
    sections: Vec<Section>,
}

impl WatchedTuning {
    /// The trials of a folder, if there will be any.
    pub fn new(folder: &Path) -> Self {
        WatchedTuning { folder: FolderPath::new(folder), state: Mutex::default() }
    }

    /// Reads the file if it has changed.
    pub fn update(&self) {
        let Ok(open) = self.folder.open() else { return };
        let Ok((_, metadata)) = open.file(TRIALS) else { return };
        let stamp = Some((metadata.len(), metadata.modified().ok()));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.stamp == stamp {
            return;
        }
        // A file that cannot be read now may be whole at the next look.
        let Ok(text) = open.text(TRIALS, MAX_BYTES) else { return };
        let (records, _) = parse_trials(text.as_bytes());
        let sections = if records.len() == state.trials {
            std::mem::take(&mut state.sections)
        } else {
            sections(&records)
        };
        *state = State { stamp, trials: records.len(), sections };
    }

    /// The number of trials, and the sections about them.
    pub fn sections(&self) -> (usize, Vec<Section>) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.trials, state.sections.clone())
    }
}
