// Causal flash attention on AMD's matrix cores, backward (arXiv 2205.14135, 2307.08691).
//
// qkv, dqkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out, dout: [batch, sequence, heads, HEAD_DIM]; all
// 16-byte aligned. log_sums, from the forward, and dots, Σ dout ∘ out of every query: [batch, heads, sequence] f32. The
// masked kernels take the same starts as the forward. Grid (tiles, heads or kv_heads, batch).
//
// A wave of dkeys_dvalues owns 32 keys, in registers, and loops over queries, head by head of its group. A wave of
// dqueries owns 32 queries and loops over keys. Scores are computed in both, which is the price of sums in a fixed order
// without scratch. The next tile is read from global memory while this one is used. Tiles that are masked by causality or
// by the starts are not read.
//
// Only for bf16: MI200 takes subnormal operands of f16 products for zero, and gradients in f16 are often subnormal.
//
// FLOPs per visible score: 8·HEAD_DIM and 6·HEAD_DIM, of which 10 are counted in rates. Bytes: reads qkv and dout twice and
// writes dqkv: 22·HEAD_DIM per query and head if kv_heads = heads.

#include "mfma.cuh"

// Streamed tiles.
constexpr int QUERIES = 32, KEYS = 32;

// A streamed tile of queries, in both orders.
struct QueryTile {
    Rows<QUERIES> queries, gradients;
    Columns<QUERIES> queries_by_column, gradients_by_column;
    float log_sums[QUERIES], dots[QUERIES];
    int starts[QUERIES];
};

// Number of tiles of queries from `first` on that attend to keys up to `last_key`.
template <bool masked>
__device__ inline int tiles_that_see(const token *starts, int first, int last_key, int sequence) {
    const int tiles = (sequence - first + QUERIES - 1) / QUERIES;
    if constexpr (masked) {
        int seeing = 0;
        for (int tile = 0; tile < tiles; tile += WARP) {
            const int query = first + (tile + (int)threadIdx.x % WARP) * QUERIES;
            const bool sees = query < sequence && (int)starts[min(query, sequence - 1)] <= last_key;
            seeing += __popcll(BALLOT(sees));
        }
        return seeing;
    } else {
        return tiles;
    }
}

template <bool masked>
__device__ inline void attention_dkeys_dvalues(const element *qkv, const element *dout, const float *log_sums,
                                               const float *dots, element *dqkv, const token *starts, Shape shape) {
    __shared__ QueryTile shared;
    const Lane lane;
    const int kv = blockIdx.y, sample = blockIdx.z, group = shape.heads / shape.kv_heads;
    const int first_key = blockIdx.x * BLOCK, last_key = min(first_key + BLOCK, shape.sequence) - 1;
    const int own_first = first_key + OWN * lane.wave, own_last = own_first + OWN - 1, own = own_first + lane.column;
    const int row = shape.qkv_row(), out_row = shape.out_row();
    const size keys = shape.key_start(sample, kv), values = shape.value_start(sample, kv);
    const bool exists = own < shape.sequence;
    if (masked) starts += (size)sample * shape.sequence;
    const Vector own_key(qkv + keys + (size)own * row, exists), own_value(qkv + values + (size)own * row, exists);

    const int tiles = tiles_that_see<masked>(starts, first_key, last_key, shape.sequence);
    Staged<QUERIES> staged;
    // The statistics of query threadIdx.x of a tile.
    float log_sum, dot;
    int start;
    const auto load_tile = [&](int head, int first) {
        staged.load(qkv + shape.start(sample, head, row), row, dout + shape.start(sample, head, out_row), out_row, first,
                    shape.sequence);
        const int query = first + (int)threadIdx.x;
        log_sum = dot = 0.0f, start = 0;
        if (threadIdx.x >= QUERIES || query >= shape.sequence) return;
        const size score = shape.first_score(sample, head) + query;
        log_sum = log_sums[score] * LOG2_E, dot = dots[score];
        if (masked) start = starts[query];
    };
    shared.queries.clear_padding();
    shared.gradients.clear_padding();

    const float factor = shape.factor();
    tile dkeys[DIMS], dvalues[DIMS];
    clear(dkeys);
    clear(dvalues);
    const int all = group * tiles;
    if (all > 0) load_tile(kv * group, first_key);
    for (int i = 0; i < all; ++i) {
        // Nobody reads the previous tile any more.
        __syncthreads();
        staged.each([&](bool is_query, int group, int piece, const words4(&rows)[4]) {
            store_rows(is_query ? shared.queries : shared.gradients, group, piece, rows);
            (is_query ? shared.queries_by_column : shared.gradients_by_column).store(group, piece, rows);
        });
        if (threadIdx.x < QUERIES)
            shared.log_sums[threadIdx.x] = log_sum, shared.dots[threadIdx.x] = dot, shared.starts[threadIdx.x] = start;
        __syncthreads();
        const int first = first_key + i % tiles * QUERIES, last = min(first + QUERIES, shape.sequence) - 1;
        if (i + 1 < all) load_tile(kv * group + (i + 1) / tiles, first_key + (i + 1) % tiles * QUERIES);

        // Queries along the rows. Those after the last are zeros, and so are their gradients. They add nothing, whatever
        // their weights.
        const bool all_see = own_last <= first && (!masked || shared.starts[last - first] <= own_first);
        tile weights = shared.queries.dot(0, own_key);
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            const int query = lane.row(r);
            weights[r] = power_of_two(weights[r] * factor - shared.log_sums[query]);
            if (!all_see && (own > first + query || (masked && own < shared.starts[query]))) weights[r] = 0.0f;
        }
        tile dscores = shared.gradients.dot(0, own_value);
#pragma unroll
        for (int r = 0; r < 16; ++r) dscores[r] = weights[r] * (dscores[r] - shared.dots[lane.row(r)]);
        shared.gradients_by_column.add_weighted(dvalues, 0, Weights(weights));
        shared.queries_by_column.add_weighted(dkeys, 0, Weights(dscores));
    }
    const int at = computed_again(own);
    if (at >= shape.sequence) return;
    store_vector(dkeys, shape.scale, dqkv + keys + (size)at * row);
    store_vector(dvalues, 1.0f, dqkv + values + (size)at * row);
}

template <bool masked>
__device__ inline void attention_dqueries(const element *qkv, const element *dout, const float *log_sums,
                                          const float *dots, element *dqkv, const token *starts, Shape shape) {
    __shared__ Rows<KEYS> keys, values;
    __shared__ Columns<KEYS> keys_by_column;
    const Lane lane;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    const int first = (gridDim.x - 1 - blockIdx.x) * BLOCK, own_first = first + OWN * lane.wave;
    const int last = min(first + BLOCK, shape.sequence) - 1;
    const int row = shape.qkv_row(), out_row = shape.out_row();
    if (masked) starts += (size)sample * shape.sequence;
    const Sight<masked> sight(starts, own_first, lane.column, shape.sequence);
    const bool exists = sight.query < shape.sequence;
    const size query = shape.start(sample, head, row) + (size)sight.query * row;
    const Vector own_query(qkv + query, exists);
    const Vector own_gradient(dout + shape.start(sample, head, out_row) + (size)sight.query * out_row, exists);
    const size score = shape.first_score(sample, head) + sight.query;
    const float log_sum = exists ? log_sums[score] * LOG2_E : 0.0f, dot = exists ? dots[score] : 0.0f;

    Staged<KEYS> staged;
    const auto load_tile = [&](int first_key) {
        staged.load(qkv + shape.key_start(sample, kv), row, qkv + shape.value_start(sample, kv), row, first_key,
                    shape.sequence);
    };
    int first_key = first_tile<masked, KEYS>(starts, first);
    keys.clear_padding();
    values.clear_padding();
    load_tile(first_key);

    const float factor = shape.factor();
    tile dqueries[DIMS];
    clear(dqueries);
    for (; first_key <= last; first_key += KEYS) {
        // Nobody reads the previous tile any more.
        __syncthreads();
        staged.each([&](bool is_key, int group, int piece, const words4(&rows)[4]) {
            store_rows(is_key ? keys : values, group, piece, rows);
            if (is_key) keys_by_column.store(group, piece, rows);
        });
        __syncthreads();
        if (first_key + KEYS <= last) load_tile(first_key + KEYS);
        if (!sight.any(first_key, KEYS)) continue;

        tile weights = keys.dot(0, own_query);
#pragma unroll
        for (int r = 0; r < 16; ++r) weights[r] = power_of_two(weights[r] * factor - log_sum);
        if (!sight.all(first_key, KEYS)) sight.hide(weights, first_key, 0.0f);
        tile dscores = values.dot(0, own_gradient);
#pragma unroll
        for (int r = 0; r < 16; ++r) dscores[r] = weights[r] * (dscores[r] - dot);
        keys_by_column.add_weighted(dqueries, 0, Weights(dscores));
    }
    if (exists) store_vector(dqueries, shape.scale, dqkv + query);
}

// The kernels without and with a mask.
#define MASK , const token *starts
#define DEFINE(NAME, MASKED, PARAMETER, STARTS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        mfma_attention_dkeys_dvalues##NAME(const element *qkv, const element *dout, const float *log_sums,            \
                                           const float *dots, element *dqkv PARAMETER, int sequence, int heads,       \
                                           int kv_heads, float scale) {                                               \
        attention_dkeys_dvalues<MASKED>(qkv, dout, log_sums, dots, dqkv, STARTS,                                      \
                                        Shape{sequence, heads, kv_heads, scale});                                     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
        mfma_attention_dqueries##NAME(const element *qkv, const element *dout, const float *log_sums,                 \
                                      const float *dots, element *dqkv PARAMETER, int sequence, int heads,            \
                                      int kv_heads, float scale) {                                                    \
        attention_dqueries<MASKED>(qkv, dout, log_sums, dots, dqkv, STARTS, Shape{sequence, heads, kv_heads, scale}); \
    }
DEFINE(, false, , nullptr)
DEFINE(_masked, true, MASK, starts)
