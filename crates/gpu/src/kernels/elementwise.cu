// Fills, multiples, copies with conversion, copies of columns, additions, and the sum that ends a residual branch.
//
// Flat arrays of `elements`, grid-stride; per iteration a thread handles 16 bytes of the widest type. `wide`: all
// pointers are 16-byte aligned, and `width`, if there is one, is a multiple of PACK. Every element is read and written
// once, with f32 arithmetic, so `to` may be `from`.
// Residual of one addend, [65536, 768] bf16: 3 × 101 MB, 70 µs at 4.3 TB/s.

template <class T> __device__ void fill(T *to, size elements, float value, bool wide) {
    each<piece<T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float x[N];
        for (int j = 0; j < N; ++j) x[j] = value;
        store<N>(to + i, x);
    });
}

template <class T> __device__ void scale(T *x, size elements, float factor, bool wide) {
    each<piece<T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float y[N];
        load<N>(x + i, y);
        for (int j = 0; j < N; ++j) y[j] *= factor;
        store<N>(x + i, y);
    });
}

template <class S, class T> __device__ void copy(const S *from, T *to, size elements, bool wide) {
    each<piece<S, T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float x[N];
        load<N>(from + i, x);
        store<N>(to + i, x);
    });
}

// `columns` columns of every row of `from`, from its column `read` on, become those of `to` from its column `written` on. `wide`:
// widths, first columns and the number of columns are multiples of PACK, too.
template <class T>
__device__ void copy_columns(const T *from, T *to, size elements, size from_width, size read, size to_width,
                             size written, size columns, bool wide) {
    each<piece<T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        const size row = i / columns, column = i % columns;
        float x[N];
        load<N>(from + row * from_width + read + column, x);
        store<N>(to + row * to_width + written + column, x);
    });
}

template <class S, class T> __device__ void add(const S *from, T *to, size elements, bool wide) {
    each<piece<S, T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float x[N], sum[N];
        load<N>(from + i, x);
        load<N>(to + i, sum);
        for (int j = 0; j < N; ++j) sum[j] += x[j];
        store<N>(to + i, sum);
    });
}

// Up to four addends [rows, width] and four biases [width]; the others are null.
template <class T> struct Addends {
    const T *rows[4];
    const T *biases[4];
};

template <class T>
__device__ void residual(const T *x, Addends<T> addends, T *out, size elements, size width, bool wide) {
    each<piece<T>()>(elements, wide, [=](auto lanes, size i) {
        constexpr int N = decltype(lanes)::value;
        float sum[N], y[N];
        load<N>(x + i, sum);
#pragma unroll
        for (int k = 0; k < 4 && addends.rows[k]; ++k) {
            load<N>(addends.rows[k] + i, y);
            for (int j = 0; j < N; ++j) sum[j] += y[j];
        }
        const size column = i >> 32 ? i % width : (unsigned int)i % (unsigned int)width;
#pragma unroll
        for (int k = 0; k < 4 && addends.biases[k]; ++k) {
            load<N>(addends.biases[k] + column, y);
            for (int j = 0; j < N; ++j) sum[j] += y[j];
        }
        store<N>(out + i, sum);
    });
}

#define DEFINE(NAME, T)                                                                                               \
    extern "C" __global__ void fill_##NAME(T *to, size elements, float value, bool wide) {                            \
        fill(to, elements, value, wide);                                                                              \
    }                                                                                                                 \
    extern "C" __global__ void scale_##NAME(T *x, size elements, float factor, bool wide) {                           \
        scale(x, elements, factor, wide);                                                                             \
    }                                                                                                                 \
    extern "C" __global__ void copy_columns_##NAME(const T *from, T *to, size elements, size from_width, size read,   \
                                                   size to_width, size written, size columns, bool wide) {            \
        copy_columns(from, to, elements, from_width, read, to_width, written, columns, wide);                         \
    }                                                                                                                 \
    extern "C" __global__ void residual_##NAME(const T *x, const T *a, const T *b, const T *c, const T *d,            \
                                               const T *e, const T *f, const T *g, const T *h, T *out,                \
                                               size elements, size width, bool wide) {                                \
        residual(x, Addends<T>{{a, b, c, d}, {e, f, g, h}}, out, elements, width, wide);                              \
    }
FOR_TYPES(DEFINE)

#define DEFINE_PAIR(FROM, S, TO, T)                                                                                   \
    extern "C" __global__ void copy_##FROM##_##TO(const S *from, T *to, size elements, bool wide) {                   \
        copy(from, to, elements, wide);                                                                               \
    }                                                                                                                 \
    extern "C" __global__ void add_##FROM##_##TO(const S *from, T *to, size elements, bool wide) {                    \
        add(from, to, elements, wide);                                                                                \
    }
FOR_PAIRS(DEFINE_PAIR)
