//! Cross-entropy, with the vocabulary in one part or in several.

use kintsugi_tensor::ops::{CrossEntropy, LossStatistics};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::TestBackend;

/// Rows, and a vocabulary that is padded to `parts · columns`.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Rows.
    pub rows: usize,
    /// Tokens.
    pub vocabulary: usize,
    /// Columns of a part.
    pub columns: usize,
    /// Parts.
    pub parts: usize,
    /// The bound of logits.
    pub soft_cap: Option<f64>,
}

/// Statistics of all parts, the loss, and the gradients of all parts.
pub fn cross_entropy(backend: &TestBackend, case: Case, wanted: bool) -> Vec<Buffer> {
    let Case { rows, vocabulary, columns, parts, soft_cap } = case;
    let targets: Vec<u32> = (0..rows).map(|row| (row * 37 % vocabulary) as u32).collect();
    let (targets, statistics) = (backend.tokens(&targets), backend.sums(parts * rows * 3));
    let valid = |part: usize| vocabulary.saturating_sub(part * columns).min(columns);
    let logits: Vec<Buffer> = (0..parts).map(|part| backend.input(rows * columns, part as u64 + 1)).collect();
    for (part, logits) in logits.iter().enumerate().filter(|_| parts > 1) {
        backend.device.loss_statistics(LossStatistics {
            logits: logits.view(),
            targets: targets.view(),
            first: part * columns,
            valid: valid(part),
            statistics: statistics.slice(part * rows * 3..(part + 1) * rows * 3),
            soft_cap,
            rows,
            columns,
        });
    }
    let (scale, mut written) = (backend.numbers(&[64.0], DType::F32), Vec::new());
    for (part, logits) in logits.into_iter().enumerate() {
        let loss = backend.numbers(&[0.25], DType::F32);
        backend.device.cross_entropy(CrossEntropy {
            logits: logits.view(),
            targets: targets.view(),
            first: part * columns,
            valid: valid(part),
            statistics: statistics.view(),
            parts,
            loss: loss.view(),
            scale: wanted.then_some(scale.view()),
            factor: 1.0 / rows as f64,
            z_loss: 0.0625,
            soft_cap,
            rows,
            columns,
        });
        written.extend([loss, logits]);
    }
    written.push(statistics);
    written
}
