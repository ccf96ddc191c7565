/* The decoder for x86-64 with AVX-512BF16 and AVX-512VNNI. */
#include "decoder.h"
#include "slipstream_ops.h"

#if defined(__x86_64__) && KNOWS_AVX512BF16
#include "vec_avx512bf16.h"
#include "decoder_body.h"
#include "sample_body.h"

static const struct decoder_isa table = {"avx512bf16", run, linear, choose};
const struct decoder_isa *const decoder_avx512bf16 = &table;
#else
const struct decoder_isa *const decoder_avx512bf16 = 0;
#endif
