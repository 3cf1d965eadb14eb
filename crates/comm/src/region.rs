//! The memory of a started transfer, as an address: what transports copy and add.
//!
//! The protocol of the transport determines who may use a [`Region`] and when, from the start of the transfer until its owner
//! may finish. The memory stays allocated all that time, even if the owner panics: a dropped `Pending` leaks its buffer.

use std::ops::Range;
use std::slice;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kintsugi_tensor::{AddressSpace, DType, View};

use crate::ring::Action;

/// The address of elements of a rank's buffer, in a form that can be sent to other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    address: usize,
    len: usize,
    dtype: DType,
    address_space: AddressSpace,
}

impl Region {
    /// The region of a view.
    pub(crate) fn of(view: View) -> Self {
        let (address, address_space) = (view.address() as usize, view.address_space());
        assert!(address.is_multiple_of(view.dtype().bytes()), "misaligned buffer of {:?}", view.dtype());
        Region { address, len: view.len(), dtype: view.dtype(), address_space }
    }

    /// Elements at an address of host memory.
    pub(crate) fn on_host(address: usize, len: usize, dtype: DType) -> Self {
        assert!(address.is_multiple_of(dtype.bytes()), "misaligned memory of {dtype:?}");
        Region { address, len, dtype, address_space: AddressSpace::Host }
    }

    /// The address.
    pub(crate) fn address(self) -> usize {
        self.address
    }

    /// Number of elements.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Element type.
    pub(crate) fn dtype(self) -> DType {
        self.dtype
    }

    /// What the address means.
    pub(crate) fn address_space(self) -> AddressSpace {
        self.address_space
    }

    /// Number of bytes.
    pub(crate) fn bytes(self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// A part of it.
    pub(crate) fn part(self, range: Range<usize>) -> Region {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        Region { address: self.address + range.start * self.dtype.bytes(), len: range.len(), ..self }
    }
}

/// Moves elements within host memory.
pub(crate) fn move_elements(action: Action, from: Region, to: Region) {
    match action {
        Action::Add => add(from, to),
        Action::Copy => copy(from, to),
    }
}

/// `to = from`.
fn copy(from: Region, to: Region) {
    assert_compatible(from, to);
    assert_eq!(from.address_space, AddressSpace::Host, "a GPU's memory is moved by a GPU");
    // SAFETY: both are parts of live buffers (see above) of the same size, and do not overlap. By the protocol,
    // nobody writes `from` or touches `to` now.
    unsafe { std::ptr::copy_nonoverlapping(from.address as *const u8, to.address as *mut u8, from.bytes()) }
}

/// `to += from`; 16-bit types are widened, added and rounded.
fn add(from: Region, to: Region) {
    assert_compatible(from, to);
    assert_eq!(from.address_space, AddressSpace::Host, "a GPU's memory is moved by a GPU");
    // SAFETY: in each arm the element type is that of both regions.
    unsafe {
        match from.dtype {
            DType::F64 => add_as(from, to, |a: f64, b| a + b),
            DType::F32 => add_as(from, to, |a: f32, b| a + b),
            DType::BF16 => add_as(from, to, |a: bf16, b| bf16::from_f32(a.to_f32() + b.to_f32())),
            DType::F16 => add_f16(from, to),
            DType::U32 | DType::U8 => panic!("token ids and bytes are not summed"),
        }
    }
}

/// Both ends of a move must have the same length, type and kind of memory, and not overlap.
pub(crate) fn assert_compatible(from: Region, to: Region) {
    let kind = |region: Region| (region.len, region.dtype, region.address_space);
    assert_eq!(kind(from), kind(to), "the two ends of a transfer differ");
    let apart = from.address + from.bytes() <= to.address || to.address + to.bytes() <= from.address;
    assert!(apart, "two ranks share memory at {:#x}", to.address);
}

/// SAFETY: `from` and `to` are compatible regions of elements `T`.
unsafe fn add_as<T: Copy>(from: Region, to: Region, sum: impl Fn(T, T) -> T) {
    // SAFETY: as asked of the caller.
    let (from, to) = unsafe { slices::<T>(from, to) };
    for (to, &from) in to.iter_mut().zip(from) {
        *to = sum(*to, from);
    }
}

/// Works in blocks, since `half` selects the f16 instructions once per slice: six times as fast as element by element.
///
/// SAFETY: `from` and `to` are compatible regions of f16.
unsafe fn add_f16(from: Region, to: Region) {
    const BLOCK: usize = 256;
    let mut wide = [[0.0_f32; BLOCK]; 2];
    // SAFETY: as asked of the caller.
    let (from, to) = unsafe { slices::<f16>(from, to) };
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let [a, b] = wide.each_mut().map(|block| &mut block[..to.len()]);
        to.convert_to_f32_slice(a);
        from.convert_to_f32_slice(b);
        for (a, &b) in a.iter_mut().zip(&*b) {
            *a += b;
        }
        to.convert_from_f32_slice(a);
    }
}

/// SAFETY: `from` and `to` are compatible regions of elements `T`.
unsafe fn slices<'a, T>(from: Region, to: Region) -> (&'a [T], &'a mut [T]) {
    // SAFETY: both are parts of live buffers, of `len` elements each, and do not overlap. They are aligned: a region is, and
    // its parts start at whole elements. By the protocol, nobody writes `from` or uses `to` now.
    unsafe {
        let from = slice::from_raw_parts(from.address as *const T, from.len);
        (from, slice::from_raw_parts_mut(to.address as *mut T, to.len))
    }
}
