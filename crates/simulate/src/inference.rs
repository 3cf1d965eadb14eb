//! Predicted memory of ranks that do not train: the same programs on paper, without gradients and states.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::paper::Log;
use kintsugi_plan::{Axis, Coordinate, Plan};
use kintsugi_rank::{NoTokens, Purpose, Rank, RankMemory, paper_groups};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Device};
use rayon::prelude::*;

/// The memory of an evaluating rank of each stage.
pub fn evaluation_memory(plan: &Plan, device: Device) -> Vec<RankMemory> {
    let run = |stage| {
        let at = Coordinate::of_stage(stage);
        on_paper(plan, at, device, |rank| {
            rank.run(&plan.evaluation(stage, plan.micro_batches()), &mut NoTokens, |_, _| {})
                .expect("paper moves nothing that could fail");
        })
    };
    (0..plan.mesh.pp()).into_par_iter().map(run).collect()
}

/// The memory of a rank of each stage that continues prompts of these `lengths` by up to `tokens` tokens, for the
/// replica that needs most.
pub fn generation_memory(plan: &Plan, device: Device, lengths: &[usize], tokens: usize) -> Vec<RankMemory> {
    let run = |stage, replica| {
        let at = Coordinate::of_stage(stage).with(Axis::Data, replica);
        on_paper(plan, at, device, |rank| {
            for round in plan.rounds(replica, lengths, tokens) {
                let program = plan.generation(stage, round.micro_batches);
                rank.start_generation(round.micro_batches, round.samples, round.capacity);
                // Every step after the first is like the second.
                for new in [round.prompt, 1] {
                    rank.expect_tokens(new);
                    rank.run(&program, &mut NoTokens, |_, _| {})
                        .expect("paper moves nothing that could fail");
                }
                rank.end_generation();
            }
        })
    };
    let most = |stage| {
        let replicas = (0..plan.mesh.dp()).map(|replica| run(stage, replica));
        replicas.max_by_key(|memory| memory.reserved).expect("there is a replica")
    };
    (0..plan.mesh.pp()).into_par_iter().map(most).collect()
}

fn on_paper(plan: &Plan, at: Coordinate, device: Device, run: impl FnOnce(&mut Rank)) -> RankMemory {
    let paper = Rc::new(Paper::new(device));
    let groups = paper_groups(plan, at, &Rc::new(RefCell::new(Log::default())));
    let backend: Rc<dyn Backend> = Rc::clone(&paper) as Rc<dyn Backend>;
    let mut rank = Rank::for_purpose(Arc::new(plan.clone()), at, backend, groups, Purpose::Inference);
    run(&mut rank);
    RankMemory::new(paper.memory().peak(), paper.memory().reserved())
}
