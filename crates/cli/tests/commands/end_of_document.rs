//! A run stores the token that ends documents, and reports what it could not compare.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{folder, kintsugi, stdout, tiny};

/// A folder with the token files `ended`, whose documents end with token 256, and `plain`, whose documents end with none.
fn prepared(name: &str) -> PathBuf {
    let folder = folder(name);
    fs::write(folder.join("a.txt"), "a line of text\n".repeat(200)).unwrap();
    for (name, more) in [("ended", &["--append-eod"][..]), ("plain", &[])] {
        let common = ["prepare", "a.txt", "--out", name, "--tokenizer", "bytes"];
        stdout(&kintsugi(&folder, &[&common, more].concat()));
    }
    folder
}

fn train(folder: &Path, arguments: &[&str], settings: &[&str]) -> Output {
    tiny(folder, &[&["train"], arguments].concat(), &[&["model.vocab=257"], settings].concat())
}

fn warnings(output: &Output) -> String {
    stdout(output);
    let said = String::from_utf8_lossy(&output.stderr);
    said.split_inclusive('\n').filter(|line| line.starts_with("warning: ")).collect()
}

#[test]
fn a_resumed_run_keeps_the_token_that_ends_documents() {
    let folder = prepared("end-of-document-resumed");
    let config = || fs::read_to_string(folder.join("out/config.toml")).unwrap();
    stdout(&train(&folder, &[], &["data.source=ended", "run.steps=2"]));
    assert!(config().contains("end_of_document = 256\n"), "{}", config());
    // The file with that token is removed.
    fs::remove_file(folder.join("ended.meta.json")).unwrap();
    let output = train(&folder, &["--resume"], &["data.source=ended", "run.steps=3"]);
    assert_eq!(warnings(&output), "");
    assert!(config().contains("end_of_document = 256\n"), "the files do not say: {}", config());
    let other = ["data.source=ended", "data.end_of_document=10", "run.steps=4"];
    let said = warnings(&train(&folder, &["--resume"], &other));
    let expected = "warning: documents end with token 10, and those that the checkpoint was trained on with token 256; \
                    generated texts will end with token 10\n";
    assert_eq!(said, expected);
}

#[test]
fn a_tokenizer_that_cannot_be_used_is_named() {
    let folder = prepared("end-of-document-tokenizer");
    let source = ["data.source=plain"];
    fs::write(folder.join("plain.tokenizer.json"), "{").unwrap();
    let said = warnings(&train(&folder, &[], &source));
    let expected = "warning: the tokenizer of plain is not compared with the others: plain.tokenizer.json: found no JSON";
    assert!(said.starts_with(expected), "{said}");
    fs::remove_file(folder.join("plain.tokenizer.json")).unwrap();
    let about = fs::read_to_string(folder.join("plain.meta.json")).unwrap();
    fs::write(folder.join("plain.meta.json"), about.replace("\"bytes\"", "\"gone.json\"")).unwrap();
    assert_eq!(warnings(&train(&folder, &[], &source)), "", "a tokenizer that is not there is left out");
}
