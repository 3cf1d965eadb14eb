//! `kintsugi config`: keys, the template, and resolved values.

use std::fs;

use serde_json::Value;

use crate::support::{folder, keys, kintsugi, stdout};

fn config(name: &str, arguments: &[&str]) -> String {
    stdout(&kintsugi(&folder(name), &[&["config"], arguments].concat()))
}

#[test]
fn every_key_has_its_default_and_its_values() {
    let text = config("config-keys", &[]);
    assert!(text.starts_with("[model]\n  preset  (default: none)\n"), "{text}");
    let schedule = "  schedule  (default: \"1f1b\")\n      \"gpipe\", \"1f1b\", \"interleaved\", \"zero-bubble\" (schedules). ";
    assert!(text.contains(schedule), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let rows: Vec<Value> = serde_json::from_str(&config("config-json", &["--json"])).unwrap();
    assert_eq!(keys(&rows[0]), ["key", "default", "allowed"]);
    let find = |key: &str| rows.iter().find(|row| row["key"] == key).unwrap_or_else(|| panic!("{key}"));
    assert_eq!(find("optimizer.lr")["default"], "3e-4");
    assert_eq!(find("cluster.links.node.bandwidth")["allowed"], "bytes/s");
}

#[test]
fn the_template_can_be_planned_once_it_names_a_model() {
    let folder = folder("config-template");
    let template = stdout(&kintsugi(&folder, &["config", "--template"]));
    fs::write(folder.join("run.toml"), &template).unwrap();
    let output = kintsugi(&folder, &["plan", "run.toml"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("error: model.layers is missing; "), "{said}");
    stdout(&kintsugi(
        &folder,
        &["plan", "run.toml", "--set", "model.preset=demo", "--set", "batch.sequence=64"],
    ));
}

#[test]
fn every_resolved_value_says_where_it_comes_from() {
    let folder = folder("config-resolved");
    fs::write(folder.join("run.toml"), "model.preset = \"gpt2-124m\"\nbatch.global = 8\n").unwrap();
    let arguments = ["config", "run.toml", "--set", "run.out=20251116", "--resolved"];
    let text = stdout(&kintsugi(&folder, &arguments));
    for (line, origin) in [
        ("model.layers = 12 ", "preset gpt2-124m"),
        ("batch.global = 8 ", "file run.toml"),
        ("run.out = \"20251116\" ", "--set"),
        ("optimizer.lr = 0.0003 ", "default"),
    ] {
        let found =
            text.lines().find(|found| found.starts_with(line)).unwrap_or_else(|| panic!("{line}: {text}"));
        assert!(found.ends_with(&format!("  # {origin}")), "{found}");
    }
    let json = stdout(&kintsugi(&folder, &[&arguments[..], &["--json"]].concat()));
    let rows: Vec<Value> = serde_json::from_str(&json).unwrap();
    assert_eq!(keys(&rows[0]), ["key", "value", "origin"]);
    fs::write(folder.join("resolved.toml"), &text).unwrap();
    stdout(&kintsugi(&folder, &["plan", "resolved.toml"]));
    let output = kintsugi(&folder, &["config", "run.toml"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
