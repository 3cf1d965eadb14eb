//! The copying of states to neighbour nodes: its traffic and memory, on random layouts of several nodes.

use std::cell::RefCell;
use std::rc::Rc;

use kintsugi_rank::{CopyKeeper, ReplicationMetrics};

use super::*;

/// Takes copies and keeps nothing of them.
struct Nowhere;

impl CopyKeeper for Nowhere {
    fn keep_own(&mut self, _: &[u8]) {}

    fn keep_received(&mut self, _: &[u8]) {}
}

pub fn keeper() -> Rc<RefCell<dyn CopyKeeper>> {
    Rc::new(RefCell::new(Nowhere))
}

/// Compares the traffic of copying the states once.
pub fn check(prediction: &Prediction, measured: &[RankMeasure]) -> Result<(), String> {
    let mut traffic = Traffic::default();
    for rank in measured {
        traffic.merge(&rank.copies);
    }
    let measured = ReplicationMetrics::new(&traffic, 0, None).comm_bytes;
    let predicted =
        prediction.replication.as_ref().map(|copies| copies.comm_bytes.clone()).unwrap_or_default();
    if predicted == measured {
        return Ok(());
    }
    Err(format!("copies: predicted {predicted:?}, measured {measured:?}"))
}

/// Random layouts on several nodes, which copy their states. A larger vocabulary needs more than one piece.
fn copying_layouts() -> impl Iterator<Item = (String, Plan)> {
    let mut choices = Choices(13);
    let larger = move || {
        let vocab = choices.of(&["vocab = 200", "vocab = 20000"]);
        choices.layout().replace("vocab = 200", vocab).replace("[run]", "[run]\nreplicate_every = 1")
    };
    std::iter::repeat_with(larger)
        .filter_map(|text| ConfigSource::text(&text).plan().ok().map(|plan| (text, plan)))
        .filter(|(_, plan)| plan.mesh.ranks() <= 16)
}

#[test]
fn predicted_memory_and_traffic_of_copies_equal_measured() {
    let mut pieces = Vec::new();
    for (text, plan) in copying_layouts().take(layouts() / 8) {
        let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
        let measured = measure(&plan, MemoryChoice::Heap, |_| {});
        super::check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}\n{text}"));
        pieces.push(plan.replication(0).ops.len() / 2);
    }
    assert!(pieces.iter().any(|&pieces| pieces > 1) && pieces.contains(&1), "{pieces:?}");
}

#[test]
fn the_planned_slab_suffices_for_copies() {
    for (text, plan) in copying_layouts().take(layouts() / 16) {
        let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
        let slab = MemoryChoice::Slab(prediction.stages.iter().map(|stage| stage.reserved).collect());
        for rank in measure(&plan, slab, |_| {}) {
            assert_eq!(rank.allocator.reserved, prediction.stages[rank.stage].reserved, "{text}");
            assert_eq!(rank.allocator.peak.total(), 0, "every tensor is in the slab\n{text}");
        }
    }
}
