/* y = x W^T for every kind of matrix, in tiles of independent accumulators; strips of columns are shared out. */
#ifndef SLIPSTREAM_DECODER_PRODUCTS_H
#define SLIPSTREAM_DECODER_PRODUCTS_H

#include "decoder_lanes.h"

INLINE vec load_weight(int type, const char *p)
{
    return type == WEIGHT_BF16 ? load_bf16(p) : type == WEIGHT_F16 ? load_f16(p) : load_f32(p);
}

INLINE int64_t weight_size(int type) { return type == WEIGHT_F32 ? 4 : 2; }

INLINE int is_coded(const struct matrix *w) { return w->type == WEIGHT_INT8 || w->type == WEIGHT_INT4; }

INLINE const char *panel_of(const struct matrix *w, int64_t panel)
{
    const int64_t size = w->num_features * PANEL;
    return (const char *)w->data + panel * (w->type == WEIGHT_INT4   ? size / 2
                                            : w->type == WEIGHT_INT8 ? size
                                                                     : size * weight_size(w->type));
}

/* out[j][i][:] = x[i] . panel j, for `rows` rows of x and `panels` panels; both are constants where this is inlined. */
INLINE void tile(const int type, const int rows, const int panels, const struct matrix *w, int64_t panel, const float *x,
                 int64_t stride, float out[][ROWS][PANEL])
{
    const int64_t num_features = w->num_features;
    vec sums[ROWS * 4];
    const char *p[4];
    for (int a = 0; a < rows * panels; ++a)
        sums[a] = vec_zero();
    for (int j = 0; j < panels; ++j)
        p[j] = panel_of(w, panel + j);
    const int64_t step = PANEL * weight_size(type);
    for (int64_t k = 0; k < num_features; ++k)
        for (int j = 0; j < panels; ++j) {
            const vec weight = load_weight(type, p[j] + k * step);
            for (int i = 0; i < rows; ++i)
                sums[i * panels + j] = vec_fma(vec_set(x[i * stride + k]), weight, sums[i * panels + j]);
        }
    for (int j = 0; j < panels; ++j)
        for (int i = 0; i < rows; ++i)
            store_f32(out[j][i], sums[i * panels + j], 0);
}

#define FOR_TYPES(DO, ...)                                                                                              \
    switch (w->type) {                                                                                                  \
    case WEIGHT_BF16: DO(WEIGHT_BF16, __VA_ARGS__); break;                                                              \
    case WEIGHT_F16: DO(WEIGHT_F16, __VA_ARGS__); break;                                                                \
    default: DO(WEIGHT_F32, __VA_ARGS__); break;                                                                        \
    }

/* A few rows: weights are read once, straight from memory, four panels at a time for one row (enough accumulators to
 * cover the latency of a multiply-add). */
TARGET static void few_rows(const struct matrix *w, int64_t panel, int panels, int rows, const float *x, int64_t stride,
                            float out[][ROWS][PANEL])
{
    if (rows == 1 && panels == 4) {
        FOR_TYPES(tile, 1, 4, w, panel, x, stride, out)
        return;
    }
    for (int j = 0; j < panels; j += 2)
        switch (rows) {
        case 1: FOR_TYPES(tile, 1, 2, w, panel + j, x, stride, out + j) break;
        case 2: FOR_TYPES(tile, 2, 2, w, panel + j, x, stride, out + j) break;
        case 3: FOR_TYPES(tile, 3, 2, w, panel + j, x, stride, out + j) break;
        default:
            for (int half = 0; half < 2; ++half)
                switch (rows) {
                case 4: FOR_TYPES(tile, 4, 1, w, panel + j + half, x, stride, out + j + half) break;
                case 5: FOR_TYPES(tile, 5, 1, w, panel + j + half, x, stride, out + j + half) break;
                default: FOR_TYPES(tile, 6, 1, w, panel + j + half, x, stride, out + j + half) break;
                }
        }
}

/* Many rows: a panel is widened once into `to`, fp32 [k][PANEL]. */
TARGET static void widen(const struct matrix *w, int64_t panel, float *to)
{
    const char *p = panel_of(w, panel);
    for (int64_t k = 0; k < w->num_features; ++k)
        store_f32(to + k * PANEL, load_weight(w->type, p + k * PANEL * weight_size(w->type)), 0);
}

TARGET static void wide_rows(const struct matrix *wide, int rows, const float *x, int64_t stride, float out[][ROWS][PANEL])
{
    switch (rows) {
    case 1: tile(WEIGHT_F32, 1, 1, wide, 0, x, stride, out); break;
    case 2: tile(WEIGHT_F32, 2, 1, wide, 0, x, stride, out); break;
    case 3: tile(WEIGHT_F32, 3, 1, wide, 0, x, stride, out); break;
    case 4: tile(WEIGHT_F32, 4, 1, wide, 0, x, stride, out); break;
    case 5: tile(WEIGHT_F32, 5, 1, wide, 0, x, stride, out); break;
    default: tile(WEIGHT_F32, 6, 1, wide, 0, x, stride, out); break;
    }
}

/* ---- matrices of codes: whole numbers are multiplied exactly, group by group of CODES features ----
 *
 * x is rounded to 8 bits with a scale for each group of a row, as llama.cpp does; w is int8 with a scale per column, or
 * int4 with a scale and an offset per column and group. */

/* Rows of x as they are multiplied. */
struct coded {
    const int8_t *codes;
    const float *scales, *sums; /* per group */
    int64_t stride, groups_stride;
};

/* To nearest even; the largest of a group becomes 127. */
TARGET static void code_row(const float *x, int64_t size, int8_t *codes, float *scales, float *sums)
{
    for (int64_t k = 0; k < size; k += CODES) {
        const int64_t width = size - k < CODES ? size - k : CODES;
        float group[CODES] = {0}, most = 0.0f;
        int32_t total = 0;
        int finite = 1;
        memcpy(group, x + k, (size_t)width * sizeof(float));
        for (int i = 0; i < CODES; ++i) {
            most = fabsf(group[i]) > most ? fabsf(group[i]) : most;
            finite &= fabsf(group[i]) < INFINITY;
        }
        if (!finite) { /* no code says so, but the scale can: the result is NaN */
            memset(codes + k, 0, CODES);
            scales[k / CODES] = sums[k / CODES] = NAN;
            continue;
        }
        const float factor = most > 1e-30f ? 127.0f / most : 0.0f;
        for (int i = 0; i < CODES; ++i) {
            const float magic = 12582912.0f;
            const int32_t code = (int32_t)(group[i] * factor + magic - magic);
            codes[k + i] = (int8_t)code;
            total += code;
        }
        scales[k / CODES] = most / 127.0f;
        sums[k / CODES] = (float)total * (most / 127.0f);
    }
}

INLINE void coded_tile(const int type, const int rows, const struct matrix *w, int64_t panel, const struct coded *x, int64_t row,
                       float out[][PANEL])
{
    const char *p = panel_of(w, panel);
    const int64_t groups = w->num_features / CODES, step = type == WEIGHT_INT4 ? CODES * PANEL / 2 : CODES * PANEL;
    const int64_t per_scale = type == WEIGHT_INT4 ? w->group / CODES : 1, num_scales = groups / per_scale;
    vec total[4];
    for (int i = 0; i < rows; ++i)
        total[i] = vec_zero();
    for (int64_t g = 0; g < groups; ++g, p += step) {
        ivec sums[4];
        for (int i = 0; i < rows; ++i)
            sums[i] = ivec_zero();
        for (int k = 0; k < CODES; k += type == WEIGHT_INT4 ? 8 : 4)
            for (int i = 0; i < rows; ++i) {
                const int8_t *codes = x->codes + (row + i) * x->stride + g * CODES + k;
                sums[i] = type == WEIGHT_INT4 ? dot_i4(sums[i], p + k * PANEL / 2, codes) : dot_i8(sums[i], p + k * PANEL, codes);
            }
        for (int i = 0; i < rows; ++i) {
            const vec scale = vec_set(x->scales[(row + i) * x->groups_stride + g]);
            if (type == WEIGHT_INT8) {
                total[i] = vec_fma(ivec_to_vec(sums[i]), scale, total[i]);
                continue;
            }
            const int64_t at = (panel * num_scales + g / per_scale) * PANEL * 2;
            total[i] = vec_fma(vec_mul(pairs_to_vec(sums[i]), scale), load_f16((const char *)w->scale + at), total[i]);
            total[i] = vec_fma(vec_set(x->sums[(row + i) * x->groups_stride + g]), load_f16((const char *)w->low + at), total[i]);
        }
    }
    for (int i = 0; i < rows; ++i)
        store_f32(out[i], type == WEIGHT_INT8 ? vec_mul(total[i], load_f32((const float *)w->scale + panel * PANEL)) : total[i], 0);
}

#define FOR_CODES(ROWS_OF_TILE)                                                                                         \
    case ROWS_OF_TILE:                                                                                                  \
        if (w->type == WEIGHT_INT4)                                                                                     \
            coded_tile(WEIGHT_INT4, ROWS_OF_TILE, w, panel, x, row, out);                                               \
        else                                                                                                            \
            coded_tile(WEIGHT_INT8, ROWS_OF_TILE, w, panel, x, row, out);                                               \
        break;

TARGET static void coded_rows(const struct matrix *w, int64_t panel, const struct coded *x, int64_t row, int rows, float out[][PANEL])
{
    switch (rows) {
        FOR_CODES(1)
        FOR_CODES(2)
        FOR_CODES(3)
    default: /* four accumulators of whole numbers and their sums fill AVX2's registers */
        FOR_CODES(4)
    }
}

/* What happens to a tile's sums. */
enum epilogue { STORE, ADD, GATED };

struct product {
    const struct matrix *w;
    const float *x;
    struct coded coded; /* the same rows, where w is coded */
    float *y;
    int64_t x_stride, y_stride;
    int32_t num_rows;
    enum epilogue epilogue;
    int activation;
};

INLINE vec activate(int activation, vec x)
{
    const vec one = vec_set(1.0f), half = vec_set(0.5f);
    if (activation == ACTIVATION_SILU)
        return vec_div(x, vec_add(one, vec_exp(vec_sub(vec_zero(), x))));
    if (activation == ACTIVATION_GELU_TANH) {
        vec inner = vec_mul(vec_set(0.7978845608f), vec_fma(vec_mul(vec_set(0.044715f), vec_mul(x, x)), x, x));
        return vec_mul(vec_mul(half, x), vec_add(one, vec_tanh(inner)));
    }
    float lanes[16];
    store_f32(lanes, x, 0);
    for (int lane = 0; lane < 16; ++lane)
        lanes[lane] = 0.5f * lanes[lane] * (1.0f + erff(lanes[lane] * 0.70710678f));
    return load_f32(lanes);
}

INLINE void put(float *to, vec a, int64_t width)
{
    if (width >= PANEL) {
        store_f32(to, a, 0);
    } else if (width > 0) {
        float lanes[16];
        store_f32(lanes, a, 0);
        memcpy(to, lanes, (size_t)width * sizeof(float));
    }
}

TARGET static void finish_tile(const struct product *job, int64_t panel, int panels, int row, int rows, float sums[][ROWS][PANEL])
{
    const struct matrix *w = job->w;
    for (int j = 0; j < panels; ++j)
        for (int i = 0; i < rows; ++i) {
            float *y = job->y + (row + i) * job->y_stride;
            vec sum = load_f32(sums[j][i]);
            if (w->bias)
                sum = vec_add(sum, load_f32(w->bias + (panel + j) * PANEL));
            if (job->epilogue == GATED) {
                if (j % 2 == 0)
                    continue;
                vec gate = load_f32(sums[j - 1][i]);
                if (w->bias)
                    gate = vec_add(gate, load_f32(w->bias + (panel + j - 1) * PANEL));
                const int64_t column = (panel + j) / 2 * PANEL;
                put(y + column, vec_mul(activate(job->activation, gate), sum), w->num_columns / 2 - column);
                continue;
            }
            const int64_t column = (panel + j) * PANEL, width = w->num_columns - column;
            if (job->epilogue == ADD) {
                if (width >= PANEL) {
                    sum = vec_add(load_f32(y + column), sum);
                } else if (width > 0) {
                    float old[16] = {0};
                    memcpy(old, y + column, (size_t)width * sizeof(float));
                    sum = vec_add(load_f32(old), sum);
                }
            }
            put(y + column, sum, width);
        }
}

INLINE int64_t num_panels(const struct matrix *w) { return (w->num_columns + 2 * PANEL - 1) / (2 * PANEL) * 2; }

/* Four panels of one product, all its rows. */
TARGET static void strip(const struct product *job, int64_t panel, int panels, float *scratch)
{
    float sums[4][ROWS][PANEL];
    const struct matrix *w = job->w;
    if (is_coded(w)) {
        for (int j = 0; j < panels; j += 2)
            for (int row = 0; row < job->num_rows; row += 4) {
                const int rows = job->num_rows - row < 4 ? job->num_rows - row : 4;
                coded_rows(w, panel + j, &job->coded, row, rows, sums[0]);
                coded_rows(w, panel + j + 1, &job->coded, row, rows, sums[1]);
                finish_tile(job, panel + j, 2, row, rows, sums);
            }
        return;
    }
    if (job->num_rows <= ROWS) {
        few_rows(w, panel, panels, job->num_rows, job->x, job->x_stride, sums);
        finish_tile(job, panel, panels, 0, job->num_rows, sums);
        return;
    }
    for (int j = 0; j < panels; j += 2) {
        struct matrix wide[2];
        for (int half = 0; half < 2; ++half) {
            float *to = scratch + half * w->num_features * PANEL;
            wide[half] = (struct matrix){.data = w->type == WEIGHT_F32 ? (const void *)panel_of(w, panel + j + half) : to,
                                         .num_features = w->num_features};
            if (w->type != WEIGHT_F32)
                widen(w, panel + j + half, to);
        }
        for (int row = 0; row < job->num_rows; row += ROWS) {
            const int rows = job->num_rows - row < ROWS ? job->num_rows - row : ROWS;
            for (int half = 0; half < 2; ++half)
                wide_rows(&wide[half], rows, job->x + row * job->x_stride, job->x_stride, sums + half);
            finish_tile(job, panel + j, 2, row, rows, sums);
        }
    }
}

INLINE int64_t num_strips(const struct product *job) { return job->num_rows ? (num_panels(job->w) + 3) / 4 : 0; }

/* Products that do not depend on each other, shared out among the threads strip by strip. */
TARGET static void multiply(const struct product *jobs, int num_jobs, struct worker *worker)
{
    const int stage = worker->stage++;
    int64_t total = 0;
    for (int a = 0; a < num_jobs; ++a)
        total += num_strips(&jobs[a]);
    for (int64_t item; (item = team_next(worker->team, stage)) < total;) {
        const struct product *job = jobs;
        for (; item >= num_strips(job); ++job)
            item -= num_strips(job);
        const int64_t left = num_panels(job->w) - item * 4;
        strip(job, item * 4, left < 4 ? (int)left : 4, worker->scratch);
    }
}

#endif
