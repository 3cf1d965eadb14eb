// Causal flash attention on AMD's matrix cores, forward (arXiv 2205.14135, 2307.08691).
//
// qkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out: [batch, sequence, heads, HEAD_DIM]; both 16-byte aligned.
// log_sums: [batch, heads, sequence] f32, natural logarithms. The masked kernel takes starts, [batch, sequence]: the
// first key that each query attends to; it never decreases within a sample. Grid (tiles, heads, batch). A wave owns 32
// queries, one for each pair of lanes, so that maxima and sums are taken within a lane and over one exchange. The next
// tile is read from global memory while this one is used. Keys that are masked for all queries of a block are not read.
//
// FLOPs: 4·HEAD_DIM per visible score, 4·32·DIMS where a vector is padded. Bytes: 8·HEAD_DIM per query and head if
// kv_heads = heads; keys and values are read again from L2 for every 128 queries.

#include "mfma.cuh"

constexpr int KEYS = 64;

template <bool masked>
__device__ inline void attention_forward(const element *qkv, element *out, float *log_sums, const token *starts,
                                         Shape shape) {
    __shared__ Rows<KEYS> keys;
    __shared__ Columns<KEYS> values;
    const Lane lane;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    // The last tiles attend to the most keys, so they start first.
    const int first = (gridDim.x - 1 - blockIdx.x) * BLOCK, own_first = first + OWN * lane.wave;
    const int last = min(first + BLOCK, shape.sequence) - 1;
    const int row = shape.qkv_row();
    if (masked) starts += (size)sample * shape.sequence;
    const Sight<masked> sight(starts, own_first, lane.column, shape.sequence);
    const bool exists = sight.query < shape.sequence;
    const Vector query(qkv + shape.start(sample, head, row) + (size)sight.query * row, exists);

    Staged<KEYS> staged;
    const auto load_tile = [&](int first_key) {
        staged.load(qkv + shape.key_start(sample, kv), row, qkv + shape.value_start(sample, kv), row, first_key,
                    shape.sequence);
    };
    int first_key = first_tile<masked, KEYS>(starts, first);
    keys.clear_padding();
    load_tile(first_key);

    const float factor = shape.factor();
    tile sums[DIMS];
    clear(sums);
    float maximum = -INFINITE, total = 0.0f;
    for (; first_key <= last; first_key += KEYS) {
        // Nobody reads the previous tile any more.
        __syncthreads();
        staged.each([&](bool is_key, int group, int piece, const words4(&rows)[4]) {
            if (is_key)
                store_rows(keys, group, piece, rows);
            else
                values.store(group, piece, rows);
        });
        __syncthreads();
        if (first_key + KEYS <= last) load_tile(first_key + KEYS);
        if (!sight.any(first_key, KEYS)) continue;

        tile scores[KEYS / 32];
        float highest = maximum;
#pragma unroll
        for (int block = 0; block < KEYS / 32; ++block) {
            scores[block] = keys.dot(block, query);
            const int first_row = first_key + 32 * block;
            if (!sight.all(first_row, 32)) sight.hide(scores[block], first_row, -INFINITE);
#pragma unroll
            for (int r = 0; r < 16; ++r) highest = fmaxf(highest, scores[block][r]);
        }
        highest = column_reduce(highest, Maximum());
        // Without a mask, key 0 is in the first tile, so every maximum is finite from then on. With a mask, a query may
        // have no visible key so far. Its powers must be 0, not 2^(−∞ + ∞).
        const float shift = masked && highest == -INFINITE ? 0.0f : highest * factor;
        // After the first tiles the maxima seldom change.
        if (BALLOT(highest > maximum)) {
            const float shrink = power_of_two(maximum * factor - shift);
            maximum = highest;
            total *= shrink;
#pragma unroll
            for (int dims = 0; dims < DIMS; ++dims) sums[dims] *= shrink;
        }
#pragma unroll
        for (int block = 0; block < KEYS / 32; ++block) {
#pragma unroll
            for (int r = 0; r < 16; ++r) {
                scores[block][r] = power_of_two(scores[block][r] * factor - shift);
                total += scores[block][r];
            }
            values.add_weighted(sums, block, Weights(scores[block]));
        }
    }

    total = column_reduce(total, Sum());
    if (!exists) return;
    if (lane.half == 0)
        log_sums[shape.first_score(sample, head) + sight.query] = maximum * shape.scale + logf(total);
    const int out_row = shape.out_row();
    store_vector(sums, 1.0f / total, out + shape.start(sample, head, out_row) + (size)sight.query * out_row);
}

// Without and with a mask.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mfma_attention_forward(const element *qkv, element *out, float *log_sums, int sequence, int heads, int kv_heads,
                           float scale) {
    attention_forward<false>(qkv, out, log_sums, nullptr, Shape{sequence, heads, kv_heads, scale});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mfma_attention_forward_masked(const element *qkv, element *out, float *log_sums, const token *starts, int sequence,
                                  int heads, int kv_heads, float scale) {
    attention_forward<true>(qkv, out, log_sums, starts, Shape{sequence, heads, kv_heads, scale});
}
