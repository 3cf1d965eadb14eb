//! A stderr that is full, closed or without a reader changes neither the effect of a command nor its exit code.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use crate::support::{TINY, command, folder, stdout, tiny};

/// Runs the binary with a stderr that cannot be written.
fn unread(folder: &Path, arguments: &[&str]) -> [(&'static str, ExitStatus); 3] {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let without_reader = || Stdio::from(std::io::pipe().unwrap().1);
    let run =
        |stderr: Stdio| command(folder, arguments).stdout(Stdio::null()).stderr(stderr).status().unwrap();
    let binary = command(folder, arguments);
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$@\" 2>&-", "sh"]).arg(binary.get_program()).args(binary.get_args());
    let closed = shell.current_dir(folder).stdout(Stdio::null()).status().unwrap();
    [("full", run(full())), ("without a reader", run(without_reader())), ("closed", closed)]
}

#[test]
fn a_mistake_is_still_a_mistake() {
    let folder = folder("streams-mistake");
    for arguments in
        [&["plan", "absent.toml"][..], &["plan", "--set", "parallel.tp=3"], &["trian"], &["plan", "--nope"]]
    {
        for (stderr, status) in unread(&folder, arguments) {
            assert_eq!(status.code(), Some(2), "{arguments:?} with a stderr that is {stderr}");
        }
    }
}

#[test]
fn a_run_resumes_though_nobody_reads_its_warnings() {
    let folder = folder("streams-resume");
    stdout(&tiny(&folder, &["train"], &["run.checkpoint_every=2", "run.keep=9"]));
    let manifest = folder.join("out/checkpoints/step-00000004/manifest.json");
    fs::write(&manifest, "{").unwrap();
    let settings: Vec<&str> =
        TINY.iter().chain(&["run.keep=0"]).flat_map(|setting| ["--set", setting]).collect();
    let from = |json: &[&'static str]| [&["train", "--resume=out"], json, &settings[..]].concat();
    for arguments in [from(&[]), from(&["--json", "--set", "run.out=other"])] {
        for (stderr, status) in unread(&folder, &arguments) {
            assert_eq!(status.code(), Some(0), "with a stderr that is {stderr}");
        }
    }
}
