//! ZB-H1 (arXiv 2401.10241): the backward is split into B (inputs) and W (weights), and W fills the bubble.
//!
//! Only B is on the critical path between stages, so for F = B = W the bubble is (p − 1)(F + B − W), a third of 1F1B's.
//! Stage s has at most p − s micro-batches between F and B, as in 1F1B, and at most s between B and W. So no stage
//! keeps more than the p micro-batches that 1F1B keeps on its first stage.

use super::Pass;

/// The passes of `stage`.
pub fn zero_bubble(pp: usize, stage: usize, micro_batches: usize) -> Vec<Pass> {
    let warm_up = (pp - stage - 1).min(micro_batches);
    // Later stages defer more weight parts, because their last B must reach the first stage early.
    let delay = stage.min(micro_batches);
    let forward = |micro| Pass::Forward { chunk: stage, micro };
    let backward = |micro: usize| {
        let input = Pass::BackwardInput { chunk: stage, micro };
        let weight = micro.checked_sub(delay).map(|micro| Pass::BackwardWeight { chunk: stage, micro });
        std::iter::once(input).chain(weight)
    };
    let mut passes = Vec::with_capacity(3 * micro_batches);
    // Warm-up.
    for micro in 0..warm_up {
        passes.push(forward(micro));
    }
    // Steady.
    for micro in warm_up..micro_batches {
        passes.push(forward(micro));
        passes.extend(backward(micro - warm_up));
    }
    // Cool-down.
    for micro in micro_batches - warm_up..micro_batches {
        passes.extend(backward(micro));
    }
    // The deferred weight parts.
    for micro in micro_batches - delay..micro_batches {
        passes.push(Pass::BackwardWeight { chunk: stage, micro });
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_stage_puts_off_its_weight_parts() {
        let read = |pass: &Pass| match pass {
            Pass::Forward { micro, .. } => format!("F{micro}"),
            Pass::BackwardInput { micro, .. } => format!("B{micro}"),
            Pass::BackwardWeight { micro, .. } => format!("W{micro}"),
            Pass::Backward { .. } => panic!("a whole backward in a split schedule"),
        };
        let read = |passes: Vec<Pass>| passes.iter().map(read).collect::<Vec<_>>().join(" ");
        assert_eq!(read(zero_bubble(3, 0, 4)), "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3");
        assert_eq!(read(zero_bubble(3, 2, 4)), "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3");
    }
}
