// Token and position tables, forward and backward.
//
// tokens [rows]; table [vocabulary, width], where the vocabulary starts at token `first`; out, dout, x, dx [rows,
// width].
// Forward and positions: one block per row. `wide`: width is a multiple of PACK and all pointers are aligned.
// Forward of [65536, 768] bf16: 202 MB, 47 µs at 4.3 TB/s.
//
// The backward is deterministic and needs no sort. embedding_index: a block owns a range of the vocabulary. Its warps
// read all tokens twice, first to count and then to list the rows of each token in ascending order. An atomic decides
// where in `listed` a range is stored; the rows of a token and their order do not depend on it. embedding_gather: a
// block per token adds its rows in order. Tokens with more than FREQUENT rows are left to embedding_gather_frequent,
// whose blocks have GROUPS of threads that share the rows and are added in order.
// Scratch: starts [vocabulary], counts [vocabulary], listed [rows], frequent [vocabulary], heads [2], all u32; heads
// (rows listed so far, frequent tokens) starts as zero.
// [65536, 768] bf16 into [50304, 768] f32: 101 + 155 MB, 60 µs. The index reads tokens from L2, 2 × 512 × 262 kB, 50 µs
// at 5 TB/s; its time does not depend on how often a token occurs.

constexpr unsigned int FREQUENT = 128;
constexpr int INDEX_WARPS = 8;

// A block for a row has at most 256 threads. AMD's compiler otherwise allows for 1024, which have half the registers.
#if defined(__HIP__) || defined(__HIPCC__)
#define ROW_BOUNDS __launch_bounds__(256)
#else
#define ROW_BOUNDS
#endif

template <class T>
__device__ void embedding(const token *tokens, const T *table, T *out, size first, size vocabulary, size width,
                          bool wide) {
    const size entry = (size)tokens[blockIdx.x] - first;
    const bool here = entry >= 0 && entry < vocabulary;
    T *row = out + blockIdx.x * width;
    each_column(width, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float x[N] = {};
        if (here) load<N>(table + entry * width + i, x);
        store<N>(row + i, x);
    });
}

template <class T>
__device__ void positions(T *x, const T *table, size first_row, size sequence, size width, bool wide) {
    const T *entry = table + (first_row + blockIdx.x) % sequence * width;
    T *row = x + blockIdx.x * width;
    each_column(width, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float sum[N], y[N];
        load<N>(row + i, sum);
        load<N>(entry + i, y);
        for (int j = 0; j < N; ++j) sum[j] += y[j];
        store<N>(row + i, sum);
    });
}

// Adds the old value if accumulating, and rounds once.
template <int N, class G> __device__ inline void put(float (&sum)[N], G *to, bool accumulate) {
    if (accumulate) {
        float old[N];
        load<N>(to, old);
        for (int j = 0; j < N; ++j) sum[j] += old[j];
    }
    store<N>(to, sum);
}

// One block per position. Positions beyond the sequence have no rows.
template <class T, class G>
__device__ void positions_backward(const T *__restrict__ dx, G *__restrict__ dtable, size first_row, size sequence,
                                   size rows, size width, bool accumulate, bool wide) {
    const size position = blockIdx.x;
    const size first = position < sequence ? (position + sequence - first_row % sequence) % sequence : rows;
    each_column(width, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float sum[N] = {};
#pragma unroll 8
        for (size row = first; row < rows; row += sequence) {
            float y[N];
            load<N>(dx + row * width + i, y);
            for (int j = 0; j < N; ++j) sum[j] += y[j];
        }
        put<N>(sum, dtable + position * width + i, accumulate);
    });
}

// Lists the rows of a warp's lanes under their entries, in the order of the lanes. Entry −1 means none.
__device__ inline void list_rows(token *listed, unsigned int *cursors, int entry, token row, int lane) {
#if defined(__HIP__) || defined(__HIPCC__)
    for (unsigned long long turns = BALLOT(entry >= 0); turns; turns &= turns - 1) {
        if ((turns & -turns) >> lane == 1) {
            listed[cursors[entry]] = row;
            cursors[entry] += 1;
        }
        SYNCHRONIZE_WARP();
    }
#else
    // All lanes of an entry at once: a lane's offset from the cursor is the number of such lanes before it.
    const unsigned int same = __match_any_sync(0xffffffffu, entry);
    const unsigned int before = __popc(same & ((1u << lane) - 1));
    const unsigned int at = entry < 0 ? 0 : cursors[entry];
    SYNCHRONIZE_WARP();
    if (entry >= 0) {
        listed[at + before] = row;
        if (before == 0) cursors[entry] = at + __popc(same);
    }
    SYNCHRONIZE_WARP();
#endif
}

// INDEX_WARPS warps; dynamic shared memory [INDEX_WARPS, range] u32.
extern "C" __global__ void embedding_index(const token *__restrict__ tokens, size rows, size first, size vocabulary,
                                           int range, token *starts, token *counts, token *listed,
                                           token *frequent, token *heads) {
    constexpr int AHEAD = 8;
    extern __shared__ unsigned int cursors[];
    __shared__ unsigned int base;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size lowest = first + (size)blockIdx.x * range;
    const size left = vocabulary - (size)blockIdx.x * range;
    const int owned = left < range ? (int)left : range;
    const size share = (rows + INDEX_WARPS - 1) / INDEX_WARPS, begin = warp * share;
    const size end = begin + share < rows ? begin + share : rows;
    unsigned int *mine = cursors + warp * range;

    for (int i = threadIdx.x; i < INDEX_WARPS * range; i += blockDim.x) cursors[i] = 0;
    __syncthreads();
#pragma unroll 8
    for (size row = begin + lane; row < end; row += WARP) {
        const size entry = (size)tokens[row] - lowest;
        if (entry >= 0 && entry < owned) atomicAdd(mine + entry, 1u);
    }
    __syncthreads();

    // Totals, then the offset of each token's rows, then the offset of each warp's part of them.
    for (int i = threadIdx.x; i < owned; i += blockDim.x) {
        unsigned int total = 0;
        for (int w = 0; w < INDEX_WARPS; ++w) total += cursors[w * range + i];
        counts[lowest - first + i] = total;
        if (total > FREQUENT) frequent[atomicAdd(heads + 1, 1u)] = (token)(lowest - first + i);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int total = 0;
        for (int i = 0; i < owned; ++i) {
            starts[lowest - first + i] = total;
            total += counts[lowest - first + i];
        }
        base = atomicAdd(heads, total);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < owned; i += blockDim.x) {
        unsigned int at = base + starts[lowest - first + i];
        starts[lowest - first + i] = at;
        for (int w = 0; w < INDEX_WARPS; ++w) {
            const unsigned int count = cursors[w * range + i];
            cursors[w * range + i] = at;
            at += count;
        }
    }
    __syncthreads();

    for (size tile = begin; tile < end; tile += AHEAD * WARP) {
        size entry[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const size row = tile + k * WARP + lane;
            entry[k] = row < end ? (size)tokens[row] - lowest : -1;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const bool hit = entry[k] >= 0 && entry[k] < owned;
            if (BALLOT(hit)) list_rows(listed, mine, hit ? (int)entry[k] : -1, (token)(tile + k * WARP + lane), lane);
        }
    }
}

// One block per token of the vocabulary.
template <class T, class G>
__device__ void embedding_gather(const T *__restrict__ dout, G *__restrict__ dtable,
                                 const token *__restrict__ starts, const token *__restrict__ counts,
                                 const token *__restrict__ listed, size width, bool accumulate, bool wide) {
    const unsigned int count = counts[blockIdx.x];
    if (count > FREQUENT || (count == 0 && accumulate)) return;
    const token *mine = listed + starts[blockIdx.x];
    each_column(width, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float sum[N] = {};
#pragma unroll 4
        for (unsigned int k = 0; k < count; ++k) {
            float y[N];
            load<N>(dout + mine[k] * width + i, y);
            for (int j = 0; j < N; ++j) sum[j] += y[j];
        }
        put<N>(sum, dtable + blockIdx.x * width + i, accumulate);
    });
}

// Grid (blocks that share the frequent tokens, columns / (LANES·N)), LANES·GROUPS threads.
template <int N, class T, class G>
__device__ void embedding_gather_frequent(const T *__restrict__ dout, G *__restrict__ dtable,
                                          const token *__restrict__ starts, const token *__restrict__ counts,
                                          const token *__restrict__ listed, const token *__restrict__ frequent,
                                          const token *__restrict__ heads, size width, bool accumulate) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const size column = (blockIdx.y * (size)LANES + lane) * N;
    for (unsigned int i = blockIdx.x; i < heads[1]; i += gridDim.x) {
        const size entry = frequent[i];
        const unsigned int count = counts[entry];
        const token *mine = listed + starts[entry];
        float sum[N] = {};
        if (column < width) {
#pragma unroll 8
            for (unsigned int k = group; k < count; k += GROUPS) {
                float y[N];
                load<N>(dout + mine[k] * width + column, y);
                for (int j = 0; j < N; ++j) sum[j] += y[j];
            }
        }
        // The next token may write to shared memory only after this one has been read.
        __syncthreads();
        add_groups(sum, lane, group);
        if (group == 0 && column < width) put<N>(sum, dtable + entry * width + column, accumulate);
    }
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void embedding_##NAME(const token *tokens, const T *table, T *out, size first,              \
                                                size vocabulary, size width, bool wide) {                             \
        embedding(tokens, table, out, first, vocabulary, width, wide);                                                \
    }                                                                                                                 \
    extern "C" __global__ void positions_##NAME(T *x, const T *table, size first_row, size sequence, size width,      \
                                                bool wide) {                                                          \
        positions(x, table, first_row, sequence, width, wide);                                                        \
    }
FOR_TYPES(DEFINE)

#define DEFINE_BACKWARD(NAME, T, OUT, G)                                                                              \
    extern "C" __global__ void ROW_BOUNDS                                                                              \
        positions_backward_##NAME##_##OUT(const T *dx, G *dtable, size first_row, size sequence, size rows,           \
                                          size width, bool accumulate, bool wide) {                                   \
        positions_backward(dx, dtable, first_row, sequence, rows, width, accumulate, wide);                           \
    }                                                                                                                 \
    extern "C" __global__ void embedding_gather_##NAME##_##OUT(const T *dout, G *dtable, const token *starts,         \
                                                               const token *counts, const token *listed, size width,  \
                                                               bool accumulate, bool wide) {                          \
        embedding_gather(dout, dtable, starts, counts, listed, width, accumulate, wide);                              \
    }                                                                                                                 \
    extern "C" __global__ void embedding_gather_frequent_##NAME##_##OUT(                                              \
        const T *dout, G *dtable, const token *starts, const token *counts, const token *listed,                      \
        const token *frequent, const token *heads, size width, bool accumulate) {                                     \
        embedding_gather_frequent<1>(dout, dtable, starts, counts, listed, frequent, heads, width, accumulate);       \
    }                                                                                                                 \
    extern "C" __global__ void embedding_gather_frequent_wide_##NAME##_##OUT(                                         \
        const T *dout, G *dtable, const token *starts, const token *counts, const token *listed,                      \
        const token *frequent, const token *heads, size width, bool accumulate) {                                     \
        embedding_gather_frequent<PACK>(dout, dtable, starts, counts, listed, frequent, heads, width, accumulate);    \
    }
FOR_GRADIENTS(DEFINE_BACKWARD)
