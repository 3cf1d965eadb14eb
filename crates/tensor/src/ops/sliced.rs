//! Attention of a rank's slices of every sample, for context parallelism.
//!
//! The positions of queries and keys decide what a query attends to, not their places in a tensor.

use super::check::{expect, expect_type};
use super::{AttentionShape, Check, Columns};
use crate::{DType, View};

/// The tokens of a sample that a rank has. Of `2 · parts` equal slices, part `i` has slices `i` and `2 · parts − 1 − i`, so that
/// causal attention is the same work for every part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Number of parts.
    pub parts: usize,
    /// This part.
    pub part: usize,
}

impl Slices {
    /// All tokens.
    pub const WHOLE: Slices = Slices { parts: 1, part: 0 };

    /// What is added to the index of a token among `own` tokens of its sample to get its position, in each of the two slices.
    /// A part has an even number of tokens unless it is the only one, and then nothing is added.
    pub fn offsets(self, own: usize) -> [usize; 2] {
        let slice = own / 2;
        [self.part * slice, (2 * self.parts - 2 - self.part) * slice]
    }

    /// The position of token `index` of `own` tokens of a sample.
    pub fn position(self, own: usize, index: usize) -> usize {
        index + self.offsets(own)[usize::from(index >= own / 2)]
    }
}

/// `out = softmax(scores(q·kᵀ), causal) · v` of one part's queries over the keys and values of some parts.
///
/// With `before` the result is joined with that of other keys by the log-sum-exp of both. A query that sees no key has a
/// log-sum-exp of −∞ and an output of zero.
#[derive(Clone, Copy, Debug)]
pub struct SlicedAttention<'a> {
    /// Read, in the layout of [`AttentionShape`]: its queries.
    pub qkv: View<'a>,
    /// Read, `[owners, batch, sequence, 2·kv_heads, head_dim]`: keys, then values, of parts `first_owner` and following.
    pub keys: View<'a>,
    /// The part that the first keys belong to.
    pub first_owner: usize,
    /// Parts whose keys these are.
    pub owners: usize,
    /// Read, `[batch, sequence]`, u32: the position of the first token that each query attends to. Values never exceed the
    /// query's own position and never decrease within a sample.
    pub starts: Option<View<'a>>,
    /// Read, `[batch, sequence, heads, head_dim]`, accumulator type: the output over other keys. Their log-sum-exp is in
    /// `log_sums`.
    pub before: Option<View<'a>>,
    /// Written, `[batch, sequence, heads, head_dim]`, compute or accumulator type. May be `before`.
    pub out: View<'a>,
    /// Written, with `before` also read: `[batch, heads, sequence]`, accumulator type.
    pub log_sums: View<'a>,
    /// Shape. Its `sequence` is the number of tokens of a sample that one part has.
    pub shape: AttentionShape,
    /// The part of the queries.
    pub slices: Slices,
}

/// Backward of [`SlicedAttention`], from the output and the log-sum-exp over the keys of all parts.
#[derive(Clone, Copy, Debug)]
pub struct SlicedAttentionBackward<'a> {
    /// Read: the forward's input.
    pub qkv: View<'a>,
    /// Read: the forward's keys and values.
    pub keys: View<'a>,
    /// The part that the first keys belong to.
    pub first_owner: usize,
    /// Parts whose keys these are.
    pub owners: usize,
    /// Read: the forward's `starts`.
    pub starts: Option<View<'a>>,
    /// Read: the output over the keys of all parts, compute type.
    pub out: View<'a>,
    /// Read: the gradient of the output.
    pub dout: View<'a>,
    /// Read: the log-sum-exp over the keys of all parts.
    pub log_sums: View<'a>,
    /// Written or added to: `heads · head_dim` columns of a matrix with a row for every query, compute or accumulator type.
    pub dqueries: Columns<'a>,
    /// Whether `dqueries` is added to.
    pub add_queries: bool,
    /// Written or added to, in the layout of `keys`, compute or accumulator type.
    pub dkeys: View<'a>,
    /// Whether `dkeys` is added to.
    pub add_keys: bool,
    /// Shape.
    pub shape: AttentionShape,
    /// The part of the queries.
    pub slices: Slices,
}

/// Pairs of a query of a part and a key of some parts that it attends to in one head of one sample, without documents. With a
/// window it attends to so many tokens at most.
pub fn visible_pairs(
    own: usize,
    slices: Slices,
    owners: std::ops::Range<usize>,
    window: Option<usize>,
) -> usize {
    // Of a slice and a slice that begins `ahead` tokens later, the pairs in which the later token is at least `apart` later.
    let at_least = |slice: usize, ahead: usize, apart: usize| match apart.checked_sub(ahead) {
        None => slice * slice - triangle((slice + apart).saturating_sub(ahead + 1)),
        Some(more) => triangle(slice.saturating_sub(more)),
    };
    let window = window.unwrap_or(usize::MAX);
    let seen = |slice, ahead| at_least(slice, ahead, 0) - at_least(slice, ahead, window);
    if slices == Slices::WHOLE {
        return seen(own, 0);
    }
    let slice = own / 2;
    let pairs =
        |query: usize, key: usize| query.checked_sub(key).map_or(0, |ahead| seen(slice, ahead * slice));
    let of_part = |part: usize| [part, 2 * slices.parts - 1 - part];
    let queries = of_part(slices.part);
    owners
        .flat_map(of_part)
        .map(|key| queries.map(|query| pairs(query, key)).into_iter().sum::<usize>())
        .sum()
}

/// `1 + 2 + … + n`.
fn triangle(n: usize) -> usize {
    n * (n + 1) / 2
}

fn check_keys(name: &str, view: View, owners: usize, shape: AttentionShape) {
    expect(name, view, owners * shape.rows() * 2 * shape.kv_heads * shape.head_dim);
}

fn check_part(shape: AttentionShape, slices: Slices, first_owner: usize, owners: usize) {
    assert!(slices.part < slices.parts, "{slices:?}");
    assert!(
        owners > 0 && first_owner + owners <= slices.parts,
        "keys of parts {first_owner}, {owners} of them"
    );
    assert!(slices.parts == 1 || shape.sequence.is_multiple_of(2), "two slices of {} tokens", shape.sequence);
}

fn check_type(name: &str, view: View, compute: DType) {
    assert!([compute, compute.accumulator()].contains(&view.dtype()), "{name} has the wrong type");
}

impl Check for SlicedAttention<'_> {
    fn check(&self) {
        let (shape, compute) = (self.shape, self.qkv.dtype());
        let out = shape.rows() * shape.heads * shape.head_dim;
        check_part(shape, self.slices, self.first_owner, self.owners);
        expect("qkv", self.qkv, shape.rows() * shape.qkv_width());
        check_keys("keys", self.keys, self.owners, shape);
        expect_type("keys", self.keys, compute);
        super::check::check_starts(self.starts, shape);
        if let Some(before) = self.before {
            expect("the output before", before, out);
            expect_type("the output before", before, compute.accumulator());
        }
        expect("out", self.out, out);
        check_type("out", self.out, compute);
        expect("log-sum-exp", self.log_sums, shape.rows() * shape.heads);
        expect_type("log-sum-exp", self.log_sums, compute.accumulator());
    }
}

impl Check for SlicedAttentionBackward<'_> {
    fn check(&self) {
        let (shape, compute) = (self.shape, self.qkv.dtype());
        let out = shape.rows() * shape.heads * shape.head_dim;
        check_part(shape, self.slices, self.first_owner, self.owners);
        expect("qkv", self.qkv, shape.rows() * shape.qkv_width());
        check_keys("keys", self.keys, self.owners, shape);
        expect_type("keys", self.keys, compute);
        super::check::check_starts(self.starts, shape);
        expect("out", self.out, out);
        expect("dout", self.dout, out);
        expect("log-sum-exp", self.log_sums, shape.rows() * shape.heads);
        expect_type("log-sum-exp", self.log_sums, compute.accumulator());
        let Columns { view, width, first } = self.dqueries;
        expect("the gradient of the queries", view, shape.rows() * width);
        assert!(first + shape.heads * shape.head_dim <= width, "too few columns for the queries");
        check_type("the gradient of the queries", view, compute);
        check_keys("the gradient of the keys", self.dkeys, self.owners, shape);
        check_type("the gradient of the keys", self.dkeys, compute);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_sample_once_with_equal_work() {
        for parts in 1..=4 {
            let own = 6;
            let each = (0..parts).map(|part| Slices { parts, part });
            let mut positions: Vec<usize> = each
                .clone()
                .flat_map(|slices| (0..own).map(move |index| slices.position(own, index)))
                .collect();
            positions.sort_unstable();
            assert_eq!(positions, (0..own * parts).collect::<Vec<_>>());
            let by_definition = |slices: Slices, owners: std::ops::Range<usize>, window: usize| {
                let keys = owners.flat_map(|part| {
                    (0..own).map(move |index| Slices { part, ..slices }.position(own, index))
                });
                let sees = |key: usize| {
                    let queries = (0..own).map(|i| slices.position(own, i));
                    queries.filter(|&query| query >= key && query - key < window).count()
                };
                keys.map(sees).sum::<usize>()
            };
            for slices in each {
                let all = visible_pairs(own, slices, 0..parts, None);
                assert_eq!(all * parts, own * parts * (own * parts + 1) / 2, "{slices:?}");
                for (owner, window) in (0..parts).flat_map(|owner| (1..30).map(move |window| (owner, window)))
                {
                    let owners = owner..owner + 1;
                    let pairs = visible_pairs(own, slices, owners.clone(), Some(window));
                    assert_eq!(pairs, by_definition(slices, owners, window), "{slices:?}, window {window}");
                }
            }
        }
    }
}
