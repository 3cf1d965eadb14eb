//! Rates of flash attention, with only the causal half of the scores counted.

use kintsugi_spec::AttentionPoint;
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape};

use super::Timing;
use super::bench::Bench;

/// The FLOP/s of attention, forward (two products) and backward (five).
pub fn rate<'a>(
    bench: &mut Bench<'a>,
    dtype: DType,
    shape: AttentionShape,
    timing: Timing<'a>,
) -> AttentionPoint {
    let backend = bench.backend;
    let width = shape.heads * shape.head_dim;
    let qkv = bench.numbers(shape.rows() * shape.qkv_width(), dtype);
    let dqkv = bench.numbers(shape.rows() * shape.qkv_width(), dtype);
    let out = bench.numbers(shape.rows() * width, dtype);
    let dout = bench.numbers(shape.rows() * width, dtype);
    let sums = bench.numbers(shape.batch * shape.heads * shape.sequence, dtype.accumulator());
    let saved = AttentionSaved::LogSumExp(sums.view());
    // Two FLOPs for each of `head_dim` terms, over half of the scores.
    let product = shape.score_elements() as f64 * shape.head_dim as f64;
    let forward = timing(bench, &|| {
        backend.attention(Attention { qkv: qkv.view(), starts: None, out: out.view(), saved, shape });
    });
    let backward = timing(bench, &|| {
        let (qkv, out, dout, dqkv) = (qkv.view(), out.view(), dout.view(), dqkv.view());
        backend.attention_backward(AttentionBackward {
            qkv,
            starts: None,
            out,
            dout,
            saved,
            dqkv,
            dbias: None,
            shape,
        });
    });
    AttentionPoint {
        head_dim: shape.head_dim,
        sequence: shape.sequence,
        fp32: dtype == DType::F32,
        forward: 2.0 * product / forward,
        backward: 5.0 * product / backward,
    }
}
