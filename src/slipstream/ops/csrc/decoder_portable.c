/* The decoder for any processor. */
#include "decoder.h"
#include "vec_portable.h"
#include "decoder_body.h"
#include "sample_body.h"

static const struct decoder_isa table = {"portable", run, choose};
const struct decoder_isa *const decoder_portable = &table;
