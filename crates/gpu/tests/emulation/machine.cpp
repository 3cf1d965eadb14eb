// See machine.hpp.

#include "machine.hpp"
#include "matrix_instructions.cuh"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <ucontext.h>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;
uint4 shared[(228 << 10) / sizeof(uint4)];

namespace {

constexpr size_t STACK_BYTES = 128 << 10;

struct Copy {
    char *to;
    const char *from;
    size_t bytes;
    bool exists;

    void arrive() const { exists ? (void)memcpy(to, from, bytes) : (void)memset(to, 0, bytes); }
};

struct Fiber {
    int number;
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool ended;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

// What each lane passes to a warp-wide operation, and gets from it.
struct Share {
    unsigned int words[6];
    float numbers[4];
};

struct WarpState {
    const char *operation;
    int arrived;
    long meetings, barriers;
    Share in[WARP], out[WARP];
};

// The last accesses to two bytes of shared memory, and the barrier phases of block and warp in which they happened.
struct Touched {
    int writer = -1;
    long written_block = -1, written_warp = -1;
    unsigned int reader_warps = 0, reader_lanes = 0;
    int reader_warp = -1;
    long read_block = -1, read_warp = -1;
    bool under_way = false;
};

struct Range {
    const char *begin, *end;
    bool writable;
};

std::vector<Fiber> fibers;
std::vector<WarpState> warps;
std::vector<Touched> touched(sizeof(shared) / 2);
std::vector<Range> ranges;
std::function<void()> kernel;
ucontext_t scheduler;
Fiber *now = nullptr;
int threads = 0, alive = 0, at_barrier = 0;
long block_barriers = 0;
size_t shared_now = 0;
Order order = Order::Ascending;
bool late = true;
std::mt19937 random_order(1);

[[noreturn]] void fail(const char *what) {
    fprintf(stderr, "thread %d of block (%u, %u, %u): %s\n", now->number, blockIdx.x, blockIdx.y, blockIdx.z, what);
    exit(1);
}

void yield() { swapcontext(&now->context, &scheduler); }

WarpState &warp() { return warps[now->number / WARP]; }
Share &brought() { return warp().in[now->number % WARP]; }
Share &taken() { return warp().out[now->number % WARP]; }

void touch(size_t at, size_t bytes, bool writes) {
    if (at + bytes > shared_now) fail("beyond its shared memory");
    const int own_warp = now->number / WARP;
    const unsigned int lane = 1u << now->number % WARP;
    const long meeting = warps[own_warp].barriers;
    for (size_t i = at / 2; i < (at + bytes + 1) / 2; ++i) {
        Touched &t = touched[i];
        if (t.under_way) fail("touches what a copy is under way to");
        if (t.writer >= 0 && t.writer != now->number && t.written_block == block_barriers &&
            (t.writer / WARP != own_warp || t.written_warp == meeting))
            fail("touches what another thread has just written");
        const bool read_now = t.read_block == block_barriers;
        if (!writes) {
            t.reader_warps = (read_now ? t.reader_warps : 0) | 1u << own_warp;
            const bool same = read_now && t.reader_warp == own_warp && t.read_warp == meeting;
            t.reader_lanes = (same ? t.reader_lanes : 0) | lane;
            t.read_block = block_barriers, t.reader_warp = own_warp, t.read_warp = meeting;
            continue;
        }
        if (read_now && ((t.reader_warps & ~(1u << own_warp)) ||
                         (t.reader_warp == own_warp && t.read_warp == meeting && (t.reader_lanes & ~lane))))
            fail("writes what another thread may still read");
        t.writer = now->number, t.written_block = block_barriers, t.written_warp = meeting;
    }
}

template <class T> bool within(const char *at, const T &object) {
    return at >= (const char *)&object && at < (const char *)(&object + 1);
}

void watch(const void *memory, size_t bytes, bool writes) {
    const char *at = (const char *)memory;
    if (!now || (at >= now->stack.data() && at < now->stack.data() + STACK_BYTES)) return;
    if (within(at, shared)) return touch(at - (const char *)shared, bytes, writes);
    if (within(at, threadIdx) || within(at, blockIdx) || within(at, blockDim) || within(at, gridDim)) return;
    for (const Range &range : ranges)
        if (at >= range.begin && at + bytes <= range.end) {
            if (writes && !range.writable) fail("writes to what it may only read");
            return;
        }
    fail(writes ? "writes outside of its buffers" : "reads outside of its buffers");
}

// The last lane to arrive runs the operation for all.
template <class Together> void together(const char *operation, Together body) {
    WarpState &state = warp();
    if (state.arrived == 0) state.operation = operation;
    if (state.operation != operation) fail("lanes of a warp do different things together");
    const long meeting = state.meetings;
    if (++state.arrived == WARP) {
        body(state);
        state.arrived = 0;
        ++state.meetings;
    }
    while (state.meetings == meeting) yield();
}

void load_four(unsigned int (&words)[4], unsigned int at, bool transposed) {
    if (at % 16) fail("a row of a matrix is not aligned");
    touch(at, 16, false);
    brought().words[0] = at;
    together(transposed ? "transposed" : "matrices", [&](WarpState &state) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            unsigned short rows[8][8];
            for (int row = 0; row < 8; ++row)
                memcpy(rows[row], (char *)shared + state.in[8 * matrix + row].words[0], 16);
            for (int lane = 0; lane < WARP; ++lane) {
                const int row = lane / 4, column = lane % 4 * 2;
                const unsigned int low = transposed ? rows[column][row] : rows[row][column];
                const unsigned int high = transposed ? rows[column + 1][row] : rows[row][column + 1];
                state.out[lane].words[matrix] = low | high << 16;
            }
        }
    });
    for (int i = 0; i < 4; ++i) words[i] = taken().words[i];
}

void begin_copy(unsigned int to, const void *from, size_t bytes, bool exists) {
    if (to % bytes || (uintptr_t)from % bytes) fail("a copy is not aligned");
    if (exists) watch(from, bytes, false);
    touch(to, bytes, true);
    for (size_t i = to / 2; i < (to + bytes) / 2; ++i) touched[i].under_way = true;
    const Copy copy{(char *)shared + to, (const char *)from, bytes, exists};
    now->open.push_back(copy);
    late ? (void)memset(copy.to, 0xff, bytes) : copy.arrive();
}

void run_fiber() {
    kernel();
    now->ended = true;
    --alive;
    yield();
}

void start(Fiber &fiber, int number) {
    fiber.number = number;
    fiber.ended = false;
    fiber.open.clear();
    fiber.groups.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
}

// Runs every lane once. Returns whether the warp has made progress.
bool run_warp(int number) {
    const long before = warps[number].meetings;
    for (int i = 0; i < WARP; ++i) {
        Fiber &fiber = fibers[number * WARP + (order == Order::Descending ? WARP - 1 - i : i)];
        if (fiber.ended) continue;
        now = &fiber;
        threadIdx = {(unsigned int)fiber.number, 0, 0};
        swapcontext(&scheduler, &fiber.context);
        now = nullptr;
    }
    return warps[number].meetings != before;
}

void run_block() {
    memset(shared, 0xff, sizeof(shared));
    std::fill(touched.begin(), touched.end(), Touched());
    warps.assign(threads / WARP, WarpState());
    alive = threads, at_barrier = 0, block_barriers = 0;
    for (int i = 0; i < threads; ++i) start(fibers[i], i);
    std::vector<int> turns(warps.size());
    for (size_t i = 0; i < turns.size(); ++i) turns[i] = (int)i;
    if (order == Order::Descending) std::reverse(turns.begin(), turns.end());
    while (alive > 0) {
        if (order >= Order::Shuffled) std::shuffle(turns.begin(), turns.end(), random_order);
        for (int number : turns)
            while (run_warp(number) && order != Order::Interleaved) {
            }
    }
}

}  // namespace

float shuffle_xor(float value, int mask) {
    brought().numbers[0] = value;
    brought().words[0] = mask;
    together("shuffle", [](WarpState &state) {
        for (int lane = 0; lane < WARP; ++lane)
            state.out[lane].numbers[0] = state.in[lane ^ state.in[lane].words[0]].numbers[0];
    });
    return taken().numbers[0];
}

unsigned long long ballot(bool predicate) {
    brought().words[0] = predicate;
    together("ballot", [](WarpState &state) {
        unsigned int votes = 0;
        for (int lane = 0; lane < WARP; ++lane) votes |= state.in[lane].words[0] << lane;
        for (Share &share : state.out) share.words[0] = votes;
    });
    return taken().words[0];
}

void __syncwarp() {
    together("barrier of the warp", [](WarpState &state) { ++state.barriers; });
}

void __syncthreads() {
    together("barrier of the block", [](WarpState &) {});
    const long before = block_barriers;
    if (++at_barrier == threads) at_barrier = 0, ++block_barriers;
    while (block_barriers == before) {
        if (alive < threads) fail("waits for a thread that has ended");
        yield();
    }
}

unsigned int shared_address(const void *at) { return (unsigned int)((const char *)at - (const char *)shared); }

void load_matrices(unsigned int (&words)[4], unsigned int at) { load_four(words, at, false); }
void load_transposed(unsigned int (&words)[4], unsigned int at) { load_four(words, at, true); }

void multiply_add_words(float (&sum)[4], const unsigned int (&left)[4], unsigned int right0, unsigned int right1,
                        float (*widen_bits)(unsigned short)) {
    Share &share = brought();
    for (int i = 0; i < 4; ++i) share.words[i] = left[i], share.numbers[i] = sum[i];
    share.words[4] = right0, share.words[5] = right1;
    together("product", [&](WarpState &state) {
        const auto half = [&](unsigned int word, int i) { return widen_bits((unsigned short)(word >> 16 * i)); };
        float a[16][16], b[16][8], c[16][8];
        for (int lane = 0; lane < WARP; ++lane) {
            const Share &in = state.in[lane];
            const int row = lane / 4, column = lane % 4 * 2;
            for (int word = 0; word < 4; ++word)
                for (int i = 0; i < 2; ++i)
                    a[row + word % 2 * 8][column + word / 2 * 8 + i] = half(in.words[word], i);
            for (int word = 0; word < 2; ++word)
                for (int i = 0; i < 2; ++i) b[column + word * 8 + i][row] = half(in.words[4 + word], i);
            for (int i = 0; i < 4; ++i) c[row + i / 2 * 8][column + i % 2] = in.numbers[i];
        }
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 8; ++j)
                for (int k = 0; k < 16; ++k) c[i][j] += a[i][k] * b[k][j];
        for (int lane = 0; lane < WARP; ++lane)
            for (int i = 0; i < 4; ++i) state.out[lane].numbers[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
    for (int i = 0; i < 4; ++i) sum[i] = taken().numbers[i];
}

void copy_piece(unsigned int to, const void *from, bool exists) { begin_copy(to, from, 16, exists); }
void copy_word(unsigned int to, const void *from, bool exists) { begin_copy(to, from, 4, exists); }

void end_group_of_copies() {
    now->groups.push_back(now->open);
    now->open.clear();
}

void await_groups(int pending) {
    while ((int)now->groups.size() > pending) {
        for (const Copy &copy : now->groups.front()) {
            if (late) copy.arrive();
            const size_t at = copy.to - (char *)shared;
            for (size_t i = at / 2; i < (at + copy.bytes) / 2; ++i) touched[i].under_way = false;
            touch(at, copy.bytes, true);
        }
        now->groups.erase(now->groups.begin());
    }
}

void play(Order next_order, bool late_copies) { order = next_order, late = late_copies; }

void allow(const void *memory, size_t bytes, bool writable) {
    ranges.push_back({(const char *)memory, (const char *)memory + bytes, writable});
}

void forget() { ranges.clear(); }

void launch(Index grid, int threads_of_block, size_t shared_bytes, std::function<void()> body) {
    threads = threads_of_block, shared_now = shared_bytes, kernel = body, gridDim = grid;
    blockDim = {(unsigned int)threads, 1, 1};
    if ((int)fibers.size() < threads) fibers.resize(threads);
    for (unsigned int z = 0; z < grid.z; ++z)
        for (unsigned int y = 0; y < grid.y; ++y)
            for (unsigned int x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                run_block();
            }
}

// The compiler calls these before every access of a kernel.
#define WATCH(BYTES)                                                                                                  \
    extern "C" void __tsan_read##BYTES(void *at) { watch(at, BYTES, false); }                                         \
    extern "C" void __tsan_write##BYTES(void *at) { watch(at, BYTES, true); }                                         \
    extern "C" void __tsan_unaligned_read##BYTES(void *at) { watch(at, BYTES, false); }                               \
    extern "C" void __tsan_unaligned_write##BYTES(void *at) { watch(at, BYTES, true); }
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void *__tsan_memcpy(void *to, const void *from, size_t bytes) { return memcpy(to, from, bytes); }
extern "C" void *__tsan_memset(void *to, int value, size_t bytes) { return memset(to, value, bytes); }
