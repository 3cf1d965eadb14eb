//! Tokenizers of other programs: their rules are applied, or refused with a message, always in bounded time and memory.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Map, Value, json};

use crate::support::{folder, stdout, under};

/// A tokenizer of letters and digits that is split by a regular expression.
fn letters(normalizer: &Value, pattern: &str) -> Value {
    let tokens: Vec<String> = ('0'..='9').chain('a'..='f').map(String::from).collect();
    let mut vocab: Map<String, Value> =
        tokens.into_iter().zip(0..).map(|(token, id)| (token, json!(id))).collect();
    for (token, id) in [("12", 16), ("123", 17), ("34", 18), ("٣", 19), (" ", 20)] {
        vocab.insert(token.to_owned(), json!(id));
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false },
        "post_processor": null, "decoder": null,
        "model": { "type": "BPE", "vocab": vocab, "merges": ["1 2", "12 3", "3 4"] },
    })
}

fn tokenize(folder: &Path, tokenizer: &Value, text: &str) -> Output {
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("a.txt"), text).unwrap();
    let arguments = [
        "prepare",
        "a.txt",
        "--out",
        "out/a",
        "--tokenizer",
        "tokenizer.json",
        "--overwrite",
        "--workers",
        "1",
    ];
    under(folder, "-v 4194304", &arguments)
}

#[test]
fn a_tokenizer_may_split_numbers_by_a_regular_expression() {
    let folder = folder("tokenizers-split");
    let ids = |pattern: &str| -> Vec<u8> {
        stdout(&tokenize(&folder, &letters(&Value::Null, pattern), "ab 12345 34٣"));
        fs::read(folder.join("out/a.bin")).unwrap().chunks_exact(2).map(|token| token[0]).collect()
    };
    // Digit by digit no merge applies; by threes 123 is one token, and so is 34 before a digit of another script.
    assert_eq!(ids(r"\p{N}"), [10, 11, 20, 1, 2, 3, 4, 5, 20, 3, 4, 19]);
    assert_eq!(ids(r"\p{N}{1,3}"), [10, 11, 20, 17, 4, 5, 20, 18, 19]);
    // One rule after the other, as DeepSeek has them: 12 is split off the threes.
    let mut both = letters(&Value::Null, r"\p{N}{1,3}");
    let (first, mut second) = (both["pre_tokenizer"].clone(), both["pre_tokenizer"].clone());
    second["pattern"]["Regex"] = json!("12(?=3)");
    both["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [first, second] });
    stdout(&tokenize(&folder, &both, "12312"));
    assert_eq!(fs::read(folder.join("out/a.bin")).unwrap(), [16, 0, 3, 0, 16, 0]);
    let output = tokenize(&folder, &letters(&Value::Null, "(("), "ab");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: cannot use tokenizer.json: "), "{said}");
}

#[test]
fn normalizers_that_multiply_a_text_are_refused() {
    let folder = folder("tokenizers-growth");
    let double = json!({ "type": "Replace", "pattern": { "String": "a" }, "content": "aa" });
    let times = |count: usize| json!({ "type": "Sequence", "normalizers": vec![double.clone(); count] });
    stdout(&tokenize(&folder, &letters(&times(2), "x"), "abc"));
    assert_eq!(fs::read(folder.join("out/a.bin")).unwrap().len(), 2 * "aaaabc".len());
    let output = tokenize(&folder, &letters(&times(16), "x"), &"a".repeat(68 << 10));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.starts_with("error: a.txt, line 1: cannot use tokenizer.json: its normalizers make "),
        "{said}"
    );
    // The library normalizes added tokens when it reads them.
    let mut added = letters(&times(40), "x");
    added["added_tokens"] = json!([{ "id": 21, "content": "a", "single_word": false, "lstrip": false,
                                     "rstrip": false, "normalized": true, "special": false }]);
    let output = tokenize(&folder, &added, "b");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: cannot use tokenizer.json: its normalizers make "), "{said}");
}

#[test]
fn a_panic_of_the_library_is_an_error_in_one_sentence() {
    let folder = folder("tokenizers-panic");
    // A search tree of a single node whose edges lead beyond it.
    let broken = json!({ "type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABhAA==" });
    let output = tokenize(&folder, &letters(&broken, "x"), "abc");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: a.txt, line 1: cannot use tokenizer.json: the tokenizers library cannot read this file; it may be damaged\n"
    );
}

#[test]
fn a_tokenizer_is_made_of_a_text_without_spaces() {
    let folder = folder("tokenizers-long-word");
    let mut state = 1_u32;
    let letter = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from(b'a' + (state >> 24) as u8 % 26)
    };
    let word: String = (0..400_000).map(letter).collect();
    fs::write(folder.join("a.txt"), &word).unwrap();
    let arguments = ["prepare", "a.txt", "--out", "a", "--train-tokenizer", "1000", "--json"];
    let output = under(&folder, "-t 60", &arguments);
    let summary: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&summary["vocab"], &summary["text_bytes"]), (&json!(1000), &json!(400_000)));
    assert!(summary["tokens"].as_u64().unwrap() < 250_000, "pairs of letters are tokens: {summary}");
}

#[test]
fn a_word_of_any_length_is_no_reason_to_take_all_memory() {
    let folder = folder("tokenizers-word");
    let mut words = letters(&Value::Null, "x");
    words["model"] = json!({ "type": "WordPiece", "vocab": { "a": 0, "b": 1 }, "unk_token": "b",
                             "continuing_subword_prefix": "##", "max_input_chars_per_word": 4_294_967_295_u32 });
    let output = tokenize(&folder, &words, "abc");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("max_input_chars_per_word = 4294967295") && said.contains("at most 65536"),
        "{said}"
    );
}

#[test]
fn a_token_of_any_length_is_no_reason_to_overflow_the_stack() {
    let folder = folder("tokenizers-token");
    let mut pieces = letters(&Value::Null, "x");
    let long = "a".repeat(1 << 20);
    pieces["model"] = json!({ "type": "Unigram", "unk_id": 0, "byte_fallback": false,
                              "vocab": [["b", -1.0], ["a", -1.0], [long, -2.0]] });
    let output = tokenize(&folder, &pieces, "ab");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("token 2 of 1048576 bytes") && said.contains("at most 1024"), "{said}");
}
