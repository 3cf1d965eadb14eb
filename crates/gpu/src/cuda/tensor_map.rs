//! Tensor maps: descriptors with which Hopper's copy engine (TMA) moves boxes of a tensor between global and shared
//! memory.

use std::mem::MaybeUninit;

use cudarc::driver::sys::{self, CUtensorMap, CUtensorMapSwizzle};

use crate::error::GpuError;
use crate::launcher::device_address;
use kintsugi_tensor::{DType, View};

/// Elements per row of a box. Rows are swizzled in the layout that the tensor cores read.
pub(crate) const CHUNK: usize = 64;

/// The map of a contiguous bf16 tensor, from the lengths of its dimensions and of the boxes, innermost first.
pub(crate) fn encode<const N: usize>(
    view: View,
    lengths: [usize; N],
    boxes: [usize; N],
) -> Result<CUtensorMap, GpuError> {
    assert_eq!((view.dtype(), view.len()), (DType::BF16, lengths.iter().product()), "another tensor");
    assert_eq!(boxes[0], CHUNK, "no swizzle for such rows");
    let bytes = |elements: usize| (elements * view.dtype().bytes()) as u64;
    // Strides in bytes of all dimensions but the innermost.
    let strides: Vec<u64> = (1..N).map(|i| bytes(lengths[..i].iter().product())).collect();
    let lengths = lengths.map(|length| length as u64);
    let boxes = boxes.map(|length| length as u32);
    let mut map = MaybeUninit::<CUtensorMap>::uninit();
    // SAFETY: the arrays are as long as the tensor has dimensions, and the driver only writes to the map.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            N as u32,
            device_address(view) as *mut _,
            lengths.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            [1; N].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    let refused =
        |error| GpuError::from(error).during(format_args!("a tensor of {lengths:?} in boxes of {boxes:?}"));
    status.result().map_err(refused)?;
    // SAFETY: the driver has written it.
    Ok(unsafe { map.assume_init() })
}

/// The maps as the table of words that a kernel takes.
pub(crate) fn table(maps: &[CUtensorMap]) -> Vec<u64> {
    maps.iter().flat_map(|map| map.opaque).collect()
}
