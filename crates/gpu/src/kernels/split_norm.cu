// RMSNorm of rows whose columns are divided among tensor-parallel ranks, and the sums over a rank's columns.
//
// x, y, dy, out, dx [rows, width]; weight [width]; sums over whole rows, squares and dots, [rows] f32; statistics [rows, 2] f32: 0
// and 1/√(squares · share + ε), where share is one over the number of all columns. One block per row; every element is read and
// written once, in f32. row_dots adds in a fixed order; weight may be null. dx may be dy: a thread reads what it writes.
// [24576, 1024] bf16: row_dots 101 MB, split_norm 101 MB, split_norm_backward 151 MB.

template <class T>
__device__ void row_dots(const T *x, const T *y, const T *weight, float *out, size width) {
    const size first = blockIdx.x * width;
    float sum = 0;
    for (size i = threadIdx.x; i < width; i += blockDim.x)
        sum += widen(x[first + i]) * (weight ? widen(weight[i]) : 1.0f) * widen(y[first + i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

template <class T>
__device__ void split_norm(const T *x, const T *weight, const float *squares, T *out, float *statistics, size width,
                           float share, float epsilon) {
    const size first = blockIdx.x * width;
    const float rstd = rsqrtf(squares[blockIdx.x] * share + epsilon);
    for (size i = threadIdx.x; i < width; i += blockDim.x)
        out[first + i] = narrow<T>(widen(x[first + i]) * rstd * widen(weight[i]));
    if (threadIdx.x == 0) {
        statistics[2 * blockIdx.x] = 0;
        statistics[2 * blockIdx.x + 1] = rstd;
    }
}

template <class T>
__device__ void split_norm_backward(const T *dy, const T *x, const float *statistics, const T *weight,
                                    const float *dots, T *dx, size width, float share) {
    const size first = blockIdx.x * width;
    const float rstd = statistics[2 * blockIdx.x + 1], along = rstd * rstd * dots[blockIdx.x] * share;
    for (size i = threadIdx.x; i < width; i += blockDim.x)
        dx[first + i] = narrow<T>(rstd * (widen(dy[first + i]) * widen(weight[i]) - widen(x[first + i]) * along));
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        row_dots_##NAME(const T *x, const T *y, const T *weight, float *out, size width) {                            \
        row_dots(x, y, weight, out, width);                                                                           \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        split_norm_##NAME(const T *x, const T *weight, const float *squares, T *out, float *statistics, size width,   \
                          float share, float epsilon) {                                                               \
        split_norm(x, weight, squares, out, statistics, width, share, epsilon);                                       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        split_norm_backward_##NAME(const T *dy, const T *x, const float *statistics, const T *weight,                 \
                                   const float *dots, T *dx, size width, float share) {                               \
        split_norm_backward(dy, x, statistics, weight, dots, dx, width, share);                                       \
    }
FOR_TYPES(DEFINE)
