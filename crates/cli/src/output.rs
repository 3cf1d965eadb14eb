//! Where output goes: to stdout; with `--json`, text for people goes to stderr.

use std::io::{ErrorKind, Write};

use kintsugi_comm::mpi::launched;
use serde::Serialize;

use crate::failure::{ErrorContext, Failure};

/// The output of a command.
#[derive(Clone, Copy)]
pub struct Output {
    /// Whether stdout is reserved for one JSON document.
    pub json: bool,
}

impl Output {
    /// Prints text for people. With `--json` it goes to stderr, and errors there are ignored.
    pub fn text(self, text: &str) -> Result<(), Failure> {
        if self.json {
            std::io::stderr().write_all(text.as_bytes()).ok();
            return Ok(());
        }
        stdout(text)
    }

    /// Prints the result as JSON, if `--json` was given.
    pub fn result(self, value: &impl Serialize) -> Result<(), Failure> {
        if self.json { stdout(&json(value)) } else { Ok(()) }
    }
}

/// A result as JSON text.
pub fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("results have string keys") + "\n"
}

/// Writes a line to stderr and ignores errors, so that no command depends on whether stderr is read.
///
/// If there are several processes, those without rank 0 prefix the line with their rank.
pub fn stderr(line: &str) {
    let prefix =
        launched().filter(|launched| launched.rank > 0).map(|launched| format!("[rank {}] ", launched.rank));
    // In one write: a launcher that ends the job may pass on only what it has read so far.
    let line = format!("{}{line}\n", prefix.unwrap_or_default());
    std::io::stderr().write_all(line.as_bytes()).ok();
}

/// Writes to stdout. A closed pipe, as in `kintsugi plan | head`, is not an error.
pub fn stdout(text: &str) -> Result<(), Failure> {
    write(std::io::stdout(), text)
}

fn write(mut to: impl Write, text: &str) -> Result<(), Failure> {
    match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::run(ErrorContext::new("cannot write the output", error)))
        }
        _ => Ok(()),
    }
}
