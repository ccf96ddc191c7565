/* What adapters add to products: y += B (scale A x), for the rows of requests that have one.
 *
 * The product with the model's own matrix is computed once for all rows; `shrink` (decoder_body.h) computes scale A x of the rows
 * with adapters before it, and add_low_rank adds B times that to a tile's sums. Each row's terms are added in one order, so its
 * bits do not depend on the adapters of other rows. Rows of one adapter follow each other, so A and B are read from the cache. */
#ifndef SLIPSTREAM_DECODER_ADAPTERS_H
#define SLIPSTREAM_DECODER_ADAPTERS_H

#include "decoder_lanes.h"

#define FETCH_AHEAD 1024 /* bytes per panel: about 50 ns of a core's share of memory bandwidth */
#define DOTS 4           /* rows of a matrix whose products with x are computed together, in four streams */

INLINE vec load_weight(int type, const void *p)
{
    return type == WEIGHT_BF16 ? load_bf16(p) : type == WEIGHT_F16 ? load_f16(p) : load_f32(p);
}

INLINE int64_t weight_size(int type) { return type == WEIGHT_F32 ? 4 : 2; }

INLINE void fetch(const char *p) { __builtin_prefetch(p, 0, 3); }

/* out[j] = w[j] . x, in sums of 16 lanes. */
INLINE void dots(const int type, const char *const w[DOTS], const float *x, int64_t size, float out[DOTS])
{
    const int64_t whole = size / 16 * 16, width = weight_size(type);
    float last[16] = {0}, lasts[DOTS][16] = {{0}};
    vec sums[DOTS];
    for (int j = 0; j < DOTS; ++j) {
        sums[j] = vec_zero();
        memcpy(lasts[j], w[j] + whole * width, (size_t)((size - whole) * width));
    }
    memcpy(last, x + whole, (size_t)(size - whole) * sizeof(float));
    for (int64_t d = 0; d < whole; d += 16)
        for (int j = 0; j < DOTS; ++j) {
            fetch(w[j] + d * width + FETCH_AHEAD);
            sums[j] = vec_fma(load_f32(x + d), load_weight(type, w[j] + d * width), sums[j]);
        }
    for (int j = 0; j < DOTS; ++j)
        out[j] = lanes_sum(vec_fma(load_f32(last), load_weight(type, lasts[j]), sums[j]));
}

/* A product's terms of the adapters: of its layer and place, for gate and up of both. */
struct low_terms {
    const struct batch *batch; /* NULL: no row has an adapter */
    int at;                    /* layer * LOW_PLACES + enum low_place */
};

INLINE struct low_terms low_of(const struct batch *batch, int layer, enum low_place place)
{
    return (struct low_terms){batch->adapters ? batch : 0, layer * LOW_PLACES + place};
}

/* scale A x of a row, [low_size]. */
INLINE float *low_row(const struct batch *batch, int64_t row, int at)
{
    return batch->low + (row * LOW_PLACES + at % LOW_PLACES) * batch->low_size;
}

/* `ahead`: bytes to the memory that this thread reads next of this term. */
INLINE vec low_sum(const int type, const char *b, const float *t, int rank, int64_t ahead, vec sum)
{
    for (int r = 0; r < rank; ++r) {
        const char *p = b + r * PANEL * weight_size(type);
        fetch(p + ahead);
        sum = vec_fma(vec_set(t[r]), load_weight(type, p), sum);
    }
    return sum;
}

/* Add to the sums of a tile; `gated`: its panels alternate between gate and up. */
INLINE void add_low_rank(const struct low_terms *low, int gated, int64_t panel, int panels, int row, int rows, float sums[][ROWS][PANEL])
{
    for (int i = 0; i < rows; ++i) {
        const struct low_rank *adapter = low->batch->adapters[row + i];
        for (int j = 0; adapter && j < panels; ++j) { /* terms of rank 0 add nothing */
            const int at = low->at + (gated && j % 2);
            const struct low_rank *term = adapter + at;
            const int64_t own = gated ? (panel + j) / 2 : panel + j;
            const int64_t bytes = term->rank * PANEL * weight_size(term->type), ahead = panels * bytes / (1 + gated);
            const char *b = (const char *)term->b + own * bytes;
            const float *t = low_row(low->batch, row + i, at);
            const vec sum = load_f32(sums[j][i]);
            store_f32(sums[j][i], term->type == WEIGHT_BF16 ? low_sum(WEIGHT_BF16, b, t, term->rank, ahead, sum)
                                                            : low_sum(WEIGHT_F32, b, t, term->rank, ahead, sum), 0);
        }
    }
}

#endif
