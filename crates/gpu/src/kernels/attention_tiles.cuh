// Products of tiles in shared memory, for the portable attention kernels: TILE vectors by TILE vectors, in f32.
//
// A block has 256 threads: 16 × 16. A thread owns rows y, y+16, … and columns x, x+16, … of a product. Tiles of vectors are
// [TILE, dim + 1], and of pairs [TILE, TILE + 1]: the odd stride puts columns in different banks.
#ifndef TILE
#define TILE 32
#endif
constexpr int SIDE = 16;
constexpr int THREADS = SIDE * SIDE;
constexpr int OWN = TILE / SIDE;       // rows of a tile that a thread owns
constexpr int COLUMNS = 256 / SIDE;    // columns of a vector that a thread owns, at most
constexpr int SCORE_STRIDE = TILE + 1;

struct Shape {
    int sequence, heads, kv_heads, dim;
    float scale;

    __device__ int stride() const { return dim + 1; }
    __device__ size qkv_row() const { return (size)(heads + 2 * kv_heads) * dim; }
    // Offset of head `head` of sample `sample` in interleaved rows of `row` elements.
    __device__ size start(int sample, int head, size row) const {
        return (size)sample * sequence * row + (size)head * dim;
    }
    __device__ size out_row() const { return (size)heads * dim; }
    __device__ size first_score(int sample, int head) const { return ((size)sample * heads + head) * sequence; }
};

// Reductions over the 16 threads that share a row of a tile.
template <class Operation> __device__ inline float side_reduce(float x, Operation operation) {
#pragma unroll
    for (int mask = SIDE / 2; mask > 0; mask /= 2) x = operation(x, SHUFFLE_XOR(x, mask));
    return x;
}

// product[i][j] = left[y + 16i] · right[x + 16j].
__device__ inline void dot_tiles(float (&product)[OWN][OWN], const float *left, const float *right, Shape shape) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < OWN; ++i)
        for (int j = 0; j < OWN; ++j) product[i][j] = 0.0f;
    for (int column = 0; column < shape.dim; ++column) {
        float l[OWN], r[OWN];
        for (int i = 0; i < OWN; ++i) {
            l[i] = left[(y + SIDE * i) * shape.stride() + column];
            r[i] = right[(x + SIDE * i) * shape.stride() + column];
        }
        for (int i = 0; i < OWN; ++i)
            for (int j = 0; j < OWN; ++j) product[i][j] += l[i] * r[j];
    }
}

// sum[i][c] += Σ_j pairs(y + 16i, j) · vectors[j][x + 16c]; `pairs` is read along its columns if `transposed`.
template <bool transposed>
__device__ inline void add_weighted(float (&sum)[OWN][COLUMNS], const float *pairs, const float *vectors,
                                    Shape shape) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int j = 0; j < TILE; ++j) {
        float weight[OWN];
        for (int i = 0; i < OWN; ++i) {
            const int row = y + SIDE * i;
            weight[i] = pairs[transposed ? j * SCORE_STRIDE + row : row * SCORE_STRIDE + j];
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = x + SIDE * c;
            if (column < shape.dim) {
                const float value = vectors[j * shape.stride() + column];
                for (int i = 0; i < OWN; ++i) sum[i][c] += weight[i] * value;
            }
        }
    }
}

__device__ inline void clear(float (&sum)[OWN][COLUMNS]) {
    for (int i = 0; i < OWN; ++i)
        for (int c = 0; c < COLUMNS; ++c) sum[i][c] = 0.0f;
}

__device__ inline void store_pairs(float *pairs, const float (&values)[OWN][OWN]) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < OWN; ++i)
        for (int j = 0; j < OWN; ++j) pairs[(y + SIDE * i) * SCORE_STRIDE + x + SIDE * j] = values[i][j];
}
