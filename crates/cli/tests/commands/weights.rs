//! Unusual weights: two files with the same tensor, numbers that are not finite, a checkpoint without weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_checkpoint::Checkpoint;
use kintsugi_rank::StoredTensor;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::support::{folder, kintsugi, stdout, tiny};

const INDEX: &str = "model.safetensors.index.json";

/// A copy of a Hugging Face folder of the tests.
fn fixture(name: &str, to: &Path) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures").join(name);
    let to = to.join(name);
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

/// Rewrites a safetensors file: every tensor by its name, as bytes of fp32.
fn rewrite(path: &Path, change: impl FnOnce(&mut BTreeMap<String, (Vec<usize>, Vec<f32>)>)) {
    let bytes = fs::read(path).unwrap();
    let mut tensors = BTreeMap::new();
    for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        let numbers =
            tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        tensors.insert(name, (tensor.shape().to_vec(), numbers.collect()));
    }
    change(&mut tensors);
    let bytes: BTreeMap<String, (Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, (shape, numbers))| {
            (name, (shape, numbers.iter().flat_map(|n| n.to_le_bytes()).collect()))
        })
        .collect();
    let views = bytes
        .iter()
        .map(|(name, (shape, bytes))| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// How a command fails: its exit code and its message.
fn failure(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let output = kintsugi(folder, arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), said.trim_end().replace(&format!("{}/", folder.display()), ""))
}

#[test]
fn a_tensor_in_two_files_is_taken_from_the_one_that_the_index_names() {
    let folder = folder("weights-index");
    let model = fixture("llama", &folder);
    let export = |to: &str| {
        stdout(&kintsugi(&folder, &["convert", "llama", to, "--to", "hf"]));
        fs::read(folder.join(to).join("model.safetensors")).unwrap()
    };
    let expected = export("before");
    let index: Value = serde_json::from_slice(&fs::read(model.join(INDEX)).unwrap()).unwrap();
    // A tensor of the first file also in the last file with other numbers, and the other way round.
    let files = ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"];
    let mut moved = Vec::new();
    for (from, to) in [(files[0], files[1]), (files[1], files[0])] {
        let map = index["weight_map"].as_object().unwrap();
        let name = map.iter().find(|(_, file)| *file == from).unwrap().0.clone();
        let mut shape = Vec::new();
        rewrite(&model.join(from), |tensors| shape.clone_from(&tensors[&name].0));
        rewrite(&model.join(to), |tensors| {
            let zeros = vec![0.0; shape.iter().product()];
            assert!(tensors.insert(name.clone(), (shape, zeros)).is_none());
        });
        moved.push(name);
    }
    assert!(export("after") == expected, "the numbers are those of the files that the index names");

    // An index that names a file without the tensor, or that lists neither of two files that have it.
    let change = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut index = index.clone();
        change(index["weight_map"].as_object_mut().unwrap());
        fs::write(model.join(INDEX), index.to_string()).unwrap();
        failure(&folder, &["convert", "llama", "refused", "--to", "hf"])
    };
    let middle = "model-00002-of-00003.safetensors";
    let said =
        format!("error: llama/{INDEX}: it lists {} in {middle}, but the file does not have it", moved[0]);
    assert_eq!(change(&|map| *map.get_mut(&moved[0]).unwrap() = json!(middle)), (2, said));
    let said = format!(
        "error: llama/{}: {} is also in llama/{}; {INDEX} does not say which file to use",
        files[1], moved[0], files[0]
    );
    assert_eq!(change(&|map| drop(map.remove(&moved[0]))), (2, said));
}

/// A run of the tiny model on the bytes of a text, and its weights as the Hugging Face folder `model`.
fn exported(name: &str) -> PathBuf {
    let folder = folder(name);
    fs::write(folder.join("text.txt"), "some words, again and again. ".repeat(60)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]));
    stdout(&tiny(&folder, &["train"], &["model.vocab=257", "data.source=data", "data.split=0.1"]));
    stdout(&kintsugi(&folder, &["convert", "out", "model"]));
    folder
}

#[test]
fn weights_that_are_not_finite_run_only_if_they_are_allowed() {
    let folder = exported("weights-not-finite");
    let generate = ["generate", "model", "--prompt", "some", "--tokens", "3"];
    let eval = ["eval", "model", "--data", "data", "--set", "batch.sequence=16", "--samples", "2"];
    stdout(&kintsugi(&folder, &generate));
    rewrite(&folder.join("model/model.safetensors"), |tensors| {
        tensors.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap().1[5] = f32::NAN;
    });
    for command in
        [&generate[..], &eval, &["convert", "model", "checkpoint"], &["convert", "model", "hf", "--to", "hf"]]
    {
        let (code, said) = failure(&folder, command);
        assert_eq!(code, 1, "{command:?}: {said}");
        assert!(
            said.contains("the weights of layer.1.mlp_in_weight are not finite in fp32: one is NaN"),
            "{said}"
        );
        stdout(&kintsugi(&folder, &[command, &["--allow-non-finite"]].concat()));
    }
}

#[test]
fn a_number_that_a_type_cannot_hold_is_an_error() {
    let folder = folder("weights-too-large");
    let model = fixture("gpt2", &folder);
    rewrite(&model.join("model.safetensors"), |tensors| {
        tensors.get_mut("transformer.h.0.ln_1.weight").unwrap().1[3] = -1e6;
    });
    let to =
        |to: &'static str, more: &[&'static str]| [&["convert", "gpt2", to, "--to", "hf"], more].concat();
    let said = "error: transformer.h.0.ln_1.weight: the value -1e6 is infinite in F16".to_owned();
    assert_eq!(failure(&folder, &to("half", &["--dtype", "fp16"])), (1, said));
    assert!(!folder.join("half").exists());
    stdout(&kintsugi(&folder, &to("wide", &["--dtype", "bf16"])));
    stdout(&kintsugi(&folder, &to("half", &["--dtype", "fp16", "--allow-non-finite"])));
}

#[test]
fn a_checkpoint_without_weights_is_refused() {
    let folder = folder("weights-none");
    stdout(&tiny(&folder, &["train"], &[]));
    let checkpoint = Checkpoint::open(&folder.join("out/checkpoints/step-00000004")).unwrap();
    let moments = [StoredTensor::FirstMoment, StoredTensor::SecondMoment];
    let (to, progress) = (folder.join("moments"), checkpoint.progress());
    kintsugi_checkpoint::write(&to, checkpoint.plan(), &checkpoint, &moments, progress, None).unwrap();
    let output = tiny(&folder, &["train", "--resume=moments"], &["run.steps=6", "run.out=resumed"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("moments/manifest.json: it lists no weights"), "{said}");
}
