// One matrix instruction on row-major matrices: A [M, K], B [K, N], D [M, N] in fp32, for every block.
//
// MAP_ROW gives the row of D that a register of a lane holds; the macro lets a test seed a wrong one.

typedef short short4v __attribute__((ext_vector_type(4)));
typedef short short2v __attribute__((ext_vector_type(2)));
typedef _Float16 half4v __attribute__((ext_vector_type(4)));
typedef float float4v __attribute__((ext_vector_type(4)));
typedef float float16v __attribute__((ext_vector_type(16)));
typedef float float32v __attribute__((ext_vector_type(32)));

#ifndef MAP_ROW
#define MAP_ROW(side, lane, r) (side == 4 ? r : r / 4 * (256 / side) + (lane / side) * 4 + r % 4)
#endif

template <class T> __device__ T element(const void *from, int index) { return ((const T *)from)[index]; }

// Element `i` of the `PER_LANE` numbers that this lane holds of block `block`, as bits.
#define PRODUCT(NAME, SIDE, INNER, BLOCKS, PER_LANE, ELEMENT, VECTOR, RESULT, BUILTIN)                                \
    extern "C" __global__ void __launch_bounds__(64) NAME(const void *a, const void *b, float *d) {                   \
        const int lane = threadIdx.x, line = lane % SIDE, group = lane / SIDE;                                        \
        const int block = BLOCKS > 1 ? group : 0, first = BLOCKS > 1 ? 0 : group * PER_LANE;                          \
        VECTOR left, right;                                                                                           \
        for (int i = 0; i < PER_LANE; ++i) {                                                                          \
            ((ELEMENT *)&left)[i] = element<ELEMENT>(a, (block * SIDE + line) * INNER + first + i);                   \
            ((ELEMENT *)&right)[i] = element<ELEMENT>(b, (block * INNER + first + i) * SIDE + line);                  \
        }                                                                                                             \
        RESULT sum = {};                                                                                              \
        sum = BUILTIN(left, right, sum, 0, 0, 0);                                                                     \
        sum = BUILTIN(left, right, sum, 0, 0, 0);                                                                     \
        constexpr int REGISTERS = sizeof(RESULT) / 4 / (SIDE == 4 ? 1 : BLOCKS);                                      \
        for (int r = 0; r < (int)sizeof(RESULT) / 4; ++r) {                                                           \
            const int of = SIDE == 4 ? lane / 4 : r / REGISTERS;                                                      \
            d[(of * SIDE + MAP_ROW(SIDE, lane, (r % REGISTERS))) * SIDE + line] = sum[r];                             \
        }                                                                                                             \
    }

PRODUCT(f32_32x32x2, 32, 2, 1, 1, float, float, float16v, __builtin_amdgcn_mfma_f32_32x32x2f32)
PRODUCT(f32_32x32x1, 32, 1, 2, 1, float, float, float32v, __builtin_amdgcn_mfma_f32_32x32x1f32)
PRODUCT(f32_16x16x4, 16, 4, 1, 1, float, float, float4v, __builtin_amdgcn_mfma_f32_16x16x4f32)
PRODUCT(f32_16x16x1, 16, 1, 4, 1, float, float, float16v, __builtin_amdgcn_mfma_f32_16x16x1f32)
PRODUCT(f32_4x4x1, 4, 1, 16, 1, float, float, float4v, __builtin_amdgcn_mfma_f32_4x4x1f32)
PRODUCT(f16_32x32x8, 32, 8, 1, 4, _Float16, half4v, float16v, __builtin_amdgcn_mfma_f32_32x32x8f16)
PRODUCT(f16_32x32x4, 32, 4, 2, 4, _Float16, half4v, float32v, __builtin_amdgcn_mfma_f32_32x32x4f16)
PRODUCT(f16_16x16x16, 16, 16, 1, 4, _Float16, half4v, float4v, __builtin_amdgcn_mfma_f32_16x16x16f16)
PRODUCT(f16_16x16x4, 16, 4, 4, 4, _Float16, half4v, float16v, __builtin_amdgcn_mfma_f32_16x16x4f16)
PRODUCT(f16_4x4x4, 4, 4, 16, 4, _Float16, half4v, float4v, __builtin_amdgcn_mfma_f32_4x4x4f16)
PRODUCT(bf16_32x32x8, 32, 8, 1, 4, short, short4v, float16v, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k)
PRODUCT(bf16_32x32x4, 32, 4, 2, 4, short, short4v, float32v, __builtin_amdgcn_mfma_f32_32x32x4bf16_1k)
PRODUCT(bf16_16x16x16, 16, 16, 1, 4, short, short4v, float4v, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k)
PRODUCT(bf16_16x16x4, 16, 4, 4, 4, short, short4v, float16v, __builtin_amdgcn_mfma_f32_16x16x4bf16_1k)
PRODUCT(bf16_4x4x4, 4, 4, 16, 4, short, short4v, float4v, __builtin_amdgcn_mfma_f32_4x4x4bf16_1k)
