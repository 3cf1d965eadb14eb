//! A bit of a rank's memory changes while it trains.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use kintsugi_run::{Flight, Verdict};
use kintsugi_testing::{Need, skip};

use crate::stalls::{OPEN_MPI, RANKS, eventually, finish, has, processes, settings, signal, try_signal};
use crate::support::{command, folder, json_lines, kintsugi, stdout};

/// Such a rate changes no weight.
const STILL: [&str; 3] = ["optimizer.lr=1e-30", "optimizer.min_lr=0", "run.eval_every=0"];

/// Some of the initial weights, in their bytes.
fn initial_weights(folder: &Path) -> Vec<u8> {
    let sets = [&RANKS[..], &STILL, &["run.steps=0", "run.out=initial"]].concat();
    stdout(&kintsugi(folder, &[&["train"][..], &settings(&sets)].concat()));
    let file = fs::read(folder.join("initial/checkpoints/step-00000000/rank-00000.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let (name, table) = tensors.iter().find(|(name, _)| *name == "table.table").expect("the table");
    assert!(table.data().len() > 4096, "{name}");
    table.data()[1024..1088].to_vec()
}

/// Where the memory of a process has these bytes.
fn places(pid: u32, bytes: &[u8]) -> io::Result<Vec<u64>> {
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut places = Vec::new();
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some("rw-p")) = (fields.next(), fields.next()) else { continue };
        let (start, end) = range.split_once('-').expect("a range");
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).expect("an address"));
        let mut content = vec![0; (end - start) as usize];
        if memory.read_exact_at(&mut content, start).is_ok() {
            let offsets =
                (0..content.len()).step_by(4).filter(|&offset| content[offset..].starts_with(bytes));
            places.extend(offsets.map(|offset| start + offset as u64));
        }
    }
    Ok(places)
}

/// The memory of rank 1 in a run of three ranks with checks after every step.
struct Memory {
    folder: PathBuf,
    rank: u32,
    /// Where weights are that another rank owns, and what they are.
    places: Vec<u64>,
    bytes: Vec<u8>,
}

impl Memory {
    /// Starts the run. `None` if that or writing to the memory of a process is impossible here.
    fn of_run(name: &str) -> Option<(Self, Child)> {
        if !has(OPEN_MPI) {
            return None;
        }
        let folder = folder(name);
        let bytes = initial_weights(&folder);
        let more = ["run.steps=1000000", "run.checksum_every=1", "run.log_every=1000"];
        let launch = ["launch", "--mpirun", OPEN_MPI.1, "--ranks", "3", "train"];
        let arguments = [&launch[..], &settings(&[&RANKS[..], &STILL, &more].concat())].concat();
        let job = command(&folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let job = job.expect("the binary");
        let metrics = folder.join("out/metrics.jsonl");
        eventually("no step is trained", || {
            fs::read_to_string(&metrics).is_ok_and(|lines| lines.lines().count() > 20)
        });
        let rank = processes(&folder)[&1];
        let can_write = File::options().write(true).open(format!("/proc/{rank}/mem"));
        let Ok(places) = can_write.and_then(|_| places(rank, &bytes)) else {
            signal("TERM", job.id());
            finish(job);
            skip(Need::Root, "the memory of a process cannot be written");
            return None;
        };
        assert!(!places.is_empty(), "the weights are not found in the memory of rank 1");
        Some((Memory { folder, rank, places, bytes }, job))
    }

    /// Stops rank 1 for a moment. If it is in one of these ops, changes a bit of the weights. Returns whether it did.
    fn flip_in(&self, ops: &[&str]) -> bool {
        if !try_signal("STOP", self.rank) {
            return false;
        }
        eventually("rank 1 does not stop", || is_stopped(self.rank));
        let flight = Flight::read(&self.folder.join("out"), 1);
        let last = flight.and_then(|mut flight| flight.ops.pop()).map_or_else(String::new, |last| last.op);
        let is_due = ops.iter().any(|op| last.starts_with(op));
        let flipped = is_due && self.flip().is_ok_and(|flipped| flipped > 0);
        try_signal("CONT", self.rank);
        flipped
    }

    /// Changes a bit wherever the weights are. Returns in how many places.
    fn flip(&self) -> io::Result<usize> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{}/mem", self.rank))?;
        let mut flipped = 0;
        for &place in &self.places {
            let mut content = vec![0; self.bytes.len()];
            memory.read_exact_at(&mut content, place)?;
            if content == self.bytes {
                memory.write_all_at(&[self.bytes[0] ^ 1], place)?;
                flipped += 1;
            }
        }
        Ok(flipped)
    }
}

/// Whether all threads of a process are stopped, or it has ended.
fn is_stopped(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    // The name of the program is in parentheses.
    stats
        .filter_map(|stat| stat.rsplit_once(") ").map(|(_, fields)| fields.to_owned()))
        .all(|fields| fields.starts_with(['T', 'Z', 'X']))
}

/// The job has ended without a checkpoint, and nobody but rank 1 is accused. Returns the ranks that are.
fn ended(folder: &Path, (code, text): (Option<i32>, String)) -> Vec<usize> {
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("error: rank ") && text.contains("weights of table"), "{text}");
    let verdicts = Verdict::read_all(&folder.join("out"));
    assert!(!verdicts.is_empty(), "{text}");
    let named: Vec<usize> = verdicts.iter().filter_map(|verdict| verdict.culprit).collect();
    assert!(named.iter().all(|&rank| rank == 1), "{verdicts:?}");
    let saved = fs::read_dir(folder.join("out/checkpoints")).unwrap().flatten();
    let steps = saved.filter(|entry| entry.file_name().to_string_lossy().contains("step"));
    assert_eq!(steps.count(), 0, "nothing is saved");
    assert!(json_lines(&folder.join("out/metrics.jsonl")).len() > 20);
    named
}

#[test]
fn a_flipped_bit_in_the_weights_of_a_rank_names_it_and_nothing_is_saved() {
    let Some((memory, job)) = Memory::of_run("corruption") else { return };
    // Between two updates.
    eventually("rank 1 computes nothing", || memory.flip_in(&["load", "forward", "backward"]));
    assert_eq!(ended(&memory.folder, finish(job)), [1]);
}

#[test]
fn a_bit_that_flips_while_weights_are_gathered_accuses_no_other_rank() {
    let Some((memory, job)) = Memory::of_run("corruption-gather") else { return };
    // The wrong weights may be overwritten, stay in rank 1, or go on to rank 2, which then agrees with rank 1 and not with their owner.
    let output = thread::scope(|scope| {
        scope.spawn(|| {
            while fs::exists(format!("/proc/{}", memory.rank)).unwrap_or(false) {
                memory.flip_in(&["start refreshing", "wait for refreshed"]);
                thread::sleep(Duration::from_millis(5));
            }
        });
        finish(job)
    });
    ended(&memory.folder, output);
}
