/* The kernels for x86-64 with AVX2, FMA and F16C. */
#include "slipstream_ops.h"

#if defined(__x86_64__)
#include "vec_avx2.h"
#include "kernels.h"
#include "optim_body.h"
#include "wire_body.h"
#include "onebit_body.h"

static const struct kernels table = {"avx2", sum_block, copy, step, wire_encode, wire_sum, {onebit_worker, onebit_server, onebit_update}};
const struct kernels *const kernels_avx2 = &table;
#else
const struct kernels *const kernels_avx2 = 0;
#endif
