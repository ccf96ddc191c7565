/* The kernels for any processor. */
#include "slipstream_ops.h"
#include "vec_portable.h"
#include "kernels.h"

static const struct kernels table = {"portable", sum_block, adamw, copy};
const struct kernels *const kernels_portable = &table;
