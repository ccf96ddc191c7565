/* The kernels for x86-64 with AVX-512F. */
#include "slipstream_ops.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "kernels.h"
#include "optim_body.h"

static const struct kernels table = {"avx512", sum_block, copy, step};
const struct kernels *const kernels_avx512 = &table;
#else
const struct kernels *const kernels_avx512 = 0;
#endif
