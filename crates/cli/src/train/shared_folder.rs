//! Checks before the first step that all processes see and can write the folder of the run.
//!
//! Every process writes the shards of its ranks into `run.out`. If that is another disk for some of them, or cannot be written there,
//! a checkpoint would fail hours later. So the process of rank 0 writes a file with a random name, and every other process looks for
//! it and writes one of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_checkpoint::SHARED_FOLDER_DELAY;
use kintsugi_comm::Connection;
use kintsugi_plan::Run;
use kintsugi_spec::work;
use serde::{Deserialize, Serialize};

use crate::failure::{ErrorContext, Failure};
use crate::processes;

/// How often a process looks for the file.
const POLL: Duration = Duration::from_millis(100);

/// The file of rank 0: a name that no process has looked up before, since network file systems remember what was missing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FolderCheck {
    name: String,
    word: String,
}

impl FolderCheck {
    /// In the process of rank 0: writes the file. `None` if all ranks are in this process, or if nothing is saved.
    pub fn begin(out: &Path, connection: Connection, saves: bool) -> Result<Option<Self>, Failure> {
        if connection.processes().is_none() || !saves {
            return Ok(None);
        }
        let random =
            random().map_err(|error| Failure::run(ErrorContext::new("cannot read random bytes", error)))?;
        let check = FolderCheck { name: format!(".shared-{random:032x}"), word: format!("{:032x}", !random) };
        let path = out.join(&check.name);
        fs::write(&path, &check.word).map_err(|error| Failure::file("write", &path, error))?;
        Ok(Some(check))
    }

    /// In every process: looks for the file, and compares the answers of all. The process of rank 0 then removes it.
    pub fn compare(check: Option<&Self>, run: &Run, connection: Connection) -> Result<(), Failure> {
        let Some(check) = check else { return Ok(()) };
        let out = &run.out;
        let patience = SHARED_FOLDER_DELAY.min(Duration::from_secs(run.communication_timeout));
        let found = if connection.is_first() { Ok(()) } else { check.confirm(out, connection, patience) };
        let agreed = processes::agree_on(connection, found);
        if connection.is_first() {
            // If that fails, a small file stays.
            fs::remove_file(out.join(&check.name)).ok();
        }
        agreed
    }

    /// Looks for the file for as long as `patience`, and writes a file beside it.
    fn confirm(&self, out: &Path, connection: Connection, patience: Duration) -> Result<(), Failure> {
        let (path, begun) = (out.join(&self.name), Instant::now());
        while fs::read_to_string(&path).ok().as_deref() != Some(self.word.as_str()) {
            if begun.elapsed() > patience {
                return Err(Failure::mistake(format!(
                    "run.out = \"{}\" is not the folder that rank 0 has under this name: a file that rank 0 wrote there did not \
                     appear in {} s; set run.out to a folder on a file system that all nodes share, or run.keep = 0 to save nothing",
                    out.display(),
                    patience.as_secs()
                )));
            }
            // The others wait for this process, which waits for the file system.
            work::finish_piece();
            thread::sleep(POLL);
        }
        let own = self.own(out, connection);
        let written = fs::write(&own, &self.word).and_then(|()| fs::remove_file(&own));
        written.map_err(|error| {
            let context = format!("run.out = \"{}\" cannot be written", out.display());
            Failure::mistake(
                ErrorContext::new(context, error).advise("every process writes its shards there"),
            )
        })
    }

    /// The file of this process.
    fn own(&self, out: &Path, connection: Connection) -> PathBuf {
        let rank = connection.rank().unwrap_or(0);
        out.join(format!("{}-{rank}", self.name))
    }
}

fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}
