/* Row-wise work (norm, rotation, writing keys and values to the cache), and attention over the cache's blocks. */
#ifndef SLIPSTREAM_DECODER_ATTENTION_H
#define SLIPSTREAM_DECODER_ATTENTION_H

#include "decoder_products.h"

/* 1 / rms(x) [Zhang & Sennrich 2019] */
TARGET static float rms_factor(const float *x, int64_t size, float eps)
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
    return 1.0f / sqrtf(lanes_sum(squares) / (float)size + eps);
}

/* to = factor * x * weight, or with `add`, to += that. */
TARGET static void scale_row(float *to, const float *x, const float *weight, int64_t size, float factor, int add)
{
    const int64_t whole = size / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) {
        vec a = vec_mul(vec_mul(load_f32(x + i), vec_set(factor)), load_f32(weight + i));
        store_f32(to + i, add ? vec_add(load_f32(to + i), a) : a, 0);
    }
    for (int64_t i = whole; i < size; ++i)
        to[i] = add ? to[i] + x[i] * factor * weight[i] : x[i] * factor * weight[i];
}

TARGET static void rms_norm(float *to, const float *x, const float *weight, int64_t size, float eps, int add)
{
    scale_row(to, x, weight, size, rms_factor(x, size, eps), add);
}

/* to = (x - mean) / deviation * weight + bias [Ba et al. 2016], or with `add`, to += that. */
TARGET static void layer_norm(float *to, const float *x, const struct norm *norm, int64_t size, float eps, int add)
{
    vec sum = vec_zero(), squares = vec_zero();
    float tail[16] = {0};
    const int64_t whole = size / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        sum = vec_add(load_f32(x + i), sum);
    memcpy(tail, x + whole, (size_t)(size - whole) * sizeof(float));
    const float mean = lanes_sum(vec_add(load_f32(tail), sum)) / (float)size;
    for (int64_t i = 0; i < whole; i += 16) {
        const vec a = vec_sub(load_f32(x + i), vec_set(mean));
        squares = vec_fma(a, a, squares);
    }
    for (int64_t i = whole; i < size; ++i)
        tail[i - whole] -= mean;
    squares = vec_fma(load_f32(tail), load_f32(tail), squares);
    const float factor = 1.0f / sqrtf(lanes_sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < whole; i += 16) {
        vec a = vec_mul(vec_mul(vec_sub(load_f32(x + i), vec_set(mean)), vec_set(factor)), load_f32(norm->weight + i));
        a = norm->bias ? vec_add(a, load_f32(norm->bias + i)) : a;
        store_f32(to + i, add ? vec_add(load_f32(to + i), a) : a, 0);
    }
    for (int64_t i = whole; i < size; ++i) {
        const float a = tail[i - whole] * factor * norm->weight[i] + (norm->bias ? norm->bias[i] : 0.0f);
        to[i] = add ? to[i] + a : a;
    }
}

/* to = the norm of a row, or with `add`, to += that; a copy without a norm. `to` can be x. */
TARGET static void norm_row(const struct decoder *model, float *to, const float *x, const struct norm *norm, int add)
{
    if (!norm->weight) {
        if (to != x)
            memcpy(to, x, (size_t)model->hidden_size * sizeof(float));
    } else if (model->centered) {
        layer_norm(to, x, norm, model->hidden_size, model->norm_eps, add);
    } else {
        rms_norm(to, x, norm->weight, model->hidden_size, model->norm_eps, add);
    }
}

INLINE void add_row(float *to, const float *x, int64_t size)
{
    for (int64_t i = 0; i < size; ++i)
        to[i] += x[i];
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

/* The location of position p of a sequence: its block, and p % PANEL inside. */
INLINE int64_t block_of(const struct batch *batch, int sequence, int64_t position)
{
    return batch->tables[batch->table_at[sequence] + position / PANEL];
}

/* Normalize and rotate a row's heads that share a key-value head, in place, and write its key and value to the cache. */
TARGET static void place_head(const struct decoder *model, const struct layer *layer, const struct batch *batch, int64_t row, int sequence,
                              int64_t kv_head)
{
    const int64_t dim = model->head_dim, num_kv = model->num_kv_heads, group = model->num_heads / num_kv;
    const int64_t position = batch->start[sequence] + row - batch->first_row[sequence];
    float *first = batch->qkv + row * (model->num_heads + 2 * num_kv) * dim, *q = first + kv_head * group * dim;
    float *k = first + (model->num_heads + kv_head) * dim, *v = k + num_kv * dim;
    for (int64_t i = 0; i <= group; ++i) {
        float *head = i < group ? q + i * dim : k;
        const float *norm = i < group ? layer->q_norm : layer->k_norm;
        if (norm && !model->qk_norm_whole)
            rms_norm(head, head, norm, dim, model->norm_eps, 0);
        if (layer->cosine)
            rotate(head, layer, position);
    }
    const int64_t at = position % PANEL, base = (block_of(batch, sequence, position) * num_kv + kv_head) * dim * PANEL;
    if (model->cache_type == WEIGHT_BF16) {
        uint16_t *keys = (uint16_t *)layer->keys + base + at, *values = (uint16_t *)layer->values + base + at * dim;
        for (int64_t d = 0; d < dim; ++d) {
            keys[d * PANEL] = to_bf16(k[d]);
            values[d] = to_bf16(v[d]);
        }
    } else {
        float *keys = (float *)layer->keys + base + at, *values = (float *)layer->values + base + at * dim;
        for (int64_t d = 0; d < dim; ++d) {
            keys[d * PANEL] = k[d];
            values[d] = v[d];
        }
    }
}

static const float LANES[PANEL] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Up to ROWS queries of one sequence and key-value head. Query i is (row i / group, head i % group of the group). */
struct queries {
    const float *q[ROWS];
    float *to[ROWS];
    int64_t first[ROWS], last[ROWS]; /* visible positions, both inclusive */
    int64_t own[ROWS];               /* its position */
    float slope[ROWS];
};

/* `next` is the distance of the block that follows: it is prefetched. */
INLINE void attend_block(const int count, const struct decoder *model, const struct queries *queries, int64_t position,
                         int64_t seen, const char *keys, const char *values, int64_t next, const int type, float *most, vec *total,
                         float *out, int64_t out_stride)
{
    const int64_t dim = model->head_dim;
    float weights[ROWS][PANEL];
    vec scores[ROWS];
    int causal = 0; /* the queries of the tile see different positions */
    for (int i = 0; i < count; ++i) {
        scores[i] = vec_zero();
        causal |= queries->last[i] - position + 1 < seen;
    }
    for (int64_t d = 0; d < dim; ++d) {
        const int64_t at = d * PANEL * weight_size(type);
        const vec key = load_weight(type, keys + at);
        __builtin_prefetch(keys + next + at, 0, 3);
        __builtin_prefetch(values + next + at, 0, 3);
        for (int i = 0; i < count; ++i)
            scores[i] = vec_fma(vec_set(queries->q[i][d]), key, scores[i]);
    }
    for (int i = 0; i < count; ++i) {
        vec score = vec_mul(scores[i], vec_set(model->attn_scale));
        if (model->attn_softcap > 0.0f)
            score = vec_mul(vec_set(model->attn_softcap), vec_tanh(vec_div(score, vec_set(model->attn_softcap))));
        if (model->slopes)
            score = vec_fma(vec_set(queries->slope[i]), vec_add(vec_set((float)(position - queries->own[i])), load_f32(LANES)), score);
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
                if (!causal || position + at <= queries->last[i]) /* 0 times a later NaN would be NaN in rows that do not see it */
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
        const int64_t block = block_of(batch, sequence, position), size = dim * PANEL * weight_size(type);
        const int64_t base = (block * model->num_kv_heads + kv_head) * size;
        const int64_t following = position + PANEL <= last ? block_of(batch, sequence, position + PANEL) : block;
        const int64_t seen = last - position + 1 < PANEL ? last - position + 1 : PANEL;
        attend_block(count, model, queries, position, seen, (const char *)layer->keys + base, (const char *)layer->values + base,
                     (following - block) * model->num_kv_heads * size, type, most, total, out, stride);
    }
    for (int i = 0; i < count; ++i) {
        const vec factor = vec_set(1.0f / lanes_sum(total[i]));
        for (int64_t d = 0; d < dim; d += PANEL)
            store_f32(queries->to[i] + d, vec_mul(load_f32(out + i * stride + d), factor), 0);
    }
}

/* The number of tiles of a sequence's queries, per key-value head. */
INLINE int64_t num_tiles(const struct batch *batch, int sequence, int64_t group)
{
    return ((batch->first_row[sequence + 1] - batch->first_row[sequence]) * group + ROWS - 1) / ROWS;
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

/* If every sequence has one row, which fits one tile, no other item needs its key: the same item writes it to the cache. */
INLINE int placed_when_attended(const struct decoder *model, const struct batch *batch)
{
    return batch->num_rows == batch->num_sequences && model->num_heads / model->num_kv_heads <= ROWS;
}

/* An item is a (sequence, key-value head, tile of queries). */
TARGET static void attention(const struct decoder *model, const struct layer *layer, const struct batch *batch, struct worker *worker)
{
    const int stage = worker->stage++;
    const int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t width = (model->num_heads + 2 * model->num_kv_heads) * dim;
    const struct part to = part_of(model, batch, &layer->out, batch->attended, model->attended_size, model->first_attended,
                                   model->num_heads * dim);
    int64_t total = 0;
    for (int sequence = 0; sequence < batch->num_sequences; ++sequence)
        total += num_tiles(batch, sequence, group) * model->num_kv_heads;
    for (int64_t item; (item = team_next(worker->team, stage, worker->thread, total)) < total;) {
        int sequence = 0;
        for (; item >= num_tiles(batch, sequence, group) * model->num_kv_heads; ++sequence)
            item -= num_tiles(batch, sequence, group) * model->num_kv_heads;
        const int64_t row = batch->first_row[sequence], rows = batch->first_row[sequence + 1] - row;
        const int64_t tiles = num_tiles(batch, sequence, group), kv_head = item / tiles, at = item % tiles * ROWS;
        const int count = (int)(rows * group - at < ROWS ? rows * group - at : ROWS);
        struct queries queries;
        if (placed_when_attended(model, batch))
            place_head(model, layer, batch, row, sequence, kv_head);
        for (int i = 0; i < count; ++i) {
            const int64_t r = (at + i) / group, head = kv_head * group + (at + i) % group;
            queries.q[i] = batch->qkv + (row + r) * width + head * dim;
            queries.to[i] = to.first + (row + r) * to.stride + head * dim;
            queries.own[i] = batch->start[sequence] + r;
            queries.last[i] = model->both_ways ? batch->start[sequence] + rows - 1 : queries.own[i];
            queries.first[i] = layer->window && queries.own[i] >= layer->window ? queries.own[i] - layer->window + 1 : 0;
            if (layer->window && queries.last[i] >= queries.own[i] + layer->window)
                queries.last[i] = queries.own[i] + layer->window - 1;
            queries.slope[i] = model->slopes ? model->slopes[head] : 0.0f;
        }
        attend(count, model, layer, batch, sequence, kv_head, &queries, worker->scratch);
    }
}

#endif
