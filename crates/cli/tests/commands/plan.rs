//! Predictions for people and for scripts.

use serde_json::Value;

use crate::support::{command, folder, json_lines, keys, kintsugi, stdout};

fn plan(name: &str, arguments: &[&str]) -> String {
    stdout(&kintsugi(&folder(name), &[&["plan"], arguments].concat()))
}

#[test]
fn scripts_get_every_key() {
    let answer: Value = serde_json::from_str(&plan("plan-json", &["--json"])).unwrap();
    let names = [
        "fits",
        "params",
        "trained_params",
        "ranks",
        "micro_batches",
        "flops",
        "step_s",
        "tokens_per_s_per_gpu",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "mfu",
        "bubble",
        "memory",
        "available_bytes",
        "comm",
        "energy_j_per_step",
        "power_w_per_gpu",
        "timing",
        "range",
        "training",
        "notes",
    ];
    assert_eq!(keys(&answer), names);
    assert_eq!(answer["memory"].as_array().unwrap().len(), 2);
    let categories = [
        "weights",
        "gradients",
        "states",
        "activations",
        "workspace",
        "communication",
        "total",
        "reserved",
        "transport",
    ];
    assert_eq!(keys(&answer["memory"][0]), categories);
    assert_eq!(answer["params"], 817_920);
    assert_eq!(answer["fits"], true);
}

#[test]
fn a_model_and_a_cluster_without_a_file_are_not_planned_as_the_demo() {
    let folder = folder("plan-named");
    let answer = |settings: &[&str]| -> Value {
        let sets = settings.iter().flat_map(|set| ["--set", set]);
        let arguments: Vec<&str> = ["plan", "--json"].into_iter().chain(sets).collect();
        serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap()
    };
    let large = answer(&["model.preset=llama3-70b", "cluster.preset=h100"]);
    assert_eq!((&large["ranks"], &large["micro_batches"]), (&Value::from(1), &Value::from(1)));
    assert_eq!(large["params"], 70_553_706_496_u64);
    let note = large["notes"][0].as_str().unwrap();
    assert!(note.contains("set cluster.nodes = 1 to use all 8 devices"), "{note}");
    let two = answer(&["model.preset=llama3-70b", "cluster.preset=h100", "cluster.nodes=2"]);
    assert_eq!((&two["ranks"], &two["notes"]), (&Value::from(16), &serde_json::json!([])));
    // 8192 tokens of one sample on each of 16 ranks.
    let ratio = two["flops"]["model"].as_f64().unwrap() / large["flops"]["model"].as_f64().unwrap();
    assert!((ratio - 16.0).abs() < 1e-9, "{ratio}");
    let report =
        plan("plan-named-text", &["--set", "model.preset=llama3-70b", "--set", "cluster.preset=h100"]);
    assert!(report.contains("step     8192 tokens: "), "{report}");
    let resolved = stdout(&kintsugi(&folder, &["config", "--resolved", "--set", "model.preset=llama3-8b"]));
    assert!(!resolved.contains("built-in demo") && resolved.contains("run.steps = 100 "), "{resolved}");
}

#[test]
fn a_plan_without_times_says_how_to_get_them() {
    let report = plan("plan-no-times", &[]);
    assert!(
        report.contains("\nspeed    unknown, so no time is predicted: kintsugi calibrate measures "),
        "{report}"
    );
    assert!(!plan("plan-times", &["--set", "cluster.preset=h100"]).contains("calibrate"));
}

#[test]
fn our_own_measured_runs_are_predicted() {
    let folder = folder("plan-measured");
    let measured = concat!(env!("CARGO_MANIFEST_DIR"), "/../validate/measured");
    let sets = |arguments: &[&str]| -> Vec<Value> {
        let arguments = [&["plan", "--validate"], arguments, &["--json"]].concat();
        serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap()
    };
    let ours = sets(&[measured]);
    assert_eq!(ours.len(), 3);
    for set in &ours {
        assert!(set["rows"].as_u64().unwrap() > 3 && set["left_out"] == 0, "{set}");
    }
    // Rows of a file replace those in the program, and a row that cannot be planned is left out.
    std::fs::create_dir(folder.join("mine")).unwrap();
    let table = "name,settings,step_ms\none,parallel.tp=1,200\nwrong,parallel.tp=3,100\n";
    std::fs::write(folder.join("mine/cpu.csv"), table).unwrap();
    let cpu = &sets(&["mine"])[0];
    assert_eq!((&cpu["rows"], &cpu["left_out"]), (&Value::from(1), &Value::from(1)), "{cpu}");
    assert!(cpu["reason"].as_str().unwrap().starts_with("wrong: parallel.tp = 3 does not divide"), "{cpu}");
}

#[test]
fn schemes_are_compared_with_zero_3_over_the_range_of_links() {
    let folder = folder("plan-compare");
    let sets = ["model.preset=gpt-1.4b", "cluster.preset=frontier", "parallel.dp=16", "batch.global=16"];
    let sets = sets.iter().chain(&["batch.sequence=2048", "batch.micro=1"]).flat_map(|set| ["--set", set]);
    let compare = ["plan", "--compare", "sharding", "--plot", "compared.svg", "--json"];
    let arguments: Vec<&str> = compare.into_iter().chain(sets).collect();
    let rows: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
    let schemes: Vec<&str> =
        rows.as_array().unwrap().iter().filter_map(|row| row["scheme"].as_str()).collect();
    assert_eq!(schemes, ["ZeRO-1", "ZeRO-2", "ZeRO-3", "MiCS", "ZeRO++", "three-level"]);
    assert_eq!(rows[2]["of_zero3"], serde_json::json!([1.0, 1.0, 1.0]));
    for row in rows.as_array().unwrap() {
        let of = |key: &str, place: usize| row[key][place].as_f64().unwrap();
        assert!(of("of_zero3", 1) <= of("of_zero3", 0) && of("of_zero3", 0) <= of("of_zero3", 2), "{row}");
        let range = |place: usize| row["range"]["step_s"][place].as_f64().unwrap();
        assert!(range(0) <= row["step_s"].as_f64().unwrap() && range(0) < range(1), "{row}");
        assert!(
            row["reserved"].is_u64()
                && row["energy_j_per_step"].is_f64()
                && row["comm"]["cluster"].is_object()
        );
    }
    assert!(std::fs::read_to_string(folder.join("compared.svg")).unwrap().contains("three-level"));
}

#[test]
fn a_plan_that_does_not_fit_is_an_answer() {
    let settings = ["--json", "--set", "cluster.device.memory=1000000"];
    let answer: Value = serde_json::from_str(&plan("plan-misfit", &settings)).unwrap();
    assert_eq!(answer["fits"], false);
}

#[test]
fn a_check_fails_where_the_plan_does_not_fit_or_nobody_knows() {
    let folder = folder("plan-check");
    let check = |arguments: &[&str]| {
        let output = kintsugi(&folder, &[&["plan", "--check"], arguments].concat());
        let [said, failed] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), said, failed)
    };
    let (code, said, failed) = check(&[]);
    assert_eq!((code, failed.as_str()), (Some(0), ""));
    assert!(said.contains("fits     yes"), "{said}");
    let small = ["--set", "cluster.device.memory=1000000"];
    let (code, said, failed) = check(&small);
    assert_eq!(code, Some(1));
    assert!(said.contains("fits     no: rank 0 needs "), "{said}");
    assert!(failed.starts_with("error: the plan does not fit: rank 0 needs "), "{failed}");
    let (code, said, json_failed) = check(&[&small[..], &["--json"]].concat());
    assert_eq!((code, json_failed), (Some(1), failed));
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["fits"], false);
    let one = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "run.device=cuda"];
    let one: Vec<&str> = one.iter().flat_map(|setting| ["--set", setting]).chain(["--json"]).collect();
    let (code, said, failed) = check(&one);
    let unknown = serde_json::from_str::<Value>(&said).unwrap()["fits"].is_null();
    assert_eq!(code, Some(i32::from(unknown)));
    assert_eq!(
        failed.starts_with("error: it is unknown whether the plan fits: this machine has no GPU"),
        unknown
    );
}

/// Where there is a GPU, its memory decides.
#[test]
fn what_fits_on_a_gpu_that_nobody_knows_is_not_known() {
    let one = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "run.device=cuda"];
    let set = |settings: &[&str]| -> Vec<String> {
        settings.iter().chain(&one).flat_map(|setting| ["--set".to_owned(), (*setting).to_owned()]).collect()
    };
    let ask = |settings: &[&str], json: bool| {
        let arguments =
            set(settings).into_iter().chain(json.then(|| "--json".to_owned())).collect::<Vec<_>>();
        plan("plan-unknown", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let fits =
        |settings: &[&str]| serde_json::from_str::<Value>(&ask(settings, true)).unwrap()["fits"].as_bool();
    assert_eq!(ask(&[], false).contains("fits     unknown: this machine has no GPU"), fits(&[]).is_none());
    assert_eq!(fits(&["cluster.preset=h200"]), Some(true));
    assert_eq!(fits(&["cluster.device.memory=1000000"]), Some(false));
}

#[test]
fn people_get_tables_and_a_picture() {
    let settings =
        ["--draw", "--set", "parallel.schedule=zero-bubble", "--set", "cluster.device.memory=1000000000"];
    let report = plan("plan-draw", &settings);
    let paragraphs: Vec<&str> = report.split("\n\n").collect();
    let [summary, memory, traffic, picture] = paragraphs[..] else { panic!("{report}") };
    insta::assert_snapshot!(summary, @r"
    model    demo (gpt), 817.92 k parameters: 4 layers of width 128, 4 heads, ffn 512, vocabulary 128
    layout   8 ranks (local): tp 2 · pp 2 · dp 2, zero-bubble, ZeRO-1, recompute none, fp32
    step     2048 tokens: 2 replicas × 4 micro-batches × 4 samples × 64 tokens
    FLOPs    model 10.62 G, hardware 10.62 G per step
    bubble   7.7 % of the time, with unit costs
    speed    unknown, so no time is predicted: kintsugi calibrate measures this machine's CPU into profile.toml, and --profile profile.toml predicts with it
    fits     yes
    ");
    assert_eq!(memory.lines().count(), 3, "a header and two stages\n{memory}");
    assert!(traffic.contains("node all_reduce"), "{traffic}");
    insta::assert_snapshot!(picture, @r"
    stage 0  F0░░F1░░    B0▒▒W0▓▓F2░░B1▒▒W1▓▓F3░░B2▒▒W2▓▓B3▒▒W3▓▓
    stage 1      F0░░B0▒▒F1░░B1▒▒W0▓▓F2░░B2▒▒W1▓▓F3░░B3▒▒W2▓▓W3▓▓
    F░ forward   B▒ backward, inputs   W▓ backward, weights   bubble 7.7 %
    ");
}

/// The first column of the table of stages.
fn stages(report: &str) -> Vec<&str> {
    let rows = report.lines().skip_while(|line| !line.starts_with("  stage")).skip(1);
    rows.take_while(|row| !row.is_empty()).map(|row| row[2..].split("  ").next().unwrap()).collect()
}

#[test]
fn equal_stages_share_a_row_and_many_different_ones_are_cut_short() {
    let deep = ["--set", "model.layers=32", "--set", "parallel.pp=32", "--set", "parallel.tp=1"];
    assert_eq!(stages(&plan("plan-equal", &deep)), ["0", "1 – 28", "29", "30", "31"]);
    let many = [&deep[..], &["--set", "batch.micro=1", "--set", "batch.global=128"]].concat();
    let gap = "… (--json has every stage)";
    assert_eq!(
        stages(&plan("plan-different", &many)),
        ["0", "1", "2", "3", "4", "5", gap, "26", "27", "28", "29", "30", "31"]
    );
}

#[test]
fn sharding_that_does_nothing_is_noted() {
    let report = plan("plan-note", &["--set", "parallel.dp=1", "--set", "sharding.zero=1"]);
    let note = "note: sharding states over the cluster is the same as not sharding them: there is one replica, \
                parallel.dp = 1\n";
    assert!(report.ends_with(note), "{report}");
    assert!(!plan("plan-no-note", &[]).contains("note:"));
}

#[test]
fn the_trace_is_that_of_the_schedule() {
    let folder = folder("plan-trace");
    stdout(&kintsugi(&folder, &["plan", "--trace", "schedule.json"]));
    let trace = &json_lines(&folder.join("schedule.json"))[0];
    let events = trace["traceEvents"].as_array().unwrap();
    // Two stages of two layers, four micro-batches, forward and backward.
    assert_eq!(events.iter().filter(|event| event["cat"] == "compute").count(), 2 * 2 * 4 * 2);
}

#[test]
fn a_cluster_with_a_profile_gets_time_and_energy() {
    let settings = [
        "--json",
        "--set",
        "model.preset=gpt-22b",
        "--set",
        "cluster.preset=frontier",
        "--set",
        "parallel.pp=8",
        "--set",
        "parallel.tp=1",
        "--set",
        "batch.sequence=2048",
        "--set",
        "batch.global=16",
        "--set",
        "cluster.price=2",
    ];
    let answer: Value = serde_json::from_str(&plan("plan-time", &settings)).unwrap();
    let number = |key: &str| answer[key].as_f64().unwrap_or_else(|| panic!("{key} is {}", answer[key]));
    let per_rank = number("hardware_tflops_per_gpu") * 1e12 * number("step_s") * number("ranks");
    assert!((per_rank / answer["flops"]["hardware"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert!((45.0..=280.0).contains(&number("power_w_per_gpu")));
    assert!(
        (number("energy_j_per_step") / number("power_w_per_gpu") / number("step_s") - number("ranks")).abs()
            < 1e-6
    );
    let training = &answer["training"];
    assert!(
        (training["cost"].as_f64().unwrap() / training["gpu_hours"].as_f64().unwrap() - 2.0).abs() < 1e-9
    );
}

#[test]
fn a_profile_in_a_file_describes_the_cluster() {
    let folder = folder("plan-profile");
    let profile = "[cluster]\nper_node = 4\n[cluster.device]\nname = \"mine\"\npeak_fp32 = 1e12\nmemory_bandwidth = 1e11\n";
    std::fs::write(folder.join("mine.toml"), profile).unwrap();
    let report = stdout(&kintsugi(&folder, &["plan", "--set", "cluster.profile=mine.toml"]));
    assert!(report.contains("\ntime "), "{report}");
    let missing = kintsugi(&folder, &["plan", "--set", "cluster.profile=none.toml"]);
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn the_profile_of_this_machine_is_in_the_folder_for_configurations() {
    let folder = folder("plan-default-profile");
    let profile = "[cluster.device]\npeak_fp32 = 1e12\nmemory_bandwidth = 1e11\n";
    for file in ["home/.config/kintsugi/local.toml", "xdg/kintsugi/local.toml", "named.toml"] {
        let file = folder.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, profile).unwrap();
    }
    let has_profile = |variables: &[(&str, &str)]| {
        let mut plan = command(&folder, &["plan"]);
        plan.env_remove("XDG_CONFIG_HOME").env_remove("KINTSUGI_PROFILE").env("HOME", folder.join("nobody"));
        plan.envs(variables.iter().map(|&(name, path)| (name, folder.join(path))));
        stdout(&plan.output().unwrap()).contains("\ntime ")
    };
    assert!(!has_profile(&[]));
    assert!(has_profile(&[("HOME", "home")]));
    assert!(has_profile(&[("XDG_CONFIG_HOME", "xdg")]));
    assert!(!has_profile(&[("HOME", "home"), ("XDG_CONFIG_HOME", "nobody")]));
    assert!(has_profile(&[("KINTSUGI_PROFILE", "named.toml"), ("XDG_CONFIG_HOME", "nobody")]));
}

#[test]
fn the_memory_is_that_of_the_framework() {
    let folder = folder("plan-framework");
    let answer = |settings: &[&str]| -> Value {
        let sets = [
            "model.preset=llama3-70b",
            "cluster.preset=h100",
            "parallel.tp=8",
            "parallel.pp=2",
            "batch.global=16",
        ];
        let sets = sets.iter().chain(settings).flat_map(|set| ["--set", set]);
        let config = folder.join("empty.toml");
        std::fs::write(&config, "").unwrap();
        let arguments: Vec<&str> = ["plan", "empty.toml", "--json"].into_iter().chain(sets).collect();
        serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap()
    };
    let reserved = |answer: &Value| answer["memory"][0]["reserved"].as_u64().unwrap();
    let common =
        ["precision.compute=bf16", "parallel.sequence_parallel=true", "parallel.dp=2", "sharding.zero=1"];
    let engine = answer(&common);
    let megatron = answer(&[&common[..], &["framework.preset=megatron-core"]].concat());
    assert!(reserved(&megatron) > reserved(&engine));
    assert_eq!(megatron["fits"], reserved(&megatron) <= megatron["available_bytes"].as_u64().unwrap());
    assert_eq!(engine["notes"], serde_json::json!([]));
    let note = megatron["notes"][0].as_str().unwrap();
    assert!(note.starts_with("memory is an estimate for megatron-core; this engine would take "), "{note}");
    let refused = answer(&[&common[..3], &["sharding.zero=3", "framework.preset=megatron-core"]].concat());
    let note = "megatron-core cannot run sharding.zero = 3: its distributed optimizer shards states only";
    assert_eq!(refused["notes"][1], note);
}

#[test]
fn a_plan_leaves_headroom_and_a_range() {
    let folder = folder("plan-headroom");
    let answer = |settings: &[&str]| -> Value {
        let sets = settings.iter().flat_map(|set| ["--set", set]);
        let arguments: Vec<&str> = ["plan", "--json"].into_iter().chain(sets).collect();
        serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap()
    };
    let frontier = answer(&["cluster.preset=frontier"]);
    let [available, memory] = [frontier["available_bytes"].as_f64().unwrap(), 68_719_476_736.0];
    assert!((available / memory - 0.95).abs() < 1e-6, "{available}");
    // The most that fits without headroom does not fit with one.
    let needed = frontier["memory"][0]["reserved"].as_u64().unwrap();
    let limit = format!("cluster.device.memory={needed}");
    let none = "cluster.device.headroom=0";
    assert_eq!(answer(&["cluster.preset=frontier", &limit])["fits"], false);
    assert_eq!(answer(&["cluster.preset=frontier", &limit, none])["fits"], true);
    let (range, step) = (&frontier["range"]["step_s"], frontier["step_s"].as_f64().unwrap());
    assert!(range[0].as_f64().unwrap() < step && step < range[1].as_f64().unwrap(), "{range}");
}
