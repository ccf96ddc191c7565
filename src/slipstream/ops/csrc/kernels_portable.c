/* The kernels for any processor. */
#include "slipstream_ops.h"
#include "vec_portable.h"
#include "kernels.h"
#include "optim_body.h"

static const struct kernels table = {"portable", sum_block, copy, step};
const struct kernels *const kernels_portable = &table;
