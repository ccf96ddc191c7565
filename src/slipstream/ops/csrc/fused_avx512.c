/* The passes of a transformer layer for x86-64 with AVX-512F. */
#include "fused.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "fused_body.h"

static const struct fused_isa table = {"avx512", {add_norm, add_norm_backward, activate, activate_backward, rotate, lose, lose_backward}};
const struct fused_isa *const fused_avx512 = &table;
#else
const struct fused_isa *const fused_avx512 = 0;
#endif
