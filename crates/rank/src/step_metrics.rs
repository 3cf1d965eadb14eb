//! Memory, traffic, time and energy of a step: the same type for predicted and measured values, so they can be compared.

use std::collections::BTreeMap;

use kintsugi_comm::Traffic;
use kintsugi_tensor::{Category, Usage};
use serde::{Deserialize, Serialize};

/// The metrics of a step, predicted or measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Memory of every rank.
    pub peak_bytes: Vec<RankMemory>,
    /// Bytes sent in one step over all ranks, by level and operation.
    pub comm_bytes: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
    /// Seconds per step.
    pub step_s: Option<f64>,
    /// Tokens per second over all ranks.
    pub tokens_per_s: Option<f64>,
    /// Joules per step.
    pub energy_j: Option<f64>,
    /// The copying of states between two steps, if they are copied. It is not in the other figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replication: Option<ReplicationMetrics>,
}

/// The metrics of copying the states of all ranks once, predicted or measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplicationMetrics {
    /// Bytes sent over all ranks, by level and operation.
    pub comm_bytes: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
    /// Bytes of all copies in the memory of the fullest node.
    pub node_bytes: u64,
    /// Seconds. Predicted are those of the transfers alone.
    pub seconds: Option<f64>,
}

impl ReplicationMetrics {
    /// Metrics of this traffic, memory and time.
    pub fn new(traffic: &Traffic, node_bytes: u64, seconds: Option<f64>) -> Self {
        ReplicationMetrics { comm_bytes: by_level(traffic), node_bytes, seconds }
    }
}

/// One rank's memory: live bytes by category when the total is at its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// Parameters in the compute precision.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer states.
    pub states: u64,
    /// Activations.
    pub activations: u64,
    /// Scratch of the kernels.
    pub workspace: u64,
    /// Buffers of collectives.
    pub communication: u64,
    /// Sum over the categories.
    pub total: u64,
    /// Bytes that are allocated from the device.
    pub reserved: u64,
    /// Bytes of the device that the transport itself holds, beside what is reserved: NCCL's buffers.
    pub transport: u64,
}

impl RankMemory {
    /// The memory of a rank with this peak and these reserved bytes.
    pub fn new(peak: Usage, reserved: u64) -> Self {
        RankMemory {
            weights: peak.get(Category::Weights),
            gradients: peak.get(Category::Gradients),
            states: peak.get(Category::States),
            activations: peak.get(Category::Activations),
            workspace: peak.get(Category::Workspace),
            communication: peak.get(Category::Communication),
            total: peak.total(),
            reserved,
            transport: 0,
        }
    }

    /// The same with the bytes that the transport itself holds.
    #[must_use]
    pub fn with_transport(self, transport: u64) -> Self {
        RankMemory { transport, ..self }
    }

    /// The categories by name, in the order of the output.
    pub fn categories(&self) -> [(&'static str, u64); 6] {
        [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("states", self.states),
            ("activations", self.activations),
            ("workspace", self.workspace),
            ("communication", self.communication),
        ]
    }
}

impl StepMetrics {
    /// Metrics of memory and traffic, without time and energy.
    pub fn new(peak_bytes: Vec<RankMemory>, traffic: &Traffic) -> Self {
        StepMetrics {
            peak_bytes,
            comm_bytes: by_level(traffic),
            step_s: None,
            tokens_per_s: None,
            energy_j: None,
            replication: None,
        }
    }
}

fn by_level(traffic: &Traffic) -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let mut bytes_by_level: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for (level, operation, bytes) in traffic.iter() {
        bytes_by_level.entry(level.name()).or_default().insert(operation.name(), bytes);
    }
    bytes_by_level
}
