/* The entry points of quantization and dequantization. Each processes rows (or groups) [begin, end); callers split over threads. */
#include "quantize.h"

#include <string.h>

const char *slipstream_kernels_isa(void);

static const struct quantize_isa *isa_in_use(void)
{
    const struct quantize_isa *tables[] = {quantize_avx512, quantize_avx2};
    const char *name = slipstream_kernels_isa();
    for (int i = 0; i < 2; ++i)
        if (tables[i] && strcmp(tables[i]->name, name) == 0)
            return tables[i];
    return quantize_portable;
}

static int64_t itemsize(int dtype) { return dtype == DTYPE_F32 ? 4 : 2; }

SLIPSTREAM_API void slipstream_quantize_int8(const char *w, int dtype, int64_t columns, int64_t begin, int64_t end,
                                             int8_t *codes, float *scales)
{
    const int64_t at = begin * columns;
    isa_in_use()->to_int8(w + at * itemsize(dtype), dtype, end - begin, columns, codes + at, scales + begin);
}

SLIPSTREAM_API void slipstream_quantize_int4(const char *w, int dtype, int64_t group, int64_t begin, int64_t end,
                                             uint8_t *codes, float *scales, float *lows)
{
    const int64_t at = begin * group;
    isa_in_use()->to_int4(w + at * itemsize(dtype), dtype, end - begin, group, codes + at / 2, scales + begin, lows + begin);
}

SLIPSTREAM_API void slipstream_dequantize_int8(float *w, int64_t columns, int64_t begin, int64_t end, const int8_t *codes,
                                               const float *scales)
{
    const int64_t at = begin * columns;
    isa_in_use()->from_int8(w + at, end - begin, columns, codes + at, scales + begin);
}

SLIPSTREAM_API void slipstream_dequantize_int4(float *w, int64_t group, int64_t begin, int64_t end, const uint8_t *codes,
                                               const float *scales, const float *lows)
{
    const int64_t at = begin * group;
    isa_in_use()->from_int4(w + at, end - begin, group, codes + at / 2, scales + begin, lows + begin);
}

SLIPSTREAM_API void slipstream_dequantize_rows(char *w, int dtype, const struct row_form *form, int64_t begin, int64_t end,
                                               const uint8_t *packed, const float *pairs)
{
    isa_in_use()->from_rows(w + begin * form->columns * itemsize(dtype), dtype, end - begin, form,
                            packed + begin * form->row_nbytes, pairs);
}

static int64_t piece_of(const struct grid *grid, int64_t item, int64_t *at)
{
    const int64_t per = (grid->group + grid->piece - 1) / grid->piece, first = item % per * grid->piece;
    *at = item / per * grid->group + first;
    return grid->group - first < grid->piece ? grid->group - first : grid->piece;
}

SLIPSTREAM_API void slipstream_ends(const struct grid *grid, int64_t begin, int64_t end)
{
    for (int64_t item = begin, at; item < end; ++item) {
        const int64_t numel = piece_of(grid, item, &at);
        isa_in_use()->to_ends(grid->w + at * itemsize(grid->dtype), grid->dtype, numel, grid->ends + 2 * item);
    }
}

SLIPSTREAM_API void slipstream_on_grid(const struct grid *grid, int64_t begin, int64_t end)
{
    for (int64_t item = begin, at; item < end; ++item) {
        const int64_t numel = piece_of(grid, item, &at), size = itemsize(grid->dtype), group = at / grid->group;
        isa_in_use()->to_grid(grid, grid->w + at * size, grid->out + at * size, numel, grid->scale[group], grid->zero[group]);
    }
}
