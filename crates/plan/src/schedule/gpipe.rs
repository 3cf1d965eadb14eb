//! `GPipe` (arXiv 1811.06965): all forwards, then all backwards.
//!
//! Bubble (p − 1)(F + B); every stage keeps the activations of all m micro-batches.

use super::Pass;

/// The passes of `stage`.
pub fn gpipe(stage: usize, micro_batches: usize) -> Vec<Pass> {
    let forwards = (0..micro_batches).map(|micro| Pass::Forward { chunk: stage, micro });
    let backwards = (0..micro_batches).map(|micro| Pass::Backward { chunk: stage, micro });
    forwards.chain(backwards).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Pass::{Backward, Forward};

    #[test]
    fn all_forwards_come_before_all_backwards() {
        let chunk = 2;
        let expected = [
            Forward { chunk, micro: 0 },
            Forward { chunk, micro: 1 },
            Backward { chunk, micro: 0 },
            Backward { chunk, micro: 1 },
        ];
        assert_eq!(gpipe(chunk, 2), expected);
    }
}
