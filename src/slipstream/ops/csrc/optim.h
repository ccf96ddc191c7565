/* Definitions shared by the optimizers (optim_body.h) and their callers. ops/optim.py packs `struct step`, uses the same
 * numbers, and sets the coefficients of each rule. */
#ifndef SLIPSTREAM_OPTIM_H
#define SLIPSTREAM_OPTIM_H

#include "slipstream_ops.h"

enum rule { ADAMW, LION, SGD, ADAGRAD, LAMB_UPDATE, LAMB_APPLY, NUM_RULES };
enum coefficient {
    SCALE, KEEP, L2, RATE, UPDATE_RATE, BETA1, REST1, BETA, REST, CORRECTION1, CORRECTION2, EPS, LR, NUM_COEFFICIENTS
};
enum flag { STREAM = 1, STOCHASTIC = 2, FROM_GRAD = 4, UPDATE_FROM_GRAD = 8, FIRST_STEP = 16, NESTEROV = 32, EPS_INSIDE = 64 };
enum { CODES = 3, CODED = 256 }; /* a kind of array in addition to the dtypes: bytes, with one scale per CODED of them */

struct array {
    void *data; /* NULL: no such array */
    float *scales;
    int64_t kind;
};

struct step {
    struct array master, grad, first, second, out; /* first is a momentum; second, a sum of squares, is never negative */
    int64_t offset; /* of element 0 in the numbering that the random bits depend on; a multiple of 16 */
    uint32_t keys[2];
    float coefficients[NUM_COEFFICIENTS];
    int32_t flags;
};

#endif
