/* Grouped matrix products for x86-64 with AVX-512 and its dot products of bf16. */
#include "grouped.h"

#if defined(__x86_64__) && KNOWS_AVX512BF16
#include "vec_avx512bf16.h"
#include "grouped_body.h"

static const struct grouped_isa table = {"avx512bf16", multiply};
const struct grouped_isa *const grouped_avx512bf16 = &table;
#else
const struct grouped_isa *const grouped_avx512bf16 = 0;
#endif
