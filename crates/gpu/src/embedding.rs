//! Token and position tables, forward and backward.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{EMBEDDING, suffix};
use super::launcher::{COLUMN_THREADS, LANES, Launcher, PACK, aligned, common_suffix, pointer, size};
use kintsugi_tensor::ops::{Embedding, EmbeddingBackward, Positions, PositionsBackward};

/// Most threads that share a row.
const MAX_THREADS: usize = 256;

/// Blocks that share the vocabulary when rows are listed by token. Each block reads all tokens.
const RANGES: usize = 512;

/// Warps of an index block (`INDEX_WARPS` of `embedding.cu`).
const INDEX_WARPS: usize = 8;

/// See [`Embedding`].
pub(super) fn forward(launcher: &Launcher, op: &Embedding) -> Result<(), GpuError> {
    let wide = aligned(op.width, &[op.table, op.out]);
    let name = format!("embedding_{}", common_suffix(&[op.table, op.out])?);
    let arguments = [
        pointer(op.tokens),
        pointer(op.table),
        pointer(op.out),
        size(op.first),
        size(op.table.len() / op.width),
        size(op.width),
        wide.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&EMBEDDING, &name, rows_grid(launcher, op.rows, op.width, wide), &arguments) }
}

/// The lists of the rows of each token, in the scratch buffer. See `embedding.cu`.
struct Index {
    starts: u64,
    counts: u64,
    frequent: u64,
    listed: u64,
    heads: u64,
}

impl Index {
    fn new(launcher: &Launcher, vocabulary: usize, rows: usize) -> Result<Self, GpuError> {
        const NUMBER: usize = size_of::<u32>();
        let starts = launcher.scratch((3 * vocabulary + rows + 2) * NUMBER)?;
        let after = |from: u64, numbers: usize| from + (numbers * NUMBER) as u64;
        let counts = after(starts, vocabulary);
        let frequent = after(counts, vocabulary);
        let listed = after(frequent, vocabulary);
        let heads = after(listed, rows);
        launcher.clear_scratch(heads, 2 * NUMBER)?;
        Ok(Index { starts, counts, frequent, listed, heads })
    }
}

/// See [`EmbeddingBackward`].
pub(super) fn backward(launcher: &Launcher, op: &EmbeddingBackward) -> Result<(), GpuError> {
    let vocabulary = op.dtable.view.len() / op.width;
    let index = Index::new(launcher, vocabulary, op.rows)?;
    list_rows(launcher, op, vocabulary, &index)?;

    let wide = aligned(op.width, &[op.dout, op.dtable.view]);
    let types = format!("{}_{}", suffix(op.dout.dtype())?, suffix(op.dtable.view.dtype())?);
    let (dout, dtable, width) = (pointer(op.dout), pointer(op.dtable.view), size(op.width));
    let accumulate = op.dtable.accumulate.into();
    let lists = [dout, dtable, index.starts.into(), index.counts.into(), index.listed.into()];

    let grid = rows_grid(launcher, vocabulary, op.width, wide);
    let arguments = [&lists[..], &[width, accumulate, wide.into()]].concat();
    // SAFETY: as the kernel declares; the lists were made just before.
    unsafe { launcher.launch(&EMBEDDING, &format!("embedding_gather_{types}"), grid, &arguments)? };

    let columns = op.width.div_ceil(LANES * if wide { PACK } else { 1 });
    let blocks = launcher.multiprocessors();
    let grid = Grid { blocks: (blocks as u32, columns as u32, 1), ..Grid::new(blocks, COLUMN_THREADS) };
    let arguments = [&lists[..], &[index.frequent.into(), index.heads.into(), width, accumulate]].concat();
    let name = format!("embedding_gather_frequent_{}{types}", if wide { "wide_" } else { "" });
    // SAFETY: as the kernel declares; the lists were made just before.
    unsafe { launcher.launch(&EMBEDDING, &name, grid, &arguments) }
}

/// Lists the rows of every token of the vocabulary, in ascending order.
fn list_rows(
    launcher: &Launcher,
    op: &EmbeddingBackward,
    vocabulary: usize,
    index: &Index,
) -> Result<(), GpuError> {
    let range = vocabulary.div_ceil(RANGES);
    let threads = (INDEX_WARPS * launcher.properties().warp) as u32;
    let shared = (INDEX_WARPS * range * size_of::<u32>()) as u32;
    let grid = Grid { shared, ..Grid::new(vocabulary.div_ceil(range), threads) };
    let arguments = [
        pointer(op.tokens),
        size(op.rows),
        size(op.first),
        size(vocabulary),
        (range as u32).into(),
        index.starts.into(),
        index.counts.into(),
        index.listed.into(),
        index.frequent.into(),
        index.heads.into(),
    ];
    // SAFETY: as the kernel declares; the lists have room for every row and every token.
    unsafe { launcher.launch(&EMBEDDING, "embedding_index", grid, &arguments) }
}

/// See [`Positions`].
pub(super) fn positions(launcher: &Launcher, op: &Positions) -> Result<(), GpuError> {
    let wide = aligned(op.width, &[op.x, op.table]);
    let name = format!("positions_{}", common_suffix(&[op.x, op.table])?);
    let arguments = [
        pointer(op.x),
        pointer(op.table),
        size(op.first_row),
        size(op.sequence),
        size(op.width),
        wide.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&EMBEDDING, &name, rows_grid(launcher, op.rows, op.width, wide), &arguments) }
}

/// See [`PositionsBackward`].
pub(super) fn positions_backward(launcher: &Launcher, op: &PositionsBackward) -> Result<(), GpuError> {
    let wide = aligned(op.width, &[op.dx, op.dtable.view]);
    let (from, to) = (suffix(op.dx.dtype())?, suffix(op.dtable.view.dtype())?);
    let positions = op.dtable.view.len() / op.width;
    let arguments = [
        pointer(op.dx),
        pointer(op.dtable.view),
        size(op.first_row),
        size(op.sequence),
        size(op.rows),
        size(op.width),
        op.dtable.accumulate.into(),
        wide.into(),
    ];
    let name = format!("positions_backward_{from}_{to}");
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&EMBEDDING, &name, rows_grid(launcher, positions, op.width, wide), &arguments) }
}

/// One block per row. In each iteration a thread handles a pack, or one element.
fn rows_grid(launcher: &Launcher, rows: usize, width: usize, wide: bool) -> Grid {
    launcher.per_row(rows, if wide { width / PACK } else { width }, MAX_THREADS)
}
