// What a step ends with: the norm of the gradients, the decision what the step does, and AdamW (arXiv 1711.05101).
//
// sum_of_squares: flat, grid-stride, in f64; one partial per block, and sum_of_squares_end adds them in order.
// update_control: one thread, in f64; see ops/step.rs for the slots.
// adamw: flat, grid-stride; master f32, moments f32 or bf16, weights the 16-bit copy or null. `wide`: all pointers are
// aligned. With f32 gradients and moments it moves 30 bytes per element: 124 M are 3.7 GB, 0.87 ms at 4.3 TB/s.

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

template <class T>
__device__ void sum_of_squares(const T *__restrict__ from, double *__restrict__ partial, size elements, bool wide) {
    double sum = 0;
    each(elements, wide, [&](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float x[N];
        load<N>(from + i, x);
        for (int j = 0; j < N; ++j) sum += (double)x[j] * (double)x[j];
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void sum_of_squares_end(const double *__restrict__ partial, float *to, int parts) {
    double sum = 0;
    for (int part = threadIdx.x; part < parts; part += blockDim.x) sum += partial[part];
    sum = block_sum(sum);
    if (threadIdx.x == 0) to[0] += (float)sum;
}

// Warm-up from zero, then cosine from `peak` to `floor` (or constant).
__device__ inline double rate_at(double step, double peak, double floor, double warmup, double steps, bool cosine) {
    constexpr double PI = 3.14159265358979323846;
    if (step < warmup) return peak * (step + 1) / warmup;
    if (!cosine) return peak;
    const double progress = fmin((step - warmup) / fmax(steps - warmup, 1.0), 1.0);
    return floor + (peak - floor) * 0.5 * (1.0 + cos(PI * progress));
}

// A window of 0 leaves the loss scale as it is.
extern "C" __global__ void update_control(float *slots, const float *squares, const float *loss_sum, double tokens,
                                          double clip, double peak, double floor, double warmup, double steps,
                                          bool cosine, double beta1, double beta2, double window, double largest) {
    const double step = slots[STEP], scale = slots[LOSS_SCALE];
    const double loss = loss_sum[0] / tokens, norm = sqrt((double)squares[0]) / scale;
    const bool skip = !(isfinite(norm) && isfinite(loss));
    slots[LOSS] = (float)loss;
    slots[NORM] = (float)norm;
    slots[RATE] = (float)rate_at(step, peak, floor, warmup, steps, cosine);
    slots[SKIP] = skip ? 1.0f : 0.0f;
    slots[STEP] = (float)(step + 1);

    double good_steps = slots[GOOD_STEPS] + 1.0, next_scale = scale;
    if (skip) {
        slots[SKIPPED_IN_A_ROW] += 1.0f;
        good_steps = 0;
        if (window > 0) next_scale = fmax(scale / 2, 1.0);
    } else {
        const double updates = slots[UPDATES] + 1.0;
        // The small number keeps the factor finite for a norm of zero.
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

template <class G, class M, class W>
__device__ void adamw(const G *__restrict__ gradient, float *__restrict__ master, M *__restrict__ first,
                      M *__restrict__ second, W *__restrict__ weights, const float *__restrict__ slots, size elements,
                      float beta1, float beta2, float epsilon, float decay, bool wide) {
    if (slots[SKIP] > 0) return;
    const float factor = slots[FACTOR], rate = slots[RATE], keep = 1.0f - rate * decay;
    const float correction1 = 1.0f / slots[CORRECTION_1], correction2 = 1.0f / slots[CORRECTION_2];
    each(elements, wide, [=](auto lanes, size i) {
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
            w[j] = w[j] * keep - rate * (m[j] * correction1 / (sqrtf(v[j] * correction2) + epsilon));
        }
        store<N>(first + i, m);
        store<N>(second + i, v);
        store<N>(master + i, w);
        if (weights) store<N>(weights + i, w);
    });
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void sum_of_squares_##NAME(const T *from, double *partial, size elements, bool wide) {      \
        sum_of_squares(from, partial, elements, wide);                                                                \
    }                                                                                                                 \
    DEFINE_ADAMW(NAME, T, f32, float, bf16, bf16)                                                                     \
    DEFINE_ADAMW(NAME, T, f32, float, f16, f16)                                                                       \
    DEFINE_ADAMW(NAME, T, bf16, bf16, bf16, bf16)                                                                     \
    DEFINE_ADAMW(NAME, T, bf16, bf16, f16, f16)
#define DEFINE_ADAMW(NAME, G, MOMENTS, M, WEIGHTS, W)                                                                 \
    extern "C" __global__ void adamw_##NAME##_##MOMENTS##_##WEIGHTS(                                                  \
        const G *gradient, float *master, M *first, M *second, W *weights, const float *slots, size elements,         \
        float beta1, float beta2, float epsilon, float decay, bool wide) {                                            \
        adamw(gradient, master, first, second, weights, slots, elements, beta1, beta2, epsilon, decay, wide);         \
    }
FOR_TYPES(DEFINE)
