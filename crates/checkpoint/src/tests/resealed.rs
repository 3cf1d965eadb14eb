//! Manifests that were edited and given a new checksum: each is refused with a sentence, or it loads and can be used. None
//! causes a panic, a huge allocation or a long loop.

use std::fs;
use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_rank::{Elements, Store, StoredTensor};
use kintsugi_spec::{Level, Span};
use serde_json::{Value, json};

use super::{Temporary, plan, saved};
use crate::manifest::MANIFEST;
use crate::{Checkpoint, Manifest, WeightsFolder, convert, files};

/// Writes a manifest with its right checksum.
fn reseal(folder: &Path, manifest: &Value) {
    let checksum = files::checksum(manifest.to_string().as_bytes());
    let envelope =
        json!({ "format": "kintsugi checkpoint", "version": 2, "checksum": checksum, "manifest": manifest });
    fs::write(folder.join(MANIFEST), envelope.to_string()).expect("it is changed");
}

/// A manifest with every kind of number: token files, a fixed loss scale, sharding in parts, codes.
fn original(folder: &Path) -> Value {
    let manifest = Manifest::read(folder).expect("it is whole");
    let mut value = serde_json::to_value(&manifest).expect("a manifest has string keys");
    value["progress"]["loss_first"] = json!(4.5);
    value["progress"]["validation_loss"] = json!(4.5);
    let plan = &mut value["plan"];
    plan["data"] = json!({ "tokens": {
        "sources": [{ "path": "/data/a", "weight": 3.0 }, { "path": "/data/b", "weight": 1.0 }],
        "tokenizer": null, "allow_other_tokenizer": false, "end_of_document": 0,
        "validation": [], "split": 0.05, "mask_documents": true,
    } });
    plan["precision"]["loss_scale"] = json!({ "fixed": 1024.0 });
    plan["optimizer"]["decay_steps"] = json!(5);
    plan["run"]["keep_best"] = json!(2);
    plan["sharding"]["secondary"] = json!(1);
    plan["sharding"]["parts"] = json!([{ "span": Span::Inside(Level::Node), "ranks": 2 }]);
    plan["sharding"]["quantized"] =
        json!({ "weights": { "integer": "int8", "block": 256 }, "refresh": null, "gradients": null });
    value
}

/// The paths of all numbers. Of a list only the first and the last element are taken.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.to_owned()),
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| numbers(value, &format!("{path}/{key}"), found));
        }
        Value::Array(elements) => {
            let last = elements.len().saturating_sub(1);
            let ends = elements.iter().enumerate().filter(|(at, _)| *at == 0 || *at == last);
            ends.for_each(|(at, value)| numbers(value, &format!("{path}/{at}"), found));
        }
        _ => {}
    }
}

/// Does with a checkpoint what the commands do: resumes, describes, converts and reads it.
fn use_checkpoint(path: &Path, plan: &Plan) {
    let Ok(checkpoint) = Checkpoint::open(path) else { return };
    checkpoint.is_finished(plan).ok();
    checkpoint.batches_consumed(plan).ok();
    let before = checkpoint.plan();
    checkpoint.data_changes(plan);
    before.optimizer.decay(before.run.steps);
    before.to_toml();
    assert!(checkpoint.bytes() < 1 << 20);
    for parameter in before.units().into_iter().flat_map(|unit| before.layout(unit).placed) {
        let mut numbers = vec![0.0; parameter.parameter.valid_elements()];
        for &stored in checkpoint.stored_tensors() {
            checkpoint.read(Elements::of(&parameter.parameter, stored), &mut numbers).expect("it is whole");
        }
    }
    let weights = WeightsFolder::open(path).expect("it was opened before");
    convert::plan_for(&weights, &[]).expect("its numbers have been checked");
}

#[test]
fn every_number_is_checked_before_it_is_used() {
    let out = Temporary::new("resealed-numbers");
    let folder = saved(&out.0, &[3]).of_step(3);
    let (original, plan) = (original(&folder), plan());
    reseal(&folder, &original);
    Checkpoint::open(&folder).expect("it is legal");
    let mut paths = Vec::new();
    numbers(&original, "", &mut paths);
    assert!(paths.len() > 70, "{paths:?}");
    let values = [
        json!(-1),
        json!(0),
        json!(1),
        json!(3),
        json!(4096),
        json!(1_u64 << 32),
        json!((1_u64 << 53) + 1),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(-0.5),
        json!(0.5),
        json!(1e-300),
        json!(1e30),
        json!(-1e308),
    ];
    for path in &paths {
        for value in &values {
            let mut changed = original.clone();
            *changed.pointer_mut(path).expect("it has this number") = value.clone();
            reseal(&folder, &changed);
            use_checkpoint(&folder, &plan);
        }
    }
}

#[test]
fn what_cannot_be_right_is_refused_with_a_sentence() {
    let out = Temporary::new("resealed-refused");
    let folder = saved(&out.0, &[3]).of_step(3);
    let original = original(&folder);
    let refused = |path: &str, value: Value| {
        let mut changed = original.clone();
        *changed.pointer_mut(path).expect("it has this value") = value;
        reseal(&folder, &changed);
        let error = Checkpoint::open(&folder).expect_err(path).to_string();
        error.strip_prefix(&format!("{}: ", folder.join(MANIFEST).display())).expect("its path").to_owned()
    };
    let many = vec![original["files"][0].clone(); 100_000];
    let twice = vec![original["files"][0].clone(); 2];
    let same = vec![json!("weights"); 100_000];
    for (path, value, sentence) in [
        ("/progress/loss_scale", json!(-1), "its loss_scale = -1 is not a positive number of fp32"),
        ("/progress/loss_scale", json!(0), "its loss_scale = 0 is not a positive number of fp32"),
        ("/progress/loss_scale", json!(1e300), "is not a positive number of fp32"),
        ("/progress/updates", json!(4), "its updates = 4 is above its step 3"),
        ("/progress/step", json!(u64::MAX), "its step 18446744073709551615 is above 16777216"),
        (
            "/progress/samples",
            json!(u64::MAX),
            "its samples = 18446744073709551615 are too many for its step 3",
        ),
        ("/files", json!(many), "it lists 100000 files for 8 ranks"),
        ("/files", json!(twice), "it lists the file rank-00000.safetensors twice"),
        ("/kept", json!(same), "it lists 100000 tensors of every parameter, some of them twice"),
        (
            "/kept",
            json!(["weights"]),
            "it is at step 3, but has no first_moment of its parameters, so a run cannot resume from it",
        ),
        (
            "/kept",
            json!(["weights", "first_moment"]),
            "it is at step 3, but has no second_moment of its parameters, so a run cannot resume from it",
        ),
    ] {
        let error = refused(path, value);
        assert!(error.ends_with(sentence), "{path}: {error}");
    }
    for (path, value, part) in [
        ("/plan/mesh/tp", json!(0), "its plan has a mesh of 2 · 2 · 1 · 0 ranks"),
        ("/plan/mesh/dp", json!(1_u64 << 40), "ranks, which is not from 1 to 1048576"),
        ("/plan/sharding/states", json!(3), "its plan has a sharding that does not divide its 2 replicas"),
        ("/plan/batch/global", json!(0), "its plan: batch.global = 0 must be at least 1"),
        ("/plan/pipeline/layers", json!([]), "its plan: parallel.layers_per_stage = [] "),
        ("/plan/optimizer/lr", json!(-1), "its plan: optimizer.lr = -1"),
        ("/plan/data/tokens/split", json!(7), "its plan: data.split = 7"),
        ("/plan/data/tokens/sources", json!([]), "its plan: data.source = [] must be "),
    ] {
        let error = refused(path, value);
        assert!(error.contains(part), "{path}: {error}");
    }
}

#[test]
fn weights_alone_are_what_a_converted_model_has() {
    let out = Temporary::new("resealed-weights");
    let path = out.0.join("converted");
    let progress = crate::RunProgress::default();
    crate::write(&path, &plan(), &super::Numbers, &[StoredTensor::Weights], &progress, None)
        .expect("it is written");
    Checkpoint::open(&path).expect("a model at step 0 needs no moments");
}
