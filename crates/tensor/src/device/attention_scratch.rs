//! Scratch memory of attention, by formula: the paper backend must know it without a GPU.

use crate::ops::{AttentionSaved, AttentionShape};
use crate::{Arena, DType, View};

/// Scratch of cuDNN's kernels that does not depend on the shape.
const FIXED_BYTES: u64 = 256;

/// The scratch that attention takes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionScratch {
    /// What our portable kernels need.
    Portable,
    /// What cuDNN's kernels need, even if it is not installed. Our own then leave some of it unused.
    Cudnn {
        /// Whether sums are added in the same order every time.
        deterministic: bool,
    },
}

impl AttentionScratch {
    /// The scratch of the forward, or of the `backward`. `asked` is the result of [`asks_library`].
    pub fn workspace(
        self,
        shape: AttentionShape,
        dtype: DType,
        asked: bool,
        backward: bool,
    ) -> AttentionWorkspace {
        let (asked, deterministic) = match self {
            AttentionScratch::Portable => (false, true),
            AttentionScratch::Cudnn { deterministic } => (asked, deterministic),
        };
        let pass = if backward { AttentionPass::Backward { deterministic } } else { AttentionPass::Forward };
        AttentionWorkspace::new(shape, dtype, asked, pass)
    }
}

/// One direction of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPass {
    /// Computes the output.
    Forward,
    /// Computes the gradients.
    Backward {
        /// Whether sums are added in the same order every time.
        deterministic: bool,
    },
}

/// Scratch of one pass, as parts of one buffer. Each part starts at a multiple of [`Arena::ALIGNMENT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionWorkspace {
    /// `Σ dout ∘ out` of every query, fp32.
    pub row_dots: u64,
    /// Gradients of the queries in fp32.
    pub dquery_sums: u64,
    /// What cuDNN's plan may use, or the counters of our Hopper kernels.
    pub library: u64,
}

impl AttentionWorkspace {
    /// The scratch of a pass. `asked` is the result of [`asks_library`].
    pub fn new(shape: AttentionShape, dtype: DType, asked: bool, pass: AttentionPass) -> Self {
        let queries = (shape.rows() * shape.heads) as u64;
        let vectors = queries * shape.head_dim as u64;
        let library = asked && fits_library(shape, dtype, pass);
        let AttentionPass::Backward { deterministic } = pass else {
            return AttentionWorkspace {
                library: if library { FIXED_BYTES } else { 0 },
                ..AttentionWorkspace::default()
            };
        };
        let row_dots = 4 * queries;
        if !library {
            return AttentionWorkspace { row_dots, ..AttentionWorkspace::default() };
        }
        // Gradients of keys and values per query head, before they are summed over each group.
        let groups = if shape.heads == shape.kv_heads { 0 } else { 4 * vectors };
        // The gradients of the scores in two bytes each, or sums added in any order.
        let (dscores, dquery_sums) =
            if deterministic { (2 * shape.score_elements() as u64, 0) } else { (0, 4 * vectors) };
        AttentionWorkspace { row_dots, dquery_sums, library: FIXED_BYTES + groups + dscores }
    }

    /// Bytes of the whole buffer. Zero means that there is no buffer.
    pub fn bytes(self) -> u64 {
        [self.row_dots, self.dquery_sums, self.library].map(rounded).iter().sum()
    }

    /// The addresses of the parts, in the order of the fields, in a buffer at `base`.
    pub fn addresses(self, base: u64) -> [u64; 3] {
        let dquery_sums = base + rounded(self.row_dots);
        [base, dquery_sums, dquery_sums + rounded(self.dquery_sums)]
    }
}

/// Whether the scratch of cuDNN's kernels is planned for this kind of attention: flash, without a soft cap, and every token attends
/// to all tokens before it. Layers with a window take the same scratch, so that every layer of a model takes as much.
pub fn asks_library(shape: AttentionShape, saved: &AttentionSaved, starts: Option<View>) -> bool {
    matches!(saved, AttentionSaved::LogSumExp(_))
        && shape.scores.soft_cap.is_none()
        && (starts.is_none() || shape.scores.window.is_some())
}

/// Whether cuDNN's kernels support it: 16-bit types, a supported head size, and for the backward no padding.
pub fn fits_library(shape: AttentionShape, dtype: DType, pass: AttentionPass) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
        && shape.head_dim.is_multiple_of(8)
        && shape.head_dim <= 256
        && (pass == AttentionPass::Forward || shape.sequence.is_multiple_of(128))
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(Arena::ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Scores;

    const SHAPE: AttentionShape = AttentionShape {
        batch: 3,
        sequence: 384,
        heads: 6,
        kv_heads: 2,
        head_dim: 96,
        scores: Scores::PLAIN,
    };

    fn library(shape: AttentionShape, pass: AttentionPass) -> u64 {
        AttentionWorkspace::new(shape, DType::BF16, true, pass).library
    }

    /// The numbers that cuDNN 9.14 reports for these plans on Hopper.
    #[test]
    fn the_scratch_is_what_cudnn_requests() {
        let [sums, ordered] = [false, true].map(|deterministic| AttentionPass::Backward { deterministic });
        assert_eq!(library(SHAPE, AttentionPass::Forward), 256);
        assert_eq!(library(SHAPE, sums), 2_654_464);
        assert_eq!(library(SHAPE, ordered), 7_962_880);
        let ungrouped =
            AttentionShape { batch: 12, sequence: 2048, heads: 24, kv_heads: 24, head_dim: 88, ..SHAPE };
        assert_eq!(library(ungrouped, sums), 256);
        assert_eq!(library(ungrouped, ordered), 2_415_919_360);
    }

    #[test]
    fn parts_lie_one_after_the_other_and_fill_the_buffer() {
        let workspace = AttentionWorkspace::new(
            SHAPE,
            DType::BF16,
            true,
            AttentionPass::Backward { deterministic: false },
        );
        let [row_dots, dquery_sums, library] = workspace.addresses(512);
        assert_eq!((row_dots, dquery_sums - row_dots), (512, workspace.row_dots));
        assert_eq!(library - dquery_sums, workspace.dquery_sums);
        assert_eq!(library + workspace.library - row_dots, workspace.bytes());
    }

    #[test]
    fn our_own_kernels_need_the_dots_only() {
        let backward = AttentionPass::Backward { deterministic: true };
        let dots = 4 * 3 * 384 * 6;
        assert_eq!(AttentionWorkspace::new(SHAPE, DType::F32, true, backward).bytes(), dots);
        assert_eq!(AttentionWorkspace::new(SHAPE, DType::BF16, false, backward).bytes(), dots);
        assert_eq!(AttentionWorkspace::new(SHAPE, DType::F32, true, AttentionPass::Forward).bytes(), 0);
        let odd = AttentionShape { sequence: 200, ..SHAPE };
        assert_eq!(AttentionWorkspace::new(odd, DType::BF16, true, backward).library, 0);
    }
}
