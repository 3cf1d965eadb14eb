// Causal flash attention on the tensor cores, forward (arXiv 2205.14135, 2307.08691).
//
// qkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out: [batch, sequence, heads, HEAD_DIM]; both 16-byte aligned.
// log_sums: [batch, heads, sequence] f32, natural logarithms. The masked kernel takes starts, [batch, sequence]: the
// first key that each query attends to; it never decreases within a sample. Grid (tiles, heads, batch). Keys that are
// masked for all queries of a block are not read. A tile's values are loaded while its scores are computed, and the
// next keys while its values are added.
//
// FLOPs: 4·HEAD_DIM per visible score. mma.sync reaches about 60 % of an H200's 800 TFLOP/s: batch 8, heads 16,
// sequence 2048, HEAD_DIM 128 (137 GFLOP) take at least 0.29 ms; batch 64, heads 12, sequence 1024, HEAD_DIM 64 (103
// GFLOP) 0.21 ms. Bytes: 8·HEAD_DIM per query and head if kv_heads = heads; keys and values are read again from L2 for
// every tile of queries: 268 MB and 403 MB, 0.06 ms and 0.09 ms at 4.3 TB/s.

#include "tensor_core.cuh"

constexpr int KEYS = 64;
constexpr int BLOCKS = NARROW ? 3 : 2;  // at once on a multiprocessor, by their registers
static_assert((QUERY_BLOCK + 2 * KEYS) * STRIDE * sizeof(element) == LAUNCH_FORWARD_SHARED, "not what is launched");

template <bool masked>
__device__ inline void attention_forward(const element *qkv, element *out, float *log_sums, const token *starts,
                                         Shape shape) {
    extern __shared__ uint4 shared[];
    element *queries = (element *)shared, *keys = queries + QUERY_BLOCK * STRIDE;
    element *values = keys + KEYS * STRIDE;
    const Lane lane;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    // The last tiles attend to the most keys, so they start first.
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERY_BLOCK;
    const int own_first = first + 16 * QUERY_ROWS * lane.warp;
    const int last = min(first + QUERY_BLOCK, shape.sequence) - 1;
    const int row = shape.qkv_row();
    const element *key = qkv + shape.key_start(sample, kv), *value = qkv + shape.value_start(sample, kv);
    if (masked) starts += (size)sample * shape.sequence;
    const Sight<masked, KEYS> sight(starts, own_first, shape.sequence);
    element *own = queries + 16 * QUERY_ROWS * lane.warp * STRIDE;
    const unsigned int own_rows = shared_address(own) + lane.left();
    const unsigned int key_rows = shared_address(keys) + lane.right();
    const unsigned int value_rows = shared_address(values) + lane.left();

    int first_key = first_tile<masked, KEYS>(starts, first);
    clear_padding(queries, QUERY_BLOCK + 2 * KEYS);
    load_rows<QUERY_BLOCK, QUERY_THREADS>(queries, qkv + shape.start(sample, head, row), row, first, shape.sequence);
    load_rows<KEYS, QUERY_THREADS>(keys, key, row, first_key, shape.sequence);
    end_group_of_copies();

    const float factor = shape.factor();
    float sum[QUERY_ROWS][COLUMNS][4], maximum[2 * QUERY_ROWS], total[2 * QUERY_ROWS];
    clear(sum);
#pragma unroll
    for (int i = 0; i < 2 * QUERY_ROWS; ++i) maximum[i] = -INFINITE, total[i] = 0.0f;
    for (; first_key <= last; first_key += KEYS) {
        const bool any = sight.any(first_key);
        float score[QUERY_ROWS][KEYS / 8][4];
        // The keys are loaded, and nobody reads the previous values any more.
        await_copies<0>();
        __syncthreads();
        load_rows<KEYS, QUERY_THREADS>(values, value, row, first_key, shape.sequence);
        end_group_of_copies();
        if (any) dot_rows(score, own_rows, key_rows);
        // The values are loaded, and nobody reads the keys any more.
        await_copies<0>();
        __syncthreads();
        if (first_key + KEYS <= last)
            load_rows<KEYS, QUERY_THREADS>(keys, key, row, first_key + KEYS, shape.sequence);
        end_group_of_copies();
        if (!any) continue;

        if (!sight.all(first_key)) sight.hide(score, first_key, -INFINITE);
        float shift[2 * QUERY_ROWS], highest[2 * QUERY_ROWS];
        bool rises = false;
#pragma unroll
        for (int i = 0; i < 2 * QUERY_ROWS; ++i) highest[i] = maximum[i];
        each_element(score, [&](float &x, int i, int) { highest[i] = fmaxf(highest[i], x); });
#pragma unroll
        for (int i = 0; i < 2 * QUERY_ROWS; ++i) {
            highest[i] = row_reduce(highest[i], Maximum());
            // Without a mask, key 0 is in the first tile, so every maximum is finite from then on. With a mask, a query
            // may have no visible key so far. Its powers must be 0, not 2^(−∞ + ∞).
            shift[i] = masked && highest[i] == -INFINITE ? 0.0f : highest[i] * factor;
            rises |= highest[i] > maximum[i];
        }
        // After the first tiles the maxima seldom change.
        if (BALLOT(rises)) {
#pragma unroll
            for (int i = 0; i < 2 * QUERY_ROWS; ++i) {
                const float shrink = power_of_two(maximum[i] * factor - shift[i]);
                maximum[i] = highest[i];
                total[i] *= shrink;
#pragma unroll
                for (int column = 0; column < COLUMNS; ++column)
                    sum[i / 2][column][i % 2 * 2] *= shrink, sum[i / 2][column][i % 2 * 2 + 1] *= shrink;
            }
        }
        each_element(score, [&](float &x, int i, int) {
            x = power_of_two(x * factor - shift[i]);
            total[i] += x;
        });
        add_weighted(sum, score, value_rows);
    }

    float inverse[2 * QUERY_ROWS];
    const size score = shape.first_score(sample, head);
#pragma unroll
    for (int i = 0; i < 2 * QUERY_ROWS; ++i) {
        total[i] = row_reduce(total[i], Sum());
        inverse[i] = 1.0f / total[i];
        const int query = own_first + lane.row() + 8 * i;
        if (lane.column() == 0 && query < shape.sequence)
            log_sums[score + query] = maximum[i] * shape.scale + logf(total[i]);
    }
    store_rows(sum, inverse, own, out + shape.start(sample, head, shape.out_row()), shape.out_row(), own_first,
               shape.sequence);
}

// Without and with a mask.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS, BLOCKS)
    tensor_attention_forward(const element *qkv, element *out, float *log_sums, int sequence, int heads, int kv_heads,
                             float scale) {
    attention_forward<false>(qkv, out, log_sums, nullptr, Shape{sequence, heads, kv_heads, scale});
}

extern "C" __global__ void __launch_bounds__(QUERY_THREADS, BLOCKS)
    tensor_attention_forward_masked(const element *qkv, element *out, float *log_sums, const token *starts,
                                    int sequence, int heads, int kv_heads, float scale) {
    attention_forward<true>(qkv, out, log_sums, starts, Shape{sequence, heads, kv_heads, scale});
}
