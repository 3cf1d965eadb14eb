//! Token meanings are checked everywhere: in weights, runs, checkpoints and exports.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{folder, kintsugi, stdout, tiny};

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The message of an error.
fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = kintsugi(folder, arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Makes token files, with a tokenizer of 300 tokens trained on the text.
fn prepare(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(format!("{name}.txt")), text.repeat(100)).unwrap();
    let input = format!("{name}.txt");
    stdout(&kintsugi(folder, &["prepare", &input, "--out", name, "--train-tokenizer", "300"]));
}

#[test]
fn weights_are_not_trained_on_text_of_another_tokenizer() {
    let folder = folder("tokenizers-other");
    prepare(&folder, "one", "the cat follows the owl, and so on. ");
    prepare(&folder, "two", "some quite different words stand here! ");
    stdout(&tiny(
        &folder,
        &["train"],
        &["model.vocab=300", "data.source=one", "data.split=0.1", "run.steps=1"],
    ));
    stdout(&kintsugi(&folder, &["convert", "out", "model"]));
    let train = |init: &str, source: &str| {
        let sets =
            ["batch.sequence=16", "batch.global=8", "run.steps=1", "run.eval_every=0", "run.out=tuned"];
        let (init, source) = (format!("model.init={init}"), format!("data.source={source}"));
        let sets = sets.iter().copied().chain([&*init, &source]).flat_map(|set| ["--set", set]);
        ["train"].into_iter().chain(sets).map(str::to_owned).collect::<Vec<_>>()
    };
    let run = |arguments: &[String], more: &[&str]| {
        kintsugi(
            &folder,
            &arguments.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>(),
        )
    };
    for init in ["model", "out"] {
        stdout(&run(&train(init, "one"), &[]));
        let output = run(&train(init, "two"), &[]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: the tokenizer of two is not that of the weights: token "), "{said}");
        assert!(said.ends_with("or set data.allow_other_tokenizer = true\n"), "{said}");
        stdout(&run(&train(init, "two"), &["--set", "data.allow_other_tokenizer=true"]));
    }
    let said = refused(&folder, &["eval", "model", "--data", "two", "--set", "batch.sequence=16"]);
    assert!(said.starts_with("error: the tokenizer of two is not that of the weights: token "), "{said}");

    // Files may be formatted differently and mean the same; the files of a blend must mean the same too.
    let mut tokenizer = read(&folder.join("one.tokenizer.json"));
    tokenizer["truncation"] =
        json!({ "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0 });
    fs::write(folder.join("compact.json"), tokenizer.to_string()).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "two.txt", "--out", "same", "--tokenizer", "compact.json"]));
    stdout(&run(&train("model", "same"), &[]));
    let said =
        tiny(&folder, &["train"], &["model.vocab=300", "data.source=[\"one\", \"two\"]", "data.split=0.1"]);
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.starts_with("error: the tokenizer of two is not that of one: token "), "{said}");
}

#[test]
fn the_token_that_ends_documents_goes_wherever_the_model_goes() {
    let folder = folder("tokenizers-end");
    prepare(&folder, "some", "the cat follows the owl, and so on. ");
    // The tokenizer's own end token differs from the one that ends the documents.
    let mut tokenizer = read(&folder.join("some.tokenizer.json"));
    let mut added = tokenizer["added_tokens"][0].clone();
    let end = tokenizer["model"]["vocab"].as_object().unwrap().len();
    (added["id"], added["content"]) = (json!(end), json!("<|document|>"));
    tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("text.jsonl"), "{\"text\": \"cat\"}\n".repeat(300)).unwrap();
    let prepare = ["prepare", "text.jsonl", "--out", "data", "--tokenizer", "tokenizer.json", "--append-eod"];
    stdout(&kintsugi(&folder, &[&prepare[..], &["--eod", "<|document|>"]].concat()));
    assert_eq!(read(&folder.join("data.meta.json"))["end_of_document"], end);
    let settings =
        ["model.vocab=320", "data.source=data", "data.split=0.1", "run.steps=30", "optimizer.lr=0.01"];
    stdout(&tiny(&folder, &["train"], &settings));
    // Neither the token files nor the run are needed for the rest.
    fs::remove_file(folder.join("data.meta.json")).unwrap();
    stdout(&kintsugi(&folder, &["convert", "out", "resharded", "--set", "parallel.tp=2"]));
    stdout(&kintsugi(&folder, &["convert", "resharded", "model"]));
    for file in ["config.json", "generation_config.json"] {
        assert_eq!(read(&folder.join("model").join(file))["eos_token_id"], end, "{file}");
    }
    stdout(&kintsugi(&folder, &["convert", "model", "back"]));
    for from in ["out", "resharded", "model", "back"] {
        let arguments =
            ["generate", from, "--prompt", "cat", "--tokens", "9", "--temperature", "0", "--json"];
        let answer: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
        assert_eq!(answer["texts"][0]["tokens"], json!([end]), "{from}");
    }
}

#[test]
fn files_of_others_have_an_end_that_the_configuration_names() {
    let folder = folder("tokenizers-named-end");
    fs::write(folder.join("text.jsonl"), "{\"text\": \"some words\"}\n".repeat(100)).unwrap();
    let prepare = ["prepare", "text.jsonl", "--tokenizer", "bytes", "--out"];
    stdout(&kintsugi(&folder, &[&prepare[..], &["with", "--append-eod"]].concat()));
    stdout(&kintsugi(&folder, &[&prepare[..], &["without"]].concat()));
    let train = |sets: &[&str]| {
        tiny(&folder, &["train"], &[&["model.vocab=257", "data.split=0.1", "run.steps=1"], sets].concat())
    };
    stdout(&train(&["data.source=without", "data.end_of_document=10"]));
    stdout(&kintsugi(&folder, &["convert", "out", "model"]));
    assert_eq!(read(&folder.join("model/config.json"))["eos_token_id"], 10);
    let output = train(&["data.source=with", "data.end_of_document=10"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: data.end_of_document = 10 is not the token that ends documents in data.source, which is 256; leave it \
         out\n"
    );
}

#[test]
fn no_token_is_drawn_that_the_tokenizer_does_not_have() {
    let folder = folder("tokenizers-beyond");
    fs::write(folder.join("text.txt"), "some words ".repeat(100)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]));
    stdout(&tiny(
        &folder,
        &["train"],
        &["model.vocab=600", "data.source=data", "data.split=0.1", "run.steps=1"],
    ));
    for prompt in [["--prompt", "some"], ["--prompt-tokens", "115 111"]] {
        let arguments =
            ["generate", "out", "--tokens", "12", "--temperature", "1e6", "--ignore-end", "--json"];
        let answer: Value =
            serde_json::from_str(&stdout(&kintsugi(&folder, &[&arguments[..], &prompt].concat()))).unwrap();
        let tokens = answer["texts"][0]["tokens"].as_array().unwrap();
        assert_eq!(tokens.len(), 12);
        // More than half of the model's tokens are not in the tokenizer, so 12 draws would probably hit one.
        assert!(tokens.iter().all(|token| token.as_u64().unwrap() < 257), "{tokens:?}");
    }
}
