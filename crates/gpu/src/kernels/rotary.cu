// Rotary positions (arXiv 2104.09864), in place on the query and key heads.
//
// qkv [rows, heads_in_row · head_dim]. The first `rotated` heads are rotated, by positions [rows]. If that is null, the
// position is i = row mod sequence plus `early`, or plus `late` in the second half of the sequence. A thread owns N adjacent pairs of one row and loops over the heads, so sines and cosines
// are computed once per row. Pair i is dims i and i + pairs.
// Angles are reduced modulo a full turn in f64: in f32 the angle of position 8192 would be off by 1e-3.
// 24576 rows of 16+16 heads of 128, bf16: 2 × 201 MB, 94 µs at 4.3 TB/s.

// A frequency divided by `factor` up to the measure `divided`, unchanged from the measure `kept` on, and blended in between. It is
// measured by how often it turns in `original` positions or, if these are 0, by its index. A factor of 1 is no scaling.
__device__ double scaled(double frequency, int index, double factor, double divided, double kept, double original) {
    if (factor == 1.0) return frequency;
    const double measure = original > 0.0 ? original * frequency / 6.283185307179586 : (double)index;
    const double share = fmin(fmax((measure - divided) / (kept - divided), 0.0), 1.0);
    return (1.0 - share) * frequency / factor + share * frequency;
}

template <int N, class T>
__device__ void rotary(T *qkv, const token *positions, size rows, size sequence, size early, size late,
                       size row_width, int rotated, int head_dim, int pairs, double base, double factor, double divided,
                       double kept, double original, double amplitude, bool inverse) {
    constexpr double TURN = 6.283185307179586;
    const int threads_per_row = pairs / N;
    const size thread = blockIdx.x * (size)blockDim.x + threadIdx.x;
    const size row = thread / threads_per_row;
    if (row >= rows) return;
    const int first = (int)(thread % threads_per_row) * N;
    const size index = row % sequence;
    const size by_index = index + (index < sequence / 2 ? early : late);
    const double position = positions ? (double)positions[row] : (double)by_index;
    float cosine[N], sine[N];
    for (int j = 0; j < N; ++j) {
        const double frequency = scaled(pow(base, -(double)(first + j) / pairs), first + j, factor, divided, kept, original);
        const double turns = position * frequency / TURN;
        sincospif((float)(2.0 * (turns - floor(turns))), &sine[j], &cosine[j]);
        cosine[j] *= (float)amplitude;
        sine[j] *= (float)(inverse ? -amplitude : amplitude);
    }
    for (int head = 0; head < rotated; ++head) {
        T *low = qkv + row * row_width + (size)head * head_dim + first;
        float x[N], y[N];
        load<N>(low, x);
        load<N>(low + pairs, y);
        for (int j = 0; j < N; ++j) {
            const float turned = x[j] * cosine[j] - y[j] * sine[j];
            y[j] = x[j] * sine[j] + y[j] * cosine[j];
            x[j] = turned;
        }
        store<N>(low, x);
        store<N>(low + pairs, y);
    }
}

#define DEFINE_WIDTH(NAME, T, N)                                                                                      \
    extern "C" __global__ void rotary_##NAME(T *qkv, const token *positions, size rows, size sequence, size early,    \
                                             size late, size row_width, int rotated, int head_dim, int pairs,         \
                                             double base, double factor, double divided, double kept, double original,\
                                             double amplitude, bool inverse) {                                        \
        rotary<N>(qkv, positions, rows, sequence, early, late, row_width, rotated, head_dim, pairs, base, factor,     \
                  divided, kept, original, amplitude, inverse);                                                       \
    }
#define DEFINE(NAME, T) DEFINE_WIDTH(NAME, T, 1) DEFINE_WIDTH(wide_##NAME, T, PACK)
FOR_TYPES(DEFINE)
