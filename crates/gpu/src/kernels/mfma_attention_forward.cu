// Causal flash attention on AMD's matrix cores, forward (arXiv 2205.14135, 2307.08691).
//
// qkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out: [batch, sequence, heads, HEAD_DIM]; both 16-byte aligned.
// log_sums: [batch, heads, sequence] f32, natural logarithms. The masked kernel takes starts, [batch, sequence]: the
// first key that each query attends to; it never decreases within a sample. Grid (tiles, heads, batch). A wave owns 32
// queries, one for each pair of lanes, so that maxima and sums are taken within a lane and over one exchange. The next
// tile is read from global memory while this one is used. Keys that are masked for all queries of a block are not read.
//
// The sliced kernel is for context parallelism, with the tensors of sliced_attention.cu: keys are apart from the queries,
// starts may be null, and with `before` the result is joined with that of other keys. `wide` results are in f32.
//
// FLOPs: 4·HEAD_DIM per visible score, 4·32·DIMS where a vector is padded. Bytes: 8·HEAD_DIM per query and head if
// kv_heads = heads; keys and values are read again from L2 for every 128 queries.

#include "mfma.cuh"
#include "mfma_slices.cuh"

constexpr int KEYS = 64;

// Where the results of queries go. `before` has those over other keys, whose log-sum-exps are in log_sums; it may be null.
struct Results {
    const float *before;
    void *out;
    bool wide;
    float *log_sums;

    // Stores what a lane has of the query at `at`: sums of values times exponentials, and the sum and the maximum of these.
    __device__ __forceinline__ void store(const tile (&sums)[DIMS], float maximum, float total, size at,
                                          float *log_sum) const {
        // A query may see no key.
        float share = total > 0.0f ? 1.0f / total : 0.0f, old_share = 0.0f, joined = maximum + logf(total);
        if (before) {
            const float earlier = *log_sum, highest = fmaxf(earlier, joined);
            const float both =
                highest == -INFINITE ? highest : highest + logf(expf(earlier - highest) + expf(joined - highest));
            if (both != -INFINITE) old_share = expf(earlier - both), share *= expf(joined - both);
            joined = both;
        }
        if (Lane().half == 0) *log_sum = joined;
        const float *old = before ? before + at : nullptr;
        if (wide)
            store_vector(sums, share, static_cast<float *>(out) + at, old, old_share);
        else
            store_vector(sums, share, static_cast<element *>(out) + at, old, old_share);
    }
};

template <bool masked, class Layout>
__device__ inline void attention_forward(const element *qkv, const element *keys, const token *all_starts,
                                         Results results, Layout layout) {
    __shared__ Rows<KEYS> key_tile;
    __shared__ Columns<KEYS> value_tile;
    const Lane lane;
    const Shape shape = layout.shape;
    const int head = blockIdx.y, sample = blockIdx.z, kv = head / (shape.heads / shape.kv_heads);
    // The last tiles attend to the most keys, so they start first.
    Slice own = layout.query_block(gridDim.x - 1 - blockIdx.x);
    const Starts<masked> starts = {all_starts, (size)sample * shape.sequence};
    KeyTiles<KEYS, Layout> tiles(layout, starts.uniform(own.first),
                                 min(own.first + BLOCK, own.end) - 1 + own.offset);
    own.first += OWN * lane.wave;
    const Sight<masked> sight(starts, own, lane.column);
    const int query = own.first + lane.column;
    const bool exists = query < own.end;
    const int row = shape.qkv_row();
    const Vector vector(qkv + shape.start(sample, head, row) + (size)query * row, exists);

    Staged<KEYS> staged;
    const auto load_tile = [&]() {
        const element *key = keys + layout.key_start(sample, kv), *value = key + shape.kv_heads * HEAD_DIM;
        staged.load(key, layout.key_row(), value, layout.key_row(), tiles.tile.first, tiles.tile.end);
    };
    key_tile.clear_padding();
    if (tiles.exist()) load_tile();

    const float factor = shape.factor();
    tile sums[DIMS];
    clear(sums);
    float maximum = -INFINITE, total = 0.0f;
    while (tiles.exist()) {
        // Nobody reads the previous tile any more.
        __syncthreads();
        staged.each([&](bool is_key, int group, int piece, const words4(&rows)[4]) {
            if (is_key)
                store_rows(key_tile, group, piece, rows);
            else
                value_tile.store(group, piece, rows);
        });
        __syncthreads();
        Slice here = tiles.tile;
        tiles.next();
        if (tiles.exist()) load_tile();
        if (!sight.any(here, KEYS)) continue;

        tile scores[KEYS / 32];
        float highest = maximum;
#pragma unroll
        for (int block = 0; block < KEYS / 32; ++block, here.first += 32) {
            scores[block] = key_tile.dot(block, vector);
            if (!sight.all(here, 32)) sight.hide(scores[block], here, -INFINITE);
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
            value_tile.add_weighted(sums, block, Weights(scores[block]));
        }
    }

    total = column_reduce(total, Sum());
    if (!exists) return;
    const int out_row = shape.out_row();
    results.store(sums, maximum * shape.scale, total, shape.start(sample, head, out_row) + (size)query * out_row,
                  results.log_sums + shape.first_score(sample, head) + query);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mfma_sliced_forward(const element *qkv, const element *keys, const token *starts, const float *before, void *out,
                        bool wide, float *log_sums, int parts, int part, int first_owner, int owners, int sequence,
                        int heads, int kv_heads, float scale) {
    attention_forward<true>(qkv, keys, starts, Results{before, out, wide, log_sums},
                            Parts{parts, part, first_owner, owners, Shape{sequence, heads, kv_heads, scale}});
}

// Without and with a mask.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mfma_attention_forward(const element *qkv, element *out, float *log_sums, int sequence, int heads, int kv_heads,
                           float scale) {
    attention_forward<false>(qkv, qkv, nullptr, Results{nullptr, out, false, log_sums},
                             Whole{Shape{sequence, heads, kv_heads, scale}});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mfma_attention_forward_masked(const element *qkv, element *out, float *log_sums, const token *starts, int sequence,
                                  int heads, int kv_heads, float scale) {
    attention_forward<true>(qkv, qkv, starts, Results{nullptr, out, false, log_sums},
                            Whole{Shape{sequence, heads, kv_heads, scale}});
}
