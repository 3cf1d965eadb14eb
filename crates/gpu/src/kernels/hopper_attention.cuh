// Shared by attention's forward and backward on Hopper: the layout of vectors in shared memory, and the assignment of
// work items to blocks.

#include "hopper_instructions.cuh"

constexpr int BLOCK = 128; // vectors that a block of threads takes at a time: queries forward, keys backward
constexpr int PADDED = HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 96 ? 96 : 128; // columns that are multiplied
constexpr int CHUNK = 64;                                               // columns that are swizzled together
constexpr int CHUNKS = (PADDED + CHUNK - 1) / CHUNK;
constexpr int PIECES = HEAD_DIM / 8; // of 16 bytes

struct Shape {
    int batch, sequence, heads, kv_heads;
    float scale;

    __device__ int blocks() const { return sequence / BLOCK; }
    __device__ int heads_per_key() const { return heads / kv_heads; }
};

// A work item: 128 vectors of one head of one sample. Rank 0 has the most work. A counter assigns items to blocks, the
// largest first, in bands of only as many heads as run at once. So the last items are small, and the caches hold the
// data that the items of a head share.
struct Item {
    int sample, head, rank;
    int band, within, count; // the item's place in its band, which has so many

    __device__ Item(int index, int heads, const Shape &shape) {
        const int blocks = shape.blocks(), together = heads_together(shape, gridDim.x);
        const int first = index / (together * blocks) * together;
        const int here = min(together, shape.batch * heads - first);
        band = first / together, within = index - first * blocks, count = here * blocks;
        const int at = first + within % here;
        sample = at / heads, head = at % heads, rank = within / here;
    }

    // The items for this many thread blocks.
    __device__ static int heads_together(const Shape &shape, int blocks) { return max(1, blocks / shape.blocks()); }
};

// A slot of a ring buffer, and the parity of how often the ring has wrapped.
template <int LENGTH> struct Place {
    int index = 0, parity = 0;

    __device__ void next() {
        if (++index < LENGTH) return;
        index = 0;
        parity ^= 1;
    }
};

// Filled by this many arrivals, and emptied by all warps of two groups.
template <int LENGTH>
__device__ inline void begin_ring(barrier (&full)[LENGTH], int fillers, barrier (&empty)[LENGTH]) {
    for (int i = 0; i < LENGTH; ++i) begin_barrier(&full[i], fillers), begin_barrier(&empty[i], 2 * GROUP / WARP);
}

// The first warp group loads data for the other two, which get most of its registers and do one half of the work each.
template <class Work> __device__ inline void divide(const Work &work) {
    // The value is uniform over a warp; the shuffle lets the compiler know it.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        work.begin_barriers();
        publish_shared();
    }
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        work.serve();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        if (group == 1)
            work.template make<0>();
        else
            work.template make<1>();
    }
}

// Index of the thread in its warp group.
__device__ inline int thread() { return threadIdx.x % GROUP; }
__device__ inline int warp() { return thread() / WARP; }
__device__ inline int lane() { return thread() % WARP; }

// One arrival per warp, after all of its lanes have arrived.
__device__ inline void arrive_warp(barrier *at) {
    SYNCHRONIZE_WARP();
    if (lane() == 0) arrive(at);
}

// Synchronizes all threads of one of the two groups.
__device__ inline void await_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP) : "memory");
}

// Address in 64 chunked vectors of the piece that a lane passes to store_matrices.
__device__ inline word piece_of_vector(word vectors, int chunk_bytes, int piece) {
    const int vector = 16 * warp() + lane() % 16;
    return vectors + piece / 8 * chunk_bytes + vector * CHUNK * 2 + (piece % 8 ^ vector % 8) * 16;
}

// 16 columns of a product, from 16·k on, scaled and rounded: the thread's part of the four matrices of store_matrices.
__device__ inline void narrow_columns(word (&words)[4], const float (&x)[PADDED / 2], int k, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float scale = i % 2 == 0 ? upper : lower;
        const float pair[2] = {x[8 * k + 2 * i] * scale, x[8 * k + 2 * i + 1] * scale};
        words[i] = narrow_word<bf16>(pair);
    }
}
