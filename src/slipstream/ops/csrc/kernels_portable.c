/* The kernels for any processor. */
#include "slipstream_ops.h"
#include "vec_portable.h"
#include "kernels.h"
#include "optim_body.h"
#include "wire_body.h"
#include "onebit_body.h"

static const struct kernels table = {"portable", sum_block, copy, step, wire_encode, wire_sum, {onebit_worker, onebit_server, onebit_update}};
const struct kernels *const kernels_portable = &table;
