// Quantisation in blocks with one scale each (ZeRO++, arXiv 2306.10209): quantise, dequantise and reduce, and all of it in
// one pass.
//
// x, out [slices, elements] f32, bf16 or f16. A slice of codes, `bytes` long: integers of BITS, the first in the lowest
// bits, padded to words; at `code_bytes` the scales, f32, one for 2^shift elements; zeros up to 16 bytes. Slices start at
// multiples of 16 bytes. `wide`: every slice of x or out is 16-byte aligned. Sums over parts [parts, slices] are fused
// multiply-adds in f32, in order. The same numbers give the same bytes on every device.
//
// The grid is [tiles of a slice, slices]. A thread block holds a tile of whole blocks in registers, so everything is read once and written once. Bytes per number: its own,
// BITS / 8 per part, 4 / 2^shift. An H200 issues about 20 instructions in the time that a copy needs for a number of bf16
// and its code, so threads have many numbers, and conversions are logic on the bits of floats.

typedef unsigned int word;
typedef unsigned char byte;

constexpr float MIN_BLOCK_MAXIMUM = 7.888609052210118e-31f; // 2^-100: blocks of smaller numbers are zeros

constexpr int TILE_THREADS = 256;

// The tile of this thread block, and the thread's part of it: VALUES numbers of one block, in pieces of N adjacent ones. The
// threads of a block interleave their pieces, so that a warp accesses whole sectors.
template <int VALUES> struct Tile {
    static constexpr int SIZE = TILE_THREADS * VALUES; // at least the largest block
    size first;        // element of the slice
    int left;          // elements of the slice from there on, at most SIZE
    int group, member; // threads that share a block, and this thread's place among them
    int start;         // first element of the thread's block, in the tile
    int shift;

    __device__ Tile(size elements, int shift) : shift(shift) {
        first = (size)blockIdx.x * SIZE;
        left = elements - first < SIZE ? (int)(elements - first) : SIZE;
        group = (1 << shift) / VALUES;
        member = threadIdx.x & (group - 1);
        start = (threadIdx.x - member) * VALUES;
    }

    // The first element of a piece, in the tile.
    template <int N> __device__ int at(int piece) const { return start + (piece * group + member) * N; }
};

// The index of this thread block's slice.
__device__ inline size slice_index() { return blockIdx.y; }

// Stores a piece of 16 bytes. Written in C++, the store is split if the other branch stores the last number, too.
template <class T, int N> __device__ inline void store_piece(T *to, const float (&x)[N]) {
#if defined(__HIP__) || defined(__HIPCC__)
    store(to, x);
#else
    constexpr int WORD = 4 / sizeof(T);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(narrow_word<T>(x)),
                 "r"(narrow_word<T>(x + WORD)), "r"(narrow_word<T>(x + 2 * WORD)), "r"(narrow_word<T>(x + 3 * WORD))
                 : "memory");
#endif
}

// A thread's numbers.
template <int VALUES, int N> struct Numbers {
    static constexpr int PIECES = VALUES / N;
    float pieces[PIECES][N];

    // Numbers after the end of the slice are zero.
    template <class T> __device__ void load_from(const T *x, const Tile<VALUES> &tile, bool wide) {
        x += tile.first;
        if (wide && tile.left == tile.SIZE) {
#pragma unroll
            for (int p = 0; p < PIECES; ++p) load(x + tile.template at<N>(p), pieces[p]);
        } else {
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                for (int j = 0; j < N; ++j) {
                    const int i = tile.template at<N>(p) + j;
                    pieces[p][j] = i < tile.left ? widen(x[i]) : 0.0f;
                }
        }
    }

    template <class T> __device__ void store_to(T *x, const Tile<VALUES> &tile, bool wide) const {
        x += tile.first;
        if (wide && tile.left == tile.SIZE) {
#pragma unroll
            for (int p = 0; p < PIECES; ++p) store_piece(x + tile.template at<N>(p), pieces[p]);
        } else {
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                for (int j = 0; j < N; ++j) {
                    const int i = tile.template at<N>(p) + j;
                    if (i < tile.left) x[i] = narrow<T>(pieces[p][j]);
                }
        }
    }

    __device__ void clear_after_end(const Tile<VALUES> &tile) {
        if (tile.left == tile.SIZE) return;
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            for (int j = 0; j < N; ++j)
                if (tile.template at<N>(p) + j >= tile.left) pieces[p][j] = 0.0f;
    }
};

// The codes of a piece of N numbers: one access of 2 to 16 bytes.
template <int BITS, int N> struct Codes {
    static constexpr int BYTES = N * BITS / 8;
    word words[BYTES < 4 ? 1 : BYTES / 4];

    __device__ void load_from(const byte *from) {
        if constexpr (BYTES == 2) {
            words[0] = *reinterpret_cast<const unsigned short *>(from);
        } else if constexpr (BYTES == 4) {
            words[0] = *reinterpret_cast<const word *>(from);
        } else if constexpr (BYTES == 8) {
            const uint2 pair = *reinterpret_cast<const uint2 *>(from);
            words[0] = pair.x, words[1] = pair.y;
        } else {
            const uint4 all = *reinterpret_cast<const uint4 *>(from);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        }
    }

    // Writes at most `left` bytes, a multiple of 4.
    __device__ void store_to(byte *to, int left) const {
        if (left < BYTES) {
            for (int i = 0; i < BYTES / 4; ++i)
                if (4 * i < left) reinterpret_cast<word *>(to)[i] = words[i];
        } else if constexpr (BYTES == 2) {
            *reinterpret_cast<unsigned short *>(to) = words[0];
        } else if constexpr (BYTES == 4) {
            *reinterpret_cast<word *>(to) = words[0];
        } else if constexpr (BYTES == 8) {
            *reinterpret_cast<uint2 *>(to) = make_uint2(words[0], words[1]);
        } else {
            *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// A code of 8 bits, from a word of codes to which 128 was added each. On NVIDIA it becomes the low bits of 2^23, because
// conversions are slow there.
__device__ inline float code_of_byte(word biased, int index) {
#if defined(__HIP__) || defined(__HIPCC__)
    return (float)(biased >> 8 * index & 0xff) - 128.0f;
#else
    return __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440 | index)) - (8388608.0f + 128.0f);
#endif
}

// (x & mask) ^ flipped
__device__ inline word masked_xor(word x, word mask, word flipped) {
#if defined(__HIP__) || defined(__HIPCC__)
    return (x & mask) ^ flipped;
#else
    // With two constants, compilers use two instructions.
    word result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(x), "r"(mask), "r"(flipped));
    return result;
#endif
}

// sums += codes * scale
template <int BITS, int N> __device__ inline void add(const Codes<BITS, N> &codes, float scale, float (&sums)[N]) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float code = code_of_byte(codes.words[j / 4] ^ 0x80808080u, j % 4);
            sums[j] = fmaf(code, scale, sums[j]);
        }
    } else {
        // The k-th of four codes is not shifted: it becomes 16^k * (code + 8) in the low bits of 2^23. Products with the
        // powers of two are exact, because scales are 0, NaN or far above the subnormal numbers.
        const float scales[4] = {scale, scale / 16, scale / 256, scale / 4096};
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int k = j % 4;
            const word four = codes.words[j / 8] >> (j / 4 % 2 * 16);
            const float biased = __uint_as_float(masked_xor(four, 0xfu << 4 * k, 0x4b000000u | 8u << 4 * k));
            sums[j] = fmaf(biased - (8388608.0f + (8 << 4 * k)), scales[k], sums[j]);
        }
    }
}

// Adds the thread's numbers of every part. Those after the end of the slice are undefined.
template <int BITS, int VALUES, int N>
__device__ inline void add_parts(const byte *codes, int parts, size slices, size code_bytes, size bytes,
                                 const Tile<VALUES> &tile, Numbers<VALUES, N> &sums) {
    constexpr int PIECES = VALUES / N;
    // Pieces after the end of the slice are replaced by its last one.
    const int last = tile.left - 1, last_piece = last / N * N;
    const word scale_at = (tile.start < last ? tile.start : last) >> tile.shift << 2;
    word codes_at[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const int at = tile.template at<N>(p);
        codes_at[p] = (at < last_piece ? at : last_piece) * BITS / 8;
    }
    codes += slice_index() * bytes + tile.first * BITS / 8;
    const byte *scales = codes + code_bytes + (tile.first >> tile.shift) * 4 - tile.first * BITS / 8;
    // The next COUNT parts, which are all loaded before the first is added.
    const auto add_some = [&](auto count) {
        constexpr int COUNT = decltype(count)::value;
        Codes<BITS, N> pieces[COUNT][PIECES];
        float scale[COUNT];
#pragma unroll
        for (int part = 0; part < COUNT; ++part) {
            scale[part] = *reinterpret_cast<const float *>(scales + scale_at);
#pragma unroll
            for (int p = 0; p < PIECES; ++p) pieces[part][p].load_from(codes + codes_at[p]);
            codes += slices * bytes, scales += slices * bytes;
        }
#pragma unroll
        for (int part = 0; part < COUNT; ++part)
#pragma unroll
            for (int p = 0; p < PIECES; ++p) add(pieces[part][p], scale[part], sums.pieces[p]);
    };
    constexpr int BATCH = VALUES * BITS < 256 ? 4 : 2; // 64 bytes
    for (; parts >= BATCH; parts -= BATCH) add_some(Width<BATCH>());
#pragma unroll 1
    for (; parts > 0; --parts) add_some(Width<1>());
}

// The larger of a magnitude and that of x; NaN if one of them is NaN.
__device__ inline float larger_magnitude(float most, float x) {
#if defined(__HIP__) || defined(__HIPCC__)
    // As integers, the bits of NaN are larger than those of all others.
    const word a = __float_as_uint(most), b = __float_as_uint(x) & 0x7fffffffu;
    return __uint_as_float(a > b ? a : b);
#else
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(most), "f"(fabsf(x)));
    return larger;
#endif
}

// The largest of the magnitudes that `group` adjacent threads have. The group is a power of two that divides the thread block.
__device__ inline float group_largest(float most, int group) {
    __shared__ float partial[TILE_THREADS / WARP];
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2)
        if (mask < group) most = larger_magnitude(most, SHUFFLE_XOR(most, mask));
    if (group <= WARP) return most;
    const int warp = threadIdx.x / WARP, warps = group / WARP;
    if (threadIdx.x % WARP == 0) partial[warp] = most;
    __syncthreads();
#pragma unroll 1
    for (int other = warp / warps * warps, i = 0; i < warps; ++i) most = larger_magnitude(most, partial[other + i]);
    return most;
}

// The lowest bytes of four words.
__device__ inline word low_bytes(word a, word b, word c, word d) {
#if defined(__HIP__) || defined(__HIPCC__)
    return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
#else
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#endif
}

// Numbers times `inverse`, rounded to the nearest integer, ties to even.
template <int BITS, int N> __device__ inline Codes<BITS, N> encode(const float (&numbers)[N], float inverse) {
    // Added to a number below 2^22 it rounds to an integer, which is then in the low bits. Codes of 4 bits have 8 added, so
    // that sums of two at their places do not borrow.
    constexpr float ROUND = 12582912.0f + (BITS == 4 ? 8.0f : 0.0f); // 1.5 * 2^23
    constexpr int PER_BYTE = 8 / BITS;
    word bytes[N / PER_BYTE];
#pragma unroll
    for (int i = 0; i < N / PER_BYTE; ++i) {
        bytes[i] = __float_as_uint(fmaf(numbers[i * PER_BYTE], inverse, ROUND));
        if constexpr (BITS == 4) bytes[i] += __float_as_uint(fmaf(numbers[2 * i + 1], inverse, ROUND)) << 4;
    }
    Codes<BITS, N> codes;
    if constexpr (Codes<BITS, N>::BYTES == 2) {
        codes.words[0] = low_bytes(bytes[0], bytes[1], 0, 0) ^ 0x8888u;
    } else {
#pragma unroll
        for (int i = 0; i < N / PER_BYTE; i += 4)
            codes.words[i / 4] = low_bytes(bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]) ^ (BITS == 4 ? 0x88888888u : 0);
    }
    return codes;
}

// Quantises a tile into its slice.
template <int BITS, int VALUES, int N>
__device__ inline void encode_tile(const Numbers<VALUES, N> &numbers, const Tile<VALUES> &tile, byte *out, size elements,
                                   size code_bytes, size bytes) {
    constexpr float MAX_CODE = (1 << (BITS - 1)) - 1;
    constexpr int PIECES = VALUES / N, TILE_BYTES = Tile<VALUES>::SIZE * BITS / 8;
    byte *slice = out + slice_index() * bytes;
    float most = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
        for (int j = 0; j < N; ++j) most = larger_magnitude(most, numbers.pieces[p][j]);
    most = group_largest(most, tile.group);
    const bool finite = most < INFINITE, some = finite && most >= MIN_BLOCK_MAXIMUM;
    const float inverse = some ? __fdiv_rn(MAX_CODE, most) : 0.0f;
    if (tile.member == 0 && tile.start < tile.left) {
        const float scale = some ? __fdiv_rn(most, MAX_CODE) : finite ? 0.0f : __uint_as_float(0x7fc00000u);
        *reinterpret_cast<float *>(slice + code_bytes + 4 * (tile.first + tile.start >> tile.shift)) = scale;
    }
    const size place = tile.first * BITS / 8;
    const int left = code_bytes - place < TILE_BYTES ? (int)(code_bytes - place) : TILE_BYTES;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        Codes<BITS, N> codes = encode<BITS>(numbers.pieces[p], inverse);
        for (word &packed : codes.words) packed = finite ? packed : 0;
        const int at = tile.template at<N>(p) * BITS / 8;
        codes.store_to(slice + place + at, left - at);
    }
    if (threadIdx.x == 0 && tile.first + tile.SIZE >= elements) {
        const size end = code_bytes + 4 * ((elements + ((size)1 << tile.shift) - 1) >> tile.shift);
        for (size at = end; at < bytes; at += 4) *reinterpret_cast<word *>(slice + at) = 0;
    }
}

// The minimal number of thread blocks of a multiprocessor also decides how early the compiler places loads.
#define KERNEL(BLOCKS) extern "C" __global__ __launch_bounds__(TILE_THREADS, BLOCKS) void

#define DEFINE_BITS(NAME, T, BITS)                                                                                    \
    KERNEL(6)                                                                                                         \
    quantize_##NAME##_##BITS(const T *x, byte *out, size elements, size code_bytes, size bytes, int shift, bool wide) { \
        const Tile<16> tile(elements, shift);                                                                         \
        Numbers<16, 16 / sizeof(T)> numbers;                                                                          \
        numbers.load_from(x + slice_index() * elements, tile, wide);                                                  \
        encode_tile<BITS>(numbers, tile, out, elements, code_bytes, bytes);                                           \
    }                                                                                                                 \
    KERNEL(4)                                                                                                         \
    dequantize_##NAME##_##BITS(const byte *codes, T *out, int parts, size slices, size elements, size code_bytes,     \
                               size bytes, int shift, bool accumulate, bool wide) {                                   \
        const Tile<16> tile(elements, shift);                                                                         \
        Numbers<16, 16 / sizeof(T)> sums = {};                                                                        \
        if (accumulate) sums.load_from(out + slice_index() * elements, tile, wide);                                   \
        add_parts<BITS>(codes, parts, slices, code_bytes, bytes, tile, sums);                                         \
        sums.store_to(out + slice_index() * elements, tile, wide);                                                    \
    }
#define DEFINE(NAME, T) DEFINE_BITS(NAME, T, 4) DEFINE_BITS(NAME, T, 8)
FOR_TYPES(DEFINE)

#define DEFINE_REQUANTIZE(BITS)                                                                                       \
    KERNEL(3)                                                                                                         \
    requantize_##BITS(const byte *codes, byte *out, int parts, size slices, size elements, size code_bytes,           \
                      size bytes, int shift) {                                                                        \
        const Tile<32> tile(elements, shift);                                                                         \
        Numbers<32, 128 / BITS> sums = {};                                                                            \
        add_parts<BITS>(codes, parts, slices, code_bytes, bytes, tile, sums);                                         \
        sums.clear_after_end(tile);                                                                                   \
        encode_tile<BITS>(sums, tile, out, elements, code_bytes, bytes);                                              \
    }
DEFINE_REQUANTIZE(4)
DEFINE_REQUANTIZE(8)
