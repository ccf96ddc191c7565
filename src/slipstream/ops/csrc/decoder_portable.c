/* The decoder for any processor. */
#include "decoder.h"
#include "vec_portable.h"
#include "decoder_body.h"

static const struct decoder_isa table = {"portable", run};
const struct decoder_isa *const decoder_portable = &table;
