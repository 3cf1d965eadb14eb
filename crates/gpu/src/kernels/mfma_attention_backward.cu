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
// The sliced kernels are for context parallelism, with the tensors of sliced_attention.cu: keys and gradients are
// apart from the queries, starts may be null, and gradients may be in f32 and added to what is there.
//
// Only for bf16: MI200 takes subnormal operands of f16 products for zero, and gradients in f16 are often subnormal.
//
// FLOPs per visible score: 8·HEAD_DIM and 6·HEAD_DIM, of which 10 are counted in rates. Bytes: reads qkv and dout twice and
// writes dqkv: 22·HEAD_DIM per query and head if kv_heads = heads.

#include "mfma.cuh"
#include "mfma_slices.cuh"

// Streamed tiles.
constexpr int QUERIES = 32, KEYS = 32;

// A streamed tile of queries, in both orders.
struct QueryTile {
    Rows<QUERIES> queries, gradients;
    Columns<QUERIES> queries_by_column, gradients_by_column;
    float log_sums[QUERIES], dots[QUERIES];
    int starts[QUERIES];
};

// Where a gradient goes, in f32 if `wide`, and whether it is added to what is there.
struct Gradient {
    void *to;
    bool wide, add;

    __device__ __forceinline__ void store(const tile (&sums)[DIMS], float factor, size at) const {
        if (wide)
            store_at(sums, factor, static_cast<float *>(to) + at);
        else
            store_at(sums, factor, static_cast<element *>(to) + at);
    }

  private:
    template <class R> __device__ __forceinline__ void store_at(const tile (&sums)[DIMS], float factor, R *at) const {
        store_vector(sums, factor, at, add ? at : nullptr, 1.0f);
    }
};

// What the forward saw and saved.
struct Inputs {
    const element *qkv, *keys, *dout;
    const float *log_sums, *dots;
    const token *starts;
};

template <bool masked, class Layout>
__device__ inline void attention_dkeys_dvalues(Inputs in, Gradient gradient, Layout layout) {
    __shared__ QueryTile shared;
    const Lane lane;
    const Shape shape = layout.shape;
    const int kv = blockIdx.y, sample = blockIdx.z, group = shape.heads / shape.kv_heads;
    const Starts<masked> starts = {in.starts, (size)sample * shape.sequence};
    Slice own = layout.key_block(blockIdx.x);
    const QueryTiles<QUERIES, masked, Layout> tiles(layout, starts, own.position(),
                                                    min(own.first + BLOCK, own.end) - 1 + own.offset);
    own.first += OWN * lane.wave;
    const int own_key = own.first + lane.column, row = shape.qkv_row(), out_row = shape.out_row();
    const int own_position = own_key + own.offset, own_last = own.position() + OWN - 1;
    const size keys = layout.key_start(sample, kv) + (size)own_key * layout.key_row();
    const size values = keys + shape.kv_heads * HEAD_DIM;
    const bool exists = own_key < own.end;
    const Vector key(in.keys + keys, exists), value(in.keys + values, exists);

    Staged<QUERIES> staged;
    // The statistics of query threadIdx.x of a tile.
    float log_sum, dot;
    int start;
    const auto load_tile = [&](int head, Slice tile) {
        staged.load(in.qkv + shape.start(sample, head, row), row, in.dout + shape.start(sample, head, out_row), out_row,
                    tile.first, tile.end);
        const int query = tile.first + (int)threadIdx.x;
        log_sum = dot = 0.0f, start = 0;
        if (threadIdx.x >= QUERIES || query >= tile.end) return;
        const size score = shape.first_score(sample, head) + query;
        log_sum = in.log_sums[score] * LOG2_E, dot = in.dots[score];
        start = starts.of(query);
    };
    shared.queries.clear_padding();
    shared.gradients.clear_padding();

    const float factor = shape.factor();
    tile dkeys[DIMS], dvalues[DIMS];
    clear(dkeys);
    clear(dvalues);
    const int all = group * tiles.count();
    if (all > 0) load_tile(kv * group, tiles[0]);
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
        const Slice here = tiles[i % tiles.count()];
        const int first = here.position(), last = min(QUERIES, here.end - here.first) - 1;
        if (i + 1 < all) load_tile(kv * group + (i + 1) / tiles.count(), tiles[(i + 1) % tiles.count()]);

        // Queries along the rows. Those after the last are zeros, and so are their gradients. They add nothing, whatever
        // their weights.
        const bool all_see = own_last <= first && (!masked || shared.starts[last] <= own.position());
        tile weights = shared.queries.dot(0, key);
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            const int query = lane.row(r);
            weights[r] = power_of_two(weights[r] * factor - shared.log_sums[query]);
            if (!all_see && (own_position > first + query || (masked && own_position < shared.starts[query])))
                weights[r] = 0.0f;
        }
        tile dscores = shared.gradients.dot(0, value);
#pragma unroll
        for (int r = 0; r < 16; ++r) dscores[r] = weights[r] * (dscores[r] - shared.dots[lane.row(r)]);
        shared.gradients_by_column.add_weighted(dvalues, 0, Weights(weights));
        shared.queries_by_column.add_weighted(dkeys, 0, Weights(dscores));
    }
    const int at = computed_again(own_key);
    if (at >= own.end) return;
    const size to = layout.key_start(sample, kv) + (size)at * layout.key_row();
    gradient.store(dkeys, shape.scale, to);
    gradient.store(dvalues, 1.0f, to + shape.kv_heads * HEAD_DIM);
}

// The gradients are columns `column` and following of rows of `width` elements.
template <bool masked, class Layout>
__device__ inline void attention_dqueries(Inputs in, Gradient gradient, size width, size column, Layout layout) {
    __shared__ Rows<KEYS> key_tile, value_tile;
    __shared__ Columns<KEYS> keys_by_column;
    const Lane lane;
    const Shape shape = layout.shape;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    Slice own = layout.query_block(gridDim.x - 1 - blockIdx.x);
    const Starts<masked> starts = {in.starts, (size)sample * shape.sequence};
    KeyTiles<KEYS, Layout> tiles(layout, starts.uniform(own.first),
                                 min(own.first + BLOCK, own.end) - 1 + own.offset);
    own.first += OWN * lane.wave;
    const Sight<masked> sight(starts, own, lane.column);
    const int own_query = own.first + lane.column, row = shape.qkv_row(), out_row = shape.out_row();
    const bool exists = own_query < own.end;
    const Vector query(in.qkv + shape.start(sample, head, row) + (size)own_query * row, exists);
    const Vector own_gradient(in.dout + shape.start(sample, head, out_row) + (size)own_query * out_row, exists);
    const size score = shape.first_score(sample, head) + own_query;
    const float log_sum = exists ? in.log_sums[score] * LOG2_E : 0.0f, dot = exists ? in.dots[score] : 0.0f;

    Staged<KEYS> staged;
    const auto load_tile = [&]() {
        const element *key = in.keys + layout.key_start(sample, kv), *value = key + shape.kv_heads * HEAD_DIM;
        staged.load(key, layout.key_row(), value, layout.key_row(), tiles.tile.first, tiles.tile.end);
    };
    key_tile.clear_padding();
    value_tile.clear_padding();
    if (tiles.exist()) load_tile();

    const float factor = shape.factor();
    tile dqueries[DIMS];
    clear(dqueries);
    while (tiles.exist()) {
        // Nobody reads the previous tile any more.
        __syncthreads();
        staged.each([&](bool is_key, int group, int piece, const words4(&rows)[4]) {
            store_rows(is_key ? key_tile : value_tile, group, piece, rows);
            if (is_key) keys_by_column.store(group, piece, rows);
        });
        __syncthreads();
        const Slice here = tiles.tile;
        tiles.next();
        if (tiles.exist()) load_tile();
        if (!sight.any(here, KEYS)) continue;

        tile weights = key_tile.dot(0, query);
#pragma unroll
        for (int r = 0; r < 16; ++r) weights[r] = power_of_two(weights[r] * factor - log_sum);
        if (!sight.all(here, KEYS)) sight.hide(weights, here, 0.0f);
        tile dscores = value_tile.dot(0, own_gradient);
#pragma unroll
        for (int r = 0; r < 16; ++r) dscores[r] = weights[r] * (dscores[r] - dot);
        keys_by_column.add_weighted(dqueries, 0, Weights(dscores));
    }
    if (!exists) return;
    const size to = ((size)sample * shape.sequence + own_query) * width + column + head * HEAD_DIM;
    gradient.store(dqueries, shape.scale, to);
}

#define SLICES int parts, int part, int first_owner, int owners, int sequence, int heads, int kv_heads, float scale
#define LAYOUT Parts{parts, part, first_owner, owners, Shape{sequence, heads, kv_heads, scale}}
extern "C" __global__ void __launch_bounds__(THREADS)
    mfma_sliced_dkeys_dvalues(const element *qkv, const element *keys, const token *starts, const element *dout,
                              const float *log_sums, const float *dots, void *dkeys, bool wide, bool add, SLICES) {
    attention_dkeys_dvalues<true>(Inputs{qkv, keys, dout, log_sums, dots, starts}, Gradient{dkeys, wide, add}, LAYOUT);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mfma_sliced_dqueries(const element *qkv, const element *keys, const token *starts, const element *dout,
                         const float *log_sums, const float *dots, void *dqueries, bool wide, bool add, size width,
                         size column, SLICES) {
    attention_dqueries<true>(Inputs{qkv, keys, dout, log_sums, dots, starts}, Gradient{dqueries, wide, add}, width, column,
                             LAYOUT);
}

// The kernels without and with a mask.
#define MASK , const token *starts
#define DEFINE(NAME, MASKED, PARAMETER, STARTS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        mfma_attention_dkeys_dvalues##NAME(const element *qkv, const element *dout, const float *log_sums,            \
                                           const float *dots, element *dqkv PARAMETER, int sequence, int heads,       \
                                           int kv_heads, float scale) {                                               \
        attention_dkeys_dvalues<MASKED>(Inputs{qkv, qkv, dout, log_sums, dots, STARTS}, Gradient{dqkv, false, false}, \
                                        Whole{Shape{sequence, heads, kv_heads, scale}});                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
        mfma_attention_dqueries##NAME(const element *qkv, const element *dout, const float *log_sums,                 \
                                      const float *dots, element *dqkv PARAMETER, int sequence, int heads,            \
                                      int kv_heads, float scale) {                                                    \
        const Shape shape = {sequence, heads, kv_heads, scale};                                                       \
        attention_dqueries<MASKED>(Inputs{qkv, qkv, dout, log_sums, dots, STARTS}, Gradient{dqkv, false, false},      \
                                   shape.qkv_row(), 0, Whole{shape});                                                 \
    }
DEFINE(, false, , nullptr)
DEFINE(_masked, true, MASK, starts)
