/* A token's row of the embedding: a row of a matrix of numbers, or a column of a quantized one, which may be the head's. */
#ifndef SLIPSTREAM_DECODER_EMBED_H
#define SLIPSTREAM_DECODER_EMBED_H

#include "decoder_products.h"

/* The code of feature k of a column, whose first byte in its panel is at p. */
INLINE int code_of(const int type, const uint8_t *p, int64_t k)
{
    if (type == WEIGHT_INT8 || type == WEIGHT_INT8_GROUPS)
        return (int8_t)p[k / 4 * 64 + k % 4];
    if (type == WEIGHT_INT4 || type == WEIGHT_K4)
        return p[k / 8 * 64 + k % 4] >> k % 8 / 4 * 4 & 15;
    const int64_t n = k % FEATURES(type) / 4;
    p += k / FEATURES(type) * GROUP_BYTES(type) + k % 4;
    if (type == WEIGHT_K6)
        return n < 3 ? p[n * 64] & 63 : p[0] >> 6 | p[64] >> 6 << 2 | p[128] >> 6 << 4;
    if (n == 7)
        return p[64] >> 7 | p[192] >> 7 << 1 | p[256] >> 5 << 2;
    return n < 5 ? p[n * 64] & 31 : p[(n - 5) * 128] >> 5 | (p[(n - 5) * 128 + 64] >> 5 & 3) << 3;
}

/* x[k] = the weight of feature k, for `size` features: the numbers of `dequantize` in ops/matrices.py. */
TARGET static void column_of(const struct matrix *w, int64_t column, int64_t size, float *x)
{
    const int type = w->type;
    const int64_t panel = column / PANEL, lane = column % PANEL, features = FEATURES(type);
    const uint8_t *const p = (const uint8_t *)panel_of(w, panel) + lane * 4;
    float scales[16] = {0}, lows[16] = {0};
    if (type == WEIGHT_INT8)
        scales[lane] = ((const float *)w->scale)[column];
    for (int64_t g = 0; g * features < size; ++g) {
        const struct group_scales at = scales_of(type, w, panel, g);
        if (IS_K(type)) {
            const vec d = load_f16(at.low);
            store_f32(scales, vec_mul(load_i8(at.scale), d), 0);
            if (type != WEIGHT_K6)
                store_f32(lows, vec_mul(load_i8(at.scale + 16), load_f16(at.low + 32)), 0);
        } else if (type != WEIGHT_INT8) {
            store_f32(scales, load_f16(at.scale), 0);
            if (type == WEIGHT_INT4)
                store_f32(lows, at.low ? vec_sub(vec_zero(), load_f16(at.low)) : vec_mul(load_f32(scales), vec_set(8.0f)), 0);
        }
        for (int64_t k = g * features; k < (g + 1) * features && k < size; ++k)
            x[k] = (float)(code_of(type, p, k) - (type == WEIGHT_K6 ? 32 : 0)) * scales[lane] - lows[lane];
    }
}

TARGET static void embed_row(const struct decoder *model, int32_t id, float *x)
{
    const int64_t size = model->embed_size;
    if (model->embed_codes) {
        column_of(model->embed_codes, id, size, x);
        for (int64_t i = 0; i < size; ++i)
            x[i] *= model->embed_scale;
        return;
    }
    const int type = model->embed_type;
    const char *row = (const char *)model->embed + id * size * itemsize(type);
    for (int64_t i = 0; i < size; i += 16) {
        const vec part = load_part(row + i * itemsize(type), size - i, type);
        store_part(x + i, vec_mul(part, vec_set(model->embed_scale)), size - i, WEIGHT_F32);
    }
}

#endif
