/* Block-sparse attention for x86-64 with AVX2. */
#include "sparse.h"

#if defined(__x86_64__)
#include "vec_avx2.h"
#include "sparse_body.h"

static const struct sparse_isa table = {"avx2", forward, backward};
const struct sparse_isa *const sparse_avx2 = &table;
#else
const struct sparse_isa *const sparse_avx2 = 0;
#endif
