//! A shard: the tensors that one rank writes, and their places in the rank's file.
//!
//! Every element is written once. Each dp rank writes its share, whether or not the states are sharded. Of replicated
//! parameters the first tp rank writes its copy, and of a tied table the first stage.

use std::ops::Range;

use kintsugi_plan::parameters::{Parameter, TensorSplit, parameters};
use kintsugi_plan::{Compute, MAX_PARTS, Plan, Unit};
use kintsugi_rank::{Rank, StoredTensor};
use safetensors::tensor::{Dtype, TensorInfo};

use crate::files::widen;
use crate::header;
use crate::slice::Slice;

/// One rank's file.
pub(crate) struct Shard {
    /// The file's name.
    pub name: String,
    /// The file's first bytes.
    pub header: Vec<u8>,
    /// The tensors after the header, in order and without gaps.
    pub tensors: Vec<ShardTensor>,
    /// Bytes of all tensors.
    pub bytes: usize,
    /// The compute type.
    compute: Compute,
}

/// A range of a unit's flat buffer, and its place in the file.
pub(crate) struct ShardTensor {
    pub slice: Slice,
    pub dtype: Dtype,
    pub parameter: Parameter,
    unit: Unit,
    /// Its range in the unit's flat buffer.
    flat: Range<usize>,
    /// Its range in the file's data.
    bytes: Range<usize>,
}

impl Shard {
    /// The shard of rank `rank`, which is also the number of its file.
    pub fn new(plan: &Plan, rank: usize, stored: &[StoredTensor]) -> Self {
        let at = plan.mesh.coordinate(rank);
        let (mut tensors, mut bytes) = (Vec::new(), 0);
        for &stored in stored {
            for unit in plan.owned_units(at.pp()) {
                let dtype = stored_type(plan, unit, stored);
                let layout = plan.layout(unit);
                let share = plan.sharding.piece(layout.len, plan.mesh.replica(at), MAX_PARTS);
                for placed in &layout.placed {
                    let start = placed.range.start.max(share.start);
                    let end = placed.range.end.min(share.end);
                    let replica = placed.parameter.split == TensorSplit::Whole && at.tp() > 0;
                    if start >= end || replica || !plan.stores(&placed.parameter, stored) {
                        continue;
                    }
                    let local = start - placed.range.start..end - placed.range.start;
                    let part = (plan.mesh.tp(), at.tp());
                    let Some(slice) = Slice::of_part(placed, part, local, stored, rank) else { continue };
                    let (flat, len) = (start..start + slice.len, slice.len * dtype.bitsize() / 8);
                    let (parameter, place) = (placed.parameter, bytes..bytes + len);
                    tensors.push(ShardTensor { slice, dtype, parameter, unit, flat, bytes: place });
                    bytes += len;
                }
            }
        }
        let infos = tensors.iter().map(ShardTensor::info).collect();
        Shard {
            name: format!("rank-{rank:05}.safetensors"),
            header: header::encode(None, infos),
            tensors,
            bytes,
            compute: plan.precision.compute,
        }
    }

    /// The first tensor of a copy with a weight that is not finite in the compute type.
    pub fn not_finite(&self, copy: &[u8]) -> Option<String> {
        let weights = self.tensors.iter().filter(|tensor| tensor.slice.stored == StoredTensor::Weights);
        let bad = |tensor: &&ShardTensor| !is_finite(tensor.dtype, &copy[tensor.bytes.clone()], self.compute);
        weights.into_iter().find(bad).map(|tensor| tensor.slice.tensor())
    }

    /// Copies the rank's current state.
    pub fn copy(&self, rank: &Rank, to: &mut [u8]) {
        for tensor in &self.tensors {
            rank.download(tensor.unit, tensor.slice.stored, &tensor.flat, &mut to[tensor.bytes.clone()]);
        }
    }
}

impl ShardTensor {
    fn info(&self) -> (String, TensorInfo) {
        let data_offsets = (self.bytes.start, self.bytes.end);
        (self.slice.tensor(), TensorInfo { dtype: self.dtype, shape: self.slice.shape(), data_offsets })
    }
}

/// Whether stored weights are finite in the compute type.
fn is_finite(dtype: Dtype, bytes: &[u8], compute: Compute) -> bool {
    const NUMBERS: usize = 1 << 10;
    let (mut numbers, size) = ([0.0; NUMBERS], dtype.bitsize() / 8);
    bytes.chunks(NUMBERS * size).all(|bytes| {
        let numbers = &mut numbers[..bytes.len() / size];
        widen(dtype, bytes, numbers);
        numbers.iter().all(|&number| compute.holds(number))
    })
}

/// Bytes of the copies of all ranks' weights and states for a checkpoint.
pub fn snapshot_bytes(plan: &Plan) -> u64 {
    let stored = plan.stored_tensors();
    let of_parameter = |parameter: &Parameter| {
        let tensors = stored.iter().filter(|&&stored| plan.stores(parameter, stored));
        let bytes: usize =
            tensors.map(|&stored| stored_type(plan, parameter.unit, stored).bitsize() / 8).sum();
        (parameter.valid_elements() * bytes) as u64
    };
    let of_unit = |unit| parameters(&plan.model, unit, 1).iter().map(of_parameter).sum::<u64>();
    plan.units().into_iter().map(of_unit).sum()
}

/// The type of a stored tensor: fp32 for weights and their average, and the plan's type for states. Frozen weights exist only in
/// the compute type.
fn stored_type(plan: &Plan, unit: Unit, stored: StoredTensor) -> Dtype {
    let precision = match stored {
        StoredTensor::Weights if plan.is_frozen(unit) => plan.precision.compute,
        StoredTensor::Weights | StoredTensor::Average => Compute::Fp32,
        StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum => {
            plan.precision.states
        }
    };
    match precision {
        Compute::Fp32 => Dtype::F32,
        Compute::Bf16 => Dtype::BF16,
        Compute::Fp16 => Dtype::F16,
    }
}
