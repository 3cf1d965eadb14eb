// Replaces the kernels' header of the same name, with the layouts of the PTX manual (9.7.14: mma.m16n8k16 and
// ldmatrix).

extern uint4 shared[];

unsigned int shared_address(const void *at);
void load_matrices(unsigned int (&words)[4], unsigned int at);
void load_transposed(unsigned int (&words)[4], unsigned int at);
void multiply_add_words(float (&sum)[4], const unsigned int (&left)[4], unsigned int right0, unsigned int right1,
                        float (*widen_bits)(unsigned short));
void copy_piece(unsigned int to, const void *from, bool exists);
void copy_word(unsigned int to, const void *from, bool exists);

template <class T>
inline void multiply_add(float (&sum)[4], const unsigned int (&left)[4], unsigned int right0, unsigned int right1) {
    multiply_add_words(sum, left, right0, right1, [](unsigned short bits) { return widen(T{bits}); });
}
