//! Text becomes token files, and these train.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use kintsugi_data::TokenFile;
use serde_json::{Value, json};

use crate::support::{command, folder, json_lines, kintsugi, stdout, tiny};

/// A text with some structure to learn.
fn text(lines: usize) -> String {
    let line = |n: usize| {
        format!("line {n}: the {} follows the {}.\n", ["cat", "dog", "owl"][n % 3], ["hen", "fox"][n % 2])
    };
    (0..lines).map(line).collect()
}

fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = kintsugi(folder, arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn losses(folder: &Path) -> Vec<f64> {
    json_lines(&folder.join("out/metrics.jsonl")).iter().map(|line| line["loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_prepared_text_trains_the_same_on_every_layout() {
    let folder = folder("prepare-train");
    fs::write(folder.join("book.txt"), text(4000)).unwrap();
    let arguments =
        ["prepare", "book.txt", "--out", "data/book", "--train-tokenizer", "300", "--append-eod", "--json"];
    let summary: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
    assert_eq!(
        (&summary["vocab"], &summary["documents"], &summary["bad_lines"]),
        (&json!(300), &json!(1), &json!(0))
    );
    assert_eq!(summary["text_bytes"], text(4000).len());
    let data = ["data.source=data/book", "data.tokenizer=data/book.tokenizer.json", "model.vocab=300"];
    let settings = |more: &[&'static str]| [&data[..], &["run.steps=30", "optimizer.lr=0.01"], more].concat();
    stdout(&tiny(&folder, &["train"], &settings(&[])));
    let eight = losses(&folder);
    assert!(eight[29] < eight[0] - 1.0, "it learns: {eight:?}");
    assert!(json_lines(&folder.join("out/metrics.jsonl"))[29]["validation_loss"].is_f64());
    let one = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "batch.micro=2"];
    stdout(&tiny(&folder, &["train"], &settings(&one)));
    for (a, b) in losses(&folder).iter().zip(&eight) {
        assert!((a - b).abs() < 1e-4, "the same samples in the same order: {a} {b}");
    }
    // The configuration that a run writes names the files.
    let left = losses(&folder);
    stdout(&kintsugi(&folder, &["train", "out/config.toml"]));
    assert_eq!(losses(&folder), left);
}

#[test]
fn the_tokenizer_goes_wherever_the_model_goes() {
    let folder = folder("prepare-tokenizer");
    fs::write(folder.join("book.txt"), text(400)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "book.txt", "--out", "data/book", "--train-tokenizer", "300"]));
    let files =
        |place: &str| ["tokenizer.json", "tokenizer_config.json"].map(|name| format!("{place}{name}"));
    let read = |place: &str| files(place).map(|name| fs::read(folder.join(&name)).expect(&name));
    let made = read("data/book.");
    let config: Value = serde_json::from_slice(&made[1]).unwrap();
    assert_eq!(config["eos_token"], "<|endoftext|>");

    // Another preparation with it gets its own copy, and no tokenizer is replaced.
    let again = ["prepare", "book.txt", "--out", "data/again", "--tokenizer", "data/book.tokenizer.json"];
    stdout(&kintsugi(&folder, &again));
    assert_eq!(read("data/again."), made);
    fs::remove_file(folder.join("data/again.idx")).unwrap();
    fs::remove_file(folder.join("data/again.bin")).unwrap();
    fs::remove_file(folder.join("data/again.meta.json")).unwrap();
    let said = refused(&folder, &["prepare", "book.txt", "--out", "data/again", "--tokenizer", "bytes"]);
    assert!(
        said.contains("data/again.tokenizer.json: it is another tokenizer; choose another --out"),
        "{said}"
    );

    // The run stores it, so nothing else is needed afterwards.
    stdout(&tiny(&folder, &["train"], &["model.vocab=300", "data.source=data/book", "data.split=0.1"]));
    assert_eq!(read("out/"), made);
    fs::rename(folder.join("data"), folder.join("moved")).unwrap();
    let generate = |from: &str| {
        let arguments =
            ["generate", from, "--prompt", "line 7: the", "--tokens", "4", "--temperature", "0", "--json"];
        let answer: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
        answer["texts"][0].clone()
    };
    let answer = generate("out");
    stdout(&kintsugi(&folder, &["convert", "out", "model"]));
    stdout(&kintsugi(&folder, &["convert", "out", "resharded", "--set", "parallel.tp=2"]));
    stdout(&kintsugi(&folder, &["convert", "resharded", "once-more"]));
    for place in ["model", "resharded", "once-more"] {
        assert_eq!(read(&format!("{place}/")), made);
        assert_eq!(generate(place), answer, "{place}");
    }
    let described: Value =
        serde_json::from_slice(&fs::read(folder.join("model/config.json")).unwrap()).unwrap();
    assert_eq!((&described["eos_token_id"], &described["bos_token_id"]), (&json!(0), &Value::Null));

    // A checkpoint finds it under every path, and it is moved together with the checkpoints.
    fs::create_dir(folder.join("named")).unwrap();
    let here = |from: &str, to: &str| {
        let output =
            kintsugi(&folder.join("out/checkpoints"), &["convert", from, &format!("../../named/{to}")]);
        assert!(!stdout(&output).contains("no tokenizer"), "{output:?}");
        assert_eq!(read(&format!("named/{to}/")), made);
    };
    here("step-00000004", "step");
    here(".", "folder");

    // The named tokenizer is stored, and a run on the demo stores none.
    let named = [
        "model.vocab=300",
        "data.source=moved/book",
        "data.split=0.1",
        "data.tokenizer=bytes",
        "data.allow_other_tokenizer=true",
    ];
    let output = stdout(&tiny(&folder, &["train"], &named));
    assert!(!output.contains("not kept"), "{output}");
    assert_ne!(read("out/"), made);
    here("../checkpoints-1/step-00000004", "aside");
    stdout(&kintsugi(&folder, &["convert", "out", "bytes"]));
    let bytes: Value = serde_json::from_slice(&read("bytes/")[0]).unwrap();
    assert_eq!(bytes["model"]["vocab"]["A"], 65);
    stdout(&tiny(&folder, &["train"], &[]));
    assert!(files("out/").iter().all(|name| !folder.join(name).exists()), "another run's tokenizer is gone");
    let said = stdout(&kintsugi(&folder, &["convert", "out", "demo"]));
    assert!(said.ends_with("no tokenizer is written, because none is known for these weights\n"), "{said}");

    // Without its tokenizer a token file still trains.
    for name in files("moved/book.") {
        fs::remove_file(folder.join(name)).unwrap();
    }
    let output =
        stdout(&tiny(&folder, &["train"], &["model.vocab=300", "data.source=moved/book", "data.split=0.1"]));
    assert!(
        output.contains(
            "note     the tokenizer of the data is not copied: cannot read data/book.tokenizer.json"
        ),
        "{output}"
    );
}

#[test]
fn what_was_left_out_is_told() {
    let folder = folder("prepare-told");
    fs::write(folder.join("a.jsonl"), "{\"body\": \"good\"}\nbad\n{\"body\": \"\"}\n{\"body\": \"fine\"}\n")
        .unwrap();
    let arguments = ["prepare", "a.jsonl", "--out", "a", "--tokenizer", "bytes", "--json-key", "body"];
    let allowed = [&arguments[..], &["--allow-bad-lines"]].concat();
    let said = stdout(&kintsugi(&folder, &allowed));
    assert!(said.contains("tokens     8 in 2 documents"), "{said}");
    assert!(
        said.contains(
            "skipped    1 bad line, 1 empty document\n  a.jsonl, line 2: expected value in column 1\n"
        ),
        "{said}"
    );
    assert!(said.ends_with("files      a.bin, a.idx\n"), "{said}");
    let said = refused(&folder, &[&arguments[..], &["--strict", "--overwrite"]].concat());
    assert_eq!(said, "error: a.jsonl, line 2: expected value in column 1\n");
    assert_eq!(
        refused(&folder, &arguments),
        "error: cannot write a.bin: it exists; choose another --out, or add --overwrite\n"
    );
}

#[test]
fn a_preparation_that_fails_leaves_the_tokenizer_of_the_one_before() {
    let folder = folder("prepare-failed");
    fs::write(folder.join("a.txt"), text(100)).unwrap();
    fs::write(folder.join("b.jsonl"), "{\"text\": \"other words\"}\nbad\n").unwrap();
    let arguments =
        |input| ["prepare", input, "--out", "a", "--train-tokenizer", "280", "--overwrite", "--strict"];
    stdout(&kintsugi(&folder, &arguments("a.txt")));
    let files = || {
        ["a.tokenizer.json", "a.tokenizer_config.json", "a.bin"]
            .map(|name| fs::read(folder.join(name)).unwrap())
    };
    let before = files();
    let output = kintsugi(&folder, &arguments("b.jsonl"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(files(), before);
}

#[test]
fn a_prefix_may_be_written_as_either_file() {
    let folder = folder("prepare-suffix");
    fs::write(folder.join("a.txt"), text(10)).unwrap();
    for out in ["a", "a.bin", "a.idx"] {
        let arguments = ["prepare", "a.txt", "--out", out, "--tokenizer", "bytes", "--overwrite"];
        let said = stdout(&kintsugi(&folder, &arguments));
        assert!(said.ends_with("files      a.bin, a.idx\n"), "{said}");
    }
}

#[test]
fn names_that_are_no_text_are_told_as_well_as_may_be() {
    let folder = folder("prepare-names");
    let name = OsStr::from_bytes(b"\xff.jsonl");
    fs::create_dir(folder.join("in")).unwrap();
    fs::write(folder.join("in").join(name), "{\"text\": \"good\"}\nbad\n").unwrap();
    let arguments = ["prepare", "in", "--tokenizer", "bytes", "--json", "--allow-bad-lines", "--out"];
    let output = command(&folder, &arguments).arg(OsStr::from_bytes(b"out-\xff")).output().unwrap();
    let summary: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&summary["bad"][0]["file"], &summary["bin"]),
        (&json!("in/\u{fffd}.jsonl"), &json!("out-\u{fffd}.bin"))
    );
}

#[test]
fn mistakes_are_one_sentence() {
    let folder = folder("prepare-mistakes");
    fs::write(folder.join("a.txt"), "text").unwrap();
    let prepare = |more: &[&str]| refused(&folder, &[&["prepare", "a.txt", "--out", "out/a"], more].concat());
    assert!(prepare(&[]).contains("--tokenizer"), "one of the two is required");
    assert!(prepare(&["--tokenizer", "absent.json"]).starts_with("error: cannot read absent.json: "));
    let said = prepare(&["--tokenizer", "bytes", "--append-eod", "--eod", "</s>"]);
    assert_eq!(said, "error: the tokenizer bytes has no special token </s>\n");
    let said = prepare(&["--train-tokenizer", "5"]);
    assert_eq!(
        said,
        "error: --train-tokenizer 5 must be from 257 (every byte, and <|endoftext|>) to 16777216\n"
    );
    assert!(
        refused(&folder, &["prepare", "*.csv", "--out", "b", "--tokenizer", "bytes"])
            .contains("no file matches")
    );
}

#[test]
fn data_that_does_not_go_with_the_model_is_refused_before_the_run() {
    let folder = folder("prepare-refused");
    fs::write(folder.join("a.txt"), text(100)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "a.txt", "--out", "a", "--tokenizer", "bytes"]));
    let train = |settings: &[&str]| {
        let output = tiny(&folder, &["train"], settings);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(!folder.join("out").exists());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = train(&["data.source=a", "model.vocab=200"]);
    assert_eq!(
        said,
        "error: model.vocab = 200 is less than the 257 tokens of a.bin (tokenizer bytes); use 257 or more\n"
    );
    let said = train(&["data.source=a", "data.tokenizer=bytes", "model.vocab=256"]);
    assert_eq!(
        said,
        "error: model.vocab = 256 is less than the 257 tokens of data.tokenizer = \"bytes\"; use 257 or more\n"
    );
    let said = train(&["data.source=absent"]);
    assert!(said.starts_with("error: cannot read absent.bin: No such file"), "{said}");
    assert!(said.ends_with("; kintsugi prepare makes token files\n"), "{said}");
    let bytes = fs::read(folder.join("a.bin")).unwrap();
    fs::write(folder.join("a.bin"), &bytes[..100]).unwrap();
    let said = train(&["data.source=a", "model.vocab=257"]);
    assert!(said.starts_with("error: a.bin: found 100 bytes, expected "), "{said}");
}

#[test]
fn a_token_of_a_foreign_file_that_the_model_does_not_have_ends_the_run() {
    let folder = folder("prepare-foreign");
    fs::write(folder.join("a.txt"), text(300)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "a.txt", "--out", "a", "--tokenizer", "bytes"]));
    fs::remove_file(folder.join("a.meta.json")).unwrap();
    let mut bytes = fs::read(folder.join("a.bin")).unwrap();
    for token in bytes.chunks_exact_mut(8) {
        token[1] = 3;
    }
    fs::write(folder.join("a.bin"), bytes).unwrap();
    let output = tiny(&folder, &["train"], &["data.source=a", "model.vocab=257"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("a.bin: found token ") && said.ends_with(", expected tokens from 0 to 256\n"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// 300 JSON lines of 60 bytes, whose texts tell where they are.
fn lines() -> String {
    let line = |line: usize| format!("{{\"text\": \"{}\"}}\n", format!("line {line:03} ").repeat(6));
    (0..300).map(line).collect()
}

#[test]
fn validation_documents_come_from_all_of_the_text() {
    let folder = folder("prepare-validation");
    fs::write(folder.join("text.jsonl"), lines()).unwrap();
    let prepare = |out: &str, more: &[&str]| {
        let command = ["prepare", "text.jsonl", "--out", out, "--tokenizer", "bytes", "--append-eod"];
        kintsugi(&folder, &[&command[..], more].concat())
    };
    let said = stdout(&prepare("data", &["--validation", "0.1"]));
    assert!(
        said.contains("validation 30 documents drawn from all of the text, 10.00 % of the tokens\n"),
        "{said}"
    );
    let summary: Value =
        serde_json::from_str(&stdout(&prepare("in-order", &["--validation", "0", "--json"]))).unwrap();
    assert_eq!(summary["validation"], Value::Null);
    let meta = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
    };
    assert_eq!(
        meta("data.meta.json")["validation"],
        serde_json::json!({ "documents": 30, "tokens": 30 * 55 })
    );
    assert_eq!(meta("in-order.meta.json").get("validation"), None);
    let refused = prepare("wrong", &["--validation", "0.6"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    // A run takes the recorded documents by default, and a resumed run what it had.
    let settings = [
        "model.vocab=257",
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.dp=1",
        "data.source=data",
        "optimizer.schedule=constant",
    ];
    let run = |out: &str, arguments: &[&str], more: &[&str]| {
        let out = format!("run.out={out}");
        tiny(&folder, &[&["train"], arguments].concat(), &[&settings[..], &[&out], more].concat())
    };
    stdout(&run("recorded", &["--write-batches", "recorded.npy"], &[]));
    stdout(&run("share", &[], &["data.split=0.1"]));
    let loss = |out: &str| json_lines(&folder.join(out).join("metrics.jsonl"))[1]["validation_loss"].clone();
    assert_eq!(loss("recorded"), loss("share"), "the recorded share is 0.1");
    stdout(&run("default", &[], &["data.split=0.01"]));
    assert_ne!(loss("recorded"), loss("default"));
    // The same files without the record, as from an older version.
    let mut without = meta("data.meta.json");
    without.as_object_mut().unwrap().remove("validation");
    let recorded = fs::read(folder.join("data.meta.json")).unwrap();
    fs::write(folder.join("data.meta.json"), without.to_string()).unwrap();
    stdout(&run("old", &[], &[]));
    assert_eq!(loss("old"), loss("default"), "the last 1 % of the tokens");
    fs::write(folder.join("data.meta.json"), recorded).unwrap();
    // A run that began with a split of its own keeps it.
    stdout(&run("default", &["--resume"], &["run.steps=6"]));
    stdout(&run("whole", &[], &["run.steps=6", "data.split=0.01"]));
    let last = |out: &str| json_lines(&folder.join(out).join("metrics.jsonl"))[5]["validation_loss"].clone();
    assert_eq!(last("default"), last("whole"));
    // A larger split than the recorded one would be validated on what was trained on.
    let refused = run("recorded", &["--resume"], &["run.steps=6", "data.split=0.2"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.ends_with(
            "the model would be validated on samples that it was trained on; leave data.split out\n"
        ),
        "{said}"
    );
    stdout(&run("recorded", &["--resume"], &["run.steps=6"]));
}

#[test]
fn a_model_without_a_vocabulary_has_that_of_the_data() {
    let folder = folder("prepare-vocabulary");
    fs::write(folder.join("text.jsonl"), lines()).unwrap();
    let command = ["prepare", "text.jsonl", "--out", "data", "--train-tokenizer", "300"];
    stdout(&kintsugi(&folder, &command));
    let vocab = TokenFile::open(&folder.join("data")).unwrap().about().unwrap().vocab;
    let config = "data.source = \"data\"\n[model]\nlayers = 1\nhidden = 16\nheads = 2\n[batch]\nsequence = 16\n[run]\nsteps = 1\n";
    fs::write(folder.join("run.toml"), config).unwrap();
    stdout(&kintsugi(&folder, &["train", "run.toml"]));
    let written = fs::read_to_string(folder.join("out/config.toml")).unwrap();
    assert!(written.contains(&format!("\nvocab = {vocab}\n")), "{written}");
    let resolved = stdout(&kintsugi(&folder, &["config", "run.toml", "--resolved"]));
    let line = resolved.lines().find(|line| line.contains("vocab =")).unwrap();
    assert!(line.contains(&vocab.to_string()) && line.ends_with("data.source"), "{line}");
    // A value of the file or of a preset stays.
    let refused = kintsugi(&folder, &["train", "run.toml", "--set", "model.vocab=100"]);
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("model.vocab = 100 is less than the"),
        "{refused:?}"
    );
    // Files that are not there are named.
    let missing = kintsugi(&folder, &["train", "run.toml", "--set", "data.source=absent"]);
    assert_eq!(missing.status.code(), Some(2), "{missing:?}");
    assert!(
        String::from_utf8_lossy(&missing.stderr).starts_with("error: cannot read absent.bin: "),
        "{missing:?}"
    );
}

#[test]
fn weights_with_a_smaller_vocabulary_than_the_data_get_one_answer() {
    let folder = folder("prepare-other-vocabulary");
    fs::write(folder.join("text.jsonl"), lines()).unwrap();
    stdout(&tiny(&folder, &["train"], &["run.steps=1", "run.out=small", "run.eval_every=0"]));
    stdout(&kintsugi(&folder, &["convert", "small", "weights"]));
    stdout(&kintsugi(&folder, &["prepare", "text.jsonl", "--out", "data", "--tokenizer", "bytes"]));
    let settings = ["--set", "model.init=weights", "--set", "data.source=data", "--set", "batch.sequence=16"];
    let refused = kintsugi(&folder, &[&["train"], &settings[..]].concat());
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    insta::assert_snapshot!(
        String::from_utf8_lossy(&refused.stderr),
        @r#"error: data.bin (tokenizer bytes) has a vocabulary of 257 tokens, but the weights of model.init = "weights" have one of 128; prepare the text with the tokenizer of these weights, as in kintsugi prepare --tokenizer weights"#
    );
}
