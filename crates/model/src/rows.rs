//! The rows of a tensor in chunks. Each chunk may be in a transfer.
//!
//! With `parallel.overlap_tp`, the products of a tensor-parallel region are cut into chunks of rows. The transfer of a
//! chunk runs while the next chunk is multiplied. With sequence parallelism, every rank owns an equal part of each
//! chunk, so that a chunk is gathered and scattered as it is in memory. Otherwise there is one chunk, and transfers block.

use std::ops::Range;

use kintsugi_comm::{Collective, Pending};
use kintsugi_tensor::{Buffer, DividedBuffer, View};

use crate::Context;
use crate::shape::MAX_CHUNKS;

/// The chunks of a buffer of all rows.
#[derive(Debug)]
pub(crate) struct Chunks {
    /// The first `count` are in use. A step makes no heap allocations, so it is an array.
    slots: [Chunk; MAX_CHUNKS],
    count: usize,
    /// The buffer, if there are several chunks.
    divided: Option<DividedBuffer>,
}

#[derive(Debug)]
enum Chunk {
    Here(Buffer),
    InFlight(Pending),
    /// Not in use.
    None,
}

impl Chunks {
    /// A buffer of all rows in the chunks of the context's shape.
    pub fn new(ctx: &Context, whole: Buffer) -> Self {
        let count = ctx.shape.chunks;
        if count == 1 {
            return Chunks::one(whole);
        }
        let (divided, mut parts) = whole.split(count);
        let chunks = std::array::from_fn(|_| parts.next().map_or(Chunk::None, Chunk::Here));
        Chunks { slots: chunks, count, divided: Some(divided) }
    }

    /// A buffer of all rows in one chunk.
    pub fn one(whole: Buffer) -> Self {
        let mut chunks = [const { Chunk::None }; MAX_CHUNKS];
        chunks[0] = Chunk::Here(whole);
        Chunks { slots: chunks, count: 1, divided: None }
    }

    /// Number of chunks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// A chunk that is not in a transfer.
    pub fn get(&self, index: usize) -> View<'_> {
        let Chunk::Here(buffer) = &self.slots[index] else { panic!("chunk {index} is in a transfer") };
        buffer.view()
    }

    /// Starts a transfer of a chunk. Waits for it at once unless transfers overlap.
    pub fn start(&mut self, ctx: &Context, index: usize, collective: Collective) {
        let Chunk::Here(buffer) = std::mem::replace(&mut self.slots[index], Chunk::None) else {
            panic!("chunk {index} is in a transfer");
        };
        let all = 0..buffer.len();
        self.slots[index] = Chunk::InFlight(ctx.tensor.start(collective, buffer, all));
        if !ctx.shape.overlap {
            self.wait(ctx, index);
        }
    }

    /// Waits for the transfer of a chunk, if it is in one.
    pub fn wait(&mut self, ctx: &Context, index: usize) {
        let chunk = std::mem::replace(&mut self.slots[index], Chunk::None);
        self.slots[index] = match chunk {
            Chunk::InFlight(pending) => Chunk::Here(ctx.tensor.wait(pending)),
            here => here,
        };
    }

    /// Calls `use_rows` with each chunk and the numbers of its rows, as soon as the chunk is there.
    pub fn each(&mut self, ctx: &Context, mut use_rows: impl FnMut(View, Range<usize>)) {
        let rows = ctx.shape.rows / self.count();
        for index in 0..self.count() {
            self.wait(ctx, index);
            use_rows(self.get(index), index * rows..(index + 1) * rows);
        }
    }

    /// All rows, after their transfers, in one chunk from now on.
    pub fn whole(&mut self, ctx: &Context) -> View<'_> {
        if self.count > 1 {
            (0..self.count).for_each(|index| self.wait(ctx, index));
            *self = Chunks::one(self.join().expect("no transfer is left"));
        }
        self.wait(ctx, 0);
        self.get(0)
    }

    /// Waits for all transfers and returns the whole buffer.
    pub fn into_whole(mut self, ctx: &Context) -> Buffer {
        (0..self.count).for_each(|index| self.wait(ctx, index));
        self.join().expect("no transfer is left")
    }

    /// Takes the whole buffer; `None` if a chunk is in a transfer or it has been taken.
    fn join(&mut self) -> Option<Buffer> {
        let chunks = &mut self.slots[..self.count];
        if !chunks.iter().all(|chunk| matches!(chunk, Chunk::Here(_))) {
            return None;
        }
        let mut parts = chunks.iter_mut().filter_map(|chunk| match std::mem::replace(chunk, Chunk::None) {
            Chunk::Here(buffer) => Some(buffer),
            Chunk::InFlight(_) | Chunk::None => None,
        });
        match self.divided.take() {
            Some(divided) => Some(divided.join(parts)),
            None => parts.next(),
        }
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        // The memory of a divided buffer is only released once it is joined.
        drop(self.join());
    }
}

/// All rows of an activation or a gradient: those of a buffer that every rank has, or gathered ones.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a step makes no heap allocations")]
pub(crate) enum AllRows<'a> {
    /// Every rank has them.
    Local(View<'a>),
    /// Each rank had its own rows.
    Gathered(Chunks),
}

impl AllRows<'_> {
    /// See [`Chunks::each`].
    pub fn each(&mut self, ctx: &Context, mut use_rows: impl FnMut(View, Range<usize>)) {
        match self {
            AllRows::Local(view) => use_rows(*view, 0..ctx.shape.rows),
            AllRows::Gathered(chunks) => chunks.each(ctx, use_rows),
        }
    }

    /// See [`Chunks::whole`].
    pub fn whole(&mut self, ctx: &Context) -> View<'_> {
        match self {
            AllRows::Local(view) => *view,
            AllRows::Gathered(chunks) => chunks.whole(ctx),
        }
    }

    /// The gathered rows, if they were.
    pub fn into_gathered(self, ctx: &Context) -> Option<Buffer> {
        match self {
            AllRows::Local(_) => None,
            AllRows::Gathered(chunks) => Some(chunks.into_whole(ctx)),
        }
    }
}

/// The elements of rows in a tensor of this width.
pub(crate) fn elements(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
