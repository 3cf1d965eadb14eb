//! Codes of a unit's numbers: their buffers, and how they are made and read.

use std::ops::Range;

use kintsugi_plan::{Codes, Integer};
use kintsugi_tensor::ops::{Bits, BlockFormat, Dequantize, Gradient, Quantize, Requantize};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

/// The format of the codes of a plan.
pub(super) fn format(codes: Codes) -> BlockFormat {
    let bits = match codes.integer {
        Integer::Int8 => Bits::Eight,
        Integer::Int4 => Bits::Four,
    };
    BlockFormat { bits, block: codes.block }
}

/// A range of a flat buffer as slices of codes, one for each shard of it. Shards follow each other in the order of the buffer, so
/// what one rank of a group gets is contiguous.
pub(super) struct Slices {
    range: Range<usize>,
    /// Elements of a slice.
    elements: usize,
    format: BlockFormat,
}

impl Slices {
    /// Slices of `elements` elements each.
    pub(super) fn new(range: Range<usize>, elements: usize, codes: Codes) -> Self {
        Slices { range, elements, format: format(codes) }
    }

    fn count(&self) -> usize {
        self.range.len() / self.elements
    }

    fn bytes(&self) -> usize {
        self.count() * self.format.slice_bytes(self.elements)
    }

    /// Where the slices of a part of the range are.
    pub(super) fn place(&self, part: &Range<usize>) -> Range<usize> {
        let place = |element: usize| {
            (element - self.range.start) / self.elements * self.format.slice_bytes(self.elements)
        };
        place(part.start)..place(part.end)
    }

    /// A buffer for the codes of all slices.
    pub(super) fn buffer(&self, backend: &dyn Backend) -> Buffer {
        backend.allocate(self.bytes(), DType::U8, Category::Communication)
    }

    /// A buffer for an all-to-all: the slices that are sent, and as many that are received.
    pub(super) fn buffer_to_exchange(&self, backend: &dyn Backend) -> Buffer {
        backend.allocate(2 * self.bytes(), DType::U8, Category::Communication)
    }

    /// The slices of an all-to-all that are sent.
    fn sent<'a>(&self, buffer: &'a Buffer) -> View<'a> {
        buffer.slice(0..self.bytes())
    }

    /// The slices of an all-to-all that are received.
    fn received<'a>(&self, buffer: &'a Buffer) -> View<'a> {
        buffer.slice(self.bytes()..2 * self.bytes())
    }

    /// Quantises one slice to its place in a buffer of all.
    pub(super) fn quantize_own(&self, backend: &dyn Backend, x: View, own: &Range<usize>, buffer: &Buffer) {
        let out = buffer.slice(self.place(own));
        backend.quantize(Quantize { x, out, slices: 1, format: self.format });
    }

    /// Restores the numbers of all slices.
    pub(super) fn dequantize(&self, backend: &dyn Backend, buffer: &Buffer, out: View) {
        let (codes, out) = (buffer.view(), Gradient { view: out, accumulate: false });
        backend.dequantize(Dequantize { codes, out, parts: 1, slices: self.count(), format: self.format });
    }

    /// Quantises all slices of `x` for an all-to-all.
    pub(super) fn quantize_to_send(&self, backend: &dyn Backend, x: View, buffer: &Buffer) {
        let out = self.sent(buffer);
        backend.quantize(Quantize { x, out, slices: self.count(), format: self.format });
    }

    /// Sums what the all-to-all before has received from `ranks` ranks, and quantises the sums for the next one.
    pub(super) fn requantize_to_send(
        &self,
        backend: &dyn Backend,
        (before, received, ranks): (&Slices, &Buffer, usize),
        buffer: &Buffer,
    ) {
        backend.requantize(Requantize {
            codes: before.received(received),
            out: self.sent(buffer),
            parts: ranks,
            slices: self.count(),
            elements: self.elements,
            format: self.format,
        });
    }

    /// Sums what an all-to-all has received from `ranks` ranks: this rank's slice.
    pub(super) fn sum(&self, backend: &dyn Backend, buffer: &Buffer, ranks: usize, out: Gradient) {
        let codes = self.received(buffer);
        let slices = self.count() / ranks;
        backend.dequantize(Dequantize { codes, out, parts: ranks, slices, format: self.format });
    }
}
