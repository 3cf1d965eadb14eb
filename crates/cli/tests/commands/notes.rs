//! `plan` and `train` print notes about settings that a plan does not fulfil.

use serde_json::Value;

use crate::support::{folder, json_lines, kintsugi, stdout, tiny};

fn sets<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

#[test]
fn ranks_that_stay_idle_are_counted() {
    let folder = folder("notes-idle");
    let layout = ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "batch.global=32", "batch.micro=4"];
    let nodes = [&["model.preset=demo", "cluster.preset=frontier", "cluster.nodes=4"], &layout[..]].concat();
    let note = "tp · pp · dp = 2 · 2 · 2 uses 8 of the 32 ranks of cluster.nodes = 4, the others are idle; \
                parallel.dp = 8 uses all of them";
    let plan = |more: &[&str]| stdout(&kintsugi(&folder, &[&["plan"], &sets(&nodes)[..], more].concat()));
    assert!(plan(&[]).ends_with(&format!("\nnote: {note}\n")), "{}", plan(&[]));
    let answer: Value = serde_json::from_str(&plan(&["--json"])).unwrap();
    assert_eq!(answer["notes"][0], note);
    let said = stdout(&tiny(&folder, &["train"], &nodes[..6]));
    // 8 replicas cannot share a batch of 4 samples, so the note suggests no dp.
    let (idle, _) = note.split_once("; ").unwrap();
    assert!(said.contains(&format!("\nnote     {idle}\n")), "{said}");
    // All ranks are used, or no nodes were requested: the run's own file has the preset's number of nodes.
    assert!(!plan(&["--set", "parallel.dp=8"]).contains("idle"));
    stdout(&tiny(&folder, &["train"], &["cluster.preset=frontier"]));
    assert!(!stdout(&kintsugi(&folder, &["plan", "out/config.toml"])).contains("idle"));
}

#[test]
fn a_run_on_another_kind_of_device_is_said() {
    let folder = folder("notes-device");
    let said = |settings: &[&str]| stdout(&tiny(&folder, &["train"], settings));
    let on_gpus = said(&["cluster.preset=frontier"]);
    let note = "\nnote     the ranks run on this machine's CPU, but the cluster describes GPUs (MI250X GCD): the predicted memory \
                is for this machine's CPU, the predicted time for the cluster\n";
    assert!(on_gpus.contains(note), "{on_gpus}");
    assert!(!said(&["cluster.device.kind=cpu", "cluster.per_node=8"]).contains("the ranks run on"));
    assert!(!said(&[]).contains("the ranks run on"));
}

#[test]
fn a_plan_for_gpus_has_their_workspace() {
    let folder = folder("notes-workspace");
    let workspace = |settings: &[&str]| {
        let plan = stdout(&kintsugi(&folder, &[&["plan", "--json"][..], &sets(settings)].concat()));
        serde_json::from_str::<Value>(&plan).unwrap()["memory"][0]["workspace"].as_u64().unwrap()
    };
    assert_eq!(workspace(&["cluster.preset=h200"]), 32 << 20);
    assert_eq!(workspace(&["cluster.device.kind=cpu", "cluster.cores=24", "cluster.per_node=8"]), 6 << 20);
}

#[test]
fn a_warm_up_that_is_longer_than_the_run_is_said() {
    let folder = folder("notes-warmup");
    let note = "note     optimizer.warmup = 8 is longer than run.steps = 4: the learning rate ends at 0.0015 and does not \
                reach optimizer.lr = 0.003\n";
    let said = stdout(&tiny(&folder, &["train"], &["optimizer.warmup=8"]));
    assert!(said.contains(note), "{said}");
    assert!(!stdout(&tiny(&folder, &["train"], &["optimizer.warmup=4"])).contains("warmup"));
}

#[test]
fn keeping_the_best_without_evaluations_or_checkpoints_is_said() {
    let folder = folder("notes-best");
    for (setting, reason) in [
        ("run.eval_every=0", "run.eval_every = 0 evaluates nothing"),
        ("run.keep=0", "run.keep = 0 saves no checkpoints"),
    ] {
        let said = stdout(&tiny(&folder, &["train"], &["run.keep_best=1", setting]));
        assert!(said.contains(&format!("note     run.keep_best = 1 has no effect: {reason}\n")), "{said}");
    }
}

/// The rates of the steps of a run with the tiny model.
fn rates(name: &str, settings: &[&str]) -> Vec<f64> {
    let folder = folder(name);
    let given = ["run.keep=0", "optimizer.lr=0.5", "optimizer.min_lr=0.25"];
    stdout(&tiny(&folder, &["train"], &[&given, settings].concat()));
    json_lines(&folder.join("out/metrics.jsonl")).iter().map(|line| line["lr"].as_f64().unwrap()).collect()
}

#[test]
fn a_cosine_ends_at_its_last_rate() {
    let near = |rates: Vec<f64>, expected: &[f64]| {
        assert_eq!(rates.len(), expected.len());
        assert!(
            rates.iter().zip(expected).all(|(rate, expected)| (rate - expected).abs() < 1e-6),
            "{rates:?}"
        );
        assert_eq!(rates.last(), expected.last(), "the last rate is exact");
    };
    near(rates("rates-plain", &["optimizer.warmup=0", "run.steps=3"]), &[0.5, 0.375, 0.25]);
    near(
        rates("rates-warm", &["optimizer.warmup=2", "run.steps=6"]),
        &[0.25, 0.5, 0.463_388, 0.375, 0.286_612, 0.25],
    );
    near(rates("rates-two", &["optimizer.warmup=1", "run.steps=2"]), &[0.5, 0.25]);
    near(rates("rates-one", &["optimizer.warmup=0", "run.steps=1"]), &[0.5]);
    near(rates("rates-constant", &["optimizer.schedule=constant", "run.steps=3"]), &[0.25, 0.5, 0.5]);
}

#[test]
fn every_schedule_has_its_rates() {
    let near = |name: &str, settings: &[&str], expected: &[f64]| {
        let rates = rates(name, &[&["optimizer.warmup=2", "run.steps=6"], settings].concat());
        assert_eq!(rates.len(), expected.len());
        assert!(
            rates.iter().zip(expected).all(|(rate, expected)| (rate - expected).abs() < 1e-6),
            "{rates:?}"
        );
    };
    near("rates-linear", &["optimizer.schedule=linear"], &[0.25, 0.5, 0.4375, 0.375, 0.3125, 0.25]);
    let early = ["optimizer.schedule=linear", "optimizer.decay_steps=2"];
    near("rates-early", &early, &[0.25, 0.5, 0.375, 0.25, 0.25, 0.25]);
    let late = ["optimizer.schedule=cosine", "optimizer.decay_steps=8"];
    near("rates-late", &late, &[0.25, 0.5, 0.490_485, 0.463_388, 0.422_835, 0.375]);
    let root = ["optimizer.schedule=inverse-sqrt", "optimizer.min_lr=0.3"];
    near("rates-root", &root, &[0.25, 0.5, 0.408_248, 0.353_553, 0.316_228, 0.3]);
    near("rates-wsd", &["optimizer.schedule=wsd"], &[0.25, 0.5, 0.5, 0.5, 0.5, 0.25]);
    let longer = ["optimizer.schedule=wsd", "optimizer.decay_steps=2"];
    near("rates-wsd-longer", &longer, &[0.25, 0.5, 0.5, 0.5, 0.375, 0.25]);
}
