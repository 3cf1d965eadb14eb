// The end of a step: the norm of the gradients, the step's control values, and the updates: AdamW (arXiv 1711.05101),
// Lion (arXiv 2302.06675) and SGD with momentum.
//
// Gradients and states of all parameters are passed in a table, by value. Its entries hold the addresses and the first
// block of each. A block finds its entry and processes one chunk of it.
// squares: Σ x² of a chunk in f64, one partial per block. squares_end (one block) adds each entry's partials in order,
// to the entry's own sum and, if it counts, to the total. 124 M in f32 are 0.5 GB, 0.12 ms at 4.3 TB/s.
// update_control: one thread, in f64; see ops/step.rs for the slots.
// adamw: master f32, moments f32 or bf16, weights the 16-bit copy or null. With f32 gradients and moments it moves 30
// bytes per element: 124 M are 3.7 GB, 0.87 ms at 4.3 TB/s.
// lion, sgd: the same with one state, or with none (null): 22 and 14 bytes per element. direction is sgd without states whose
// gradient is a direction, which is not clipped.
// momentum: first is the momentum, weights the direction. normalize and scaled_sum: flat arrays, see ops/muon.rs.

constexpr int SQUARES_CHUNK = 16384, SQUARES_PARTS = 96;
constexpr int UPDATE_CHUNK = 4096, UPDATE_SEGMENTS = 56;
constexpr int THREADS = 256; // of a block, but for squares_end

// Keeps the table in parameter memory. Without this a kernel would copy it to index it.
#if defined(__HIP__) || defined(__HIPCC__)
#define CONSTANT
#else
#define CONSTANT __grid_constant__
#endif

struct Squares {
    const void *from;
    float *own;
    size elements;
    unsigned int first_block;
    unsigned int counts;
};

struct SquaresTable {
    Squares at[SQUARES_PARTS];
};

// Pointers of any type.
struct Segment {
    const void *gradient;
    float *master;
    void *first, *second, *weights;
    size elements;
    unsigned int first_block;
    unsigned int unused;
    float rate_factor, decay;
};

struct SegmentTable {
    Segment at[UPDATE_SEGMENTS];
};

// The entry of this block: the last one whose first block is not after it.
template <class Table> __device__ inline int entry_of_block(const Table &table, int count) {
    int entry = 0;
    for (int step = 64; step > 0; step /= 2)
        if (entry + step < count && table.at[entry + step].first_block <= blockIdx.x) entry += step;
    return entry;
}

__device__ inline bool aligned(const void *at) { return (unsigned long long)at % 16 == 0; }

// Calls body(Width<n>, index) for every element of this block's chunk of an entry. If `wide`, N at a time; in whole
// chunks AT_ONCE of these without a branch in between, so that their loads overlap.
template <int CHUNK, int N, int AT_ONCE, class Body>
__device__ inline void each_of_chunk(unsigned int first_block, size elements, bool wide, Body body) {
    const size begin = (blockIdx.x - first_block) * (size)CHUNK;
    const int here = (int)(elements - begin < CHUNK ? elements - begin : CHUNK), packs = wide ? here / N : 0;
    if (wide && here == CHUNK) {
#pragma unroll AT_ONCE
        for (int i = 0; i < CHUNK / N / THREADS; ++i) body(Width<N>(), begin + (i * THREADS + threadIdx.x) * N);
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < packs; i += THREADS) body(Width<N>(), begin + i * N);
#pragma unroll 1
    for (int i = packs * N + threadIdx.x; i < here; i += THREADS) body(Width<1>(), begin + i);
}

enum Slot {
    STEP,
    UPDATES,
    LOSS_SCALE,
    GOOD_STEPS,
    SKIP,
    SKIPPED_IN_A_ROW,
    NORM,
    FACTOR,
    RATE,
    CORRECTION_1,
    CORRECTION_2,
    LOSS,
};

template <class T> __device__ void squares(const SquaresTable &table, int count, double *__restrict__ partial) {
    const Squares &of = table.at[entry_of_block(table, count)];
    const T *from = (const T *)of.from;
    double sum = 0;
    each_of_chunk<SQUARES_CHUNK, piece<T>(), 4>(of.first_block, of.elements, aligned(from), [&](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float x[N];
        load<N>(from + i, x);
        for (int j = 0; j < N; ++j) sum += (double)x[j] * (double)x[j];
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// A warp per entry, then a thread per own sum. Consecutive entries may share a sum.
extern "C" __global__ void squares_end(const CONSTANT SquaresTable table, int count, unsigned int blocks,
                                       const double *__restrict__ partial, float *total) {
    __shared__ double sums[SQUARES_PARTS];
    const int lane = threadIdx.x % WARP;
    for (int entry = threadIdx.x / WARP; entry < count; entry += blockDim.x / WARP) {
        const unsigned int end = entry + 1 < count ? table.at[entry + 1].first_block : blocks;
        double sum = 0;
#pragma unroll 4
        for (unsigned int i = table.at[entry].first_block + lane; i < end; i += WARP) sum += partial[i];
        sum = warp_reduce(sum, Sum());
        if (lane == 0) sums[entry] = sum;
    }
    __syncthreads();
    const int entry = threadIdx.x;
    if (entry == 0 && total) {
        double sum = 0;
        for (int i = 0; i < count; ++i) sum += table.at[i].counts ? sums[i] : 0.0;
        total[0] += (float)sum;
    }
    if (entry >= count) return;
    float *own = table.at[entry].own;
    if (!own || (entry > 0 && table.at[entry - 1].own == own)) return;
    double sum = 0;
    for (int i = entry; i < count && table.at[i].own == own; ++i) sum += sums[i];
    own[0] += (float)sum;
}

// `ops::RateCurve`; any other value is a constant rate.
enum RateCurve : unsigned { RATE_COSINE = 1, RATE_LINEAR = 2, RATE_INVERSE_SQRT = 3, RATE_SQRT = 4 };

// Same as `LearningRate::at`.
__device__ inline double rate_at(double step, double peak, double floor, double warmup, double decay_start,
                                 double decay_steps, unsigned curve) {
    constexpr double PI = 3.14159265358979323846;
    if (step < warmup) return peak * (step + 1) / warmup;
    const double progress = fmin(fmax(step - decay_start, 0.0) / decay_steps, 1.0);
    switch (curve) {
    case RATE_COSINE: return floor + (peak - floor) * 0.5 * (1.0 + cos(PI * progress));
    case RATE_LINEAR: return progress >= 1.0 ? floor : peak - (peak - floor) * progress;
    case RATE_SQRT: return progress >= 1.0 ? floor : peak - (peak - floor) * sqrt(progress);
    case RATE_INVERSE_SQRT: return fmax(peak * sqrt(fmax(warmup, 1.0) / (step + 1)), floor);
    default: return peak;
    }
}

// A window of 0 leaves the loss scale unchanged.
extern "C" __global__ void update_control(float *slots, const float *squares, const float *loss_sum, double tokens,
                                          double clip, double peak, double floor, double warmup, double decay_start,
                                          double decay_steps, unsigned curve, double beta1, double beta2,
                                          double window, double largest) {
    const double step = slots[STEP], scale = slots[LOSS_SCALE];
    const double loss = loss_sum[0] / tokens, norm = sqrt((double)squares[0]) / scale;
    const bool skip = !(isfinite(norm) && isfinite(loss));
    slots[LOSS] = (float)loss;
    slots[NORM] = (float)norm;
    slots[RATE] = (float)rate_at(step, peak, floor, warmup, decay_start, decay_steps, curve);
    slots[SKIP] = skip ? 1.0f : 0.0f;
    slots[STEP] = (float)(step + 1);

    double good_steps = slots[GOOD_STEPS] + 1.0, next_scale = scale;
    if (skip) {
        slots[SKIPPED_IN_A_ROW] += 1.0f;
        good_steps = 0;
        if (window > 0) next_scale = fmax(scale / 2, 1.0);
    } else {
        const double updates = slots[UPDATES] + 1.0;
        // Keeps the factor finite if the norm is zero.
        const double kept = clip > 0 ? fmin(clip / (norm + 1e-6), 1.0) : 1.0;
        slots[UPDATES] = (float)updates;
        slots[CORRECTION_1] = (float)(1.0 - pow(beta1, updates));
        slots[CORRECTION_2] = (float)(1.0 - pow(beta2, updates));
        slots[FACTOR] = (float)(kept / scale);
        slots[SKIPPED_IN_A_ROW] = 0;
        if (window > 0 && good_steps >= window) {
            next_scale = fmin(2 * scale, largest);
            good_steps = 0;
        }
    }
    slots[GOOD_STEPS] = (float)good_steps;
    slots[LOSS_SCALE] = (float)next_scale;
}

// Approximate to 3 units in the last place; too small by up to 1e-19 below 1e-38. Exact roots and quotients branch, and
// the compiler does not move loads past branches.
__device__ inline float root(float x) { return x * rsqrtf(fmaxf(x, 1.2e-38f)); }

template <class G, class M, class W>
__device__ void adamw(const SegmentTable &table, int count, const float *__restrict__ slots, float beta1, float beta2,
                      float epsilon) {
    if (slots[SKIP] > 0) return;
    const Segment &of = table.at[entry_of_block(table, count)];
    const G *__restrict__ gradient = (const G *)of.gradient;
    float *__restrict__ master = of.master;
    M *__restrict__ first = (M *)of.first, *__restrict__ second = (M *)of.second;
    W *__restrict__ weights = (W *)of.weights;
    const bool wide =
        aligned(gradient) && aligned(master) && aligned(first) && aligned(second) && aligned(weights);
    const float factor = slots[FACTOR], rate = slots[RATE] * of.rate_factor, keep = 1.0f - rate * of.decay;
    const float correction1 = 1.0f / slots[CORRECTION_1], correction2 = 1.0f / slots[CORRECTION_2];
    each_of_chunk<UPDATE_CHUNK, piece<G, float>(), 1>(of.first_block, of.elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float g[N], w[N], m[N], v[N];
        load<N>(gradient + i, g);
        load<N>(master + i, w);
        load<N>(first + i, m);
        load<N>(second + i, v);
        for (int j = 0; j < N; ++j) {
            const float scaled = g[j] * factor;
            m[j] = beta1 * m[j] + (1.0f - beta1) * scaled;
            v[j] = beta2 * v[j] + (1.0f - beta2) * scaled * scaled;
            w[j] = w[j] * keep - rate * __fdividef(m[j] * correction1, root(v[j] * correction2) + epsilon);
        }
        store<N>(first + i, m);
        store<N>(second + i, v);
        store<N>(master + i, w);
        if (weights) store<N>(weights + i, w);
    });
}

template <class G, class M, class W>
__device__ void lion(const SegmentTable &table, int count, const float *__restrict__ slots, float beta1, float beta2) {
    if (slots[SKIP] > 0) return;
    const Segment &of = table.at[entry_of_block(table, count)];
    const G *__restrict__ gradient = (const G *)of.gradient;
    float *__restrict__ master = of.master;
    M *__restrict__ first = (M *)of.first;
    W *__restrict__ weights = (W *)of.weights;
    const bool wide = aligned(gradient) && aligned(master) && aligned(first) && aligned(weights);
    const float factor = slots[FACTOR], rate = slots[RATE] * of.rate_factor, keep = 1.0f - rate * of.decay;
    each_of_chunk<UPDATE_CHUNK, piece<G, float>(), 1>(of.first_block, of.elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float g[N], w[N], m[N];
        load<N>(gradient + i, g);
        load<N>(master + i, w);
        load<N>(first + i, m);
        for (int j = 0; j < N; ++j) {
            const float scaled = g[j] * factor, direction = beta1 * m[j] + (1.0f - beta1) * scaled;
            m[j] = beta2 * m[j] + (1.0f - beta2) * scaled;
            w[j] = w[j] * keep - (direction > 0 ? rate : direction < 0 ? -rate : 0.0f);
        }
        store<N>(first + i, m);
        store<N>(master + i, w);
        if (weights) store<N>(weights + i, w);
    });
}

template <class G, class M, class W>
__device__ void sgd(const SegmentTable &table, int count, const float *__restrict__ slots, float momentum,
                    int nesterov, bool clipped) {
    if (slots[SKIP] > 0) return;
    const Segment &of = table.at[entry_of_block(table, count)];
    const G *__restrict__ gradient = (const G *)of.gradient;
    float *__restrict__ master = of.master;
    M *__restrict__ first = (M *)of.first;
    W *__restrict__ weights = (W *)of.weights;
    const bool wide = aligned(gradient) && aligned(master) && aligned(first) && aligned(weights);
    const float factor = clipped ? slots[FACTOR] : 1.0f, rate = slots[RATE] * of.rate_factor, decay = of.decay;
    each_of_chunk<UPDATE_CHUNK, piece<G, float>(), 1>(of.first_block, of.elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float g[N], w[N], b[N];
        load<N>(gradient + i, g);
        load<N>(master + i, w);
        for (int j = 0; j < N; ++j) b[j] = 0.0f;
        if (first) load<N>(first + i, b);
        for (int j = 0; j < N; ++j) {
            const float scaled = g[j] * factor + decay * w[j];
            b[j] = momentum * b[j] + scaled;
            w[j] -= rate * (nesterov ? scaled + momentum * b[j] : b[j]);
        }
        if (first) store<N>(first + i, b);
        store<N>(master + i, w);
        if (weights) store<N>(weights + i, w);
    });
}

template <class G, class M, class O>
__device__ void momentum(const SegmentTable &table, int count, const float *__restrict__ slots, float mu, int nesterov) {
    if (slots[SKIP] > 0) return;
    const Segment &of = table.at[entry_of_block(table, count)];
    const G *__restrict__ gradient = (const G *)of.gradient;
    M *__restrict__ first = (M *)of.first;
    O *__restrict__ out = (O *)of.weights;
    const bool wide = aligned(gradient) && aligned(first) && aligned(out);
    const float factor = slots[FACTOR], rest = 1.0f - mu;
    each_of_chunk<UPDATE_CHUNK, piece<G, float>(), 1>(of.first_block, of.elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float g[N], m[N], d[N];
        load<N>(gradient + i, g);
        load<N>(first + i, m);
        for (int j = 0; j < N; ++j) {
            const float scaled = rest * (g[j] * factor);
            m[j] = mu * m[j] + scaled;
            d[j] = nesterov ? scaled + mu * m[j] : m[j];
        }
        store<N>(first + i, m);
        store<N>(out + i, d);
    });
}

template <class T> __device__ void normalize(T *x, const float *sum, size elements, float epsilon, bool wide) {
    const float norm = fmaxf(sqrtf(sum[0]), epsilon);
    each<piece<T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float v[N];
        load<N>(x + i, v);
        for (int j = 0; j < N; ++j) v[j] /= norm;
        store<N>(x + i, v);
    });
}

template <class T> __device__ void scaled_sum(T *x, const T *y, size elements, float a, float b, bool wide) {
    each<piece<T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float v[N], w[N];
        load<N>(x + i, v);
        load<N>(y + i, w);
        for (int j = 0; j < N; ++j) v[j] = a * v[j] + b * w[j];
        store<N>(x + i, v);
    });
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void squares_##NAME(const CONSTANT SquaresTable table, int count, double *partial) {        \
        squares<T>(table, count, partial);                                                                            \
    }                                                                                                                 \
    extern "C" __global__ void normalize_##NAME(T *x, const float *sum, size elements, float epsilon, bool wide) {    \
        normalize(x, sum, elements, epsilon, wide);                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void scaled_sum_##NAME(T *x, const T *y, size elements, float a, float b, bool wide) {      \
        scaled_sum(x, y, elements, a, b, wide);                                                                       \
    }                                                                                                                 \
    DEFINE_MOMENTUM(NAME, T, f32, float, f32, float)                                                                  \
    DEFINE_MOMENTUM(NAME, T, f32, float, bf16, bf16)                                                                  \
    DEFINE_MOMENTUM(NAME, T, bf16, bf16, f32, float)                                                                  \
    DEFINE_MOMENTUM(NAME, T, bf16, bf16, bf16, bf16)                                                                  \
    DEFINE_UPDATES(NAME, T, f32, float, bf16, bf16)                                                                   \
    DEFINE_UPDATES(NAME, T, f32, float, f16, f16)                                                                     \
    DEFINE_UPDATES(NAME, T, bf16, bf16, bf16, bf16)                                                                   \
    DEFINE_UPDATES(NAME, T, bf16, bf16, f16, f16)
#define DEFINE_MOMENTUM(NAME, G, MOMENTS, M, OUT, O)                                                                  \
    extern "C" __global__ void momentum_##NAME##_##MOMENTS##_##OUT(const CONSTANT SegmentTable table, int count,      \
                                                                   const float *slots, float mu, int nesterov) {      \
        momentum<G, M, O>(table, count, slots, mu, nesterov);                                                         \
    }
#define DEFINE_UPDATES(NAME, G, MOMENTS, M, WEIGHTS, W)                                                               \
    extern "C" __global__ void adamw_##NAME##_##MOMENTS##_##WEIGHTS(const CONSTANT SegmentTable table, int count,     \
                                                                    const float *slots, float beta1, float beta2,     \
                                                                    float epsilon) {                                  \
        adamw<G, M, W>(table, count, slots, beta1, beta2, epsilon);                                                   \
    }                                                                                                                 \
    extern "C" __global__ void lion_##NAME##_##MOMENTS##_##WEIGHTS(const CONSTANT SegmentTable table, int count,      \
                                                                   const float *slots, float beta1, float beta2) {    \
        lion<G, M, W>(table, count, slots, beta1, beta2);                                                             \
    }                                                                                                                 \
    extern "C" __global__ void sgd_##NAME##_##MOMENTS##_##WEIGHTS(const CONSTANT SegmentTable table, int count,       \
                                                                  const float *slots, float momentum, int nesterov) { \
        sgd<G, M, W>(table, count, slots, momentum, nesterov, true);                                                  \
    }                                                                                                                 \
    extern "C" __global__ void direction_##NAME##_##MOMENTS##_##WEIGHTS(const CONSTANT SegmentTable table, int count, \
                                                                        const float *slots) {                         \
        sgd<G, M, W>(table, count, slots, 0.0f, 0, false);                                                            \
    }
FOR_TYPES(DEFINE)
