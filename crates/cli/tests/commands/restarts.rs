//! `launch --restarts`: a rank is killed or stopped, and the run ends as if nothing had happened.

use std::path::Path;
use std::process::Stdio;

use kintsugi_run::Verdict;
use kintsugi_testing::Need;
use serde_json::Value;

use crate::agents::job_folder;
use crate::stalls::{MPICH, OPEN_MPI, RANKS, eventually, finish, has, processes, settings, signal};
use crate::support::{command, folder, json_lines, kintsugi, stdout};

const STEPS: [&str; 3] = ["run.steps=400", "run.eval_every=0", "run.checkpoint_every=25"];

fn steps(folder: &Path) -> Vec<Value> {
    std::fs::read_to_string(folder.join("out/metrics.jsonl"))
        .unwrap_or_default()
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// Loss and gradient norm of every step.
fn losses(folder: &Path) -> Vec<[Value; 3]> {
    let lines = json_lines(&folder.join("out/metrics.jsonl"));
    lines.iter().map(|line| ["step", "loss", "grad_norm"].map(|key| line[key].clone())).collect()
}

/// Sends a signal to a rank in the middle of a run, which restarts and ends with the losses of an undisturbed one.
fn disturb(name: &str, launcher: (Need, &str), (signal_name, rank): (&str, usize)) {
    if !has(launcher) {
        return;
    }
    let folder = folder(name);
    let launch = ["launch", "--mpirun", launcher.1, "--ranks", "3", "--restarts", "2", "train"];
    let arguments = [&launch[..], &settings(&[&RANKS[..], &STEPS].concat())].concat();
    let process = command(&folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    // Without a checkpoint the run would begin anew.
    let saved = folder.join("out/checkpoints/step-00000025");
    eventually("no checkpoint is saved", || steps(&folder).len() > 30 && saved.exists());
    signal(signal_name, processes(&folder)[&rank]);
    let (code, text) = finish(process.expect("the binary"));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("restart 1 of 2") && text.contains("restarted: step "), "{text}");
    // The verdict names it, with what it did last, and nobody else. When a rank is killed, MPICH may kill the others at the same
    // moment: then it names nobody.
    let verdicts = Verdict::read_all(&folder.join("out"));
    let named: Vec<usize> = verdicts.iter().filter_map(|verdict| verdict.culprit).collect();
    let names_nobody = signal_name == "KILL" && named.is_empty();
    assert!(named == [rank] || names_nobody, "{verdicts:?}\n{text}");
    let begins = format!("verdict: rank {rank} (");
    assert!(names_nobody || text.contains(&begins) && text.contains("; its last op began "), "{text}");
    let alone = folder.join("alone");
    std::fs::create_dir(&alone).expect("a folder for tests");
    stdout(&kintsugi(&alone, &[&["train"][..], &settings(&[&RANKS[..], &STEPS].concat())].concat()));
    assert_eq!(losses(&folder), losses(&alone));
    let summary = std::fs::read_to_string(folder.join("out/summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    assert_eq!(summary["restarts"]["restarts"], 1, "{summary}");
    let why = stdout(&kintsugi(&folder, &["status", "--why", "out"]));
    let shown =
        verdicts.iter().filter(|verdict| why.contains(&format!(" ago: {}\n", verdict.message))).count();
    assert!(shown == verdicts.len() && why.contains("  rank 2 ("), "{why}");
    let restarts = json_lines(&folder.join("out/restarts.jsonl"));
    let number = |key: &str| restarts[0][key].as_u64().expect("a number");
    assert!(number("resumed_after").is_multiple_of(25) && number("last_step") > 30, "{restarts:?}");
    assert_eq!(number("lost_steps"), number("last_step") - number("resumed_after"));
}

#[test]
fn a_run_survives_the_death_of_rank_0() {
    disturb("restarts-killed", MPICH, ("KILL", 0));
}

#[test]
fn a_rank_that_is_stopped_is_noticed_long_before_the_timeout_and_replaced() {
    disturb("restarts-stopped", OPEN_MPI, ("STOP", 1));
}

#[test]
fn rank_0_that_is_stopped_does_not_accuse_another_when_the_launcher_lets_it_continue() {
    disturb("restarts-first-stopped", OPEN_MPI, ("STOP", 0));
}

/// Four ranks on two nodes, which are this machine.
const TWO_NODES: [&str; 6] = [
    "parallel.tp=1",
    "parallel.pp=2",
    "parallel.dp=2",
    "cluster.per_node=2",
    "run.steps=120",
    "run.eval_every=0",
];

/// Removes what the second of two nodes has in its memory: the copies that its ranks 2 and 3 have written.
fn lose_memory(job: &Path) {
    let nodes =
        std::fs::read_dir(job).expect("a folder of the job").map(|node| node.expect("an entry").path());
    let copies = nodes.map(|node| node.join("copies")).find(|copies| copies.is_dir()).expect("copies");
    for (origin, of) in [("own", ["rank-00002", "rank-00003"]), ("received", ["rank-00000", "rank-00001"])] {
        for file in
            std::fs::read_dir(copies.join(origin)).expect("a folder").map(|file| file.expect("an entry"))
        {
            if of.iter().any(|rank| file.file_name().to_string_lossy().starts_with(rank)) {
                std::fs::remove_file(file.path()).expect("it is there");
            }
        }
    }
}

#[test]
fn a_lost_node_costs_the_steps_since_the_last_copies() {
    if !has(OPEN_MPI) {
        return;
    }
    let folder = folder("restarts-copies");
    let launch = ["launch", "--mpirun", OPEN_MPI.1, "--ranks", "4", "--restarts", "1", "train"];
    // Nothing is saved: the states come from memory.
    let copied = ["run.keep=0", "run.replicate_every=10"];
    let arguments = [&launch[..], &settings(&[&TWO_NODES[..], &copied].concat())].concat();
    let process = command(&folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    eventually("no step is trained", || steps(&folder).len() > 34);
    let ranks = processes(&folder);
    let in_memory = job_folder(ranks[&0]);
    let of_node = [ranks[&2], ranks[&3]];
    for pid in of_node {
        signal("STOP", pid);
    }
    lose_memory(&in_memory);
    for pid in of_node {
        signal("KILL", pid);
    }
    let (code, text) = finish(process.expect("the binary"));
    assert_eq!(code, Some(0), "{text}");
    let restarts = json_lines(&folder.join("out/restarts.jsonl"));
    let number = |key: &str| restarts[0][key].as_u64().expect("a number");
    let resumed = number("resumed_after");
    assert!(resumed >= 30 && resumed.is_multiple_of(10) && number("lost_steps") <= 10, "{restarts:?}");
    assert!(
        text.contains(&format!("note     resumes after step {resumed} from the copies in memory")),
        "{text}"
    );
    assert!(!in_memory.exists(), "agents leave nothing in memory");
    let alone = folder.join("alone");
    std::fs::create_dir(&alone).expect("a folder for tests");
    stdout(&kintsugi(&alone, &[&["train"][..], &settings(&TWO_NODES)].concat()));
    assert_eq!(losses(&folder), losses(&alone));
    let summary = std::fs::read_to_string(folder.join("out/summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    let figures = |of: &str| ["comm_bytes", "node_bytes"].map(|key| summary[of]["replication"][key].clone());
    assert_eq!(figures("predicted"), figures("measured"));
    assert!(figures("measured")[1].as_u64() > Some(0), "{summary}");
    assert_eq!(summary["predicted"]["comm_bytes"], summary["measured"]["comm_bytes"]);
}

#[test]
fn copies_of_states_need_agents_that_keep_them() {
    let folder = folder("restarts-no-agents");
    let output = kintsugi(
        &folder,
        &[&["train"][..], &settings(&TWO_NODES), &["--set", "run.replicate_every=5"]].concat(),
    );
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("error: run.replicate_every = 5 needs the agents of kintsugi launch"), "{text}");
}

#[test]
fn restarts_need_a_run_with_checkpoints() {
    let folder = folder("restarts-refused");
    let refused = |command: &[&str]| {
        let launch = ["launch", "--ranks", "2", "--restarts", "1"];
        let output = kintsugi(&folder, &[&launch[..], command].concat());
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert_eq!(refused(&["verify"]), "error: --restarts needs the command train\n");
    let keep = refused(&["train", "--set", "run.keep=0"]);
    assert!(keep.starts_with("error: --restarts needs checkpoints, and run.keep = 0 saves none"), "{keep}");
    let trace = refused(&["train", "--trace", "step.json"]);
    assert!(trace.starts_with("error: --restarts cannot be combined with --trace"), "{trace}");
}
