//! `run.on_spike = "rollback"`: text of another kind makes the loss jump, and the run goes back and skips it.

use std::fs;
use std::path::Path;

use kintsugi_checkpoint::CheckpointFolder;
use kintsugi_run::{Rollback, read_rollbacks};
use serde_json::Value;

use crate::stalls::{OPEN_MPI, has};
use crate::support::{TINY, folder, json_lines, kintsugi, stdout};

const SETTINGS: [&str; 13] = [
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=2",
    "model.vocab=257",
    "data.source=text",
    "optimizer.lr=3e-3",
    "run.steps=90",
    "run.eval_every=0",
    "run.checkpoint_every=5",
    "run.keep=99",
    "run.on_spike=rollback",
    "run.spike_window=8",
    "run.log_every=1",
];

/// Text that is easy to learn, and a line of bytes that are nowhere else.
fn prepare(folder: &Path) {
    let line = "the cat sat on the mat and looked at the moon.\n";
    let strange: String =
        (0..40).map(|number| char::from_u32(0x4e00 + 37 * number).expect("a letter")).collect();
    fs::write(folder.join("text.txt"), format!("{}{strange}\n{}", line.repeat(90), line.repeat(90)))
        .expect("a file");
    stdout(&kintsugi(folder, &["prepare", "text.txt", "--out", "text", "--tokenizer", "bytes"]));
}

fn train(folder: &Path, command: &[&str], more: &[&str]) -> String {
    let settings = TINY.iter().chain(&SETTINGS).chain(more).flat_map(|setting| ["--set", *setting]);
    let output = kintsugi(folder, &command.iter().copied().chain(settings).collect::<Vec<_>>());
    stdout(&output);
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn losses(out: &Path) -> Vec<[Value; 4]> {
    let lines = json_lines(&out.join("metrics.jsonl"));
    lines.iter().map(|line| ["step", "loss", "grad_norm", "tokens"].map(|key| line[key].clone())).collect()
}

fn timeless(out: &Path) -> Vec<Rollback> {
    read_rollbacks(out).into_iter().map(|rollback| Rollback { time: 0.0, ..rollback }).collect()
}

#[test]
fn a_run_goes_back_and_skips_a_batch_on_threads_and_on_processes() {
    let folder = folder("spikes");
    prepare(&folder);
    let errors = train(&folder, &["train"], &[]);
    let out = folder.join("out");
    let (expected, rollbacks) = (losses(&out), timeless(&out));
    let [first, ..] = &rollbacks[..] else { panic!("no spike: {errors}") };
    assert!(first.resumed_after > 0 && errors.contains(&format!("warning: {first}")), "{errors}");
    let steps: Vec<u64> = expected.iter().filter_map(|line| line[0].as_u64()).collect();
    assert_eq!(steps, (1..=90).collect::<Vec<_>>(), "the lines of steps that run again are replaced");
    let summary = fs::read_to_string(out.join("summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    assert_eq!(summary["rollbacks"]["rollbacks"], rollbacks.len(), "{summary}");
    assert!(stdout(&kintsugi(&folder, &["status", "out"])).contains("went back "));
    if has(OPEN_MPI) {
        let launch = ["launch", "--mpirun", OPEN_MPI.1, "--ranks", "2", "train"];
        train(&folder, &launch, &["run.out=processes"]);
        assert_eq!(losses(&folder.join("processes")), expected);
        assert_eq!(timeless(&folder.join("processes")), rollbacks);
    }
    // From before the rollback, as after a failure: the run's folder says what is skipped.
    let from = CheckpointFolder::of_run(&out).of_step(first.resumed_after);
    let errors = train(&folder, &["train", &format!("--resume={}", from.display())], &[]);
    assert_eq!((losses(&out), timeless(&out)), (expected, rollbacks), "{errors}");
}
