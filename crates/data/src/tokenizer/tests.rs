//! Tokenizers give the tokens that they should, and any other file an error.

use kintsugi_testing::cases;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::train::letters;
use super::{Tokenizer, TrainedTokenizer, train_tokenizer};
use crate::corpus::Input;
use crate::testing::TestFolder;

/// A little English, enough for a few merges.
const TEXT: &str =
    "the cat sat on the mat. the dog sat on the log.\nThe end, the very end: 12 cats & 7 dögs!\n";

/// A byte-level tokenizer small enough to follow by hand: letters 0 to 5, then `th`, `the`, ` the`, and the end; the
/// other bytes follow.
fn small() -> Value {
    let mut tokenizer = named();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let others = letters().into_iter().map(String::from);
    let others: Vec<String> = others.filter(|letter| !vocab.contains_key(letter)).collect();
    vocab.extend(others.into_iter().zip(10..).map(|(letter, id)| (letter, json!(id))));
    tokenizer
}

fn named() -> Value {
    json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 },
        "padding": null,
        "added_tokens": [{ "id": 9, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false, "special": true }],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": { "t": 0, "h": 1, "e": 2, "Ġ": 3, "a": 4, "Ċ": 5, "th": 6, "the": 7, "Ġthe": 8, "<|endoftext|>": 9 },
            "merges": ["t h", "th e", "Ġ the"]
        }
    })
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encoder().encode(text).unwrap().to_vec()
}

#[test]
fn bytes_are_their_own_tokenizer() {
    let bytes = Tokenizer::open("bytes").unwrap();
    assert_eq!((bytes.vocab(), bytes.end_of_document()), (257, Some(256)));
    let text = "naïve\n";
    assert_eq!(tokens(&bytes, text), text.bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(bytes.decode(&[110, 97, 195, 175, 256, 118]).unwrap(), "naïv");
}

#[test]
fn a_tokenizer_json_encodes_as_its_merges_say_and_never_cuts() {
    let folder = TestFolder::new("tokenizer-small");
    let path = folder.write("tokenizer.json", small().to_string());
    let tokenizer = Tokenizer::open(&path).unwrap();
    assert_eq!((tokenizer.vocab(), tokenizer.end_of_document()), (260, Some(9)));
    assert_eq!(tokens(&tokenizer, "the the\ntha<|endoftext|>het"), [7, 8, 5, 6, 4, 9, 1, 2, 0]);
    assert_eq!(tokenizer.decode(&[7, 8, 5, 6, 4, 9]).unwrap(), "the the\ntha<|endoftext|>");
    assert_eq!(tokenizer.special("<|endoftext|>"), Some(9));
    assert_eq!(tokenizer.special("the"), None);
    let by_folder = Tokenizer::open(&folder.display().to_string()).unwrap();
    assert_eq!(tokens(&by_folder, "the"), [7]);
}

#[test]
fn the_end_of_a_document_is_what_the_configuration_names() {
    let folder = TestFolder::new("tokenizer-end");
    let path = folder.write("tokenizer.json", small().to_string());
    folder.write("tokenizer_config.json", json!({ "eos_token": { "content": "the" } }).to_string());
    assert_eq!(Tokenizer::open(&path).unwrap().end_of_document(), Some(7));
    folder.write("tokenizer_config.json", json!({ "eos_token": "unheard of" }).to_string());
    assert_eq!(Tokenizer::open(&path).unwrap().end_of_document(), None);
}

#[test]
fn an_added_token_is_what_it_is_encoded_as() {
    let folder = TestFolder::new("tokenizer-added");
    let mut odd = small();
    odd["added_tokens"][0]["content"] = json!("<eos>");
    odd["added_tokens"][0]["id"] = json!(3);
    let tokenizer = Tokenizer::open(&folder.write("tokenizer.json", odd.to_string())).unwrap();
    let end = tokens(&tokenizer, "<eos>");
    assert_eq!(end.len(), 1);
    assert_eq!(tokenizer.special("<eos>"), Some(end[0]));
    assert!((end[0] as usize) < tokenizer.vocab());
}

#[test]
fn gpt2s_two_files_are_the_same_tokenizer() {
    let folder = TestFolder::new("tokenizer-gpt2");
    folder.write("vocab.json", small()["model"]["vocab"].to_string());
    folder.write("merges.txt", "#version: 0.2\nt h\nth e\nĠ the\n\n");
    let tokenizer = Tokenizer::open(&folder.display().to_string()).unwrap();
    assert_eq!((tokenizer.vocab(), tokenizer.end_of_document()), (260, Some(9)));
    assert_eq!(tokens(&tokenizer, "the the\ntha<|endoftext|>het"), [7, 8, 5, 6, 4, 9, 1, 2, 0]);
}

#[test]
fn what_is_no_tokenizer_is_refused_in_a_sentence() {
    let folder = TestFolder::new("tokenizer-wrong");
    let refused = |path: &str| Tokenizer::open(path).err().expect("it is refused").to_string();
    assert!(
        refused("absent.json")
            .starts_with("cannot read absent.json: there is no such file or folder; a tokenizer of the")
    );
    assert!(refused(&folder.display().to_string()).ends_with("a vocab.json and a merges.txt"));
    let said = refused(&folder.write("a.json", "{"));
    assert!(said.contains("found no JSON (EOF"), "{said}");
    let said = refused(&folder.write("b.json", "[]"));
    assert!(said.contains("cannot use ") && said.contains("must be a JSON object"), "{said}");
    let mut huge = small();
    huge["model"]["vocab"]["the"] = json!(4_000_000_000_u64);
    let said = refused(&folder.write("c.json", huge.to_string()));
    assert!(
        said.ends_with("found token 4000000000 in a vocabulary of 261 words, expected tokens below 66580"),
        "{said}"
    );
    let mut none = small();
    (none["model"]["vocab"], none["added_tokens"]) = (json!({}), json!([]));
    assert!(refused(&folder.write("d.json", none.to_string())).contains("a vocabulary without words"));
}

#[test]
fn a_tokenizer_is_made_of_a_text() {
    let folder = TestFolder::new("tokenizer-made");
    let text = folder.write("text.txt", TEXT.repeat(50));
    let lines = folder.write("lines.jsonl", format!("{}\nbad\n", json!({ "text": TEXT })));
    let inputs = Input::find(&[text, lines]).unwrap();
    let out = folder.join("tokenizer.json");
    let TrainedTokenizer { tokenizer: made, text } = train_tokenizer(&inputs, "text", 280, &out).unwrap();
    assert_eq!((made.vocab(), text), (280, 51 * TEXT.len() as u64));
    assert_eq!(made.end_of_document(), Some(0));
    assert!(!out.exists(), "nothing is written");
    made.save(out.parent().unwrap()).unwrap();
    let opened = Tokenizer::open(&out.display().to_string()).unwrap();
    assert_eq!((opened.name(), opened.files()), (made.name(), made.files()));
    assert_eq!(tokens(&opened, TEXT), tokens(&made, TEXT));
    for text in [TEXT, "other words: ÆØÅ 漢字 🎉\t\0", ""] {
        let tokens = tokens(&made, text);
        assert_eq!(made.decode(&tokens).unwrap(), text);
        assert!(tokens.len() <= text.len());
    }
    assert!(tokens(&made, TEXT).len() < TEXT.len() / 2, "common words are single tokens");
    let again = train_tokenizer(&inputs, "text", 280, &out).unwrap().tokenizer;
    assert_eq!(again.files(), made.files(), "the same text gives the same file");
    let said = train_tokenizer(&inputs, "text", 256, &out).err().unwrap().to_string();
    assert!(said.starts_with("--train-tokenizer 256 must be from 257"), "{said}");
}

/// A tokenizer with one of its values replaced by another, somewhere.
fn nearly_a_tokenizer() -> impl Strategy<Value = Value> {
    let paths = [
        "/model",
        "/model/type",
        "/model/vocab",
        "/model/vocab/the",
        "/model/merges",
        "/model/merges/1",
        "/model/unk_token",
        "/model/byte_fallback",
        "/added_tokens",
        "/added_tokens/0",
        "/added_tokens/0/id",
        "/added_tokens/0/content",
        "/pre_tokenizer",
        "/pre_tokenizer/type",
        "/pre_tokenizer/use_regex",
        "/normalizer",
        "/decoder",
        "/post_processor",
        "/truncation",
        "/padding",
        "/version",
    ];
    let values = vec![
        json!(null),
        json!(0),
        json!(-1),
        json!(1e300),
        json!(70_000),
        json!(""),
        json!("the"),
        json!("t h e"),
        json!([]),
        json!([[]]),
        json!(["t", "h"]),
        json!([["t", "h"], ["x", "y"]]),
        json!([["a", 0.5], ["b", -1]]),
        json!({}),
        json!({ "type": "Sequence" }),
        json!({ "type": "Sequence", "normalizers": [{}] }),
        json!({ "type": "Split", "pattern": { "Regex": "(a+)+$" }, "behavior": "Isolated", "invert": false }),
        json!({ "type": "Split", "pattern": { "Regex": "((" }, "behavior": "Isolated", "invert": false }),
        json!({ "type": "Replace", "pattern": { "String": "" }, "content": "x" }),
        json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always" }),
        json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }),
        json!({ "type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {} }),
        json!({ "type": "WordPiece", "vocab": { "a": 0 }, "unk_token": "b", "continuing_subword_prefix": "##", "max_input_chars_per_word": 0 }),
        json!({ "type": "WordLevel", "vocab": { "a": 5 }, "unk_token": "a" }),
        json!({ "type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0], ["", 2.0]] }),
        json!("WordLevel"),
        json!("Unigram"),
        json!("Whitespace"),
        json!(true),
    ];
    let changes =
        prop::collection::vec((prop::sample::select(paths.to_vec()), prop::sample::select(values)), 0..4);
    changes.prop_map(|changes| {
        let mut value = small();
        for (path, new) in changes {
            if let Some(place) = value.pointer_mut(path) {
                *place = new;
            }
        }
        value
    })
}

/// Opens and uses a file in every way: nothing may panic.
fn use_it(text: &[u8]) {
    let folder = TestFolder::new("tokenizer-any");
    let Ok(tokenizer) = Tokenizer::open(&folder.write("tokenizer.json", text)) else { return };
    for text in ["", "the cat<|endoftext|> ▁a\n\0 ÆØÅ", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"] {
        if let Ok(tokens) = tokenizer.encoder().encode(text) {
            assert!(tokens.iter().all(|&token| (token as usize) < tokenizer.vocab()));
            tokenizer.decode(tokens).ok();
        }
    }
    tokenizer.decode(&[0, 1, 9, 10, 300, 70_000, u32::MAX]).ok();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(200, 600), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_description_is_used_or_refused(value in nearly_a_tokenizer()) {
        use_it(value.to_string().as_bytes());
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..100), at in 0..3500_usize) {
        use_it(&bytes);
        let mut text = small().to_string().into_bytes();
        let at = at.min(text.len());
        text.splice(at..(at + bytes.len() / 8).min(text.len()), bytes.iter().take(3).copied());
        use_it(&text);
    }
}
