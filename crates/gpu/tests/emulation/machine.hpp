// An emulated GPU for kernels that are compiled as C++: the functions of common.cuh, the grid, and warp- and block-wide
// operations.
//
// Every thread of a block is a fiber. The lanes of a warp meet at warp-wide operations, and the threads of a block at
// barriers. The caller chooses the order in which warps run in between. -fsanitize=thread inserts a call before every
// memory access, which ends the program on: an access outside of all buffers, an access that conflicts with one of
// another thread since the two last met, and an access to the target of a pending copy. Shared memory starts as NaN.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

using std::min;

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)

struct Index {
    unsigned int x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

typedef unsigned int token;
typedef long long size;

constexpr int WARP = 32;
constexpr int PACK = 8;
constexpr float LOG2_E = 1.4426950408889634f;
#define INFINITE INFINITY

struct bf16 {
    unsigned short bits;
};

struct f16 {
    unsigned short bits;
};

inline float widen(bf16 x) {
    const unsigned int bits = (unsigned int)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

inline float widen(f16 x) {
    _Float16 half;
    memcpy(&half, &x.bits, 2);
    return (float)half;
}

template <class T> T narrow(float x);

template <> inline bf16 narrow<bf16>(float x) {
    unsigned int bits;
    memcpy(&bits, &x, 4);
    if (x != x) return bf16{(unsigned short)(bits >> 16 | 0x40)};
    return bf16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <> inline f16 narrow<f16>(float x) {
    const _Float16 half = (_Float16)x;
    f16 rounded;
    memcpy(&rounded.bits, &half, 2);
    return rounded;
}

template <class T> inline unsigned int narrow_word(const float *x) {
    return narrow<T>(x[0]).bits | (unsigned int)narrow<T>(x[1]).bits << 16;
}

template <int N, class T> inline void load(const T *from, float (&x)[N]) {
    for (int i = 0; i < N; ++i) x[i] = widen(from[i]);
}

struct Sum {
    float operator()(float a, float b) const { return a + b; }
};

struct Maximum {
    float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Subnormal results are 0.
inline float power_of_two(float x) {
    const float power = exp2f(x);
    return power < 1.17549435e-38f ? 0.0f : power;
}

inline int __popc(unsigned int x) { return __builtin_popcount(x); }

// Warp-wide and block-wide operations.
float shuffle_xor(float value, int mask);
unsigned long long ballot(bool predicate);
#define SHUFFLE_XOR(value, mask) shuffle_xor(value, mask)
#define BALLOT(predicate) ballot(predicate)
void __syncwarp();
void __syncthreads();

void end_group_of_copies();
void await_groups(int pending);
template <int PENDING> inline void await_copies() { await_groups(PENDING); }

// Functions for the host.

enum class Order { Ascending, Descending, Shuffled, Interleaved };

// Sets, for the next launches, the order in which warps run, and whether copies complete as late as possible or at
// once.
void play(Order order, bool late_copies);

// Registers memory that kernels may read, and optionally write; nothing else is allowed until `forget`.
void allow(const void *memory, size_t bytes, bool writable);
void forget();

// Runs a kernel's body for every thread of every block, with this many bytes of shared memory.
void launch(Index grid, int threads, size_t shared_bytes, std::function<void()> body);
