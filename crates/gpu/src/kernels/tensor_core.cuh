// Building blocks of attention on the tensor cores: tiles of vectors in shared memory, and their products.
//
// For bf16 and f16, compute capability 8.0 and up. Not for AMD GPUs, which have other matrix instructions. Files that
// include this are compiled for one ELEMENT and one HEAD_DIM, a multiple of 8 up to 128. They assert that their threads
// and shared memory equal the LAUNCH_… definitions with which the host launches them.
//
// A warp owns whole rows of a product, M times 16 of them. So weights pass from one product to the next in its
// registers, and every sum is taken in a fixed order. Sums are f32; weights are rounded to ELEMENT before they are
// multiplied. Rows of a tile are an odd number of 16-byte pieces apart, so that eight of them are in different banks.
// Columns that pad a vector to a multiple of 16 are zero, and so are rows after the last.

#include "matrix_instructions.cuh"

typedef ELEMENT element;

constexpr int PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int STRIDE = PADDED + 8;
constexpr int PIECES = HEAD_DIM / 8;  // of 16 bytes, in a vector
constexpr int COLUMNS = PADDED / 8;   // groups of 8 columns in a vector
constexpr bool NARROW = PADDED <= 64; // small heads leave registers for more rows of scores

// A block of queries: groups of 16 rows per warp, and warps.
constexpr int QUERY_ROWS = 2, QUERY_WARPS = 4;
constexpr int QUERY_BLOCK = 16 * QUERY_ROWS * QUERY_WARPS, QUERY_THREADS = WARP * QUERY_WARPS;
static_assert(QUERY_THREADS == LAUNCH_QUERY_THREADS, "not what is launched");

struct Shape {
    int sequence, heads, kv_heads;
    float scale;

    __device__ int qkv_row() const { return (heads + 2 * kv_heads) * HEAD_DIM; }
    __device__ int out_row() const { return heads * HEAD_DIM; }
    // Offset of head `head` of sample `sample` in interleaved rows of `row` elements.
    __device__ size start(int sample, int head, int row) const {
        return (size)(sample * sequence) * row + head * HEAD_DIM;
    }
    __device__ size key_start(int sample, int kv) const { return start(sample, heads + kv, qkv_row()); }
    __device__ size value_start(int sample, int kv) const { return start(sample, heads + kv_heads + kv, qkv_row()); }
    __device__ size first_score(int sample, int head) const { return (size)(sample * heads + head) * sequence; }
    // The factor of the scores before powers of two are taken.
    __device__ float factor() const { return scale * LOG2_E; }
};

struct Lane {
    int lane, warp;

    __device__ Lane() : lane(threadIdx.x % WARP), warp(threadIdx.x / WARP) {}
    // This lane holds rows `row` and row + 8 of a product of 16 rows, and columns `column` and the next of its 8.
    __device__ int row() const { return lane / 4; }
    __device__ int column() const { return lane % 4 * 2; }
    // Byte offset of the row that this lane names: of a left factor or of a transposed right one, and of a right one.
    __device__ unsigned int left() const { return (lane % 16 * STRIDE + lane / 16 * 8) * sizeof(element); }
    __device__ unsigned int right() const {
        return ((lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8) * sizeof(element);
    }
};

// Starts to copy vectors first..first + ROWS of a head, with zeros after the last; by all threads of the block. A
// thread copies the same piece of every STEP-th vector.
template <int ROWS, int THREADS>
__device__ inline void load_rows(element *tile, const element *from, int row, int first, int sequence) {
    constexpr int STEP = THREADS / PIECES;
    const int vector = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES;
    if (vector >= STEP) return;
    const unsigned int to = shared_address(tile) + (vector * STRIDE + piece * 8) * sizeof(element);
    const unsigned int offset = vector * row + piece * 8;
    from += (size)first * row;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        if (i + STEP > ROWS && i + vector >= ROWS) break;
        copy_piece(to + i * STRIDE * sizeof(element), from + (offset + i * row), first + vector + i < sequence);
    }
}

// Starts to copy words first..first + ROWS of a per-token array, with zeros after the last.
template <int ROWS> __device__ inline void load_words(void *to, const void *from, int first, int sequence) {
    if (threadIdx.x >= ROWS) return;
    const int at = first + (int)threadIdx.x;
    copy_word(shared_address((unsigned int *)to + threadIdx.x), (const unsigned int *)from + at, at < sequence);
}

// Zeroes the padding columns of `rows` rows of shared memory.
__device__ inline void clear_padding(element *tile, int rows) {
    if constexpr (PADDED > HEAD_DIM) {
        for (int i = threadIdx.x; i < rows; i += blockDim.x)
            *(uint4 *)(tile + i * STRIDE + HEAD_DIM) = make_uint4(0, 0, 0, 0);
    }
}

template <int M, int N> __device__ inline void clear(float (&sum)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) sum[m][n][0] = sum[m][n][1] = sum[m][n][2] = sum[m][n][3] = 0.0f;
}

// Calls body(sum's element, row / 8 of the warp, column) for this lane's elements of a product.
template <int M, int N, class Body> __device__ inline void each_element(float (&sum)[M][N][4], Body body) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) body(sum[m][n][i], 2 * m + i / 2, 8 * n + i % 2);
}

// product = left · rightᵀ over whole vectors: 16·M rows of the warp times 8·N rows of a tile.
template <int M, int N>
__device__ inline void dot_rows(float (&product)[M][N][4], unsigned int left, unsigned int right) {
    clear(product);
#pragma unroll
    for (int k = 0; k < PADDED; k += 16) {
        unsigned int rows[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) load_matrices(rows[m], left + (16 * m * STRIDE + k) * sizeof(element));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned int columns[4];
            load_matrices(columns, right + (8 * n * STRIDE + k) * sizeof(element));
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add<element>(product[m][n], rows[m], columns[0], columns[1]);
                multiply_add<element>(product[m][n + 1], rows[m], columns[2], columns[3]);
            }
        }
    }
}

// sum += weights · vectors: 8·N weights for each of 16·M rows, rounded, times as many rows of a tile.
template <int M, int N>
__device__ inline void add_weighted(float (&sum)[M][COLUMNS][4], const float (&weights)[M][N][4],
                                    unsigned int vectors) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        // A lane's elements of a product are exactly those that it must hold of a left factor.
        unsigned int rows[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[m][i] = narrow_word<element>(&weights[m][n + i / 2][i % 2 * 2]);
#pragma unroll
        for (int column = 0; column < COLUMNS; column += 2) {
            unsigned int columns[4];
            load_transposed(columns, vectors + (8 * n * STRIDE + 8 * column) * sizeof(element));
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add<element>(sum[m][column], rows[m], columns[0], columns[1]);
                multiply_add<element>(sum[m][column + 1], rows[m], columns[2], columns[3]);
            }
        }
    }
}

// Rounds the warp's rows, times `factor`, and stores them as rows first.. of a head. They pass through rows of shared
// memory that no other warp reads.
template <int M>
__device__ inline void store_rows(const float (&sum)[M][COLUMNS][4], const float (&factor)[2 * M], element *own,
                                  element *to, int row, int first, int sequence) {
    const Lane lane;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float scale = factor[2 * m + half];
                const float pair[2] = {sum[m][column][2 * half] * scale, sum[m][column][2 * half + 1] * scale};
                const int vector = 16 * m + 8 * half + lane.row();
                *(unsigned int *)(own + vector * STRIDE + 8 * column + lane.column()) = narrow_word<element>(pair);
            }
    __syncwarp();
    for (int i = lane.lane; i < 16 * M * PIECES; i += WARP) {
        const int vector = i / PIECES, piece = i % PIECES;
        if (first + vector < sequence)
            *(uint4 *)(to + (size)(first + vector) * row + piece * 8) = *(uint4 *)(own + vector * STRIDE + piece * 8);
    }
}

// Reductions over the four lanes that share a row.
template <class Operation> __device__ inline float row_reduce(float x, Operation operation) {
    x = operation(x, SHUFFLE_XOR(x, 1));
    return operation(x, SHUFFLE_XOR(x, 2));
}

// The keys that the queries of one warp attend to, in tiles of KEYS: all earlier ones, or with a mask those from their
// starts on.
template <bool masked, int KEYS> struct Sight {
    const token *starts;  // of the sample; null without a mask
    int first, last;      // queries of the warp that exist

    __device__ Sight(const token *starts, int first, int sequence)
        : starts(starts), first(first), last(min(first + 16 * QUERY_ROWS, sequence) - 1) {}
    __device__ int start(int query) const { return masked ? (int)starts[(unsigned int)query] : 0; }
    // Whether any of them attends to any key of the tile, and whether all attend to all.
    __device__ bool any(int first_key) const {
        return first <= last && first_key <= last && first_key + KEYS > start(first);
    }
    __device__ bool all(int first_key) const { return first_key + KEYS - 1 <= first && first_key >= start(last); }
    // Masks the scores of keys that are not visible.
    __device__ void hide(float (&scores)[QUERY_ROWS][KEYS / 8][4], int first_key, float to) const {
        const Lane lane;
        // Columns of the tile, relative to the first that this lane holds.
        int first_seen[2 * QUERY_ROWS], last_seen[2 * QUERY_ROWS];
#pragma unroll
        for (int i = 0; i < 2 * QUERY_ROWS; ++i) {
            const int query = first + lane.row() + 8 * i, origin = first_key + lane.column();
            first_seen[i] = start(min(query, last)) - origin;
            last_seen[i] = query - origin;
        }
        each_element(scores, [&](float &x, int i, int column) {
            if (column > last_seen[i] || (masked && column < first_seen[i])) x = to;
        });
    }
};

// The first key of the first tile that a query, and so any later query, attends to.
template <bool masked, int KEYS> __device__ inline int first_tile(const token *starts, int query) {
    if constexpr (masked) {
        return (int)starts[(unsigned int)query] / KEYS * KEYS;
    } else {
        return 0;
    }
}
