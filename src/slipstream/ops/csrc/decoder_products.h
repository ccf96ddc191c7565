/* y = x W^T for every kind of matrix, in tiles of independent accumulators. Threads take strips of columns. */
#ifndef SLIPSTREAM_DECODER_PRODUCTS_H
#define SLIPSTREAM_DECODER_PRODUCTS_H

#include "decoder_lanes.h"

#define FETCH_AHEAD 1024 /* bytes per panel: about 50 ns of a core's share of memory bandwidth */
#define FETCH_WAITING 131072 /* bytes: the most that a thread prefetches of its next matrix while it waits */

/* ---- layout of a matrix ---- */

INLINE int64_t num_panels(const struct matrix *w) { return (w->num_columns + 2 * PANEL - 1) / (2 * PANEL) * 2; }

INLINE int64_t panel_bytes(const struct matrix *w)
{
    const int64_t size = w->num_features * PANEL;
    switch (w->type) {
    case WEIGHT_INT4:
    case WEIGHT_K4: return size / 2;
    case WEIGHT_K5: return size / 8 * 5;
    case WEIGHT_K6: return size / 8 * 6;
    case WEIGHT_INT8:
    case WEIGHT_INT8_GROUPS: return size;
    case WEIGHT_F16: return size * 2;
    case WEIGHT_BF16: return (w->num_features + 1) / 2 * PANEL * 4;
    default: return size * 4;
    }
}

INLINE const char *panel_of(const struct matrix *w, int64_t panel) { return (const char *)w->data + panel * panel_bytes(w); }

/* Panels of a strip, a thread's unit of work: four, because four streams read memory fastest; with many rows as many as a tile has. */
INLINE int strip_panels(int64_t rows) { return rows > ROWS ? WIDE : 4; }

INLINE int64_t num_strips(const struct matrix *w, int64_t rows)
{
    return rows ? (num_panels(w) + strip_panels(rows) - 1) / strip_panels(rows) : 0;
}

/* Adjacent panels are read as parallel streams. Returns the distance of each stream's next read from `at` bytes into its panel; at
 * the end of a panel the next read is past the other panels of its tile. */
INLINE int64_t ahead_of(int64_t at, int64_t gap, int num) { return at + FETCH_AHEAD + (at + FETCH_AHEAD < gap ? 0 : (num - 1) * gap); }

/* ---- numbers ---- */

INLINE void fetch(const char *p) { __builtin_prefetch(p, 0, 3); }

/* Rows of a product's inputs, in fp32, and in bf16 for matrices that want halves. */
struct rows {
    const float *x;
    const uint16_t *halves;
    int64_t stride, halves_stride;
};

/* Panels of one matrix, `gap` bytes apart, or some of their features. */
struct panels {
    const char *first;
    int64_t gap, num_features;
    int in_block, goes_on; /* in_block: this is a block for many rows; goes_on: the sums start from those in `out` */
    const char *next;      /* of a block: memory to prefetch during it, next_step bytes per feature, or NULL */
    int64_t next_gap, next_step;
};

/* What a tile prefetches: nothing, `next`, or its own panels ahead. */
enum fetches { NOTHING, NEXT, AHEAD };

/* sums[i][j] += x[i] . panel j */
INLINE void add_numbers(const int type, const int rows, const int num, const enum fetches fetches, const struct panels *w, const float *x,
                        int64_t stride, vec *sums)
{
    const int64_t step = PANEL * itemsize(type), num_features = w->num_features;
    for (int64_t k = 0; k < num_features; ++k) {
        const int64_t at = k * step, ahead = fetches == AHEAD ? ahead_of(at, w->gap, num) : 0;
        for (int j = 0; j < num; ++j) {
            const char *p = w->first + j * w->gap;
            if (fetches != NOTHING)
                fetch(fetches == AHEAD ? p + ahead : w->next + j * w->next_gap + k * w->next_step);
            const vec weight = load_vec(p + at, type);
            for (int i = 0; i < rows; ++i)
                sums[i * num + j] = vec_fma(vec_set(x[i * stride + k]), weight, sums[i * num + j]);
        }
    }
}

/* out[j][i][:] = x[i] . panel j, for `rows` rows of x and `num` panels; both are compile-time constants once inlined. Terms are
 * added in the order of k. */
INLINE void tile(const int type, const int rows, const int num, const struct panels *w, const float *x, int64_t stride,
                 float out[][ROWS][PANEL])
{
    vec sums[ROWS * 4];
    for (int j = 0; j < num; ++j)
        for (int i = 0; i < rows; ++i)
            sums[i * num + j] = w->goes_on ? load_f32(out[j][i]) : vec_zero();
    if (type == WEIGHT_BF16) {
        const int64_t whole = w->num_features / 2 * 2;
        for (int64_t k = 0; k < whole; k += 2) {
            const int64_t at = k * PANEL * 2, ahead = ahead_of(at, w->gap, num);
            for (int j = 0; j < num; ++j) {
                const char *p = w->first + j * w->gap + at;
                fetch(w->first + j * w->gap + ahead);
                const vec even = load_even_bf16(p);
                for (int i = 0; i < rows; ++i)
                    sums[i * num + j] = vec_fma(vec_set(x[i * stride + k]), even, sums[i * num + j]);
                const vec odd = load_odd_bf16(p);
                for (int i = 0; i < rows; ++i)
                    sums[i * num + j] = vec_fma(vec_set(x[i * stride + k + 1]), odd, sums[i * num + j]);
            }
        }
        for (int j = 0; j < num && whole < w->num_features; ++j)
            for (int i = 0; i < rows; ++i)
                sums[i * num + j] = vec_fma(vec_set(x[i * stride + whole]), load_even_bf16(w->first + j * w->gap + whole * PANEL * 2),
                                            sums[i * num + j]);
    } else if (type == WEIGHT_F32 && w->in_block && !w->next) {
        add_numbers(type, rows, num, NOTHING, w, x, stride, sums);
    } else if (type == WEIGHT_F32 && w->in_block) {
        add_numbers(type, rows, num, NEXT, w, x, stride, sums);
    } else {
        add_numbers(type, rows, num, AHEAD, w, x, stride, sums);
    }
    for (int j = 0; j < num; ++j)
        for (int i = 0; i < rows; ++i)
            store_f32(out[j][i], sums[i * num + j], 0);
}

/* Tiles as large as fit the registers. */
INLINE void tiles(const int type, const int rows, int panels, struct panels w, const float *x, int64_t stride, float out[][ROWS][PANEL])
{
    const int all = WIDE == 4 || rows == 1, num = all || rows <= 3 ? 2 : 1;
    if (all && panels == 4)
        tile(type, rows, 4, &w, x, stride, out);
    else if (num == 2 && panels == 1)
        tile(type, rows, 1, &w, x, stride, out);
    else
        for (int j = 0; j < panels; j += num, w.first += num * w.gap, w.next += w.next ? num * w.next_gap : 0)
            tile(type, rows, num, &w, x, stride, out + j);
}

/* DO with the number of rows as a constant. */
#define FOR_ROWS(DO, rows, ...)                                                                                         \
    switch (rows) {                                                                                                     \
    case 1: DO(1, __VA_ARGS__); break;                                                                                  \
    case 2: DO(2, __VA_ARGS__); break;                                                                                  \
    case 3: DO(3, __VA_ARGS__); break;                                                                                  \
    case 4: DO(4, __VA_ARGS__); break;                                                                                  \
    case 5: DO(5, __VA_ARGS__); break;                                                                                  \
    default: DO(6, __VA_ARGS__); break;                                                                                 \
    }
#if DOTS_BF16
INLINE void half_tile(const int rows, const int num, const struct panels *w, const struct rows *x, float out[][ROWS][PANEL])
{
    vec sums[ROWS * 4];
    for (int a = 0; a < rows * num; ++a)
        sums[a] = vec_zero();
    for (int64_t k = 0; k < w->num_features; k += 2) {
        const int64_t at = k * PANEL * 2, ahead = ahead_of(at, w->gap, num);
        for (int j = 0; j < num; ++j) {
            fetch(w->first + j * w->gap + ahead);
            for (int i = 0; i < rows; ++i)
                sums[i * num + j] = dot_bf16(sums[i * num + j], w->first + j * w->gap + at, x->halves + i * x->halves_stride + k);
        }
    }
    for (int j = 0; j < num; ++j)
        for (int i = 0; i < rows; ++i)
            store_f32(out[j][i], sums[i * num + j], 0);
}

INLINE void half_tiles(const int rows, int panels, const struct panels *w, const struct rows *x, float out[][ROWS][PANEL])
{
    if (panels == 4)
        half_tile(rows, 4, w, x, out);
    else if (panels == 2)
        half_tile(rows, 2, w, x, out);
    else
        half_tile(rows, 1, w, x, out);
}
#endif

#define TILES(ROWS_OF_TILE, type) tiles(type, ROWS_OF_TILE, panels, w, x.x, x.stride, out)
#define HALF_TILES(ROWS_OF_TILE, ...) half_tiles(ROWS_OF_TILE, panels, &w, &x, out)

/* 1, 2 or 4 panels. */
TARGET static void multiply_numbers(int type, int rows, int panels, struct panels w, struct rows x, float out[][ROWS][PANEL])
{
    if (type == WEIGHT_F32)
        FOR_ROWS(TILES, rows, WEIGHT_F32)
    else if (type == WEIGHT_F16)
        FOR_ROWS(TILES, rows, WEIGHT_F16)
    else
#if DOTS_BF16
        FOR_ROWS(HALF_TILES, rows, 0)
#else
        FOR_ROWS(TILES, rows, WEIGHT_BF16)
#endif
}

/* Convert a panel's 16-bit numbers from p on to fp32, into `to` [k][PANEL]: once for many rows. */
TARGET static void widen(int type, const char *p, int64_t num_features, float *to)
{
    for (int64_t k = 0; k < num_features && type == WEIGHT_F16; ++k)
        store_f32(to + k * PANEL, load_f16(p + k * PANEL * 2), 0);
    for (int64_t k = 0; k < num_features && type == WEIGHT_BF16; k += 2) {
        store_f32(to + k * PANEL, load_even_bf16(p + k * PANEL * 2), 0);
        if (k + 1 < num_features)
            store_f32(to + (k + 1) * PANEL, load_odd_bf16(p + k * PANEL * 2), 0);
    }
}

/* ---- quantized matrices: exact integer products per group of CODES features ----
 *
 * x is quantized to 8 bits with a scale per row and group, as in llama.cpp; w is int8 with a scale per column, or per column and
 * group, or int4 with a scale and an offset per column and group, or a k-quant. If the processor has instructions for them, bf16
 * products work the same way: x is rounded to bf16, as torch does. */

/* Rows of x in the products' input type. */
struct coded {
    int8_t *codes;
    uint16_t *halves;
    float *scales, *sums; /* per group: the scale, and the sum of its codes times the scale */
    int32_t *starts;        /* per half of a group: -32 times the sum of its codes */
    int64_t stride, groups; /* from row to row: `stride` codes or halves, 2 * groups of the others */
};

/* The type of x that a matrix needs in addition to fp32. */
enum { WANTS_CODES = 1, WANTS_HALVES = 2 };

INLINE int wants(const struct matrix *w)
{
    if (w->type >= WEIGHT_INT8)
        return WANTS_CODES;
    return DOTS_BF16 && w->type == WEIGHT_BF16 ? WANTS_HALVES : 0;
}

/* The rows from `row` on, of up to `size` features. */
INLINE struct coded coded_at(const struct inputs *in, int64_t row, int64_t size)
{
    const int64_t groups = (size + CODES - 1) / CODES;
    return (struct coded){in->codes + row * groups * CODES, in->halves + row * groups * CODES, in->scales + row * 2 * groups,
                          in->scales + row * 2 * groups + groups, in->starts + row * 2 * groups, groups * CODES, groups};
}

/* Where this process writes its columns of rows that all processes share, [num_rows][size]: to their places; or, with own_codes, to a
 * contiguous block, from which it converts them to the input type of `w`. */
struct part {
    float *first;
    int64_t stride;
};
INLINE struct part part_of(const struct decoder *model, const struct batch *batch, const struct matrix *w, float *rows, int64_t size,
                           int64_t first, int64_t columns)
{
    return model->own_codes && wants(w) ? (struct part){rows + batch->num_rows * first, columns} : (struct part){rows + first, size};
}

/* Quantize one row. Its last group is padded with zeros. Codes are rounded to nearest even; the largest of a group becomes 127. */
TARGET static void code_row(const float *x, int64_t size, int wanted, const struct coded *to)
{
    for (int64_t k = 0; k < size; k += CODES) {
        const int64_t width = size - k < CODES ? size - k : CODES, g = k / CODES;
        float last[CODES] = {0};
        const float *group = width == CODES ? x + k : memcpy(last, x + k, (size_t)width * sizeof(float));
        const vec first = load_f32(group), second = load_f32(group + 16);
        if (wanted & WANTS_HALVES) {
            store_bf16(to->halves + k, first, 0);
            store_bf16(to->halves + k + 16, second, 0);
        }
        if (!(wanted & WANTS_CODES))
            continue;
        const vec magic = vec_set(12582912.0f); /* adding and subtracting it rounds to integers */
        const vec zero = vec_zero();
        const float most = lanes_max(vec_max(vec_max(first, vec_sub(zero, first)), vec_max(second, vec_sub(zero, second))));
        const float factor = most > 1e-30f ? 127.0f / most : 0.0f;
        const vec a = vec_sub(vec_add(vec_mul(first, vec_set(factor)), magic), magic);
        const vec b = vec_sub(vec_add(vec_mul(second, vec_set(factor)), magic), magic);
        const float total_a = lanes_sum(a), total_b = lanes_sum(b), total = total_a + total_b; /* whole numbers */
        const int finite = fabsf(total) <= 127.0f * CODES; /* also false if infinity times 0 made a NaN */
        if (finite) {
            store_i8(to->codes + k, a);
            store_i8(to->codes + k + 16, b);
        } else {
            memset(to->codes + k, 0, CODES);
        }
        to->starts[2 * g] = finite ? -32 * (int32_t)total_a : 0;
        to->starts[2 * g + 1] = finite ? -32 * (int32_t)total_b : 0;
        to->scales[g] = finite ? most / 127.0f : NAN; /* codes cannot represent NaN, the scale can: the result is NaN */
        to->sums[g] = finite ? total * (most / 127.0f) : NAN;
    }
}

/* For each type of codes: the features that share a scale, and the bytes of their codes in a panel. */
#define FEATURES(type) ((type) == WEIGHT_K6 ? 16 : CODES)
#define GROUP_BYTES(type)                                                                                               \
    ((type) == WEIGHT_K6 ? 192 : (type) == WEIGHT_K5 ? 320 : (type) == WEIGHT_INT4 || (type) == WEIGHT_K4 ? 256 : 512)
#define IS_K(type) ((type) >= WEIGHT_K4)

/* Where the scales and offsets of a panel's group g are. */
struct group_scales {
    const char *scale, *low;
};
INLINE struct group_scales scales_of(const int type, const struct matrix *w, int64_t panel, int64_t g)
{
    const char *const scale = w->scale, *const low = w->low;
    if (type == WEIGHT_INT8)
        return (struct group_scales){0, 0};
    if (IS_K(type)) {
        const int64_t of_block = FEATURES(type) == CODES ? 64 : 32;
        return (struct group_scales){scale + panel * w->num_features + g * FEATURES(type),
                                     low + panel * w->num_features / K_BLOCK * of_block + g * FEATURES(type) / K_BLOCK * of_block};
    }
    const int64_t per_scale = w->group / CODES, at = (panel * (w->num_features / CODES / per_scale) + g / per_scale) * PANEL * 2;
    return (struct group_scales){scale + at, low ? low + at : 0};
}

void slipstream_codes_by_avx2(const struct matrix *w, int64_t panel, int panels, const struct coded *x, int64_t row, int rows,
                              float out[][ROWS][PANEL]);

#if CODES_BY_AVX2
#define multiply_codes slipstream_codes_by_avx2
#else
/* Word n of the codes of a k-quant's group, which is at p: [Note: K-quants]. */
INLINE code_bytes code_word(const int type, const char *p, const int n)
{
    const int bits = type == WEIGHT_K5 ? 5 : 6;
    if (n < (type == WEIGHT_K5 ? 5 : 3))
        return masked_at(p + n * 64, 0, (1 << bits) - 1);
    if (type == WEIGHT_K6)
        return either(either(masked_at(p, 6, 3), masked_at(p + 64, 4, 12)), masked_at(p + 128, 2, 48));
    if (n == 7)
        return either(either(masked_at(p + 64, 7, 1), masked_at(p + 192, 6, 2)), masked_at(p + 256, 3, 28));
    return either(masked_at(p + (n - 5) * 128, 5, 7), masked_at(p + (n - 5) * 128 + 64, 2, 24));
}

/* sums[i][j] += the products of a group's codes: row i of `codes` times panel j of `p`. */
INLINE void add_group(const int type, const int rows, const int num, const char *p, int64_t gap, int64_t ahead, const int8_t *codes,
                      int64_t stride, ivec *sums)
{
    if (type == WEIGHT_K5 || type == WEIGHT_K6) {
        _Pragma("GCC unroll 8")
        for (int n = 0; n < CODES / 4; ++n)
            for (int j = 0; j < num && n < FEATURES(type) / 4; ++j) {
                const code_bytes word = code_word(type, p + j * gap, n);
                if (n < GROUP_BYTES(type) / 64)
                    fetch(p + j * gap + ahead + n * 64);
                for (int i = 0; i < rows; ++i)
                    sums[i * num + j] = dot_bytes(sums[i * num + j], word, codes + i * stride + n * 4);
            }
        return;
    }
    const int features = GROUP_BYTES(type) == 256 ? 8 : 4; /* per 64 bytes */
    UNROLL_CODES
    for (int k = 0; k < CODES; k += features, p += 64)
        for (int j = 0; j < num; ++j) {
            fetch(p + j * gap + ahead);
            for (int i = 0; i < rows; ++i) {
                ivec *sum = &sums[i * num + j];
                *sum = features == 8 ? dot_i4(*sum, p + j * gap, codes + i * stride + k) : dot_i8(*sum, p + j * gap, codes + i * stride + k);
            }
        }
}

INLINE void code_tile(const int type, const int rows, const int num, const struct matrix *w, int64_t panel, const struct coded *x,
                      int64_t row, float out[][ROWS][PANEL])
{
    const int features = FEATURES(type), bytes_of_group = GROUP_BYTES(type);
    const char *const first = panel_of(w, panel);
    const int64_t gap = panel_bytes(w), groups = w->num_features / features;
    vec total[ROWS * 2];
    for (int a = 0; a < rows * num; ++a)
        total[a] = vec_zero();
    for (int64_t g = 0; g < groups; ++g) {
        ivec sums[ROWS * 2];
        for (int i = 0; i < rows; ++i) {
            const int32_t *starts = x->starts + (row + i) * 2 * x->groups;
            const int32_t start = type == WEIGHT_K6 ? starts[g]
                : type == WEIGHT_INT8 || type == WEIGHT_INT8_GROUPS ? INT8_OFFSET / 32 * (starts[2 * g] + starts[2 * g + 1]) : 0;
            for (int j = 0; j < num; ++j)
                sums[i * num + j] = ivec_set(start);
        }
        const int64_t at = g * bytes_of_group;
        for (int j = 0; j < num && type != WEIGHT_INT8; ++j) { /* those of the next tile, because a panel has few */
            const struct group_scales next = scales_of(type, w, panel + j + num, g);
            if (!IS_K(type) || g * features % 64 == 0)
                fetch(next.scale);
            if (next.low && (!IS_K(type) || g * features % K_BLOCK == 0))
                fetch(next.low);
        }
        add_group(type, rows, num, first + at, gap, ahead_of(at, gap, num) - at, x->codes + row * x->stride + g * features, x->stride, sums);
        for (int j = 0; j < num; ++j) {
            const struct group_scales of_group = scales_of(type, w, panel + j, g);
            vec scale = vec_zero(), low = vec_zero();
            if (IS_K(type)) {
                scale = vec_mul(load_i8(of_group.scale), load_f16(of_group.low));
                if (type != WEIGHT_K6)
                    low = vec_mul(load_i8(of_group.scale + 16), load_f16(of_group.low + 32));
            } else if (type != WEIGHT_INT8) {
                scale = load_f16(of_group.scale);
            }
            for (int i = 0; i < rows; ++i) {
                const int64_t of = (row + i) * 2 * x->groups + g * features / CODES;
                vec *sum = &total[i * num + j];
                const ivec products = sums[i * num + j];
                if (type == WEIGHT_INT8) {
                    *sum = vec_fma(ivec_to_vec(products), vec_set(x->scales[of]), *sum);
                    continue;
                }
                *sum = vec_fma(vec_mul(bytes_of_group == 256 ? pairs_to_vec(products) : ivec_to_vec(products), vec_set(x->scales[of])), scale,
                               *sum);
                if (type == WEIGHT_K4 || type == WEIGHT_K5)
                    *sum = vec_fma(vec_set(-x->sums[of]), low, *sum);
                else if (type == WEIGHT_INT4)
                    *sum = of_group.low ? vec_fma(vec_set(x->sums[of]), load_f16(of_group.low), *sum)
                                        : vec_fma(vec_set(-8.0f * x->sums[of]), scale, *sum);
            }
        }
    }
    for (int j = 0; j < num; ++j)
        for (int i = 0; i < rows; ++i) {
            const vec sum = total[i * num + j];
            store_f32(out[j][i], type == WEIGHT_INT8 ? vec_mul(sum, load_f32((const float *)w->scale + (panel + j) * PANEL)) : sum, 0);
        }
}

#define CODE_TILES(ROWS_OF_TILE, type) code_tiles(type, ROWS_OF_TILE, panels, w, panel, x, row, out)

INLINE void code_tiles(const int type, const int rows, int panels, const struct matrix *w, int64_t panel, const struct coded *x, int64_t row,
                       float out[][ROWS][PANEL])
{
    const int registers = WIDE == 4 && CODE_ROWS == ROWS; /* 32 of 16 lanes */
    const int num = rows == 1 || CODE_ROWS == ROWS ? 2 : 1;
    if (rows == 1 && registers && panels == 4) /* by itself: a tile's size is a constant, or its sums are not in registers */
        code_tile(type, rows, 4, w, panel, x, row, out);
    else
        for (int j = 0; j < panels && rows <= CODE_ROWS; j += num)
            code_tile(type, rows, num, w, panel + j, x, row, out + j);
}

TARGET static void multiply_codes(const struct matrix *w, int64_t panel, int panels, const struct coded *x, int64_t row, int rows,
                                  float out[][ROWS][PANEL])
{
    switch (w->type) {
    case WEIGHT_INT4: FOR_ROWS(CODE_TILES, rows, WEIGHT_INT4) break;
    case WEIGHT_INT8_GROUPS: FOR_ROWS(CODE_TILES, rows, WEIGHT_INT8_GROUPS) break;
    case WEIGHT_K4: FOR_ROWS(CODE_TILES, rows, WEIGHT_K4) break;
    case WEIGHT_K5: FOR_ROWS(CODE_TILES, rows, WEIGHT_K5) break;
    case WEIGHT_K6: FOR_ROWS(CODE_TILES, rows, WEIGHT_K6) break;
    default: FOR_ROWS(CODE_TILES, rows, WEIGHT_INT8)
    }
}

#ifdef FOR_AVX2
TARGET void slipstream_codes_by_avx2(const struct matrix *w, int64_t panel, int panels, const struct coded *x, int64_t row, int rows,
                                     float out[][ROWS][PANEL])
{
    multiply_codes(w, panel, panels, x, row, rows, out);
}
#endif
#endif

/* ---- adapters: y += B (scale A x) for the rows of requests that have one ----
 *
 * The product with the model's own matrix is computed once for all rows; `shrink` (forward.c) computes scale A x of the rows
 * with adapters before it, and add_low_rank adds B times that to a tile's sums. Each row's terms are added in one order, so its
 * bits do not depend on the adapters of other rows. Adjacent rows of one adapter share its panels. */

/* The adapters' terms of a product: those of its layer and place; for LOW_GATE also those of LOW_UP. */
struct low_terms {
    const struct batch *batch; /* NULL: no row has an adapter */
    int at;                    /* layer * LOW_PLACES + enum low_place */
};

INLINE struct low_terms low_of(const struct batch *batch, int layer, enum low_place place)
{
    return (struct low_terms){batch->adapters ? batch : 0, layer * LOW_PLACES + place};
}

/* The type of x that the matrices A of adapters need in addition to fp32. */
INLINE int low_wants(const struct batch *batch) { return DOTS_BF16 && batch->adapters ? WANTS_HALVES : 0; }

INLINE struct panels panels_of(const struct matrix *w, int64_t panel)
{
    return (struct panels){.first = panel_of(w, panel), .gap = panel_bytes(w), .num_features = w->num_features};
}

/* scale A x of a row, [low_size], in the type that B multiplies. */
INLINE float *low_row(const struct batch *batch, int64_t row, int at)
{
    return batch->low + (row * LOW_PLACES + at % LOW_PLACES) * batch->low_size;
}

/* Add to the sums of a tile; `gated`: its panels alternate between gate and up. */
TARGET static void add_low_rank(const struct low_terms *low, int gated, int64_t panel, int panels, int row, int rows, float sums[][ROWS][PANEL])
{
    const struct low_rank *const *adapters = low->batch->adapters + row;
    const int64_t stride = LOW_PLACES * low->batch->low_size;
    for (int from = 0, until; from < rows; from = until) {
        for (until = from + 1; until < rows && adapters[until] == adapters[from];)
            ++until;
        for (int place = 0; adapters[from] && place <= gated; ++place) {
            const struct matrix *b = &adapters[from][low->at + place].b;
            const float *t = low_row(low->batch, row + from, low->at + place);
            float terms[4][ROWS][PANEL];
            if (!b->data)
                continue;
            multiply_numbers(b->type, until - from, panels >> gated, panels_of(b, panel >> gated),
                             (struct rows){t, (const uint16_t *)t, stride, 2 * stride}, terms);
            for (int j = 0; j < panels >> gated; ++j)
                for (int i = from; i < until; ++i) {
                    float *sum = sums[(j << gated) + place][i];
                    store_f32(sum, vec_add(load_f32(sum), load_f32(terms[j][i - from])), 0);
                }
        }
    }
}

/* The destination of a tile's sums. */
enum epilogue { STORE, ADD, GATED, ACTIVATED };

struct product {
    const struct matrix *w;
    const float *x;
    struct coded coded; /* the same rows, if w is quantized */
    float *y;
    int64_t x_stride, y_stride;
    int32_t num_rows;
    enum epilogue epilogue;
    int activation;
    float scale; /* of the sums; 0: none */
    struct low_terms low;
};

INLINE struct rows rows_of(const struct product *job, int64_t row)
{
    return (struct rows){job->x + row * job->x_stride, job->coded.halves + row * job->coded.stride, job->x_stride, job->coded.stride};
}

INLINE void put(float *to, vec a, int64_t width)
{
    if (width > 0)
        store_part(to, a, width, WEIGHT_F32);
}

TARGET static void finish_tile(const struct product *job, int64_t panel, int panels, int row, int rows, float sums[][ROWS][PANEL])
{
    const struct matrix *w = job->w;
    vec slope; /* not used */
    if (job->low.batch)
        add_low_rank(&job->low, job->epilogue == GATED, panel, panels, row, rows, sums);
    for (int j = 0; j < panels; ++j)
        for (int i = 0; i < rows; ++i) {
            float *y = job->y + (row + i) * job->y_stride;
            vec sum = load_f32(sums[j][i]);
            if (w->bias)
                sum = vec_add(sum, load_f32(w->bias + (panel + j) * PANEL));
            if (job->scale != 0.0f)
                sum = vec_mul(sum, vec_set(job->scale));
            if (job->epilogue == ACTIVATED)
                sum = activated(job->activation, sum, &slope);
            if (job->epilogue == GATED) {
                if (j % 2 == 0)
                    continue;
                vec gate = load_f32(sums[j - 1][i]);
                if (w->bias)
                    gate = vec_add(gate, load_f32(w->bias + (panel + j - 1) * PANEL));
                const int64_t column = (panel + j) / 2 * PANEL;
                put(y + column, vec_mul(activated(job->activation, gate, &slope), sum), w->num_columns / 2 - column);
                continue;
            }
            const int64_t column = (panel + j) * PANEL, width = w->num_columns - column;
            if (job->epilogue == ADD && width > 0)
                sum = vec_add(load_part(y + column, width, WEIGHT_F32), sum);
            put(y + column, sum, width);
        }
}

/* A strip of one product, some of its rows. With many rows, numbers are multiplied in blocks of DEPTH features, which stay in the L1
 * cache, in fp32, while all rows read them; sums wait in `scratch`. */
TARGET static void strip(const struct product *job, int64_t panel, int from, int until, float *scratch)
{
    const struct matrix *w = job->w;
    const int64_t left = num_panels(w) - panel, size = panel_bytes(w);
    const int panels = left < strip_panels(job->num_rows) ? (int)left : strip_panels(job->num_rows);
    const int wanted = wants(w), height = wanted == WANTS_CODES ? CODE_ROWS : ROWS, in_blocks = job->num_rows > ROWS && !wanted;
    const int64_t depth = in_blocks ? DEPTH : w->num_features, step = w->type == WEIGHT_F32 ? PANEL * 4 : PANEL * 2;
    float(*sums)[ROWS][PANEL] = (void *)(scratch + 4 * DEPTH * PANEL);
    int64_t k = 0;
    do {
        const int is_last = k + depth >= w->num_features, widens = in_blocks && w->type != WEIGHT_F32;
        struct panels numbers = {.first = panel_of(w, panel) + k * step, .gap = size, .num_features = is_last ? w->num_features - k : depth,
                                 .next_gap = size, .next_step = step, .in_block = in_blocks, .goes_on = k > 0};
        if (in_blocks)
            numbers.next = is_last ? panel_of(w, panel + panels) : numbers.first + depth * step;
        for (int j = 0; j < panels && widens; ++j)
            widen(w->type, numbers.first + j * size, numbers.num_features, scratch + j * DEPTH * PANEL);
        if (widens) {
            numbers.first = (const char *)scratch;
            numbers.gap = DEPTH * PANEL * 4;
        }
        float(*out)[ROWS][PANEL] = sums;
        for (int row = from; row < until; row += height, numbers.next = 0, out += in_blocks ? 4 : 0) {
            const int rows = until - row < height ? until - row : height;
            struct rows of = rows_of(job, row);
            of.x += k;
            if (wanted == WANTS_CODES)
                multiply_codes(w, panel, panels, &job->coded, row, rows, out);
            else
                multiply_numbers(widens ? WEIGHT_F32 : w->type, rows, panels, numbers, of, out);
            if (is_last)
                finish_tile(job, panel, panels, row, rows, out);
        }
    } while ((k += depth) < w->num_features);
}

INLINE int64_t num_items(const struct product *job)
{
    return num_strips(job->w, job->num_rows) * ((job->num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* Independent products, distributed over the threads strip by strip. */
TARGET static void multiply(const struct product *jobs, int num_jobs, struct worker *worker)
{
    const int stage = worker->stage++;
    int64_t total = 0;
    for (int a = 0; a < num_jobs; ++a)
        total += num_items(&jobs[a]);
    for (int64_t item; (item = team_next(worker->team, stage, worker->thread, total)) < total;) {
        const struct product *job = jobs;
        for (; item >= num_items(job); ++job)
            item -= num_items(job);
        const int64_t strips = num_strips(job->w, job->num_rows), from = item / strips * PART_ROWS;
        const int64_t until = job->num_rows < from + PART_ROWS ? job->num_rows : from + PART_ROWS;
        strip(job, item % strips * strip_panels(job->num_rows), (int)from, (int)until, worker->scratch);
    }
}

/* Announce the matrices of the next products: this thread prefetches the first of their memory while it waits. */
TARGET static void expect(const struct matrix *const *w, int num, int64_t rows, struct worker *worker)
{
    int64_t item = 0;
    for (int a = 0; a < num; ++a)
        item += num_strips(w[a], rows);
    for (item = item * worker->thread / team_size(worker->team); item >= num_strips(*w, rows) && num > 1; ++w, --num)
        item -= num_strips(*w, rows);
    const int64_t panel = item * strip_panels(rows), bytes = (num_panels(*w) - panel) * panel_bytes(*w);
    worker->ahead.from = panel_of(*w, panel);
    worker->ahead.until = worker->ahead.from + (bytes < FETCH_WAITING ? bytes : FETCH_WAITING);
}

#endif
