// A product with GELU or GELU's derivative as epilogue, for Hopper: wgmma and TMA.
//
//   product_gelu         kept = x · weightᵀ + bias, out = GELU(kept)                   weight [n, k]
//   product_derivative   out = (x · weight) ∘ GELU'(kept), partial = sums over its rows  weight [k, n]
//
// kept is the pre-activation. x [m, k]; kept, out [m, n]; bias [n]; partial [⌈m / 128⌉, n] f32: one row of sums per row
// of tiles. All are bf16 but the sums. n and k are multiples of 8, and all pointers are 16-byte aligned.
// architecture: sm_90a
//
// A block's first warp group loads tiles of x and weight, in slices of 64 along k, into a ring buffer of five. The
// other two groups take the tiles of the result in turn: while one multiplies, the other applies GELU to its last tile,
// so that the tensor cores do not wait for it. Two blocks form a cluster: they compute vertically adjacent tiles, and
// each loads half of the weights' tile for both. Tiles of kept and out are loaded and stored through a buffer of the
// group.
//
// Taking turns guarantees that a barrier's phase is complete before the next one is waited for.
//
// The epilogue of one group slows the other's products down, the more the denser its instructions are. If k is long
// enough to hide it, GELU' is computed in a loop that leaves gaps.
//
// [65536, 3072] = [65536, 768] · [768, 3072]: 309 GFLOP, 0.45 ms at 680 TFLOP/s. The derivative's sums need no separate
// pass, which would read 403 MB in 94 µs.

#include "hopper_instructions.cuh"

struct Matrices {
    Tensor x, weight, kept, out;
};

constexpr int TILE = 128;  // rows and columns of the result
constexpr int SLICE = 64;  // along k: rows of 128 bytes, which the copy engine swizzles in groups of eight
constexpr int RING = 5;    // slices that are under way or being multiplied
constexpr int CLUSTER = 2; // blocks that share the weights' slices
constexpr int LONG = 22;   // slices that take as long as such a loop and the rest of a tile
constexpr int BAND = 8;    // rows of tiles, for a whole cluster, that are worked on together so that caches hold them
constexpr int HALF_BYTES = 64 * 128;                 // 64 rows of a slice, or a slice of 64 columns
constexpr int SLICE_BYTES = 4 * HALF_BYTES;          // x's and the weights'
constexpr int STAGING_BYTES = TILE * TILE * 2;       // two halves of 64 columns
constexpr int COLUMN_BYTES = 64 * 128 * 2;           // one of them
enum Named { TURN = 1, WITHIN = 3 };                 // barriers, for each of the two groups

struct Shared {
    unsigned char ring[RING][SLICE_BYTES];
    unsigned char staging[2][STAGING_BYTES];
    barrier full[RING], empty[RING], loaded[2];
};
static_assert(sizeof(Shared) == 229472, "not what is launched");

__device__ inline void arrive_at(barrier *at, int block_of_cluster) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(at)), "r"(block_of_cluster)
                 : "memory");
}

// Synchronizes all threads of the cluster.
__device__ inline void await_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A group waits for its turn to multiply, and then passes the turn to the other group.
__device__ inline void await_turn(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(TURN + group), "n"(2 * GROUP) : "memory");
}

__device__ inline void pass_turn(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(TURN + 1 - group), "n"(2 * GROUP) : "memory");
}

__device__ inline void await_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(WITHIN + group), "n"(GROUP) : "memory");
}

// Loads the box of a matrix to the same address in all blocks of the cluster. Each block is notified at its own
// barrier.
__device__ inline void fetch_for_all(void *to, const Tensor &from, int column, int row, barrier *at) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(&from), "r"(column), "r"(row), "r"(shared_address(at)),
                   "h"((unsigned short)((1 << CLUSTER) - 1))
                 : "memory");
}

constexpr float SLOPE = 0.7978845608028654f; // √(2/π)
constexpr float CUBIC = 0.044715f;

// tanh in one instruction, with a relative error of 2^-11.
__device__ inline float quick_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float gelu(float x) {
    const float half = 0.5f * x;
    return half + half * quick_tanh(x * (x * x * (SLOPE * CUBIC) + SLOPE));
}

__device__ inline float gelu_derivative(float x) {
    const float square = x * x, t = quick_tanh(x * (square * (SLOPE * CUBIC) + SLOPE));
    const float half = 0.5f * t + 0.5f, slope = x * (square * (6.0f * SLOPE * CUBIC) + 2.0f * SLOPE);
    return half + half * (slope - half * slope);
}

// The tiles of a block, in bands from left to right, each column from top to bottom.
struct Tiles {
    int rows, columns;

    __device__ Tiles(int m, int n) : rows((m + TILE * CLUSTER - 1) / (TILE * CLUSTER)), columns((n + TILE - 1) / TILE) {}

    // The tile of a block at a position, if any: its first row and column.
    __device__ bool at(int position, int &row, int &column) const {
        const int index = blockIdx.x / CLUSTER + position * (gridDim.x / CLUSTER);
        const int band = index / (BAND * columns), within = index % (BAND * columns);
        const int height = rows - band * BAND < BAND ? rows - band * BAND : BAND;
        if (index >= rows * columns) return false;
        row = ((band * BAND + within % height) * CLUSTER + blockIdx.x % CLUSTER) * TILE;
        column = within / height * TILE;
        return true;
    }
};

// A slot of the ring buffer, and the parity of how often the ring has wrapped.
struct Place {
    int slice, parity;

    __device__ Place(int steps) : slice(steps % RING), parity(steps / RING % 2) {}

    __device__ void next() {
        if (++slice < RING) return;
        slice = 0;
        parity ^= 1;
    }
};

template <bool DERIVATIVE> struct Product {
    const Matrices &matrices;
    const word *bias;
    float *partial;
    int m, n, slices;
    Shared &shared;

    // One thread of a block: keeps the ring buffer full.
    __device__ void fetch_slices() const {
        const Tiles tiles(m, n);
        const int member = blockIdx.x % CLUSTER;
        Place place(0);
        for (int position = 0, row, column; tiles.at(position, row, column); ++position) {
            for (int slice = 0; slice < slices; ++slice, place.next()) {
                unsigned char *to = shared.ring[place.slice];
                barrier *full = &shared.full[place.slice];
                await(&shared.empty[place.slice], place.parity ^ 1);
                expect_bytes(full, SLICE_BYTES);
                fetch(to, matrices.x, slice * SLICE, row, full);
                const int along_n = column + 64 * member, along_k = slice * SLICE;
                fetch_for_all(to + (2 + member) * HALF_BYTES, matrices.weight, DERIVATIVE ? along_n : along_k,
                              DERIVATIVE ? along_k : along_n, full);
            }
        }
    }

    // A warp group: computes every other tile.
    __device__ void make_tiles(int group) const {
        const Tiles tiles(m, n);
        const int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
        int position = group, row, column;
        if (group == 1) pass_turn(group);
        for (; tiles.at(position, row, column); position += 2) {
            float d[2][64];
            for (int i = 0; i < 64; ++i) d[0][i] = d[1][i] = 0;
            word shift[16] = {};
            if (!DERIVATIVE && bias) load_bias(shift, column, lane);
            if (DERIVATIVE && thread == 0) fetch_kept(row, column, group);
            await_turn(group);
            multiply_slices(d, Place(position * slices), lane, [=] { pass_turn(group); });
            if constexpr (DERIVATIVE) {
                await(&shared.loaded[group], position / 2 % 2);
                if (slices < LONG) finish_derivative<false>(d, row, column, warp, lane, group);
                else differentiate_kept(group), finish_derivative<true>(d, row, column, warp, lane, group);
            } else {
                finish_gelu(d, shift, row, column, warp, lane, group);
            }
        }
        // The turn that was passed last belongs to this group, if the other group computed the last tile or there was
        // none.
        if (position == 0 || tiles.at(position - 1, row, column)) await_turn(group);
        if (thread == 0) await_all_puts();
    }

    // Loads the pre-activation, whose GELU' is the other factor.
    __device__ void fetch_kept(int row, int column, int group) const {
        expect_bytes(&shared.loaded[group], STAGING_BYTES);
        for (int half = 0; half < 2; ++half) {
            unsigned char *to = shared.staging[group] + half * COLUMN_BYTES;
            fetch(to, matrices.kept, column + 64 * half, row, &shared.loaded[group]);
        }
    }

    // The bias of the lane's columns 8·j + 2·(lane % 4) and the next, loaded before it is needed.
    __device__ void load_bias(word (&shift)[16], int column, int lane) const {
#pragma unroll
        for (int j = 0; j < 16; ++j)
            if (column + 8 * j < n) shift[j] = __ldg(bias + column / 2 + 4 * j + lane % 4);
    }

    // `issued` is called when the last product has been issued.
    template <class Issued>
    __device__ void multiply_slices(float (&d)[2][64], Place place, int lane, Issued issued) const {
        int before = 0;
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice, place.next()) {
            await(&shared.full[place.slice], place.parity);
            const unsigned char *at = shared.ring[place.slice];
            const Factor x(at), weight(at + 2 * HALF_BYTES, DERIVATIVE ? HALF_BYTES : 16);
            begin_products();
#pragma unroll
            for (int step = 0; step < SLICE / 16; ++step) {
                const Factor right = weight + step * (DERIVATIVE ? 16 * 128 : 32);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    multiply<false, DERIVATIVE>(d[half], x + (half * HALF_BYTES + step * 32), right, true);
            }
            end_products();
            await_products<1>();
            if (slice > 0) release(before, lane);
            before = place.slice;
        }
        issued();
        await_products<0>();
        release(before, lane);
    }

    // A warp reports to both blocks of the cluster that it has read a slice.
    __device__ void release(int slice, int lane) const {
        if (lane < CLUSTER) arrive_at(&shared.empty[slice], lane);
    }

    // d[half][4·j + i] is at row 64·half + 16·warp + lane / 4 + 8·(i / 2), column 8·j + 2·(lane % 4) + i % 2. Columns 8·j to
    // 8·j + 15 of the warp's 16 rows are four matrices, in the order of i / 2; the lane's row of them:
    __device__ word place_of(int half, int j, int warp, int lane, int group) const {
        const int row = 64 * half + 16 * warp + lane / 8 % 2 * 8 + lane % 8, chunk = j + lane / 16;
        return shared_address(shared.staging[group]) + chunk / 8 * COLUMN_BYTES + row * 128 + (chunk % 8 ^ lane % 8) * 16;
    }

    __device__ void put_staging(const Tensor &to, int row, int column, int group) const {
        publish_shared();
        await_group(group);
        if (threadIdx.x % GROUP > 0) return;
        for (int half = 0; half < 2; ++half) put(to, shared.staging[group] + half * COLUMN_BYTES, column + 64 * half, row);
        end_puts();
    }

    __device__ void finish_gelu(const float (&d)[2][64], const word (&shift)[16], int row, int column, int warp, int lane,
                                int group) const {
        // The last tile may still be in flight to memory.
        if (threadIdx.x % GROUP == 0) await_puts();
        await_group(group);
        // Matrices p of a warp: half p % 2, columns 16·(p / 2) on.
#pragma unroll
        for (int p = 0; p < 16; ++p) {
            const int j = p / 2 * 2;
            word words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x[2];
                widen_word<bf16>(shift[j + i / 2], x);
                x[0] += d[p % 2][4 * j + 2 * i], x[1] += d[p % 2][4 * j + 2 * i + 1];
                words[i] = narrow_word<bf16>(x);
            }
            store_matrices(place_of(p % 2, j, warp, lane, group), words);
        }
        put_staging(matrices.kept, row, column, group);
        word words[16][4];
#pragma unroll
        for (int p = 0; p < 16; ++p) load_matrices(words[p], place_of(p % 2, p / 2 * 2, warp, lane, group));
#pragma unroll
        for (int p = 0; p < 16; ++p)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x[2];
                widen_word<bf16>(words[p][i], x);
                x[0] = gelu(x[0]), x[1] = gelu(x[1]);
                words[p][i] = narrow_word<bf16>(x);
            }
        if (threadIdx.x % GROUP == 0) await_puts();
        await_group(group);
#pragma unroll
        for (int p = 0; p < 16; ++p) store_matrices(place_of(p % 2, p / 2 * 2, warp, lane, group), words[p]);
        put_staging(matrices.out, row, column, group);
    }

    // Replaces the pre-activation by GELU', which is below 1.13: in f16, to 2^-11.
    __device__ void differentiate_kept(int group) const {
        uint4 *piece = (uint4 *)shared.staging[group] + threadIdx.x % GROUP;
#pragma unroll 1
        for (int i = 0; i < STAGING_BYTES / 16 / GROUP; ++i, piece += GROUP) {
            word words[4] = {piece->x, piece->y, piece->z, piece->w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x[2];
                widen_word<bf16>(words[j], x);
                x[0] = gelu_derivative(x[0]), x[1] = gelu_derivative(x[1]);
                words[j] = narrow_word<f16>(x);
            }
            *piece = make_uint4(words[0], words[1], words[2], words[3]);
        }
        await_group(group);
    }

    template <bool DIFFERENTIATED>
    __device__ void finish_derivative(const float (&d)[2][64], int row, int column, int warp, int lane, int group) const {
        float sums[32] = {};
        // Four matrices of both halves at once, so that loads overlap.
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            word words[4][4];
#pragma unroll
            for (int p = 0; p < 4; ++p) load_matrices(words[p], place_of(p % 2, j + p / 2 * 2, warp, lane, group));
#pragma unroll
            for (int p = 0; p < 4; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = j + p / 2 * 2;
                    float x[2];
                    if constexpr (DIFFERENTIATED) {
                        widen_word<f16>(words[p][i], x);
                    } else {
                        widen_word<bf16>(words[p][i], x);
                        x[0] = gelu_derivative(x[0]), x[1] = gelu_derivative(x[1]);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        x[e] *= d[p % 2][4 * at + 2 * i + e];
                        sums[2 * (at + i / 2) + e] += x[e];
                    }
                    words[p][i] = narrow_word<bf16>(x);
                }
            SYNCHRONIZE_WARP();
#pragma unroll
            for (int p = 0; p < 4; ++p) store_matrices(place_of(p % 2, j + p / 2 * 2, warp, lane, group), words[p]);
        }
        put_staging(matrices.out, row, column, group);
        const int thread = threadIdx.x % GROUP;
        if (thread == 0) await_puts();
        await_group(group);
        // The rows of eight lanes of each warp start in different banks.
        float(*parts)[TILE + 8] = (float(*)[TILE + 8])shared.staging[group];
#pragma unroll
        for (int j = 0; j < 16; ++j)
            *(float2 *)&parts[8 * warp + lane / 4][8 * j + lane % 4 * 2] = make_float2(sums[2 * j], sums[2 * j + 1]);
        await_group(group);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < GROUP / 4; ++i) sum += parts[i][thread];
        if (column + thread < n && row < m) partial[row / TILE * (size)n + column + thread] = sum;
        // TMA will write here next.
        publish_shared();
        await_group(group);
    }

    __device__ void run() const {
        // The value is uniform over a warp; the shuffle lets the compiler know it.
        const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0);
        if (threadIdx.x == 0) {
            for (int i = 0; i < RING; ++i) {
                begin_barrier(&shared.full[i], 1);
                begin_barrier(&shared.empty[i], CLUSTER * 4);
            }
            for (int i = 0; i < 2; ++i) begin_barrier(&shared.loaded[i], 1);
            asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
        }
        await_cluster();
        if (group == 0) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (threadIdx.x == 0) fetch_slices();
            SYNCHRONIZE_WARP();
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            make_tiles(group - 1);
        }
        // No block exits while another block may still arrive at its barriers.
        await_cluster();
    }
};

#define DEFINE(NAME, DERIVATIVE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) __cluster_dims__(CLUSTER, 1, 1)                        \
        NAME(const __grid_constant__ Matrices matrices, const word *bias, float *partial, int m, int n, int k) {      \
        extern __shared__ __align__(1024) unsigned char memory[];                                                     \
        const int slices = (k + SLICE - 1) / SLICE;                                                                   \
        Product<DERIVATIVE>{matrices, bias, partial, m, n, slices, *(Shared *)memory}.run();                          \
    }
DEFINE(product_gelu, false)
DEFINE(product_derivative, true)
