/* The passes of a transformer layer for x86-64 with AVX2. */
#include "fused.h"

#if defined(__x86_64__)
#include "vec_avx2.h"
#include "fused_body.h"

static const struct fused_isa table = {"avx2", {add_norm, add_norm_backward, activate, activate_backward, rotate, lose, lose_backward}};
const struct fused_isa *const fused_avx2 = &table;
#else
const struct fused_isa *const fused_avx2 = 0;
#endif
