//! Data that breaks during a run: the completed steps are saved, and the run continues once the data is repaired.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use serde_json::Value;

use crate::resume::{checkpoints, numbers, signal, start, stderr, wait_for_steps};
use crate::support::{folder, json_lines, kintsugi, stdout, tiny};

/// Eight ranks on token files, for more than an epoch. Evaluations read the last tenth.
const OF_TEXT: [&str; 4] = ["model.vocab=257", "data.source=text", "data.split=0.1", "run.steps=100"];
const ENDLESS: [&str; 1] = ["run.steps=1000000"];

/// A folder with token files, of two bytes a token.
fn with_tokens(name: &str) -> (PathBuf, PathBuf) {
    let folder = folder(name);
    fs::write(folder.join("text.txt"), "All the fish swim in the sea. ".repeat(200)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "text", "--tokenizer", "bytes"]));
    let tokens = folder.join("text.bin");
    (folder, tokens)
}

/// Checks that the last step of an ended run is saved. Returns the number of its steps.
fn saved_steps(folder: &Path) -> usize {
    let steps = json_lines(&folder.join("out/metrics.jsonl")).len();
    assert_eq!(checkpoints(folder).last(), Some(&format!("step-{steps:08}")));
    let summary = summary(folder);
    assert_eq!((&summary["steps"], &summary["stopped"]), (&steps.into(), &true.into()));
    steps
}

fn summary(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("out/summary.json")).unwrap()).unwrap()
}

fn endless(folder: &Path) -> Child {
    let mut run = start(folder, &["train"], &[&OF_TEXT[..], &ENDLESS].concat());
    wait_for_steps(&mut run, folder, 3);
    run
}

#[test]
fn a_bad_token_ends_a_run_between_steps_and_a_resume_is_the_run_without_it() {
    let [(whole, _), (broken, tokens)] = ["data-whole", "data-broken"].map(with_tokens);
    stdout(&tiny(&whole, &["train"], &OF_TEXT));

    let file = OpenOptions::new().read(true).write(true).open(&tokens).unwrap();
    let (mut good, place) = ([0; 2], 2 * 1000);
    file.read_exact_at(&mut good, place).unwrap();
    file.write_all_at(&[0xFF, 0xFF], place).unwrap();
    let output = tiny(&broken, &["train"], &OF_TEXT);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let steps = saved_steps(&broken);
    assert!((1..100).contains(&steps), "{steps} steps: use another place");
    let said = stderr(&output);
    let error = format!(
        "error: training ended after step {steps} because of its data: text.bin: found token 65535 at place 1000"
    );
    assert!(said.lines().last().is_some_and(|line| line.starts_with(&error)), "{said}");

    // Resuming fails in the same way, at once, without losing anything.
    let output = tiny(&broken, &["train", "--resume"], &OF_TEXT);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("text.bin: found token 65535 at place 1000"), "{output:?}");
    assert_eq!(checkpoints(&broken).last(), Some(&format!("step-{steps:08}")));

    file.write_all_at(&good, place).unwrap();
    stdout(&tiny(&broken, &["train", "--resume"], &OF_TEXT));
    assert_eq!(numbers(&broken), numbers(&whole), "the run is not the one whose data was whole");
}

#[test]
fn a_file_that_is_truncated_under_a_run_loses_nothing() {
    let (folder, tokens) = with_tokens("data-truncated");
    let run = endless(&folder);
    OpenOptions::new().write(true).open(tokens).unwrap().set_len(6).unwrap();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(saved_steps(&folder) >= 3);
    let said = stderr(&output);
    assert!(said.contains("because of its data: text.bin: found the end of the file"), "{said}");
}

#[test]
fn an_evaluation_does_not_fail_for_data_that_breaks_during_the_run() {
    let (folder, tokens) = with_tokens("data-validation");
    let mut run = endless(&folder);
    let file = OpenOptions::new().write(true).open(&tokens).unwrap();
    let bytes = fs::metadata(&tokens).unwrap().len();
    let last_twentieth = bytes / 20 / 2 * 2;
    file.write_all_at(&vec![0xFF; last_twentieth as usize], bytes - last_twentieth).unwrap();
    let steps = fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap().lines().count();
    wait_for_steps(&mut run, &folder, steps + 10);
    signal(&run, "-TERM");
    assert!(run.wait().unwrap().success());
    let lines = json_lines(&folder.join("out/metrics.jsonl"));
    let losses: Vec<_> = lines.iter().filter_map(|line| line["validation_loss"].as_f64()).collect();
    assert!(losses.len() >= steps / 2 + 4 && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    saved_steps(&folder);
}
