/* Quantization for any processor. */
#include "quantize.h"
#include "vec_portable.h"
#include "quantize_body.h"

static const struct quantize_isa table = {"portable", to_int8, from_int8, to_int4, from_int4, from_rows, to_ends, to_grid};
const struct quantize_isa *const quantize_portable = &table;
