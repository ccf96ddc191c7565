/* The forward, written once over 16 fp32 lanes; decoder_*.c compile it for their instruction sets. See decoder.h for
 * the order of every sum. */
#include "decoder.h"

#include <math.h>
#include <string.h>

#define MASKED (-1e30f)

INLINE vec vec_zero(void) { return vec_set(0.0f); }

/* e^x for x <= 88, by 2^n * polynomial; exactly 1 at 0 (Cephes' coefficients, relative error 2e-7). */
INLINE vec vec_exp(vec x)
{
    const vec magic = vec_set(12582912.0f); /* adding and subtracting it rounds to whole numbers */
    x = vec_max(vec_min(x, vec_set(88.0f)), vec_set(-87.0f));
    vec n = vec_sub(vec_add(vec_mul(x, vec_set(1.44269504f)), magic), magic);
    vec r = vec_fma(n, vec_set(-0.693359375f), x);
    r = vec_fma(n, vec_set(2.12194440e-4f), r);
    vec p = vec_set(1.9875691500e-4f);
    p = vec_fma(p, r, vec_set(1.3981999507e-3f));
    p = vec_fma(p, r, vec_set(8.3334519073e-3f));
    p = vec_fma(p, r, vec_set(4.1665795894e-2f));
    p = vec_fma(p, r, vec_set(1.6666665459e-1f));
    p = vec_fma(p, r, vec_set(5.0000001201e-1f));
    p = vec_add(vec_fma(vec_mul(r, r), p, r), vec_set(1.0f));
    return vec_mul(p, vec_pow2(n));
}

INLINE vec vec_tanh(vec x)
{
    const vec one = vec_set(1.0f);
    return vec_sub(one, vec_div(vec_set(2.0f), vec_add(vec_exp(vec_min(vec_add(x, x), vec_set(80.0f))), one)));
}

TARGET static float lanes_sum(vec a)
{
    float lanes[16];
    store_f32(lanes, a, 0);
    for (int half = 8; half >= 1; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

TARGET static float lanes_max(vec a)
{
    float lanes[16], most;
    store_f32(lanes, a, 0);
    most = lanes[0];
    for (int lane = 1; lane < 16; ++lane)
        most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

TARGET static float exp_of(float x)
{
    float lanes[16];
    store_f32(lanes, vec_exp(vec_set(x)), 0);
    return lanes[0];
}

/* ---- matrices ---- */

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
        memcpy(group, x + k, (size_t)width * sizeof(float));
        for (int i = 0; i < CODES; ++i)
            most = fabsf(group[i]) > most ? fabsf(group[i]) : most;
        const float factor = most > 0.0f ? 127.0f / most : 0.0f;
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
TARGET static void multiply(const struct product *jobs, int num_jobs, struct team *team, int stage, float *scratch)
{
    int64_t total = 0;
    for (int a = 0; a < num_jobs; ++a)
        total += num_strips(&jobs[a]);
    for (int64_t item; (item = team_next(team, stage)) < total;) {
        const struct product *job = jobs;
        for (; item >= num_strips(job); ++job)
            item -= num_strips(job);
        const int64_t left = num_panels(job->w) - item * 4;
        strip(job, item * 4, left < 4 ? (int)left : 4, scratch);
    }
}

/* ---- rows ---- */

/* to = x / rms(x) * weight; [Zhang & Sennrich 2019]. With `add`, to += that. */
TARGET static void rms_norm(float *to, const float *x, const float *weight, int64_t size, float eps, int add)
{
    vec squares = vec_zero();
    float tail[16] = {0};
    const int64_t whole = size / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) {
        const vec a = load_f32(x + i);
        squares = vec_fma(a, a, squares);
    }
    memcpy(tail, x + whole, (size_t)(size - whole) * sizeof(float));
    squares = vec_fma(load_f32(tail), load_f32(tail), squares);
    const float factor = 1.0f / sqrtf(lanes_sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < whole; i += 16) {
        vec a = vec_mul(vec_mul(load_f32(x + i), vec_set(factor)), load_f32(weight + i));
        store_f32(to + i, add ? vec_add(load_f32(to + i), a) : a, 0);
    }
    for (int64_t i = whole; i < size; ++i)
        to[i] = add ? to[i] + x[i] * factor * weight[i] : x[i] * factor * weight[i];
}

TARGET static void embed_row(const struct decoder *model, int32_t id, float *x)
{
    const int64_t size = model->hidden_size;
    const int type = model->embed_type;
    const char *row = (const char *)model->embed + id * size * weight_size(type);
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        store_f32(x + i, vec_mul(load_weight(type, row + i * weight_size(type)), vec_set(model->embed_scale)), 0);
    if (i < size) {
        char padded[64] = {0};
        float lanes[16];
        memcpy(padded, row + i * weight_size(type), (size_t)((size - i) * weight_size(type)));
        store_f32(lanes, vec_mul(load_weight(type, padded), vec_set(model->embed_scale)), 0);
        memcpy(x + i, lanes, (size_t)(size - i) * sizeof(float));
    }
}

TARGET static void rotate(float *head, const struct layer *layer, int64_t position)
{
    const int64_t half = layer->rotary_dim / 2;
    const float *cosine = layer->cosine + position * half, *sine = layer->sine + position * half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

INLINE uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- attention ---- */

/* Where position p of a sequence is: its block, and p % PANEL inside. */
INLINE int64_t block_of(const struct batch *batch, int sequence, int64_t position)
{
    return batch->tables[batch->table_at[sequence] + position / PANEL];
}

/* Norm and rotation of one row's heads, in place; its keys and values go to the cache. */
TARGET static void place_row(const struct decoder *model, const struct layer *layer, const struct batch *batch, int row, int sequence)
{
    const int64_t dim = model->head_dim, num_kv = model->num_kv_heads;
    const int64_t position = batch->start[sequence] + row - batch->first_row[sequence];
    const int64_t width = (model->num_heads + 2 * num_kv) * dim;
    float *q = batch->qkv + row * width, *k = q + model->num_heads * dim, *v = k + num_kv * dim;
    for (int64_t head = 0; head < model->num_heads + num_kv; ++head) {
        const float *norm = head < model->num_heads ? layer->q_norm : layer->k_norm;
        if (norm)
            rms_norm(q + head * dim, q + head * dim, norm, dim, model->norm_eps, 0);
        if (layer->cosine)
            rotate(q + head * dim, layer, position);
    }
    const int64_t block = block_of(batch, sequence, position), at = position % PANEL;
    for (int64_t head = 0; head < num_kv; ++head) {
        const int64_t base = (block * num_kv + head) * dim * PANEL;
        if (model->cache_type == WEIGHT_BF16) {
            uint16_t *keys = (uint16_t *)layer->keys + base + at, *values = (uint16_t *)layer->values + base + at * dim;
            for (int64_t d = 0; d < dim; ++d) {
                keys[d * PANEL] = to_bf16(k[head * dim + d]);
                values[d] = to_bf16(v[head * dim + d]);
            }
        } else {
            float *keys = (float *)layer->keys + base + at, *values = (float *)layer->values + base + at * dim;
            for (int64_t d = 0; d < dim; ++d) {
                keys[d * PANEL] = k[head * dim + d];
                values[d] = v[head * dim + d];
            }
        }
    }
}

/* Up to ROWS queries of one sequence and key-value head. Query i is (row i / group, head i % group of the group). */
struct queries {
    const float *q[ROWS];
    float *to[ROWS];
    int64_t first[ROWS], last[ROWS]; /* positions that it sees, both included */
};

INLINE void attend_block(const int count, const struct decoder *model, const struct queries *queries, int64_t position,
                         int64_t seen, const char *keys, const char *values, const int type, float *most, vec *total,
                         float *out, int64_t out_stride)
{
    const int64_t dim = model->head_dim;
    float weights[ROWS][PANEL];
    vec scores[ROWS];
    for (int i = 0; i < count; ++i)
        scores[i] = vec_zero();
    for (int64_t d = 0; d < dim; ++d) {
        const vec key = load_weight(type, keys + d * PANEL * weight_size(type));
        for (int i = 0; i < count; ++i)
            scores[i] = vec_fma(vec_set(queries->q[i][d]), key, scores[i]);
    }
    for (int i = 0; i < count; ++i) {
        vec score = vec_mul(scores[i], vec_set(model->attn_scale));
        if (model->attn_softcap > 0.0f)
            score = vec_mul(vec_set(model->attn_softcap), vec_tanh(vec_div(score, vec_set(model->attn_softcap))));
        const int64_t from = queries->first[i] - position, to = queries->last[i] - position;
        store_f32(weights[i], score, 0);
        if (from > 0 || to < PANEL - 1)
            for (int64_t lane = 0; lane < PANEL; ++lane)
                if (lane < from || lane > to)
                    weights[i][lane] = MASKED;
        score = load_f32(weights[i]);
        const float above = lanes_max(score);
        if (above > most[i]) {
            const vec factor = vec_set(exp_of(most[i] - above));
            most[i] = above;
            total[i] = vec_mul(total[i], factor);
            for (int64_t d = 0; d < dim; d += PANEL)
                store_f32(out + i * out_stride + d, vec_mul(load_f32(out + i * out_stride + d), factor), 0);
        }
        store_f32(weights[i], vec_exp(vec_sub(score, vec_set(most[i]))), 0);
        if (from > 0 || to < PANEL - 1)
            for (int64_t lane = 0; lane < PANEL; ++lane)
                if (lane < from || lane > to)
                    weights[i][lane] = 0.0f;
        total[i] = vec_add(total[i], load_f32(weights[i]));
    }
    for (int64_t d = 0; d < dim; d += PANEL) {
        vec sums[ROWS];
        for (int i = 0; i < count; ++i)
            sums[i] = load_f32(out + i * out_stride + d);
        for (int64_t at = 0; at < seen; ++at) {
            const vec value = load_weight(type, values + (at * dim + d) * weight_size(type));
            for (int i = 0; i < count; ++i)
                sums[i] = vec_fma(vec_set(weights[i][at]), value, sums[i]);
        }
        for (int i = 0; i < count; ++i)
            store_f32(out + i * out_stride + d, sums[i], 0);
    }
}

INLINE void attend_type(const int count, const int type, const struct decoder *model, const struct layer *layer,
                        const struct batch *batch, int sequence, int64_t kv_head, const struct queries *queries, float *out)
{
    const int64_t dim = model->head_dim, stride = dim;
    float most[ROWS];
    vec total[ROWS];
    int64_t first = queries->first[0], last = queries->last[0];
    for (int i = 0; i < count; ++i) {
        most[i] = MASKED;
        total[i] = vec_zero();
        memset(out + i * stride, 0, (size_t)dim * sizeof(float));
        first = queries->first[i] < first ? queries->first[i] : first;
        last = queries->last[i] > last ? queries->last[i] : last;
    }
    for (int64_t position = first / PANEL * PANEL; position <= last; position += PANEL) {
        const int64_t base = (block_of(batch, sequence, position) * model->num_kv_heads + kv_head) * dim * PANEL * weight_size(type);
        const int64_t seen = last - position + 1 < PANEL ? last - position + 1 : PANEL;
        attend_block(count, model, queries, position, seen, (const char *)layer->keys + base, (const char *)layer->values + base,
                     type, most, total, out, stride);
    }
    for (int i = 0; i < count; ++i) {
        const vec factor = vec_set(1.0f / lanes_sum(total[i]));
        for (int64_t d = 0; d < dim; d += PANEL)
            store_f32(queries->to[i] + d, vec_mul(load_f32(out + i * stride + d), factor), 0);
    }
}

#define ATTEND(COUNT)                                                                                                   \
    case COUNT:                                                                                                         \
        if (model->cache_type == WEIGHT_BF16)                                                                           \
            attend_type(COUNT, WEIGHT_BF16, model, layer, batch, sequence, kv_head, queries, out);                      \
        else                                                                                                            \
            attend_type(COUNT, WEIGHT_F32, model, layer, batch, sequence, kv_head, queries, out);                       \
        break;

TARGET static void attend(int count, const struct decoder *model, const struct layer *layer, const struct batch *batch, int sequence,
                          int64_t kv_head, const struct queries *queries, float *out)
{
    switch (count) {
        ATTEND(1)
        ATTEND(2)
        ATTEND(3)
        ATTEND(4)
        ATTEND(5)
        default: ATTEND(6)
    }
}

/* Every (sequence, key-value head, tile of queries) is an item; the longest sequences' last tiles are not special. */
TARGET static void attention(const struct decoder *model, const struct layer *layer, const struct batch *batch, struct team *team,
                             int stage, float *scratch)
{
    const int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t width = (model->num_heads + 2 * model->num_kv_heads) * dim;
    int64_t item = team_next(team, stage), before = 0;
    for (int sequence = 0; sequence < batch->num_sequences; ++sequence) {
        const int64_t row = batch->first_row[sequence], rows = batch->first_row[sequence + 1] - row;
        const int64_t tiles = (rows * group + ROWS - 1) / ROWS, items = tiles * model->num_kv_heads;
        for (; item < before + items; item = team_next(team, stage)) {
            const int64_t kv_head = (item - before) / tiles, at = (item - before) % tiles * ROWS;
            const int count = (int)(rows * group - at < ROWS ? rows * group - at : ROWS);
            struct queries queries;
            for (int i = 0; i < count; ++i) {
                const int64_t r = (at + i) / group, head = kv_head * group + (at + i) % group;
                queries.q[i] = batch->qkv + (row + r) * width + head * dim;
                queries.to[i] = batch->attended + ((row + r) * model->num_heads + head) * dim;
                queries.last[i] = batch->start[sequence] + r;
                queries.first[i] = layer->window && queries.last[i] >= layer->window ? queries.last[i] - layer->window + 1 : 0;
            }
            attend(count, model, layer, batch, sequence, kv_head, &queries, scratch);
        }
        before += items;
    }
}

/* ---- the model ---- */

INLINE void share(int64_t total, int threads, int thread, int64_t *from, int64_t *to)
{
    *from = total * thread / threads;
    *to = total * (thread + 1) / threads;
}

TARGET static void norm_rows(const struct decoder *model, float *to, const float *x, const float *weight, int64_t from, int64_t until, int add)
{
    for (int64_t row = from; row < until; ++row)
        rms_norm(to + row * model->hidden_size, x + row * model->hidden_size, weight, model->hidden_size, model->norm_eps, add);
}

/* Rows [from, until) of x, of `size` features, as codes; other threads read them after the next meeting. */
TARGET static struct coded code_rows(const struct batch *batch, const float *x, int64_t size, int64_t from, int64_t until)
{
    const int64_t groups = (size + CODES - 1) / CODES;
    const struct coded coded = {batch->codes, batch->scales, batch->scales + groups, groups * CODES, 2 * groups};
    for (int64_t row = from; row < until; ++row)
        code_row(x + row * size, size, batch->codes + row * coded.stride, batch->scales + row * coded.groups_stride,
                 batch->scales + row * coded.groups_stride + groups);
    return coded;
}

/* x += W y, or x += norm(W y) where the layer has a norm there. The threads have met when this returns. */
TARGET static void residual(const struct decoder *model, const struct batch *batch, const struct matrix *w, const float *y, int64_t size,
                            const float *post_norm, struct team *team, int thread, int stage, float *scratch, int64_t from, int64_t until)
{
    struct product job = {.w = w, .x = y, .y = post_norm ? batch->normed : batch->x, .x_stride = size,
                          .y_stride = model->hidden_size, .num_rows = batch->num_rows, .epilogue = post_norm ? STORE : ADD};
    if (is_coded(w)) {
        job.coded = code_rows(batch, y, size, from, until);
        team_wait(team, thread);
    }
    multiply(&job, 1, team, stage, scratch);
    team_wait(team, thread);
    if (post_norm)
        norm_rows(model, batch->x, batch->normed, post_norm, from, until, 1);
}

/* ---- experts ---- */

/* The top_k likeliest of softmax(scores), the lower one of equals, and their probabilities. */
TARGET static void choose(const struct experts *experts, const float *scores, float *shares, int32_t *chosen)
{
    float most = scores[0], total = 0.0f, kept = 0.0f;
    for (int e = 1; e < experts->num; ++e)
        most = scores[e] > most ? scores[e] : most;
    for (int e = 0; e < experts->num; ++e)
        total += expf(scores[e] - most);
    for (int i = 0; i < experts->top_k; ++i) {
        int best = -1;
        for (int e = 0; e < experts->num; ++e) {
            int taken = 0;
            for (int j = 0; j < i; ++j)
                taken |= chosen[j] == e;
            if (!taken && (best < 0 || scores[e] > scores[best]))
                best = e;
        }
        chosen[i] = best;
        kept += shares[i] = expf(scores[best] - most) / total;
    }
    for (int i = 0; i < experts->top_k && experts->normalize; ++i)
        shares[i] /= kept;
}

/* Where every list begins, and every row's places on them. */
TARGET static void make_lists(const struct experts *experts, const struct routing *routing, int32_t num_rows)
{
    const int32_t top_k = experts->top_k, lists = experts->num + experts->has_shared;
    int32_t next[MAX_EXPERTS] = {0};
    for (int32_t i = 0; i < num_rows * top_k; ++i)
        ++next[routing->chosen[i]];
    int32_t first = 0;
    for (int32_t e = 0; e < lists; ++e) {
        const int32_t length = e < experts->num ? next[e] : num_rows;
        routing->first[e] = next[e] = first;
        first += length;
    }
    routing->first[lists] = first;
    for (int32_t row = 0; row < num_rows; ++row) {
        for (int32_t i = 0; i < top_k; ++i)
            routing->place[row * (top_k + 1) + i] = next[routing->chosen[row * top_k + i]]++;
        routing->place[row * (top_k + 1) + top_k] = next[experts->num] + row;
    }
}

/* One product for each list: x and y have a row per place. Their inputs are coded first where the matrices are. */
TARGET static void multiply_lists(const struct experts *experts, const struct batch *batch, const struct matrix *w, const float *x,
                                  int64_t x_stride, float *y, int64_t y_stride, enum epilogue epilogue, int activation,
                                  struct team *team, int thread, int stage, float *scratch)
{
    const int lists = experts->num + experts->has_shared;
    const int32_t *first = batch->routing.first;
    const int64_t groups = (x_stride + CODES - 1) / CODES;
    struct product jobs[MAX_EXPERTS];
    int64_t from, until;
    int coded = 0;
    share(first[lists], team_size(team), thread, &from, &until);
    for (int e = 0; e < lists; ++e) {
        const struct coded rows = {batch->codes + first[e] * groups * CODES, batch->scales + first[e] * 2 * groups,
                                   batch->scales + first[e] * 2 * groups + groups, groups * CODES, 2 * groups};
        jobs[e] = (struct product){.w = &w[e], .x = x + first[e] * x_stride, .coded = rows, .y = y + first[e] * y_stride,
                                   .x_stride = x_stride, .y_stride = y_stride, .num_rows = first[e + 1] - first[e],
                                   .epilogue = epilogue, .activation = activation};
        if (!is_coded(&w[e]))
            continue;
        coded = 1;
        for (int64_t place = from > first[e] ? from : first[e]; place < until && place < first[e + 1]; ++place)
            code_row(x + place * x_stride, w[e].num_features < x_stride ? w[e].num_features : x_stride, batch->codes + place * groups * CODES,
                     batch->scales + place * 2 * groups, batch->scales + place * 2 * groups + groups);
    }
    if (coded)
        team_wait(team, thread);
    multiply(jobs, lists, team, stage, scratch);
    team_wait(team, thread);
}

/* x += the experts' outputs, weighted; normed rows go in. Three stages. */
TARGET static void routed(const struct decoder *model, const struct experts *experts, const struct batch *batch, struct team *team,
                          int thread, int stage, float *scratch, int64_t from, int64_t until)
{
    const int64_t hidden = model->hidden_size, top_k = experts->top_k, copies = top_k + experts->has_shared;
    const struct routing *routing = &batch->routing;
    const struct product router = {.w = &experts->router, .x = batch->normed, .y = routing->scores, .x_stride = hidden,
                                   .y_stride = experts->num, .num_rows = batch->num_rows};
    multiply(&router, 1, team, stage, scratch);
    team_wait(team, thread);
    for (int64_t row = from; row < until; ++row)
        choose(experts, routing->scores + row * experts->num, routing->shares + row * top_k, routing->chosen + row * top_k);
    team_wait(team, thread);
    if (thread == 0)
        make_lists(experts, routing, batch->num_rows);
    team_wait(team, thread);
    for (int64_t row = from; row < until; ++row)
        for (int64_t i = 0; i < copies; ++i)
            memcpy(routing->gathered + routing->place[row * (top_k + 1) + i] * hidden, batch->normed + row * hidden,
                   (size_t)hidden * sizeof(float));
    team_wait(team, thread);
    multiply_lists(experts, batch, experts->gate_up, routing->gathered, hidden, routing->act, experts->widest, GATED,
                   model->activation, team, thread, stage + 1, scratch);
    multiply_lists(experts, batch, experts->down, routing->act, experts->widest, routing->out, hidden, STORE, 0, team, thread,
                   stage + 2, scratch);
    for (int64_t row = from; row < until; ++row) {
        float *x = batch->x + row * hidden;
        const int32_t *place = routing->place + row * (top_k + 1);
        float open = 0.0f;
        if (experts->has_shared) {
            for (int64_t d = 0; d < hidden; ++d)
                open += batch->normed[row * hidden + d] * experts->shared_gate[d];
            open = 1.0f / (1.0f + expf(-open));
        }
        for (int64_t d = 0; d < hidden; ++d) {
            float sum = experts->has_shared ? open * routing->out[place[top_k] * hidden + d] : 0.0f;
            for (int64_t i = 0; i < top_k; ++i)
                sum += routing->shares[row * top_k + i] * routing->out[place[i] * hidden + d];
            x[d] += sum;
        }
    }
}

TARGET static void run(const struct decoder *model, const struct batch *batch, struct team *team, int thread, float *scratch)
{
    const int64_t hidden = model->hidden_size, dim = model->head_dim;
    const int64_t q_width = model->num_heads * dim, kv_width = model->num_kv_heads * dim, width = q_width + 2 * kv_width;
    int64_t from, until;
    int stage = 0;
    share(batch->num_rows, team_size(team), thread, &from, &until);
    for (int64_t row = from; row < until; ++row)
        embed_row(model, batch->ids[row], batch->x + row * hidden);
    for (int index = 0; index < model->num_layers; ++index) {
        const struct layer *layer = &model->layers[index];
        const struct matrix *const w[] = {&layer->q, &layer->k, &layer->v};
        float *const y[] = {batch->qkv, batch->qkv + q_width, batch->qkv + q_width + kv_width};
        struct product qkv[3];
        struct coded coded = {0};
        norm_rows(model, batch->normed, batch->x, layer->input_norm, from, until, 0);
        if (is_coded(&layer->q) || is_coded(&layer->k) || is_coded(&layer->v))
            coded = code_rows(batch, batch->normed, hidden, from, until);
        for (int i = 0; i < 3; ++i)
            qkv[i] = (struct product){.w = w[i], .x = batch->normed, .coded = coded, .y = y[i], .x_stride = hidden, .y_stride = width,
                                      .num_rows = batch->num_rows};
        team_wait(team, thread);
        multiply(qkv, 3, team, stage++, scratch);
        team_wait(team, thread);
        for (int sequence = 0, row = (int)from; row < until; ++row) {
            while (row >= batch->first_row[sequence + 1])
                ++sequence;
            place_row(model, layer, batch, row, sequence);
        }
        team_wait(team, thread);
        attention(model, layer, batch, team, stage++, scratch);
        team_wait(team, thread);
        residual(model, batch, &layer->out, batch->attended, q_width, layer->attn_post_norm, team, thread, stage++, scratch, from, until);
        norm_rows(model, batch->normed, batch->x, layer->mlp_norm, from, until, 0);
        if (layer->experts) {
            team_wait(team, thread);
            routed(model, layer->experts, batch, team, thread, stage, scratch, from, until);
            stage += 3;
            continue;
        }
        struct product gated = {.w = &layer->gate_up, .x = batch->normed, .y = batch->act, .x_stride = hidden,
                                .y_stride = model->intermediate_size, .num_rows = batch->num_rows, .epilogue = GATED,
                                .activation = model->activation};
        if (is_coded(gated.w))
            gated.coded = code_rows(batch, batch->normed, hidden, from, until);
        team_wait(team, thread);
        multiply(&gated, 1, team, stage++, scratch);
        team_wait(team, thread);
        residual(model, batch, &layer->down, batch->act, model->intermediate_size, layer->mlp_post_norm, team, thread, stage++, scratch, from, until);
    }
    team_wait(team, thread);
    share(batch->num_logits, team_size(team), thread, &from, &until);
    for (int64_t i = from; i < until; ++i)
        rms_norm(batch->normed + i * hidden, batch->x + batch->logit_rows[i] * hidden, model->final_norm, hidden, model->norm_eps, 0);
    struct product head = {.w = &model->head, .x = batch->normed, .y = batch->logits, .x_stride = hidden,
                           .y_stride = model->vocab_size, .num_rows = batch->num_logits};
    if (is_coded(head.w))
        head.coded = code_rows(batch, batch->normed, hidden, from, until);
    team_wait(team, thread);
    if (batch->num_logits)
        multiply(&head, 1, team, stage++, scratch);
    if (model->logit_softcap > 0.0f) {
        team_wait(team, thread);
        share(batch->num_logits * model->vocab_size, team_size(team), thread, &from, &until);
        for (int64_t i = from; i < until; ++i)
            batch->logits[i] = model->logit_softcap * tanhf(batch->logits[i] / model->logit_softcap);
    }
}
