/* Definitions shared by the native kernels: element types, argument records, the function table of an instruction set.
 *
 * Plain C11 with a C ABI: no Python.h, no libtorch. vec_*.h define 16 fp32 lanes each. Kernels are written
 * once and compiled for each instruction set (isa.h); dispatch.c selects a table at run time.
 *
 * [Note: Same bits everywhere] Every instruction set, and the torch twin, performs the same IEEE operations in the same
 * order: no fused multiply-add in fp32 (-ffp-contract=off), division and square root correctly rounded, sums of
 * squares in 16 fp64 lanes (products of fp32 values are exact in fp64) that are folded in one fixed order. A tail is
 * padded with zeros and uses the same vector code, so no scalar path can differ. Random bits are a function of a key and
 * of an element's index, in integer arithmetic.
 */
#ifndef SLIPSTREAM_OPS_H
#define SLIPSTREAM_OPS_H

#include <stdint.h>

#define SLIPSTREAM_API __attribute__((visibility("default")))

enum dtype { DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2 };

/* Elements per partial sum of squares: a constant, so that sums do not depend on how work is split. */
#define BLOCK 65536

/* Elements per step of every kernel: four vectors of 16 lanes. */
#define GROUP 64

struct sum_args {
    void *out;
    const void *const *sources;
    int64_t num_sources;
    float alpha;
    int accumulate; /* add the old value of out */
    int stream;     /* write out with non-temporal stores; out is 64-byte aligned */
};

struct step; /* optim.h */

/* The arrays of a pass of onebit_body.h. Pointers are to the unit's (server: the span's) first element. */
struct onebit {
    const void *grad; /* worker: of dtype */
    const float *inverse;
    float *y; /* update: the masters */
    float *scales;
    uint8_t *records;
    const uint8_t *const *sources; /* server */
    const uint8_t *partly; /* for each block, 1 if some of its elements have an inverse of 0 */
    void *out;                     /* update: the weights of dtype, or NULL */
    int64_t num_sources;
    float beta, factor;
    int dtype;
};

struct kernels_isa {
    /* Elements [start, stop), at most one BLOCK; returns the sum of squares of the elements written. */
    double (*sum_block)(const struct sum_args *args, int64_t start, int64_t stop, int source, int target);
    /* nbytes is a multiple of 64 and dst is 64-byte aligned. */
    void (*copy)(char *dst, const char *src, int64_t nbytes);
    /* A step of one of optim.h's rules. Elements [start, stop), at most one BLOCK; start is a multiple of 256. Writes the rule's
     * two sums of squares to `sums` unless it is NULL. */
    void (*step)(int rule, const struct step *step, int64_t start, int64_t stop, double *sums);
    /* wire_body.h. wire_sum: sum_block of codes of this many bits */
    void (*wire_encode)(const char *x, int dtype, int64_t numel, int bits, uint8_t *out, uint8_t *error, float beta);
    double (*wire_sum)(const struct sum_args *args, int64_t start, int64_t stop, int bits, int target);
};

/* A family of passes over elements, rows, groups or items [begin, end) of the arrays of one record, the struct of its name. */
#define FAMILY(family, num_passes)                                                                                      \
    struct family##_isa {                                                                                               \
        void (*passes[num_passes])(const struct family *s, int64_t begin, int64_t end);                                 \
    };                                                                                                                  \
    extern const struct family##_isa family##_portable, family##_avx2, family##_avx512

FAMILY(onebit, 3); /* of onebit_body.h, in its order; elements, in multiples of 512 */

enum isa { PORTABLE, AVX2, AVX512, AVX512VNNI, AVX512BF16 };

enum isa slipstream_best_isa(void); /* processor.c */
enum isa slipstream_set(void); /* the one in use: dispatch.c */

/* Whether the compiler knows the instructions. If not, the processor is treated as lacking them. */
#define KNOWS_portable 1
#if defined(__x86_64__)
#define KNOWS_avx2 1
#define KNOWS_avx512 1
#if defined(__clang__)
#define KNOWS_avx512vnni (__clang_major__ >= 7)
#define KNOWS_avx512bf16 (__clang_major__ >= 9)
#else
#define KNOWS_avx512vnni (__GNUC__ >= 8)
#define KNOWS_avx512bf16 (__GNUC__ >= 10)
#endif
#endif

extern const struct kernels_isa kernels_portable, kernels_avx2, kernels_avx512;

#endif
