/* Grouped matrix products for x86-64 with AVX2. */
#include "grouped.h"

#if defined(__x86_64__)
#include "vec_avx2.h"
#include "grouped_body.h"

static const struct grouped_isa table = {"avx2", multiply};
const struct grouped_isa *const grouped_avx2 = &table;
#else
const struct grouped_isa *const grouped_avx2 = 0;
#endif
