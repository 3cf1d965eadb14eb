// Prepended to every kernel file: storage types, packs of eight elements, reductions in a fixed order.
//
// One source for CUDA (NVRTC, no headers) and HIP (hiprtc). WARP, the threads of a warp, is defined by whoever compiles:
// AMD's GPUs have 64 or 32. All arithmetic is in f32; storage is f32, bf16 or f16. A
// pack is eight elements, moved in pieces of 16 bytes; pointers to packs are 16-byte aligned. Kernels that are bound by
// f32 traffic move four elements per thread, so that a warp accesses whole cache lines.

#if defined(__HIP__) || defined(__HIPCC__)
#define SHUFFLE_XOR(value, mask) __shfl_xor(value, mask)
#define BALLOT(predicate) ((unsigned long long)__ballot(predicate))
#define SYNCHRONIZE_WARP() __builtin_amdgcn_wave_barrier()
#else
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define BALLOT(predicate) ((unsigned long long)__ballot_sync(0xffffffffu, predicate))
#define SYNCHRONIZE_WARP() __syncwarp()
#endif

typedef unsigned int token;
typedef long long size;

constexpr int PACK = 8;
#define INFINITE __int_as_float(0x7f800000)

struct bf16 {
    unsigned short bits;
};

struct f16 {
    unsigned short bits;
};

__device__ inline float widen(float x) { return x; }

__device__ inline float widen(bf16 x) { return __uint_as_float((unsigned int)x.bits << 16); }

__device__ inline float widen(f16 x) {
#if defined(__HIP__) || defined(__HIPCC__)
    _Float16 half;
    memcpy(&half, &x.bits, 2);
    return (float)half;
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#endif
}

// Rounds to the nearest, ties to even.
template <class T> __device__ T narrow(float x);

template <> __device__ inline float narrow<float>(float x) { return x; }

template <> __device__ inline bf16 narrow<bf16>(float x) {
#if defined(__HIP__) || defined(__HIPCC__)
    const unsigned int bits = __float_as_uint(x);
    if (x != x) return bf16{(unsigned short)(bits >> 16 | 0x40)};
    return bf16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#else
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
    return rounded;
#endif
}

template <> __device__ inline f16 narrow<f16>(float x) {
    f16 rounded;
#if defined(__HIP__) || defined(__HIPCC__)
    const _Float16 half = (_Float16)x;
    memcpy(&rounded.bits, &half, 2);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
#endif
    return rounded;
}

// The one or two elements in 32 bits, the first in the low half.
template <class T> __device__ inline void widen_word(unsigned int word, float *x) {
    if constexpr (sizeof(T) == 4) {
        x[0] = __uint_as_float(word);
    } else {
        x[0] = widen(T{(unsigned short)word});
        x[1] = widen(T{(unsigned short)(word >> 16)});
    }
}

template <> __device__ inline void widen_word<bf16>(unsigned int word, float *x) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
}

// The inverse; rounds like narrow.
template <class T> __device__ inline unsigned int narrow_word(const float *x) {
    if constexpr (sizeof(T) == 4) {
        return __float_as_uint(x[0]);
    } else {
        return narrow<T>(x[0]).bits | (unsigned int)narrow<T>(x[1]).bits << 16;
    }
}

#if !(defined(__HIP__) || defined(__HIPCC__))
template <> __device__ inline unsigned int narrow_word<bf16>(const float *x) {
    unsigned int word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
    return word;
}

template <> __device__ inline unsigned int narrow_word<f16>(const float *x) {
    unsigned int word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
    return word;
}
#endif

// Number of elements that are 16 bytes in the widest of these types.
template <class T, class... More> constexpr int piece() {
    int bytes = sizeof(T);
    ((bytes = sizeof(More) > bytes ? sizeof(More) : bytes), ...);
    return 16 / bytes;
}

// A pack, or another multiple of 16 bytes, in its storage type: while the load is pending it needs fewer registers than
// its f32 values.
template <class T, int N = PACK> struct Raw {
    uint4 pieces[N * sizeof(T) / 16];
};

template <int N = PACK, class T> __device__ inline Raw<T, N> load_raw(const T *from) {
    Raw<T, N> raw;
#pragma unroll
    for (int piece = 0; piece < sizeof(raw) / 16; ++piece) raw.pieces[piece] = reinterpret_cast<const uint4 *>(from)[piece];
    return raw;
}

template <class T, int N> __device__ inline void widen(const Raw<T, N> &raw, float (&x)[N]) {
    constexpr int PIECE = 16 / sizeof(T), WORD = 4 / sizeof(T);
#pragma unroll
    for (int piece = 0; piece < N / PIECE; ++piece) {
        const uint4 from = raw.pieces[piece];
        const unsigned int words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) widen_word<T>(words[i], x + piece * PIECE + i * WORD);
    }
}

// N is 1, or the elements have 8 bytes or a multiple of 16.
template <int N, class T> __device__ inline void load(const T *from, float (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = widen(from[0]);
    } else if constexpr (N * sizeof(T) == 8) {
        const uint2 words = *reinterpret_cast<const uint2 *>(from);
        widen_word<T>(words.x, x);
        widen_word<T>(words.y, x + N / 2);
    } else {
        widen(load_raw<N>(from), x);
    }
}

template <int N, class T> __device__ inline void store(T *to, const float (&x)[N]) {
    if constexpr (N == 1) {
        to[0] = narrow<T>(x[0]);
    } else if constexpr (N * sizeof(T) == 8) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(narrow_word<T>(x), narrow_word<T>(x + N / 2));
    } else {
        constexpr int PIECE = 16 / sizeof(T);
#pragma unroll
        for (int piece = 0; piece < N / PIECE; ++piece) {
            constexpr int WORD = 4 / sizeof(T);
            unsigned int words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = narrow_word<T>(x + piece * PIECE + i * WORD);
            reinterpret_cast<uint4 *>(to)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Copies 16 bytes to shared memory without passing through registers. After await_copies<PENDING>() a thread sees its
// own copies, except for its PENDING most recent groups of copies.
__device__ inline void copy_to_shared(void *to, const void *from) {
#if defined(__HIP__) || defined(__HIPCC__)
    *(uint4 *)to = *(const uint4 *)from;
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#endif
}

__device__ inline void end_group_of_copies() {
#if !(defined(__HIP__) || defined(__HIPCC__))
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING> __device__ inline void await_copies() {
#if !(defined(__HIP__) || defined(__HIPCC__))
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

template <int N> struct Width {
    static constexpr int value = N;
};

// Calls body(Width<n>, index) for every element: N at a time if `wide` (all pointers are aligned), then singly.
template <int N = PACK, class Body> __device__ inline void each(size elements, bool wide, Body body) {
    const size thread = blockIdx.x * (size)blockDim.x + threadIdx.x;
    const size threads = gridDim.x * (size)blockDim.x;
    const size packs = wide ? elements / N : 0;
    for (size i = thread; i < packs; i += threads) body(Width<N>(), i * N);
    for (size i = packs * N + thread; i < elements; i += threads) body(Width<1>(), i);
}

// Calls body(Width<N>, column) for every column of a row that the block's threads share.
template <class Body> __device__ inline void each_column(size width, bool wide, Body body) {
    const size packs = wide ? width / PACK : 0;
#pragma unroll 4
    for (size i = threadIdx.x; i < packs; i += blockDim.x) body(Width<PACK>(), i * PACK);
    for (size i = packs * PACK + threadIdx.x; i < width; i += blockDim.x) body(Width<1>(), i);
}

struct Sum {
    template <class A> __device__ A operator()(A a, A b) const { return a + b; }
};

struct Maximum {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class A, class Operation> __device__ inline A warp_reduce(A x, Operation operation) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = operation(x, SHUFFLE_XOR(x, mask));
    return x;
}

// Reductions over the block, whose threads are whole warps. Every thread gets the same result, always in the same
// order.
template <class A, class Operation> __device__ inline A block_reduce(A x, A neutral, Operation operation) {
    __shared__ A partial[32];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_reduce(x, operation);
    if (warps == 1) return x;
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < warps ? partial[lane] : neutral, operation);
    // The next reduction may then write.
    __syncthreads();
    return x;
}

template <class A> __device__ inline A block_sum(A x) { return block_reduce(x, (A)0, Sum()); }

// Two block_sums at the same time.
__device__ inline void block_sums(float &x, float &y) {
    __shared__ float2 partial[32];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_reduce(x, Sum()), y = warp_reduce(y, Sum());
    if (warps == 1) return;
    if (lane == 0) partial[warp] = make_float2(x, y);
    __syncthreads();
    const float2 pair = lane < warps ? partial[lane] : make_float2(0, 0);
    x = warp_reduce(pair.x, Sum()), y = warp_reduce(pair.y, Sum());
    __syncthreads();
}

// Column sums: LANES adjacent threads own N columns each, and GROUPS of them share the rows.
constexpr int LANES = 32;
constexpr int GROUPS = 8;

// Adds the groups' sums in order; group 0 gets the total. Use once per kernel, COUNT and N.
template <int COUNT = GROUPS, int N> __device__ inline void add_groups(float (&sum)[N], int lane, int group) {
    __shared__ float shared[COUNT][LANES * N];
    for (int j = 0; j < N; ++j) shared[group][lane * N + j] = sum[j];
    __syncthreads();
    if (group > 0) return;
    for (int other = 1; other < COUNT; ++other)
        for (int j = 0; j < N; ++j) sum[j] += shared[other][lane * N + j];
}

constexpr float LOG2_E = 1.4426950408889634f;

// 2^x in one instruction; subnormal results are 0.
__device__ inline float power_of_two(float x) {
#if defined(__HIP__) || defined(__HIPCC__)
    return exp2f(x);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

// σ(x); 0 for very negative x, where the exponential overflows.
__device__ inline float logistic(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Instantiates a macro for every storage type, and for every pair of them.
#define FOR_TYPES(MACRO) MACRO(f32, float) MACRO(bf16, bf16) MACRO(f16, f16)
#define FOR_PAIRS(MACRO)                                                                                              \
    MACRO(f32, float, f32, float)                                                                                     \
    MACRO(f32, float, bf16, bf16)                                                                                     \
    MACRO(f32, float, f16, f16)                                                                                       \
    MACRO(bf16, bf16, f32, float)                                                                                     \
    MACRO(bf16, bf16, bf16, bf16)                                                                                     \
    MACRO(bf16, bf16, f16, f16)                                                                                       \
    MACRO(f16, f16, f32, float)                                                                                       \
    MACRO(f16, f16, bf16, bf16)                                                                                       \
    MACRO(f16, f16, f16, f16)
// A compute type, and a gradient of the same type or f32.
#define FOR_GRADIENTS(MACRO)                                                                                          \
    MACRO(f32, float, f32, float)                                                                                     \
    MACRO(bf16, bf16, bf16, bf16)                                                                                     \
    MACRO(bf16, bf16, f32, float)                                                                                     \
    MACRO(f16, f16, f16, f16)                                                                                         \
    MACRO(f16, f16, f32, float)

// With SOFT_CAP, scores or logits are bounded by it. `slope` is the derivative, from the bounded number.
#ifdef SOFT_CAP
constexpr bool CAPPED = true;
__device__ inline float bounded(float x) { return SOFT_CAP * tanhf(x / SOFT_CAP); }
__device__ inline float slope(float x) { return 1.0f - x / SOFT_CAP * (x / SOFT_CAP); }
#else
constexpr bool CAPPED = false;
__device__ inline float bounded(float x) { return x; }
__device__ inline float slope(float) { return 1.0f; }
#endif
