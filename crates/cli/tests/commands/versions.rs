//! Checkpoints of version 1, which stored the plan only as the text of a configuration, and of version 2, in which that
//! text is only for people.
//!
//! The fixture is a checkpoint that a program before version 2 wrote: `kintsugi train` on two tensor-parallel ranks, with
//! the settings of [`SAME`] and two steps.

use std::fs;
use std::path::Path;

use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use xxhash_rust::xxh3::xxh3_64;

use crate::support::{folder, json_lines, kintsugi, stdout};

/// The settings of the fixture.
const SAME: [&str; 10] = [
    "model.layers=1",
    "model.hidden=8",
    "model.heads=2",
    "batch.sequence=8",
    "batch.micro=1",
    "batch.global=2",
    "optimizer.warmup=1",
    "parallel.tp=2",
    "parallel.pp=1",
    "parallel.dp=1",
];

/// A folder with the fixture in it, as `old`.
fn with_fixture(name: &str) -> std::path::PathBuf {
    let folder = folder(name);
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/version-1");
    fs::create_dir(folder.join("old")).unwrap();
    for file in ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"] {
        fs::copy(from.join(file), folder.join("old").join(file)).unwrap();
    }
    folder
}

fn manifest(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path.join("manifest.json")).unwrap()).unwrap()
}

/// Runs the program and reads the JSON that it printed.
fn json(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&kintsugi(folder, &[arguments, &["--json"]].concat()))).unwrap()
}

/// Trains to the third step, from a checkpoint.
fn resume(folder: &Path, checkpoint: &str, out: &str) -> Value {
    let (from, out_setting) = (format!("--resume={checkpoint}"), format!("run.out={out}"));
    let sets = SAME.iter().copied().chain(["run.steps=3", "run.eval_every=0", &out_setting]);
    let arguments: Vec<&str> =
        ["train", &from].into_iter().chain(sets.flat_map(|set| ["--set", set])).collect();
    stdout(&kintsugi(folder, &arguments));
    let lines = json_lines(&folder.join(out).join("metrics.jsonl"));
    assert_eq!(lines.iter().map(|line| line["step"].clone()).collect::<Vec<_>>(), [3]);
    lines[0]["loss"].clone()
}

#[test]
fn a_checkpoint_of_version_1_is_read_like_one_of_version_2() {
    let folder = with_fixture("versions");
    assert_eq!(manifest(&folder.join("old"))["version"], 1);
    stdout(&kintsugi(&folder, &["convert", "old", "new", "--set", "parallel.tp=2"]));
    assert_eq!(manifest(&folder.join("new"))["version"], 2);
    let loss = |checkpoint: &str| json(&folder, &["eval", checkpoint])["loss"].as_f64().unwrap();
    assert!((loss("old") - 4.84).abs() < 0.05, "{}", loss("old"));
    assert_eq!(loss("old").to_bits(), loss("new").to_bits());
    let text = |checkpoint: &str| {
        let prompt = ["--prompt", "the dog", "--tokens", "3", "--temperature", "0"];
        json(&folder, &[&["generate", checkpoint], &prompt[..]].concat())["texts"].clone()
    };
    assert_eq!(text("old"), text("new"));
    assert_eq!(resume(&folder, "old", "from-old"), resume(&folder, "new", "from-new"));
    for (from, to) in [("old", "hf-old"), ("new", "hf-new")] {
        stdout(&kintsugi(&folder, &["convert", from, to]));
    }
    for file in ["config.json", "model.safetensors"] {
        let [old, new] = ["hf-old", "hf-new"].map(|to| fs::read(folder.join(to).join(file)).unwrap());
        assert!(old == new, "{file}");
    }
}

#[test]
fn the_configuration_in_a_checkpoint_is_not_parsed() {
    let folder = with_fixture("versions-config");
    stdout(&kintsugi(&folder, &["convert", "old", "new", "--set", "parallel.tp=2"]));
    let evaluated = json(&folder, &["eval", "new"])["loss"].clone();
    let resumed = resume(&folder, "new", "before");
    let path = folder.join("new");
    let mut envelope = manifest(&path);
    envelope["manifest"]["config"] = "[model]\nan_older_name = \"of a key\"\nthis is no TOML".into();
    let text: Box<RawValue> = to_raw_value(&envelope["manifest"]).unwrap();
    envelope["checksum"] = format!("xxh3:{:016x}", xxh3_64(text.get().as_bytes())).into();
    fs::write(path.join("manifest.json"), envelope.to_string()).unwrap();
    assert_eq!(json(&folder, &["eval", "new"])["loss"], evaluated);
    assert_eq!(resume(&folder, "new", "after"), resumed);
    stdout(&kintsugi(&folder, &["generate", "new", "--prompt", "the", "--tokens", "2"]));
    stdout(&kintsugi(&folder, &["convert", "new", "resharded", "--set", "parallel.dp=2"]));
    stdout(&kintsugi(&folder, &["convert", "resharded", "exported"]));
    let sets = ["model.init=new", "run.steps=0"].iter().chain(&SAME[3..]).flat_map(|set| ["--set", set]);
    stdout(&kintsugi(&folder, &["train"].into_iter().chain(sets).collect::<Vec<_>>()));
}
