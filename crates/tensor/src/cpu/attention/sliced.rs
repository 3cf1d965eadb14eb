//! Attention of the queries of one part of every sample over the keys of some parts, for context parallelism.
//!
//! The tiles are those of the attention of whole samples. A tile is inside one slice, so its positions are consecutive, and they
//! decide which pairs of a query and a key are masked.

use std::ops::Range;

use super::backward::{Strip, Tiles as BackwardTiles, write};
use super::forward::Tiles as ForwardTiles;
use super::tile::{CausalPart, Product, TILE};
use super::{Head, pack, pack_transposed, padded, softmax_scale};
use crate::cpu::access::{Access, Scatter};
use crate::cpu::element::{Element, Real};
use crate::cpu::lanes;
use crate::cpu::parallel::{Rows, Threads};
use crate::cpu::soft_cap::SoftCap;
use crate::ops::{AttentionShape, SlicedAttention, SlicedAttentionBackward, Slices};

/// Rows of one slice: the first row in its part, their number, and the position of the first.
#[derive(Clone, Copy)]
struct RowTile {
    row: usize,
    count: usize,
    position: usize,
}

impl RowTile {
    /// The tiles of a part's tokens, `own` of them, from `rows`.
    fn all(own: usize, slices: Slices, rows: Range<usize>) -> impl Iterator<Item = RowTile> + Clone {
        let (offsets, half) = (slices.offsets(own), own / 2);
        let halves = [0..half, half..own].into_iter().zip(offsets);
        halves.flat_map(move |(slice, offset)| {
            let (start, end) = (slice.start.max(rows.start), slice.end.min(rows.end));
            (start..end).step_by(TILE).map(move |row| RowTile {
                row,
                count: (end - row).min(TILE),
                position: row + offset,
            })
        })
    }

    fn rows(self) -> (usize, usize) {
        (self.row, self.count)
    }

    /// Whether a query of this tile may see a key of the other.
    fn sees(self, keys: RowTile, starts: Option<&[u32]>) -> bool {
        let from = starts.map_or(0, |starts| starts[self.row] as usize);
        keys.position < self.position + self.count && from < keys.position + keys.count
    }

    /// The keys, of those of a tile, that query `index` of this tile sees.
    fn visible(self, index: usize, keys: RowTile, starts: Option<&[u32]>) -> Range<usize> {
        let end = (self.position + index + 1).saturating_sub(keys.position).min(keys.count);
        let from = starts.map_or(0, |starts| starts[self.row + index] as usize);
        from.saturating_sub(keys.position).min(end)..end
    }

    /// Whether every query of this tile sees every key of the other.
    fn sees_all(self, keys: RowTile, starts: Option<&[u32]>) -> bool {
        let last = starts.map_or(0, |starts| starts[self.row + self.count - 1] as usize);
        last <= keys.position && keys.position + keys.count <= self.position + 1
    }
}

/// Where the keys and values of the owners are.
#[derive(Clone, Copy)]
struct KeyLayout {
    shape: AttentionShape,
    slices: Slices,
    first_owner: usize,
    owners: usize,
}

impl KeyLayout {
    /// Every tile of keys with the index of its owner among the given ones.
    fn tiles(self) -> impl Iterator<Item = (usize, RowTile)> {
        let own = self.shape.sequence;
        (0..self.owners).flat_map(move |owner| {
            let slices = Slices { part: self.first_owner + owner, ..self.slices };
            RowTile::all(own, slices, 0..own).map(move |tile| (owner, tile))
        })
    }

    /// Key head (or value head, `kv_heads` later) `index` of an owner's sample.
    fn head(self, owner: usize, batch: usize, index: usize) -> Head {
        let AttentionShape { batch: samples, sequence, kv_heads, head_dim, .. } = self.shape;
        let stride = 2 * kv_heads * head_dim;
        let start = (owner * samples + batch) * sequence * stride + index * head_dim;
        Head { start, stride, dim: head_dim }
    }
}

/// See [`SlicedAttention`]. `O` is the type of the output.
pub fn forward<T: Element, O: Element<Accumulator = T::Accumulator>>(
    threads: Threads,
    scratch: &mut [u8],
    op: &SlicedAttention,
) {
    let access = Access::new();
    let SlicedAttention { shape, slices, first_owner, owners, .. } = *op;
    assert!(shape.head_dim <= super::HEAD_DIM, "heads of {} are too wide", shape.head_dim);
    let (qkv, keys) = (access.read::<T>(op.qkv), access.read::<T>(op.keys));
    let starts = op.starts.map(|starts| access.tokens(starts));
    let in_place = op.before.is_some_and(|before| before.address() == op.out.address());
    let before = op.before.filter(|_| !in_place).map(|before| access.read::<T::Accumulator>(before));
    let joins = op.before.is_some();
    let out = Scatter::new(access.write::<O>(op.out));
    let log_sums = access.write::<T::Accumulator>(op.log_sums);
    let (layout, own) = (KeyLayout { shape, slices, first_owner, owners }, shape.sequence);
    let soft_cap = SoftCap::of(shape.scores.soft_cap);
    threads.each_with_scratch(
        shape.batch * shape.heads,
        scratch,
        Rows(log_sums, own),
        |tasks, log_sums, scratch| {
            let mut tiles = ForwardTiles::<T::Accumulator>::new(shape.head_dim, scratch);
            for (task, log_sums) in tasks.zip(log_sums.0.chunks_exact_mut(own)) {
                let (batch, head) = (task / shape.heads, task % shape.heads);
                let kv = head / (shape.heads / shape.kv_heads);
                let starts = starts.map(|starts| &starts[batch * own..][..own]);
                let to = Head::of_out(shape, batch, head);
                for queries in RowTile::all(own, slices, 0..own) {
                    let from = Head::of_qkv(shape, batch, head);
                    tiles.begin(qkv, from, queries.rows(), softmax_scale(shape));
                    for (owner, key_tile) in layout.tiles() {
                        if !queries.sees(key_tile, starts) {
                            continue;
                        }
                        let key = layout.head(owner, batch, kv);
                        tiles.products(keys, key, key_tile.rows(), soft_cap);
                        hide(&mut tiles, queries, key_tile, starts);
                        tiles.soften(key_tile.count);
                        let value = layout.head(owner, batch, shape.kv_heads + kv);
                        pack(keys, value, key_tile.rows(), T::Accumulator::ONE, tiles.values);
                        tiles.add_values(queries.count, key_tile.count, false);
                    }
                    tiles.finish();
                    for i in 0..queries.count {
                        let vector = to.vector(queries.row + i);
                        // SAFETY: each task has its own head of its own sample, and runs on one thread.
                        let to_row = unsafe { out.part(vector.clone()) };
                        let log_sum = &mut log_sums[queries.row + i];
                        let inverse = tiles.inverse(i);
                        if !joins {
                            *log_sum = tiles.log_sum[i];
                            for (to, &from) in to_row.iter_mut().zip(tiles.row(i)) {
                                *to = O::narrow(from * inverse);
                            }
                            continue;
                        }
                        let (old, new) = join(log_sum, tiles.log_sum[i]);
                        let before = before.map(|before| &before[vector]);
                        for (d, (to, &from)) in to_row.iter_mut().zip(tiles.row(i)).enumerate() {
                            let earlier = before.map_or_else(|| to.widen(), |before| before[d]);
                            *to = O::narrow(earlier * old + from * (inverse * new));
                        }
                    }
                }
            }
        },
    );
}

/// Joins a log-sum-exp with that of more keys. Returns the shares of the output before and of the new one.
fn join<A: Real>(log_sum: &mut A, new: A) -> (A, A) {
    let highest = log_sum.max(new);
    if highest == A::NEG_INFINITY {
        return (A::ONE, A::ZERO);
    }
    let both = highest + ((*log_sum - highest).exp() + (new - highest).exp()).ln();
    let shares = ((*log_sum - both).exp(), (new - both).exp());
    *log_sum = both;
    shares
}

/// Sets the scores of masked pairs to −∞.
fn hide<A: Real>(tiles: &mut ForwardTiles<A>, queries: RowTile, keys: RowTile, starts: Option<&[u32]>) {
    if queries.sees_all(keys, starts) {
        return;
    }
    for query in 0..queries.count {
        let visible = queries.visible(query, keys, starts);
        for (key, row) in tiles.scores.chunks_exact_mut(TILE).take(keys.count).enumerate() {
            if !visible.contains(&key) {
                row[query] = A::NEG_INFINITY;
            }
        }
    }
}

/// See [`SlicedAttentionBackward`]. `Q` and `G` are the types of the gradients of queries and of keys. A thread computes whole
/// groups of heads, so gradients of keys are summed in a fixed order.
pub fn backward<T, Q, G>(threads: Threads, scratch: &mut [u8], op: &SlicedAttentionBackward)
where
    T: Element,
    Q: Element<Accumulator = T::Accumulator>,
    G: Element<Accumulator = T::Accumulator>,
{
    let access = Access::new();
    let SlicedAttentionBackward { shape, slices, first_owner, owners, add_queries, add_keys, .. } = *op;
    assert!(shape.head_dim <= super::HEAD_DIM, "heads of {} are too wide", shape.head_dim);
    let inputs = Inputs::<T> {
        shape,
        slices,
        layout: KeyLayout { shape, slices, first_owner, owners },
        qkv: access.read(op.qkv),
        keys: access.read(op.keys),
        starts: op.starts.map(|starts| access.tokens(starts)),
        out: access.read(op.out),
        dout: access.read(op.dout),
        log_sums: access.read(op.log_sums),
    };
    let gradients = Outputs {
        dqueries: Scatter::new(access.write::<Q>(op.dqueries.view)),
        columns: (op.dqueries.width, op.dqueries.first),
        add_queries,
        dkeys: Scatter::new(access.write::<G>(op.dkeys)),
        add_keys,
    };
    threads.each_with_scratch(shape.batch * shape.kv_heads, scratch, (), |tasks, (), scratch| {
        let mut tiles = BackwardTiles::new(shape.head_dim, scratch);
        for task in tasks {
            let (batch, kv) = (task / shape.kv_heads, task % shape.kv_heads);
            let mut first = true;
            for range in tiles.strips(shape, batch, kv) {
                strip(&mut tiles, &inputs, &gradients, &range, first);
                first = false;
            }
        }
    });
}

struct Inputs<'a, T: Element> {
    shape: AttentionShape,
    slices: Slices,
    layout: KeyLayout,
    qkv: &'a [T],
    keys: &'a [T],
    starts: Option<&'a [u32]>,
    out: &'a [T],
    dout: &'a [T],
    log_sums: &'a [T::Accumulator],
}

struct Outputs<'a, Q, G> {
    dqueries: Scatter<'a, Q>,
    /// Width of the matrix of the queries' gradients, and the first of their columns.
    columns: (usize, usize),
    add_queries: bool,
    dkeys: Scatter<'a, G>,
    add_keys: bool,
}

/// All keys against the queries of a strip. The first strip of a key head writes the gradients of all its keys.
fn strip<T, Q, G>(
    tiles: &mut BackwardTiles<T::Accumulator>,
    inputs: &Inputs<T>,
    gradients: &Outputs<Q, G>,
    range: &Strip,
    first: bool,
) where
    T: Element,
    Q: Element<Accumulator = T::Accumulator>,
    G: Element<Accumulator = T::Accumulator>,
{
    type A<T> = <T as Element>::Accumulator;
    let (shape, layout) = (inputs.shape, inputs.layout);
    let Strip { batch, kv, ref heads, ref rows } = *range;
    let width = padded(shape.head_dim);
    // A tile of queries begins at its row, and the last of a slice may be partial.
    let head_len = (rows.len() + 2 * TILE) * width;
    tiles.dqueries[..heads.len() * head_len].fill(A::<T>::ZERO);
    let starts = inputs.starts.map(|starts| &starts[batch * shape.sequence..][..shape.sequence]);
    let queries = RowTile::all(shape.sequence, inputs.slices, rows.clone());
    for (owner, keys) in layout.tiles() {
        let seen = |queries: RowTile| queries.sees(keys, starts);
        if !first && !queries.clone().any(seen) {
            continue;
        }
        let [key, value] = [kv, shape.kv_heads + kv].map(|index| layout.head(owner, batch, index));
        pack(inputs.keys, key, keys.rows(), A::<T>::ONE, tiles.keys);
        pack_transposed(inputs.keys, key, keys.rows(), A::<T>::ONE, tiles.keys_transposed);
        pack_transposed(inputs.keys, value, keys.rows(), A::<T>::ONE, tiles.values_transposed);
        tiles.dkeys.fill(A::<T>::ZERO);
        tiles.dvalues.fill(A::<T>::ZERO);
        for (i, head) in heads.clone().enumerate() {
            for queries in queries.clone().filter(|&queries| seen(queries)) {
                // The second slice begins a tile later, so that two tiles never share a padded row.
                let later = if queries.row >= shape.sequence / 2 { TILE } else { 0 };
                let at = i * head_len + (queries.row - rows.start + later) * width;
                pair(tiles, inputs, (batch, head), queries, keys, at);
            }
        }
        let add = gradients.add_keys || !first;
        write(tiles.dkeys, &gradients.dkeys, key, keys.rows(), A::<T>::ONE, add);
        write(tiles.dvalues, &gradients.dkeys, value, keys.rows(), A::<T>::ONE, add);
    }
    let (row_width, first_column) = gradients.columns;
    for (i, head) in heads.clone().enumerate() {
        let start = batch * shape.sequence * row_width + first_column + head * shape.head_dim;
        let to = Head { start, stride: row_width, dim: shape.head_dim };
        for queries in queries.clone() {
            let later = if queries.row >= shape.sequence / 2 { TILE } else { 0 };
            let from = &tiles.dqueries[i * head_len + (queries.row - rows.start + later) * width..];
            let scale = softmax_scale(shape);
            write(from, &gradients.dqueries, to, queries.rows(), scale, gradients.add_queries);
        }
    }
}

/// One tile of queries against the packed keys. `at` is the offset of its gradient.
fn pair<T: Element>(
    tiles: &mut BackwardTiles<T::Accumulator>,
    inputs: &Inputs<T>,
    (batch, head): (usize, usize),
    queries: RowTile,
    keys: RowTile,
    at: usize,
) {
    type A<T> = <T as Element>::Accumulator;
    let (shape, width) = (inputs.shape, padded(inputs.shape.head_dim));
    let out_head = Head::of_out(shape, batch, head);
    let from = Head::of_qkv(shape, batch, head);
    pack(inputs.qkv, from, queries.rows(), softmax_scale(shape), tiles.queries);
    pack(inputs.dout, out_head, queries.rows(), A::<T>::ONE, tiles.dout);
    let starts = inputs.starts.map(|starts| &starts[batch * shape.sequence..][..shape.sequence]);
    let log_sums = &inputs.log_sums[(batch * shape.heads + head) * shape.sequence + queries.row..];
    let soft_cap = SoftCap::of(shape.scores.soft_cap);

    let scores = |left, right| Product {
        rows: queries.count,
        columns: keys.count,
        inner: shape.head_dim,
        left: (left, width),
        right: (right, TILE),
        part: CausalPart::Whole,
        accumulate: false,
    };
    scores(&*tiles.dout, &*tiles.values_transposed).run((tiles.dscores, TILE));
    scores(&*tiles.queries, &*tiles.keys_transposed).run((tiles.probabilities, TILE));
    for (i, &log_sum) in log_sums[..queries.count].iter().enumerate() {
        let vector = out_head.vector(queries.row + i);
        let dot =
            lanes::sum_pairs(&inputs.dout[vector.clone()], &inputs.out[vector], |a, b| a.widen() * b.widen());
        let visible = queries.visible(i, keys, starts);
        let probabilities = &mut tiles.probabilities[i * TILE..][..TILE];
        let dscores = &mut tiles.dscores[i * TILE..][..TILE];
        for key in 0..keys.count {
            if !visible.contains(&key) {
                (probabilities[key], dscores[key]) = (A::<T>::ZERO, A::<T>::ZERO);
                continue;
            }
            let score = soft_cap.map_or(probabilities[key], |soft_cap| soft_cap.bound(probabilities[key]));
            probabilities[key] = (score - log_sum).exp();
            dscores[key] = probabilities[key] * (dscores[key] - dot);
            if let Some(soft_cap) = soft_cap {
                dscores[key] = dscores[key] * soft_cap.slope(score);
            }
        }
    }

    let by_key = |left, right| Product {
        rows: keys.count,
        columns: width,
        inner: queries.count,
        left: (left, TILE),
        right: (right, width),
        part: CausalPart::Whole,
        accumulate: true,
    };
    by_key(&*tiles.probabilities, &*tiles.dout).run_transposed((tiles.dvalues, width));
    by_key(&*tiles.dscores, &*tiles.queries).run_transposed((tiles.dkeys, width));
    let by_query = Product {
        rows: queries.count,
        columns: width,
        inner: keys.count,
        left: (&*tiles.dscores, TILE),
        right: (&*tiles.keys, width),
        part: CausalPart::Whole,
        accumulate: true,
    };
    by_query.run((&mut tiles.dqueries[at..], width));
}
