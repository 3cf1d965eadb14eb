//! 1F1B (arXiv 2104.04473, "PipeDream-Flush"): one forward, one backward.
//!
//! The bubble is `GPipe`'s, (p − 1)(F + B), but stage s keeps the activations of at most p − s micro-batches.

use super::Pass;

/// The passes of `stage`.
pub fn one_f_one_b(pp: usize, stage: usize, micro_batches: usize) -> Vec<Pass> {
    // The stages after this one must be filled before the first backward can return.
    let warm_up = (pp - stage - 1).min(micro_batches);
    let forward = |micro| Pass::Forward { chunk: stage, micro };
    let backward = |micro| Pass::Backward { chunk: stage, micro };
    let mut passes = Vec::with_capacity(2 * micro_batches);
    // Warm-up.
    for micro in 0..warm_up {
        passes.push(forward(micro));
    }
    // Steady.
    for micro in warm_up..micro_batches {
        passes.push(forward(micro));
        passes.push(backward(micro - warm_up));
    }
    // Cool-down.
    for micro in micro_batches - warm_up..micro_batches {
        passes.push(backward(micro));
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;
    use Pass::{Backward, Forward};

    #[test]
    fn the_first_of_two_stages_runs_one_forward_ahead() {
        let chunk = 0;
        let expected = [
            Forward { chunk, micro: 0 },
            Forward { chunk, micro: 1 },
            Backward { chunk, micro: 0 },
            Forward { chunk, micro: 2 },
            Backward { chunk, micro: 1 },
            Backward { chunk, micro: 2 },
        ];
        assert_eq!(one_f_one_b(2, 0, 3), expected);
    }

    #[test]
    fn fewer_micro_batches_than_stages_is_gpipe() {
        assert_eq!(one_f_one_b(6, 1, 3), super::super::gpipe(1, 3));
    }
}
