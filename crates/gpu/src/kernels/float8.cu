// Matrices in 8 bits for products: their largest magnitude, then codes and transposed codes in one pass.
//
// x [rows, columns] f32, bf16 or f16; codes [rows, columns] and transposed [columns, rows], bytes, each may be null. Rows and
// columns are multiples of 16, and all pointers are 16-byte aligned. MANTISSA 3: E4M3, up to 448; 2: E5M2, up to 57344. The
// scale is the largest power of two with which the largest finite magnitude still fits; numbers are multiplied by it, saturated
// and rounded to nearest even. What is not finite becomes NaN. The same bits as on the CPU.
//
// With _gelu in the name, the numbers are GELU (tanh form) of what is read.
//
// float8_maximum: grid-stride, a maximum for each block. float8_cast: a block has a tile of 128 × 128, a thread 8 columns of
// 4 rows at a time: it transposes bytes in registers, and words in shared memory, whose index is swizzled so that neither
// side has bank conflicts. [24576, 2048] bf16: 101 MB for the maximum, 101 + 2 × 50 MB for the cast.

typedef unsigned int word;
typedef unsigned char byte;

constexpr int TILE = 128;
constexpr int CAST_THREADS = 256;
constexpr int SEGMENT = 8; // columns of a thread
constexpr int GROUP = 4;   // rows of a word of transposed codes

template <int MANTISSA> constexpr int bias = MANTISSA == 3 ? 7 : 15;
template <int MANTISSA> constexpr float largest = MANTISSA == 3 ? 448.0f : 57344.0f;
template <int MANTISSA> constexpr int largest_exponent = MANTISSA == 3 ? 8 : 15;

__device__ inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// The code of a number by arithmetic on its bits.
template <int MANTISSA> __device__ inline word encode(float x) {
    if (!is_finite(x)) return 0x7fu;
    constexpr int DROPPED = 23 - MANTISSA;
    constexpr word LEAST_NORMAL = (word)(128 - bias<MANTISSA>) << 23;
    const float magnitude = fminf(fabsf(x), largest<MANTISSA>);
    word code;
    if (__float_as_uint(magnitude) < LEAST_NORMAL) {
        // Adding a number whose last place is the smallest code's rounds to it.
        constexpr word ROUND = (word)(128 - bias<MANTISSA> + DROPPED) << 23;
        code = __float_as_uint(magnitude + __uint_as_float(ROUND)) - ROUND;
    } else {
        const word rebased = __float_as_uint(magnitude) - LEAST_NORMAL + (1u << 23);
        code = (rebased + (1u << (DROPPED - 1)) - 1 + (rebased >> DROPPED & 1)) >> DROPPED;
    }
    return (__float_as_uint(x) >> 24 & 0x80u) | code;
}

// Four codes, the first in the lowest byte.
template <int MANTISSA> __device__ inline word encode_four(const float *x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short low, high;
    float y[4];
    // The instruction would saturate infinities.
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = is_finite(x[i]) ? x[i] : __uint_as_float(__float_as_uint(x[i]) | 0x7fc00000u);
    if constexpr (MANTISSA == 3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y[1]), "f"(y[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(y[3]), "f"(y[2]));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y[1]), "f"(y[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(y[3]), "f"(y[2]));
    }
    return low | (word)high << 16;
#else
    word codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= encode<MANTISSA>(x[i]) << 8 * i;
    return codes;
#endif
}

__device__ inline float power(int exponent) { return __uint_as_float((word)(exponent + 127) << 23); }

// The exponent of the scale.
template <int MANTISSA> __device__ inline int scale_exponent(float maximum) {
    if (maximum == 0.0f) return 0;
    const word bits = __float_as_uint(maximum);
    const int exponent = (int)(bits >> 23) - 127;
    const int fits = (bits & 0x7fffffu) <= 0x600000u;
    const int wanted = largest_exponent<MANTISSA> - exponent - !fits;
    return wanted < -126 ? -126 : wanted > 126 ? 126 : wanted;
}

struct Identity {
    __device__ float operator()(float x) const { return x; }
};

struct Gelu {
    // ½(1 + tanh u) = σ(2u), as in activation.cu.
    __device__ float operator()(float x) const {
        constexpr float SLOPE = 1.5957691216057308f, CUBIC = 0.044715f;
        return x * logistic(x * (x * x * (SLOPE * CUBIC) + SLOPE));
    }
};

template <class F, class T> __device__ void float8_maximum(const T *x, float *maxima, size elements) {
    const F function{};
    float most = 0.0f;
    each(elements, true, [&](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float y[N];
        load<N>(x + i, y);
        for (int j = 0; j < N; ++j) {
            const float z = function(y[j]);
            most = fmaxf(most, is_finite(z) ? fabsf(z) : 0.0f);
        }
    });
    most = block_reduce(most, 0.0f, Maximum());
    if (threadIdx.x == 0) maxima[blockIdx.x] = most;
}

// The transpose of four words of four bytes.
__device__ inline void transpose_bytes(const word (&rows)[4], word (&columns)[4]) {
#if defined(__HIP__) || defined(__HIPCC__)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        columns[c] = 0;
        for (int r = 0; r < 4; ++r) columns[c] |= (rows[r] >> 8 * c & 0xffu) << 8 * r;
    }
#else
    const word a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[2], rows[3], 0x5140);
    const word c = __byte_perm(rows[0], rows[1], 0x7362), d = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(a, b, 0x5410), columns[1] = __byte_perm(a, b, 0x7632);
    columns[2] = __byte_perm(c, d, 0x5410), columns[3] = __byte_perm(c, d, 0x7632);
#endif
}

template <int MANTISSA, class F, class T>
__device__ void float8_cast(const T *x, const float *maxima, int count, byte *codes, byte *transposed, float *inverse,
                            size rows, size columns) {
    // Column by column, 32 words of 4 rows; a column's words are exchanged by the swizzle of its segment.
    __shared__ __align__(16) word tile[TILE * TILE / GROUP];
    constexpr int WORDS = TILE / GROUP;
    const F function{};

    float most = 0.0f;
    for (int i = threadIdx.x; i < count; i += CAST_THREADS) most = fmaxf(most, maxima[i]);
    const int exponent = scale_exponent<MANTISSA>(block_reduce(most, 0.0f, Maximum()));
    const float scale = power(exponent);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *inverse = power(-exponent);

    const size first_row = (size)blockIdx.y * TILE, first_column = (size)blockIdx.x * TILE;
    const int segment = threadIdx.x % (TILE / SEGMENT), part = threadIdx.x / (TILE / SEGMENT);
    const size column = first_column + segment * SEGMENT;
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
        const int group = turn * (WORDS / 2) + part;
        const size row = first_row + group * GROUP;
        if (row >= rows || column >= columns) continue;
        Raw<T, SEGMENT> raw[GROUP];
#pragma unroll
        for (int r = 0; r < GROUP; ++r) raw[r] = load_raw<SEGMENT>(x + (row + r) * columns + column);
        word left[GROUP], right[GROUP];
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
            float y[SEGMENT];
            widen(raw[r], y);
#pragma unroll
            for (int j = 0; j < SEGMENT; ++j) y[j] = function(y[j]) * scale;
            left[r] = encode_four<MANTISSA>(y), right[r] = encode_four<MANTISSA>(y + 4);
            if (codes) *reinterpret_cast<uint2 *>(codes + (row + r) * columns + column) = make_uint2(left[r], right[r]);
        }
        if (!transposed) continue;
        word by_column[SEGMENT];
        word four[4];
        transpose_bytes(left, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) by_column[j] = four[j];
        transpose_bytes(right, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) by_column[4 + j] = four[j];
#pragma unroll
        for (int j = 0; j < SEGMENT; ++j)
            tile[(segment * SEGMENT + j) * WORDS + (group ^ 2 * segment & (WORDS - 1))] = by_column[j];
    }
    if (!transposed) return;
    __syncthreads();
    // Eight threads store a column, 16 rows each.
    constexpr int PIECES = TILE / 16;
    for (int i = threadIdx.x; i < TILE * PIECES; i += CAST_THREADS) {
        const int c = i / PIECES, piece = i % PIECES;
        const size to_column = first_column + c, to_row = first_row + piece * 16;
        if (to_column >= columns || to_row >= rows) continue;
        const int swizzle = 2 * (c / SEGMENT) & (WORDS - 1);
        const uint4 words = reinterpret_cast<const uint4 *>(tile + c * WORDS)[(piece * 4 ^ swizzle) / 4];
        const uint4 ordered = swizzle & 2 ? make_uint4(words.z, words.w, words.x, words.y) : words;
        *reinterpret_cast<uint4 *>(transposed + to_column * rows + to_row) = ordered;
    }
}

#define DEFINE_CAST(NAME, T, FORMAT, MANTISSA, SUFFIX, FUNCTION)                                                       \
    extern "C" __global__ void __launch_bounds__(CAST_THREADS) float8_cast##SUFFIX##_##NAME##_##FORMAT(               \
        const T *x, const float *maxima, int count, byte *codes, byte *transposed, float *inverse, size rows,         \
        size columns) {                                                                                               \
        float8_cast<MANTISSA, FUNCTION>(x, maxima, count, codes, transposed, inverse, rows, columns);                 \
    }
#define DEFINE_FUNCTION(NAME, T, SUFFIX, FUNCTION)                                                                    \
    extern "C" __global__ void float8_maximum##SUFFIX##_##NAME(const T *x, float *maxima, size elements) {            \
        float8_maximum<FUNCTION>(x, maxima, elements);                                                                \
    }                                                                                                                 \
    DEFINE_CAST(NAME, T, e4m3, 3, SUFFIX, FUNCTION)                                                                   \
    DEFINE_CAST(NAME, T, e5m2, 2, SUFFIX, FUNCTION)
#define DEFINE(NAME, T) DEFINE_FUNCTION(NAME, T, , Identity) DEFINE_FUNCTION(NAME, T, _gelu, Gelu)
FOR_TYPES(DEFINE)
