//! Copies of states in the memory of this node: room for new ones, and what an earlier attempt has left.

use std::path::PathBuf;

use kintsugi_checkpoint::{CopyFolder, CopyRecord, CopySet};
use kintsugi_comm::{Connection, agents};
use kintsugi_plan::Plan;
use kintsugi_run::read_rollbacks;
use kintsugi_spec::units;

use crate::failure::{ErrorContext, Failure};
use crate::processes;

/// The copies of a run.
#[derive(Default)]
pub struct Copies {
    /// Where this process writes them. `None` if states are not copied.
    pub folder: Option<CopyFolder>,
    /// In the process of rank 0: the newest whole set of an earlier attempt.
    pub newest: Option<CopySet>,
}

/// Refuses to copy states if no agent keeps the copies.
pub fn check(plan: &Plan, connection: Connection) -> Result<(), Failure> {
    if plan.copies_states() && keeper(connection).is_none() {
        return Err(Failure::mistake(format!(
            "run.replicate_every = {} needs the agents of kintsugi launch, which keep the copies; start the run with kintsugi launch \
             --restarts, or set run.replicate_every to 0",
            plan.run.replicate_every
        )));
    }
    Ok(())
}

/// The folder of this node's agent, and the rank of this process.
fn keeper(connection: Connection) -> Option<(PathBuf, usize)> {
    agents::node_folder().zip(connection.rank())
}

impl Copies {
    /// Finds the copies of an earlier attempt, and then takes the memory for new ones. Every process calls it.
    pub fn prepare(plan: &Plan, connection: Connection) -> Result<Self, Failure> {
        let Some((node, rank)) = keeper(connection).filter(|_| plan.copies_states()) else {
            return Ok(Copies::default());
        };
        let folder = CopyFolder::new(&node, plan);
        // Ranks at the same place of all nodes pass copies to each other.
        let (_, per_node) = plan.nodes();
        let found = folder.whole(|other| other % per_node == rank % per_node);
        let newest = processes::collect(connection, &to_json(&found))?.and_then(|found| {
            let found: Vec<Vec<CopyRecord>> = found.iter().map(|found| from_json(found)).collect();
            let rollbacks = read_rollbacks(&plan.run.out).last().map_or(0, |last| last.rollbacks);
            CopySet::newest(plan, &found, rollbacks)
        });
        let reserved = folder.reserve(plan, rank).map_err(|error| {
            let (every, bytes) = (plan.run.replicate_every, units::bytes(plan.copied_bytes_of_node()));
            let context = format!("run.replicate_every = {every} needs {bytes} of the memory of a node");
            Failure::mistake(ErrorContext::new(context, error))
        });
        processes::agree_on(connection, reserved)?;
        Ok(Copies { folder: Some(folder), newest })
    }
}

/// What processes tell each other of copies: the progress of a run has fields that may be left out.
pub fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("progress has string keys")
}

/// The same at the other end.
pub fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).expect("all processes run one version")
}
