//! A shard: what one rank writes, and where it lies in that rank's file.
//!
//! Every element is written once. Replicas hold the same, so each of the dp writes its share, whether the states are
//! sharded or not; of what tp ranks hold alike the first writes; of a tied table the first stage's copy is written.

use std::ops::Range;

use kintsugi_plan::parameters::{Parameter, Split};
use kintsugi_plan::{Compute, Plan, Unit};
use kintsugi_rank::{Kept, Rank};
use safetensors::tensor::{Dtype, TensorInfo};

use crate::header;
use crate::slice::Slice;

/// One rank's file.
pub(crate) struct Shard {
    /// The file's name.
    pub name: String,
    /// The file's first bytes.
    pub header: Vec<u8>,
    /// What follows, in order and without gaps.
    pub pieces: Vec<Piece>,
    /// Bytes of all pieces.
    pub bytes: usize,
    /// The type that weights are computed with.
    compute: Compute,
}

/// A run of a unit's flat buffer, and its place in the file.
pub(crate) struct Piece {
    pub slice: Slice,
    pub dtype: Dtype,
    pub parameter: Parameter,
    unit: Unit,
    /// Where it lies in the unit's flat buffer.
    flat: Range<usize>,
    /// Where it lies in the file's data.
    bytes: Range<usize>,
}

impl Shard {
    /// What rank `rank` writes as the file of that number.
    pub fn new(plan: &Plan, rank: usize, kept: &[Kept]) -> Self {
        let at = plan.mesh.coordinate(rank);
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        for &kept in kept {
            let dtype = stored_type(plan, kept);
            for unit in plan.answers_for(at.pp) {
                let layout = plan.layout(unit);
                let share = layout.shard(plan.mesh.dp, at.dp);
                for placed in &layout.placed {
                    let start = placed.range.start.max(share.start);
                    let end = placed.range.end.min(share.end);
                    let replica = placed.parameter.split == Split::Whole && at.tp > 0;
                    if start >= end || replica {
                        continue;
                    }
                    let local = start - placed.range.start..end - placed.range.start;
                    let part = (plan.mesh.tp, at.tp);
                    let Some(slice) = Slice::of_part(placed, part, local, kept, rank) else { continue };
                    let (flat, len) = (start..start + slice.len, slice.len * dtype.bitsize() / 8);
                    let (parameter, place) = (placed.parameter, bytes..bytes + len);
                    pieces.push(Piece { slice, dtype, parameter, unit, flat, bytes: place });
                    bytes += len;
                }
            }
        }
        let tensors = pieces.iter().map(Piece::tensor).collect();
        Shard {
            name: format!("rank-{rank:05}.safetensors"),
            header: header::encode(None, tensors),
            pieces,
            bytes,
            compute: plan.precision.compute,
        }
    }

    /// The first parameter of a copy with a weight that is not finite, or would not be in the type of computation.
    pub fn not_finite(&self, copy: &[u8]) -> Option<String> {
        let weights = self.pieces.iter().filter(|piece| piece.slice.kept == Kept::Weights);
        let bad = |piece: &&Piece| !is_finite(&copy[piece.bytes.clone()], self.compute);
        weights.into_iter().find(bad).map(|piece| piece.slice.tensor())
    }

    /// Copies what this rank has at this moment.
    pub fn copy(&self, rank: &Rank, to: &mut [u8]) {
        for piece in &self.pieces {
            rank.download(piece.unit, piece.slice.kept, &piece.flat, &mut to[piece.bytes.clone()]);
        }
    }
}

impl Piece {
    fn tensor(&self) -> (String, TensorInfo) {
        let data_offsets = (self.bytes.start, self.bytes.end);
        (self.slice.tensor(), TensorInfo { dtype: self.dtype, shape: self.slice.shape(), data_offsets })
    }
}

/// Whether weights, which are kept in fp32, are finite in the type of computation.
fn is_finite(bytes: &[u8], compute: Compute) -> bool {
    let numbers = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
    numbers.into_iter().all(|number| compute.holds(number))
}

/// Bytes of the copy that is made of all ranks' weights and states for a checkpoint.
pub fn snapshot_bytes(plan: &Plan) -> u64 {
    let per_parameter: usize = Kept::ALL.iter().map(|&kept| stored_type(plan, kept).bitsize() / 8).sum();
    plan.parameter_count() * per_parameter as u64
}

/// Weights are kept as the optimizer has them, moments in the type of the plan.
fn stored_type(plan: &Plan, kept: Kept) -> Dtype {
    match (kept, plan.precision.states) {
        (Kept::Weights, _) | (_, Compute::Fp32) => Dtype::F32,
        (_, Compute::Bf16) => Dtype::BF16,
        (_, Compute::Fp16) => Dtype::F16,
    }
}
