/* Quantisation for any processor. */
#include "quantise.h"
#include "vec_portable.h"
#include "quantise_body.h"

static const struct quantise_isa table = {"portable", to_int8, from_int8, to_int4, from_int4, from_rows};
const struct quantise_isa *const quantise_portable = &table;
