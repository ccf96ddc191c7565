/* The kernels for x86-64 with AVX-512F. */
#include "slipstream_ops.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "kernels.h"
#include "optim_body.h"
#include "wire_body.h"
#include "onebit_body.h"

/* All-bf16 steps use AVX2, which separates even and odd elements without crossing lanes: 512-bit vectors are 10% slower there. */
static void step_or_avx2s(int rule, const struct step *s, int64_t start, int64_t stop, double *sums)
{
    const int narrow = rule == ADAMW && s->master.kind == DTYPE_BF16 && s->first.kind == DTYPE_BF16;
    (narrow ? kernels_avx2->step : step)(rule, s, start, stop, sums);
}

static const struct kernels table = {"avx512", sum_block, copy, step_or_avx2s, wire_encode, wire_sum, {onebit_worker, onebit_server, onebit_update}};
const struct kernels *const kernels_avx512 = &table;
#else
const struct kernels *const kernels_avx512 = 0;
#endif
