//! Signals that do not come from a user: a closed terminal, and a process that is stopped for longer than a rank waits
//! for another.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::resume::{checkpoints, signal, start, wait_for_steps};
use crate::support::{TINY, command, folder, json_lines};

const ENDLESS: [&str; 2] = ["run.steps=1000000", "run.eval_every=0"];

/// Waits for a run that was asked to stop, and checks that its last step is saved.
fn assert_saved(mut run: Child, folder: &Path) {
    let status = run.wait().unwrap();
    assert!(status.success(), "{status}");
    let steps = json_lines(&folder.join("out/metrics.jsonl")).len();
    assert_eq!(checkpoints(folder), [format!("step-{steps:08}")]);
    assert!(folder.join("out/summary.json").exists());
}

#[test]
fn a_run_whose_terminal_is_closed_is_saved() {
    let folder = folder("signals-hangup");
    let mut run = start(&folder, &["train"], &ENDLESS);
    wait_for_steps(&mut run, &folder, 2);
    // The shell sends one and the kernel another; then the system may end the session.
    for name in ["-HUP", "-HUP", "-TERM"] {
        signal(&run, name);
    }
    assert_saved(run, &folder);
}

#[test]
fn under_nohup_a_run_goes_on_when_its_terminal_is_closed() {
    let folder = folder("signals-nohup");
    let settings = TINY.iter().chain(&ENDLESS).flat_map(|setting| ["--set", setting]);
    let binary = command(&folder, &["train"].into_iter().chain(settings).collect::<Vec<_>>());
    let mut nohup = Command::new("nohup");
    nohup.arg(binary.get_program()).args(binary.get_args()).current_dir(&folder);
    let mut run = nohup.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_steps(&mut run, &folder, 2);
    signal(&run, "-HUP");
    let steps = fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap().lines().count();
    wait_for_steps(&mut run, &folder, steps + 20);
    signal(&run, "-TERM");
    assert_saved(run, &folder);
}

#[test]
fn stopped_time_does_not_count_for_the_timeout() {
    let folder = folder("signals-stop");
    let settings = [&ENDLESS[..], &["run.communication_timeout=3"]].concat();
    let mut run = start(&folder, &["train"], &settings);
    wait_for_steps(&mut run, &folder, 2);
    signal(&run, "-STOP");
    sleep(Duration::from_secs(5));
    let steps = fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap().lines().count();
    signal(&run, "-CONT");
    wait_for_steps(&mut run, &folder, steps + 20);
    signal(&run, "-TERM");
    assert_saved(run, &folder);
}
