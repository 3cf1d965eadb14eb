// Causal flash attention, backward, for Hopper: wgmma and TMA (arXiv 2205.14135, 2407.08608).
//
// qkv, dqkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out, dout: [batch, sequence, heads, HEAD_DIM]; all bf16.
// All pointers are 16-byte aligned. log_sums, from the forward, and dots, scratch: [batch, heads, sequence] f32.
// dquery_sums, scratch: an f32 for every element of the heads of RING bands, or of all heads. counters, scratch: 1 +
// COUNTED integers. The sequence is a multiple of 128; HEAD_DIM is a multiple of 8 and at most 128.
// architecture: sm_90a
//
//   hopper_attention_prepare    dots = Σ dout ∘ out, dquery_sums = 0, counters = 0, and dout_sums
//   hopper_attention_gradients  dkeys and dvalues; adds to dquery_sums per block of keys; dqueries from these sums
//
// For the gradient of the qkv bias, the kernels also sum over tokens what they read anyway. The probabilities of a
// query add up to 1, so the sum of dvalues equals the sum of dout. The sum of dkeys is 0, since softmax is invariant to
// a constant added to all scores of a query. dout_sums has one part per chunk of tokens of a prepare block, and
// dquery_partials two per tile: [parts, heads · HEAD_DIM] f32, or null.
//
// A block processes 128 keys at a time and loops over tiles of 64 queries, which its first warp group loads. The other
// two groups own 64 keys each. Keys are the rows of their products, so that probabilities in registers are directly the
// left factor of dvalues and dkeys. Only dscores go through shared memory, because dqueries sum over the keys of both
// groups. The dqueries of a tile are multiplied together with the next tile's dkeys, so that no group waits for the
// other's dscores.
//
// Sums of dqueries are taken in any order, in the register layout of the tensor cores: for 64 queries and eight
// columns, four numbers of each of 128 threads. There is room only for the heads of RING bands of items, which stay in
// the cache unless sequences are very long or many heads share keys. Each item also rounds, and then clears, its share
// of the sums of the band LAG before its own; all items of that band are finished by then. An otherwise idle thread
// counts the finished items of each band.
//
// FLOPs per visible score: 10·HEAD_DIM. Batch 64, heads 12, sequence 1024, HEAD_DIM 64: 258 GFLOP, 0.32 ms at 800
// TFLOP/s. A tile of 64 by 128 scores takes 1280 clocks of a multiprocessor's tensor cores. Meanwhile its products read
// 144 kB of shared memory, 1150 clocks, and its exponentials take 512. Bytes of both kernels: 18·HEAD_DIM per query and
// head if kv_heads = heads, 0.9 GB or 0.21 ms at 4.3 TB/s, most of it overlapped with the tensor cores.

#include "hopper_attention.cuh"

constexpr int KEYS = BLOCK, QUERIES = 64; // of a block and of a tile
constexpr int CHUNK_BYTES = 64 * CHUNK * 2, VECTORS_BYTES = CHUNKS * CHUNK_BYTES; // of 64 vectors
// Blocks of keys, tiles, and tiles of dscores in shared memory: being loaded or in use.
constexpr int BLOCKS = PADDED == 64 ? 2 : 1, TILES = PADDED == 64 ? 3 : 2, SLOTS = 3;
// Bands of heads whose sums of dqueries fit into scratch, after how many bands they are rounded, and number of
// counters.
constexpr int RING = LAUNCH_RING, LAG = RING / 2, COUNTED = 2 * RING;
// Columns of dqueries that each warp group computes: whole chunks, if there are several.
constexpr int FIRST_COLUMNS = PADDED == 64 ? 32 : 64, SECOND_COLUMNS = PADDED - FIRST_COLUMNS;

struct Tensors {
    Tensor qkv, dout, dqkv;
};

struct Shared {
    // Vectors are stored in chunks: [CHUNKS][vectors][CHUNK].
    unsigned char keys[BLOCKS][2 * VECTORS_BYTES], values[BLOCKS][2 * VECTORS_BYTES];
    unsigned char queries[TILES][VECTORS_BYTES], gradients[TILES][VECTORS_BYTES];
    unsigned char dscores[SLOTS][KEYS * QUERIES * 2]; // [keys][queries]
    unsigned char staging[2][VECTORS_BYTES];          // what each group of warps makes, on its way out
    float log_sums[TILES][QUERIES], dots[TILES][QUERIES];
    barrier block_full[BLOCKS], block_empty[BLOCKS], tile_full[TILES], tile_empty[TILES];
    barrier slot_full[SLOTS], slot_empty[SLOTS];
    barrier over_full[2], over_empty[2], sums_free[BLOCKS];
    Item items[BLOCKS]; // none left: rank -1
    int over[2];        // bands of items that are over; none left: -1
};
static_assert(sizeof(Shared) == LAUNCH_GRADIENTS_SHARED && GROUP == LAUNCH_GROUP, "not what is launched");

__device__ inline void add_to_memory(float *to, const float *x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

struct Gradients {
    const Tensors &tensors;
    const float *log_sums, *dots;
    float *dquery_sums, *dquery_partials;
    int *counter, *over; // items that were taken, and for COUNTED bands in turn how many are over
    Shape shape;
    Shared &shared;

    // Key heads of a band.
    __device__ int heads_together() const { return Item::heads_together(shape, gridDim.x); }
    // Tiles of queries of a whole band.
    __device__ int band_tiles() const { return heads_together() * shape.heads_per_key() * (shape.sequence / QUERIES); }

    // The first key of the item. The first keys of a sequence have the most queries.
    __device__ int row_of(const Item &item) const { return item.sample * shape.sequence + item.rank * KEYS; }

    // Index over all samples.
    __device__ int heads_of_keys() const { return shape.batch * shape.kv_heads; }

    // One thread of a block: takes blocks of keys until none is left, and keeps the ring buffers full.
    __device__ void fetch_all() const {
        Place<BLOCKS> block;
        Place<TILES> tile;
        for (;; block.next()) {
            barrier *full = &shared.block_full[block.index];
            await(&shared.block_empty[block.index], block.parity ^ 1);
            const int index = atomicAdd(counter, 1);
            if (index >= heads_of_keys() * shape.blocks()) {
                shared.items[block.index].rank = -1;
                arrive(full);
                return;
            }
            const Item item(index, shape.kv_heads, shape);
            shared.items[block.index] = item;
            expect_bytes(full, 4 * VECTORS_BYTES);
            for (int half = 0; half < 2; ++half) {
                const int at = half * CHUNK_BYTES, row = row_of(item) + 64 * half, key = shape.heads + item.head;
                fetch_vectors(shared.keys[block.index] + at, KEYS, tensors.qkv, key, row, full);
                fetch_vectors(shared.values[block.index] + at, KEYS, tensors.qkv, key + shape.kv_heads, row, full);
            }
            for (int i = 0, head = item.head * shape.heads_per_key(); i < shape.heads_per_key(); ++i, ++head)
                for (int query = item.rank * KEYS; query < shape.sequence; query += QUERIES, tile.next()) {
                    fetch_tile(tile, item.sample, head, query);
                    if (i > 0 || query > item.rank * KEYS) continue;
                    // The sums of that band are then complete and can be rounded, and its items have cleared the memory
                    // for this band.
                    await_over(item.band - LAG);
                    arrive(&shared.sums_free[block.index]);
                }
        }
    }

    // Waits until all items of a band are finished.
    __device__ void await_over(int band) const {
        if (band < 0) return;
        // Items of this band, and of those before it that share its counter.
        const int together = heads_together(), here = min(together, heads_of_keys() - band * together);
        const int all = (band / COUNTED * together + here) * shape.blocks();
        int now;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(over + band % COUNTED) : "memory");
        while (now < all);
    }

    // One thread: reports to other blocks that everything an item's two warp groups have added to sums, or cleared, is
    // visible.
    __device__ void count_over() const {
        for (Place<2> place;; place.next()) {
            await(&shared.over_full[place.index], place.parity);
            const int band = shared.over[place.index];
            arrive(&shared.over_empty[place.index]);
            if (band < 0) return;
            __threadfence();
            atomicAdd(over + band % COUNTED, 1);
        }
    }

    // Loads 64 vectors of a head. In shared memory, chunks of `vectors` follow each other.
    __device__ void fetch_vectors(unsigned char *to, int vectors, const Tensor &from, int head, int row,
                                  barrier *at) const {
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            fetch(to + chunk * vectors * CHUNK * 2, from, chunk * CHUNK, head, row, at);
    }

    __device__ void fetch_tile(const Place<TILES> &tile, int sample, int head, int query) const {
        barrier *full = &shared.tile_full[tile.index];
        await(&shared.tile_empty[tile.index], tile.parity ^ 1);
        expect_bytes(full, 2 * VECTORS_BYTES + 2 * QUERIES * 4);
        const int row = sample * shape.sequence + query;
        fetch_vectors(shared.queries[tile.index], QUERIES, tensors.qkv, head, row, full);
        fetch_vectors(shared.gradients[tile.index], QUERIES, tensors.dout, head, row, full);
        const size score = (size)(sample * shape.heads + head) * shape.sequence + query;
        fetch_floats(shared.log_sums[tile.index], log_sums + score, QUERIES, full);
        fetch_floats(shared.dots[tile.index], dots + score, QUERIES, full);
    }

    // A warp group: processes its half of every block of keys.
    template <int INDEX> __device__ void make() const {
        Place<BLOCKS> block;
        Place<TILES> tile;
        Place<SLOTS> slot;
        Place<2> told;
        for (;; block.next()) {
            await(&shared.block_full[block.index], block.parity);
            const Item item = shared.items[block.index];
            if (item.rank < 0) break;
            const int first = item.rank * (KEYS / QUERIES), end = shape.sequence / QUERIES;
            const int head = item.within % (item.count / shape.blocks()) * shape.heads_per_key();
            Half<INDEX> half(*this, block.index);
            float *sums = sums_of(item.band) + (size)(head * end + first) * (QUERIES * HEAD_DIM);
            half.template take<false>(tile, 0, slot, slot, false, sums);
            const int tiles = shape.heads_per_key() * (end - first);
            for (int i = 1, here = first; i < tiles; ++i) {
                const Place<SLOTS> before = slot;
                float *sums_before = sums;
                tile.next(), slot.next();
                sums += QUERIES * HEAD_DIM;
                if (++here == end) here = first, sums += first * (QUERIES * HEAD_DIM);
                if (i == 1) await(&shared.sums_free[block.index], block.parity);
                // The first tile is masked for the second group, so its sums start with the second tile.
                half.template take<true>(tile, here - first, slot, before, INDEX == 0 || i > 1, sums_before);
            }
            half.issue_dqueries(slot);
            await_products<0>();
            half.add_dqueries(slot, sums);
            tile.next(), slot.next();
            arrive_warp(&shared.block_empty[block.index]);
            half.store(item);
            half.round_band(item.band - LAG, 2 * item.within, 2 * item.count);
            tell_over<INDEX>(told, item.band);
        }
        tell_over<INDEX>(told, -1);
        // The last bands have no items after them, so they are rounded here.
        const int bands = (heads_of_keys() + heads_together() - 1) / heads_together();
        for (int band = bands - LAG; band < bands; ++band) {
            if (thread() == 0) await_over(band);
            await_group(INDEX);
            Half<INDEX>(*this, 0).round_band(band, 2 * blockIdx.x, 2 * gridDim.x);
        }
        if (thread() == 0) await_all_puts();
    }

    template <int INDEX> __device__ void tell_over(Place<2> &place, int band) const {
        await(&shared.over_empty[place.index], place.parity ^ 1);
        if (INDEX == 0 && thread() == 0) shared.over[place.index] = band;
        arrive_warp(&shared.over_full[place.index]);
        place.next();
    }

    // Tiles of a band.
    __device__ float *sums_of(int band) const {
        return dquery_sums + (size)(band % RING) * band_tiles() * (QUERIES * HEAD_DIM);
    }

    // The state of a warp group for a block of keys.
    template <int INDEX> struct Half {
        static constexpr int COLUMNS = INDEX == 0 ? FIRST_COLUMNS : SECOND_COLUMNS, FIRST = INDEX * FIRST_COLUMNS;
        const Gradients &of;
        Shared &shared;
        const int block;
        float dkeys[PADDED / 2], dvalues[PADDED / 2];
        // Products with keys along the rows and queries along the columns; and with 64 queries along the rows.
        float scores[QUERIES / 2], dscores[QUERIES / 2], dqueries[COLUMNS / 2];

        __device__ Half(const Gradients &of, int block) : of(of), shared(of.shared), block(block) {}

        // One tile of queries, which starts `after` · 64 after the block's first key, and the dqueries of the tile
        // before, if there was one.
        template <bool BEFORE>
        __device__ void take(Place<TILES> tile, int after, Place<SLOTS> slot, Place<SLOTS> before, bool add,
                             float *sums) {
            await(&shared.tile_full[tile.index], tile.parity);
            // The products are issued in both branches, because the compiler tracks asynchronous products along one
            // path only.
            if (INDEX == 1 && after == 0) {
                const word none[QUERIES / 16][4] = {};
                pass_dscores(none, slot);
                if (BEFORE) issue_dqueries(before);
            } else {
                add_tile(tile, after == INDEX, slot, add);
                if (BEFORE) issue_dqueries(before);
            }
            await_products<0>();
            arrive_warp(&shared.tile_empty[tile.index]);
            if (BEFORE) add_dqueries(before, sums);
        }

        // Leaves the products of dvalues and dkeys in flight.
        __device__ void add_tile(Place<TILES> tile, bool diagonal, Place<SLOTS> slot, bool add) {
            issue_dots(scores, shared.keys[block], shared.queries[tile.index]);
            issue_dots(dscores, shared.values[block], shared.gradients[tile.index]);
            await_products<1>();
            const float factor = of.shape.scale * LOG2_E;
            with_columns(shared.log_sums[tile.index], [&](int i, float log_sum) {
                scores[i] = power_of_two(scores[i] * factor - log_sum * LOG2_E);
            });
            if (diagonal) hide();
            word weights[QUERIES / 16][4], slopes[QUERIES / 16][4];
            narrow_all(weights, scores);
            issue_sums(dvalues, weights, shared.gradients[tile.index], add);
            await_products<1>();
            with_columns(shared.dots[tile.index],
                         [&](int i, float dot) { dscores[i] = scores[i] * (dscores[i] - dot); });
            narrow_all(slopes, dscores);
            issue_sums(dkeys, slopes, shared.queries[tile.index], add);
            pass_dscores(slopes, slot);
        }

        // The group's 64 vectors times all vectors of a tile.
        __device__ void issue_dots(float (&d)[QUERIES / 2], const unsigned char *left,
                                   const unsigned char *right) const {
            const Factor rows(left + INDEX * CHUNK_BYTES), columns(right);
            begin_products();
#pragma unroll
            for (int k = 0; k < PADDED; k += 16) {
                const int chunk = k / CHUNK, within = k % CHUNK * 2;
                multiply<false, false>(d, rows + (chunk * 2 * CHUNK_BYTES + within),
                                       columns + (chunk * CHUNK_BYTES + within), k > 0);
            }
            end_products();
        }

        // sum += weights · vectors of a tile; or = for the first tile.
        __device__ void issue_sums(float (&sum)[PADDED / 2], const word (&weights)[QUERIES / 16][4],
                                   const unsigned char *vectors, bool add) const {
            const Factor columns(vectors, CHUNK_BYTES);
            begin_products();
#pragma unroll
            for (int k = 0; k < QUERIES / 16; ++k)
                multiply<true>(sum, weights[k], columns + k * 16 * CHUNK * 2, add || k > 0);
            end_products();
        }

        // dqueries = dscores of both groups · keys, for the group's columns.
        __device__ void issue_dqueries(Place<SLOTS> slot) {
            await(&shared.slot_full[slot.index], slot.parity);
            const Factor left(shared.dscores[slot.index]);
            const Factor right(shared.keys[block] + FIRST / CHUNK * 2 * CHUNK_BYTES + FIRST % CHUNK * 2,
                               2 * CHUNK_BYTES);
            begin_products();
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k)
                multiply<true, true>(dqueries, left + k * 16 * QUERIES * 2, right + k * 16 * CHUNK * 2, k > 0);
            end_products();
        }

        __device__ void add_dqueries(Place<SLOTS> slot, float *sums) const {
            arrive_warp(&shared.slot_empty[slot.index]);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                const int piece = FIRST / 8 + j;
                if (piece < PIECES) add_to_memory(sums + (piece * GROUP + thread()) * 4, &dqueries[4 * j]);
            }
        }

        // Calls body(i, column) for the thread's elements of a product with queries along its columns.
        template <class Body> __device__ void with_columns(const float (&numbers)[QUERIES], Body body) const {
#pragma unroll
            for (int j = 0; j < QUERIES / 8; ++j) {
                const float2 pair = *(const float2 *)&numbers[8 * j + lane() % 4 * 2];
#pragma unroll
                for (int i = 0; i < 4; ++i) body(4 * j + i, i % 2 == 0 ? pair.x : pair.y);
            }
        }

        // Keys after the query have probability zero.
        __device__ void hide() {
            const int row = 16 * warp() + lane() / 4, column = lane() % 4 * 2;
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i)
                if (row + i / 2 % 2 * 8 > i / 4 * 8 + column + i % 2) scores[i] = 0.0f;
        }

        __device__ static void narrow_all(word (&words)[QUERIES / 16][4], const float (&x)[QUERIES / 2]) {
#pragma unroll
            for (int i = 0; i < QUERIES / 4; ++i) words[i / 4][i % 4] = narrow_word<bf16>(&x[2 * i]);
        }

        // Stores dscores in the group's half of a slot. A lane names a row of four matrices of 8 × 8, from column 16·k
        // on.
        __device__ void pass_dscores(const word (&dscores)[QUERIES / 16][4], Place<SLOTS> slot) const {
            const int row = 64 * INDEX + 16 * warp() + lane() % 16;
            const word at = shared_address(shared.dscores[slot.index]) + row * QUERIES * 2;
            await(&shared.slot_empty[slot.index], slot.parity ^ 1);
#pragma unroll
            for (int k = 0; k < QUERIES / 16; ++k)
                store_matrices(at + ((2 * k + lane() / 16) ^ lane() % 8) * 16, dscores[k]);
            publish_shared();
            arrive_warp(&shared.slot_full[slot.index]);
        }

        __device__ void store(const Item &item) const {
            const Shape &shape = of.shape;
            const int key = shape.heads + item.head, row = of.row_of(item) + 64 * INDEX;
            store_vectors(dvalues, 1.0f, key + shape.kv_heads, row);
            store_vectors(dkeys, shape.scale, key, row);
        }

        // Rounds the sums of a band, if there is one, and clears them: the group's tiles from `first` on, one of every
        // `step`.
        __device__ void round_band(int band, int first, int step) const {
            const Shape &shape = of.shape;
            const int tiles = shape.sequence / QUERIES, begin = band * of.heads_together() * shape.heads_per_key();
            const int end = min(of.band_tiles(), (shape.batch * shape.heads - begin) * tiles);
            if (band < 0) return;
            for (int i = first + INDEX; i < end; i += step) {
                float4 *from = (float4 *)(of.sums_of(band) + (size)i * (QUERIES * HEAD_DIM)) + thread();
                float x[PADDED / 2] = {};
#pragma unroll
                for (int j = 0; j < PIECES; ++j) {
                    const float4 four = __ldcg(from + j * GROUP);
                    x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
                }
#pragma unroll
                for (int j = 0; j < PIECES; ++j) __stcg(from + j * GROUP, make_float4(0, 0, 0, 0));
                // Counted over all samples, like key heads.
                const int head = begin + i / tiles;
                const int row = head / shape.heads * shape.sequence + i % tiles * QUERIES;
                store_vectors(x, shape.scale, head % shape.heads, row);
                if (of.dquery_partials) sum_vectors(row / QUERIES, head % shape.heads);
            }
        }

        // Sums what was just stored over the tokens: a thread has two columns of 32 vectors.
        __device__ void sum_vectors(int tile, int head) const {
            const int column = thread() % 64 * 2, half = thread() / 64;
            if (column >= HEAD_DIM) return;
            const unsigned char *from = shared.staging[INDEX] + column / CHUNK * CHUNK_BYTES + column % 8 * 2;
            float sum[2] = {};
#pragma unroll 8
            for (int vector = 32 * half; vector < 32 * half + 32; ++vector) {
                const int piece = column % CHUNK / 8 ^ vector % 8;
                float pair[2];
                widen_word<bf16>(*(const word *)(from + vector * CHUNK * 2 + piece * 16), pair);
                sum[0] += pair[0], sum[1] += pair[1];
            }
            const size part = 2 * tile + half;
            *(float2 *)(of.dquery_partials + part * (of.shape.heads * HEAD_DIM) + head * HEAD_DIM + column) =
                make_float2(sum[0], sum[1]);
        }

        __device__ void store_vectors(const float (&x)[PADDED / 2], float scale, int head, int row) const {
            unsigned char *staging = shared.staging[INDEX];
            // The last vectors may still be in flight to memory.
            if (thread() == 0) await_puts();
            await_group(INDEX);
#pragma unroll
            for (int k = 0; k < PADDED / 16; ++k) {
                word words[4];
                narrow_columns(words, x, k, scale, scale);
                store_matrices(piece_of_vector(shared_address(staging), CHUNK_BYTES, 2 * k + lane() / 16), words);
            }
            publish_shared();
            await_group(INDEX);
            if (thread() > 0) return;
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                put(of.tensors.dqkv, staging + chunk * CHUNK_BYTES, chunk * CHUNK, head, row);
            end_puts();
        }
    };

    __device__ void begin_barriers() const {
        begin_ring(shared.block_full, 1, shared.block_empty);
        begin_ring(shared.tile_full, 1, shared.tile_empty);
        begin_ring(shared.slot_full, 2 * GROUP / WARP, shared.slot_empty);
        for (int i = 0; i < 2; ++i) {
            begin_barrier(&shared.over_full[i], 2 * GROUP / WARP);
            begin_barrier(&shared.over_empty[i], 1);
        }
        for (int i = 0; i < BLOCKS; ++i) begin_barrier(&shared.sums_free[i], 1);
    }

    __device__ void serve() const {
        if (threadIdx.x == 0) fetch_all();
        if (threadIdx.x == WARP) count_over();
    }
};

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
    hopper_attention_gradients(const __grid_constant__ Tensors tensors, const float *log_sums, const float *dots,
                               float *dquery_sums, float *dquery_partials, int *counters, int batch, int sequence,
                               int heads, int kv_heads, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shape shape{batch, sequence, heads, kv_heads, scale};
    divide(Gradients{tensors, log_sums, dots, dquery_sums, dquery_partials, counters, counters + 1, shape,
                     *(Shared *)memory});
}

// A thread has 16 bytes of a head, for all tokens of a chunk; 8 or 16 threads share a head. Grid: heads, chunks.
extern "C" __global__ void __launch_bounds__(GROUP)
    hopper_attention_prepare(const bf16 *__restrict__ out, const bf16 *__restrict__ dout, float *__restrict__ dots,
                             float *__restrict__ dquery_sums, float *__restrict__ dout_sums, int *__restrict__ counters,
                             int batch, int sequence, int heads, int kv_heads, int blocks) {
    constexpr int SIDE = PIECES <= 8 ? 8 : 16;
    static_assert(GROUP / SIDE == LAUNCH_HEADS, "not what is launched");
    const int head = blockIdx.x * LAUNCH_HEADS + threadIdx.x / SIDE, piece = threadIdx.x % SIDE;
    const bool exists = head < heads && piece < PIECES;
    const int tokens = batch * sequence, chunk = (tokens + gridDim.y - 1) / gridDim.y;
    const int first = blockIdx.y * chunk, end = min(first + chunk, tokens);
    const size row = heads * HEAD_DIM, column = head * HEAD_DIM + piece * PACK;
    // The dots of a head are contiguous.
    float *end_of_sample = dots + ((size)(first / sequence) * heads + head + 1) * sequence;
    float *to = end_of_sample - sequence + first % sequence;
    float sums[PACK] = {};
#pragma unroll 4
    for (int token = first; token < end; ++token) {
        const size at = token * row + column;
        float dot = 0.0f;
        if (exists) {
            float left[PACK], right[PACK];
            load(out + at, left);
            load(dout + at, right);
#pragma unroll
            for (int i = 0; i < PACK; ++i) dot += left[i] * right[i], sums[i] += right[i];
        }
#pragma unroll
        for (int mask = SIDE / 2; mask > 0; mask /= 2) dot += SHUFFLE_XOR(dot, mask);
        if (piece == 0 && exists) *to = dot;
        if (++to == end_of_sample) to += (heads - 1) * sequence, end_of_sample += heads * sequence;
    }
    if (dout_sums && exists) store(dout_sums + blockIdx.y * row + column, sums);
    const int threads = gridDim.x * gridDim.y * GROUP;
    const int thread = (blockIdx.y * gridDim.x + blockIdx.x) * GROUP + threadIdx.x;
    const int together = Item::heads_together(Shape{batch, sequence, heads, kv_heads}, blocks) * (heads / kv_heads);
    const size room = (size)min(RING * together, batch * heads) * sequence * HEAD_DIM / 4;
    float4 *cleared = (float4 *)dquery_sums;
    for (size i = thread; i < room; i += threads) cleared[i] = make_float4(0, 0, 0, 0);
    if (thread <= COUNTED) counters[thread] = 0;
}
