//! Where text goes: to stdout, and under `--json` everything that is for people to stderr.

use std::io::{ErrorKind, Write};

use kintsugi_comm::mpi::launched;
use serde::Serialize;

use crate::failure::Failure;

/// The output of a command.
#[derive(Clone, Copy)]
pub struct Output {
    /// Whether stdout is kept for one JSON document.
    pub json: bool,
}

impl Output {
    /// Text for people. Under `--json` it is lost where stderr does not take it: the result is on stdout.
    pub fn text(self, text: &str) -> Result<(), Failure> {
        if self.json {
            std::io::stderr().write_all(text.as_bytes()).ok();
            return Ok(());
        }
        stdout(text)
    }

    /// The result as JSON, where it was asked for.
    pub fn result(self, value: &impl Serialize) -> Result<(), Failure> {
        if self.json { stdout(&json(value)) } else { Ok(()) }
    }
}

/// A result as JSON text.
pub fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("results have string keys") + "\n"
}

/// Writes a line to stderr, if it takes it: neither a command nor its exit code depends on whether anybody reads this.
///
/// Of several processes, those other than that of rank 0 say who they are.
pub fn stderr(line: &str) {
    match launched().filter(|launched| launched.rank > 0) {
        Some(launched) => writeln!(std::io::stderr(), "[rank {}] {line}", launched.rank).ok(),
        None => writeln!(std::io::stderr(), "{line}").ok(),
    };
}

/// Writes to stdout. A reader that has gone, as in `kintsugi plan | head`, is no error.
pub fn stdout(text: &str) -> Result<(), Failure> {
    write(std::io::stdout(), text)
}

fn write(mut to: impl Write, text: &str) -> Result<(), Failure> {
    match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Run(format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}
