//! Interleaved 1F1B (arXiv 2104.04473, section 2.2): each stage holds v chunks, assigned round-robin.
//!
//! The bubble shrinks to (p − 1)(F + B) / v, at the price of v times the messages and more activations in the warm-up.
//! Micro-batches pass through the pipeline in groups of p: a group passes the first chunk of a stage, then its second,
//! and so on, so that a chunk's input has just arrived when the stage runs it.

use super::Pass;

/// The passes of `stage`; `micro_batches` is a multiple of `pp`.
pub fn interleaved(pp: usize, stage: usize, micro_batches: usize, virtual_stages: usize) -> Vec<Pass> {
    let forwards = forward_only(pp, stage, micro_batches, virtual_stages);
    // The backwards visit the chunks of a group from the last to the first.
    let backwards: Vec<Pass> = groups(pp, micro_batches)
        .flat_map(|group| {
            let chunks = (0..virtual_stages).rev().map(move |v| v * pp + stage);
            chunks.flat_map(move |chunk| group.clone().map(move |micro| Pass::Backward { chunk, micro }))
        })
        .collect();
    let total = forwards.len();
    // All chunks but the last must run over the first group. Each later stage adds two passes of delay, one in each
    // direction.
    let warm_up = ((pp - stage - 1) * 2 + (virtual_stages - 1) * pp).min(total);
    let mut passes = Vec::with_capacity(2 * total);
    // Warm-up.
    passes.extend_from_slice(&forwards[..warm_up]);
    // Steady.
    for k in warm_up..total {
        passes.push(forwards[k]);
        passes.push(backwards[k - warm_up]);
    }
    // Cool-down.
    passes.extend_from_slice(&backwards[total - warm_up..]);
    passes
}

/// Only the forwards of `stage`, for any number of micro-batches: the last group may be smaller than `pp`.
pub fn forward_only(pp: usize, stage: usize, micro_batches: usize, virtual_stages: usize) -> Vec<Pass> {
    groups(pp, micro_batches)
        .flat_map(|group| {
            let chunks = (0..virtual_stages).map(move |v| v * pp + stage);
            chunks.flat_map(move |chunk| group.clone().map(move |micro| Pass::Forward { chunk, micro }))
        })
        .collect()
}

fn groups(pp: usize, micro_batches: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..micro_batches).step_by(pp).map(move |first| first..(first + pp).min(micro_batches))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chunk and micro-batch of every pass, backwards with a minus, as in the paper's figure 4.
    fn read(passes: &[Pass]) -> String {
        let one = |pass: &Pass| match pass {
            Pass::Forward { chunk, micro } => format!("{chunk}:{micro}"),
            Pass::Backward { chunk, micro } => format!("-{chunk}:{micro}"),
            split => panic!("{split:?} in an interleaved schedule"),
        };
        passes.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn two_stages_of_two_chunks() {
        assert_eq!(
            read(&interleaved(2, 0, 2, 2)),
            "0:0 0:1 2:0 2:1 -2:0 -2:1 -0:0 -0:1",
            "the first stage warms up with all four"
        );
        assert_eq!(
            read(&interleaved(2, 1, 4, 2)),
            "1:0 1:1 3:0 -3:0 3:1 -3:1 1:2 -1:0 1:3 -1:1 3:2 -3:2 3:3 -3:3 -1:2 -1:3"
        );
    }

    #[test]
    fn a_last_group_may_be_smaller() {
        assert_eq!(read(&forward_only(2, 1, 3, 2)), "1:0 1:1 3:0 3:1 1:2 3:2");
    }
}
