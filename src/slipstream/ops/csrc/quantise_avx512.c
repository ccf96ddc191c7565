/* Quantisation for x86-64 with AVX-512F. */
#include "quantise.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "quantise_body.h"

static const struct quantise_isa table = {"avx512", to_int8, from_int8, to_int4, from_int4, from_rows};
const struct quantise_isa *const quantise_avx512 = &table;
#else
const struct quantise_isa *const quantise_avx512 = 0;
#endif
