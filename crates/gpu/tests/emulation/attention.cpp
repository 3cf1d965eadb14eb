// The tensor-core attention kernels against the plain definition in double.
//
// Compiled for one HEAD_DIM and ELEMENT, with LAUNCH_… as the host launches them. Prints the differences, and fails.

#include "machine.hpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>
#include <vector>

typedef ELEMENT element;

extern "C" {
void tensor_attention_forward(const element *, element *, float *, int, int, int, float);
void tensor_attention_forward_masked(const element *, element *, float *, const token *, int, int, int, float);
void tensor_attention_dots(const element *, const element *, float *, size, int, int, int, float);
void tensor_attention_dkeys_dvalues(const element *, const element *, const float *, const float *, element *, int, int,
                                    int, float);
void tensor_attention_dkeys_dvalues_masked(const element *, const element *, const float *, const float *, element *,
                                           const token *, int, int, int, float);
void tensor_attention_dqueries(const element *, const element *, const float *, const float *, element *, int, int, int,
                               float);
void tensor_attention_dqueries_masked(const element *, const element *, const float *, const float *, element *,
                                      const token *, int, int, int, float);
}

namespace {

constexpr int BLOCK = 128;
constexpr int DIM = HEAD_DIM;

std::mt19937 generator(7);

struct Case {
    int batch, sequence, heads, kv_heads;
    std::vector<int> documents;  // lengths, again and again; none without a mask
    Order order;
    bool late_copies;

    int row() const { return (heads + 2 * kv_heads) * DIM; }
    size_t tokens() const { return (size_t)batch * sequence; }
};

// Elements that start at a multiple of 16 bytes.
struct Elements {
    std::vector<uint4> pieces;
    size_t count;

    explicit Elements(size_t count) : pieces((count + 7) / 8), count(count) {
        memset(pieces.data(), 0xff, pieces.size() * sizeof(uint4));
    }
    element *data() { return (element *)pieces.data(); }
    double operator[](size_t i) const { return widen(((const element *)pieces.data())[i]); }
    void randomize() {
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < count; ++i) data()[i] = narrow<element>(normal(generator));
    }
    void allow(bool writable) { ::allow(data(), count * sizeof(element), writable); }
};

struct Tensors {
    Elements qkv, dout, out, dqkv;
    std::vector<float> log_sums, dots;
    std::vector<token> starts;

    explicit Tensors(const Case &c)
        : qkv(c.tokens() * c.row()), dout(c.tokens() * c.heads * DIM), out(dout.count), dqkv(qkv.count),
          log_sums(c.tokens() * c.heads, NAN), dots(log_sums), starts(c.tokens()) {
        qkv.randomize();
        dout.randomize();
        size_t at = 0;
        for (size_t i = 0; !c.documents.empty() && at < starts.size(); ++i) {
            const size_t first = at, end = std::min(at + c.documents[i % c.documents.size()], starts.size());
            for (; at < end; ++at) starts[at] = (token)(first - std::min(first, at / c.sequence * c.sequence));
        }
    }
};

void run(const Case &c, Tensors &t) {
    play(c.order, c.late_copies);
    forget();
    t.qkv.allow(false);
    t.dout.allow(false);
    t.out.allow(true);
    t.dqkv.allow(true);
    allow(t.log_sums.data(), t.log_sums.size() * sizeof(float), true);
    allow(t.dots.data(), t.dots.size() * sizeof(float), true);
    allow(t.starts.data(), t.starts.size() * sizeof(token), false);
    const int T = c.sequence, H = c.heads, K = c.kv_heads;
    const float scale = (float)(1 / std::sqrt((double)DIM));
    const bool masked = !c.documents.empty();
    const unsigned int tiles = (T + BLOCK - 1) / BLOCK, batch = c.batch;
    const size rows = (size)c.tokens() * H;
    element *qkv = t.qkv.data(), *dout = t.dout.data(), *out = t.out.data(), *dqkv = t.dqkv.data();
    float *log_sums = t.log_sums.data(), *dots = t.dots.data();
    const token *starts = t.starts.data();
    launch({tiles, (unsigned int)H, batch}, LAUNCH_QUERY_THREADS, LAUNCH_FORWARD_SHARED, [&] {
        masked ? tensor_attention_forward_masked(qkv, out, log_sums, starts, T, H, K, scale)
               : tensor_attention_forward(qkv, out, log_sums, T, H, K, scale);
    });
    launch({(unsigned int)((rows + 7) / 8), 1, 1}, LAUNCH_QUERY_THREADS, 0,
           [&] { tensor_attention_dots(out, dout, dots, rows, T, H, K, scale); });
    launch({tiles, (unsigned int)K, batch}, LAUNCH_KEY_THREADS, LAUNCH_DKEYS_SHARED, [&] {
        masked ? tensor_attention_dkeys_dvalues_masked(qkv, dout, log_sums, dots, dqkv, starts, T, H, K, scale)
               : tensor_attention_dkeys_dvalues(qkv, dout, log_sums, dots, dqkv, T, H, K, scale);
    });
    launch({tiles, (unsigned int)H, batch}, LAUNCH_QUERY_THREADS, LAUNCH_DQUERIES_SHARED, [&] {
        masked ? tensor_attention_dqueries_masked(qkv, dout, log_sums, dots, dqkv, starts, T, H, K, scale)
               : tensor_attention_dqueries(qkv, dout, log_sums, dots, dqkv, T, H, K, scale);
    });
}

// ‖a − b‖ / ‖b‖; infinite if a number is not finite.
struct Distance {
    double difference = 0, norm = 0;

    void add(double a, double b) {
        difference += a == a ? (a - b) * (a - b) : INFINITY;
        norm += b * b;
    }
    double value() const { return difference == 0 ? 0 : std::sqrt(difference / norm); }
};

struct Expected {
    std::vector<double> out, log_sums, dqkv;
};

// The dot products of outputs and their gradients use the rounded outputs, like the kernels.
Expected expect(const Case &c, const Tensors &t) {
    Expected e{std::vector<double>(t.out.count), std::vector<double>(t.log_sums.size()),
               std::vector<double>(t.qkv.count)};
    const double scale = 1 / std::sqrt((double)DIM);
    const auto vector = [&](int sample, int token, int head) {
        return ((size_t)sample * c.sequence + token) * c.row() + (size_t)head * DIM;
    };
    for (int sample = 0; sample < c.batch; ++sample)
        for (int head = 0; head < c.heads; ++head)
            for (int i = 0; i < c.sequence; ++i) {
                const int kv = head / (c.heads / c.kv_heads);
                const size_t token = (size_t)sample * c.sequence + i, out = (token * c.heads + head) * DIM;
                const int start = (int)t.starts[token];
                const size_t query = vector(sample, i, head);
                std::vector<double> weight(c.sequence);
                double total = 0, dot = 0;
                for (int j = start; j <= i; ++j) {
                    const size_t key = vector(sample, j, c.heads + kv);
                    for (int d = 0; d < DIM; ++d) weight[j] += t.qkv[query + d] * t.qkv[key + d] * scale;
                    total += std::exp(weight[j]);
                }
                e.log_sums[((size_t)sample * c.heads + head) * c.sequence + i] = std::log(total);
                for (int d = 0; d < DIM; ++d) dot += t.out[out + d] * t.dout[out + d];
                for (int j = start; j <= i; ++j) {
                    const size_t key = vector(sample, j, c.heads + kv);
                    const size_t value = vector(sample, j, c.heads + c.kv_heads + kv);
                    weight[j] = std::exp(weight[j]) / total;
                    double dweight = 0;
                    for (int d = 0; d < DIM; ++d) dweight += t.dout[out + d] * t.qkv[value + d];
                    const double dscore = weight[j] * (dweight - dot) * scale;
                    for (int d = 0; d < DIM; ++d) {
                        e.out[out + d] += weight[j] * t.qkv[value + d];
                        e.dqkv[query + d] += dscore * t.qkv[key + d];
                        e.dqkv[key + d] += dscore * t.qkv[query + d];
                        e.dqkv[value + d] += weight[j] * t.dout[out + d];
                    }
                }
            }
    return e;
}

bool agrees(const Case &c) {
    Tensors t(c);
    run(c, t);
    const Expected e = expect(c, t);
    Distance out, log_sums, dqkv[3];
    for (size_t i = 0; i < e.out.size(); ++i) out.add(t.out[i], e.out[i]);
    for (size_t i = 0; i < e.log_sums.size(); ++i) log_sums.add(t.log_sums[i], e.log_sums[i]);
    for (size_t i = 0; i < e.dqkv.size(); ++i) {
        const int head = (int)(i % c.row()) / DIM;
        dqkv[head < c.heads ? 0 : head < c.heads + c.kv_heads ? 1 : 2].add(t.dqkv[i], e.dqkv[i]);
    }
    // Weights and results are rounded once each.
    const double tolerance = std::is_same<element, bf16>::value ? 4e-3 : 5e-4;
    const double distances[] = {out.value(), dqkv[0].value(), dqkv[1].value(), dqkv[2].value()};
    bool good = log_sums.value() < 1e-5;
    for (double distance : distances) good = good && distance < tolerance;
    printf("batch %d, sequence %d, heads %d over %d, %zu documents: ", c.batch, c.sequence, c.heads, c.kv_heads,
           c.documents.size());
    printf("out %.1e, log sums %.1e, gradients %.1e %.1e %.1e%s\n", distances[0], log_sums.value(), distances[1],
           distances[2], distances[3], good ? "" : " DIFFERS");
    return good;
}

}  // namespace

int main() {
    const std::vector<Case> cases = {
        {1, 7, 2, 1, {3, 4}, Order::Descending, true},
        {2, 70, 2, 1, {40, 2, 100}, Order::Shuffled, false},
        {1, 257, 1, 1, {}, Order::Descending, true},
        {1, 193, 2, 1, {3, 2}, Order::Interleaved, true},
        {1, 200, 2, 1, {64, 100}, Order::Ascending, false},
    };
    bool good = true;
    for (const Case &c : cases) good = agrees(c) && good;
    return good ? 0 : 1;
}
