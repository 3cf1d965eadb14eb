// Quantisation in blocks with one scale each (ZeRO++, arXiv 2306.10209): quantise and reorder, dequantise and reduce, and
// all of it in one pass.
//
// x, out [slices, elements] f32, bf16 or f16. A slice of codes, `bytes` long: integers of BITS, the first in the lowest
// bits, padded to words; at `code_bytes` the scales, f32, one for 2^shift elements; zeros up to 16 bytes. Slices start at
// multiples of 16 bytes. `wide`: every slice of x or out is 16-byte aligned. The slices that quantize and requantize
// write are a transposed matrix with `columns` columns before the transposition. Sums over parts [parts, slices] are fused
// multiply-adds in f32, in order. The same numbers give the same bytes on every device.
//
// A thread block holds a tile of whole blocks in registers, so everything is read once and written once. Bytes per
// number: its own, BITS / 8 per part, 4 / 2^shift.

typedef unsigned int word;
typedef unsigned char byte;

constexpr float LEAST = 7.888609052210118e-31f; // 2^-100: blocks of smaller numbers are zeros

constexpr int TILE_THREADS = 256;
constexpr int PACKS = 2; // of a thread
constexpr int TILE = TILE_THREADS * PACKS * PACK; // the largest block

struct Larger {
    __device__ word operator()(word a, word b) const { return a > b ? a : b; }
};

// The tile of this thread block: which slice, and its first element there.
struct Tile {
    size slice, first;

    __device__ explicit Tile(size elements) {
        const size tiles = (elements + TILE - 1) / TILE;
        slice = blockIdx.x / tiles;
        first = blockIdx.x % tiles * TILE;
    }
};

// Elements of a slice from i on, zeros after its end.
template <class T> __device__ inline void load_pack(const T *x, size i, size elements, float (&numbers)[PACK], bool wide) {
    if (wide && i + PACK <= elements) return load(x + i, numbers);
#pragma unroll
    for (int j = 0; j < PACK; ++j) numbers[j] = i + j < elements ? widen(x[i + j]) : 0.0f;
}

template <class T> __device__ inline void store_pack(T *x, size i, size elements, const float (&numbers)[PACK], bool wide) {
    if (wide && i + PACK <= elements) return store(x + i, numbers);
    for (int j = 0; j < PACK && i + j < elements; ++j) x[i + j] = narrow<T>(numbers[j]);
}

// The codes of a pack are this many words.
template <int BITS> constexpr int WORDS = PACK * BITS / 32;

// Adds a slice's elements from i on. Those after its end are undefined.
template <int BITS>
__device__ inline void add_pack(const byte *slice, size i, size elements, size code_bytes, int shift, float (&sums)[PACK]) {
    constexpr int PER_WORD = 32 / BITS;
    const float scale = *reinterpret_cast<const float *>(slice + code_bytes + 4 * (i >> shift));
    const word *codes = reinterpret_cast<const word *>(slice + i * BITS / 8);
    word words[WORDS<BITS>];
    if constexpr (WORDS<BITS> == 2) {
        if (i + PER_WORD < elements) {
            const uint2 pair = *reinterpret_cast<const uint2 *>(codes);
            words[0] = pair.x, words[1] = pair.y;
        } else {
            words[0] = codes[0], words[1] = 0;
        }
    } else {
        words[0] = codes[0];
    }
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
        const word packed = words[j / PER_WORD];
        const int code = (int)(packed << (32 - BITS * (j % PER_WORD + 1))) >> (32 - BITS);
        sums[j] = fmaf((float)code, scale, sums[j]);
    }
}

// The largest bits of `group` adjacent threads, a power of two that divides the thread block.
__device__ inline word group_largest(word bits, int group) {
    __shared__ word partial[TILE_THREADS / WARP];
    for (int mask = (group < WARP ? group : WARP) / 2; mask > 0; mask /= 2) bits = Larger()(bits, SHUFFLE_XOR(bits, mask));
    if (group <= WARP) return bits;
    const int warp = threadIdx.x / WARP, warps = group / WARP;
    if (threadIdx.x % WARP == 0) partial[warp] = bits;
    __syncthreads();
    for (int other = warp / warps * warps, i = 0; i < warps; ++i) bits = Larger()(bits, partial[other + i]);
    return bits;
}

// Quantises a tile. `take` loads a pack: (first element, numbers).
template <int BITS, class Take>
__device__ inline void encode_tile(byte *slice, size first, size elements, size code_bytes, size bytes, int shift, Take take) {
    constexpr int LARGEST = (1 << (BITS - 1)) - 1, PER_WORD = 32 / BITS;
    // Threads that share a block, and this thread's place among them.
    const int group = (1 << shift) / (PACKS * PACK), member = threadIdx.x % group;
    const size start = first + ((size)(threadIdx.x / group) << shift);
    float numbers[PACKS][PACK];
    // As integers, the bits of numbers that are not finite are larger than those of all others.
    word bits = 0;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        take(start + (p * group + member) * PACK, numbers[p]);
#pragma unroll
        for (int j = 0; j < PACK; ++j) bits = Larger()(bits, __float_as_uint(numbers[p][j]) & 0x7fffffffu);
    }
    bits = group_largest(bits, group);
    const float most = __uint_as_float(bits);
    const bool finite = bits < 0x7f800000u, some = finite && most >= LEAST;
    const float inverse = some ? __fdiv_rn((float)LARGEST, most) : 0.0f;
    if (member == 0 && start < elements) {
        const float scale = some ? __fdiv_rn(most, (float)LARGEST) : finite ? 0.0f : __uint_as_float(0x7fc00000u);
        *reinterpret_cast<float *>(slice + code_bytes + 4 * (start >> shift)) = scale;
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const size i = start + (p * group + member) * PACK;
        word words[WORDS<BITS>] = {};
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            const float code = finite ? rintf(numbers[p][j] * inverse) : 0.0f;
            words[j / PER_WORD] |= ((word)(int)code & ((1u << BITS) - 1)) << (BITS * (j % PER_WORD));
        }
        word *codes = reinterpret_cast<word *>(slice + i * BITS / 8);
        if constexpr (WORDS<BITS> == 2) {
            if (i + PER_WORD < elements) {
                *reinterpret_cast<uint2 *>(codes) = make_uint2(words[0], words[1]);
                continue;
            }
        }
        if (i < elements) codes[0] = words[0];
    }
    if (threadIdx.x == 0 && first + TILE >= elements) {
        const size end = code_bytes + 4 * ((elements + ((size)1 << shift) - 1) >> shift);
        for (size at = end; at < bytes; at += 4) *reinterpret_cast<word *>(slice + at) = 0;
    }
}

// The place of a slice in the transposed matrix.
__device__ inline size transposed(size slice, size slices, size columns) {
    return slice % columns * (slices / columns) + slice / columns;
}

template <int BITS, class T>
__device__ void quantize(const T *x, byte *out, size slices, size columns, size elements, size code_bytes, size bytes,
                         int shift, bool wide) {
    const Tile tile(elements);
    const T *from = x + tile.slice * elements;
    byte *to = out + transposed(tile.slice, slices, columns) * bytes;
    encode_tile<BITS>(to, tile.first, elements, code_bytes, bytes, shift, [=](size i, float (&numbers)[PACK]) {
        load_pack(from, i, elements, numbers, wide);
    });
}

template <int BITS>
__device__ void requantize(const byte *codes, byte *out, size parts, size slices, size columns, size elements,
                           size code_bytes, size bytes, int shift) {
    const Tile tile(elements);
    const byte *from = codes + tile.slice * bytes;
    byte *to = out + transposed(tile.slice, slices, columns) * bytes;
    encode_tile<BITS>(to, tile.first, elements, code_bytes, bytes, shift, [=](size i, float (&sums)[PACK]) {
        for (int j = 0; j < PACK; ++j) sums[j] = 0.0f;
        if (i >= elements) return;
#pragma unroll 4
        for (size part = 0; part < parts; ++part)
            add_pack<BITS>(from + part * slices * bytes, i, elements, code_bytes, shift, sums);
        for (int j = 0; j < PACK; ++j)
            if (i + j >= elements) sums[j] = 0.0f;
    });
}

template <int BITS, class T>
__device__ void dequantize(const byte *codes, T *out, size parts, size slices, size elements, size code_bytes, size bytes,
                           int shift, bool accumulate, bool wide) {
    const Tile tile(elements);
    const byte *from = codes + tile.slice * bytes;
    T *to = out + tile.slice * elements;
    float sums[PACKS][PACK] = {};
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const size i = tile.first + (p * TILE_THREADS + threadIdx.x) * PACK;
        if (accumulate && i < elements) load_pack(to, i, elements, sums[p], wide);
    }
#pragma unroll 4
    for (size part = 0; part < parts; ++part) {
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const size i = tile.first + (p * TILE_THREADS + threadIdx.x) * PACK;
            if (i < elements) add_pack<BITS>(from + part * slices * bytes, i, elements, code_bytes, shift, sums[p]);
        }
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const size i = tile.first + (p * TILE_THREADS + threadIdx.x) * PACK;
        if (i < elements) store_pack(to, i, elements, sums[p], wide);
    }
}

#define DEFINE_BITS(NAME, T, BITS)                                                                                    \
    extern "C" __global__ void quantize_##NAME##_##BITS(const T *x, byte *out, size slices, size columns,             \
                                                        size elements, size code_bytes, size bytes, int shift,        \
                                                        bool wide) {                                                  \
        quantize<BITS>(x, out, slices, columns, elements, code_bytes, bytes, shift, wide);                            \
    }                                                                                                                 \
    extern "C" __global__ void dequantize_##NAME##_##BITS(const byte *codes, T *out, size parts, size slices,         \
                                                          size elements, size code_bytes, size bytes, int shift,      \
                                                          bool accumulate, bool wide) {                               \
        dequantize<BITS>(codes, out, parts, slices, elements, code_bytes, bytes, shift, accumulate, wide);            \
    }
#define DEFINE(NAME, T) DEFINE_BITS(NAME, T, 4) DEFINE_BITS(NAME, T, 8)
FOR_TYPES(DEFINE)

#define DEFINE_REQUANTIZE(BITS)                                                                                       \
    extern "C" __global__ void requantize_##BITS(const byte *codes, byte *out, size parts, size slices, size columns, \
                                                 size elements, size code_bytes, size bytes, int shift) {             \
        requantize<BITS>(codes, out, parts, slices, columns, elements, code_bytes, bytes, shift);                     \
    }
DEFINE_REQUANTIZE(4)
DEFINE_REQUANTIZE(8)
