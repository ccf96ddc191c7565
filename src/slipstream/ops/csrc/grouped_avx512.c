/* Grouped matrix products for x86-64 with AVX-512F. */
#include "grouped.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "grouped_body.h"

static const struct grouped_isa table = {"avx512", multiply};
const struct grouped_isa *const grouped_avx512 = &table;
#else
const struct grouped_isa *const grouped_avx512 = 0;
#endif
