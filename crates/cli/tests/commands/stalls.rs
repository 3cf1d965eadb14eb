//! One process of a job stalls, dies, or sees another folder. The job ends soon, and its message names that process.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_comm::rendezvous::{ADDRESS, SECRET, arrange_locally};
use kintsugi_run::Verdict;
use kintsugi_testing::{Need, skip};

use crate::support::{TINY, command, folder};

pub const OPEN_MPI: (Need, &str) = (Need::OpenMpi, "mpirun.openmpi");
pub const MPICH: (Need, &str) = (Need::Mpich, "mpirun.mpich");

/// How long anything here may take, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(100);

pub const RANKS: [&str; 3] = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=3"];

pub fn has((need, mpirun): (Need, &str)) -> bool {
    let found = Command::new(mpirun).arg("--version").output().is_ok();
    if !found {
        skip(need, format!("there is no {mpirun}"));
    }
    found
}

pub fn settings<'a>(more: &[&'a str]) -> Vec<&'a str> {
    TINY.iter().chain(&["batch.global=6"]).chain(more).flat_map(|setting| ["--set", *setting]).collect()
}

/// Starts three processes that train.
fn start(folder: &Path, mpirun: &str, more: &[&str]) -> Child {
    let launch = ["launch", "--mpirun", mpirun, "--ranks", "3", "train"];
    let arguments = [&launch[..], &settings(&[&RANKS[..], more].concat())].concat();
    command(folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary")
}

/// The exit code and all output of a process that must end.
pub fn finish(mut process: Child) -> (Option<i32>, String) {
    let begun = Instant::now();
    let mut pipes: Vec<Box<dyn Read + Send>> = Vec::new();
    pipes.extend(process.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    pipes.extend(process.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let readers: Vec<_> = pipes
        .into_iter()
        .map(|mut pipe| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                pipe.read_to_end(&mut bytes).expect("a pipe");
                String::from_utf8_lossy(&bytes).into_owned()
            })
        })
        .collect();
    let code = loop {
        if let Some(status) = process.try_wait().expect("it is a child") {
            break status.code();
        }
        if begun.elapsed() > PATIENCE {
            process.kill().ok();
            panic!("it does not end");
        }
        thread::sleep(Duration::from_millis(20));
    };
    (code, readers.into_iter().map(|reader| reader.join().expect("no panic")).collect())
}

/// The processes that train in a folder, by rank.
pub fn processes(folder: &Path) -> BTreeMap<usize, u32> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").expect("there is a /proc").flatten() {
        let path = entry.path();
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let is_here = fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd == folder);
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        let rank = environment.split(|&byte| byte == 0).find_map(|variable| {
            let variable = String::from_utf8_lossy(variable).into_owned();
            let (name, value) = variable.split_once('=')?;
            ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].contains(&name).then(|| value.parse().ok())?
        });
        found.extend(rank.filter(|_| is_here).map(|rank: usize| (rank, pid)));
    }
    found
}

/// Whether the process of a rank has a thread of this name.
fn has_thread(pid: u32, name: &str) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks
        .into_iter()
        .any(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|found| found.trim_end() == name))
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub fn signal(name: &str, pid: u32) {
    assert!(try_signal(name, pid), "there is no process {pid}");
}

/// Whether the process was there.
pub fn try_signal(name: &str, pid: u32) -> bool {
    let mut kill = Command::new("kill");
    let sent = kill.args([&format!("-{name}"), &pid.to_string()]).stderr(Stdio::null()).status();
    sent.expect("there is a kill").success()
}

/// Stops a rank when `ready` says so. Returns the output of the job.
fn stop(
    name: &str,
    launcher: (Need, &str),
    rank: usize,
    more: &[&str],
    ready: impl Fn(&Path, u32) -> bool,
) -> Option<String> {
    if !has(launcher) {
        return None;
    }
    let folder = folder(name);
    let job = start(&folder, launcher.1, &[&["run.communication_timeout=4"], more].concat());
    let mut pid = 0;
    eventually("the processes do not start", || {
        pid = processes(&folder).get(&rank).copied().unwrap_or(0);
        pid != 0 && ready(&folder, pid)
    });
    signal("STOP", pid);
    let (code, text) = finish(job);
    // The launcher may have left it behind.
    try_signal("KILL", pid);
    assert_eq!(code, Some(1), "{text}");
    Some(text)
}

/// The messages blame the rank that was stopped, and no other. They come from a rank that waits for it, from rank 0, which gets no
/// heartbeats from it, or from the agent, which sees that it is stopped.
fn assert_blamed(text: &str, rank: usize) {
    let mut errors =
        text.lines().filter_map(|line| line.split_once("error: ").map(|(_, error)| error)).peekable();
    assert!(errors.peek().is_some(), "no message:\n{text}");
    let expected = format!("rank {rank} on ");
    for error in errors {
        let before_silence =
            error.split_once(", whose process has sent nothing for").map(|(before, _)| before);
        let own = error.split_once(" failed: its process ").map(|(before, _)| before);
        let last = before_silence.or(own).and_then(|before| before.rfind("rank ").map(|at| &before[at..]));
        assert!(last.is_some_and(|last| last.starts_with(&expected)), "rank {rank} was stopped:\n{text}");
    }
}

#[test]
fn a_rank_that_stalls_at_the_start_is_named() {
    let meets = |_: &Path, pid: u32| has_thread(pid, "heartbeat");
    if let Some(text) = stop("stall-start", OPEN_MPI, 1, &["run.steps=100000"], meets) {
        assert_blamed(&text, 1);
    }
}

#[test]
fn a_rank_that_stalls_in_a_step_is_named_by_ranks_that_do_not_wait_for_it_directly() {
    let trains = |folder: &Path, _: u32| {
        fs::metadata(folder.join("out/metrics.jsonl")).is_ok_and(|metrics| metrics.len() > 1000)
    };
    if let Some(text) = stop("stall-step", MPICH, 2, &["run.steps=100000", "run.eval_every=0"], trains) {
        assert_blamed(&text, 2);
    }
}

#[test]
fn rank_0_that_stalls_is_named_by_the_others() {
    let meets = |_: &Path, pid: u32| has_thread(pid, "rank 0");
    if let Some(text) = stop("stall-first", OPEN_MPI, 0, &["run.steps=100000"], meets) {
        assert!(text.contains("rank 0 on ") && text.contains("has sent nothing for"), "{text}");
    }
}

#[test]
fn if_a_rank_is_killed_under_mpich_no_other_is_named() {
    if !has(MPICH) {
        return;
    }
    let folder = folder("stall-killed");
    let job = start(&folder, MPICH.1, &["run.steps=100000", "run.eval_every=0"]);
    eventually("it does not train", || {
        fs::metadata(folder.join("out/metrics.jsonl")).is_ok_and(|metrics| metrics.len() > 1000)
    });
    signal("KILL", processes(&folder)[&2]);
    let (code, text) = finish(job);
    assert_eq!(code, Some(1), "{text}");
    // MPICH may kill the others at the same moment: then nobody is named.
    let verdicts = Verdict::read_all(&folder.join("out"));
    let named: Vec<_> = verdicts.iter().filter_map(|verdict| verdict.culprit).collect();
    assert!(named.is_empty() || named == [2], "{verdicts:?}\n{text}");
    if !named.is_empty() {
        assert!(text.contains("error: rank 2 on ") && text.contains("signal 9 ended its process"), "{text}");
    }
}

/// Runs two processes. The second one begins with a shell command.
fn run_two(folder: &Path, second: &str, more: [&[&str]; 2]) -> (Option<i32>, String) {
    let binary = env!("CARGO_BIN_EXE_kintsugi");
    let words = |more: &[&str]| {
        let ranks = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=2", "run.communication_timeout=5"];
        let given = settings(&ranks);
        let words = given.iter().chain(more).map(|word| format!("'{word}'")).collect::<Vec<_>>();
        format!("{binary} train {}", words.join(" "))
    };
    let mut mpirun = Command::new("mpirun.openmpi");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "1", "bash", "-c"]);
    mpirun.arg(format!("exec {}", words(more[0])));
    mpirun
        .args([":", "-n", "1", "unshare", "-m", "bash", "-c"])
        .arg(format!("{second} exec {}", words(more[1])));
    mpirun.current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(mpirun.spawn().expect("mpirun"))
}

/// Whether file systems can be mounted for one process alone.
fn can_unshare() -> bool {
    let mount = "mount -t tmpfs none /mnt";
    let can = Command::new("unshare")
        .args(["-m", "bash", "-c", mount])
        .output()
        .is_ok_and(|ran| ran.status.success());
    if !can {
        skip(Need::Root, "file systems cannot be mounted here");
    }
    can
}

#[test]
fn a_folder_that_ranks_do_not_share_is_noticed_before_the_first_step() {
    if !has(OPEN_MPI) || !can_unshare() {
        return;
    }
    let folder = folder("stall-unshared");
    let out = folder.join("out");
    fs::create_dir(&out).expect("a folder for tests");
    let (code, text) = run_two(&folder, &format!("mount -t tmpfs none {} &&", out.display()), [&[], &[]]);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("error: rank 1 on ") && text.contains("is not the folder that rank 0 has"),
        "{text}"
    );
    assert!(
        !out.join("metrics.jsonl").metadata().is_ok_and(|metrics| metrics.len() > 0),
        "no step was trained"
    );
    let read_only = format!("mount --bind {0} {0} && mount -o remount,ro,bind {0} &&", out.display());
    let (code, text) = run_two(&folder, &read_only, [&[], &[]]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("error: rank 1 on ") && text.contains("cannot be written"), "{text}");
    let left = fs::read_dir(&out).expect("it is there").flatten();
    let names: Vec<_> = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(names.iter().all(|name| !name.starts_with(".shared-")), "{names:?}");
}

#[test]
fn a_flag_of_one_rank_alone_is_named_by_its_key() {
    if !has(OPEN_MPI) || !can_unshare() {
        return;
    }
    let (code, text) = run_two(&folder("stall-resume"), "true &&", [&[], &["--resume"]]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("it has run.resume = true, and rank 0 has "), "{text}");
}

/// A process of a job without MPI.
fn process(folder: &Path, rank: usize, ranks: usize, address: &str, secret: &str) -> Command {
    let more = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=2", "run.transport=nccl", "run.device=cuda"];
    let mut process = command(folder, &[&["train"][..], &settings(&more)].concat());
    process.env("KINTSUGI_RANK", rank.to_string()).env("KINTSUGI_RANKS", ranks.to_string());
    process.env(ADDRESS, address).env(SECRET, secret).stdout(Stdio::piped()).stderr(Stdio::piped());
    process
}

#[test]
fn connections_of_strangers_do_not_keep_processes_from_meeting() {
    let folder = folder("stall-noise");
    let [(_, address), (_, secret)] = arrange_locally().expect("a free port");
    let first = process(&folder, 0, 2, &address, &secret).spawn().expect("the binary");
    let mut strangers = Vec::new();
    eventually("rank 0 does not listen", || {
        strangers.extend(TcpStream::connect(&address).ok());
        strangers.len() == 30
    });
    strangers.iter_mut().step_by(3).for_each(|stranger| drop(stranger.write_all(&[0])));
    // What says that 64 GiB follow.
    strangers.iter_mut().skip(1).step_by(3).for_each(|stranger| drop(stranger.write_all(&[0xff; 200])));
    let wrong = finish(process(&folder, 1, 2, &address, "another").spawn().expect("the binary"));
    assert!(wrong.0 == Some(1) && wrong.1.contains("rank 0 has another secret of the job"), "{}", wrong.1);
    let second = finish(process(&folder, 1, 2, &address, &secret).spawn().expect("the binary"));
    let (code, text) = finish(first);
    // They have met. Without GPUs they agree that they cannot train.
    assert!(text.contains("was refused: it says that it is rank 1, but does not know the secret"), "{text}");
    assert!(text.contains("run.transport = \"nccl\"") || code == Some(0), "{text}");
    assert_eq!(second.0, code, "{}", second.1);
}

#[test]
fn an_empty_secret_and_a_rank_beyond_the_job_are_refused_at_once() {
    let folder = folder("stall-refused");
    let empty = finish(process(&folder, 0, 2, "127.0.0.1:1", "").spawn().expect("the binary"));
    assert!(empty.0 == Some(2) && empty.1.contains("KINTSUGI_SECRET is empty"), "{}", empty.1);
    let beyond = finish(process(&folder, 2, 2, "127.0.0.1:1", "s").spawn().expect("the binary"));
    assert!(
        beyond.0 == Some(2) && beyond.1.contains("this process has rank 2, and the job has 2"),
        "{}",
        beyond.1
    );
}
