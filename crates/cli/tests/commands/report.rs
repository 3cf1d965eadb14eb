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
        // What is reserved beyond the peak depends on how the allocator rounds.
        if category["name"] != "reserved, unused at the peak" {
            assert_eq!(category["y"][0], category["y"][1], "predicted memory is measured memory");
        }
    }
    let traffic = item(&report, "Traffic of a step, over all ranks");
    assert_eq!(series(traffic), ["predicted", "measured"]);
    assert_eq!(traffic["series"][0]["y"], traffic["series"][1]["y"]);
    let compared = item(&report, "Predicted and measured");
    assert_eq!(row(compared, "memory, total")[3], "none");
    row(compared, "tokens/s, mean");
    row(compared, "time of a step, mean");
    assert!(compared["question"].as_str().is_some_and(|text| text.contains("means over the steps")));
    let speed = row(item(&report, ""), "median speed")[1].as_str().expect("a text");
    assert!(speed.ends_with(" tokens/s, over the last 4 steps"), "{speed}");
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
    let torn = "1 line of out/metrics.jsonl cannot be read; the last line is not complete";
    let note = "the configuration of out cannot be planned here, so nothing is predicted for it";
    assert_eq!(report["notes"], serde_json::json!([torn, note]));
}

#[test]
fn null_numbers_are_missing_values_and_no_line_is_lost() {
    let folder = folder("report-null");
    fs::create_dir(folder.join("out")).unwrap();
    let lines = [
        r#"{"step":1,"time":10.0,"loss":4.5,"tokens":64,"tokens_per_s":32.0,"step_s":2.0,"skipped":false}"#,
        r#"{"step":2,"time":12.0,"loss":4.0,"tokens":128,"tokens_per_s":null,"step_s":null,"validation_loss":3.5,"validation_losses":{"c":3.0,"d":4.0},"epochs":{"c":0.5,"d":null}}"#,
        r#"{"step":3,"time":14.0,"loss":null,"grad_norm":null,"lr":null,"tokens":192,"mfu":null,"loss_scale":null,"energy_j":null,"skipped":null,"checkpoint_s":null,"validation_loss":null,"validation_losses":{"c":2.0,"d":null},"epochs":null}"#,
        r#"{"step":4,"time":16.0,"loss":null,"tokens":256,"validation_losses":null}"#,
        "no line",
        r#"{"step":5,"#,
    ];
    fs::write(folder.join("out/metrics.jsonl"), lines.join("\n")).unwrap();
    let summary = r#"{"stopped":null,"failure":null,"loss_last":null,"loss_floor":null,"validation_loss":null,
        "predicted":null,"measured":{"peak_bytes":[{"weights":10,"total":null,"reserved":20}],"comm_bytes":{"node":{"send":null},"package":null},"step_s":null}}"#;
    fs::write(folder.join("out/summary.json"), summary).unwrap();
    let report = shown(&folder, &["out"]);
    let loss = item(&report, "Loss");
    assert_eq!(loss["series"][0]["x"], serde_json::json!([1.0, 2.0, 3.0, 4.0]));
    assert_eq!(loss["series"][0]["y"], serde_json::json!([4.5, 4.0, null, null]));
    assert_eq!(series(loss), ["training loss", "validation loss", "validation, c", "validation, d"]);
    let validation = |i: usize| (&loss["series"][i]["x"], &loss["series"][i]["y"]);
    let steps = serde_json::json!([2.0, 3.0]);
    assert_eq!(validation(1), (&steps, &serde_json::json!([3.5, null])));
    assert_eq!(validation(2), (&steps, &serde_json::json!([3.0, 2.0])));
    assert_eq!(validation(3), (&steps, &serde_json::json!([4.0, null])));
    let overview = item(&report, "");
    assert_eq!(row(overview, "state")[1], "finished", "the summary is read");
    assert_eq!(row(overview, "loss")[1], "4.5000 → not finite");
    assert_eq!(row(overview, "validation loss")[1], "not finite");
    assert_eq!(row(overview, "epochs of d")[1], "–");
    let torn = "2 lines of out/metrics.jsonl cannot be read; the last line is not complete";
    assert_eq!(report["notes"], serde_json::json!([torn]));
    fs::write(folder.join("out/summary.json"), "{").unwrap();
    let notes = shown(&folder, &["out"])["notes"].to_string();
    assert!(notes.contains("out/summary.json cannot be read"), "{notes}");
}

#[test]
fn many_runs_are_rows_and_have_tokens_and_time() {
    let folder = folder("report-many");
    let names: Vec<String> = (0..5).map(|i| format!("run-{i}")).collect();
    for (i, name) in names.iter().enumerate() {
        fs::create_dir(folder.join(name)).unwrap();
        let line = |step: usize| {
            let (time, loss) = (100 * i + 2 * step, 5 - step);
            format!(
                "{{\"step\":{step},\"time\":{time},\"loss\":{loss},\"tokens\":{},\"step_s\":2}}\n",
                64 * step
            )
        };
        fs::write(folder.join(name).join("metrics.jsonl"), (1..4).map(line).collect::<String>()).unwrap();
        fs::write(folder.join(name).join("config.toml"), format!("optimizer.lr = 0.{}\n", i + 1)).unwrap();
    }
    let paths: Vec<&str> = names.iter().map(String::as_str).collect();
    let report = shown(&folder, &paths);
    let overview = item(&report, "");
    assert_eq!((&overview["header"][0], &overview["of_runs"]), (&"run".into(), &true.into()));
    let steps = overview["header"].as_array().expect("a header").iter().position(|name| name == "steps");
    assert!(
        row(overview, "run-4")[steps.expect("a column")].as_str().is_some_and(|text| text.starts_with('3'))
    );
    let differences = item(&report, "Keys of the configuration");
    assert_eq!(differences["header"], serde_json::json!(["run", "optimizer.lr"]));
    assert_eq!(row(differences, "run-2")[1], "0.3");
    let loss = item(&report, "Loss");
    assert_eq!((&loss["series"][3]["run"], &loss["series"][3]["noisy"]), (&3.into(), &true.into()));
    let axis = &report["runs"][3];
    assert_eq!(axis["name"], "run-3");
    assert_eq!(axis["tokens"], serde_json::json!([64.0, 128.0, 192.0]));
    assert_eq!(axis["seconds"], serde_json::json!([2.0, 4.0, 6.0]), "since the run's own start");
    let few = shown(&folder, &paths[..2]);
    assert_eq!(item(&few, "")["header"], serde_json::json!(["", "run-0", "run-1"]), "few are columns");
}

#[test]
fn the_memory_of_a_plan_is_what_decides_whether_it_fits() {
    let folder = folder("report-memory");
    let model = ["model.preset=gpt-22b", "batch.sequence=2048", "batch.micro=1", "batch.global=8"];
    let layout = ["parallel.tp=2", "parallel.pp=4", "parallel.dp=1", "precision.compute=bf16"];
    let sets = [&model[..], &layout, &["cluster.preset=h100"]].concat();
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let report = shown(&folder, &sets);
    let memory = item(&report, "Memory of a rank of each stage");
    let plan: Value =
        serde_json::from_str(&stdout(&kintsugi(&folder, &[&["plan"], &sets[..], &["--json"]].concat())))
            .unwrap();
    let bytes = |name: &str| plan["memory"][0][name].as_f64().expect("bytes");
    let bars =
        memory["series"].as_array().expect("series").iter().filter(|series| series["style"] == "stack");
    let height: f64 = bars.map(|series| series["y"][0].as_f64().expect("bytes")).sum();
    assert!((height - bytes("reserved") - bytes("transport")).abs() < 1.0, "{height} {plan}");
    assert!(bytes("reserved") > bytes("total"), "they differ, so the height tells which is drawn");
    let limit = memory["series"].as_array().and_then(|series| series.last().cloned()).expect("the limit");
    assert_eq!((&limit["name"], &limit["style"]), (&"limit, 76.00 GiB".into(), &"guide".into()));
    assert!((limit["y"][0].as_f64().expect("bytes") - 76.0 * f64::from(1 << 30)).abs() < 2.0);
    let question = "What fills the memory? A rank may take 76.00 GiB: 80.00 GiB less a headroom of 4.00 GiB.";
    assert_eq!(memory["question"], question);
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
    assert_eq!(series(memory), ["tp 1", "tp 2", "no other is better in both", "the pick"]);
    assert_eq!(memory["x"]["scale"], "log");
    let pick = &memory["series"][3];
    assert_eq!((&pick["style"], pick["x"].as_array().map(Vec::len)), (&"ring".into(), Some(1)));
    let points =
        memory["series"].as_array().expect("series").iter().filter(|series| series["style"] == "points");
    let mut places = points.flat_map(|series| {
        let numbers = |name: &str| series[name].as_array().expect("numbers").clone();
        numbers("x").into_iter().zip(numbers("y"))
    });
    assert!(places.any(|(x, y)| (&x, &y) == (&pick["x"][0], &pick["y"][0])), "the ring is around a point");
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
        (&["empty"][..], "empty is not the folder of a run: it has no file metrics.jsonl"),
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
