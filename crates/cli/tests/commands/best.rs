//! The checkpoints with the lowest validation losses are kept, and found by `RUN/best`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::resume::checkpoints;
use crate::support::{folder, json_lines, kintsugi, stdout, tiny};

/// A rate so high that the validation loss goes up and down.
const UNSTEADY: [&str; 5] = [
    "optimizer.lr=0.3",
    "optimizer.schedule=constant",
    "optimizer.warmup=0",
    "run.keep=1",
    "run.keep_best=2",
];

/// Steps and validation losses of a run, best first.
fn validation_losses(folder: &Path) -> Vec<(f64, u64)> {
    let evaluated = |line: &Value| Some((line["validation_loss"].as_f64()?, line["step"].as_u64()?));
    let mut losses: Vec<(f64, u64)> =
        json_lines(&folder.join("out/metrics.jsonl")).iter().filter_map(evaluated).collect();
    losses.sort_by(|a, b| a.partial_cmp(b).unwrap());
    losses
}

/// The names of the newest checkpoint and of the two best of a run.
fn expected(folder: &Path, newest: u64) -> Vec<String> {
    let mut steps: Vec<u64> = validation_losses(folder)[..2].iter().map(|(_, step)| *step).collect();
    steps.push(newest);
    steps.sort_unstable();
    steps.dedup();
    steps.iter().map(|step| format!("step-{step:08}")).collect()
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&kintsugi(folder, &[arguments, &["--json"]].concat()))).unwrap()
}

#[test]
fn the_best_checkpoints_of_a_run_are_kept_and_found() {
    let folder = folder("best");
    let settings = [&UNSTEADY[..], &["run.eval_every=3", "run.checkpoint_every=4"]].concat();
    let train = |arguments: &[&str], steps: &str| {
        stdout(&tiny(&folder, &[&["train"], arguments].concat(), &[&settings[..], &[steps]].concat()))
    };
    train(&[], "run.steps=16");
    assert_eq!(validation_losses(&folder).len(), 6, "every third step and the last");
    assert_eq!(checkpoints(&folder), expected(&folder, 16));
    train(&["--resume"], "run.steps=32");
    let losses = validation_losses(&folder);
    assert_eq!(losses.len(), 12);
    assert_eq!(checkpoints(&folder), expected(&folder, 32));

    let (loss, best) = losses[0];
    assert_ne!(best, 32, "the test is about an earlier one");
    let evaluated = |checkpoint: &str| json(&folder, &["eval", checkpoint])["loss"].clone();
    assert_eq!(evaluated("out/best"), evaluated(&format!("out/checkpoints/step-{best:08}")));
    assert!((evaluated("out/best").as_f64().unwrap() - loss).abs() < 1e-4 * loss);
    stdout(&kintsugi(&folder, &["convert", "out/best", "exported"]));
    stdout(&kintsugi(&folder, &["generate", "out/checkpoints/best", "--prompt", "the", "--tokens", "2"]));
    let output = tiny(&folder, &["train"], &["model.init=out/best"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is inside run.out"), "{output:?}");
    let said = train(&["--resume=out/best"], "run.steps=33");
    assert!(
        said.contains(&format!("resumes after step {best} from out/checkpoints/step-{best:08}")),
        "{said}"
    );
}

#[test]
fn a_checkpoint_has_the_validation_loss_of_its_own_step() {
    let folder = folder("best-losses");
    let settings = ["run.steps=5", "run.eval_every=2", "run.checkpoint_every=1", "run.keep=9"];
    stdout(&tiny(&folder, &["train"], &settings));
    for line in json_lines(&folder.join("out/metrics.jsonl")) {
        let path = format!("out/checkpoints/step-{:08}/manifest.json", line["step"].as_u64().unwrap());
        let manifest: Value = serde_json::from_slice(&fs::read(folder.join(path)).unwrap()).unwrap();
        assert_eq!(
            manifest["manifest"]["progress"].get("validation_loss"),
            line.get("validation_loss"),
            "{line}"
        );
    }
}
