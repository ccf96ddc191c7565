/* The passes of a transformer layer between its products: the arrays of a call, and its passes. */
#ifndef SLIPSTREAM_FUSED_H
#define SLIPSTREAM_FUSED_H

#include "slipstream_ops.h"

/* fused.c says what each array has in each pass. */
struct fused {
    const char *x, *residual, *grad, *sum_grad;
    char *sum, *out, *dsum, *dx;
    const float *bias, *weight, *shift, *inverse_weight;
    float *dbias, *dweight, *dshift, *stats; /* stats: of each row the mean and the reciprocal deviation */
    int64_t columns, heads, rotated, tokens, stride;
    float eps, least;
    uint32_t seed;
    int32_t dtype, kind; /* kind: of norms, or of activations (vec_activation.h) */
};

enum { FUSED_NO_NORM, FUSED_LAYER_NORM, FUSED_RMS_NORM };

FAMILY(fused, 7); /* of fused.c, in its order; rows */

#endif
