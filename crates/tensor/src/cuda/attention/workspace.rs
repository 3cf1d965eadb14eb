//! Scratch memory of attention, by formula: the paper backend must know it without a GPU.

use crate::ops::{AttentionSaved, AttentionShape};
use crate::{Arena, DType, View};

/// Scratch of cuDNN's kernels that does not depend on the shape.
const FIXED_BYTES: u64 = 256;

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
pub struct Workspace {
    /// `Σ dout ∘ out` of every query, fp32.
    pub row_dots: u64,
    /// Gradients of the queries in fp32.
    pub dquery_sums: u64,
    /// What cuDNN's plan may use, or the counters of our Hopper kernels.
    pub library: u64,
}

impl Workspace {
    /// The scratch of a pass. `cudnn` is the result of [`asks_cudnn`].
    ///
    /// It does not depend on whether cuDNN is installed. Without it, our kernels leave some of the scratch unused.
    pub fn new(shape: AttentionShape, dtype: DType, cudnn: bool, pass: AttentionPass) -> Self {
        let queries = (shape.rows() * shape.heads) as u64;
        let vectors = queries * shape.head_dim as u64;
        let library = cudnn && fits_library(shape, dtype, pass);
        let AttentionPass::Backward { deterministic } = pass else {
            return Workspace { library: if library { FIXED_BYTES } else { 0 }, ..Workspace::default() };
        };
        let row_dots = 4 * queries;
        if !library {
            return Workspace { row_dots, ..Workspace::default() };
        }
        // Gradients of keys and values per query head, before they are summed over each group.
        let groups = if shape.heads == shape.kv_heads { 0 } else { 4 * vectors };
        // The gradients of the scores in two bytes each, or sums added in any order.
        let (dscores, dquery_sums) =
            if deterministic { (2 * shape.scores() as u64, 0) } else { (0, 4 * vectors) };
        Workspace { row_dots, dquery_sums, library: FIXED_BYTES + groups + dscores }
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

/// Bytes of scratch that a pass allocates from the arena and releases, in one buffer; zero if none.
pub fn workspace_bytes(shape: AttentionShape, dtype: DType, cudnn: bool, pass: AttentionPass) -> u64 {
    Workspace::new(shape, dtype, cudnn, pass).bytes()
}

/// Whether cuDNN is used for this kind of attention: flash, and every token attends to all tokens before it.
pub fn asks_cudnn(saved: &AttentionSaved, starts: Option<View>) -> bool {
    matches!(saved, AttentionSaved::LogSumExp(_)) && starts.is_none()
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

    const SHAPE: AttentionShape =
        AttentionShape { batch: 3, sequence: 384, heads: 6, kv_heads: 2, head_dim: 96 };

    fn library(shape: AttentionShape, pass: AttentionPass) -> u64 {
        Workspace::new(shape, DType::BF16, true, pass).library
    }

    /// The numbers that cuDNN 9.14 reports for these plans on Hopper.
    #[test]
    fn the_scratch_is_what_cudnn_requests() {
        let [sums, ordered] = [false, true].map(|deterministic| AttentionPass::Backward { deterministic });
        assert_eq!(library(SHAPE, AttentionPass::Forward), 256);
        assert_eq!(library(SHAPE, sums), 2_654_464);
        assert_eq!(library(SHAPE, ordered), 7_962_880);
        let ungrouped = AttentionShape { batch: 12, sequence: 2048, heads: 24, kv_heads: 24, head_dim: 88 };
        assert_eq!(library(ungrouped, sums), 256);
        assert_eq!(library(ungrouped, ordered), 2_415_919_360);
    }

    #[test]
    fn parts_lie_one_after_the_other_and_fill_the_buffer() {
        let workspace =
            Workspace::new(SHAPE, DType::BF16, true, AttentionPass::Backward { deterministic: false });
        let [row_dots, dquery_sums, library] = workspace.addresses(512);
        assert_eq!((row_dots, dquery_sums - row_dots), (512, workspace.row_dots));
        assert_eq!(library - dquery_sums, workspace.dquery_sums);
        assert_eq!(library + workspace.library - row_dots, workspace.bytes());
    }

    #[test]
    fn our_own_kernels_need_the_dots_only() {
        let backward = AttentionPass::Backward { deterministic: true };
        let dots = 4 * 3 * 384 * 6;
        assert_eq!(workspace_bytes(SHAPE, DType::F32, true, backward), dots);
        assert_eq!(workspace_bytes(SHAPE, DType::BF16, false, backward), dots);
        assert_eq!(workspace_bytes(SHAPE, DType::F32, true, AttentionPass::Forward), 0);
        let odd = AttentionShape { sequence: 200, ..SHAPE };
        assert_eq!(Workspace::new(odd, DType::BF16, true, backward).library, 0);
    }
}
