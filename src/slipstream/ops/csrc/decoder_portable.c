/* The decoder for any processor. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2") /* -O3 takes three times as long here */
#endif

#include "decoder.h"
#include "vec_portable.h"
#include "decoder_body.h"
#include "sample_body.h"

static const struct decoder_isa table = {"portable", run, linear, choose};
const struct decoder_isa *const decoder_portable = &table;
