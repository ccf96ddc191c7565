/* Quantization for x86-64 with AVX2, FMA and F16C. */
#include "quantize.h"

#if defined(__x86_64__)
#include "vec_avx2.h"
#include "quantize_body.h"

static const struct quantize_isa table = {"avx2", to_int8, from_int8, to_int4, from_int4, from_rows, to_ends, to_grid};
const struct quantize_isa *const quantize_avx2 = &table;
#else
const struct quantize_isa *const quantize_avx2 = 0;
#endif
