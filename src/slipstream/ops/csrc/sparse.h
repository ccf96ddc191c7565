/* Block-sparse attention: the arguments of a call, and its passes.
 *
 * A tile is up to 64 neighboring queries that attend to the same keys, listed as panels of 16 keys. So nothing here knows the size
 * of a block. Scores exist for one tile and CHUNK panels at a time; the forward keeps one log-sum-exp per query, from which the
 * backward computes them again (Dao et al., arXiv 2205.14135).
 */
#ifndef SLIPSTREAM_SPARSE_H
#define SLIPSTREAM_SPARSE_H

#include "slipstream_ops.h"

/* [batch, heads, length, dim] of `dtype`; strides in elements, that of the last dimension is 1. */
struct heads {
    char *at;
    int64_t batch, head, row;
};

struct sparse_tile {
    int32_t row, rows; /* in panels of 16 queries; rows <= 4 */
    int32_t begin, end; /* of its panels of keys */
};

struct sparse {
    struct heads q, k, v, o, grad, dq, dk, dv;
    float *lse;                      /* [batch, heads, length], +inf for a query without a key */
    const float *key_bias;           /* [batch, length] or NULL */
    const float *bias;               /* added to scores, [batch, heads, length, length] by the strides below, or NULL */
    float *bias_grad;                /* added to, [batch or 1, heads, length, length], or NULL */
    const int32_t *spans;            /* [batch, length, 2]: the first key that a query sees and the one after its last, or NULL */
    const struct sparse_tile *tiles; /* of all layouts */
    const int32_t *panels;
    const int64_t *layouts; /* [num_layouts + 1]: where the tiles of each begin */
    int64_t batch, num_heads, num_kv_heads, num_layouts, length, dim;
    int64_t bias_batch, bias_head, grad_batch; /* strides */
    float scale, dropout;                      /* dropout: the least 16-bit number that is kept */
    uint32_t seed;
    int32_t dtype, causal;
    int32_t *failed; /* set to 1 if there is no memory */
};

FAMILY(sparse, 2); /* forward, backward; item batch * num_kv_heads + kv_head has the queries of all heads of its group */

#endif
