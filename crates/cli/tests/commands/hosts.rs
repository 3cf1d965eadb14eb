//! Several hosts: network namespaces with addresses of their own, joined by a switch (`scripts/several-hosts`).

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use kintsugi_run::Verdict;
use kintsugi_testing::{Need, skip};
use serde_json::Value;

use crate::stalls::{OPEN_MPI, RANKS, finish, has, settings};
use crate::support::{folder, json_lines, kintsugi, stdout};

const STEPS: [&str; 3] = ["run.steps=200", "run.eval_every=0", "run.checkpoint_every=20"];

/// Host 3 is cut off, and connected again when that was noticed.
const CUT_OFF: &str = "\
\"$@\" >output 2>&1 &
until [ \"$(cat out/metrics.jsonl 2>/dev/null | wc -l)\" -gt 30 ]; do sleep 0.05; done
host cut 3
until grep -q '^verdict: ' output; do sleep 0.05; done
host join 3
wait $!
";

fn script() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/several-hosts").to_owned()
}

#[test]
fn a_host_that_is_cut_off_is_named_and_used_again_when_it_is_back() {
    if !has(OPEN_MPI) {
        return;
    }
    let folder = folder("hosts-cut");
    let network = folder.join("network");
    let inside = |hosts: &str| {
        let mut command = Command::new(script());
        command.arg(&network).arg(hosts).current_dir(&folder);
        command
    };
    let tried = inside("2").arg("true").output().expect("a shell");
    if !tried.status.success() {
        let reason = String::from_utf8_lossy(&tried.stderr).into_owned();
        return skip(Need::Root, format!("network namespaces cannot be made: {}", reason.trim()));
    }
    fs::remove_dir_all(&network).expect("it was made");
    let launch = ["launch", "--mpirun", "mpirun", "--ranks", "3", "--nodes", "3", "--restarts", "2", "train"];
    let settings = settings(&[&RANKS[..], &STEPS].concat());
    let mut command = inside("3");
    command
        .args(["bash", "-c", CUT_OFF, "bash", env!("CARGO_BIN_EXE_kintsugi")])
        .args(launch)
        .args(&settings);
    let (code, text) =
        finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a shell"));
    let output = fs::read_to_string(folder.join("output")).unwrap_or_default();
    assert_eq!(code, Some(0), "{text}{output}");
    let verdicts = Verdict::read_all(&folder.join("out"));
    let named: Vec<_> = verdicts.iter().map(|verdict| verdict.culprit).collect();
    assert_eq!(named, [Some(2)], "{verdicts:?} {output}");
    assert!(
        output.contains("error: rank 2 on h3 failed: its host h3 and h1 have not reached each other for "),
        "{output}"
    );
    let alone = folder.join("alone");
    fs::create_dir(&alone).expect("a folder for tests");
    stdout(&kintsugi(&alone, &[&["train"][..], &settings].concat()));
    assert_eq!(losses(&folder), losses(&alone));
}

fn losses(folder: &Path) -> Vec<[Value; 3]> {
    let lines = json_lines(&folder.join("out/metrics.jsonl"));
    lines.iter().map(|line| ["step", "loss", "grad_norm"].map(|key| line[key].clone())).collect()
}
