/* The decoder for x86-64 with AVX-512F. */
#include "decoder.h"

#if defined(__x86_64__)
#include "vec_avx512.h"
#include "decoder_body.h"
#include "sample_body.h"

static const struct decoder_isa table = {"avx512", run, linear, choose};
const struct decoder_isa *const decoder_avx512 = &table;
#else
const struct decoder_isa *const decoder_avx512 = 0;
#endif
