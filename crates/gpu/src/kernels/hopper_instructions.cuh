// PTX wrappers for Hopper: barriers that count bytes, the copy engine (TMA), and products that a warp group of four
// warps issues together (wgmma). For compute capability 9.0 only, sm_90a.

#include "matrix_instructions.cuh"

typedef unsigned int word;
typedef unsigned long long barrier;

// CUtensorMap: TMA's descriptor of a tensor in global memory.
struct alignas(64) Tensor {
    unsigned char opaque[128];
};

constexpr int GROUP = 128; // threads that issue a product together

__device__ inline void begin_barrier(barrier *at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(arrivals));
}

__device__ inline void arrive(barrier *at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(at)) : "memory");
}

// Arrives, and announces how many bytes TMA will write before this phase of the barrier is complete.
__device__ inline void expect_bytes(barrier *at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(at)), "r"(bytes)
                 : "memory");
}

// Barriers track their phase by parity only, so a thread that waits for a phase must know that the one before it is
// complete.
__device__ inline void await(barrier *at, int parity) {
    asm volatile("{\n"
                 ".reg .pred over;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n"
                 "}" ::"r"(shared_address(at)), "r"(parity)
                 : "memory");
}

// Loads the box of a matrix at a column and row, or of a three-dimensional tensor. Elements beyond its end are zeros.
__device__ inline void fetch(void *to, const Tensor &from, int column, int row, barrier *at) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(to)), "l"(&from), "r"(column), "r"(row), "r"(shared_address(at))
                 : "memory");
}

__device__ inline void fetch(void *to, const Tensor &from, int column, int row, int layer, barrier *at) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared_address(to)), "l"(&from), "r"(column), "r"(row), "r"(layer), "r"(shared_address(at))
                 : "memory");
}

__device__ inline void fetch_floats(float *to, const float *from, int count, barrier *at) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(count * 4), "r"(shared_address(at))
                 : "memory");
}

// The inverse of fetch; elements beyond the end are not stored.
__device__ inline void put(const Tensor &to, const void *from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&to), "r"(column), "r"(row), "r"(shared_address(from))
                 : "memory");
}

__device__ inline void put(const Tensor &to, const void *from, int column, int row, int layer) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(&to), "r"(column), "r"(row), "r"(layer), "r"(shared_address(from))
                 : "memory");
}

// Makes the threads' writes to shared memory visible to TMA and to wgmma.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until the thread's stores have been read from shared memory.
__device__ inline void await_puts() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until they are complete.
__device__ inline void await_all_puts() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ inline void end_puts() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits for all groups of issued products but the last PENDING.
template <int PENDING> __device__ inline void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Orders earlier register writes before products that read or add to these registers.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The 64-bit descriptor of a wgmma factor in shared memory: rows of 64 two-byte elements, swizzled by TMA in groups of
// eight. The upper half is the same for all descriptors.
struct Factor {
    word lower;

    // `chunk` is the distance between chunks of 64 columns, if rows run along k and a factor is wider than one chunk.
    __device__ explicit Factor(const void *at, int chunk = 16)
        : lower((shared_address(at) & 0x3ffff) >> 4 | (word)(chunk >> 4) << 16) {}

    // Advances by this many bytes: one instruction, instead of four for a new descriptor.
    __device__ Factor operator+(int bytes) const {
        Factor there = *this;
        there.lower += bytes >> 4;
        return there;
    }
};

#define FACTOR(NAME, LOWER) "mov.b64 " NAME ", {" LOWER ", 0x40000040};\n" // groups of 1024 bytes; swizzled

// The inverse of load_matrices.
__device__ inline void store_matrices(word at, const word (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

#define FLOATS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLOATS_16(d, i) FLOATS_4(d, i), FLOATS_4(d, i + 4), FLOATS_4(d, i + 8), FLOATS_4(d, i + 12)

// d = left · right, or d += left · right if `add`: [64, 16] and [16, 2·floats], bf16. d[4·j + i] of a thread is the
// element at row 16·warp + lane / 4 + 8·(i / 2) and column 8·j + 2·(lane % 4) + i % 2. A factor is in shared memory
// with its rows along k or across it. The left one may be in registers instead, rounded, in the layout of a product's
// result.
template <bool LEFT_ALONG_K, bool RIGHT_ALONG_K>
__device__ inline void multiply(float (&d)[16], Factor left, Factor right, bool add) {
    asm volatile("{\n.reg .pred add;\n.reg .b64 left, right;\n"
                 FACTOR("left", "%16") FACTOR("right", "%17")
                 "setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "left, right, add, 1, 1, %19, %20;\n}"
                 : FLOATS_16(d, 0)
                 : "r"(left.lower), "r"(right.lower), "r"((int)add), "n"(LEFT_ALONG_K ? 1 : 0),
                   "n"(RIGHT_ALONG_K ? 1 : 0));
}

template <bool LEFT_ALONG_K, bool RIGHT_ALONG_K>
__device__ inline void multiply(float (&d)[32], Factor left, Factor right, bool add) {
    asm volatile("{\n.reg .pred add;\n.reg .b64 left, right;\n"
                 FACTOR("left", "%32") FACTOR("right", "%33")
                 "setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "left, right, add, 1, 1, %35, %36;\n}"
                 : FLOATS_16(d, 0), FLOATS_16(d, 16)
                 : "r"(left.lower), "r"(right.lower), "r"((int)add), "n"(LEFT_ALONG_K ? 1 : 0),
                   "n"(RIGHT_ALONG_K ? 1 : 0));
}

template <bool RIGHT_ALONG_K>
__device__ inline void multiply(float (&d)[32], const word (&left)[4], Factor right, bool add) {
    asm volatile("{\n.reg .pred add;\n.reg .b64 right;\n" FACTOR("right", "%36")
                 "setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, right, add, 1, 1, %38;\n}"
                 : FLOATS_16(d, 0), FLOATS_16(d, 16)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right.lower), "r"((int)add),
                   "n"(RIGHT_ALONG_K ? 1 : 0));
}

template <bool RIGHT_ALONG_K>
__device__ inline void multiply(float (&d)[48], const word (&left)[4], Factor right, bool add) {
    asm volatile("{\n.reg .pred add;\n.reg .b64 right;\n" FACTOR("right", "%52")
                 "setp.ne.b32 add, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
                 "{%48, %49, %50, %51}, right, add, 1, 1, %54;\n}"
                 : FLOATS_16(d, 0), FLOATS_16(d, 16), FLOATS_16(d, 32)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right.lower), "r"((int)add),
                   "n"(RIGHT_ALONG_K ? 1 : 0));
}

template <bool LEFT_ALONG_K, bool RIGHT_ALONG_K>
__device__ inline void multiply(float (&d)[64], Factor left, Factor right, bool add) {
    asm volatile("{\n.reg .pred add;\n.reg .b64 left, right;\n"
                 FACTOR("left", "%64") FACTOR("right", "%65")
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "left, right, add, 1, 1, %67, %68;\n}"
                 : FLOATS_16(d, 0), FLOATS_16(d, 16), FLOATS_16(d, 32), FLOATS_16(d, 48)
                 : "r"(left.lower), "r"(right.lower), "r"((int)add), "n"(LEFT_ALONG_K ? 1 : 0),
                   "n"(RIGHT_ALONG_K ? 1 : 0));
}

template <bool RIGHT_ALONG_K>
__device__ inline void multiply(float (&d)[64], const word (&left)[4], Factor right, bool add) {
    asm volatile("{\n.reg .pred add;\n.reg .b64 right;\n" FACTOR("right", "%68")
                 "setp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, right, add, 1, 1, %70;\n}"
                 : FLOATS_16(d, 0), FLOATS_16(d, 16), FLOATS_16(d, 32), FLOATS_16(d, 48)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right.lower), "r"((int)add),
                   "n"(RIGHT_ALONG_K ? 1 : 0));
}
