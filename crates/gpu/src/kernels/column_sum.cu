// out (+)= Σ_rows x, always in the same order: first chunks of rows to partial sums, then the partial sums.
//
// column_sum: grid (columns / (LANES·N), chunks), LANES·GROUPS threads. A thread owns N columns. The groups share the
// rows of the chunk, and their sums are added in order. x [rows, width] → partial [chunks, width] f32.
// sum_partials: grid (columns / LANES, gradients), LANES·PART_GROUPS threads. partial [gradients, parts, width] f32 →
// up to three gradients [width]. Bit i of `adding` is set if gradient i is accumulated.
// Reads x once: [65536, 3072] bf16 is 403 MB, 94 µs at 4.3 TB/s.

template <int N, class T>
__device__ void column_sum(const T *__restrict__ x, float *__restrict__ partial, size rows, size width) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const size column = (blockIdx.x * (size)LANES + lane) * N;
    const size chunk = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * chunk;
    const size end = first + chunk < rows ? first + chunk : rows;
    float sum[N] = {};
    if (column < width) {
#pragma unroll 4
        for (size row = first + group; row < end; row += GROUPS) {
            float here[N];
            load<N>(x + row * width + column, here);
            for (int j = 0; j < N; ++j) sum[j] += here[j];
        }
    }
    add_groups(sum, lane, group);
    if (group == 0 && column < width) store<N>(partial + blockIdx.y * width + column, sum);
}

// There are few columns, so many threads share each.
constexpr int PART_GROUPS = 32;

template <class G>
__device__ void sum_partials(const float *__restrict__ partial, G *first, G *second, G *third, size parts, size width,
                             unsigned int adding) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const size column = blockIdx.x * (size)LANES + lane;
    G *out = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    partial += blockIdx.y * parts * width;
    float sum[1] = {};
    if (column < width) {
#pragma unroll 8
        for (size part = group; part < parts; part += PART_GROUPS) sum[0] += partial[part * width + column];
    }
    add_groups<PART_GROUPS>(sum, lane, group);
    if (group == 0 && column < width) {
        if (adding >> blockIdx.y & 1) sum[0] += widen(out[column]);
        out[column] = narrow<G>(sum[0]);
    }
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void column_sum_##NAME(const T *x, float *partial, size rows, size width) {                 \
        column_sum<1>(x, partial, rows, width);                                                                       \
    }                                                                                                                 \
    extern "C" __global__ void column_sum_wide_##NAME(const T *x, float *partial, size rows, size width) {            \
        column_sum<PACK>(x, partial, rows, width);                                                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(LANES * PART_GROUPS)                                                 \
        sum_partials_##NAME(const float *partial, T *first, T *second, T *third, size parts, size width,              \
                            unsigned int adding) {                                                                    \
        sum_partials(partial, first, second, third, parts, width, adding);                                            \
    }
FOR_TYPES(DEFINE)
