// Cross-entropy over a vocabulary that may be split among ranks: each part's statistics, then loss and gradient.
//
// logits [rows, columns], of which `valid` are tokens, starting at token `first`; targets [rows]; statistics [parts,
// rows, 3] f32: maximum, Σ exp(x − maximum), the target's logit (−∞ if another part has it). `wide`: columns is a
// multiple of PACK and the logits are aligned. All but cross_entropy_loss: one block per row. The gradient overwrites
// the logits in place; a thread writes only columns that no other thread has read.
//
// cross_entropy_whole: the vocabulary is in one part. A row stays in dynamic shared memory between statistics and
// gradient, so it is read once and written once. Two blocks share a multiprocessor: one computes while the other loads
// its row. Needs `wide` and columns · sizeof(T) of shared memory (50304 bf16: 101 kB).
// loss_statistics, cross_entropy: for a vocabulary in several parts, or a row that does not fit. The row is read twice.
// cross_entropy_loss: a single block; rows in a fixed order, summed in f64.
// With SOFT_CAP, logits are bounded by it, and the gradient is that of the logits before.
//
// [65536, 50304] bf16: whole 13.2 GB, 3.1 ms at 4.3 TB/s, with 1.8 ms of exponentials (two per element, 16 per clock
// and multiprocessor) beside it; in parts: statistics 6.6 GB, 1.5 ms, and gradient 13.2 GB, 3.1 ms.

// If the maximum is −∞, every term is zero, so any finite origin will do.
__device__ inline float origin(float maximum) { return maximum == -INFINITE ? 0.0f : maximum; }

// exp(x − origin), from `scaled` = origin · log₂e.
__device__ inline float exponential(float x, float scaled) { return power_of_two(fmaf(x, LOG2_E, -scaled)); }

// Maximum and Σ exp(x − maximum) of the numbers so far.
struct Online {
    float maximum = -INFINITE, sum = 0;

    template <int N> __device__ void add(const float (&x)[N]) {
        float larger = maximum;
#pragma unroll
        for (int j = 0; j < N; ++j) larger = fmaxf(larger, x[j]);
        const float scaled = origin(larger) * LOG2_E;
        sum *= exponential(maximum, scaled);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += exponential(x[j], scaled);
        maximum = larger;
    }

    // Combines all threads of the block; every thread gets the result.
    __device__ void combine() {
        const float largest = block_reduce(maximum, -INFINITE, Maximum());
        sum = block_sum(sum * exponential(maximum, origin(largest) * LOG2_E));
        maximum = largest;
    }
};

// A row's columns, divided among the threads: whole packs of tokens, then single columns, padding included.
template <class T> struct Row {
    T *at;
    int packs, valid, columns;

    __device__ Row(T *logits, size valid, size columns, bool wide)
        : at(logits + blockIdx.x * columns), packs(wide ? (int)valid / PACK : 0), valid((int)valid),
          columns((int)columns) {}

    // Adds this thread's packs of `from` before `end`, starting with pack `i`. Returns the next pack.
    __device__ int add_packs(Online &online, const T *from, int i, int end) const {
#pragma unroll 4
        for (; i < end; i += blockDim.x) {
            float x[PACK];
            load<PACK>(from + i * PACK, x);
            if constexpr (CAPPED)
                for (int j = 0; j < PACK; ++j) x[j] = bounded(x[j]);
            online.add(x);
        }
        return i;
    }

    __device__ void add_rest(Online &online) const {
        for (int i = packs * PACK + threadIdx.x; i < valid; i += blockDim.x) {
            const float x[1] = {bounded(widen(at[i]))};
            online.add(x);
        }
    }

    __device__ static float gradient(float x, float scaled, float share) {
        const float logit = bounded(x), unbounded = exponential(logit, scaled) * share;
        return CAPPED ? unbounded * slope(logit) : unbounded;
    }

    // (softmax · more − one_hot) · whole, from the packs in `from`; more = 1 + 2·z·ln Σ exp(x) adds the z-loss. The gradient at the target is rounded once, from its own
    // logit, not by a subtraction after rounding; the thread that wrote the column writes it again.
    __device__ void make_gradient(const T *from, float maximum, float sum, int target, float target_logit,
                                  float whole, float z_loss) const {
        const float scaled = origin(maximum) * LOG2_E, more = 1.0f + 2.0f * z_loss * (logf(sum) + maximum);
        const float share = whole * more / sum;
#pragma unroll 4
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            float x[PACK];
            load<PACK>(from + i * PACK, x);
#pragma unroll
            for (int j = 0; j < PACK; ++j) x[j] = gradient(x[j], scaled, share);
            store<PACK>(at + i * PACK, x);
        }
        for (int i = packs * PACK + threadIdx.x; i < columns; i += blockDim.x)
            at[i] = narrow<T>(i < valid ? gradient(widen(at[i]), scaled, share) : 0.0f);
        if (target < 0 || target >= valid) return;
        const int single = target - packs * PACK, turn = single < 0 ? target / PACK : single;
        if (turn % blockDim.x == threadIdx.x)
            at[target] = narrow<T>((exponential(target_logit, scaled) / sum * more - 1.0f) * whole * slope(target_logit));
    }
};

// The column of a token in this part of the vocabulary, or −1.
__device__ inline int column_of(token target, size first, size valid) {
    const size column = (size)target - first;
    return column >= 0 && column < valid ? (int)column : -1;
}

__device__ inline void keep(float *statistics, const Online &of, float target_logit) {
    if (threadIdx.x > 0) return;
    statistics[3 * blockIdx.x] = of.maximum;
    statistics[3 * blockIdx.x + 1] = of.sum;
    statistics[3 * blockIdx.x + 2] = target_logit;
}

template <class T>
__device__ void statistics(const T *__restrict__ logits, const token *__restrict__ targets,
                           float *__restrict__ statistics, size first, size valid, size columns, bool wide) {
    const Row<const T> row(logits, valid, columns, wide);
    const int target = column_of(targets[blockIdx.x], first, valid);
    Online of;
    row.add_packs(of, row.at, threadIdx.x, row.packs);
    row.add_rest(of);
    of.combine();
    keep(statistics, of, target < 0 ? -INFINITE : bounded(widen(row.at[target])));
}

template <class T>
__device__ void cross_entropy_whole(T *logits, const token *__restrict__ targets, float *__restrict__ statistics,
                                    const float *__restrict__ scale, float factor, float z_loss, size first,
                                    size valid, size columns) {
    extern __shared__ uint4 shared[];
    T *kept = reinterpret_cast<T *>(shared);
    const Row<T> row(logits, valid, columns, true);
    // Two groups of copies, so that the first half is summed while the second is loaded.
    const int half = row.packs / 2;
    int i = threadIdx.x;
    for (int group = 0; group < 2; ++group) {
        for (const int end = group == 0 ? half : row.packs; i < end; i += blockDim.x)
#pragma unroll
            for (int piece = 0; piece < (int)sizeof(T) / 2; ++piece)
                copy_to_shared(shared + i * (sizeof(T) / 2) + piece, (const uint4 *)(row.at + i * PACK) + piece);
        end_group_of_copies();
    }
    const int target = column_of(targets[blockIdx.x], first, valid);
    const float target_logit = target < 0 ? -INFINITE : bounded(widen(row.at[target]));

    Online of;
    row.add_rest(of);
    await_copies<1>();
    const int next = row.add_packs(of, kept, threadIdx.x, half);
    await_copies<0>();
    row.add_packs(of, kept, next, row.packs);
    of.combine();
    keep(statistics, of, target_logit);
    row.make_gradient(kept, of.maximum, of.sum, target, target_logit, factor * scale[0], z_loss);
}

// A row's maximum, Σ exp(x − maximum) and target logit over all parts, combined in the order of the parts.
struct Combined {
    float maximum, sum, target;

    __device__ Combined(const float *statistics, size row, size rows, int parts)
        : maximum(-INFINITE), sum(0), target(-INFINITE) {
        for (int part = 0; part < parts; ++part) {
            const float *at = statistics + (part * rows + row) * 3;
            maximum = fmaxf(maximum, at[0]);
            target = fmaxf(target, at[2]);
        }
        for (int part = 0; part < parts; ++part) {
            const float *at = statistics + (part * rows + row) * 3;
            sum += at[1] * (at[0] == -INFINITE ? 1.0f : __expf(at[0] - maximum));
        }
    }
};

extern "C" __global__ void cross_entropy_loss(const float *__restrict__ statistics, float *loss, size rows,
                                              int parts) {
    double sum = 0;
    if (parts == 1) {
#pragma unroll 8
        for (size row = threadIdx.x; row < rows; row += blockDim.x) {
            const float *at = statistics + 3 * row;
            sum += (double)(logf(at[1]) + at[0] - at[2]);
        }
    } else {
        for (size row = threadIdx.x; row < rows; row += blockDim.x) {
            const Combined of(statistics, row, rows, parts);
            sum += (double)(logf(of.sum) + of.maximum - of.target);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) loss[0] += (float)sum;
}

template <class T>
__device__ void cross_entropy(T *logits, const token *__restrict__ targets, const float *__restrict__ statistics,
                              const float *__restrict__ scale, float factor, float z_loss, size first, size valid,
                              size rows, size columns, int parts, bool wide) {
    const Combined of(statistics, blockIdx.x, rows, parts);
    const Row<T> row(logits, valid, columns, wide);
    const int target = column_of(targets[blockIdx.x], first, valid);
    row.make_gradient(row.at, of.maximum, of.sum, target, of.target, factor * scale[0], z_loss);
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void loss_statistics_##NAME(const T *logits, const token *targets, float *to, size first,   \
                                                      size valid, size columns, bool wide) {                          \
        statistics(logits, targets, to, first, valid, columns, wide);                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512)                                                                 \
        cross_entropy_whole_##NAME(T *logits, const token *targets, float *statistics, const float *scale,            \
                                   float factor, float z_loss, size first, size valid, size columns) {                \
        cross_entropy_whole(logits, targets, statistics, scale, factor, z_loss, first, valid, columns);               \
    }                                                                                                                 \
    extern "C" __global__ void cross_entropy_##NAME(T *logits, const token *targets, const float *statistics,         \
                                                    const float *scale, float factor, float z_loss, size first,       \
                                                    size valid, size rows, size columns, int parts, bool wide) {      \
        cross_entropy(logits, targets, statistics, scale, factor, z_loss, first, valid, rows, columns, parts, wide);  \
    }
FOR_TYPES(DEFINE)
