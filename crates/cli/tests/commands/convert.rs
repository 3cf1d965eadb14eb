//! Weights in and out: Hugging Face folders, checkpoints, and training from either.

use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_checkpoint::huggingface::HuggingFaceFolder;

use crate::support::{folder, json_lines, kintsugi, stdout, under};

fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures").join(name);
    path.canonicalize().unwrap().display().to_string()
}

/// The bytes of a folder's weights.
fn weights(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("model.safetensors")).unwrap()
}

fn convert(folder: &Path, arguments: &[&str]) -> String {
    stdout(&kintsugi(folder, &[&["convert"], arguments].concat()))
}

fn mistake(folder: &Path, arguments: &[&str]) -> String {
    let output = kintsugi(folder, arguments);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap().trim().trim_start_matches("error: ").to_owned()
}

#[test]
fn weights_survive_every_layout() {
    let folder = folder("convert-layouts");
    for name in ["gpt2", "neox", "llama"] {
        let (start, again, one) = (format!("{name}-8"), format!("{name}-3"), format!("{name}-1"));
        let eight =
            ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "sharding.zero=3", "model.vocab_multiple=64"];
        let sets: Vec<&str> = eight.iter().flat_map(|set| ["--set", set]).collect();
        let text = convert(&folder, &[&[fixture(name).as_str(), &start], &sets[..]].concat());
        assert!(text.contains(" is a checkpoint for 8 ranks: "), "{text}");
        convert(
            &folder,
            &[
                &start,
                &again,
                "--set",
                "parallel.dp=3",
                "--set",
                "sharding.zero=1",
                "--set",
                "batch.global=3",
            ],
        );
        convert(&folder, &[&again, &one, "--to", "checkpoint"]);
        for (from, to) in [(&start, "from-8"), (&again, "from-3"), (&one, "from-1")] {
            convert(&folder, &[from, &format!("{name}-{to}")]);
        }
        let straight = format!("{name}-straight");
        convert(&folder, &[&fixture(name), &straight, "--to", "hf"]);
        let before = HuggingFaceFolder::open(Path::new(&fixture(name))).unwrap();
        let expected = weights(&folder.join(&straight));
        for to in ["from-8", "from-3", "from-1"] {
            let path = folder.join(format!("{name}-{to}"));
            assert_eq!(HuggingFaceFolder::open(&path).unwrap().model(), before.model(), "{name} {to}");
            assert!(weights(&path) == expected, "{name} {to}: other weights");
        }
    }
}

#[test]
fn training_starts_from_a_folder_and_comes_back() {
    let folder = folder("convert-train");
    let init = format!("model.init={}", fixture("llama"));
    let run = |out: &str, more: &[&str]| {
        let out = format!("run.out={out}");
        let short =
            ["batch.sequence=16", "batch.global=8", "batch.micro=1", "run.steps=2", "run.eval_every=0", &out];
        let sets = short.iter().chain(more).flat_map(|set| ["--set", set]);
        stdout(&kintsugi(&folder, &["train"].into_iter().chain(sets).collect::<Vec<_>>()))
    };
    let text = run("a", &[&init]);
    assert!(text.contains("note     starts from the weights in "), "{text}");
    let loss = |out: &str| json_lines(&folder.join(out).join("metrics.jsonl"))[0]["loss"].as_f64().unwrap();
    run("b", &[&init, "parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "sharding.zero=0"]);
    assert!((loss("a") - loss("b")).abs() < 1e-5, "{} and {}", loss("a"), loss("b"));
    run("c", &[&init, "run.seed=2"]);

    // Exports a run and starts another one from it: the last weights of the first are the initial weights of the
    // second.
    let json = convert(&folder, &["a", "exported", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["kind"].as_str(), json["family"].as_str()), (Some("hf"), Some("llama")));
    assert_eq!((json["parameters"].as_u64(), json["files"].as_u64()), (Some(15_576), Some(2)));
    run("d", &["model.init=exported"]);
    run("e", &["model.init=a"]);
    assert_eq!(loss("d").to_bits(), loss("e").to_bits());
    let own = mistake(
        &folder,
        &["train", "--set", "model.init=a", "--set", "run.out=a", "--set", "batch.sequence=16"],
    );
    assert!(own.starts_with("model.init = \"a\" is inside run.out = \"a\""), "{own}");
    assert!((loss("d") - loss("a")).abs() > 1e-3, "two steps change the loss");

    let half = convert(&folder, &["a", "half", "--dtype", "bf16"]);
    assert!(half.contains("half is a Hugging Face folder: llama, 15.58 k parameters"), "{half}");
}

#[test]
fn training_goes_on_from_a_converted_checkpoint() {
    let folder = folder("convert-resume");
    convert(&folder, &[&fixture("llama"), "start"]);
    let train = |out: &str, resume: &[&str]| {
        let sets = ["model.init=start", "batch.sequence=24", "batch.global=8", "run.steps=2", "run.keep=0"];
        let out = format!("run.out={out}");
        let sets = sets.iter().copied().chain(["run.eval_every=0", &out]).flat_map(|set| ["--set", set]);
        let arguments: Vec<&str> = ["train"].into_iter().chain(resume.iter().copied()).chain(sets).collect();
        stdout(&kintsugi(&folder, &arguments));
    };
    train("anew", &[]);
    train("resumed", &["--resume=start"]);
    let numbers = |out: &str| {
        let of = |line: &serde_json::Value| ["loss", "grad_norm", "skipped"].map(|key| line[key].clone());
        json_lines(&folder.join(out).join("metrics.jsonl")).iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(numbers("resumed"), numbers("anew"));
}

#[test]
fn more_files_than_may_be_open_are_read() {
    let folder = folder("convert-many");
    let gpt2 = fixture("gpt2");
    stdout(&kintsugi(&folder, &["convert", &gpt2, "many", "--set", "parallel.dp=150"]));
    assert_eq!(fs::read_dir(folder.join("many")).unwrap().count(), 151, "a file per rank, and the manifest");
    let few = |arguments: &[&str]| stdout(&under(&folder, "-n 24", arguments));
    few(&["convert", "many", "back"]);
    convert(&folder, &[&gpt2, "straight", "--to", "hf"]);
    let expected = weights(&folder.join("straight"));
    assert!(weights(&folder.join("back")) == expected);

    // A Hugging Face folder with a file for every tensor.
    fs::create_dir(folder.join("cut")).unwrap();
    fs::copy(folder.join("back/config.json"), folder.join("cut/config.json")).unwrap();
    let bytes = fs::read(folder.join("back/model.safetensors")).unwrap();
    let mut weight_map = serde_json::Map::new();
    for (name, tensor) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let file = format!("{name}.safetensors");
        safetensors::serialize_to_file([(&name, tensor)], None, &folder.join("cut").join(&file)).unwrap();
        weight_map.insert(name, file.into());
    }
    assert!(weight_map.len() > 24);
    let index = serde_json::json!({ "weight_map": weight_map }).to_string();
    fs::write(folder.join("cut/model.safetensors.index.json"), index).unwrap();
    few(&["convert", "cut", "whole", "--to", "hf"]);
    assert!(weights(&folder.join("whole")) == expected);
}

#[test]
fn mistakes_are_answered_in_a_sentence() {
    let folder = folder("convert-mistakes");
    let gpt2 = fixture("gpt2");
    fs::create_dir_all(folder.join("full")).unwrap();
    fs::write(folder.join("full/mine"), "").unwrap();
    let full = mistake(&folder, &["convert", &gpt2, "full"]);
    assert_eq!(full, "full already exists; choose another folder");
    assert_eq!(fs::read_dir(folder.join("full")).unwrap().count(), 1);
    fs::create_dir(folder.join("none")).unwrap();
    assert_eq!(mistake(&folder, &["convert", "none", "to"]), "none: there is no checkpoint here");
    fs::remove_dir(folder.join("none")).unwrap();

    assert_eq!(mistake(&folder, &["convert", "nothing", "to"]), "nothing: there is no such folder");
    let file = mistake(&folder, &["convert", "full/mine", "to"]);
    assert_eq!(file, "full/mine: a file, where the folder of a run or a checkpoint is needed");
    let layout = mistake(&folder, &["convert", &gpt2, "to", "--set", "parallel.tp=3"]);
    assert_eq!(layout, "parallel.tp = 3 does not divide model.heads = 4; use 1, 2 or 4");
    let dtype = mistake(&folder, &["convert", &gpt2, "to", "--dtype", "bf16"]);
    assert_eq!(dtype, "--dtype needs a Hugging Face folder as the target; checkpoints are fp32");
    let set = mistake(&folder, &["convert", &gpt2, "to", "--to", "hf", "--set", "parallel.tp=2"]);
    assert_eq!(set, "--set needs a checkpoint as the target; a Hugging Face folder has no layout");

    convert(&folder, &[&gpt2, "start"]);
    for command in
        [&["convert", "start", "to"][..], &["eval", "start"], &["generate", "start", "--prompt", "a"]]
    {
        for (set, said) in [
            (
                "model.layers=1",
                "start: it has model.layers = 2, but this run has 1; the model must be the same",
            ),
            (
                "model.norm_eps=0.1",
                "start: it has model.norm_eps = 0.00001, but this run has 0.1; the model must be the same",
            ),
        ] {
            assert_eq!(mistake(&folder, &[command, &["--set", set]].concat()), said, "{command:?}");
        }
    }
    fs::remove_dir_all(folder.join("start")).unwrap();

    let init = format!("model.init={gpt2}");
    let hidden = mistake(&folder, &["plan", "--set", &init, "--set", "model.hidden=32"]);
    assert_eq!(hidden, "model.hidden = 32 is not what model.init holds, which is 24; leave it out");
    let long = mistake(&folder, &["plan", "--set", &init, "--set", "batch.sequence=64"]);
    assert_eq!(
        long,
        "model.positions = 24 is less than batch.sequence = 64, and learned positions cannot be exceeded"
    );
    let absent = mistake(&folder, &["train", "--set", "model.init=nowhere", "--set", "model.layers=2"]);
    assert!(absent.starts_with("model.init = \"nowhere\" is not a folder; "), "{absent}");
    let left: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [folder.join("full")], "nothing is left behind");
}
