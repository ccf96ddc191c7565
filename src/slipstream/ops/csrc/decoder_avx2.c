/* The decoder for x86-64 with AVX2, FMA and F16C. */
#include "decoder.h"

#if defined(__x86_64__)
#include "vec_avx2.h"
#include "decoder_body.h"
#include "sample_body.h"

TARGET void slipstream_codes_by_avx2(const struct matrix *w, int64_t panel, int panels, const struct coded *x, int64_t row, int rows,
                                     float out[][ROWS][PANEL])
{
    multiply_codes(w, panel, panels, x, row, rows, out);
}

static const struct decoder_isa table = {"avx2", run, linear, choose};
const struct decoder_isa *const decoder_avx2 = &table;
#else
const struct decoder_isa *const decoder_avx2 = 0;
#endif
