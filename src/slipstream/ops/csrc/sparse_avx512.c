/* Block-sparse attention for x86-64 with AVX-512F. */
#include "sparse.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "sparse_body.h"

static const struct sparse_isa table = {"avx512", forward, backward};
const struct sparse_isa *const sparse_avx512 = &table;
#else
const struct sparse_isa *const sparse_avx512 = 0;
#endif
