// PTX wrappers for compute capability 8.0 and up: tensor-core instructions, and copies that fill with zeros.
//
// Addresses of shared memory are offsets in the shared window.

__device__ inline unsigned int shared_address(const void *at) { return (unsigned int)__cvta_generic_to_shared(at); }

// Loads four 8 × 8 matrices. Lane l names row l % 8 of matrix l / 8, and gets elements 2·(l % 4) and the next of row l
// / 4.
__device__ inline void load_matrices(unsigned int (&words)[4], unsigned int at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
}

// The same, each matrix transposed.
__device__ inline void load_transposed(unsigned int (&words)[4], unsigned int at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
}

// sum += left · right: [16, 8] += [16, 16] · [16, 8].
template <class T>
__device__ void multiply_add(float (&sum)[4], const unsigned int (&left)[4], unsigned int right0, unsigned int right1);

template <>
__device__ inline void multiply_add<bf16>(float (&sum)[4], const unsigned int (&left)[4], unsigned int right0,
                                          unsigned int right1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

template <>
__device__ inline void multiply_add<f16>(float (&sum)[4], const unsigned int (&left)[4], unsigned int right0,
                                         unsigned int right1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// Copies 16 bytes from global memory, or writes zeros without reading `from`.
__device__ inline void copy_piece(unsigned int to, const void *from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

// The same for 4 bytes.
__device__ inline void copy_word(unsigned int to, const void *from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(to), "l"(from), "r"(exists ? 4 : 0)
                 : "memory");
}
