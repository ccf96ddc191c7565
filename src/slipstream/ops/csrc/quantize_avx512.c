/* Quantization for x86-64 with AVX-512F. */
#include "quantize.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "quantize_body.h"

static const struct quantize_isa table = {"avx512", to_int8, from_int8, to_int4, from_int4, from_rows, to_ends, to_grid};
const struct quantize_isa *const quantize_avx512 = &table;
#else
const struct quantize_isa *const quantize_avx512 = 0;
#endif
