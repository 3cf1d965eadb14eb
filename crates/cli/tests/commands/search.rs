//! Searches, scaling and sweeps.

use std::fs;

use serde_json::Value;

use crate::support::{command, folder, keys, kintsugi, stdout};

/// A small model on half a node of Frontier, where some strategies fit and others do not.
const CONFIG: &str = "\
[model]
layers = 4
hidden = 64
heads = 4
vocab = 256
[batch]
sequence = 32
global = 8
[parallel]
tp = 2
pp = 2
dp = 1
[cluster]
preset = \"frontier\"
[run]
steps = 2
";

fn plan(name: &str, arguments: &[&str]) -> std::process::Output {
    let folder = folder(name);
    fs::write(folder.join("small.toml"), CONFIG).unwrap();
    kintsugi(&folder, &[&["plan", "small.toml"], arguments].concat())
}

fn said(name: &str, arguments: &[&str]) -> String {
    let output = plan(name, arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_search_ranks_what_fits_and_writes_what_trains() {
    let folder = folder("search");
    fs::write(folder.join("small.toml"), CONFIG).unwrap();
    let search = ["plan", "small.toml", "--search", "--json", "--top", "3", "--out", "best.toml"];
    let answer: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &search))).unwrap();
    assert_eq!(keys(&answer), ["ranks", "counts", "pick", "gains", "given", "best"]);
    assert_eq!(answer["ranks"], 4);
    let best = answer["best"].as_array().unwrap();
    assert_eq!(best.len(), 3);
    let step = |row: &Value| row["step_s"].as_f64().unwrap();
    assert!(step(&best[0]) <= 1.02 * step(&best[1]) && step(&best[1]) <= step(&best[2]));
    let fastest = step(&best[0]).min(step(&best[1]));
    assert!(fastest <= step(&answer["given"]), "the configuration's own strategy is one of them");
    let picked = !answer["pick"].is_null();
    assert!(picked || step(&best[0]) <= fastest);
    assert!(answer["gains"].as_array().unwrap().iter().all(|gain| gain["mechanism"].is_string()));
    assert_eq!(best[0]["reason"], if picked { "the pick" } else { "the best" });
    assert!(best[0]["range"]["step_s"][1].as_f64().unwrap() > step(&best[0]));
    assert_eq!(answer["given"]["tp"], 2);

    let again: Value =
        serde_json::from_str(&stdout(&kintsugi(&folder, &["plan", "best.toml", "--json"]))).unwrap();
    assert_eq!(again["fits"], true);
    assert_eq!(again["ranks"], 4);
    assert_eq!(again["step_s"], best[0]["step_s"]);
    stdout(&kintsugi(&folder, &["train", "best.toml"]));
}

#[test]
fn the_best_is_written_as_what_the_user_said_and_what_was_chosen() {
    let folder = folder("search-best");
    let search = |name: &str, arguments: &[&str]| -> (String, Value) {
        let arguments = [&["plan", "--search", "--top", "1", "--json", "--out", name], arguments].concat();
        let answer: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
        (fs::read_to_string(folder.join(name)).unwrap(), answer["best"][0].clone())
    };
    let predicted = |arguments: &[&str]| -> Value {
        serde_json::from_str(&stdout(&kintsugi(&folder, &[&["plan", "--json"], arguments].concat()))).unwrap()
    };
    let sets = ["model.preset=gpt-1.3b", "cluster.preset=h100", "cluster.nodes=1", "batch.global=16"];
    let few = ["precision.compute=bf16"];
    let only = ["--only", "parallel.pp=1,2", "--only", "batch.micro=1,2"];
    let sets: Vec<&str> = sets.iter().chain(&few).flat_map(|set| ["--set", set]).chain(only).collect();
    let (text, best) = search("gpus.toml", &sets);
    assert!(text.lines().count() <= 30, "{text}");
    for absent in ["device", "deterministic", "peak", "optimizer", "sequence =", "steps"] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    let plan = predicted(&["gpus.toml"]);
    assert_eq!((&plan["step_s"], &plan["ranks"]), (&best["step_s"], &Value::from(8)));
    let reserved =
        plan["memory"].as_array().unwrap().iter().map(|stage| stage["reserved"].as_u64().unwrap()).max();
    assert_eq!(reserved, best["reserved"].as_u64(), "{best}");

    // A profile that the command line names is needed again.
    let profile = "[cluster]\ncores = 8\n[cluster.device]\npeak_fp32 = 1e12\nmemory_bandwidth = 1e11\n";
    fs::write(folder.join("mine.toml"), profile).unwrap();
    let (text, best) = search("here.toml", &["--profile", "mine.toml", "--only", "parallel.schedule=1f1b"]);
    assert!(text.contains("profile = \"mine.toml\"") && text.contains("[optimizer]"), "{text}");
    assert_eq!(predicted(&["here.toml"])["step_s"], best["step_s"]);
}

#[test]
fn people_get_a_table_with_reasons() {
    let table = stdout(&plan("search-table", &["--search", "--top", "4", "--only", "parallel.tp=1,2"]));
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[1].starts_with("search   4 ranks (frontier), 8 samples a step: "), "{table}");
    assert!(lines[2].ends_with(" strategies per second"), "{table}");
    assert!(lines[3].starts_with("left out codes, "), "{table}");
    assert!(lines[4].starts_with("range    held-out runs took "), "{table}");
    let header = lines[6].split_whitespace().take(4).collect::<Vec<_>>();
    assert_eq!(header, ["tp", "pp", "dp", "micro"]);
    assert!(lines[7].ends_with("the best") || lines[7].ends_with("the pick"), "{table}");
    let steps = lines[7].split("  ").filter(|cell| cell.ends_with(" µs") || cell.ends_with(" ms"));
    assert_eq!(steps.count(), 1, "a small model's step has a small unit: {table}");
    assert!(lines.iter().any(|line| line.starts_with("  given")), "{table}");
    assert!(lines.iter().any(|line| line.starts_with("gains    ") && line.contains(" gain")), "{table}");
}

#[test]
fn a_search_that_finds_nothing_to_write_fails() {
    let settings = ["--search", "--set", "cluster.device.memory=100000", "--out", "best.toml"];
    let output = plan("search-nothing", &settings);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.ends_with("error: no strategy fits, so best.toml is not written\n"), "{said}");
}

#[test]
fn nothing_that_fits_is_an_answer() {
    let settings = ["--search", "--set", "cluster.device.memory=100000"];
    assert!(stdout(&plan("search-none", &settings)).contains("no strategy fits"));
}

#[test]
fn what_no_strategy_can_have_is_a_mistake_or_said_so() {
    let wrong = plan("search-only", &["--search", "--only", "memory.recompute=ful"]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(said.contains("memory.recompute = ful must be one of none, selective, full"), "{said}");
    let none = stdout(&plan("search-only-none", &["--search", "--only", "parallel.tp=3"]));
    assert!(none.contains("no strategy is allowed"), "{none}");
}

#[test]
fn energy_needs_the_power_of_a_device() {
    let device = "cluster.device={ peak_fp32 = 1e12, peak_16bit = 1e12, memory_bandwidth = 1e11 }";
    let arguments = ["--search", "--by", "pareto", "--set", "cluster.preset=\"local\"", "--set", device];
    let output = plan("search-power", &arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("power_idle and power_max"), "{output:?}");
}

#[test]
fn nodes_that_a_strategy_cannot_have_are_a_row_of_their_own() {
    let arguments = ["--scale", "strong", "--nodes", "1,3", "--json"];
    let rows: Value = serde_json::from_str(&stdout(&plan("scale-refused", &arguments))).unwrap();
    assert!(rows[0]["step_s"].is_number() && rows[0]["refused"].is_null(), "{rows}");
    assert!(rows[1]["refused"].as_str().unwrap().contains("batch.global"), "{rows}");
    let all = plan("scale-all-refused", &["--scale", "strong", "--nodes", "3"]);
    assert_eq!(all.status.code(), Some(2), "{all:?}");
}

#[test]
fn a_strategy_scales_over_nodes() {
    let folder = folder("scale");
    fs::write(folder.join("small.toml"), CONFIG).unwrap();
    for (scaling, batches) in [("weak", [16, 32, 64]), ("strong", [8, 8, 8])] {
        let arguments =
            ["plan", "small.toml", "--scale", scaling, "--nodes", "1,2,4", "--json", "--plot", "scale.svg"];
        let rows: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
        let rows = rows.as_array().unwrap();
        let column = |key: &str| rows.iter().map(|row| row[key].as_u64().unwrap()).collect::<Vec<_>>();
        assert_eq!(column("ranks"), [8, 16, 32]);
        assert_eq!(column("global_batch"), batches);
        assert_eq!(rows[0]["efficiency"], 1.0);
        assert!(rows[2]["efficiency"].as_f64().unwrap() < 1.0);
    }
    let picture = fs::read_to_string(folder.join("scale.svg")).unwrap();
    assert!(picture.contains("custom on frontier: strong scaling") && picture.contains(">nodes of 8 ranks<"));
}

#[test]
fn a_sweep_shows_every_value_and_why_some_are_refused() {
    let table = stdout(&plan("sweep", &["--sweep", "parallel.tp=1,2,3"]));
    let rows: Vec<&str> = table.lines().skip(4).collect();
    assert!(rows[0].starts_with("  1 ") && rows[1].starts_with("  2 "), "{table}");
    assert!(rows[2].contains("parallel.tp = 3 does not divide model.heads = 4"), "{table}");
}

#[test]
fn several_sweeps_are_curves() {
    let folder = folder("sweeps");
    fs::write(folder.join("small.toml"), CONFIG).unwrap();
    let sweeps = ["plan", "small.toml", "--sweep", "parallel.tp=1,2,3", "--sweep", "batch.micro=1,2"];
    let table = stdout(&kintsugi(&folder, &sweeps));
    assert!(
        table.contains("parallel.tp  batch.micro  ranks") && table.contains("\n  2                      2 "),
        "{table}"
    );
    for figure in ["flops", "step", "memory", "energy", "efficiency", "tokens"] {
        let drawn = [&sweeps[..], &["--json", "--plot", "sweeps.svg", "--plot-figure", figure]].concat();
        let rows: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &drawn))).unwrap();
        assert_eq!((rows[3]["at"].as_str(), rows[3]["series"].as_str()), (Some("1"), Some("batch.micro=2")));
        let picture = fs::read_to_string(folder.join("sweeps.svg")).unwrap();
        assert_eq!(picture.matches("<polyline").count(), 2, "{figure}: a curve for each value of the second");
        assert!(picture.contains("× not possible") && picture.contains("tp 1 · pp 2"), "{figure}");
    }
    let words = ["plan", "small.toml", "--sweep", "parallel.schedule=1f1b,gpipe", "--plot", "words.svg"];
    stdout(&kintsugi(&folder, &words));
    let picture = fs::read_to_string(folder.join("words.svg")).unwrap();
    assert!(picture.contains("<rect") && !picture.contains("<polyline"), "words are bars");
    let tight = [&sweeps[..], &["--set", "cluster.device.memory=1000000", "--plot", "tight.svg"]].concat();
    stdout(&kintsugi(&folder, &tight));
    assert!(fs::read_to_string(folder.join("tight.svg")).unwrap().contains("○ does not fit"));
}

#[test]
fn plans_searches_and_schedules_are_drawn() {
    let folder = folder("plots");
    fs::write(folder.join("small.toml"), CONFIG).unwrap();
    let drawn = |name: &str, arguments: &[&str]| {
        stdout(&kintsugi(&folder, &[&["plan", "small.toml"], arguments].concat()));
        fs::read_to_string(folder.join(name)).unwrap()
    };
    let memory = drawn("memory.svg", &["--plot", "memory.svg"]);
    assert!(memory.contains("activations") && !memory.contains(">limit, "), "{memory}");
    let tight = ["--plot", "memory.svg", "--set", "cluster.device.memory=40000000"];
    assert!(drawn("memory.svg", &tight).contains(">limit, "));
    assert!(drawn("time.svg", &["--plot", "time.svg", "--plot-figure", "step"]).contains("kernels"));
    let search = drawn("search.svg", &["--search", "--plot", "search.svg"]);
    assert!(search.contains("tp 4") && search.contains("no other is better in both"), "{search}");
    assert!(search.contains("; the pick: tp ") && search.contains(">the pick<"), "{search}");
    assert!(search.contains(">time of a step (logarithmic)<"), "{search}");
    let energy = drawn("energy.svg", &["--search", "--plot", "energy.svg", "--plot-figure", "energy"]);
    assert!(energy.contains("energy of a step"));
    let schedule = drawn("schedule.svg", &["--draw", "--out", "schedule.svg"]);
    assert!(schedule.contains(">stage 1<") && schedule.contains(">F0<"), "{schedule}");
}

#[test]
fn mistakes_are_one_sentence() {
    insta::assert_snapshot!(
        said("search-only", &["--search", "--only", "model.layers=3"]),
        @"error: --only: model.layers is not searched over; the keys are parallel.tp, parallel.cp, parallel.pp, parallel.dp, parallel.schedule, parallel.virtual_stages, parallel.layers_per_stage, parallel.sequence_parallel, batch.micro, sharding.zero, sharding.weights, sharding.gradients, sharding.states, sharding.secondary, sharding.gather, sharding.reduce, sharding.quantize_weights, sharding.quantize_gradients, memory.recompute"
    );
    insta::assert_snapshot!(
        said("sweep-empty", &["--sweep", "parallel.tp"]),
        @r#"error: --sweep: "parallel.tp" must be table.key=value,value"#
    );
    insta::assert_snapshot!(
        said("plot-alone", &["--plot", "x.svg", "--plot-figure", "tokens"]),
        @"error: --plot-figure of a single plan is memory or step; others are for --scale, --sweep and --search"
    );
    insta::assert_snapshot!(
        said("plot-search", &["--search", "--plot", "x.svg", "--plot-figure", "step"]),
        @"error: --plot-figure of a search is memory or energy, each over the time of a step"
    );
    insta::assert_snapshot!(
        said("out-alone", &["--out", "x.svg"]),
        @"error: --out takes the best of --search, the picture of --draw, the page of --reproduce or the nodes of --place: give one of them"
    );
    insta::assert_snapshot!(
        said("sweep-refused", &["--sweep", "parallel.tp=3,5"]),
        @"error: parallel.tp = 5 does not divide model.heads = 4; use 1, 2 or 4"
    );
    assert!(
        said(
            "scale-uneven",
            &["--scale", "weak", "--nodes", "1", "--set", "parallel.tp=4", "--set", "parallel.pp=3"]
        )
        .starts_with("error: ")
    );
    let unknown = said("search-speed", &["--search", "--set", "cluster.preset=local"]);
    assert!(unknown.contains("the speed of cluster.device is unknown"), "{unknown}");
}

#[test]
fn tables_are_as_narrow_as_the_terminal() {
    let folder = folder("search-narrow");
    fs::write(folder.join("small.toml"), CONFIG).unwrap();
    let tables: [&[&str]; 3] =
        [&["--search"], &["--sweep", "parallel.tp=1,2,3"], &["--scale", "weak", "--nodes", "1,2,4"]];
    for arguments in tables {
        let arguments = [&["plan", "small.toml"], arguments].concat();
        let table = |columns: usize| {
            let columns = columns.to_string();
            let said = stdout(&command(&folder, &arguments).env("COLUMNS", columns).output().unwrap());
            // Above it are sentences.
            let (_, table) = said.split_once("\n\n").unwrap();
            table.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let is_note = |line: &String| line.ends_with(" fit this width; --json has them");
        let whole = table(1000);
        assert!(!whole.iter().any(is_note), "{whole:?}");
        for columns in [60, 80, 120] {
            let narrow = table(columns);
            let wide: Vec<_> = narrow.iter().filter(|line| line.chars().count() > columns).collect();
            assert!(wide.is_empty(), "{columns}: {wide:?}");
            assert!(narrow[0].contains("step"), "{narrow:?}");
        }
        assert!(table(60).iter().any(is_note), "{arguments:?}");
    }
}
