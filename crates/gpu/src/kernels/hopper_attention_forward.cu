// Causal flash attention, forward, for Hopper: wgmma and TMA (arXiv 2205.14135, 2407.08608).
//
// qkv: [batch, sequence, heads + 2·kv_heads, HEAD_DIM]; out: [batch, sequence, heads, HEAD_DIM]; both bf16, 16-byte
// aligned. log_sums: [batch, heads, sequence] f32. counter: 0. The sequence is a multiple of 128; HEAD_DIM is a
// multiple of 8 and at most 128.
// architecture: sm_90a
//
// A block processes 128 queries at a time; its second and third warp group own 64 each. The groups loop over tiles of
// 128 keys and values, from the last visible tile to the first, which the first warp group loads. Scores stay in
// registers and become the probabilities that are the left factor of the next product. The two groups issue products in
// turn, so that one computes exponentials while the other multiplies.
//
// FLOPs per visible score: 4·HEAD_DIM. Batch 64, heads 12, sequence 1024, HEAD_DIM 64: 103 GFLOP, 0.13 ms at 800
// TFLOP/s, and 403 million exponentials, 0.10 ms at 16 per clock and multiprocessor. Bytes: 8·HEAD_DIM per query and
// head if kv_heads = heads, 0.40 GB or 0.09 ms at 4.3 TB/s.

#include "hopper_attention.cuh"

constexpr int CHUNK_BYTES = BLOCK * CHUNK * 2, VECTORS_BYTES = CHUNKS * CHUNK_BYTES; // of 128 vectors
constexpr int HALF_BYTES = CHUNK_BYTES / 2;             // from a group's vectors in a chunk to the other's
constexpr int BLOCKS = 2, TILES = PADDED == 64 ? 3 : 2; // that are under way or in use

struct Tensors {
    Tensor qkv, out;
};

struct Shared {
    // Vectors are stored in chunks: [CHUNKS][128][CHUNK].
    unsigned char queries[BLOCKS][VECTORS_BYTES]; // and results, on their way out
    unsigned char keys[TILES][VECTORS_BYTES], values[TILES][VECTORS_BYTES];
    barrier block_full[BLOCKS], block_empty[BLOCKS];
    barrier keys_full[TILES], keys_empty[TILES], values_full[TILES], values_empty[TILES];
    Item items[BLOCKS]; // none left: rank -1
};
static_assert(sizeof(Shared) == LAUNCH_OUT_SHARED && GROUP == LAUNCH_GROUP, "not what is launched");

// A group waits for its turn to issue products, and then passes the turn to the other group.
__device__ inline void await_turn(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(2 * GROUP) : "memory");
}

__device__ inline void pass_turn(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(3 + 1 - group), "n"(2 * GROUP) : "memory");
}

// Heads that start in the middle of a 32-byte sector would be loaded in many small pieces. So a tile starts one piece
// earlier, with the end of the previous head, and a tile that is wider than a head ends with the start of the next one.
struct Columns {
    int first;  // of a tile, in a row of all heads
    int before; // pieces of a tile that come before the head

    __device__ Columns(int head) : before(head * PIECES % 2) { first = (head * PIECES - before) * 8; }
};

struct Forward {
    const Tensors &tensors;
    float *log_sums;
    int *counter;
    Shape shape;
    Shared &shared;

    __device__ int key_of(const Item &item) const { return shape.heads + item.head / shape.heads_per_key(); }
    __device__ int value_of(const Item &item) const { return key_of(item) + shape.kv_heads; }
    // Items of rank 0 have the most keys: they are the last of a sequence.
    __device__ int block_of(const Item &item) const { return shape.blocks() - 1 - item.rank; }

    // One thread of a block: takes queries until none is left, and keeps the ring buffers full.
    __device__ void fetch_all() const {
        Place<BLOCKS> block;
        Place<TILES> tile;
        for (int index = atomicAdd(counter, 1);; block.next()) {
            barrier *full = &shared.block_full[block.index];
            await(&shared.block_empty[block.index], block.parity ^ 1);
            if (index >= shape.batch * shape.heads * shape.blocks()) {
                shared.items[block.index].rank = -1;
                arrive(full);
                return;
            }
            const Item item(index, shape.heads, shape);
            shared.items[block.index] = item;
            const Columns keys(key_of(item)), values(value_of(item));
            const int first = item.sample * shape.sequence, last = block_of(item);
            // The columns of the queries must be aligned with those of the keys.
            const int queries = item.head * HEAD_DIM - keys.before * 8;
            fetch_vectors(shared.queries[block.index], queries, first + last * BLOCK, full);
            for (int i = last; i >= 0; --i, tile.next()) {
                if (i == 0) index = atomicAdd(counter, 1); // whose answer comes while the ring is full
                const int row = first + i * BLOCK;
                await(&shared.keys_empty[tile.index], tile.parity ^ 1);
                fetch_vectors(shared.keys[tile.index], keys.first, row, &shared.keys_full[tile.index]);
                await(&shared.values_empty[tile.index], tile.parity ^ 1);
                fetch_vectors(shared.values[tile.index], values.first, row, &shared.values_full[tile.index]);
            }
        }
    }

    __device__ void fetch_vectors(unsigned char *to, int column, int row, barrier *full) const {
        expect_bytes(full, VECTORS_BYTES);
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            fetch(to + chunk * CHUNK_BYTES, tensors.qkv, column + chunk * CHUNK, row, full);
    }

    // A warp group: processes its half of every block of queries.
    template <int INDEX> __device__ void make() const {
        Place<BLOCKS> block;
        Place<TILES> tile;
        if (INDEX == 1) pass_turn(1);
        for (;; block.next()) {
            await(&shared.block_full[block.index], block.parity);
            const Item item = shared.items[block.index];
            if (item.rank < 0) break;
            Half<INDEX> half(*this, block.index);
            half.hide_other_heads(Columns(key_of(item)).before);
            half.begin(tile);
            int left = block_of(item);
            if (left == 0) {
                half.template end<true>(tile);
            } else {
                half.template step<true>(tile);
                while (--left > 0) half.template step<false>(tile);
                half.template end<false>(tile);
            }
            half.store(item);
        }
        if (INDEX == 0) await_turn(0); // which the other group has passed last
        if (thread() == 0) await_all_puts();
    }

    // The state of a warp group for a block of queries.
    template <int INDEX> struct Half {
        static constexpr int SEEN = INDEX == 0 ? BLOCK / 2 : BLOCK; // keys of the first tile that its queries see
        const Forward &of;
        Shared &shared;
        const int block;
        // Queries are along the rows. For each of its two rows a thread has the largest score, the sum of the weights
        // in its own columns, and the factor by which the last tile rescaled sums and results.
        float out[PADDED / 2], most[2], sums[2], shrink[2];
        word weights[BLOCK / 16][4];

        __device__ Half(const Forward &of, int block) : of(of), shared(of.shared), block(block) {}

        // Columns of other heads contribute zero if the queries are zero there and the keys are finite.
        __device__ void hide_other_heads(int before) const {
            if (HEAD_DIM == PADDED) return;
            for (int i = thread(); i < 64 * (PADDED / 8 - PIECES); i += GROUP) {
                const int vector = i % 64, other = i / 64, piece = other < before ? other : PIECES + other;
                *(uint4 *)(shared.queries[block] + piece / 8 * CHUNK_BYTES + INDEX * HALF_BYTES + vector * CHUNK * 2 +
                           (piece % 8 ^ vector % 8) * 16) = make_uint4(0, 0, 0, 0);
            }
            publish_shared();
            await_group(INDEX);
        }

        // Weights of the first tile.
        __device__ void begin(Place<TILES> tile) {
            float scores[SEEN / 2];
            await(&shared.keys_full[tile.index], tile.parity);
            await_turn(INDEX);
            issue_scores(scores, tile.index);
            pass_turn(INDEX);
            await_products<0>();
            arrive_warp(&shared.keys_empty[tile.index]);
            hide_later_keys(scores);
            take_exponentials<true>(scores);
            narrow_all(scores);
        }

        // Computes the weights of the next tile, and multiplies those of this tile with its values.
        template <bool FIRST> __device__ void step(Place<TILES> &tile) {
            const Place<TILES> before = tile;
            tile.next();
            float scores[BLOCK / 2];
            await(&shared.keys_full[tile.index], tile.parity);
            await_turn(INDEX);
            issue_scores(scores, tile.index);
            await(&shared.values_full[before.index], before.parity);
            issue_out<FIRST>(before.index);
            pass_turn(INDEX);
            await_products<1>();
            arrive_warp(&shared.keys_empty[tile.index]);
            take_exponentials<false>(scores);
            await_products<0>();
            arrive_warp(&shared.values_empty[before.index]);
#pragma unroll
            for (int i = 0; i < PADDED / 2; ++i) out[i] *= shrink[i / 2 % 2];
            narrow_all(scores);
        }

        template <bool FIRST> __device__ void end(Place<TILES> &tile) {
            await(&shared.values_full[tile.index], tile.parity);
            issue_out<FIRST>(tile.index);
            await_products<0>();
            arrive_warp(&shared.values_empty[tile.index]);
            tile.next();
        }

        template <int COUNT> __device__ void issue_scores(float (&scores)[COUNT], int tile) const {
            const Factor rows(shared.queries[block] + INDEX * HALF_BYTES), columns(shared.keys[tile]);
            begin_products();
#pragma unroll
            for (int k = 0; k < PADDED; k += 16) {
                const int at = k / CHUNK * CHUNK_BYTES + k % CHUNK * 2;
                multiply<false, false>(scores, rows + at, columns + at, k > 0);
            }
            end_products();
        }

        template <bool FIRST> __device__ void issue_out(int tile) {
            const Factor columns(shared.values[tile], CHUNK_BYTES);
            begin_products();
#pragma unroll
            for (int k = 0; k < (FIRST ? SEEN : BLOCK) / 16; ++k)
                multiply<true>(out, weights[k], columns + k * 16 * CHUNK * 2, !FIRST || k > 0);
            end_products();
        }

        // Masks the keys of the first tile that come after a query.
        template <int COUNT> __device__ static void hide_later_keys(float (&scores)[COUNT]) {
            const int row = 64 * INDEX + 16 * warp() + lane() / 4, column = lane() % 4 * 2;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (row + i / 2 % 2 * 8 < i / 4 * 8 + column + i % 2) scores[i] = -INFINITE;
        }

        template <bool FIRST, int COUNT> __device__ void take_exponentials(float (&scores)[COUNT]) {
            const float factor = of.shape.scale * LOG2_E;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float high = FIRST ? -INFINITE : most[half];
#pragma unroll
                for (int j = 0; j < COUNT / 4; ++j)
                    high = fmaxf(high, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
                high = fmaxf(high, SHUFFLE_XOR(high, 1));
                high = fmaxf(high, SHUFFLE_XOR(high, 2));
                const float shift = high * factor;
                shrink[half] = FIRST ? 0.0f : power_of_two(most[half] * factor - shift);
                most[half] = high;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < COUNT / 4; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float &x = scores[4 * j + 2 * half + i];
                        x = power_of_two(x * factor - shift);
                        sum += x;
                    }
                sums[half] = FIRST ? sum : sums[half] * shrink[half] + sum;
            }
        }

        template <int COUNT> __device__ void narrow_all(const float (&scores)[COUNT]) {
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) weights[i / 4][i % 4] = narrow_word<bf16>(&scores[2 * i]);
        }

        // Stored through the shared memory of the group's queries, which nobody reads any more.
        __device__ void store(const Item &item) {
            const Shape &shape = of.shape;
            const int first = of.block_of(item) * BLOCK + 64 * INDEX, before = Columns(of.value_of(item)).before;
            const size of_head = ((size)item.sample * shape.heads + item.head) * shape.sequence;
            const size row = of_head + first + 16 * warp() + lane() / 4;
            float inverse[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = sums[half];
                sum += SHUFFLE_XOR(sum, 1);
                sum += SHUFFLE_XOR(sum, 2);
                inverse[half] = 1.0f / sum;
                if (lane() % 4 == 0) of.log_sums[row + 8 * half] = most[half] * shape.scale + __logf(sum);
            }
            unsigned char *staging = shared.queries[block] + INDEX * HALF_BYTES;
#pragma unroll
            for (int k = 0; k < PADDED / 16; ++k) {
                word words[4];
                narrow_columns(words, out, k, inverse[0], inverse[1]);
                // What comes before the head is moved behind it, where nothing is stored from.
                int piece = 2 * k + lane() / 16;
                if (HEAD_DIM < PADDED) piece = piece < before ? PADDED / 8 - 1 : piece - before;
                store_matrices(piece_of_vector(shared_address(staging), CHUNK_BYTES, piece), words);
            }
            publish_shared();
            await_group(INDEX);
            if (thread() == 0) {
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    put(of.tensors.out, staging + chunk * CHUNK_BYTES, chunk * CHUNK, item.head,
                        item.sample * shape.sequence + first);
                end_puts();
                await_puts();
            }
            await_group(INDEX);
            arrive_warp(&shared.block_empty[block]);
        }
    };

    __device__ void begin_barriers() const {
        begin_ring(shared.block_full, 1, shared.block_empty);
        begin_ring(shared.keys_full, 1, shared.keys_empty);
        begin_ring(shared.values_full, 1, shared.values_empty);
    }

    __device__ void serve() const {
        if (threadIdx.x == 0) fetch_all();
    }
};

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
    hopper_attention_forward(const __grid_constant__ Tensors tensors, float *log_sums, int *counter, int batch,
                             int sequence, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shape shape{batch, sequence, heads, kv_heads, scale};
    divide(Forward{tensors, log_sums, counter, shape, *(Shared *)memory});
}
