//! `kintsugi status --why`: the verdicts about the failures of a run, and what its ranks did last.

use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::HumanDuration;
use kintsugi_run::{LastOps, Verdict, now};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::Output;

/// Ranks that are shown. Those that have begun no op for the longest time come first.
const SHOWN: usize = 16;

/// Why a run has failed.
#[derive(Serialize)]
struct Why {
    run: PathBuf,
    /// The oldest first.
    verdicts: Vec<Verdict>,
    /// What every rank did last, since the last start of the ranks.
    ranks: Vec<LastOps>,
}

/// Shows the verdicts and flight recorders of the run in a folder.
pub fn run(folder: &Path, output: Output) -> Result<(), Failure> {
    let (verdicts, ranks) = (Verdict::read_all(folder), LastOps::read_all(folder));
    if verdicts.is_empty() && ranks.is_empty() {
        return Err(Failure::mistake(format!(
            "{} has no verdicts and no flight recorders: no run has begun there",
            folder.display()
        )));
    }
    let why = Why { run: folder.to_owned(), verdicts, ranks };
    if !output.json {
        output.text(&text(&why))?;
    }
    output.result(&why)
}

fn text(Why { verdicts, ranks, .. }: &Why) -> String {
    let mut lines = Vec::new();
    for verdict in verdicts {
        let ago = Duration::try_from_secs_f64(now() - verdict.time).unwrap_or_default();
        lines.push(format!("{} ago: {}", HumanDuration(ago), verdict.message));
        lines.extend(verdict.to_string().lines().map(|line| format!("  {line}")));
    }
    if verdicts.is_empty() {
        lines.push("no failure has a verdict".to_owned());
    }
    if !ranks.is_empty() {
        lines.push("the last op of every rank, the oldest first:".to_owned());
    }
    for LastOps { rank, place, since_s, ops, gpu } in ranks.iter().take(SHOWN) {
        let op = ops.last().map_or_else(
            || "it has recorded no op".to_owned(),
            |(step, op)| format!("{since_s:.1} s ago: {op}, step {step}"),
        );
        let gpu = gpu.as_ref().map_or_else(String::new, |gpu| format!("; {gpu}"));
        lines.push(format!("  rank {rank} ({place}), {op}{gpu}"));
    }
    if ranks.len() > SHOWN {
        lines.push(format!("  and {} more; --json has all of them", ranks.len() - SHOWN));
    }
    // The files may have been written by anybody.
    let printable = |line: String| line.chars().filter(|c| !c.is_control()).collect::<String>() + "\n";
    lines.into_iter().map(printable).collect()
}
