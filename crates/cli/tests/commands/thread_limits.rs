//! With a limit on threads a command reports an error and ends; it neither hangs nor panics.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{available_parallelism, sleep};
use std::time::{Duration, Instant};

use crate::support::TINY;
use kintsugi_testing::{Need, skip};

/// A user that has no other processes: the limit counts all processes of a user, and none of root.
const USER: u32 = 61_234;

/// A folder of that user with a copy of the binary, since the build folder may not be accessible. It is removed with
/// this value.
struct Home(PathBuf);

impl Home {
    fn new() -> Home {
        let home = Home(std::env::temp_dir().join(format!("kintsugi-limits-{}", std::process::id())));
        fs::create_dir(&home.0).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_kintsugi"), home.0.join("kintsugi")).unwrap();
        fs::write(home.0.join("text.txt"), "All the fish swim in the sea. ".repeat(200)).unwrap();
        chown(&home.0, Some(USER), Some(USER)).unwrap();
        home
    }

    /// Runs a command with a limit on threads. Returns its exit code and its stderr, or `None` if no other user is
    /// available.
    fn run(&self, threads: usize, arguments: &[&str]) -> Option<(Option<i32>, String)> {
        let mut limited = Command::new("prlimit");
        limited.arg(format!("--nproc={threads}")).arg(self.0.join("kintsugi")).args(arguments);
        limited.current_dir(&self.0).uid(USER).gid(USER).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut run = match limited.spawn() {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return None,
            run => run.unwrap(),
        };
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = run.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > Duration::from_secs(60) {
                run.kill().unwrap();
                panic!("under a limit of {threads} threads {arguments:?} does not end");
            }
            sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        run.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        Some((status.code(), said))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
fn a_limit_on_threads_is_an_error_that_names_it() {
    let root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if !root {
        skip(Need::Root, "only root can become a user that has no other processes");
        return;
    }
    let home = Home::new();
    let settings = TINY.iter().flat_map(|setting| ["--set", setting]);
    let train: Vec<&str> = ["train"].into_iter().chain(settings).collect();
    let prepare = ["prepare", "text.txt", "--out", "text", "--tokenizer", "bytes"];
    // Every command has its first thread and the shared ones. Training adds a writer, a job and eight ranks.
    let cores = available_parallelism().unwrap().get();
    let shared = 1 + cores;
    let mut cases = vec![
        (&train[..], vec![1, 4, shared, shared + 1, shared + 2, shared + 5, shared + 9]),
        (&["plan"], vec![1]),
        (&prepare, vec![shared, shared + 1]),
    ];
    if cores > 1 {
        cases.push((&["calibrate", "--out", "profile.toml"], vec![shared]));
    }
    for (arguments, limits) in cases {
        for threads in limits {
            let Some((code, said)) = home.run(threads, arguments) else {
                skip(Need::Root, "no process of another user can be started here");
                return;
            };
            assert_eq!(code, Some(1), "{threads} threads, {arguments:?}: {said}");
            let error = said.lines().last().unwrap_or_default();
            assert!(
                error.starts_with("error: ")
                    && error.contains("cannot be started: ")
                    && error.contains("ulimit -u"),
                "{threads} threads, {arguments:?}: {said}"
            );
        }
    }
    let (_, said) = home.run(4, &train).unwrap();
    assert!(said.contains("(ulimit -u, which is 4;"), "{said}");
    // A failed run leaves nothing that affects the next one.
    let (code, said) = home.run(4096, &train).unwrap();
    assert_eq!(code, Some(0), "{said}");
    assert!(is_saved(&home.0), "{said}");
}

fn is_saved(folder: &Path) -> bool {
    folder.join("out/checkpoints/step-00000004/manifest.json").exists()
}
