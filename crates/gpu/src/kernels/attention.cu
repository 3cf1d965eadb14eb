// Causal self-attention in tiles of TILE queries by TILE keys (arXiv 2205.14135), for every type, length and grouping.
// TILE is 32, or 16 where that is too much shared memory. With SOFT_CAP scores are bounded by it.
//
// qkv, dqkv: [batch, sequence, heads + 2·kv_heads, dim]; out, dout: [batch, sequence, heads, dim], dim ≤ 256;
// log_sums, dots: [batch, heads, sequence] f32. `probabilities` [batch, heads, sequence, sequence] is null for flash
// attention; plain attention writes it in the forward and reads it in the backward. The masked kernels also take starts
// [batch, sequence]: the first key that each query attends to. It never decreases within a sample.
// Grid (tiles, heads or kv_heads, batch), 256 threads: 16 × 16. A thread owns rows y, y+16, … and columns x, x+16, … of a
// product. Shared memory holds tiles in f32, [TILE, dim + 1]: the odd stride puts columns in different banks.
// Every sum is taken by one thread, or over the same lanes, in a fixed order, so results have the same bits every time.
// dkeys_dvalues loops over the query heads of its group in order and needs no atomics. The queries' gradients have a
// separate kernel, so scores are computed twice. Tiles beyond the diagonal or before all starts are skipped. For each
// tile of queries, all earlier keys and values are read once: 2·dim·sequence elements, mostly from L2.

#include "attention_tiles.cuh"

// The keys that a query attends to: all earlier ones, or with a mask those from its start on.
template <bool masked> struct Sight {
    const token *starts;  // of one sample; null without a mask

    // The first key of the first tile that a query, and so any later query, attends to.
    __device__ int first_tile(int query) const {
        if constexpr (masked) {
            return (int)starts[query] / TILE * TILE;
        } else {
            return 0;
        }
    }
    __device__ bool hides(int query, int key) const {
        if constexpr (masked) {
            return key < (int)starts[query];
        } else {
            return false;
        }
    }
};

template <bool masked> __device__ Sight<masked> sight_of(const token *starts, int sample, Shape shape) {
    return Sight<masked>{masked ? starts + (size)sample * shape.sequence : nullptr};
}

// Loads vectors first..first + TILE of a head, times `factor`; zeros after the last.
template <class T>
__device__ void load_tile(float *tile, const T *from, size row, int first, Shape shape, float factor) {
    for (int i = threadIdx.x; i < TILE * shape.dim; i += THREADS) {
        const int vector = i / shape.dim, column = i % shape.dim;
        const bool exists = first + vector < shape.sequence;
        tile[vector * shape.stride() + column] =
            exists ? factor * widen(from[(size)(first + vector) * row + column]) : 0.0f;
    }
}

// Rounds and stores rows first + y, first + y + 16, … of a head.
template <class T>
__device__ void store_vectors(const float (&sum)[OWN][COLUMNS], T *to, size row, int first, Shape shape,
                              const float (&factor)[OWN]) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < OWN; ++i) {
        const int vector = first + y + SIDE * i;
        if (vector >= shape.sequence) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = x + SIDE * c;
            if (column < shape.dim) to[(size)vector * row + column] = narrow<T>(sum[i][c] * factor[i]);
        }
    }
}

// Loops over the keys again, now that the sums are known.
template <bool masked, class T>
__device__ void write_probabilities(T *rows, const T *key, int first, const float (&log_sum)[OWN], float *queries,
                                    float *keys, Sight<masked> sight, Shape shape) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int first_key = 0; first_key < shape.sequence; first_key += TILE) {
        float score[OWN][OWN];
        if (first_key <= first && first_key >= sight.first_tile(first)) {
            __syncthreads();
            load_tile(keys, key, shape.qkv_row(), first_key, shape, 1.0f);
            __syncthreads();
            dot_tiles(score, queries, keys, shape);
        }
        for (int i = 0; i < OWN; ++i)
            for (int j = 0; j < OWN; ++j) {
                const int query = first + y + SIDE * i, at = first_key + x + SIDE * j;
                if (query >= shape.sequence || at >= shape.sequence) continue;
                rows[(size)query * shape.sequence + at] =
                    narrow<T>(at <= query && !sight.hides(query, at) ? expf(bounded(score[i][j]) - log_sum[i]) : 0.0f);
            }
    }
}

template <bool masked, class T>
__device__ void attention_forward(const T *qkv, T *out, float *log_sums, T *probabilities, const token *starts,
                                  Shape shape) {
    extern __shared__ float shared[];
    float *queries = shared, *keys = queries + TILE * shape.stride(), *pairs = keys + TILE * shape.stride();
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    // The last tiles attend to the most keys, so they start first.
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE;
    const size row = shape.qkv_row();
    const T *key = qkv + shape.start(sample, shape.heads + kv, row);
    const T *value = qkv + shape.start(sample, shape.heads + shape.kv_heads + kv, row);
    const Sight<masked> sight = sight_of<masked>(starts, sample, shape);
    load_tile(queries, qkv + shape.start(sample, head, row), row, first, shape, shape.scale);

    float sum[OWN][COLUMNS], maximum[OWN], total[OWN];
    clear(sum);
    for (int i = 0; i < OWN; ++i) maximum[i] = -INFINITE, total[i] = 0.0f;
    for (int first_key = sight.first_tile(first); first_key <= first; first_key += TILE) {
        __syncthreads();
        load_tile(keys, key, row, first_key, shape, 1.0f);
        __syncthreads();
        float score[OWN][OWN];
        dot_tiles(score, queries, keys, shape);
        for (int i = 0; i < OWN; ++i) {
            float highest = maximum[i];
            const int query = first + y + SIDE * i;
            for (int j = 0; j < OWN; ++j) {
                const int at = first_key + x + SIDE * j;
                score[i][j] = bounded(score[i][j]);
                if (at > query || (query < shape.sequence && sight.hides(query, at))) score[i][j] = -INFINITE;
                highest = fmaxf(highest, score[i][j]);
            }
            highest = side_reduce(highest, Maximum());
            // Without a mask, key 0 is in the first tile, so every maximum is finite from then on. With a mask, a query
            // may have no visible key so far. Its exponentials must be 0, not exp(−∞ + ∞).
            const float shift = masked && highest == -INFINITE ? 0.0f : highest;
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
        load_tile(keys, value, row, first_key, shape, 1.0f);
        __syncthreads();
        add_weighted<false>(sum, pairs, keys, shape);
    }

    float inverse[OWN], log_sum[OWN];
    for (int i = 0; i < OWN; ++i) inverse[i] = 1.0f / total[i], log_sum[i] = maximum[i] + logf(total[i]);
    store_vectors(sum, out + shape.start(sample, head, shape.out_row()), shape.out_row(), first, shape, inverse);
    const size score = shape.first_score(sample, head);
    if (probabilities) {
        write_probabilities(probabilities + score * shape.sequence, key, first, log_sum, queries, keys, sight, shape);
        return;
    }
    for (int i = 0; i < OWN; ++i) {
        const int query = first + y + SIDE * i;
        if (x == 0 && query < shape.sequence) log_sums[score + query] = log_sum[i];
    }
}

// dots = Σ dout ∘ out for every query: 16 threads per row, rows in memory order.
template <class T> __device__ void attention_dots(const T *out, const T *dout, float *dots, size rows, Shape shape) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const size row = blockIdx.x * (size)SIDE + y;
    float sum = 0.0f;
    if (row < rows)
        for (int column = x; column < shape.dim; column += SIDE)
            sum += widen(out[row * shape.dim + column]) * widen(dout[row * shape.dim + column]);
    sum = side_reduce(sum, Sum());
    const size token = row / shape.heads, sample = token / shape.sequence;
    if (x == 0 && row < rows)
        dots[(sample * shape.heads + row % shape.heads) * shape.sequence + token % shape.sequence] = sum;
}

// What the forward saved for the backward, from one head's first query on.
template <class T> struct Saved {
    const float *log_sums;
    const T *probabilities;
    const float *dots;
};

// From products of a tile of queries with a tile of keys, and of their gradients with the values: probabilities, and the
// gradients of the scores; zero for masked pairs.
template <bool masked, class T>
__device__ void score_gradients(float (&probability)[OWN][OWN], float (&dscore)[OWN][OWN], int first, int first_key,
                                Saved<T> saved, Sight<masked> sight, Shape shape) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < OWN; ++i) {
        const int query = first + y + SIDE * i;
        for (int j = 0; j < OWN; ++j) {
            const int key = first_key + x + SIDE * j;
            if (query >= shape.sequence || key > query || sight.hides(query, key)) {
                probability[i][j] = dscore[i][j] = 0.0f;
                continue;
            }
            const float score = bounded(probability[i][j]);
            probability[i][j] = saved.probabilities
                                    ? widen(saved.probabilities[(size)query * shape.sequence + key])
                                    : expf(score - saved.log_sums[query]);
            dscore[i][j] = probability[i][j] * (dscore[i][j] - saved.dots[query]);
            if (CAPPED) dscore[i][j] *= slope(score);
        }
    }
}

template <class T>
__device__ Saved<T> saved_of(const float *log_sums, const T *probabilities, const float *dots, int sample, int head,
                             Shape shape) {
    const size score = shape.first_score(sample, head);
    return Saved<T>{log_sums + score, probabilities ? probabilities + score * shape.sequence : nullptr,
                    dots + score};
}

template <bool masked, class T>
__device__ void attention_dkeys_dvalues(const T *qkv, const T *dout, const float *log_sums, const T *probabilities,
                                        const float *dots, T *dqkv, const token *starts, Shape shape) {
    extern __shared__ float shared[];
    const int tile = TILE * shape.stride();
    // Queries and their gradients take turns in `others`, so that heads of 256 fit into 64 KiB.
    float *keys = shared, *values = keys + tile, *others = values + tile;
    float *pairs = others + tile, *dpairs = pairs + TILE * SCORE_STRIDE;
    const int kv = blockIdx.y, sample = blockIdx.z, group = shape.heads / shape.kv_heads;
    const int first_key = blockIdx.x * TILE;
    const size row = shape.qkv_row(), out_row = shape.out_row();
    const size key = shape.start(sample, shape.heads + kv, row);
    const size value = shape.start(sample, shape.heads + shape.kv_heads + kv, row);
    const Sight<masked> sight = sight_of<masked>(starts, sample, shape);
    load_tile(keys, qkv + key, row, first_key, shape, 1.0f);
    load_tile(values, qkv + value, row, first_key, shape, 1.0f);

    float dkeys[OWN][COLUMNS], dvalues[OWN][COLUMNS];
    clear(dkeys);
    clear(dvalues);
    for (int head = kv * group; head < (kv + 1) * group; ++head) {
        const Saved<T> saved = saved_of(log_sums, probabilities, dots, sample, head, shape);
        for (int first = first_key; first < shape.sequence; first += TILE) {
            // Later tiles of queries start at this key or later.
            if (masked && sight.first_tile(first) > first_key) break;
            const auto load_queries = [&]() {
                __syncthreads();
                load_tile(others, qkv + shape.start(sample, head, row), row, first, shape, shape.scale);
                __syncthreads();
            };
            float probability[OWN][OWN], dscore[OWN][OWN];
            if (CAPPED || !saved.probabilities) {
                load_queries();
                dot_tiles(probability, others, keys, shape);
            }
            __syncthreads();
            load_tile(others, dout + shape.start(sample, head, out_row), out_row, first, shape, 1.0f);
            __syncthreads();
            dot_tiles(dscore, others, values, shape);
            score_gradients(probability, dscore, first, first_key, saved, sight, shape);
            store_pairs(pairs, probability);
            store_pairs(dpairs, dscore);
            __syncthreads();
            add_weighted<true>(dvalues, pairs, others, shape);
            load_queries();
            // The queries are already multiplied by the scale.
            add_weighted<true>(dkeys, dpairs, others, shape);
        }
    }
    float one[OWN];
    for (int i = 0; i < OWN; ++i) one[i] = 1.0f;
    store_vectors(dkeys, dqkv + key, row, first_key, shape, one);
    store_vectors(dvalues, dqkv + value, row, first_key, shape, one);
}

template <bool masked, class T>
__device__ void attention_dqueries(const T *qkv, const T *dout, const float *log_sums, const T *probabilities,
                                   const float *dots, T *dqkv, const token *starts, Shape shape) {
    extern __shared__ float shared[];
    const int tile = TILE * shape.stride();
    // Values and keys take turns in `others`.
    float *queries = shared, *gradients = queries + tile, *others = gradients + tile, *dpairs = others + tile;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE;
    const size row = shape.qkv_row(), out_row = shape.out_row();
    const T *key = qkv + shape.start(sample, shape.heads + kv, row);
    const T *value = qkv + shape.start(sample, shape.heads + shape.kv_heads + kv, row);
    const Saved<T> saved = saved_of(log_sums, probabilities, dots, sample, head, shape);
    const Sight<masked> sight = sight_of<masked>(starts, sample, shape);
    load_tile(queries, qkv + shape.start(sample, head, row), row, first, shape, shape.scale);
    load_tile(gradients, dout + shape.start(sample, head, out_row), out_row, first, shape, 1.0f);

    float dqueries[OWN][COLUMNS];
    clear(dqueries);
    for (int first_key = sight.first_tile(first); first_key <= first; first_key += TILE) {
        float probability[OWN][OWN], dscore[OWN][OWN];
        __syncthreads();
        load_tile(others, value, row, first_key, shape, 1.0f);
        __syncthreads();
        dot_tiles(dscore, gradients, others, shape);
        __syncthreads();
        load_tile(others, key, row, first_key, shape, 1.0f);
        __syncthreads();
        if (CAPPED || !saved.probabilities) dot_tiles(probability, queries, others, shape);
        score_gradients(probability, dscore, first, first_key, saved, sight, shape);
        store_pairs(dpairs, dscore);
        __syncthreads();
        add_weighted<false>(dqueries, dpairs, others, shape);
    }
    float scale[OWN];
    for (int i = 0; i < OWN; ++i) scale[i] = shape.scale;
    store_vectors(dqueries, dqkv + shape.start(sample, head, row), row, first, shape, scale);
}

// The kernels of one type, without and with a mask.
#define MASK , const token *starts
#define DEFINE_SIGHT(NAME, T, MASKED, PARAMETER, STARTS)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_forward_##NAME(const T *qkv, T *out, float *log_sums, T *probabilities PARAMETER, int sequence,     \
                                 int heads, int kv_heads, int dim, float scale) {                                     \
        attention_forward<MASKED>(qkv, out, log_sums, probabilities, STARTS,                                          \
                                  Shape{sequence, heads, kv_heads, dim, scale});                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_dkeys_dvalues_##NAME(const T *qkv, const T *dout, const float *log_sums, const T *probabilities,    \
                                       const float *dots, T *dqkv PARAMETER, int sequence, int heads, int kv_heads,   \
                                       int dim, float scale) {                                                        \
        attention_dkeys_dvalues<MASKED>(qkv, dout, log_sums, probabilities, dots, dqkv, STARTS,                       \
                                        Shape{sequence, heads, kv_heads, dim, scale});                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_dqueries_##NAME(const T *qkv, const T *dout, const float *log_sums, const T *probabilities,         \
                                  const float *dots, T *dqkv PARAMETER, int sequence, int heads, int kv_heads,        \
                                  int dim, float scale) {                                                             \
        attention_dqueries<MASKED>(qkv, dout, log_sums, probabilities, dots, dqkv, STARTS,                            \
                                   Shape{sequence, heads, kv_heads, dim, scale});                                     \
    }
#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_dots_##NAME(const T *out, const T *dout, float *dots, size rows, int sequence, int heads,           \
                              int kv_heads, int dim, float scale) {                                                   \
        attention_dots(out, dout, dots, rows, Shape{sequence, heads, kv_heads, dim, scale});                          \
    }                                                                                                                 \
    DEFINE_SIGHT(NAME, T, false, , nullptr)                                                                           \
    DEFINE_SIGHT(masked_##NAME, T, true, MASK, starts)
FOR_TYPES(DEFINE)
