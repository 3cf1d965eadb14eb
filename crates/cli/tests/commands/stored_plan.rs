//! A checkpoint stores its plan as data. The configuration in it is only for people.

use std::fs;
use std::path::Path;

use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use xxhash_rust::xxh3::xxh3_64;

use crate::support::{folder, json_lines, kintsugi, stdout, tiny};

/// Runs the program and reads the JSON that it printed.
fn json(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&kintsugi(folder, &[arguments, &["--json"]].concat()))).unwrap()
}

/// Trains to the fifth step, from a checkpoint at the fourth, and gives its loss.
fn resume(folder: &Path, out: &str) -> Value {
    let out_setting = format!("run.out={out}");
    stdout(&tiny(folder, &["train", "--resume=saved"], &["run.steps=5", "run.eval_every=0", &out_setting]));
    let lines = json_lines(&folder.join(out).join("metrics.jsonl"));
    assert_eq!(lines.iter().map(|line| line["step"].clone()).collect::<Vec<_>>(), [5]);
    lines[0]["loss"].clone()
}

#[test]
fn the_configuration_in_a_checkpoint_is_not_parsed() {
    let folder = folder("stored-plan");
    stdout(&tiny(&folder, &["train"], &["run.out=run"]));
    stdout(&kintsugi(&folder, &["convert", "run", "saved", "--set", "parallel.tp=2"]));
    let evaluated = json(&folder, &["eval", "saved"])["loss"].clone();
    let resumed = resume(&folder, "before");
    let path = folder.join("saved/manifest.json");
    let mut envelope: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    envelope["manifest"]["config"] = "[model]\nan_older_name = \"of a key\"\nthis is no TOML".into();
    let text: Box<RawValue> = to_raw_value(&envelope["manifest"]).unwrap();
    envelope["checksum"] = format!("xxh3:{:016x}", xxh3_64(text.get().as_bytes())).into();
    fs::write(&path, envelope.to_string()).unwrap();
    assert_eq!(json(&folder, &["eval", "saved"])["loss"], evaluated);
    assert_eq!(resume(&folder, "after"), resumed);
    stdout(&kintsugi(&folder, &["generate", "saved", "--prompt", "the", "--tokens", "2"]));
    stdout(&kintsugi(&folder, &["convert", "saved", "resharded", "--set", "parallel.dp=2"]));
    stdout(&kintsugi(&folder, &["convert", "resharded", "exported"]));
    stdout(&tiny(&folder, &["train"], &["model.init=saved", "run.steps=0", "run.out=from-saved"]));
}
