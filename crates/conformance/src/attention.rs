//! Causal attention, whole and of slices of sequences.

use kintsugi_tensor::Buffer;
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, Columns, Gradient, Scores, SlicedAttention,
    SlicedAttentionBackward, Slices,
};

use crate::test_backend::TestBackend;

/// Forward and backward. `documents` are the lengths of packed documents, in turn; if empty, there is no mask. With a
/// batch of two, the bias gradient is accumulated.
pub fn attention(
    backend: &TestBackend,
    shape: AttentionShape,
    plain: bool,
    documents: &[usize],
) -> Vec<Buffer> {
    let out_len = shape.rows() * shape.heads * shape.head_dim;
    let (qkv, dout) = (backend.input(shape.rows() * shape.qkv_width(), 1), backend.input(out_len, 2));
    let (out, dqkv, dbias) =
        (backend.output(out_len), backend.output(qkv.len()), backend.sums(shape.qkv_width()));
    let kept =
        if plain { backend.output(shape.score_elements()) } else { backend.sums(shape.rows() * shape.heads) };
    let saved = if plain {
        AttentionSaved::Probabilities(kept.view())
    } else {
        AttentionSaved::LogSumExp(kept.view())
    };
    let starts = (!documents.is_empty()).then(|| backend.tokens(&starts(shape, documents)));
    let starts = starts.as_ref().map(Buffer::view);
    backend.device.attention(Attention { qkv: qkv.view(), starts, out: out.view(), saved, shape });
    backend.device.attention_backward(AttentionBackward {
        qkv: qkv.view(),
        starts,
        out: out.view(),
        dout: dout.view(),
        saved,
        dqkv: dqkv.view(),
        dbias: Some(Gradient { view: dbias.view(), accumulate: shape.batch == 2 }),
        shape,
    });
    vec![out, kept, dqkv, dbias]
}

/// The first token of each token's document. Documents continue across the ends of samples.
fn starts(shape: AttentionShape, lengths: &[usize]) -> Vec<u32> {
    let lengths: Vec<usize> = lengths.iter().copied().cycle().take(shape.rows()).collect();
    let firsts = lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length)));
    let documents: Vec<usize> =
        firsts.zip(&lengths).flat_map(|(first, &length)| vec![first; length]).collect();
    let start = |row: usize| documents[row].saturating_sub(row - row % shape.sequence) as u32;
    (0..shape.rows()).map(start).collect()
}

/// A shape by batch, sequence, heads, key and value heads, and head size.
pub fn shape([batch, sequence, heads, kv_heads, head_dim]: [usize; 5]) -> AttentionShape {
    AttentionShape { batch, sequence, heads, kv_heads, head_dim, scores: Scores::PLAIN }
}

/// A part's queries over all keys at once, and part by part; and the backward of both. One document begins in each slice.
pub fn attention_of_slices(backend: &TestBackend, shape: AttentionShape, slices: Slices) -> Vec<Buffer> {
    let (width, keys_width) = (shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim);
    let key_len = shape.rows() * keys_width;
    let qkv = backend.input(shape.rows() * shape.qkv_width(), 1);
    let dout = backend.input(shape.rows() * width, 2);
    let keys = backend.input(slices.parts * key_len, 3);
    let half = shape.sequence / 2;
    let start = |row: usize| slices.position(shape.sequence, row % shape.sequence / half * half + half / 2);
    let begins = |row: usize| if row % half < half / 2 { 0 } else { start(row) };
    let mut starts: Vec<u32> = (0..shape.rows()).map(|row| begins(row) as u32).collect();
    for sample in starts.chunks_mut(shape.sequence) {
        let mut most = 0;
        for start in sample {
            most = most.max(*start);
            *start = most;
        }
    }
    let starts = backend.tokens(&starts);
    let [out, joined] = [(); 2].map(|()| backend.output(shape.rows() * width));
    let [log_sums, partial_sums] = [(); 2].map(|()| backend.sums(shape.rows() * shape.heads));
    let partial = backend.sums(shape.rows() * width);
    let forward =
        |first_owner: usize, owners: usize, before: Option<&Buffer>, out: &Buffer, log_sums: &Buffer| {
            backend.device.sliced_attention(SlicedAttention {
                qkv: qkv.view(),
                keys: keys.slice(first_owner * key_len..(first_owner + owners) * key_len),
                first_owner,
                owners,
                starts: Some(starts.view()),
                before: before.map(Buffer::view),
                out: out.view(),
                log_sums: log_sums.view(),
                shape,
                slices,
            });
        };
    forward(0, slices.parts, None, &out, &log_sums);
    // The last part first, of whose keys some queries see none.
    for step in 0..slices.parts {
        let to = if step + 1 == slices.parts { &joined } else { &partial };
        forward(slices.parts - 1 - step, 1, (step > 0).then_some(&partial), to, &partial_sums);
    }
    let dqkv = backend.output(qkv.len());
    let dkeys = backend.sums(keys.len());
    let backward = |first_owner: usize, owners: usize, add_queries: bool, add_keys: bool| {
        let range = first_owner * key_len..(first_owner + owners) * key_len;
        backend.device.sliced_attention_backward(SlicedAttentionBackward {
            qkv: qkv.view(),
            keys: keys.slice(range.clone()),
            first_owner,
            owners,
            starts: Some(starts.view()),
            out: out.view(),
            dout: dout.view(),
            log_sums: log_sums.view(),
            dqueries: Columns { view: dqkv.view(), width: shape.qkv_width(), first: 0 },
            add_queries,
            dkeys: dkeys.slice(range),
            add_keys,
            shape,
            slices,
        });
    };
    backward(0, slices.parts, false, false);
    backward(slices.parts - 1, 1, true, true);
    vec![out, log_sums, joined, partial_sums, dqkv, dkeys]
}
