//! Generation and evaluation of models.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::support::{command, folder, kintsugi, stdout, tiny};

/// A folder in which the tiny model was trained on the demo, on eight ranks.
fn trained(name: &str) -> std::path::PathBuf {
    let folder = folder(name);
    stdout(&tiny(&folder, &["train"], &["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"]));
    folder
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&kintsugi(folder, &[arguments, &["--json"]].concat()))).unwrap()
}

/// The message of an error.
fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = kintsugi(folder, arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn every_layout_writes_the_same_text() {
    let folder = trained("generate-layouts");
    let prompts = ["generate", "out", "--tokens", "8", "--prompt", "the dog", "--prompt", "Ada"];
    let one = json(&folder, &prompts);
    let texts = one["texts"].as_array().unwrap();
    assert_eq!(texts[0]["prompt"], "the dog");
    assert_eq!(texts[0]["prompt_tokens"].as_array().unwrap().len(), 3, "the first word is put first");
    assert_eq!(texts[0]["tokens"].as_array().unwrap().len(), 8);
    assert_eq!((&one["prompt_tokens"], &one["new_tokens"]), (&5.into(), &16.into()));
    assert!(one["tokens_per_s"].as_f64().unwrap() > 0.0);
    for layout in [&["parallel.tp=2"][..], &["parallel.pp=2"], &["parallel.tp=2", "parallel.dp=2"]] {
        let sets = layout.iter().flat_map(|set| ["--set", set]);
        let arguments: Vec<&str> = prompts.into_iter().chain(sets).collect();
        assert_eq!(json(&folder, &arguments)["texts"], one["texts"], "{layout:?}");
    }
    let other = json(&folder, &[&prompts[..], &["--seed", "2"]].concat());
    assert_ne!(other["texts"], one["texts"]);
}

#[test]
fn a_text_is_shown_as_it_grows_and_several_when_they_are_done() {
    let folder = trained("generate-show");
    let greedy = ["generate", "out", "--tokens", "6", "--temperature", "0", "--prompt", "the dog"];
    let answer = json(&folder, &greedy);
    let text = answer["texts"][0]["text"].as_str().unwrap();
    assert!(text.starts_with(' '), "{text:?}");
    assert_eq!(stdout(&kintsugi(&folder, &greedy)), format!("{text}\n"));
    let two = stdout(&kintsugi(&folder, &[&greedy[..], &["--prompt", "Ada"]].concat()));
    assert!(two.starts_with(&format!("── the dog\n{text}\n── Ada\n ")), "{two}");

    let mut piped = command(&folder, &["generate", "out", "--tokens", "6", "--temperature", "0"]);
    let mut piped = piped.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    piped.stdin.take().unwrap().write_all(b"the dog\n").unwrap();
    assert_eq!(stdout(&piped.wait_with_output().unwrap()), format!("{text}\n"));
    fs::write(folder.join("prompt.txt"), "the dog").unwrap();
    let file = ["generate", "out", "--tokens", "6", "--temperature", "0", "--prompt-file", "prompt.txt"];
    assert_eq!(stdout(&kintsugi(&folder, &file)), format!("{text}\n"));
    let tokens = answer["texts"][0]["tokens"].as_array().unwrap();
    let numbers = tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ") + " ";
    let prompt = answer["texts"][0]["prompt_tokens"].to_string();
    let prompt = prompt.trim_matches(['[', ']']);
    let by_number = ["generate", "out", "--tokens", "6", "--temperature", "0", "--prompt-tokens", prompt];
    assert_eq!(stdout(&kintsugi(&folder, &by_number)), format!("{numbers}\n"));
}

#[test]
fn an_evaluation_is_the_one_of_training() {
    let folder = trained("eval-demo");
    let summary: Value =
        serde_json::from_str(&fs::read_to_string(folder.join("out/summary.json")).unwrap()).unwrap();
    let trained = summary["validation_loss"].as_f64().unwrap();
    for layout in [&[][..], &["--set", "parallel.tp=2", "--set", "parallel.pp=2"]] {
        let answer = json(&folder, &[&["eval", "out"], layout].concat());
        let loss = answer["loss"].as_f64().unwrap();
        assert!((loss - trained).abs() < 1e-5, "{loss} against {trained}");
        assert!((answer["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
        assert_eq!(answer["tokens"], 4 * 4 * 16);
    }
    let text = stdout(&kintsugi(&folder, &["eval", "out", "--samples", "3"]));
    assert!(text.contains("perplexity ") && text.contains("tokens      48, "), "{text}");
}

#[test]
fn a_model_of_token_files_speaks_their_tokenizers_language() {
    let folder = folder("generate-tokens");
    fs::write(folder.join("text.txt"), "abcdefgh ".repeat(200)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]));
    let settings =
        ["model.vocab=257", "data.source=data", "data.split=0.1", "run.steps=40", "optimizer.lr=0.01"];
    stdout(&tiny(&folder, &["train"], &settings));
    let answer =
        json(&folder, &["generate", "out", "--tokens", "9", "--temperature", "0", "--prompt", "abcd"]);
    assert_eq!(answer["texts"][0]["text"], "efgh abcd", "it has learned its text");
    let eval = |arguments: &[&str]| json(&folder, &[&["eval", "out"], arguments].concat());
    let whole = eval(&["--data", "data"]);
    // 1800 tokens: the first is not a target, and tokens that do not fill a sample are left out.
    assert_eq!(whole["tokens"], 1799 / 16 * 16);
    assert!(whole["perplexity"].as_f64().unwrap() < 2.0, "{whole}");
    let [own, validation] = [eval(&[]), eval(&["--split", "validation"])];
    assert_eq!((&own["loss"], &own["tokens"]), (&validation["loss"], &validation["tokens"]));
    assert!(own["tokens"].as_u64() < whole["tokens"].as_u64());
}

#[test]
fn every_sample_counts_whatever_the_batches() {
    let folder = folder("eval-samples");
    fs::write(folder.join("text.txt"), "abcdefgh, some words and 12 numbers. ".repeat(50)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]));
    stdout(&tiny(&folder, &["train"], &["model.vocab=257", "data.source=data", "data.split=0.1"]));
    let eval = |sets: &[&str], more: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        json(
            &folder,
            &["eval", "out", "--data", "data"]
                .into_iter()
                .chain(sets)
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        )
    };
    for samples in [&[][..], &["--samples", "1"], &["--samples", "5"]] {
        let one = eval(&["batch.micro=1"], samples);
        for layout in [
            &["batch.micro=7", "batch.global=7"][..],
            &["batch.micro=3", "parallel.dp=3", "batch.global=9"],
            &["batch.micro=5", "parallel.pp=2", "parallel.tp=2", "batch.global=5"],
            &["batch.micro=2", "parallel.dp=4", "parallel.pp=2", "sharding.zero=3", "batch.global=8"],
        ] {
            let other = eval(layout, samples);
            assert_eq!(other["tokens"], one["tokens"], "{layout:?}");
            let losses = [&one, &other].map(|answer| answer["loss"].as_f64().unwrap());
            assert!((losses[0] - losses[1]).abs() < 2e-6, "{losses:?} {layout:?}");
        }
    }
    assert_eq!(eval(&[], &[])["tokens"], (37 * 50 - 1) / 16 * 16);
}

#[test]
fn a_folders_special_tokens_begin_and_end_its_texts() {
    let folder = trained("generate-special");
    fs::write(folder.join("text.txt"), "ab").unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "bytes", "--tokenizer", "bytes"]));
    stdout(&kintsugi(&folder, &["convert", "out", "model"]));
    // The tokenizer adds "a", token 97, before every text.
    let tokenizer = fs::read_to_string(folder.join("bytes.tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&tokenizer).unwrap();
    tokenizer["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "a", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "a": { "id": "a", "ids": [97], "tokens": ["a"] } },
    });
    fs::write(folder.join("model/tokenizer.json"), tokenizer.to_string()).unwrap();
    let generate = |more: &[&str]| {
        let arguments = ["generate", "model", "--prompt", "b", "--tokens", "9", "--temperature", "0"];
        json(&folder, &[&arguments, more].concat())["texts"][0].clone()
    };
    let endless = generate(&[]);
    assert_eq!(endless["prompt_tokens"], serde_json::json!([97, 98]));
    let tokens: Vec<u64> =
        endless["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect();
    assert_eq!(tokens.len(), 9);
    let until = |end: u64| {
        let place = tokens.iter().position(|&token| token == end).unwrap();
        serde_json::json!(tokens[..=place])
    };
    let path = folder.join("model/config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["eos_token_id"] = tokens[4].into();
    fs::write(&path, config.to_string()).unwrap();
    assert_eq!(generate(&[])["tokens"], until(tokens[4]), "a number in config.json");
    let ends = serde_json::json!({ "eos_token_id": [127, tokens[2]] });
    fs::write(folder.join("model/generation_config.json"), ends.to_string()).unwrap();
    assert_eq!(generate(&[])["tokens"], until(tokens[2]), "a list in generation_config.json comes first");
    assert_eq!(generate(&["--ignore-end"])["tokens"], endless["tokens"]);
}

#[test]
fn a_hugging_face_folder_is_as_good_as_a_checkpoint() {
    let folder = trained("generate-huggingface");
    stdout(&kintsugi(&folder, &["convert", "out", "model"]));
    let tokens = |from: &str| {
        let settings = ["--tokens", "6", "--temperature", "0", "--prompt-tokens", "0 5 9"];
        json(&folder, &[&["generate", from], &settings[..]].concat())["texts"][0]["tokens"].clone()
    };
    assert_eq!(tokens("model"), tokens("out"));
    let said = refused(&folder, &["generate", "model", "--prompt", "the dog"]);
    insta::assert_snapshot!(said, @"error: no tokenizer is known for this model; choose one with --tokenizer, or use --prompt-tokens");
    let named = ["generate", "model", "--prompt", "the dog", "--tokens", "4", "--tokenizer", "demo"];
    assert!(!stdout(&kintsugi(&folder, &named)).trim().is_empty());
    let said = refused(&folder, &["eval", "model"]);
    assert_eq!(said, "error: a Hugging Face folder has no data; add --data PREFIX\n");
}

#[test]
fn texts_grow_as_long_as_there_are_positions_unless_told_otherwise() {
    let folder = trained("generate-default");
    let answer = json(&folder, &["generate", "out", "--prompt", "the dog", "--ignore-end"]);
    // Sixteen positions: the prompt has three tokens, and the last token is not fed.
    assert_eq!(answer["new_tokens"], 14);
}

#[test]
fn mistakes_get_a_sentence() {
    let folder = trained("generate-mistakes");
    let said = |arguments: &[&str]| refused(&folder, &[&["generate", "out"], arguments].concat());
    insta::assert_snapshot!(said(&["--prompt", ""]), @"error: prompt 1 is empty; it needs at least one word");
    insta::assert_snapshot!(
        said(&["--prompt", "the dog", "--tokens", "100"]),
        @"error: prompt 1 has 3 tokens, and with 100 generated tokens it exceeds the model's 16 learned positions; shorten it or generate fewer tokens"
    );
    let unknown = said(&["--prompt", "the unicorn"]);
    assert!(unknown.starts_with("error: \"unicorn\" is not a word of the demo's language"), "{unknown}");
    assert_eq!(unknown.lines().count(), 1);
    insta::assert_snapshot!(
        said(&["--prompt-tokens", "1 x"]),
        @r#"error: --prompt-tokens has "x", which is not a token number"#
    );
    insta::assert_snapshot!(
        said(&["--prompt-tokens", "1 128", "--tokens", "1"]),
        @"error: prompt 1 has token 128, but the model's vocabulary has 128 tokens"
    );
    insta::assert_snapshot!(
        said(&["--prompt", "the dog", "--tokens", "2", "--top-p", "1.5"]),
        @"error: top-p = 1.5 must be above 0 and at most 1"
    );
    insta::assert_snapshot!(
        said(&["--prompt", "the dog", "--tokens", "2", "--set", "parallel.tp=3"]),
        @"error: parallel.tp = 3 does not divide model.heads = 2; use 1 or 2"
    );
    for command in ["generate", "eval"] {
        let said = refused(&folder, &[command, "nowhere"]);
        assert!(said.starts_with("error: nowhere: ") || said.contains("nowhere"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let said = refused(&folder, &["eval", "out", "--data", "nowhere"]);
    assert!(said.contains("nowhere"), "{said}");
}
