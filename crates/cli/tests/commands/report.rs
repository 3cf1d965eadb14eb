//! Pages about runs, plans and searches.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{folder, kintsugi, stdout, tiny};

/// What the page of these arguments shows.
fn shown(folder: &Path, arguments: &[&str]) -> Value {
    let arguments = [&["report"], arguments, &["--json"]].concat();
    serde_json::from_str(&stdout(&kintsugi(folder, &arguments))).expect("JSON")
}

/// The items of all sections.
fn items(report: &Value) -> Vec<&Value> {
    let sections = report["sections"].as_array().expect("sections");
    sections.iter().flat_map(|section| section["items"].as_array().expect("items")).collect()
}

fn titles(report: &Value) -> Vec<&str> {
    items(report).iter().map(|item| item["title"].as_str().expect("a title")).collect()
}

fn item<'a>(report: &'a Value, title: &str) -> &'a Value {
    let found = items(report).into_iter().find(|item| item["title"] == title);
    found.unwrap_or_else(|| panic!("no {title} among {:?}", titles(report)))
}

/// The names of a chart's series.
fn series(chart: &Value) -> Vec<&str> {
    let series = chart["series"].as_array().expect("series");
    series.iter().map(|series| series["name"].as_str().expect("a name")).collect()
}

/// The rows of a table by their first cell.
fn row<'a>(table: &'a Value, name: &str) -> &'a Value {
    let rows = table["rows"].as_array().expect("rows");
    rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("no row {name} in {table}"))
}

#[test]
fn a_run_is_shown_beside_its_prediction() {
    let folder = folder("report-run");
    stdout(&tiny(&folder, &["train", "--trace", "out/trace.json"], &["run.checkpoint_every=2"]));
    let report = shown(&folder, &["out"]);
    assert_eq!(report["title"], "Run out");
    let loss = item(&report, "Loss");
    assert_eq!(series(loss), ["training loss", "validation loss", "a perfect model"]);
    assert_eq!(loss["series"][0]["x"], serde_json::json!([1.0, 2.0, 3.0, 4.0]));
    assert_eq!(loss["marks"].as_array().map(Vec::len), Some(2), "two checkpoints");
    for title in ["Gradient norm", "Learning rate", "Tokens per second", "Time of a step"] {
        assert_eq!(item(&report, title)["series"][0]["y"].as_array().map(Vec::len), Some(4), "{title}");
    }
    let memory = item(&report, "Memory of the fullest rank of each stage");
    let places = ["0 predicted", "0 measured", "1 predicted", "1 measured"];
    assert_eq!(memory["x"]["categories"], serde_json::json!(places));
    for category in memory["series"].as_array().expect("categories") {
        assert_eq!(category["y"][0], category["y"][1], "predicted memory is measured memory");
    }
    let traffic = item(&report, "Traffic of a step, over all ranks");
    assert_eq!(series(traffic), ["predicted", "measured"]);
    assert_eq!(traffic["series"][0]["y"], traffic["series"][1]["y"]);
    assert_eq!(row(item(&report, "Predicted and measured"), "memory, total")[3], "none");
    let measured = item(&report, "Measured schedule");
    assert_eq!(measured["rows"].as_array().map(Vec::len), Some(8), "ranks");
    assert!(measured["flows"].as_array().is_some_and(|flows| !flows.is_empty()));
    assert!(measured["flops"].as_array().expect("FLOPs").iter().any(|flops| flops.as_u64() > Some(0)));
    assert_eq!(item(&report, "Predicted schedule")["rows"].as_array().map(Vec::len), Some(2), "stages");
    let said = stdout(&kintsugi(&folder, &["report", "out"]));
    assert!(said.starts_with("report   report.html ("), "{said}");
    let page = fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(page.contains("Content-Security-Policy") && page.contains("\"training loss\""));
}

#[test]
fn several_runs_are_drawn_over_each_other_and_names_stay_text() {
    let folder = folder("report-runs");
    let hostile = "<script>alert(1)<";
    stdout(&tiny(&folder, &["train"], &["run.out=a", "run.steps=2"]));
    let out = format!("run.out=\"{hostile}\"");
    stdout(&tiny(&folder, &["train"], &[&out, "run.steps=3", "optimizer.lr=0.01"]));
    let report = shown(&folder, &["a", hostile]);
    assert_eq!(report["title"], "2 runs");
    let loss = item(&report, "Loss");
    assert_eq!(series(loss), ["a", hostile, "a, validation", &format!("{hostile}, validation")]);
    let differences = item(&report, "Keys of the configuration");
    assert_eq!(row(differences, "run.steps"), &serde_json::json!(["run.steps", "2", "3"]));
    assert_eq!(row(differences, "optimizer.lr")[2], "0.01");
    assert!(!titles(&report).contains(&"Measured schedule"));
    stdout(&kintsugi(&folder, &["report", "a", hostile, "--out", "b.html"]));
    let page = fs::read_to_string(folder.join("b.html")).unwrap();
    assert!(!page.contains(hostile), "its name is escaped everywhere");
}

#[test]
fn a_run_without_a_summary_is_shown_as_far_as_it_got() {
    let folder = folder("report-unfinished");
    stdout(&tiny(&folder, &["train"], &[]));
    fs::remove_file(folder.join("out/summary.json")).unwrap();
    let metrics = folder.join("out/metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, &text[..text.len() - 20]).unwrap();
    let report = shown(&folder, &["out"]);
    assert_eq!(item(&report, "Loss")["series"][0]["x"], serde_json::json!([1.0, 2.0, 3.0]));
    assert_eq!(row(item(&report, ""), "state")[1], "running");
    let memory = item(&report, "Memory of the fullest rank of each stage");
    assert_eq!(memory["x"]["categories"], serde_json::json!(["0 predicted", "1 predicted"]));
    fs::write(folder.join("out/config.toml"), "model.preset = \"unknown\"\n").unwrap();
    let report = shown(&folder, &["out"]);
    let note = "the configuration of out cannot be planned here, so nothing is predicted for it";
    assert_eq!(report["notes"], serde_json::json!([note]));
}

#[test]
fn a_plan_and_a_search_have_pages() {
    let folder = folder("report-plan");
    let report = shown(&folder, &["--set", "cluster.preset=h200", "--set", "parallel.pp=4"]);
    assert_eq!(report["title"], "demo on h200");
    assert_eq!(
        item(&report, "Memory of a rank of each stage")["x"]["categories"].as_array().map(Vec::len),
        Some(4)
    );
    assert_eq!(item(&report, "Predicted schedule")["unit"], "seconds");
    assert!(row(item(&report, "The plan"), "fits")[1] == "yes");
    let only = ["--only", "parallel.tp=1,2", "--only", "parallel.schedule=1f1b"];
    let sets = ["--set", "cluster.preset=h200", "--set", "cluster.nodes=1", "--set", "batch.global=32"];
    let report = shown(&folder, &[&["--search"], &sets[..], &only].concat());
    let memory = item(&report, "Time and memory");
    assert_eq!(series(memory), ["tp 1", "tp 2", "no other is better in both"]);
    let labels = memory["series"][0]["labels"].as_array().expect("labels");
    assert!(labels.iter().all(|label| label.as_str().is_some_and(|label| label.contains("recompute"))));
    assert_eq!(labels.len(), memory["series"][0]["x"].as_array().expect("times").len());
    let best = item(&report, "The fastest strategies");
    assert_eq!(row(best, "1").as_array().and_then(|row| row.last().cloned()), Some("the best".into()));
    item(&report, "Time and energy");
}

#[test]
fn what_cannot_be_shown_is_a_mistake() {
    let folder = folder("report-mistakes");
    fs::create_dir(folder.join("empty")).unwrap();
    for (arguments, sentence) in [
        (&["empty"][..], "empty is no folder of a run: it has no metrics.jsonl"),
        (&["missing.toml"], "cannot read missing.toml"),
        (&["a.toml", "b.toml"], "b.toml is one configuration too many"),
        (&["--trace", "t.json"], "--trace is for a run"),
        (&["empty", "--search"], "--search, --set and --profile are for a configuration"),
        (&["--out", "no/such/folder.html"], "cannot write no/such/folder.html"),
    ] {
        let output = kintsugi(&folder, &[&["report"], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(sentence), "{arguments:?}: {said}");
    }
}
