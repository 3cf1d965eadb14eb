//! `launch --restarts --min-ranks`: a run goes on with fewer ranks when some are lost for good.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use kintsugi_checkpoint::CheckpointFolder;
use serde_json::Value;

use crate::stalls::{OPEN_MPI, eventually, finish, has, processes, signal};
use crate::support::{TINY, command, folder, json_lines, kintsugi, stdout};

/// A launcher that can start no more than three ranks once the file `lost` is there, as if a node of its host file were gone.
const LAUNCHER: &str = "#!/bin/sh
if [ -e lost ] && [ \"$1 $2\" = '-n 4' ]; then
    echo 'error: there are not enough slots' >&2
    exit 1
fi
exec mpirun.openmpi \"$@\"
";

#[test]
fn a_run_goes_on_with_the_ranks_that_are_left() {
    if !has(OPEN_MPI) {
        return;
    }
    let folder = folder("fewer-ranks");
    fs::write(folder.join("launcher"), LAUNCHER).expect("a file");
    fs::set_permissions(folder.join("launcher"), fs::Permissions::from_mode(0o755)).expect("it is ours");
    let more = [
        "parallel.tp=2",
        "parallel.pp=1",
        "parallel.dp=2",
        "run.steps=150",
        "run.eval_every=0",
        "run.checkpoint_every=10",
        "run.keep=99",
    ];
    let settings: Vec<&str> = TINY.iter().chain(&more).flat_map(|setting| ["--set", *setting]).collect();
    let launch =
        ["launch", "--mpirun", "./launcher", "--ranks", "4", "--restarts", "3", "--min-ranks", "2", "train"];
    let mut launcher = command(&folder, &[&launch[..], &settings].concat());
    let process = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary");
    let lines = || fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap_or_default().lines().count();
    eventually("no step is trained", || lines() > 25);
    fs::write(folder.join("lost"), "").expect("a file");
    signal("KILL", processes(&folder)[&3]);
    let (code, text) = finish(process);
    assert_eq!(code, Some(0), "{text}");
    let chosen = "note     3 ranks are left: the run goes on with 2, ";
    assert!(text.contains(chosen) && text.contains("; batch.global stays 4"), "{text}");
    assert!(text.contains("restart 2 of 3") && !text.contains("restart 3 of 3"), "{text}");
    // By hand on that layout, bit for bit.
    let restarts = json_lines(&folder.join("out/restarts.jsonl"));
    let [restart] = &restarts[..] else { panic!("{restarts:?}") };
    let step = restart["resumed_after"].as_u64().expect("a step");
    let from = CheckpointFolder::of_run(&folder.join("out")).of_step(step);
    let resume = format!("--resume={}", from.display());
    stdout(&kintsugi(&folder, &["train", "out/layout.toml", &resume, "--set", "run.out=by-hand"]));
    stdout(&kintsugi(&folder, &[&["train"][..], &settings, &["--set", "run.out=undisturbed"]].concat()));
    let losses = |run: &str| -> Vec<[Value; 3]> {
        let lines = json_lines(&folder.join(run).join("metrics.jsonl"));
        lines.iter().map(|line| ["step", "loss", "grad_norm"].map(|key| line[key].clone())).collect()
    };
    let (found, undisturbed) = (losses("out"), losses("undisturbed"));
    assert_eq!((found.len(), found[step as usize..].to_vec()), (150, losses("by-hand")));
    let loss = |line: &[Value; 3]| line[1].as_f64().expect("a loss");
    for (found, undisturbed) in found.iter().zip(&undisturbed).take(step as usize + 5) {
        assert!(
            (loss(found) - loss(undisturbed)).abs() <= 1e-5 * loss(undisturbed),
            "{found:?} {undisturbed:?}"
        );
    }
}

#[test]
fn fewer_ranks_need_restarts() {
    let folder = folder("fewer-ranks-refused");
    let refused = |launch: &[&str]| {
        let output = kintsugi(&folder, &[&["launch", "--ranks", "2"], launch, &["train"]].concat());
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let alone = refused(&["--min-ranks", "1"]);
    assert_eq!(alone, "error: --min-ranks needs --restarts: only a restart can go on with fewer ranks\n");
    let many = refused(&["--restarts", "1", "--min-ranks", "3"]);
    assert_eq!(many, "error: --min-ranks 3 is more than --ranks 2\n");
}
