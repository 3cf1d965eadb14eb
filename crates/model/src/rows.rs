//! The rows of a tensor in chunks, each of which may be in a transfer.
//!
//! With `parallel.overlap_tp`, the products of a tensor-parallel region are cut into chunks of rows. The transfer of a
//! chunk runs while the next chunk is multiplied. With sequence parallelism, every rank owns an equal part of each
//! chunk, so that a chunk is gathered and scattered as it is in memory. Otherwise there is one chunk, and transfers block.

use std::ops::Range;

use kintsugi_comm::{Collective, Pending};
use kintsugi_tensor::{Buffer, DividedBuffer, View};

use crate::Context;

/// The chunks of a buffer of all rows.
#[derive(Debug)]
pub(crate) struct Chunks {
    chunks: Vec<Chunk>,
    /// The buffer, if there are several chunks.
    divided: Option<DividedBuffer>,
}

#[derive(Debug)]
enum Chunk {
    Here(Buffer),
    InFlight(Pending),
    /// Only while its state changes.
    Nowhere,
}

impl Chunks {
    /// A buffer of all rows in the chunks of the context's shape.
    pub fn new(ctx: &Context, whole: Buffer) -> Self {
        let count = ctx.shape.chunks;
        if count == 1 {
            return Chunks::one(whole);
        }
        let (divided, parts) = whole.split(count);
        Chunks { chunks: parts.into_iter().map(Chunk::Here).collect(), divided: Some(divided) }
    }

    /// A buffer of all rows in one chunk.
    pub fn one(whole: Buffer) -> Self {
        Chunks { chunks: vec![Chunk::Here(whole)], divided: None }
    }

    /// Number of chunks.
    pub fn count(&self) -> usize {
        self.chunks.len()
    }

    /// A chunk that is not in a transfer.
    pub fn get(&self, index: usize) -> View<'_> {
        let Chunk::Here(buffer) = &self.chunks[index] else { panic!("chunk {index} is in a transfer") };
        buffer.view()
    }

    /// Starts a transfer of a chunk. Waits for it at once unless transfers overlap.
    pub fn start(&mut self, ctx: &Context, index: usize, collective: Collective) {
        let Chunk::Here(buffer) = std::mem::replace(&mut self.chunks[index], Chunk::Nowhere) else {
            panic!("chunk {index} is in a transfer");
        };
        let all = 0..buffer.len();
        self.chunks[index] = Chunk::InFlight(ctx.tensor.start(collective, buffer, all));
        if !ctx.shape.overlap {
            self.wait(ctx, index);
        }
    }

    /// Waits for the transfer of a chunk, if it is in one.
    pub fn wait(&mut self, ctx: &Context, index: usize) {
        let chunk = std::mem::replace(&mut self.chunks[index], Chunk::Nowhere);
        self.chunks[index] = match chunk {
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
        let chunks = Chunks { chunks: std::mem::take(&mut self.chunks), divided: self.divided.take() };
        *self = Chunks::one(chunks.into_whole(ctx));
        self.get(0)
    }

    /// Waits for all transfers and returns the whole buffer.
    pub fn into_whole(mut self, ctx: &Context) -> Buffer {
        (0..self.count()).for_each(|index| self.wait(ctx, index));
        let here = |chunk| match chunk {
            Chunk::Here(buffer) => buffer,
            Chunk::InFlight(_) | Chunk::Nowhere => unreachable!("all transfers have ended"),
        };
        let mut parts: Vec<Buffer> = self.chunks.into_iter().map(here).collect();
        match self.divided {
            Some(divided) => divided.join(parts),
            None => parts.pop().expect("a buffer has at least one chunk"),
        }
    }
}

/// All rows of a gradient: those of a buffer that every rank has, or gathered ones.
#[derive(Debug)]
pub(crate) enum GradientRows<'a> {
    /// Every rank has them.
    Local(View<'a>),
    /// Each rank had its own rows.
    Gathered(Chunks),
}

impl GradientRows<'_> {
    /// See [`Chunks::each`].
    pub fn each(&mut self, ctx: &Context, mut use_rows: impl FnMut(View, Range<usize>)) {
        match self {
            GradientRows::Local(view) => use_rows(*view, 0..ctx.shape.rows),
            GradientRows::Gathered(chunks) => chunks.each(ctx, use_rows),
        }
    }

    /// See [`Chunks::whole`].
    pub fn whole(&mut self, ctx: &Context) -> View<'_> {
        match self {
            GradientRows::Local(view) => *view,
            GradientRows::Gathered(chunks) => chunks.whole(ctx),
        }
    }

    /// The gathered rows, if they were.
    pub fn into_gathered(self, ctx: &Context) -> Option<Buffer> {
        match self {
            GradientRows::Local(_) => None,
            GradientRows::Gathered(chunks) => Some(chunks.into_whole(ctx)),
        }
    }
}

/// The elements of rows in a tensor of this width.
pub(crate) fn elements(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
