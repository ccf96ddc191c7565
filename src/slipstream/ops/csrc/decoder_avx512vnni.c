/* The decoder for x86-64 with AVX-512VNNI. */
#include "decoder.h"
#include "slipstream_ops.h"

#if defined(__x86_64__) && KNOWS_AVX512VNNI
#include "vec_avx512vnni.h"
#include "decoder_body.h"
#include "sample_body.h"

static const struct decoder_isa table = {"avx512vnni", run, linear, choose};
const struct decoder_isa *const decoder_avx512vnni = &table;
#else
const struct decoder_isa *const decoder_avx512vnni = 0;
#endif
