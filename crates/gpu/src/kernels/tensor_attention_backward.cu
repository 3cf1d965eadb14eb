// Causal flash attention on the tensor cores, backward (arXiv 2205.14135, 2307.08691).
//
// qkv, dqkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out, dout: [batch, sequence, heads, HEAD_DIM]; all
// 16-byte aligned. log_sums, from the forward, and dots, scratch: [batch, heads, sequence] f32. The masked kernels take
// the same starts as the forward. Grid (tiles, heads or kv_heads, batch).
//
// dots runs first. A block of dkeys_dvalues owns KEY_BLOCK keys and loops over queries, head by head of its group. Its
// products have keys along the rows, so that weights need no transposing. A block of dqueries owns queries and loops
// over keys. It recomputes the scores, which is the price of sums in a fixed order without scratch. The next tile is
// loaded while this one is computed. Tiles that are masked by causality or by the starts are not read.
//
// FLOPs per visible score: 8·HEAD_DIM and 6·HEAD_DIM, of which 10 are counted in rates. mma.sync reaches about 60 % of
// an H200's 800 TFLOP/s: batch 8, heads 16, sequence 2048, HEAD_DIM 128 (481 GFLOP) take at least 1.0 ms; batch 64,
// heads 12, sequence 1024, HEAD_DIM 64 (361 GFLOP) 0.75 ms. For heads over 64 a warp of dkeys_dvalues has registers for
// 16 keys only. It reads 9 kB of shared memory for 32 mma, which at 128 bytes per clock takes 1.35 times as long.
// Bytes: reads out and dout, then twice qkv and dout, and writes dqkv: 26·HEAD_DIM per query and head if kv_heads =
// heads, 0.9 GB and 1.3 GB, 0.20 ms and 0.30 ms at 4.3 TB/s.

#include "tensor_core.cuh"

// A block of keys, and the streamed tiles of queries and of keys.
constexpr int KEY_ROWS = NARROW ? 2 : 1, KEY_WARPS = NARROW ? 4 : 8;
constexpr int KEY_BLOCK = 16 * KEY_ROWS * KEY_WARPS, KEY_THREADS = WARP * KEY_WARPS;
constexpr int QUERIES = NARROW ? 32 : 64;
constexpr int KEYS = NARROW ? 64 : 32;

// dots = Σ dout ∘ out for every query: 16 threads per row, rows in memory order.
__device__ inline void attention_dots(const element *out, const element *dout, float *dots, size rows, Shape shape) {
    constexpr int SIDE = 16, ROWS = QUERY_THREADS / SIDE;
    const int piece = threadIdx.x % SIDE;
    const size row = blockIdx.x * (size)ROWS + threadIdx.x / SIDE;
    float sum = 0.0f;
    if (row < rows && piece < PIECES) {
        float left[PACK], right[PACK];
        load(out + row * HEAD_DIM + piece * PACK, left);
        load(dout + row * HEAD_DIM + piece * PACK, right);
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum += left[i] * right[i];
    }
#pragma unroll
    for (int mask = SIDE / 2; mask > 0; mask /= 2) sum += SHUFFLE_XOR(sum, mask);
    const size token = row / shape.heads, sample = token / shape.sequence;
    if (piece == 0 && row < rows)
        dots[(sample * shape.heads + row % shape.heads) * shape.sequence + token % shape.sequence] = sum;
}

// A streamed tile of queries.
struct QueryTile {
    element queries[QUERIES * STRIDE], gradients[QUERIES * STRIDE];
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
            seeing += __popc((unsigned int)BALLOT(sees));
        }
        return seeing;
    } else {
        return tiles;
    }
}

static_assert(2 * KEY_BLOCK * STRIDE * sizeof(element) + 2 * sizeof(QueryTile) == LAUNCH_DKEYS_SHARED &&
                  KEY_THREADS == LAUNCH_KEY_THREADS,
              "not what is launched");

template <bool masked>
__device__ inline void attention_dkeys_dvalues(const element *qkv, const element *dout, const float *log_sums,
                                               const float *dots, element *dqkv, const token *starts, Shape shape) {
    extern __shared__ uint4 shared[];
    element *keys = (element *)shared, *values = keys + KEY_BLOCK * STRIDE;
    QueryTile *tiles = (QueryTile *)(values + KEY_BLOCK * STRIDE);
    const Lane lane;
    const int kv = blockIdx.y, sample = blockIdx.z, group = shape.heads / shape.kv_heads;
    const int first_key = blockIdx.x * KEY_BLOCK, last_key = min(first_key + KEY_BLOCK, shape.sequence) - 1;
    const int own_first = first_key + 16 * KEY_ROWS * lane.warp, own_last = own_first + 16 * KEY_ROWS - 1;
    const int row = shape.qkv_row(), out_row = shape.out_row();
    if (masked) starts += (size)sample * shape.sequence;
    element *own_keys = keys + 16 * KEY_ROWS * lane.warp * STRIDE;
    element *own_values = values + 16 * KEY_ROWS * lane.warp * STRIDE;

    const int end = first_key + QUERIES * tiles_that_see<masked>(starts, first_key, last_key, shape.sequence);
    // The tile that is loaded next, and its slot.
    int head = kv * group, first = first_key, stage = 0;
    const auto load_next = [&]() {
        const size score = shape.first_score(sample, head);
        QueryTile &tile = tiles[stage];
        load_rows<QUERIES, KEY_THREADS>(tile.queries, qkv + shape.start(sample, head, row), row, first, shape.sequence);
        load_rows<QUERIES, KEY_THREADS>(tile.gradients, dout + shape.start(sample, head, out_row), out_row, first,
                                        shape.sequence);
        load_words<QUERIES>(tile.log_sums, log_sums + score, first, shape.sequence);
        load_words<QUERIES>(tile.dots, dots + score, first, shape.sequence);
        if (masked) load_words<QUERIES>(tile.starts, starts, first, shape.sequence);
        stage ^= 1;
        first += QUERIES;
        if (first == end) first = first_key, ++head;
    };
    clear_padding(keys, 2 * KEY_BLOCK);
    for (int i = 0; i < 2; ++i) {
        clear_padding(tiles[i].queries, QUERIES);
        clear_padding(tiles[i].gradients, QUERIES);
    }
    load_rows<KEY_BLOCK, KEY_THREADS>(keys, qkv + shape.key_start(sample, kv), row, first_key, shape.sequence);
    load_rows<KEY_BLOCK, KEY_THREADS>(values, qkv + shape.value_start(sample, kv), row, first_key, shape.sequence);
    load_next();
    end_group_of_copies();

    const float factor = shape.factor();
    float dkeys[KEY_ROWS][COLUMNS][4], dvalues[KEY_ROWS][COLUMNS][4];
    clear(dkeys);
    clear(dvalues);
    for (bool more = true; more;) {
        // This tile is loaded, and nobody reads the previous one any more.
        await_copies<0>();
        __syncthreads();
        const QueryTile &tile = tiles[stage ^ 1];
        const int here = (first == first_key ? end : first) - QUERIES;
        const int last = min(here + QUERIES, shape.sequence) - 1;
        more = head < (kv + 1) * group;
        if (more) load_next();
        end_group_of_copies();

        if (last < own_first || (masked && tile.starts[0] > own_last)) continue;
        const bool all = own_last <= here && (!masked || tile.starts[last - here] <= own_first);
        const unsigned int query_rows = shared_address(tile.queries), gradient_rows = shared_address(tile.gradients);
        // Keys along the rows, queries along the columns. Queries after the last are zeros, and so are their gradients.
        // They add nothing, whatever their weights.
        float weight[KEY_ROWS][QUERIES / 8][4], dscore[KEY_ROWS][QUERIES / 8][4];
        dot_rows(weight, shared_address(own_keys) + lane.left(), query_rows + lane.right());
        each_element(weight, [&](float &x, int, int column) {
            x = power_of_two(x * factor - tile.log_sums[column + lane.column()] * LOG2_E);
        });
        if (!all)
            each_element(weight, [&](float &x, int r, int column) {
                const int key = own_first + lane.row() + 8 * r, query = column + lane.column();
                if (key > here + query || (masked && key < tile.starts[query])) x = 0.0f;
            });
        dot_rows(dscore, shared_address(own_values) + lane.left(), gradient_rows + lane.right());
#pragma unroll
        for (int m = 0; m < KEY_ROWS; ++m)
#pragma unroll
            for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    dscore[m][n][j] = weight[m][n][j] * (dscore[m][n][j] - tile.dots[8 * n + j % 2 + lane.column()]);
        add_weighted(dvalues, weight, gradient_rows + lane.left());
        add_weighted(dkeys, dscore, query_rows + lane.left());
    }
    float scale[2 * KEY_ROWS], one[2 * KEY_ROWS];
#pragma unroll
    for (int i = 0; i < 2 * KEY_ROWS; ++i) scale[i] = shape.scale, one[i] = 1.0f;
    store_rows(dkeys, scale, own_keys, dqkv + shape.key_start(sample, kv), row, own_first, shape.sequence);
    store_rows(dvalues, one, own_values, dqkv + shape.value_start(sample, kv), row, own_first, shape.sequence);
}

// A streamed tile of keys.
struct KeyTile {
    element keys[KEYS * STRIDE], values[KEYS * STRIDE];
};

static_assert(2 * QUERY_BLOCK * STRIDE * sizeof(element) + 2 * sizeof(KeyTile) == LAUNCH_DQUERIES_SHARED,
              "not what is launched");

template <bool masked>
__device__ inline void attention_dqueries(const element *qkv, const element *dout, const float *log_sums,
                                          const float *dots, element *dqkv, const token *starts, Shape shape) {
    extern __shared__ uint4 shared[];
    element *queries = (element *)shared, *gradients = queries + QUERY_BLOCK * STRIDE;
    KeyTile *tiles = (KeyTile *)(gradients + QUERY_BLOCK * STRIDE);
    const Lane lane;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERY_BLOCK;
    const int own_first = first + 16 * QUERY_ROWS * lane.warp;
    const int last = min(first + QUERY_BLOCK, shape.sequence) - 1;
    const int row = shape.qkv_row(), out_row = shape.out_row();
    if (masked) starts += (size)sample * shape.sequence;
    const Sight<masked, KEYS> sight(starts, own_first, shape.sequence);
    element *own_queries = queries + 16 * QUERY_ROWS * lane.warp * STRIDE;
    element *own_gradients = gradients + 16 * QUERY_ROWS * lane.warp * STRIDE;
    const int start = first_tile<masked, KEYS>(starts, first);
    const auto load_tile = [&](int first_key) {
        KeyTile &tile = tiles[first_key / KEYS % 2];
        load_rows<KEYS, QUERY_THREADS>(tile.keys, qkv + shape.key_start(sample, kv), row, first_key, shape.sequence);
        load_rows<KEYS, QUERY_THREADS>(tile.values, qkv + shape.value_start(sample, kv), row, first_key,
                                       shape.sequence);
    };
    clear_padding(queries, 2 * QUERY_BLOCK + 4 * KEYS);
    load_rows<QUERY_BLOCK, QUERY_THREADS>(queries, qkv + shape.start(sample, head, row), row, first, shape.sequence);
    load_rows<QUERY_BLOCK, QUERY_THREADS>(gradients, dout + shape.start(sample, head, out_row), out_row, first,
                                          shape.sequence);
    load_tile(start);
    end_group_of_copies();

    const float factor = shape.factor();
    float log_sum[2 * QUERY_ROWS], dot[2 * QUERY_ROWS], dqueries[QUERY_ROWS][COLUMNS][4];
    clear(dqueries);
#pragma unroll
    for (int i = 0; i < 2 * QUERY_ROWS; ++i) {
        const int query = own_first + lane.row() + 8 * i;
        const size at = shape.first_score(sample, head) + query;
        log_sum[i] = query < shape.sequence ? log_sums[at] * LOG2_E : 0.0f;
        dot[i] = query < shape.sequence ? dots[at] : 0.0f;
    }
    for (int first_key = start; first_key <= last; first_key += KEYS) {
        // This tile is loaded, and nobody reads the previous one any more.
        await_copies<0>();
        __syncthreads();
        if (first_key + KEYS <= last) load_tile(first_key + KEYS);
        end_group_of_copies();
        if (!sight.any(first_key)) continue;

        const KeyTile &tile = tiles[first_key / KEYS % 2];
        const unsigned int key_rows = shared_address(tile.keys), value_rows = shared_address(tile.values);
        float weight[QUERY_ROWS][KEYS / 8][4], dscore[QUERY_ROWS][KEYS / 8][4];
        dot_rows(weight, shared_address(own_queries) + lane.left(), key_rows + lane.right());
        each_element(weight, [&](float &x, int i, int) { x = power_of_two(x * factor - log_sum[i]); });
        if (!sight.all(first_key)) sight.hide(weight, first_key, 0.0f);
        dot_rows(dscore, shared_address(own_gradients) + lane.left(), value_rows + lane.right());
#pragma unroll
        for (int m = 0; m < QUERY_ROWS; ++m)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    dscore[m][n][j] = weight[m][n][j] * (dscore[m][n][j] - dot[2 * m + j / 2]);
        add_weighted(dqueries, dscore, key_rows + lane.left());
    }
    float scale[2 * QUERY_ROWS];
#pragma unroll
    for (int i = 0; i < 2 * QUERY_ROWS; ++i) scale[i] = shape.scale;
    store_rows(dqueries, scale, own_queries, dqkv + shape.start(sample, head, row), row, own_first, shape.sequence);
}

extern "C" __global__ void __launch_bounds__(QUERY_THREADS)
    tensor_attention_dots(const element *out, const element *dout, float *dots, size rows, int sequence, int heads,
                          int kv_heads, float scale) {
    attention_dots(out, dout, dots, rows, Shape{sequence, heads, kv_heads, scale});
}

// The kernels without and with a mask.
#define MASK , const token *starts
#define DEFINE(NAME, MASKED, PARAMETER, STARTS)                                                                       \
    extern "C" __global__ void __launch_bounds__(KEY_THREADS, NARROW ? 2 : 1)                                         \
        tensor_attention_dkeys_dvalues##NAME(const element *qkv, const element *dout, const float *log_sums,          \
                                             const float *dots, element *dqkv PARAMETER, int sequence, int heads,     \
                                             int kv_heads, float scale) {                                             \
        attention_dkeys_dvalues<MASKED>(qkv, dout, log_sums, dots, dqkv, STARTS,                                      \
                                        Shape{sequence, heads, kv_heads, scale});                                     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 2)                                                    \
        tensor_attention_dqueries##NAME(const element *qkv, const element *dout, const float *log_sums,               \
                                        const float *dots, element *dqkv PARAMETER, int sequence, int heads,          \
                                        int kv_heads, float scale) {                                                  \
        attention_dqueries<MASKED>(qkv, dout, log_sums, dots, dqkv, STARTS, Shape{sequence, heads, kv_heads, scale}); \
    }
DEFINE(, false, , nullptr)
DEFINE(_masked, true, MASK, starts)
