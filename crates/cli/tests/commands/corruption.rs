//! A bit of a rank's memory changes while it trains.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

use kintsugi_run::Verdict;
use kintsugi_testing::{Need, skip};

use crate::stalls::{OPEN_MPI, RANKS, eventually, finish, has, processes, settings};
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

/// Changes a bit wherever the memory of a process has these bytes. Returns how often that was.
fn flip(pid: u32, bytes: &[u8]) -> std::io::Result<usize> {
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let mut flipped = 0;
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some("rw-p")) = (fields.next(), fields.next()) else { continue };
        let (start, end) = range.split_once('-').expect("a range");
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).expect("an address"));
        let mut content = vec![0; (end - start) as usize];
        if memory.read_exact_at(&mut content, start).is_err() {
            continue;
        }
        for offset in (0..content.len().saturating_sub(bytes.len())).step_by(4) {
            if content[offset..].starts_with(bytes) {
                memory.write_all_at(&[bytes[0] ^ 1], start + offset as u64)?;
                flipped += 1;
            }
        }
    }
    Ok(flipped)
}

#[test]
fn a_flipped_bit_in_the_weights_of_a_rank_names_it_and_nothing_is_saved() {
    if !has(OPEN_MPI) {
        return;
    }
    let folder = folder("corruption");
    let bytes = initial_weights(&folder);
    let sets = [&RANKS[..], &STILL, &["run.steps=1000000", "run.checksum_every=1"]].concat();
    let launch = ["launch", "--mpirun", OPEN_MPI.1, "--ranks", "3", "train"];
    let arguments = [&launch[..], &settings(&sets)].concat();
    let job = command(&folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let job = job.expect("the binary");
    let metrics = folder.join("out/metrics.jsonl");
    eventually("no step is trained", || {
        fs::read_to_string(&metrics).is_ok_and(|lines| lines.lines().count() > 20)
    });
    let flipped = flip(processes(&folder)[&1], &bytes);
    let Ok(flipped) = flipped else {
        crate::stalls::signal("TERM", job.id());
        finish(job);
        return skip(Need::Root, "the memory of a process cannot be written");
    };
    assert!(flipped > 0, "the weights are not found in the memory of rank 1");
    let (code, text) = finish(job);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("error: rank 1") && text.contains("the weights of table"), "{text}");
    let verdicts = Verdict::read_all(&folder.join("out"));
    assert!(
        verdicts.iter().all(|verdict| verdict.culprit == Some(1)) && !verdicts.is_empty(),
        "{verdicts:?}"
    );
    let saved = fs::read_dir(folder.join("out/checkpoints")).unwrap().flatten();
    let steps = saved.filter(|entry| entry.file_name().to_string_lossy().contains("step"));
    assert_eq!(steps.count(), 0, "nothing is saved");
    assert!(json_lines(&metrics).len() > 20);
}
