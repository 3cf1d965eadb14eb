//! A run on a page: its folder, and the measured trace of a step.

use std::io;
use std::ops::Deref;
use std::path::Path;

use kintsugi_draw::Trace;
use kintsugi_run::{FolderPath, MAX_TRACE, RunFolder};
use kintsugi_spec::input;

/// A run on a page: what was read of its folder, and the measured trace of a step.
#[derive(Debug)]
pub struct ReportRun {
    pub(crate) folder: RunFolder,
    /// The measured trace of a step, if there is one.
    pub trace: Option<Trace>,
}

impl Deref for ReportRun {
    type Target = RunFolder;

    fn deref(&self) -> &RunFolder {
        &self.folder
    }
}

impl ReportRun {
    /// A run that nothing was read of yet.
    pub(crate) fn at(path: FolderPath, name: String) -> Self {
        ReportRun { folder: RunFolder::at(path, name), trace: None }
    }

    /// Opens a run and reads its files; `trace` is a trace elsewhere.
    pub fn open(path: &Path, name: String, trace: Option<&Path>) -> io::Result<Self> {
        let mut run = ReportRun::at(FolderPath::new(path), name);
        run.update()?;
        if let Some(trace) = trace {
            run.trace = Some(parse_trace(&input::text(trace, MAX_TRACE)?)?);
        }
        Ok(run)
    }

    /// Reads files that have changed since the last call. Returns whether any has.
    pub fn update(&mut self) -> io::Result<bool> {
        let changed = self.folder.update()?;
        let Some(text) = self.folder.new_trace()? else { return Ok(changed) };
        self.trace = text.and_then(|text| parse_trace(&text)).ok();
        Ok(true)
    }
}

/// The trace in a file that `train --trace` has written.
fn parse_trace(text: &str) -> io::Result<Trace> {
    let other = || {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "it is not a trace that kintsugi train --trace has written",
        )
    };
    Trace::from_chrome(text).ok_or_else(other)
}
