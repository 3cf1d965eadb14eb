//! Evaluation uses the same samples for every seed, layout and batch size.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{folder, json_lines, keys, kintsugi, stdout, tiny};

/// A folder with the token files `one` and `two`, and the initial weights `start` of a model for them.
fn started(name: &str) -> PathBuf {
    let folder = folder(name);
    for (name, words) in [("one", ["cat", "dog", "owl"]), ("two", ["13", "7", "101"])] {
        let line = |n: usize| format!("line {n}: {} and {}.\n", words[n % 3], words[n * n % 3]);
        fs::write(folder.join(format!("{name}.txt")), (0..300).map(line).collect::<String>()).unwrap();
        let input = format!("{name}.txt");
        stdout(&kintsugi(&folder, &["prepare", &input, "--out", name, "--tokenizer", "bytes"]));
    }
    stdout(&tiny(
        &folder,
        &["train"],
        &["model.vocab=257", "data.source=one", "run.steps=0", "run.out=start"],
    ));
    folder
}

/// Evaluates the initial weights in training: a step that changes nothing, and the evaluation after it.
fn validate(folder: &Path, settings: &[&str]) -> Value {
    let idle = [
        "model.init=start",
        "batch.sequence=16",
        "optimizer.lr=1e-30",
        "optimizer.min_lr=0",
        "optimizer.weight_decay=0",
        "run.steps=1",
        "run.eval_every=1",
        "data.split=0.2",
    ];
    let sets = idle.iter().chain(settings).flat_map(|set| ["--set", set]);
    stdout(&kintsugi(folder, &["train"].into_iter().chain(sets).collect::<Vec<_>>()));
    json_lines(&folder.join("out/metrics.jsonl")).remove(0)
}

fn eval(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&kintsugi(folder, &[&["eval"], arguments, &["--json"]].concat()))).unwrap()
}

fn close(one: &Value, other: &Value) {
    let (one, other) = (one.as_f64().unwrap(), other.as_f64().unwrap());
    assert!((one - other).abs() < 2e-6, "{one} and {other}");
}

#[test]
fn a_validation_loss_depends_on_neither_seed_nor_batch_nor_layout() {
    let folder = started("evaluation-order");
    let settings = ["data.source=one", "run.eval_tokens=100"];
    let one = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1"];
    let expected = validate(&folder, &[&settings[..], &one, &["batch.global=4", "batch.micro=1"]].concat());
    for other in [
        &["batch.global=4", "batch.micro=1", "run.seed=2"][..],
        &["batch.global=12", "batch.micro=3"],
        &["batch.global=8", "batch.micro=2", "parallel.dp=2", "run.seed=3"],
        &["batch.global=4", "batch.micro=1", "parallel.tp=2", "parallel.pp=2"],
    ] {
        let found = validate(&folder, &[&settings[..], &one, other].concat());
        close(&found["validation_loss"], &expected["validation_loss"]);
        assert!(found.get("validation_losses").is_none(), "there is one source");
    }
    // A hundred tokens are seven samples, and those are the first ones of the split.
    let found = eval(&folder, &["out", "--samples", "7"]);
    close(&found["loss"], &expected["validation_loss"]);
    for seed in ["run.seed=1", "run.seed=9"] {
        close(&eval(&folder, &["out", "--samples", "7", "--set", seed])["loss"], &found["loss"]);
        let train = ["start", "--split", "train", "--data", "one", "--samples", "3", "--set", seed];
        close(&eval(&folder, &train)["loss"], &eval(&folder, &train[..7])["loss"]);
    }
    // One sample more or less would change the mean.
    let six = eval(&folder, &["out", "--samples", "6"])["loss"].as_f64().unwrap();
    assert!((six - found["loss"].as_f64().unwrap()).abs() > 1e-6);
}

#[test]
fn every_source_of_a_blend_has_its_own_loss() {
    let folder = started("evaluation-blend");
    let blend = "data.source=[{ path = \"one\", weight = 3 }, { path = \"two\", weight = 1 }]";
    let metrics = validate(&folder, &[blend, "run.eval_tokens=1000000", "batch.global=8"]);
    let all = eval(&folder, &["out"]);
    close(&all["loss"], &metrics["validation_loss"]);
    let losses: Vec<f64> = ["one", "two"]
        .into_iter()
        .zip(all["sources"].as_array().unwrap())
        .map(|(name, source)| {
            assert!(source["source"].as_str().unwrap().ends_with(name), "{source}");
            close(&source["loss"], &metrics["validation_losses"][name]);
            let alone = ["start", "--data", name, "--split", "validation", "--set", "data.split=0.2"];
            let alone = eval(&folder, &alone);
            close(&source["loss"], &alone["loss"]);
            assert_eq!(source["tokens"], alone["tokens"]);
            source["loss"].as_f64().unwrap()
        })
        .collect();
    assert!((losses[0] - losses[1]).abs() > 1e-4, "the sources differ: {losses:?}");
    let mean = (3.0 * losses[0] + losses[1]) / 4.0;
    assert!((mean - all["loss"].as_f64().unwrap()).abs() < 1e-9, "the mean is by weight");
    // 48 samples are 36 and 12. `--samples` is the total number.
    let part = validate(&folder, &[blend, "run.eval_tokens=768", "batch.global=8"]);
    let found = eval(&folder, &["out", "--samples", "48"]);
    close(&found["loss"], &part["validation_loss"]);
    assert_eq!(found["tokens"], 48 * 16);
    assert_eq!(found["sources"][0]["tokens"], 36 * 16);
    let text = stdout(&kintsugi(&folder, &["eval", "out"]));
    assert!(text.contains(&format!("one  {:.4} in ", losses[0])), "{text}");
}

#[test]
fn source_names_stay_the_same_when_a_run_is_resumed() {
    let folder = started("evaluation-names");
    let blend = "data.source=[{ path = \"one\", weight = 3 }, { path = \"./two.bin\", weight = 1 }]";
    let common = ["model.vocab=257", "run.steps=2", "run.eval_every=1"];
    stdout(&tiny(&folder, &["train"], &[&common[..], &[blend, "data.split=0.2"]].concat()));
    stdout(&kintsugi(&folder, &["train", "out/config.toml", "--resume", "--set", "run.steps=4"]));
    let lines = json_lines(&folder.join("out/metrics.jsonl"));
    assert_eq!(lines.len(), 4);
    for line in lines {
        assert_eq!(keys(&line["validation_losses"]), ["one", "two"]);
    }
}

#[test]
fn several_files_for_validation_are_weighted() {
    let folder = started("evaluation-weighted");
    fs::write(folder.join("three.txt"), "another text altogether\n".repeat(100)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "three.txt", "--out", "three", "--tokenizer", "bytes"]));
    let files = "data.validation=[{ path = \"two\", weight = 3 }, { path = \"three\", weight = 1 }]";
    let own = ["data.source=one", files, "data.split=0", "run.eval_tokens=1000000"];
    let metrics = validate(&folder, &own);
    let alone =
        ["two", "three"].map(|name| eval(&folder, &["start", "--data", name])["loss"].as_f64().unwrap());
    let mean = (3.0 * alone[0] + alone[1]) / 4.0;
    close(&metrics["validation_loss"], &Value::from(mean));
    close(&eval(&folder, &["out"])["loss"], &Value::from(mean));
}

#[test]
fn files_of_their_own_are_for_validation_alone() {
    let folder = started("evaluation-files");
    let own = ["data.source=one", "data.validation=two", "data.split=0", "run.eval_tokens=1000000"];
    let metrics = validate(&folder, &own);
    close(&metrics["validation_loss"], &eval(&folder, &["start", "--data", "two"])["loss"]);
    close(&metrics["validation_loss"], &eval(&folder, &["out"])["loss"]);
    let refused = |sets: &[&str]| {
        let output = tiny(&folder, &["train"], &[&["model.vocab=257", "data.source=one"], sets].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = refused(&["data.validation=one"]);
    assert_eq!(said, "error: data.validation = \"one\" is in data.source too, so it would be trained on\n");
    for end in ["bin", "idx"] {
        std::os::unix::fs::symlink(format!("one.{end}"), folder.join(format!("link.{end}"))).unwrap();
    }
    for (name, file) in [("one.bin", "one.bin"), ("./one", "./one.bin"), ("link", "link.bin")] {
        assert_eq!(
            refused(&[&format!("data.validation={name}")]),
            format!(
                "error: {file} of data.validation is the same file as one.bin of data.source, so it would be trained on\n"
            )
        );
    }
    let said = refused(&["data.validation=two", "data.split=0.2"]);
    assert_eq!(
        said,
        "error: data.split = 0.2 has no meaning where data.validation names files; leave it out\n"
    );
}
