/* Quantization of weights to int8 and int4, and back. The torch twins in reference.py are
 * bit-identical. */
#ifndef SLIPSTREAM_QUANTIZE_H
#define SLIPSTREAM_QUANTIZE_H

#include "slipstream_ops.h"

#define MAX_GROUP 128 /* inputs that share a scale */

/* A tensor w in groups of `group` elements (rows, in int8), with a scale each, and its codes. */
struct quantize {
    char *w;     /* of `dtype`; fp32 from int8 and int4 */
    char *codes; /* int8; or two 4-bit codes per byte, the first in the low half; packed rows; w rounded to its grid */
    float *scale, *low;
    float *ends;        /* [items][2]: the least and the largest element; NaN if one is not finite */
    const float *pairs; /* of packed rows: the two values of each byte of 4-bit codes */
    int64_t group, piece; /* piece: elements of an item, into which groups are cut, of a grid */
    int64_t bits, columns, block, code_nbytes, row_nbytes; /* of packed rows (ops/rows.py): codes, then a bf16 scale per `block` columns,
                                                              a multiple of 16 */
    float lowest, highest; /* the grid's values are low + k * scale, lowest <= k <= highest */
    int32_t dtype;
};

/* w <-> int8; w <-> int4, with an offset in addition; packed rows -> w; an item of w -> its ends, and rounded to its grid */
FAMILY(quantize, 7);

#endif
