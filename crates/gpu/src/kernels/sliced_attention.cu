// Attention of the queries of one part of every sample over the keys of some parts, for context parallelism, in tiles of
// TILE queries by TILE keys as in attention.cu.
//
// Of 2·parts equal slices of a sample, part i has slices i and 2·parts − 1 − i. qkv: [batch, own, heads + 2·kv_heads, dim],
// read for its queries; keys, dkeys: [owners, batch, own, 2·kv_heads, dim], keys before values, of parts first_owner and
// following; out, before, dout: [batch, own, heads, dim]; log_sums, dots: [batch, heads, own] f32. starts [batch, own] has
// the position of the first key that each query attends to, or is null.
// Grid (tiles of both slices, heads or kv_heads, batch), 256 threads. A tile is inside one slice, so its positions are
// consecutive. Pairs of tiles that no query and key of which see each other are skipped. Sums are in a fixed order.
// With `before`, which may be out, the result is joined with that of other keys by both log-sum-exps: one more pass over
// before, and none of its own.

#include "attention_tiles.cuh"

struct Parts {
    int parts, part, first_owner, owners;
};

// Consecutive rows of a part, and the position of the first.
struct RowTile {
    int row, count, position;

    // Whether its queries may see a key of the other tile.
    __device__ bool sees(RowTile keys, const token *starts) const {
        const int from = starts ? (int)starts[row] : 0;
        return keys.position < position + count && from < keys.position + keys.count;
    }
};

__device__ inline int tiles_of(int rows) {
    return (rows + TILE - 1) / TILE;
}

// The tiles of both slices of `own` tokens.
__device__ inline int all_tiles(int own) {
    return tiles_of(own / 2) + tiles_of(own - own / 2);
}

__device__ inline RowTile tile_at(int index, int own, int parts, int part) {
    const int slice = own / 2, before = tiles_of(slice);
    const bool second = index >= before;
    const int row = second ? slice + (index - before) * TILE : index * TILE;
    const int end = second ? own : slice;
    const int offset = (second ? 2 * parts - 2 - part : part) * slice;
    return RowTile{row, end - row < TILE ? end - row : TILE, row + offset};
}

// Whether query i of a tile sees key j of another one.
__device__ inline bool sees(RowTile queries, int i, RowTile keys, int j, const token *starts) {
    if (i >= queries.count || j >= keys.count || keys.position + j > queries.position + i) return false;
    return !starts || (int)starts[queries.row + i] <= keys.position + j;
}

// Loads the vectors of a tile of rows, times `factor`; zeros after the last.
template <class T>
__device__ void load_rows(float *to, const T *from, size width, RowTile rows, Shape shape, float factor) {
    for (int i = threadIdx.x; i < TILE * shape.dim; i += THREADS) {
        const int vector = i / shape.dim, column = i % shape.dim;
        to[vector * shape.stride() + column] =
            vector < rows.count ? factor * widen(from[(size)(rows.row + vector) * width + column]) : 0.0f;
    }
}

// Rounds and stores the vectors of a tile of rows, or adds them.
template <class T>
__device__ void store_rows(const float (&sum)[OWN][COLUMNS], T *to, size width, RowTile rows, Shape shape, float factor,
                           bool add) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < OWN; ++i) {
        const int vector = y + SIDE * i;
        if (vector >= rows.count) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = x + SIDE * c;
            if (column >= shape.dim) continue;
            T *at = to + (size)(rows.row + vector) * width + column;
            *at = narrow<T>((add ? widen(*at) : 0.0f) + sum[i][c] * factor);
        }
    }
}

// Offset of the first row of an owner's sample in keys.
__device__ inline size key_start(int owner, int sample, Shape shape) {
    return ((size)owner * gridDim.z + sample) * shape.sequence * 2 * shape.kv_heads * shape.dim;
}

template <class T, class O>
__device__ void sliced_forward(const T *qkv, const T *keys, const token *starts, const float *before, O *out,
                               float *log_sums, Parts parts, Shape shape) {
    extern __shared__ float shared[];
    float *queries = shared, *others = queries + TILE * shape.stride(), *pairs = others + TILE * shape.stride();
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, own = shape.sequence;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    // The last tiles attend to the most keys, so they start first.
    const RowTile own_rows = tile_at(gridDim.x - 1 - blockIdx.x, own, parts.parts, parts.part);
    if (starts) starts += (size)sample * own;
    const size key_row = (size)2 * shape.kv_heads * shape.dim;
    load_rows(queries, qkv + shape.start(sample, head, shape.qkv_row()), shape.qkv_row(), own_rows, shape, shape.scale);

    float sum[OWN][COLUMNS], maximum[OWN], total[OWN];
    clear(sum);
    for (int i = 0; i < OWN; ++i) maximum[i] = -INFINITE, total[i] = 0.0f;
    for (int owner = 0; owner < parts.owners; ++owner) {
        const T *key = keys + key_start(owner, sample, shape) + (size)kv * shape.dim;
        const T *value = key + (size)shape.kv_heads * shape.dim;
        for (int index = 0; index < all_tiles(own); ++index) {
            const RowTile rows = tile_at(index, own, parts.parts, parts.first_owner + owner);
            if (!own_rows.sees(rows, starts)) continue;
            __syncthreads();
            load_rows(others, key, key_row, rows, shape, 1.0f);
            __syncthreads();
            float score[OWN][OWN];
            dot_tiles(score, queries, others, shape);
            for (int i = 0; i < OWN; ++i) {
                float highest = maximum[i];
                for (int j = 0; j < OWN; ++j) {
                    score[i][j] = bounded(score[i][j]);
                    if (!sees(own_rows, y + SIDE * i, rows, x + SIDE * j, starts)) score[i][j] = -INFINITE;
                    highest = fmaxf(highest, score[i][j]);
                }
                highest = side_reduce(highest, Maximum());
                // A query may have no visible key so far. Its exponentials must be 0, not exp(−∞ + ∞).
                const float shift = highest == -INFINITE ? 0.0f : highest;
                float here = 0.0f;
                for (int j = 0; j < OWN; ++j) {
                    const float exponential = expf(score[i][j] - shift);
                    pairs[(y + SIDE * i) * SCORE_STRIDE + x + SIDE * j] = exponential;
                    here += exponential;
                }
                const float shrink = expf(maximum[i] - shift);
                total[i] = total[i] * shrink + side_reduce(here, Sum());
                maximum[i] = highest;
                for (int c = 0; c < COLUMNS; ++c) sum[i][c] *= shrink;
            }
            __syncthreads();
            load_rows(others, value, key_row, rows, shape, 1.0f);
            __syncthreads();
            add_weighted<false>(sum, pairs, others, shape);
        }
    }

    const size row_width = shape.out_row(), at_head = shape.start(sample, head, row_width);
    float *log_sum = log_sums + shape.first_score(sample, head) + own_rows.row;
    float joined[OWN], old_share[OWN], new_share[OWN];
    for (int i = 0; i < OWN; ++i) {
        const int query = y + SIDE * i;
        const float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
        joined[i] = maximum[i] + logf(total[i]), old_share[i] = 0.0f, new_share[i] = inverse;
        if (!before || query >= own_rows.count) continue;
        const float earlier = log_sum[query], highest = fmaxf(earlier, joined[i]);
        if (highest == -INFINITE) {
            joined[i] = earlier, old_share[i] = 1.0f, new_share[i] = 0.0f;
            continue;
        }
        const float both = highest + logf(expf(earlier - highest) + expf(joined[i] - highest));
        old_share[i] = expf(earlier - both), new_share[i] = inverse * expf(joined[i] - both), joined[i] = both;
    }
    // All threads of a row have read its log-sum-exp.
    __syncthreads();
    for (int i = 0; i < OWN; ++i) {
        const int query = y + SIDE * i;
        if (query >= own_rows.count) continue;
        const size row = at_head + (size)(own_rows.row + query) * row_width;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = x + SIDE * c;
            if (column >= shape.dim) continue;
            const float earlier = before ? before[row + column] * old_share[i] : 0.0f;
            out[row + column] = narrow<O>(earlier + sum[i][c] * new_share[i]);
        }
        if (x == 0) log_sum[query] = joined[i];
    }
}

// As score_gradients in attention.cu. `log_sums` and `dots` begin at the tile's first query.
__device__ inline void sliced_scores(float (&probability)[OWN][OWN], float (&dscore)[OWN][OWN], const float *log_sums,
                                     const float *dots, RowTile own_rows, RowTile rows, const token *starts) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < OWN; ++i)
        for (int j = 0; j < OWN; ++j) {
            const int query = y + SIDE * i;
            if (!sees(own_rows, query, rows, x + SIDE * j, starts)) {
                probability[i][j] = dscore[i][j] = 0.0f;
                continue;
            }
            const float score = bounded(probability[i][j]);
            probability[i][j] = expf(score - log_sums[query]);
            dscore[i][j] = probability[i][j] * (dscore[i][j] - dots[query]);
            if (CAPPED) dscore[i][j] *= slope(score);
        }
}

// Grid.x has the tiles of every owner's keys.
template <class T, class G>
__device__ void sliced_dkeys(const T *qkv, const T *keys, const token *starts, const T *dout, const float *log_sums,
                             const float *dots, G *dkeys, bool add, Parts parts, Shape shape) {
    extern __shared__ float shared[];
    const int tile = TILE * shape.stride(), own = shape.sequence;
    // Queries and their gradients take turns in `others`.
    float *key_tile = shared, *value_tile = key_tile + tile, *others = value_tile + tile;
    float *pairs = others + tile, *dpairs = pairs + TILE * SCORE_STRIDE;
    const int kv = blockIdx.y, sample = blockIdx.z, group = shape.heads / shape.kv_heads;
    const int owner = blockIdx.x / all_tiles(own), index = blockIdx.x % all_tiles(own);
    const RowTile rows = tile_at(index, own, parts.parts, parts.first_owner + owner);
    if (starts) starts += (size)sample * own;
    const size key_row = (size)2 * shape.kv_heads * shape.dim, row = shape.qkv_row(), out_row = shape.out_row();
    const size key = key_start(owner, sample, shape) + (size)kv * shape.dim;
    const size value = key + (size)shape.kv_heads * shape.dim;
    load_rows(key_tile, keys + key, key_row, rows, shape, 1.0f);
    load_rows(value_tile, keys + value, key_row, rows, shape, 1.0f);

    float dkey[OWN][COLUMNS], dvalue[OWN][COLUMNS];
    clear(dkey);
    clear(dvalue);
    for (int head = kv * group; head < (kv + 1) * group; ++head) {
        const size score = shape.first_score(sample, head);
        for (int at = 0; at < all_tiles(own); ++at) {
            const RowTile own_rows = tile_at(at, own, parts.parts, parts.part);
            if (!own_rows.sees(rows, starts)) continue;
            const auto load_queries = [&]() {
                __syncthreads();
                load_rows(others, qkv + shape.start(sample, head, row), row, own_rows, shape, shape.scale);
                __syncthreads();
            };
            float probability[OWN][OWN], dscore[OWN][OWN];
            load_queries();
            dot_tiles(probability, others, key_tile, shape);
            __syncthreads();
            load_rows(others, dout + shape.start(sample, head, out_row), out_row, own_rows, shape, 1.0f);
            __syncthreads();
            dot_tiles(dscore, others, value_tile, shape);
            sliced_scores(probability, dscore, log_sums + score + own_rows.row, dots + score + own_rows.row, own_rows,
                          rows, starts);
            store_pairs(pairs, probability);
            store_pairs(dpairs, dscore);
            __syncthreads();
            add_weighted<true>(dvalue, pairs, others, shape);
            load_queries();
            // The queries are already multiplied by the scale.
            add_weighted<true>(dkey, dpairs, others, shape);
        }
    }
    store_rows(dkey, dkeys + key, key_row, rows, shape, 1.0f, add);
    store_rows(dvalue, dkeys + value, key_row, rows, shape, 1.0f, add);
}

// dqueries: rows of `width` elements, from column `first` on.
template <class T, class Q>
__device__ void sliced_dqueries(const T *qkv, const T *keys, const token *starts, const T *dout, const float *log_sums,
                                const float *dots, Q *dqueries, size width, size first, bool add, Parts parts,
                                Shape shape) {
    extern __shared__ float shared[];
    const int tile = TILE * shape.stride(), own = shape.sequence;
    // Values and keys take turns in `others`.
    float *queries = shared, *gradients = queries + tile, *others = gradients + tile, *dpairs = others + tile;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    const RowTile own_rows = tile_at(gridDim.x - 1 - blockIdx.x, own, parts.parts, parts.part);
    if (starts) starts += (size)sample * own;
    const size key_row = (size)2 * shape.kv_heads * shape.dim, row = shape.qkv_row(), out_row = shape.out_row();
    const size score = shape.first_score(sample, head) + own_rows.row;
    load_rows(queries, qkv + shape.start(sample, head, row), row, own_rows, shape, shape.scale);
    load_rows(gradients, dout + shape.start(sample, head, out_row), out_row, own_rows, shape, 1.0f);

    float dquery[OWN][COLUMNS];
    clear(dquery);
    for (int owner = 0; owner < parts.owners; ++owner) {
        const T *key = keys + key_start(owner, sample, shape) + (size)kv * shape.dim;
        const T *value = key + (size)shape.kv_heads * shape.dim;
        for (int index = 0; index < all_tiles(own); ++index) {
            const RowTile rows = tile_at(index, own, parts.parts, parts.first_owner + owner);
            if (!own_rows.sees(rows, starts)) continue;
            float probability[OWN][OWN], dscore[OWN][OWN];
            __syncthreads();
            load_rows(others, value, key_row, rows, shape, 1.0f);
            __syncthreads();
            dot_tiles(dscore, gradients, others, shape);
            __syncthreads();
            load_rows(others, key, key_row, rows, shape, 1.0f);
            __syncthreads();
            dot_tiles(probability, queries, others, shape);
            sliced_scores(probability, dscore, log_sums + score, dots + score, own_rows, rows, starts);
            store_pairs(dpairs, dscore);
            __syncthreads();
            add_weighted<false>(dquery, dpairs, others, shape);
        }
    }
    Q *to = dqueries + ((size)sample * own) * width + first + (size)head * shape.dim;
    store_rows(dquery, to, width, own_rows, shape, shape.scale, add);
}

// `sums` kernels write results in f32.
#define DEFINE_RESULT(NAME, T, R)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        sliced_forward_##NAME(const T *qkv, const T *keys, const token *starts, const float *before, R *out,          \
                              float *log_sums, int parts, int part, int first_owner, int owners, int sequence,        \
                              int heads, int kv_heads, int dim, float scale) {                                        \
        sliced_forward(qkv, keys, starts, before, out, log_sums, Parts{parts, part, first_owner, owners},             \
                       Shape{sequence, heads, kv_heads, dim, scale});                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        sliced_dkeys_##NAME(const T *qkv, const T *keys, const token *starts, const T *dout, const float *log_sums,   \
                            const float *dots, R *dkeys, bool add, int parts, int part, int first_owner, int owners,  \
                            int sequence, int heads, int kv_heads, int dim, float scale) {                            \
        sliced_dkeys(qkv, keys, starts, dout, log_sums, dots, dkeys, add, Parts{parts, part, first_owner, owners},    \
                     Shape{sequence, heads, kv_heads, dim, scale});                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        sliced_dqueries_##NAME(const T *qkv, const T *keys, const token *starts, const T *dout,                       \
                               const float *log_sums, const float *dots, R *dqueries, size width, size first,         \
                               bool add, int parts, int part, int first_owner, int owners, int sequence, int heads,   \
                               int kv_heads, int dim, float scale) {                                                  \
        sliced_dqueries(qkv, keys, starts, dout, log_sums, dots, dqueries, width, first, add,                         \
                        Parts{parts, part, first_owner, owners}, Shape{sequence, heads, kv_heads, dim, scale});       \
    }
#define DEFINE(NAME, T) DEFINE_RESULT(NAME, T, T) DEFINE_RESULT(sums_##NAME, T, float)
FOR_TYPES(DEFINE)
