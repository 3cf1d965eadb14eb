// Attention of new tokens over a key-value cache, for generation.
//
// qkv [batch, sequence, heads + 2·kv_heads, dim]: the new tokens; positions [batch, sequence]: their positions in their
// samples; keys, values [batch, kv_heads, capacity, dim]; out [batch, sequence, heads, dim], dim ≤ 256. A query sees the last
// `window` tokens. With SOFT_CAP scores are bounded by it.
// cache_append: one block per new token. cached_attention: grid (sequence, heads, batch), THREADS threads. A warp takes
// every WARPS-th key with a running maximum and sum (arXiv 2205.14135), and its lanes share the columns of a vector.
// The warps' sums are combined at the end, always in the same order.
// Example: one token of 8 samples, 32 heads over 8 of 128, 4096 tokens, bf16: 134 MB of cache.

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int COLUMNS = 256 / WARP;    // columns of a vector that a lane owns, at most

struct Shape {
    int sequence, heads, kv_heads, dim, capacity;

    __device__ size qkv_row() const { return (size)(heads + 2 * kv_heads) * dim; }
    // Offset of vector `position` of a cached head.
    __device__ size cached(size sample, int kv, size position) const {
        return ((sample * kv_heads + kv) * capacity + position) * dim;
    }
};

template <class T>
__device__ void cache_append(const T *qkv, const token *positions, T *keys, T *values, Shape shape) {
    const size row = blockIdx.x, sample = row / shape.sequence;
    const int width = shape.kv_heads * shape.dim;
    const T *key = qkv + row * shape.qkv_row() + (size)shape.heads * shape.dim, *value = key + width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const size to = shape.cached(sample, i / shape.dim, positions[row]) + i % shape.dim;
        keys[to] = key[i];
        values[to] = value[i];
    }
}

template <class T>
__device__ void cached_attention(const T *qkv, const token *positions, const T *keys, const T *values, T *out,
                                 Shape shape, size window, float scale) {
    __shared__ float sums[WARPS][256], maxima[WARPS], totals[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.y;
    const size sample = blockIdx.z, row = sample * shape.sequence + blockIdx.x;
    const int kv = head / (shape.heads / shape.kv_heads);
    const T *vector = qkv + row * shape.qkv_row() + (size)head * shape.dim;
    float query[COLUMNS], sum[COLUMNS], maximum = -INFINITE, total = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = lane + WARP * c;
        query[c] = column < shape.dim ? scale * widen(vector[column]) : 0.0f;
        sum[c] = 0.0f;
    }
    const size seen = (size)positions[row] + 1;
    const size unseen = seen > window ? seen - window : 0;
    for (size token = unseen + warp; token < seen; token += WARPS) {
        const size at = shape.cached(sample, kv, token);
        float score = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = lane + WARP * c;
            if (column < shape.dim) score += query[c] * widen(keys[at + column]);
        }
        score = bounded(warp_reduce(score, Sum()));
        const float highest = fmaxf(maximum, score);
        const float shrink = expf(maximum - highest), weight = expf(score - highest);
        maximum = highest;
        total = total * shrink + weight;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = lane + WARP * c;
            if (column < shape.dim) sum[c] = sum[c] * shrink + weight * widen(values[at + column]);
        }
    }
    if (lane == 0) maxima[warp] = maximum, totals[warp] = total;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) sums[warp][lane + WARP * c] = sum[c];
    __syncthreads();

    // Warp 0 has processed the first key, so the overall maximum is finite. A warp without keys has weight zero.
    float highest = -INFINITE, all = 0.0f;
    for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, maxima[w]);
    for (int w = 0; w < WARPS; ++w) all += totals[w] * expf(maxima[w] - highest);
    T *to = out + (row * shape.heads + head) * shape.dim;
    for (int column = threadIdx.x; column < shape.dim; column += THREADS) {
        float x = 0.0f;
        for (int w = 0; w < WARPS; ++w) x += sums[w][column] * expf(maxima[w] - highest);
        to[column] = narrow<T>(x / all);
    }
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void cache_append_##NAME(const T *qkv, const token *positions, T *keys, T *values,          \
                                                   int sequence, int heads, int kv_heads, int dim, int capacity) {    \
        cache_append(qkv, positions, keys, values, Shape{sequence, heads, kv_heads, dim, capacity});                  \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        cached_attention_##NAME(const T *qkv, const token *positions, const T *keys, const T *values, T *out,         \
                                int sequence, int heads, int kv_heads, int dim, int capacity, int window,             \
                                float scale) {                                                                        \
        cached_attention(qkv, positions, keys, values, out, Shape{sequence, heads, kv_heads, dim, capacity}, window,  \
                         scale);                                                                                      \
    }
FOR_TYPES(DEFINE)
