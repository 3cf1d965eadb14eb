//! The agent of a node: it names ranks that die when no other rank is left to say it, and its own death disturbs nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use kintsugi_run::Verdict;
use kintsugi_testing::Need;

use crate::stalls::{MPICH, OPEN_MPI, RANKS, eventually, finish, has, processes, settings, signal};
use crate::support::{command, folder};

const STEPS: u64 = 60;

fn launch(folder: &Path, mpirun: &str, more: &[&str], settings_of_run: &[&str]) -> Child {
    let steps = format!("run.steps={STEPS}");
    let given = [&RANKS[..], &[&*steps, "run.eval_every=0"], settings_of_run].concat();
    let launch = [&["launch", "--mpirun", mpirun, "--ranks", "3"][..], more, &["train"]].concat();
    let arguments = [launch, settings(&given)].concat();
    command(folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary")
}

fn metrics_has(folder: &Path, step: u64) -> bool {
    let metrics = fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap_or_default();
    metrics.contains(&format!("\"step\":{step},"))
}

/// The agent that a process has started.
fn agent_of(launcher: u32) -> Option<u32> {
    let is_agent = |pid: u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split(' ').collect();
        words.ends_with(b"\0agent\0")
            && fields.get(2) == Some(&&*launcher.to_string())
            && fields.get(1) != Some(&"Z")
    };
    let entries = fs::read_dir("/proc").expect("there is a /proc").flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|&pid| is_agent(pid))
}

/// The folder of the job in memory, as a rank was told.
pub fn job_folder(rank: u32) -> PathBuf {
    let environment = fs::read(format!("/proc/{rank}/environ")).expect("it runs");
    let mut variables = environment.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let found = variables.find_map(|one| one.strip_prefix("KINTSUGI_AGENT=").map(PathBuf::from));
    found.expect("ranks know the agent of their node")
}

/// How many ranks are connected to the agents of a job.
fn connected_ranks(job: &Path) -> usize {
    let sockets = fs::read_to_string("/proc/net/unix").expect("Linux has it");
    let is_of_job = |line: &&str| line.contains(&*job.to_string_lossy());
    // One of them listens.
    sockets.lines().filter(is_of_job).count().saturating_sub(1)
}

/// Sends a signal to rank 1 when it has saved for the last time, and only waits for the others to come to their end. Returns whether
/// that came in time.
fn disturb_the_end(name: &str, mpirun: &str, signal_name: &str, reason: &str) -> bool {
    let folder = folder(name);
    let job = launch(&folder, mpirun, &[], &["model.hidden=128"]);
    eventually("the run does not begin", || metrics_has(&folder, STEPS / 2));
    let ranks = processes(&folder);
    eventually("the run does not come to its last step", || metrics_has(&folder, STEPS));
    // Nobody comes to the end while rank 0 is stopped, and that is too short for the others to give it up.
    signal("STOP", ranks[&0]);
    thread::sleep(Duration::from_secs(1));
    let has_ended = |rank: u32| !Path::new(&format!("/proc/{rank}")).exists();
    if ranks.values().any(|&rank| has_ended(rank)) {
        Command::new("kill").args(["-CONT", &ranks[&0].to_string()]).stderr(Stdio::null()).status().ok();
        finish(job);
        return false;
    }
    signal(signal_name, ranks[&1]);
    signal("CONT", ranks[&0]);
    let (code, text) = finish(job);
    if code == Some(0) {
        return false;
    }
    let verdicts = Verdict::read_all(&folder.join("out"));
    let named: Vec<usize> = verdicts.iter().filter_map(|verdict| verdict.culprit).collect();
    assert_eq!(named, [1], "{verdicts:?}\n{text}");
    assert!(text.contains("error: rank 1 on ") && text.contains(reason), "{text}");
    assert!(text.contains("verdict: rank 1 ("), "{text}");
    true
}

/// The end of a run is short: what comes too late is tried again.
fn disturb(name: &str, launcher: (Need, &str), signal_name: &str, reason: &str) {
    let came_in_time = |_| disturb_the_end(name, launcher.1, signal_name, reason);
    assert!(!has(launcher) || (0..5).any(came_in_time), "no run could be disturbed at its end");
}

#[test]
fn a_rank_that_is_killed_after_its_last_save_is_named() {
    disturb("agents-killed", OPEN_MPI, "KILL", " process");
}

#[test]
fn a_rank_that_is_stopped_after_its_last_message_is_named() {
    disturb("agents-stopped", MPICH, "STOP", "its process was stopped for ");
}

#[test]
fn the_death_of_an_agent_disturbs_nothing_and_its_successor_knows_the_ranks() {
    if !has(OPEN_MPI) {
        return;
    }
    let folder = folder("agents-agent");
    let more = ["run.steps=100000", "run.checkpoint_every=25"];
    let job = launch(&folder, OPEN_MPI.1, &["--restarts", "1"], &more);
    eventually("no step is trained", || metrics_has(&folder, 30));
    let ranks = processes(&folder);
    let in_memory = job_folder(ranks[&0]);
    assert!(in_memory.is_dir());
    let agent = agent_of(job.id()).expect("launch has started it");
    signal("KILL", agent);
    eventually("no other agent is started", || agent_of(job.id()).is_some_and(|next| next != agent));
    eventually("ranks do not connect to it", || connected_ranks(&in_memory) >= 3);
    assert_eq!(processes(&folder), ranks, "the run goes on");
    // Without ranks that could say it, the new agent knows which one died first.
    signal("STOP", ranks[&0]);
    signal("STOP", ranks[&1]);
    signal("KILL", ranks[&2]);
    eventually("no verdict is written", || !Verdict::read_all(&folder.join("out")).is_empty());
    let verdicts = Verdict::read_all(&folder.join("out"));
    assert_eq!(verdicts[0].culprit, Some(2), "{verdicts:?}");
    eventually("the run does not go on", || folder.join("out/restarts.jsonl").exists());
    signal("USR1", job.id());
    let (code, text) = finish(job);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("warning: the agent of ") && text.contains("restarted: step "), "{text}");
    assert!(!in_memory.exists(), "agents leave nothing in memory");
}
