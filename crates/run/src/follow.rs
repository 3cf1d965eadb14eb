//! The lines of `metrics.jsonl` as text, as they are written: for those who pass them on.

use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Deserialize;

use crate::FolderPath;
use crate::files::METRICS;

/// The metrics of a run, read as they grow. Every step is given once: if a run resumes, the steps that run again are left out.
#[derive(Debug)]
pub struct MetricsFollower {
    folder: FolderPath,
    inode: u64,
    offset: u64,
    /// The last step that was given.
    last: u64,
}

/// The most bytes that are read at once.
const BLOCK: u64 = 16 << 20;

#[derive(Deserialize)]
struct StepOfLine {
    step: u64,
}

impl MetricsFollower {
    /// The metrics of the run in a folder, from the first line on.
    pub fn new(run: &Path) -> Self {
        MetricsFollower { folder: FolderPath::new(run), inode: 0, offset: 0, last: 0 }
    }

    /// The whole lines that were added since the last call, without those that cannot be read. None if there is no file yet.
    pub fn lines(&mut self) -> io::Result<Vec<String>> {
        let (mut file, found) = match self.folder.open().and_then(|folder| folder.file(METRICS)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        // A run that resumes replaces the file.
        if found.ino() != self.inode || found.len() < self.offset {
            (self.inode, self.offset) = (found.ino(), 0);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut lines = Vec::new();
        loop {
            let mut text = Vec::new();
            (&mut file).take(BLOCK).read_to_end(&mut text)?;
            let Some(end) = text.iter().rposition(|&byte| byte == b'\n') else { return Ok(lines) };
            self.offset += end as u64 + 1;
            file.seek(SeekFrom::Start(self.offset))?;
            for line in text[..end].split(|&byte| byte == b'\n') {
                let step = serde_json::from_slice::<StepOfLine>(line).map(|line| line.step);
                let Ok(step) = step else { continue };
                if step > self.last {
                    self.last = step;
                    lines.push(String::from_utf8_lossy(line).into_owned());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    #[test]
    fn every_step_is_given_once() {
        let folder = std::env::temp_dir().join(format!("kintsugi-follow-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let mut follower = MetricsFollower::new(&folder);
        assert_eq!(follower.lines().expect("no file"), [""; 0]);
        let append = |text: &str| {
            let file = fs::OpenOptions::new().append(true).create(true).open(folder.join(METRICS));
            file.and_then(|mut file| file.write_all(text.as_bytes())).expect("it is written");
        };
        append("{\"step\":1,\"loss\":2}\nnot a line\n{\"step\":2}\n{\"st");
        assert_eq!(follower.lines().expect("a file"), ["{\"step\":1,\"loss\":2}", "{\"step\":2}"]);
        append("ep\":3}\n");
        assert_eq!(follower.lines().expect("a file"), ["{\"step\":3}"]);
        assert_eq!(follower.lines().expect("a file"), [""; 0]);
        // A run that resumes from step 2 writes the file anew.
        fs::write(folder.join("new"), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n")
            .expect("a file");
        fs::rename(folder.join("new"), folder.join(METRICS)).expect("it is replaced");
        assert_eq!(follower.lines().expect("a file"), ["{\"step\":4}"]);
        fs::remove_dir_all(&folder).ok();
    }
}
