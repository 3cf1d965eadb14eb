//! `verdicts.jsonl`: why a job has failed, one line for every failure: the message, the culprit, and the last ops of the ranks that
//! the message names.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use kintsugi_spec::input;
use serde::{Deserialize, Serialize};

use crate::files::VERDICTS;
use crate::flight::Flight;
use crate::gpu_state::GpuState;
use crate::now;

/// Ops of a rank that a verdict has.
const LAST_OPS: usize = 5;

/// Why a job has failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// When, in seconds since 1970.
    pub time: f64,
    /// The error, with the chain of who waited for whom.
    pub message: String,
    /// The rank that is the cause, if it is known.
    pub culprit: Option<usize>,
    /// What the ranks that the message names did last, the culprit first.
    pub ranks: Vec<LastOps>,
}

/// What a rank did last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastOps {
    /// The rank.
    pub rank: usize,
    /// Its host and device.
    pub place: String,
    /// Seconds from the beginning of its last op to the verdict.
    pub since_s: f64,
    /// Its last ops with their steps, the oldest first.
    pub ops: Vec<(u64, String)>,
    /// What its GPU said last, if it has one that tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuState>,
}

impl Verdict {
    /// The verdict about a failure, with the last ops of the culprit and of other ranks from the flight recorders in the run's folder.
    pub fn new(out: &Path, message: String, culprit: Option<usize>, others: &[usize]) -> Self {
        let time = now();
        let mut ranks: Vec<usize> = culprit.into_iter().collect();
        for &rank in others {
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        let ranks = ranks.into_iter().filter_map(|rank| LastOps::read(out, rank, time)).collect();
        Verdict { time, message, culprit, ranks }
    }

    /// Adds it to the verdicts of the run.
    pub fn add(&self, out: &Path) -> io::Result<()> {
        let line = serde_json::to_string(self).expect("a verdict has string keys") + "\n";
        OpenOptions::new().append(true).create(true).open(out.join(VERDICTS))?.write_all(line.as_bytes())
    }

    /// The verdicts of a run, the oldest first. Lines that cannot be read are left out.
    pub fn read_all(out: &Path) -> Vec<Verdict> {
        let bytes = input::bytes(&out.join(VERDICTS), input::MAX_WRITTEN_BY_PROGRAMS).unwrap_or_default();
        bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }
}

impl LastOps {
    /// What a rank did last, seen at a time in seconds since 1970, from its flight recorder in the run's folder.
    fn read(out: &Path, rank: usize, time: f64) -> Option<Self> {
        let Flight { place, ops } = Flight::read(out, rank)?;
        let since_s = ops.last().map_or(0.0, |last| time - last.time as f64 / 1e6);
        let skipped = ops.len().saturating_sub(LAST_OPS);
        let ops = ops.into_iter().skip(skipped).map(|op| (op.step, op.op)).collect();
        Some(LastOps { rank, place, since_s, ops, gpu: GpuState::read(out, rank) })
    }

    /// What all ranks of a run did last, seen now. Whoever has begun no op for the longest time is first.
    pub fn read_all(out: &Path) -> Vec<LastOps> {
        let time = now();
        let mut all: Vec<LastOps> =
            Flight::ranks(out).into_iter().filter_map(|rank| LastOps::read(out, rank, time)).collect();
        all.sort_by(|one, other| other.since_s.total_cmp(&one.since_s));
        all
    }
}

/// The lines after the message.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match (self.culprit, self.ranks.first()) {
            (None, _) => f.write_str("verdict: no single rank is the cause")?,
            (Some(culprit), Some(LastOps { rank, place, since_s, ops, .. })) if *rank == culprit => {
                write!(f, "verdict: rank {culprit} ({place}) is the cause")?;
                if let Some((step, op)) = ops.last() {
                    write!(f, "; its last op began {since_s:.1} s ago: {op}, step {step}")?;
                }
            }
            (Some(culprit), _) => write!(f, "verdict: rank {culprit} is the cause; it has recorded no op")?,
        }
        for LastOps { rank, gpu, .. } in &self.ranks {
            if let Some(gpu) = gpu {
                write!(f, "\n  GPU of rank {rank}: {gpu}")?;
            }
        }
        for LastOps { rank, ops, .. } in &self.ranks {
            let ops: Vec<String> = ops.iter().map(|(step, op)| format!("{op} ({step})")).collect();
            write!(f, "\n  last ops of rank {rank} (and their steps): {}", ops.join("; "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flight::FlightRecorder;

    #[test]
    fn a_verdict_has_the_last_ops_of_the_culprit_and_of_who_waits() {
        let out = std::env::temp_dir().join(format!("kintsugi-verdict-{}", std::process::id()));
        let mut culprit = FlightRecorder::create(&out, 2, "node1, cpu").expect("a folder");
        for op in ["begin", "load micro-batch 0", "forward embedding, micro-batch 0", "a", "b", "c", "d"] {
            culprit.op(47, &op).expect("it is written");
        }
        let gpu = GpuState { temperature_c: Some(91), xids: vec![79], ..GpuState::default() };
        gpu.write(&out, 2).expect("it is written");
        let mut waits = FlightRecorder::create(&out, 0, "node1, cpu").expect("a folder");
        waits.op(47, &"wait for reduced layer.1 over dp").expect("it is written");
        let verdict = Verdict::new(&out, "rank 0 waits".to_owned(), Some(2), &[0, 2, 7]);
        verdict.add(&out).expect("it is written");
        verdict.add(&out).expect("it is written");
        let all: Vec<usize> = LastOps::read_all(&out).iter().map(|last| last.rank).collect();
        assert_eq!(all, [2, 0], "rank 2 has begun its last op before rank 0");
        let found = Verdict::read_all(&out);
        std::fs::remove_dir_all(&out).ok();
        assert_eq!(found, [verdict.clone(), verdict.clone()]);
        assert_eq!(
            verdict.to_string(),
            "verdict: rank 2 (node1, cpu) is the cause; its last op began 0.0 s ago: d, step 47\n  \
             GPU of rank 2: Xid 79, 91 °C\n  \
             last ops of rank 2 (and their steps): forward embedding, micro-batch 0 (47); a (47); b (47); c (47); d (47)\n  \
             last ops of rank 0 (and their steps): wait for reduced layer.1 over dp (47)"
        );
        assert_eq!(Verdict::default().to_string(), "verdict: no single rank is the cause");
    }
}
