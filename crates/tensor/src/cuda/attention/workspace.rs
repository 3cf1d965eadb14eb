//! How much scratch attention takes, by formula: paper must know it where no card is.

use crate::ops::{AttentionSaved, AttentionShape};
use crate::{Arena, DType, View};

/// What cuDNN's kernels take beside what depends on the shape.
const FIXED_BYTES: u64 = 256;

/// One direction of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Makes the output.
    Forward,
    /// Makes the gradients.
    Backward {
        /// In the same order every time.
        deterministic: bool,
    },
}

/// Scratch of one pass, as parts of one buffer; each begins at a multiple of [`Arena::ALIGNMENT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// `Σ dout ∘ out` of every query, fp32.
    pub row_dots: u64,
    /// Gradients of the queries in fp32.
    pub dquery_sums: u64,
    /// What cuDNN's plan may take, or the counters of ours for Hopper.
    pub library: u64,
}

impl Workspace {
    /// The scratch of a pass. `cudnn` is what [`asks_cudnn`] says.
    ///
    /// It does not depend on whether cuDNN is there: where it is not, our kernels leave some of it unused.
    pub fn new(shape: AttentionShape, dtype: DType, cudnn: bool, pass: Pass) -> Self {
        let queries = (shape.rows() * shape.heads) as u64;
        let vectors = queries * shape.head_dim as u64;
        let library = cudnn && fits_library(shape, dtype, pass);
        let Pass::Backward { deterministic } = pass else {
            return Workspace { library: if library { FIXED_BYTES } else { 0 }, ..Workspace::default() };
        };
        let row_dots = 4 * queries;
        if !library {
            return Workspace { row_dots, ..Workspace::default() };
        }
        // Gradients of keys and values for every query head, before they are summed over each group.
        let groups = if shape.heads == shape.kv_heads { 0 } else { 4 * vectors };
        // The scores' gradients, two bytes each, or sums in any order.
        let (dscores, dquery_sums) =
            if deterministic { (2 * shape.scores() as u64, 0) } else { (0, 4 * vectors) };
        Workspace { row_dots, dquery_sums, library: FIXED_BYTES + groups + dscores }
    }

    /// Bytes of the whole buffer; with none there is no buffer.
    pub fn bytes(self) -> u64 {
        [self.row_dots, self.dquery_sums, self.library].map(rounded).iter().sum()
    }

    /// Where the parts begin, in the order of the fields, if the buffer begins at `base`.
    pub fn addresses(self, base: u64) -> [u64; 3] {
        let dquery_sums = base + rounded(self.row_dots);
        [base, dquery_sums, dquery_sums + rounded(self.dquery_sums)]
    }
}

/// Bytes of scratch that a pass takes from the arena and gives back, in one buffer; none if zero.
pub fn workspace_bytes(shape: AttentionShape, dtype: DType, cudnn: bool, pass: Pass) -> u64 {
    Workspace::new(shape, dtype, cudnn, pass).bytes()
}

/// Whether cuDNN is asked for this kind of attention: no probabilities are kept, and every token sees all before it.
pub fn asks_cudnn(saved: &AttentionSaved, starts: Option<View>) -> bool {
    matches!(saved, AttentionSaved::LogSumExp(_)) && starts.is_none()
}

/// Whether cuDNN's kernels can do it: sixteen-bit types, heads of a width they have, and a backward without padding.
pub fn fits_library(shape: AttentionShape, dtype: DType, pass: Pass) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
        && shape.head_dim.is_multiple_of(8)
        && shape.head_dim <= 256
        && (pass == Pass::Forward || shape.sequence.is_multiple_of(128))
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(Arena::ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 3, sequence: 384, heads: 6, kv_heads: 2, head_dim: 96 };

    fn library(shape: AttentionShape, pass: Pass) -> u64 {
        Workspace::new(shape, DType::BF16, true, pass).library
    }

    /// The numbers are what cuDNN 9.14 answers for these plans on Hopper.
    #[test]
    fn the_library_takes_what_cudnn_asks_for() {
        let [sums, ordered] = [false, true].map(|deterministic| Pass::Backward { deterministic });
        assert_eq!(library(SHAPE, Pass::Forward), 256);
        assert_eq!(library(SHAPE, sums), 2_654_464);
        assert_eq!(library(SHAPE, ordered), 7_962_880);
        let ungrouped = AttentionShape { batch: 12, sequence: 2048, heads: 24, kv_heads: 24, head_dim: 88 };
        assert_eq!(library(ungrouped, sums), 256);
        assert_eq!(library(ungrouped, ordered), 2_415_919_360);
    }

    #[test]
    fn parts_lie_one_after_the_other_and_fill_the_buffer() {
        let workspace = Workspace::new(SHAPE, DType::BF16, true, Pass::Backward { deterministic: false });
        let [row_dots, dquery_sums, library] = workspace.addresses(512);
        assert_eq!((row_dots, dquery_sums - row_dots), (512, workspace.row_dots));
        assert_eq!(library - dquery_sums, workspace.dquery_sums);
        assert_eq!(library + workspace.library - row_dots, workspace.bytes());
    }

    #[test]
    fn our_own_kernels_need_the_dots_only() {
        let backward = Pass::Backward { deterministic: true };
        let dots = 4 * 3 * 384 * 6;
        assert_eq!(workspace_bytes(SHAPE, DType::F32, true, backward), dots);
        assert_eq!(workspace_bytes(SHAPE, DType::BF16, false, backward), dots);
        assert_eq!(workspace_bytes(SHAPE, DType::F32, true, Pass::Forward), 0);
        let odd = AttentionShape { sequence: 200, ..SHAPE };
        assert_eq!(Workspace::new(odd, DType::BF16, true, backward).library, 0);
    }
}
