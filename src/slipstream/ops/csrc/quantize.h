/* Quantization of weights to int8 and int4, and back: the function table of an instruction set. The torch twins in reference.py are
 * bit-identical. */
#ifndef SLIPSTREAM_QUANTIZE_H
#define SLIPSTREAM_QUANTIZE_H

#include "slipstream_ops.h"

#define MAX_GROUP 128 /* inputs that share a scale */

/* The layout of packed rows (ops/rows.py): codes, then a bf16 scale per `block` columns, a multiple of 16. */
struct row_form {
    int64_t bits, columns, block, code_nbytes, row_nbytes;
};

/* A tensor in groups of `group` elements, which are cut into items; it is rounded to `zero + k * scale`, low <= k <= high. */
struct grid {
    const char *w;
    char *out;
    float *ends; /* [items][2]: the least and the largest element; NaN if one is not finite */
    const float *scale, *zero; /* of each group */
    int64_t group, piece;
    float low, high;
    int32_t dtype;
};

struct quantize_isa {
    /* w [rows][columns] <-> codes of its shape, a scale for each row. */
    void (*to_int8)(const char *w, int dtype, int64_t rows, int64_t columns, int8_t *codes, float *scales);
    void (*from_int8)(float *w, int64_t rows, int64_t columns, const int8_t *codes, const float *scales);
    /* w [groups][group] <-> two codes per byte, the first in the low half; a scale and an offset for each group. */
    void (*to_int4)(const char *w, int dtype, int64_t groups, int64_t group, uint8_t *codes, float *scales, float *lows);
    void (*from_int4)(float *w, int64_t groups, int64_t group, const uint8_t *codes, const float *scales, const float *lows);
    /* packed rows -> w [rows][columns] of any dtype; `pairs` are the two values of each byte of 4-bit codes. */
    void (*from_rows)(char *w, int dtype, int64_t rows, const struct row_form *form, const uint8_t *packed, const float *pairs);
    /* w [numel] -> its `ends`; w -> `out`, rounded. */
    void (*to_ends)(const char *w, int dtype, int64_t numel, float *ends);
    void (*to_grid)(const struct grid *grid, const char *w, char *out, int64_t numel, float scale, float zero);
};

extern const struct quantize_isa quantize_portable, quantize_avx2, quantize_avx512;

#endif
