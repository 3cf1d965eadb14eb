// Building blocks of attention on AMD's matrix cores: tiles of vectors in LDS, and their products by MFMA.
//
// For gfx90a and gfx942, waves of 64. Files that include this are compiled for one ELEMENT (bf16 or f16) and one
// HEAD_DIM, a multiple of 8 up to 128. They assert that their threads equal LAUNCH_THREADS.
//
// Every product is 32 × 32 × 8. Lane l is in half h = l / 32 of its wave. It holds numbers 4h to 4h + 3 of row l % 32 of
// the left factor and of column l % 32 of the right one; of the product it holds column l % 32, rows 8·(r / 4) + 4h +
// r % 4 for its registers r. So the four registers of a product's rows 8j + 4h.. are just what the lane must hold of a
// right factor with these rows as its inner dim: weights pass from one product to the next in registers. A wave owns 32
// vectors as columns of all its products. They are right factors, in registers. The streamed tiles are left factors, in
// LDS, by row if the inner dim is the head's, by column if it is the tokens.
//
// A lane reads 16 bytes of a left factor at a time, for two instructions. Which eight numbers of the inner dim these are
// is free, if both factors agree: vectors are read in order, and tiles by column are stored in the order of a product's
// registers. Every sum is taken in a fixed order, in fp32; weights are rounded to ELEMENT before they are multiplied.

typedef ELEMENT element;
// Four and eight numbers of 16 bits, as words; four as the instructions take them.
typedef unsigned int words2 __attribute__((ext_vector_type(2)));
typedef unsigned int words4 __attribute__((ext_vector_type(4)));
typedef short bf16s __attribute__((ext_vector_type(4)));
typedef _Float16 f16s __attribute__((ext_vector_type(4)));
// A product's 16 registers.
typedef float tile __attribute__((ext_vector_type(16)));

constexpr int WAVES = 4, THREADS = WARP * WAVES;
static_assert(WARP == 64 && THREADS == LAUNCH_THREADS, "not what is launched");

// Columns of a product that a wave and a block own.
constexpr int OWN = 32, BLOCK = OWN * WAVES;
constexpr int PIECES = HEAD_DIM / 8;            // of 16 bytes, in a vector
constexpr int STEPS = (HEAD_DIM + 15) / 16;     // pairs of instructions over a vector
constexpr int DIMS = (HEAD_DIM + 31) / 32;      // tiles of 32 numbers in a vector

// The same number. What follows from it is computed again behind a loop, instead of being kept in registers while it runs.
__device__ inline int computed_again(int x) {
    asm volatile("" : "+v"(x));
    return x;
}

struct Lane {
    int wave, half, column;

    __device__ Lane() : Lane(threadIdx.x) {}
    // The wave is the same in all lanes, so that branches on it are, too.
    __device__ explicit Lane(int thread)
        : wave(__builtin_amdgcn_readfirstlane(thread / WARP)), half(thread % WARP / 32), column(thread % 32) {}
    // The row of a product that register r holds.
    __device__ int row(int r) const { return r / 4 * 8 + half * 4 + r % 4; }
};

// sum += left · right, of four numbers of each lane.
template <class T> __device__ inline void multiply_add(tile &sum, words2 left, words2 right);

template <> __device__ inline void multiply_add<bf16>(tile &sum, words2 left, words2 right) {
    sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(bf16s, left), __builtin_bit_cast(bf16s, right),
                                                   sum, 0, 0, 0);
}

template <> __device__ inline void multiply_add<f16>(tile &sum, words2 left, words2 right) {
    sum = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(f16s, left), __builtin_bit_cast(f16s, right),
                                               sum, 0, 0, 0);
}

// Eight numbers for two instructions.
__device__ inline void multiply_add(tile &sum, words4 left, words4 right) {
    multiply_add<element>(sum, left.xy, right.xy);
    multiply_add<element>(sum, left.zw, right.zw);
}

template <int N> __device__ inline void clear(tile (&sums)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n] = tile(0.0f);
}

// Two numbers in 32 bits. `narrow_word` keeps NaNs by a comparison, which the sums of the weights make unnecessary here.
template <class T> __device__ inline unsigned int narrow_pair(float low, float high) {
    const float pair[2] = {low, high};
    return narrow_word<T>(pair);
}

template <> __device__ inline unsigned int narrow_pair<bf16>(float low, float high) {
    unsigned int words[2] = {__float_as_uint(low), __float_as_uint(high)};
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] += 0x7fff + (words[i] >> 16 & 1);
    // The upper halves of both.
    return __builtin_amdgcn_perm(words[1], words[0], 0x07060302);
}

// Rounded weights: a product's registers as a right factor. pairs[j] has the rows 16j + 4h.. and 16j + 8 + 4h...
struct Weights {
    words4 pairs[2];

    __device__ explicit Weights(const tile &x) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
            pairs[j] = words4{narrow_pair<element>(x[8 * j], x[8 * j + 1]), narrow_pair<element>(x[8 * j + 2], x[8 * j + 3]),
                                  narrow_pair<element>(x[8 * j + 4], x[8 * j + 5]), narrow_pair<element>(x[8 * j + 6], x[8 * j + 7])};
    }
};

// A vector of this lane's column as a right factor; zeros if it does not exist.
struct Vector {
    words4 pieces[STEPS];

    __device__ Vector(const element *from, bool exists) {
        const Lane lane;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int piece = 2 * step + lane.half;
            pieces[step] = words4(0);
            if (exists && piece < PIECES) pieces[step] = reinterpret_cast<const words4 *>(from)[piece];
        }
    }
};

// ROWS vectors, one after the other. Banks: eight lanes read a piece of eight adjacent rows at once. Where a vector has a
// multiple of 8 pieces, the piece's place depends on the row; otherwise rows are an odd number of pieces apart.
template <int ROWS> struct Rows {
    static constexpr int STRIDE = PIECES % 8 == 0 ? PIECES : 2 * STEPS | 1;
    words4 pieces[ROWS * STRIDE];

    __device__ static int place(int row, int piece) {
        return row * STRIDE + (PIECES % 8 == 0 ? piece ^ row % 8 : piece);
    }
    // Zeroes the piece that pads a vector to a multiple of 16 numbers.
    __device__ void clear_padding() {
        if constexpr (PIECES % 2 == 1)
            for (int row = threadIdx.x; row < ROWS; row += THREADS)
                pieces[place(row, PIECES)] = words4(0);
    }
    // Rows 32·block.. · the lane's vector.
    __device__ tile dot(int block, const Vector &vector) const {
        const Lane lane;
        tile product = tile(0.0f);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            multiply_add(product, pieces[place(32 * block + lane.column, 2 * step + lane.half)], vector.pieces[step]);
        return product;
    }
};

// The same vectors by column: for each number of the head, those of all ROWS vectors. In every 16 of them, the groups of
// four are in the order 0, 2, 1, 3, so that 16 bytes are what a lane needs for two instructions.
template <int ROWS> struct Columns {
    static constexpr int STRIDE = ROWS / 8;  // pieces
    words4 pieces[32 * DIMS * STRIDE];

    // Banks: eight lanes read a piece of eight adjacent numbers of the head at once.
    __device__ static int place(int dim, int piece) {
        return dim * STRIDE + (piece ^ (STRIDE == 8 ? dim + dim / 8 : dim / 2 + dim / 8) % STRIDE);
    }
    // Stores numbers 8·piece.. of the vectors 4·group...
    __device__ void store(int group, int piece, const words4 (&rows)[4]) {
        words2 *halves = reinterpret_cast<words2 *>(pieces);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // Number i of each vector: the lower or the upper half of a word.
            const unsigned int selector = i % 2 == 0 ? 0x05040100 : 0x07060302;
            const words2 numbers = {__builtin_amdgcn_perm(rows[1][i / 2], rows[0][i / 2], selector),
                                    __builtin_amdgcn_perm(rows[3][i / 2], rows[2][i / 2], selector)};
            halves[2 * place(8 * piece + i, group / 4 * 2 + group % 2) + group % 4 / 2] = numbers;
        }
    }
    // sums += (vectors 32·block..)ᵀ · weights.
    __device__ void add_weighted(tile (&sums)[DIMS], int block, const Weights &weights) const {
        const Lane lane;
#pragma unroll
        for (int dims = 0; dims < DIMS; ++dims)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                multiply_add(sums[dims], pieces[place(32 * dims + lane.column, 4 * block + 2 * j + lane.half)],
                             weights.pairs[j]);
    }
};

// What a thread moves from global memory to LDS, held in registers while the tile before is used: pieces of four vectors,
// of the first tensor and then of the second.
template <int ROWS> struct Staged {
    static constexpr int UNITS = ROWS / 4 * PIECES, EACH = (2 * UNITS + THREADS - 1) / THREADS;
    words4 rows[EACH][4];

    // Reads vectors first.. of both tensors; zeros from `end` on.
    __device__ void load(const element *one, int one_row, const element *other, int other_row, int first, int end) {
        each([&](bool is_first, int group, int piece, words4 (&rows)[4]) {
            const element *from = is_first ? one : other;
            const int row = is_first ? one_row : other_row;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = first + 4 * group + i;
                rows[i] = words4(0);
                if (at < end) rows[i] = *reinterpret_cast<const words4 *>(from + (size)at * row + 8 * piece);
            }
        });
    }

    // Calls body(whether of the first tensor, group of four vectors, piece, their numbers) for what this thread moves.
    template <class Body> __device__ void each(Body body) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = i * THREADS + (int)threadIdx.x;
            if (unit >= 2 * UNITS) break;
            const int of_tensor = unit % UNITS;
            body(unit < UNITS, of_tensor / PIECES, of_tensor % PIECES, rows[i]);
        }
    }
};

template <int ROWS> __device__ inline void store_rows(Rows<ROWS> &to, int group, int piece, const words4 (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to.pieces[Rows<ROWS>::place(4 * group + i, piece)] = rows[i];
}

// Stores this lane's column times `factor` as a vector, plus `share` of `before` if that is not null.
template <class R, class B>
__device__ inline void store_vector(const tile (&sums)[DIMS], float factor, R *to, const B *before, float share) {
    const Lane lane(computed_again(threadIdx.x));
#pragma unroll
    for (int dims = 0; dims < DIMS; ++dims)
#pragma unroll
        for (int r = 0; r < 16; r += 4) {
            const int dim = 32 * dims + lane.row(r);
            if (dim >= HEAD_DIM) continue;
            float numbers[4], old[4];
            for (int i = 0; i < 4; ++i) numbers[i] = sums[dims][r + i] * factor;
            if (before) {
                load(before + dim, old);
                for (int i = 0; i < 4; ++i) numbers[i] += share * old[i];
            }
            store(to + dim, numbers);
        }
}

// A reduction over the two lanes that share a column.
template <class Operation> __device__ inline float column_reduce(float x, Operation operation) {
    return operation(x, SHUFFLE_XOR(x, 32));
}
