//! Text, tokenizers and token files.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use kintsugi_data::{Split, TokenFile, Tokenizer};
use kintsugi_engine::dataset;
use kintsugi_plan::config::ConfigSource;

use crate::harness::{Files, Target, as_it_is, files_of, kintsugi};

const TEXT: &str =
    "A plan is a list of steps. The steps have numbers: 12, 345 and 6789; \u{e4}\u{f6}\u{fc} \u{1F600}.\n";

fn texts(folder: &Path) {
    fs::create_dir_all(folder.join("texts")).unwrap();
    for number in 1..5 {
        fs::write(folder.join(format!("texts/{number}.txt")), TEXT.repeat(number)).unwrap();
    }
}

/// `.bin`, `.idx` and `.meta.json`.
pub fn token_files(folder: &Path) -> Target {
    texts(folder);
    let prepare = ["prepare", "texts", "--tokenizer", "bytes", "--append-eod", "--out", "corpus"];
    kintsugi(folder, &prepare);
    let files = files_of(folder, |name| name.starts_with("corpus."));
    let mut foreign = files.clone();
    foreign.remove("corpus.meta.json");
    Target {
        seeds: vec![files, foreign],
        changed: &[".idx", ".idx", ".bin", ".meta.json"],
        repair: as_it_is,
        read: read_tokens,
    }
}

fn read_tokens(folder: &Path) -> bool {
    let prefix = folder.join("corpus");
    let file = TokenFile::open(&prefix);
    if let Ok(file) = &file {
        let mut tokens = [0; 40];
        for first in [0, 1, 97, file.tokens().saturating_sub(40)] {
            file.read(first, 257, &mut tokens).ok();
            file.read_starts(first, &mut tokens).ok();
            file.document_from(first).ok();
        }
    }
    let sets = [
        format!("data.source={}", prefix.display()),
        "model.vocab=257".to_owned(),
        "batch.sequence=16".to_owned(),
        "data.mask_documents=true".to_owned(),
        "data.split=0.1".to_owned(),
    ];
    let plan = ConfigSource::demo().sets(sets).plan().expect("the configuration is right");
    if let Ok(data) = dataset(&plan) {
        let (mut tokens, mut starts) = ([0; 17], [0; 16]);
        for (split, index) in [(Split::Train, 0), (Split::Train, 1 << 40), (Split::Validation, 3)] {
            data.sample(split, index, &mut tokens).ok();
            data.starts(split, index, &mut starts).ok();
        }
    }
    file.is_ok()
}

/// The key of texts in the files that other programs have written.
const KEY: &str = "body";

/// What `prepare` reads, by the program itself.
pub fn documents(_: &Path) -> Target {
    let lines = format!("{{\"{KEY}\": {TEXT:?}}}\n").replace("\\u{", "{").repeat(3);
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(TEXT.repeat(9).as_bytes()).unwrap();
    let one = |name: &str, bytes: Vec<u8>| Files::from([(name.to_owned(), bytes)]);
    Target {
        seeds: vec![
            one("a.txt", TEXT.repeat(3).into_bytes()),
            one("a.jsonl", lines.into_bytes()),
            one("a.txt.gz", packed.finish().unwrap()),
            one("a.txt.zst", zstd(TEXT.as_bytes())),
            fixture("rows.jsonl.bz2"),
            fixture("rows.jsonl.xz"),
            fixture("rows-snappy.parquet"),
            fixture("rows-zstd.parquet"),
        ],
        changed: &[],
        repair: as_it_is,
        read: prepare,
    }
}

/// A file that other programs have written.
fn fixture(name: &str) -> Files {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    Files::from([(name.to_owned(), fs::read(path).unwrap())])
}

/// A Zstandard frame with one block that is stored as it is (RFC 8878).
fn zstd(text: &[u8]) -> Vec<u8> {
    let length = u8::try_from(text.len()).expect("a short text");
    let block = (u32::from(length) << 3 | 1).to_le_bytes();
    [&[0x28, 0xB5, 0x2F, 0xFD, 0x20, length], &block[..3], text].concat()
}

fn prepare(folder: &Path) -> bool {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kintsugi"));
    command.args([
        "prepare",
        ".",
        "--tokenizer",
        "bytes",
        "--overwrite",
        "--workers",
        "1",
        "--out",
        "../prepared",
        "--json-key",
        KEY,
    ]);
    let output = command.current_dir(folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0..=2)), "{}: {said}", output.status);
    assert!(!said.contains("panicked"), "{said}");
    output.status.success()
}

/// `tokenizer.json` with its configuration, and `vocab.json` with `merges.txt`.
pub fn tokenizers(folder: &Path) -> Target {
    texts(folder);
    kintsugi(folder, &["prepare", "texts", "--train-tokenizer", "290", "--append-eod", "--out", "corpus"]);
    let [tokenizer, config] = ["tokenizer.json", "tokenizer_config.json"]
        .map(|name| (name.to_owned(), fs::read(folder.join(format!("corpus.{name}"))).unwrap()));
    let described: serde_json::Value = serde_json::from_slice(&tokenizer.1).unwrap();
    let model = &described["model"];
    let merge = |merge: &serde_json::Value| match merge {
        serde_json::Value::Array(pair) => {
            pair.iter().filter_map(|part| part.as_str()).collect::<Vec<_>>().join(" ")
        }
        merge => merge.as_str().unwrap_or_default().to_owned(),
    };
    let merges: Vec<String> = model["merges"].as_array().unwrap().iter().map(merge).collect();
    let old = Files::from([
        ("vocab.json".to_owned(), model["vocab"].to_string().into_bytes()),
        ("merges.txt".to_owned(), merges.join("\n").into_bytes()),
    ]);
    let new = Files::from([tokenizer, config]);
    Target {
        seeds: vec![new, unigram(), word_piece(), old],
        changed: &[],
        repair: as_it_is,
        read: read_tokenizer,
    }
}

/// A tokenizer of pieces with probabilities, with most of what can stand around a model.
fn unigram() -> Files {
    let text = r#"{"version": "1.0", "truncation": null, "padding": null,
 "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
 "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
 "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": "_"}, "behavior": "MergedWithNext", "invert": false}, {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated", "invert": false}, {"type": "Digits", "individual_digits": true}]},
 "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
  "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
  "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
 "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
 "model": {"type": "Unigram", "unk_id": 1, "byte_fallback": false,
  "vocab": [["<s>", 0.0], ["<unk>", 0.0], ["_", -2.0], ["a", -2.5], ["s", -2.6], ["st", -3.0], ["step", -3.5], ["plan", -4.0]]}}"#;
    Files::from([("tokenizer.json".to_owned(), text.as_bytes().to_vec())])
}

fn word_piece() -> Files {
    let text = r###"{"version": "1.0", "truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}, "padding": null, "added_tokens": [],
 "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
 "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
 "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
  "vocab": {"[UNK]": 0, "a": 1, "plan": 2, "step": 3, "##s": 4, "is": 5, ".": 6}}}"###;
    Files::from([("tokenizer.json".to_owned(), text.as_bytes().to_vec())])
}

fn read_tokenizer(folder: &Path) -> bool {
    let Ok(tokenizer) = Tokenizer::open(&folder.display().to_string()) else { return false };
    let mut encoder = tokenizer.encoder();
    encoder.encode_prompt("").ok();
    tokenizer.decode(&[0, 1, 255, u32::MAX]).ok();
    encoder.encode(TEXT).is_ok_and(|tokens| tokenizer.decode(tokens).is_ok())
}
