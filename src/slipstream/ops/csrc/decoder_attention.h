/* Row-wise work (norm, rotation, writing keys and values to the cache), and attention over the cache's blocks. */
#ifndef SLIPSTREAM_DECODER_ATTENTION_H
#define SLIPSTREAM_DECODER_ATTENTION_H

#include "decoder_products.h"

/* 1 / rms(x) [Zhang & Sennrich 2019] */
TARGET static float rms_factor(const float *x, int64_t size, float eps)
{
    vec squares = vec_zero();
    for (int64_t i = 0; i < size; i += 16) {
        const vec a = load_part(x + i, size - i, WEIGHT_F32);
        squares = vec_fma(a, a, squares);
    }
    return 1.0f / sqrtf(lanes_sum(squares) / (float)size + eps);
}

/* to = factor * x * weight, or with `add`, to += that. */
TARGET static void scale_row(float *to, const float *x, const float *weight, int64_t size, float factor, int add)
{
    for (int64_t i = 0; i < size; i += 16) {
        const vec normal = vec_mul(load_part(x + i, size - i, WEIGHT_F32), vec_set(factor));
        const vec a = vec_mul(normal, load_part(weight + i, size - i, WEIGHT_F32));
        store_part(to + i, add ? vec_add(load_part(to + i, size - i, WEIGHT_F32), a) : a, size - i, WEIGHT_F32);
    }
}

TARGET static void rms_norm(float *to, const float *x, const float *weight, int64_t size, float eps, int add)
{
    scale_row(to, x, weight, size, rms_factor(x, size, eps), add);
}

/* to = (x - mean) / deviation * weight + bias [Ba et al. 2016], or with `add`, to += that. */
TARGET static void layer_norm(float *to, const float *x, const struct norm *norm, int64_t size, float eps, int add)
{
    vec sum = vec_zero(), squares = vec_zero();
    for (int64_t i = 0; i < size; i += 16)
        sum = vec_add(load_part(x + i, size - i, WEIGHT_F32), sum);
    const vec mean = vec_set(lanes_sum(sum) / (float)size);
    for (int64_t i = 0; i < size; i += 16) {
        const vec a = first_lanes(vec_sub(load_part(x + i, size - i, WEIGHT_F32), mean), size - i, vec_zero());
        squares = vec_fma(a, a, squares);
    }
    const vec factor = vec_set(1.0f / sqrtf(lanes_sum(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16) {
        const vec normal = vec_mul(vec_sub(load_part(x + i, size - i, WEIGHT_F32), mean), factor);
        vec a = vec_mul(normal, load_part(norm->weight + i, size - i, WEIGHT_F32));
        a = norm->bias ? vec_add(a, load_part(norm->bias + i, size - i, WEIGHT_F32)) : a;
        store_part(to + i, add ? vec_add(load_part(to + i, size - i, WEIGHT_F32), a) : a, size - i, WEIGHT_F32);
    }
}

/* to = the norm of `size` features, or with `add`, to += that; a copy without a norm. `to` can be x. */
TARGET static void norm_row(const struct decoder *model, float *to, const float *x, const struct norm *norm, int64_t size, int add)
{
    if (!norm->weight) {
        if (to != x)
            memcpy(to, x, (size_t)size * sizeof(float));
    } else if (model->centered) {
        layer_norm(to, x, norm, size, model->norm_eps, add);
    } else {
        rms_norm(to, x, norm->weight, size, model->norm_eps, add);
    }
}

INLINE void add_row(float *to, const float *x, int64_t size)
{
    for (int64_t i = 0; i < size; ++i)
        to[i] += x[i];
}

TARGET static void rotate(float *head, const struct layer *layer, int64_t angle)
{
    const int64_t half = layer->rotary_dim / 2;
    const float *cosine = layer->cosine + angle * half, *sine = layer->sine + angle * half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

INLINE uint16_t to_bf16(float x)
{
    const uint32_t bits = bits_of(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- attention ---- */

#define LINE 64 /* bytes of 16 lanes */

/* The location of position p of a sequence: its block, and p % PANEL inside. */
INLINE int64_t block_of(const struct batch *batch, int sequence, int64_t position)
{
    return batch->tables[batch->table_at[sequence] + position / PANEL];
}

/* Normalize and rotate one head of queries or keys in place. number: the head's; angle: a row of cosine and sine. */
TARGET static void turn(const struct decoder *model, const struct layer *layer, float *head, const struct norm *norms, int64_t number,
                        int64_t angle)
{
    const int64_t dim = model->head_dim, at = number * dim;
    if (norms->weight && !model->qk_norm_whole) {
        const struct norm own = {norms->weight + at, norms->bias ? norms->bias + at : NULL};
        norm_row(model, head, head, &own, dim, 0);
    }
    if (layer->cosine)
        rotate(head, layer, angle);
}

/* Normalize and rotate a row's key, in place, and write it and the value to the cache. */
TARGET static void place_key(const struct decoder *model, const struct layer *layer, const struct batch *batch, int64_t row, int sequence,
                             int64_t kv_head)
{
    const int64_t dim = model->head_dim, num_kv = model->num_kv_heads;
    const int64_t position = batch->start[sequence] + row - batch->first_row[sequence];
    float *k = batch->qkv + (row * (model->num_heads + 2 * num_kv) + model->num_heads + kv_head) * dim, *v = k + num_kv * dim;
    turn(model, layer, k, &layer->k_norm, kv_head, batch->turns[sequence] + position);
    const int64_t at = position % PANEL, base = (block_of(batch, sequence, position) * num_kv + kv_head) * dim * PANEL;
    if (model->cache_type == WEIGHT_BF16) {
        uint16_t *keys = (uint16_t *)layer->keys + base + at * 2, *values = (uint16_t *)layer->values + base + at / 2 * dim * 2 + at % 2;
        for (int64_t d = 0; d < dim; ++d) {
            keys[d / 2 * PANEL * 2 + d % 2] = to_bf16(k[d]);
            values[d * 2] = to_bf16(v[d]);
        }
    } else {
        float *keys = (float *)layer->keys + base + at, *values = (float *)layer->values + base + at * dim;
        for (int64_t d = 0; d < dim; ++d) {
            keys[d * PANEL] = k[d];
            values[d] = v[d];
        }
    }
}

/* Up to ROWS queries of one sequence and key-value head. Query i is (row i / group, head i % group of the group). */
struct queries {
    int count, sequence;
    int64_t kv_head;
    float *q; /* [count][head_dim]; with [Note: Pairs], bf16 in the first half of each row */
    float *to[ROWS];
    int64_t first[ROWS], last[ROWS]; /* visible positions, both inclusive */
    int64_t own[ROWS];               /* the query's position */
    float slope[ROWS];
    int64_t from, until; /* the positions that at least one query sees */
};

/* The positions of a range that queries see, and the blocks that hold them. */
struct segment {
    int64_t from, until, blocks;
    int64_t at[2 * RANGE / PANEL]; /* bytes from layer->keys, or layer->values, to these blocks and those of the next range */
};

INLINE struct segment segment_of(const struct decoder *model, const struct batch *batch, const struct queries *queries, int64_t range)
{
    const int64_t size = model->head_dim * PANEL * itemsize(model->cache_type), start = range * RANGE, stop = start + RANGE;
    struct segment segment = {.from = (queries->from > start ? queries->from : start) / PANEL * PANEL,
                              .until = queries->until < stop ? queries->until : stop};
    segment.blocks = (segment.until - segment.from + PANEL - 1) / PANEL;
    for (int64_t i = 0; i < segment.blocks + RANGE / PANEL; ++i) {
        const int64_t position = segment.from + i * PANEL;
        const int64_t block = block_of(batch, queries->sequence, position < queries->until ? position : queries->until - 1);
        segment.at[i] = (block * model->num_kv_heads + queries->kv_head) * size;
    }
    return segment;
}

/* Prefetch into the L2 cache: few lines can be on their way to L1 at once, so further ones would stall. */
INLINE void fetch_further(const char *p) { __builtin_prefetch(p, 0, 2); }

/* [Note: Pairs] A bf16 cache stores numbers in pairs: two features of a key, or one feature of two positions' values. Where the
 * instruction set has dot products of bf16, a pair is one term of a sum; queries and weights are rounded to bf16, and the rounded weights
 * are summed. Elsewhere the two are multiplied in fp32, one after the other. */
INLINE int in_pairs(const int type) { return DOTS_BF16 && type == WEIGHT_BF16; }

/* The numbers of the cache that share a lane of a line. */
INLINE int per_lane(const int type) { return type == WEIGHT_BF16 ? 2 : 1; }

/* Number k of each lane of a line, in fp32. */
INLINE vec load_lane(const int type, const char *line, const int k)
{
    return type == WEIGHT_F32 ? load_f32(line) : k ? load_odd_bf16(line) : load_even_bf16(line);
}

/* The scores of `num` blocks from `block` on. Fetches their values. */
INLINE void score(const int count, const int num, const int type, const struct decoder *model, const struct layer *layer,
                  const struct queries *queries, const struct segment *segment, int64_t block, float scores[][RANGE])
{
    const int64_t dim = model->head_dim;
    const int step = per_lane(type);
    const char *const keys = layer->keys, *const values = layer->values;
    vec sums[ROWS * 4];
    for (int a = 0; a < count * num; ++a)
        sums[a] = vec_zero();
    for (int64_t d = 0, line = 0; d < dim; d += step, line += LINE) {
#if DOTS_BF16
        if (in_pairs(type)) {
            vec pairs[4];
            for (int j = 0; j < num; ++j) {
                fetch_further(values + segment->at[block + j] + line);
                pairs[j] = load_f32(keys + segment->at[block + j] + line);
            }
            for (int i = 0; i < count; ++i)
                for (int j = 0; j < num; ++j)
                    sums[i * num + j] = dot_pairs(sums[i * num + j], pairs[j], (const uint16_t *)(queries->q + i * dim) + d);
            continue;
        }
#endif
        for (int j = 0; j < num; ++j) {
            fetch_further(values + segment->at[block + j] + line);
            for (int k = 0; k < step; ++k) {
                const vec key = load_lane(type, keys + segment->at[block + j] + line, k);
                for (int i = 0; i < count; ++i)
                    sums[i * num + j] = vec_fma(vec_set(queries->q[i * dim + d + k]), key, sums[i * num + j]);
            }
        }
    }
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < num; ++j) {
            const int64_t at = (block + j) * PANEL;
            vec score = vec_mul(sums[i * num + j], vec_set(model->attn_scale));
            if (model->attn_softcap > 0.0f)
                score = vec_mul(vec_set(model->attn_softcap), vec_tanh(vec_div(score, vec_set(model->attn_softcap))));
            if (model->slopes)
                score = vec_fma(vec_set(queries->slope[i]), vec_add(vec_set((float)(segment->from + at - queries->own[i])), lane_numbers()),
                                score);
            store_f32(scores[i] + at, score, 0);
        }
}

INLINE void hide(float *scores, int64_t from, int64_t until, int64_t size, float value)
{
    for (int64_t at = 0; at < from; ++at)
        scores[at] = value;
    for (int64_t at = until; at < size; ++at)
        scores[at] = value;
}

/* A query's scores -> weights, in place: 0 at positions it does not see; `narrow`: as bf16, in the first half. Writes the sum of the
 * weights and the largest score to `sums` (see SUMS). */
TARGET static void weigh(const struct queries *queries, int query, const struct segment *segment, float *scores, int narrow, float *sums)
{
    const int64_t size = segment->blocks * PANEL;
    const int64_t first = queries->first[query] - segment->from, after = queries->last[query] + 1 - segment->from;
    const int64_t from = first < 0 ? 0 : first < size ? first : size, until = after < from ? from : after < size ? after : size;
    vec most = vec_set(MASKED), total = vec_zero();
    hide(scores, from, until, size, MASKED);
    for (int64_t at = 0; at < size; at += PANEL)
        most = vec_max(load_f32(scores + at), most); /* in this order, NaN is not the maximum */
    most = vec_set(lanes_max(most));
    for (int64_t at = 0; at < size; at += PANEL)
        store_f32(scores + at, vec_exp(vec_sub(load_f32(scores + at), most)), 0);
    hide(scores, from, until, size, 0.0f);
    for (int64_t at = 0; at < size; at += PANEL) {
        const vec weight = load_f32(scores + at);
        total = vec_add(total, narrow ? store_bf16((uint16_t *)scores + at, weight, 0) : weight);
    }
    store_f32(sums, total, 0);
    store_f32(sums + PANEL, most, 0);
}

/* Values that a query does not see are left out, rather than multiplied by 0: 0 times NaN would be NaN. */
INLINE int sees(const struct queries *queries, int query, int64_t position)
{
    return position >= queries->first[query] && position <= queries->last[query];
}

/* sums += the weighted values, of `num` vectors, of a block's positions from `at` to `stop`. `all`: every query sees all of them. */
INLINE void mix_block(const int count, const int num, const int type, const int all, const struct queries *queries, int64_t position,
                      int64_t at, int64_t stop, const char *values, const char *next, int64_t width, const float *weights, vec *sums)
{
    const int step = per_lane(type);
    values += at / step * width;
    next += at / step * width;
    for (; at < stop; at += step, values += width, next += width) {
        for (int j = 0; j < num; ++j)
            fetch_further(next + j * LINE);
#if DOTS_BF16
        if (in_pairs(type)) {
            vec pairs[4];
            for (int j = 0; j < num; ++j)
                pairs[j] = load_f32(values + j * LINE);
            for (int i = 0; i < count; ++i) {
                const uint16_t *const pair = (const uint16_t *)(weights + i * RANGE) + at;
                const int first = all || sees(queries, i, position + at), second = all || sees(queries, i, position + at + 1);
                for (int j = 0; j < num && (first || second); ++j)
                    sums[i * num + j] = dot_pairs(sums[i * num + j], all ? pairs[j] : pairs_of(pairs[j], first, second), pair);
            }
            continue;
        }
#endif
        for (int k = 0; k < step && (all || at + k < stop); ++k) {
            vec value[4];
            for (int j = 0; j < num; ++j)
                value[j] = load_lane(type, values + j * LINE, k);
            for (int i = 0; i < count; ++i)
                if (all || sees(queries, i, position + at + k))
                    for (int j = 0; j < num; ++j)
                        sums[i * num + j] = vec_fma(vec_set(weights[i * RANGE + at + k]), value[j], sums[i * num + j]);
        }
    }
}

/* Sum `num` vectors of weighted values, from feature d on, for every query. Prefetches the keys of the next range. */
INLINE void mix(const int count, const int num, const int type, const struct decoder *model, const struct layer *layer,
                const struct queries *queries, const struct segment *segment, int64_t d, const float *weights, float *to)
{
    const int64_t width = model->head_dim * 4; /* bytes of lines */
    const char *const keys = (const char *)layer->keys + d * 4, *const values = (const char *)layer->values + d * 4;
    int64_t low = segment->from, high = segment->until; /* all queries see these */
    vec sums[ROWS * 4];
    for (int i = 0; i < count; ++i) {
        low = queries->first[i] > low ? queries->first[i] : low;
        high = queries->last[i] < high ? queries->last[i] + 1 : high;
        for (int j = 0; j < num; ++j)
            sums[i * num + j] = vec_zero();
    }
    for (int64_t block = 0; block < segment->blocks; ++block, weights += in_pairs(type) ? PANEL / 2 : PANEL) {
        const int64_t position = segment->from + block * PANEL, left = segment->until - position, seen = left < PANEL ? left : PANEL;
        const char *const at = values + segment->at[block], *const next = keys + segment->at[segment->blocks + block];
        const int64_t below = high - position < seen ? high - position : seen;
        const int64_t whole = position < low || below < 0 ? 0 : below - below % per_lane(type);
        mix_block(count, num, type, 1, queries, position, 0, whole, at, next, width, weights, sums);
        mix_block(count, num, type, 0, queries, position, whole, seen, at, next, width, weights, sums);
    }
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < num; ++j)
            store_f32(to + i * SUMS(model->head_dim) + d + j * PANEL, sums[i * num + j], 0);
}

INLINE void sum_range_of(const int count, const int type, const struct decoder *model, const struct layer *layer, const struct batch *batch,
                         const struct queries *queries, int64_t range, float *to)
{
    const int num = WIDE == 4 || count == 1 ? 4 : count == 2 ? 2 : 1; /* vectors whose sums fit the registers */
    const struct segment segment = segment_of(model, batch, queries, range);
    const int64_t dim = model->head_dim;
    float weights[ROWS][RANGE];
    int64_t block = 0, d = 0;
    for (; block + num <= segment.blocks; block += num)
        score(count, num, type, model, layer, queries, &segment, block, weights);
    for (; num > 1 && block < segment.blocks; ++block)
        score(count, 1, type, model, layer, queries, &segment, block, weights);
    for (int i = 0; i < count; ++i)
        weigh(queries, i, &segment, weights[i], in_pairs(type), to + i * SUMS(dim) + dim);
    for (; d + num * PANEL <= dim; d += num * PANEL)
        mix(count, num, type, model, layer, queries, &segment, d, weights[0], to);
    for (; num > 1 && d < dim; d += PANEL)
        mix(count, 1, type, model, layer, queries, &segment, d, weights[0], to);
}

#define SUM_RANGE(COUNT, type) sum_range_of(COUNT, type, model, layer, batch, queries, range, to)

/* The sums over what the queries see of a range. */
TARGET static void sum_range(const struct decoder *model, const struct layer *layer, const struct batch *batch, const struct queries *queries,
                             int64_t range, float *to)
{
    if (model->cache_type == WEIGHT_BF16)
        FOR_ROWS(SUM_RANGE, queries->count, WEIGHT_BF16)
    else
        FOR_ROWS(SUM_RANGE, queries->count, WEIGHT_F32)
}

/* to += the sums over the next range. */
TARGET static void add_sums(float *to, const float *sums, int count, int64_t dim)
{
    for (int i = 0; i < count; ++i, to += SUMS(dim), sums += SUMS(dim)) {
        float *const largest = to + dim + PANEL;
        const float added = sums[dim + PANEL], most = *largest > added ? *largest : added;
        const vec kept = vec_set(exp_of(*largest - most)), taken = vec_set(exp_of(added - most));
        for (int64_t d = 0; d < dim + PANEL; d += PANEL)
            store_f32(to + d, vec_fma(load_f32(sums + d), taken, vec_mul(load_f32(to + d), kept)), 0);
        *largest = most;
    }
}

/* Whether the item that reads a row's range writes its key to the cache: if every sequence has one row, no other tile needs that key. */
INLINE int placed_when_attended(const struct decoder *model, const struct batch *batch)
{
    return batch->num_rows == batch->num_sequences && model->num_heads / model->num_kv_heads <= ROWS;
}

/* The queries of a tile, normalized and rotated, in `q`. */
TARGET static struct queries queries_of(const struct decoder *model, const struct layer *layer, const struct batch *batch, int sequence,
                                        int64_t kv_head, int64_t tile, float *q)
{
    const int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads, at = tile * ROWS;
    const int64_t row = batch->first_row[sequence], rows = batch->first_row[sequence + 1] - row;
    const struct part to = model->latent_rank ? (struct part){batch->mixed, model->num_heads * dim}
                                              : part_of(model, batch, &layer->out, batch->attended, model->attended_size,
                                                        model->first_attended, model->num_heads * dim);
    struct queries queries = {.count = (int)(rows * group - at < ROWS ? rows * group - at : ROWS), .sequence = sequence,
                              .kv_head = kv_head, .q = q, .from = INT64_MAX};
    for (int i = 0; i < queries.count; ++i, q += dim) {
        const int64_t r = (at + i) / group, head = kv_head * group + (at + i) % group, own = batch->start[sequence] + r;
        memcpy(q, batch->qkv + ((row + r) * (model->num_heads + 2 * model->num_kv_heads) + head) * dim, (size_t)dim * sizeof(float));
        turn(model, layer, q, &layer->q_norm, head, batch->turns[sequence] + own);
        queries.to[i] = to.first + (row + r) * to.stride + head * dim;
        queries.own[i] = own;
        queries.last[i] = model->both_ways ? batch->start[sequence] + rows - 1 : own;
        queries.first[i] = layer->window && own >= layer->window ? own - layer->window + 1 : 0;
        if (layer->window && queries.last[i] >= own + layer->window)
            queries.last[i] = own + layer->window - 1;
        for (int64_t d = 0; d < dim && in_pairs(model->cache_type); d += PANEL)
            store_bf16((uint16_t *)q + d, load_f32(q + d), 0);
        queries.slope[i] = model->slopes ? model->slopes[head] : 0.0f;
        queries.from = queries.first[i] < queries.from ? queries.first[i] : queries.from;
        queries.until = queries.last[i] >= queries.until ? queries.last[i] + 1 : queries.until;
    }
    return queries;
}

/* An item is a (sequence, key-value head, tile of queries), or one of its ranges: see [Note: Ranges]. Where ranges are items, the thread
 * that ends the last one of a tile adds them. */
TARGET static void attention(const struct decoder *model, const struct layer *layer, const struct batch *batch, struct worker *worker)
{
    const int stage = worker->stage++, placed = placed_when_attended(model, batch);
    const int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t most = most_together(model, layer, batch, team_size(worker->team));
    float *const sums = worker->scratch, *const one = sums + ROWS * SUMS(dim), *const q = one + ROWS * SUMS(dim);
    int64_t total = 0, before = 0, slots = 0; /* all items; those of the sequences before `sequence`; those of these that are ranges */
    int sequence = 0;
    for (int each = 0; each < batch->num_sequences; ++each)
        total += items_of(model, layer, batch, each, most);
    for (int64_t item; (item = team_next(worker->team, stage, worker->thread, total)) < total;) {
        if (item < before)
            sequence = 0, before = slots = 0;
        for (int64_t items; item >= before + (items = items_of(model, layer, batch, sequence, most)); ++sequence) {
            before += items;
            slots += ranges_of(layer, batch, sequence) > most ? items : 0;
        }
        const int64_t ranges = ranges_of(layer, batch, sequence), parts = ranges > most ? ranges : 1;
        const int64_t tiles = tiles_of(batch, sequence, group), tile = (item - before) % tiles;
        const int64_t number = (item - before) / tiles % parts, kv_head = (item - before) / tiles / parts;
        const int64_t range = first_range(layer, batch, sequence) + number, slot = slots + kv_head * parts * tiles + tile;
        const struct queries queries = queries_of(model, layer, batch, sequence, kv_head, tile, q);
        const int64_t from = queries.from / RANGE, last = (queries.until - 1) / RANGE;
        if (placed && number == parts - 1)
            place_key(model, layer, batch, batch->first_row[sequence], sequence, kv_head);
        if (parts > 1) {
            if (range >= from && range <= last)
                sum_range(model, layer, batch, &queries, range, team_sums(worker->team, slot + number * tiles));
            if (!team_ends(worker->team, slot, parts))
                continue;
        }
        for (int i = 0; i < queries.count; ++i) {
            memset(sums + i * SUMS(dim), 0, (size_t)SUMS(dim) * sizeof(float));
            sums[i * SUMS(dim) + dim + PANEL] = MASKED;
        }
        for (int64_t each = from; each <= last; ++each) {
            if (parts == 1)
                sum_range(model, layer, batch, &queries, each, one);
            add_sums(sums, parts == 1 ? one : team_sums(worker->team, slot + (number + each - range) * tiles), queries.count, dim);
        }
        for (int i = 0; i < queries.count; ++i) {
            const float *const of = sums + i * SUMS(dim);
            const vec factor = vec_set(1.0f / lanes_sum(load_f32(of + dim)));
            for (int64_t d = 0; d < dim; d += PANEL)
                store_f32(queries.to[i] + d, vec_mul(load_f32(of + d), factor), 0);
        }
    }
}

#endif
