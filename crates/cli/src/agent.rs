//! `kintsugi agent`: the agent of a node. `launch` starts it and tells it by its standard input where to report.

use std::io::{self, BufRead, BufReader};

use kintsugi_comm::{agents, print_notices_by};

use crate::failure::{ErrorContext, Failure};
use crate::signals::every_signal_to_stop;

/// Watches the ranks of this node and reports to `kintsugi launch`, which starts it.
#[derive(clap::Args)]
pub struct Arguments {}

/// Runs the command.
pub fn run(_: &Arguments) -> Result<(), Failure> {
    // It outlives the ranks, which are asked to stop by the same signals. It ends with the launcher.
    every_signal_to_stop()?;
    print_notices_by(|_| {});
    let mut input = BufReader::new(io::stdin());
    let failed = |error: io::Error| Failure::run(ErrorContext::new("the agent of this node", error));
    let mut line = String::new();
    input.read_line(&mut line).map_err(failed)?;
    let task = serde_json::from_str(&line)
        .map_err(|_| Failure::mistake("kintsugi agent is started by kintsugi launch, and not by itself"))?;
    agents::run(task, input).map_err(failed)
}
