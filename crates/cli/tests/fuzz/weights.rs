//! Weights: Hugging Face folders and checkpoints.

use std::path::{Path, PathBuf};

use kintsugi_checkpoint::{WeightsFolder, convert};
use kintsugi_rank::{Elements, Store};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::harness::{Files, Target, as_it_is, files_of, kintsugi};

/// Elements that a parameter of the seeds stays far below.
const MAX_ELEMENTS: usize = 1 << 24;

fn fixture(name: &str) -> Files {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures").join(name);
    files_of(&folder, |name| name != "expected.json")
}

/// Opens a folder and reads every parameter of it.
fn read(folder: &Path) -> bool {
    let Ok(weights) = WeightsFolder::open(folder) else { return false };
    weights.tokenizer();
    weights.end_tokens();
    let Ok(plan) = convert::plan_for(&weights, &[]) else { return false };
    for placed in plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed) {
        let elements = placed.parameter.valid_elements();
        for &stored in weights.stored_tensors() {
            let mut numbers = vec![0.0; elements.min(MAX_ELEMENTS)];
            if weights.read(Elements::of(&placed.parameter, stored), &mut numbers).is_err() {
                return false;
            }
        }
    }
    true
}

/// `.safetensors`, one file and several.
pub fn hugging_face(_: &Path) -> Target {
    let seeds = ["gpt2", "llama", "llama-tied", "neox"].map(fixture).to_vec();
    Target { seeds, changed: &[".safetensors"], repair: as_it_is, read }
}

/// `config.json` and `model.safetensors.index.json`.
pub fn hugging_face_descriptions(_: &Path) -> Target {
    let seeds = ["gpt2", "llama", "llama-tied", "neox", "neox-sequential"].map(fixture).to_vec();
    Target { seeds, changed: &[".json"], repair: as_it_is, read }
}

/// A checkpoint of two ranks, with states.
fn checkpoint(folder: &Path) -> Files {
    let settings = [
        "model.layers=1",
        "model.hidden=16",
        "model.heads=2",
        "batch.sequence=8",
        "batch.micro=1",
        "batch.global=2",
        "parallel.tp=2",
        "parallel.pp=1",
        "parallel.dp=1",
        "run.steps=1",
    ];
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    kintsugi(folder, &["train"].into_iter().chain(sets).collect::<Vec<_>>());
    files_of(&folder.join("out/checkpoints/step-00000001"), |_| true)
}

/// A checkpoint as it is: checksums find every change.
pub fn checkpoints(folder: &Path) -> Target {
    Target { seeds: vec![checkpoint(folder)], changed: &[], repair: as_it_is, read }
}

/// A checkpoint whose checksums are right again after the change.
pub fn resealed_checkpoints(folder: &Path) -> Target {
    let mut files = checkpoint(folder);
    // What is changed is the manifest inside the envelope, and the files that it names.
    let envelope: Map<String, Value> = serde_json::from_slice(&files["manifest.json"]).unwrap();
    files.insert("manifest.json".to_owned(), serde_json::to_vec_pretty(&envelope["manifest"]).unwrap());
    Target { seeds: vec![files], changed: &[], repair: reseal, read }
}

fn checksum(bytes: &[u8]) -> String {
    format!("xxh3:{:016x}", xxh3_64(bytes))
}

/// What stands around a manifest.
#[derive(Serialize)]
struct Envelope {
    format: &'static str,
    version: u32,
    checksum: String,
    manifest: Box<RawValue>,
}

fn reseal(files: &mut Files) {
    let mut text = files["manifest.json"].clone();
    // A shard that was changed has another length and checksum; where the manifest was, it says what it says.
    if let Ok(mut manifest) = serde_json::from_slice::<Value>(&text)
        && let Some(records) = manifest["files"].as_array_mut()
    {
        for record in records.iter_mut().filter(|record| record.is_object()) {
            let found = record["name"].as_str().and_then(|name| files.get(name));
            if let Some(bytes) = found {
                record["bytes"] = json!(bytes.len());
                record["checksum"] = json!(checksum(bytes));
            }
        }
        text = serde_json::to_vec(&manifest).unwrap();
    }
    let Ok(text) = String::from_utf8(text) else { return };
    let sum = checksum(text.as_bytes());
    let Ok(manifest) = RawValue::from_string(text) else { return };
    let envelope = Envelope { format: "kintsugi checkpoint", version: 2, checksum: sum, manifest };
    files.insert("manifest.json".to_owned(), serde_json::to_vec(&envelope).unwrap());
}
