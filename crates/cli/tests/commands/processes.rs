//! Ranks as processes: the same run as on threads, bit for bit, and what a launcher's user meets.

use std::path::Path;
use std::process::{Command, Output};

use kintsugi_testing::{Need, skip};
use serde_json::Value;

use crate::support::{TINY, command, folder, json_lines, kintsugi, stdout, tiny};

const LAUNCHERS: [(Need, &str); 2] = [(Need::OpenMpi, "mpirun.openmpi"), (Need::Mpich, "mpirun.mpich")];

/// Four ranks in two stages.
const LAYOUT: [&str; 3] = ["parallel.tp=1", "parallel.pp=2", "parallel.dp=2"];

/// Four ranks on two nodes, with codes of weights and gradients.
const QUANTIZED: [&str; 5] =
    ["parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "cluster.per_node=2", "sharding.preset=zero++"];

/// Two stages on four nodes of two pods, so that messages and sums cross pods.
const PLACED: [&str; 6] = [
    "parallel.tp=1",
    "parallel.pp=2",
    "parallel.dp=2",
    "cluster.per_node=1",
    "cluster.placement.nodes=[\"n1\", \"n2\", \"n3\", \"n4\"]",
    "cluster.placement.pods=[\"a\", \"b\", \"b\", \"a\"]",
];

/// Four ranks in two packages of a node, with codes of weights, of their refresh and of gradients.
const THREE_LEVELS: [&str; 7] = [
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=4",
    "cluster.per_package=2",
    "cluster.per_node=4",
    "sharding.preset=three-level",
    "sharding.quantize_weights=int8",
];

/// Whether a launcher is here. If not, the test is skipped.
fn has(need: Need, mpirun: &str) -> bool {
    let found = Command::new(mpirun).arg("--version").output().is_ok();
    if !found {
        skip(need, format!("there is no {mpirun}"));
    }
    found
}

fn launch(folder: &Path, mpirun: &str, ranks: &str, command: &[&str], settings: &[&str]) -> Output {
    let launch = ["launch", "--mpirun", mpirun, "--ranks", ranks];
    tiny(folder, &[&launch[..], command].concat(), settings)
}

/// Step, loss and norm of every step, in all their digits.
fn losses(out: &Path) -> Vec<String> {
    let line = |step: &Value| format!("{} {} {}", step["step"], step["loss"], step["grad_norm"]);
    json_lines(&out.join("metrics.jsonl")).iter().map(line).collect()
}

fn summary(out: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(out.join("summary.json")).unwrap()).unwrap()
}

#[test]
fn processes_train_what_threads_train_and_resume_their_checkpoints() {
    let [first, second] = LAUNCHERS;
    let cases: [(_, &[&str]); 4] =
        [(first, &LAYOUT), (second, &PLACED), (first, &QUANTIZED), (second, &THREE_LEVELS)];
    for (number, ((need, mpirun), layout)) in cases.into_iter().enumerate() {
        if !has(need, mpirun) {
            continue;
        }
        let folder = folder(&format!("processes-{number}"));
        let schedule = "optimizer.schedule=constant";
        let settings = |out: &'static str, steps: &'static str| [layout, &[schedule, out, steps]].concat();
        stdout(&tiny(&folder, &["train"], &settings("run.out=threads", "run.steps=4")));
        let ran = launch(&folder, mpirun, "4", &["train"], &settings("run.out=processes", "run.steps=2"));
        assert!(stdout(&ran).contains("4 processes of "), "{}", stdout(&ran));
        let resumed = tiny(&folder, &["train", "--resume"], &settings("run.out=processes", "run.steps=4"));
        stdout(&resumed);
        assert_eq!(losses(&folder.join("processes")), losses(&folder.join("threads")));
        let found = summary(&folder.join("threads"));
        let whole = launch(&folder, mpirun, "4", &["train"], &settings("run.out=whole", "run.steps=4"));
        stdout(&whole);
        let of_processes = summary(&folder.join("whole"));
        if number == 0 {
            // A requeued job finds its run finished.
            let settings = settings("run.out=whole", "run.steps=4");
            let again = stdout(&launch(&folder, mpirun, "4", &["train", "--resume"], &settings));
            assert!(again.starts_with("finished whole is at step 4 of 4: "), "{again}");
            assert_eq!(summary(&folder.join("whole")), of_processes);
        }
        let (predicted, measured) = (&of_processes["predicted"], &of_processes["measured"]);
        assert_eq!(predicted["comm_bytes"], measured["comm_bytes"]);
        assert_eq!(measured["comm_bytes"], found["measured"]["comm_bytes"]);
        let memory = |of: &Value| -> Vec<Value> {
            let ranks = of["peak_bytes"].as_array().unwrap();
            ranks.iter().map(|rank| rank["total"].clone()).collect()
        };
        assert_eq!((memory(predicted).len(), memory(predicted)), (4, memory(measured)));
    }
}

#[test]
fn a_mistake_is_told_once_with_the_exit_code_of_a_mistake() {
    let (need, mpirun) = LAUNCHERS[0];
    if !has(need, mpirun) {
        return;
    }
    let folder = folder("processes-mistakes");
    let few = launch(&folder, mpirun, "2", &["train"], &LAYOUT);
    let text = String::from_utf8_lossy(&few.stderr);
    let expected = "error: the configuration has 4 ranks (parallel.tp × pp × dp), and 2 processes were started: start 4, as \
                    with kintsugi launch --ranks 4\n";
    assert_eq!((few.status.code(), &*text), (Some(2), expected));
    let wrong = launch(&folder, mpirun, "4", &["train"], &[&LAYOUT[..], &["parallel.tp=3"]].concat());
    let text = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(2), "{text}");
    assert!(text.starts_with("error: parallel.tp = 3 ") && text.lines().count() == 1, "{text}");
}

#[test]
fn launch_shows_its_command_and_refuses_what_cannot_be() {
    let (need, mpirun) = LAUNCHERS[0];
    if !has(need, mpirun) {
        return;
    }
    let folder = folder("processes-print");
    let shown = kintsugi(
        &folder,
        &["launch", "--mpirun", mpirun, "-n", "4", "--nodes", "2", "--print", "train", "a b.toml"],
    );
    let shown = stdout(&shown);
    assert!(shown.starts_with("mpirun.openmpi -n 4 --bind-to none --oversubscribe"), "{shown}");
    assert!(
        shown.contains("--map-by ppr:2:node") && shown.trim_end().ends_with("kintsugi train 'a b.toml'"),
        "{shown}"
    );
    let uneven = kintsugi(&folder, &["launch", "--mpirun", mpirun, "-n", "3", "--nodes", "2", "train"]);
    let text = String::from_utf8_lossy(&uneven.stderr).into_owned();
    assert_eq!(text, "error: --ranks 3 cannot be divided equally over --nodes 2\n");
    let missing = kintsugi(&folder, &["launch", "--mpirun", "no-such-mpirun", "-n", "2", "train"]);
    let text = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(
        missing.status.code() == Some(2) && text.starts_with("error: cannot run no-such-mpirun"),
        "{text}"
    );
}

#[test]
fn transfers_are_timed_beside_their_prediction() {
    let folder = folder("processes-bench");
    let settings = TINY.iter().chain(&LAYOUT).flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> = ["bench", "comm", "--json", "--sizes", "64,4KiB", "--out", "links.toml"]
        .into_iter()
        .chain(settings)
        .collect();
    let rows: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 5, "two groups, two sizes, five operations");
    assert!(rows.iter().all(|row| row["seconds"].as_f64().unwrap() > 0.0));
    let plan = ["plan", "--profile", "links.toml", "--json"].into_iter();
    stdout(&kintsugi(
        &folder,
        &plan.chain(LAYOUT.iter().flat_map(|setting| ["--set", setting])).collect::<Vec<_>>(),
    ));
}

#[test]
fn commands_of_one_process_refuse_several() {
    let folder = folder("processes-one");
    for (rank, expected) in [
        (
            "0",
            "error: eval runs all ranks as threads of one process, and 4 processes were started; start one\n",
        ),
        ("1", ""),
    ] {
        let mut eval = command(&folder, &["eval", "nowhere"]);
        let output =
            eval.env("OMPI_COMM_WORLD_RANK", rank).env("OMPI_COMM_WORLD_SIZE", "4").output().unwrap();
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(2), expected));
    }
}
