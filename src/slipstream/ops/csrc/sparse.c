/* Block-sparse attention, written once over 16 lanes.
 *
 * All arithmetic is fp32. Every product is a tile of accumulators: TALL x PAIR score vectors over transposed keys, ROWS x WIDTH
 * vectors of outputs. Keys are transposed once per head, multiplied by the scale.
 * A masked score's exponential is exactly 0, and so is one below e^-64 of the largest: denormal numbers cost 150 cycles each.
 */
#include "sparse.h"
#include "isa.h"

#if KNOWN
#include "vec_drop.h"
#include "vec_exp.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdlib.h>

#define PANEL 16
#define CHUNK 32 /* panels of keys, times panels of queries: 32 KB of scores */
#define MOST_ROWS 4
#define LOW (-1e30f) /* less than any score that counts */

#if WIDE == 4 /* 32 registers of 16 lanes */
#define TALL 8
#define PAIR 2
#define WIDTH 4
#else
#define TALL 4
#define PAIR 1
#define WIDTH 1
#endif
#define ROWS 4

/* ---- rows of a head in fp32, padded to a multiple of 16 features ---- */

INLINE int64_t padded(const struct sparse *s) { return (s->dim + 15) / 16 * 16; }
INLINE char *head_at(const struct sparse *s, const struct heads *x, int64_t b, int64_t h)
{
    return x->at + (b * x->batch + h * x->head) * itemsize(s->dtype);
}
INLINE int is_plain(const struct sparse *s, const struct heads *x)
{
    return s->dtype == DTYPE_F32 && s->dim % 16 == 0 && x->row == s->dim;
}

/* The head's rows: where they are, or a copy in `to`. */
TARGET static const float *rows_of(const struct sparse *s, const struct heads *x, int64_t b, int64_t h, float *to)
{
    const char *from = head_at(s, x, b, h);
    const int64_t dim = padded(s), size = itemsize(s->dtype);
    if (is_plain(s, x))
        return (const float *)from;
    for (int64_t i = 0; i < s->length; ++i) {
        const char *row = from + i * x->row * size;
        for (int64_t d = 0; d < dim; d += 16)
            store_f32(to + i * dim + d, load_part(row + d * size, s->dim - d, s->dtype), 0);
    }
    return to;
}

/* Where results of the head are computed: in place, or in `scratch`. */
INLINE float *target_of(const struct sparse *s, const struct heads *x, int64_t b, int64_t h, float *scratch)
{
    return is_plain(s, x) ? (float *)head_at(s, x, b, h) : scratch;
}
TARGET static void put_rows(const struct sparse *s, const struct heads *x, int64_t b, int64_t h, const float *from)
{
    char *to = head_at(s, x, b, h);
    const int64_t dim = padded(s), size = itemsize(s->dtype);
    if (is_plain(s, x))
        return;
    for (int64_t i = 0; i < s->length; ++i) {
        char *row = to + i * x->row * size;
        for (int64_t d = 0; d < dim; d += 16)
            store_part(row + d * size, load_f32(from + i * dim + d), s->dim - d, s->dtype);
    }
}

/* x [length][dim] -> t [length / 16][dim][16], times `by`. */
TARGET static void transpose(const float *x, float *t, int64_t length, int64_t dim, float by)
{
    for (int64_t i = 0; i < length; i += 4)
        for (int64_t d = 0; d < dim; d += 4) {
            const float *from = x + i * dim + d;
            float *to = t + (i / PANEL * dim + d) * PANEL + i % PANEL;
#if defined(__x86_64__)
            const __m128 factor = _mm_set1_ps(by);
            __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + dim), c = _mm_loadu_ps(from + 2 * dim), e = _mm_loadu_ps(from + 3 * dim);
            _MM_TRANSPOSE4_PS(a, b, c, e);
            _mm_storeu_ps(to, _mm_mul_ps(a, factor));
            _mm_storeu_ps(to + PANEL, _mm_mul_ps(b, factor));
            _mm_storeu_ps(to + 2 * PANEL, _mm_mul_ps(c, factor));
            _mm_storeu_ps(to + 3 * PANEL, _mm_mul_ps(e, factor));
#else
            for (int j = 0; j < 4; ++j)
                for (int k = 0; k < 4; ++k)
                    to[j * PANEL + k] = from[k * dim + j] * by;
#endif
        }
}

/* ---- products ---- */

/* s[rows][16 * panels] = x[rows][dim] times panels of transposed rows. */
INLINE void score_tile(const int rows, const int panels, const float *x, const float *t0, const float *t1, int64_t dim, float *s,
                       int64_t stride)
{
    vec a[16], b[8];
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
        a[i] = vec_zero();
        if (panels > 1)
            b[i] = vec_zero();
    }
    for (int64_t d = 0; d < dim; ++d) {
        const vec k0 = load_f32(t0 + d * PANEL), k1 = panels > 1 ? load_f32(t1 + d * PANEL) : k0;
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
            const vec each = vec_set(x[i * dim + d]);
            a[i] = vec_fma(each, k0, a[i]);
            if (panels > 1)
                b[i] = vec_fma(each, k1, b[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
        store_f32(s + i * stride, a[i], 0);
        if (panels > 1)
            store_f32(s + i * stride + PANEL, b[i], 0);
    }
}

TARGET static void scores(const float *x, int rows, const float *t, const int32_t *panels, int count, int64_t dim, float *s)
{
    const int64_t stride = count * PANEL;
    int at = 0;
    for (; at + PAIR <= count; at += PAIR)
        for (int i = 0; i < rows; i += TALL)
            score_tile(TALL, PAIR, x + i * dim, t + panels[at] * dim * PANEL, t + panels[at + PAIR - 1] * dim * PANEL, dim,
                       s + i * stride + at * PANEL, stride);
    if (at < count)
        for (int i = 0; i < rows; i += TALL * PAIR)
            score_tile(TALL * PAIR, 1, x + i * dim, t + panels[at] * dim * PANEL, t, dim, s + i * stride + at * PANEL, stride);
}

/* o[ROWS][16 * width] += p times rows of v, in the panels of 16 that `panels` lists; p[i][k] is at i * down + k * along. */
INLINE void sum_tile(const int width, float *o, const float *p, int64_t down, int64_t along, const float *v, const int32_t *panels,
                     int count, int64_t dim)
{
    vec sums[ROWS][WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < width; ++j)
            sums[i][j] = load_f32(o + i * dim + j * 16);
    for (int at = 0; at < count; ++at) {
        const float *row = v + panels[at] * dim * PANEL;
        for (int k = 0; k < PANEL; ++k, row += dim, p += along) {
            vec each[WIDTH];
#pragma GCC unroll 4
            for (int j = 0; j < width; ++j)
                each[j] = load_f32(row + j * 16);
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; ++i) {
                const vec by = vec_set(p[i * down]);
#pragma GCC unroll 4
                for (int j = 0; j < width; ++j)
                    sums[i][j] = vec_fma(by, each[j], sums[i][j]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < width; ++j)
            store_f32(o + i * dim + j * 16, sums[i][j], 0);
}

TARGET static void sums(float *o, int rows, const float *p, int64_t down, int64_t along, const float *v, const int32_t *panels, int count,
                        int64_t dim)
{
    for (int i = 0; i < rows; i += ROWS, o += ROWS * dim, p += ROWS * down) {
        int64_t d = 0;
        for (; d + 16 * WIDTH <= dim; d += 16 * WIDTH)
            sum_tile(WIDTH, o + d, p, down, along, v + d, panels, count, dim);
#if WIDTH > 1
        switch ((dim - d) / 16) {
        case 1: sum_tile(1, o + d, p, down, along, v + d, panels, count, dim); break;
        case 2: sum_tile(2, o + d, p, down, along, v + d, panels, count, dim); break;
        case 3: sum_tile(3, o + d, p, down, along, v + d, panels, count, dim); break;
        default: break;
        }
#endif
    }
}

/* ---- scores to probabilities ---- */

/* e^x, and 0 below e^-64. */
INLINE vec exp_or_zero(vec x) { return vec_pick(vec_set(-64.0f), x, vec_zero(), vec_exp(x)); }

/* The factors by which dropout multiplies 16 probabilities, the same forward and backward. */
INLINE vec kept(const struct sparse *s, uint32_t head, int64_t query, int64_t panel)
{
    return vec_kept(s->seed, head * 0x9e3779b9u + (uint32_t)query, (uint32_t)panel, s->dropout);
}

struct pass { /* of one tile */
    const struct sparse *s;
    const struct sparse_tile *tile;
    const float *bias, *key_bias;
    const int32_t *spans;
    uint32_t head; /* batch * num_heads + head */
    int64_t bias_grad;
};

/* Scores of one query with a panel, with biases and masks. */
INLINE vec biased(const struct pass *pass, const int plain, vec x, int64_t query, int64_t panel, vec lanes)
{
    const struct sparse *s = pass->s;
    const int64_t key = panel * PANEL;
    const vec never = vec_set(-INFINITY);
    if (!plain && pass->key_bias)
        x = vec_add(x, load_f32(pass->key_bias + key));
    if (!plain && pass->bias)
        x = vec_add(x, load_f32(pass->bias + query * s->length + key));
    if (!plain && pass->spans) {
        x = vec_pick(lanes, vec_set((float)(pass->spans[2 * query] - key)), x, never);
        x = vec_pick(lanes, vec_set((float)(pass->spans[2 * query + 1] - key)), never, x);
    }
    if (s->causal && key + PANEL - 1 > query)
        x = vec_pick(lanes, vec_set((float)(query - key + 1)), never, x);
    return x;
}
INLINE int is_unmasked(const struct pass *pass) { return !pass->bias && !pass->key_bias && !pass->spans && !(pass->s->dropout > 0); }

/* Turn a chunk's scores into unnormalized probabilities, and rescale the outputs so far to the new largest score. */
INLINE void soften(const int plain, const struct pass *pass, const int32_t *panels, int count, float *scored, float *o, float *most,
                   float *total)
{
    const struct sparse *s = pass->s;
    const int64_t dim = padded(s);
    const vec lanes = lane_numbers();
    for (int i = 0; i < pass->tile->rows * PANEL; ++i, scored += count * PANEL) {
        const int64_t query = pass->tile->row * PANEL + i;
        vec top = vec_set(most[i]), sum = vec_zero();
        for (int at = 0; at < count; ++at) {
            const vec raw = load_f32(scored + at * PANEL);
            const vec x = biased(pass, plain, raw, query, panels[at], lanes);
            if (!plain || (s->causal && panels[at] * PANEL + PANEL - 1 > query))
                store_f32(scored + at * PANEL, x, 0);
            top = vec_max(x, top);
        }
        const float above = lanes_max(top);
        const vec largest = vec_set(above);
        for (int at = 0; at < count; ++at) {
            vec p = exp_or_zero(vec_sub(load_f32(scored + at * PANEL), largest));
            sum = vec_add(sum, p);
            if (!plain && s->dropout > 0)
                p = vec_mul(p, kept(s, pass->head, query, panels[at]));
            store_f32(scored + at * PANEL, p, 0);
        }
        if (above > most[i]) {
            const float factor = most[i] == LOW ? 0.0f : expf(most[i] - above);
            total[i] *= factor;
            for (int64_t d = 0; d < dim; d += 16)
                store_f32(o + i * dim + d, vec_mul(load_f32(o + i * dim + d), vec_set(factor)), 0);
            most[i] = above;
        }
        total[i] += lanes_sum(sum);
    }
}

TARGET static void soften_any(const struct pass *pass, const int32_t *panels, int count, float *scored, float *o, float *most, float *total)
{
    if (!is_unmasked(pass))
        soften(0, pass, panels, count, scored, o, most, total);
    else
        soften(1, pass, panels, count, scored, o, most, total);
}

INLINE struct pass pass_of(const struct sparse *s, const struct sparse_tile *tile, int64_t b, int64_t h)
{
    const float *bias = s->bias ? s->bias + b * s->bias_batch + h * s->bias_head : 0;
    return (struct pass){
        .s = s,
        .tile = tile,
        .bias = bias,
        .key_bias = s->key_bias ? s->key_bias + b * s->length : 0,
        .spans = s->spans ? s->spans + b * s->length * 2 : 0,
        .head = (uint32_t)(b * s->num_heads + h),
        .bias_grad = b * s->grad_batch + h * s->length * s->length,
    };
}
INLINE int chunk_of(const struct sparse_tile *tile, int at)
{
    const int most = CHUNK / tile->rows;
    return tile->end - at < most ? tile->end - at : most;
}

TARGET static void forward_tile(const struct pass *pass, const float *q, const float *keys, const float *v, float *o, float *lse,
                                float *scored)
{
    const struct sparse *s = pass->s;
    const int64_t dim = padded(s);
    const int rows = pass->tile->rows * PANEL;
    float most[MOST_ROWS * PANEL], total[MOST_ROWS * PANEL];
    for (int i = 0; i < rows; ++i)
        most[i] = LOW, total[i] = 0.0f;
    memset(o, 0, (size_t)(rows * dim) * sizeof(float));
    for (int at = pass->tile->begin, count; at < pass->tile->end; at += count) {
        const int32_t *panels = s->panels + at;
        count = chunk_of(pass->tile, at);
        scores(q, rows, keys, panels, count, dim, scored);
        soften_any(pass, panels, count, scored, o, most, total);
        sums(o, rows, scored, count * PANEL, 1, v, panels, count, dim);
    }
    for (int i = 0; i < rows; ++i) {
        const vec factor = vec_set(total[i] == 0.0f ? 0.0f : 1.0f / total[i]);
        lse[i] = total[i] == 0.0f ? INFINITY : most[i] + logf(total[i]);
        for (int64_t d = 0; d < dim; d += 16)
            store_f32(o + i * dim + d, vec_mul(load_f32(o + i * dim + d), factor), 0);
    }
}

/* `count` arrays of a head in fp32, and one of scores: 64-byte aligned. */
TARGET static float *scratch_of(const struct sparse *s, int count, int64_t more)
{
    return aligned_alloc(64, (size_t)(count * s->length * padded(s) + more) * sizeof(float));
}

TARGET static void forward(const struct sparse *s, int64_t begin, int64_t end)
{
    const int64_t size = s->length * padded(s), group = s->num_heads / s->num_kv_heads;
    float *scratch = scratch_of(s, 5, CHUNK * PANEL * PANEL);
    if (!scratch) {
        *s->failed = 1;
        return;
    }
    float *keys = scratch, *scored = scratch + 5 * size;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / s->num_kv_heads, kv = item % s->num_kv_heads;
        transpose(rows_of(s, &s->k, b, kv, scratch + size), keys, s->length, padded(s), s->scale);
        const float *v = rows_of(s, &s->v, b, kv, scratch + 2 * size);
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
            const float *q = rows_of(s, &s->q, b, h, scratch + 3 * size);
            float *o = target_of(s, &s->o, b, h, scratch + 4 * size), *lse = s->lse + (b * s->num_heads + h) * s->length;
            const int64_t *tiles = s->layouts + (s->num_layouts > 1 ? h : 0);
            for (int64_t t = tiles[0]; t < tiles[1]; ++t) {
                const struct pass pass = pass_of(s, s->tiles + t, b, h);
                const int64_t row = s->tiles[t].row * PANEL;
                forward_tile(&pass, q + row * padded(s), keys, v, o + row * padded(s), lse + row, scored);
            }
            put_rows(s, &s->o, b, h, o);
        }
    }
    free(scratch);
}

/* ---- backward ---- */

/* Turn scores into probabilities (after dropout), and the probabilities' gradients into those of the scores, times the scale. */
INLINE void harden(const int plain, const struct pass *pass, const int32_t *panels, int count, const float *lse, const float *delta,
                   float *scored, float *grads)
{
    const struct sparse *s = pass->s;
    const vec lanes = lane_numbers(), scale = vec_set(s->scale);
    for (int i = 0; i < pass->tile->rows * PANEL; ++i, scored += count * PANEL, grads += count * PANEL) {
        const int64_t query = pass->tile->row * PANEL + i;
        const vec base = vec_set(lse[i]), mean = vec_set(delta[i]);
        float *bias_grad = plain || !s->bias_grad ? 0 : s->bias_grad + pass->bias_grad + query * s->length;
        for (int at = 0; at < count; ++at) {
            const vec x = biased(pass, plain, load_f32(scored + at * PANEL), query, panels[at], lanes);
            vec p = exp_or_zero(vec_sub(x, base)), grad = load_f32(grads + at * PANEL);
            if (!plain && s->dropout > 0) {
                const vec keep = kept(s, pass->head, query, panels[at]);
                store_f32(scored + at * PANEL, vec_mul(p, keep), 0);
                grad = vec_mul(grad, keep);
            } else
                store_f32(scored + at * PANEL, p, 0);
            p = vec_mul(p, vec_sub(grad, mean));
            if (!plain && bias_grad)
                store_f32(bias_grad + panels[at] * PANEL, vec_add(p, load_f32(bias_grad + panels[at] * PANEL)), 0);
            store_f32(grads + at * PANEL, vec_mul(p, scale), 0);
        }
    }
}

TARGET static void harden_any(const struct pass *pass, const int32_t *panels, int count, const float *lse, const float *delta, float *scored,
                              float *grads)
{
    if (!is_unmasked(pass))
        harden(0, pass, panels, count, lse, delta, scored, grads);
    else
        harden(1, pass, panels, count, lse, delta, scored, grads);
}

struct sides { /* of one head */
    const float *q, *k, *o, *grad, *keys, *values;
    float *dq, *dk, *dv;
};

TARGET static void backward_tile(const struct pass *pass, const struct sides *x, const float *lse, float *scored)
{
    const struct sparse *s = pass->s;
    const int64_t dim = padded(s), first = pass->tile->row * PANEL * dim;
    const int rows = pass->tile->rows * PANEL;
    const float *q = x->q + first, *grad = x->grad + first;
    float *dq = x->dq + first, *grads = scored + CHUNK * PANEL * PANEL, delta[MOST_ROWS * PANEL];
    int32_t own[MOST_ROWS];
    for (int i = 0; i < MOST_ROWS; ++i)
        own[i] = i;
    for (int i = 0; i < rows; ++i) {
        vec sum = vec_zero();
        for (int64_t d = 0; d < dim; d += 16)
            sum = vec_fma(load_f32(grad + i * dim + d), load_f32(x->o + first + i * dim + d), sum);
        delta[i] = lanes_sum(sum);
    }
    memset(dq, 0, (size_t)(rows * dim) * sizeof(float));
    for (int at = pass->tile->begin, count; at < pass->tile->end; at += count) {
        const int32_t *panels = s->panels + at;
        count = chunk_of(pass->tile, at);
        scores(q, rows, x->keys, panels, count, dim, scored);
        scores(grad, rows, x->values, panels, count, dim, grads);
        harden_any(pass, panels, count, lse, delta, scored, grads);
        sums(dq, rows, grads, count * PANEL, 1, x->k, panels, count, dim);
        for (int j = 0; j < count; ++j) {
            const int64_t to = panels[j] * PANEL * dim;
            sums(x->dv + to, PANEL, scored + j * PANEL, 1, count * PANEL, grad, own, pass->tile->rows, dim);
            sums(x->dk + to, PANEL, grads + j * PANEL, 1, count * PANEL, q, own, pass->tile->rows, dim);
        }
    }
}

TARGET static void backward(const struct sparse *s, int64_t begin, int64_t end)
{
    const int64_t dim = padded(s), size = s->length * dim, group = s->num_heads / s->num_kv_heads;
    float *scratch = scratch_of(s, 9, 2 * CHUNK * PANEL * PANEL);
    if (!scratch) {
        *s->failed = 1;
        return;
    }
    float *keys = scratch, *values = scratch + size, *scored = scratch + 9 * size;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / s->num_kv_heads, kv = item % s->num_kv_heads;
        struct sides x = {.k = rows_of(s, &s->k, b, kv, scratch + 2 * size), .keys = keys, .values = values};
        transpose(x.k, keys, s->length, dim, s->scale);
        transpose(rows_of(s, &s->v, b, kv, scratch + 3 * size), values, s->length, dim, 1.0f);
        x.dk = target_of(s, &s->dk, b, kv, scratch + 4 * size);
        x.dv = target_of(s, &s->dv, b, kv, scratch + 5 * size);
        memset(x.dk, 0, (size_t)size * sizeof(float));
        memset(x.dv, 0, (size_t)size * sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
            x.q = rows_of(s, &s->q, b, h, scratch + 3 * size);
            x.o = rows_of(s, &s->o, b, h, scratch + 6 * size);
            x.grad = rows_of(s, &s->grad, b, h, scratch + 7 * size);
            x.dq = target_of(s, &s->dq, b, h, scratch + 8 * size);
            const int64_t *tiles = s->layouts + (s->num_layouts > 1 ? h : 0);
            for (int64_t t = tiles[0]; t < tiles[1]; ++t) {
                const struct pass pass = pass_of(s, s->tiles + t, b, h);
                backward_tile(&pass, &x, s->lse + (b * s->num_heads + h) * s->length + s->tiles[t].row * PANEL, scored);
            }
            put_rows(s, &s->dq, b, h, x.dq);
        }
        put_rows(s, &s->dk, b, kv, x.dk);
        put_rows(s, &s->dv, b, kv, x.dv);
    }
    free(scratch);
}
#endif

const struct sparse_isa OF_ISA(sparse) = TABLE({forward, backward});
