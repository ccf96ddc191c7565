/* Grouped matrix products: the arrays of a call, and the function table of an instruction set. */
#ifndef SLIPSTREAM_GROUPED_H
#define SLIPSTREAM_GROUPED_H

#include "slipstream_ops.h"

#include <stdatomic.h>

/* Element (i, j) of group g is at `at` + (starts[g] * start + g * group + i * row + j * column), in elements. In a and
 * b, row or column is 1 (or both dimensions have one element); in c, column is 1. */
struct grouped_matrix {
    char *at;
    int64_t start, group, row, column;
};

/* c[g] = a[g] b[g] + bias[g] for each group g: a [m, k], b [k, n]. */
struct grouped {
    struct grouped_matrix a, b, c;
    const char *bias;      /* [groups, n], or NULL */
    const int64_t *starts; /* [groups + 1]: the first row of each group, and the number of all rows */
    int64_t groups, m, n, k; /* -1 for m or k: the group's number of rows */
    int64_t columns;       /* columns of c in an item, a multiple of 64 */
    int32_t dtype, failed; /* failed: a thread found no memory, and took no items */
    _Atomic int64_t next; /* the next item to take */
};

struct grouped_isa {
    void (*multiply)(struct grouped *s);
};

extern const struct grouped_isa grouped_avx2, grouped_avx512, grouped_avx512bf16;

#endif
