/* The forward, written once over 16 fp32 lanes. See decoder.h for the order of every sum. */
#include "decoder.h"
#include "isa.h"

#if KNOWN
#include "decoder_products.h"

#include "decoder_attention.h"
#include "decoder_embed.h"
#include "sample_body.h"

/* ---- rows of a thread ---- */

INLINE void share(struct worker *worker, int64_t rows)
{
    worker->from = rows * worker->thread / team_size(worker->team);
    worker->until = rows * (worker->thread + 1) / team_size(worker->team);
}

INLINE void meet(struct worker *worker) { team_wait(worker->team, &worker->ahead); }

/* Normalize this thread's rows of x into `to`. */
TARGET static void norm_rows(const struct decoder *model, float *to, const float *x, const struct norm *norm, const struct worker *worker, int add)
{
    for (int64_t row = worker->from; row < worker->until; ++row)
        norm_row(model, to + row * model->hidden_size, x + row * model->hidden_size, norm, model->hidden_size, add);
}

/* Convert this thread's rows of x, of `size` features, to the products' input type; other threads read them after a barrier. */
TARGET static struct coded code_rows(const struct batch *batch, const float *x, int64_t size, int wanted, const struct worker *worker)
{
    for (int64_t row = worker->from; row < worker->until && wanted; ++row) {
        const struct coded to = coded_at(&batch->inputs, row, size);
        code_row(x + row * size, size, wanted, &to);
    }
    return coded_at(&batch->inputs, 0, size);
}

/* Compute scale A x for the rows that have adapters, before these products; ends with a barrier. */
TARGET static void shrink(const struct product *jobs, int num_jobs, struct worker *worker)
{
    const struct batch *batch = jobs->low.batch;
    if (!batch)
        return;
    const struct product *of[LOW_PLACES];
    int at[LOW_PLACES], num = 0;
    for (int a = 0; a < num_jobs; ++a)
        for (int i = 0; i <= (jobs[a].epilogue == GATED); ++i, ++num) {
            of[num] = &jobs[a];
            at[num] = jobs[a].low.at + i;
        }
    const int stage = worker->stage++;
    const int64_t parts = batch->low_size / PANEL, total = num * parts * batch->num_tiles;
    for (int64_t item; (item = team_next(worker->team, stage, worker->thread, total)) < total;) {
        const int64_t tile = item % batch->num_tiles, a = item / batch->num_tiles / parts, panel = item / batch->num_tiles % parts;
        const int row = batch->low_tiles[tile], rows = batch->low_tiles[tile + 1] - row;
        const struct low_rank *term = batch->adapters[row] ? batch->adapters[row] + at[a] : 0;
        float sums[4][ROWS][PANEL];
        if (!term || panel * PANEL >= term->a.num_columns)
            continue;
        multiply_numbers(term->a.type, rows, 1, panels_of(&term->a, panel), rows_of(of[a], row), sums);
        for (int i = 0; i < rows; ++i) {
            float *to = low_row(batch, row + i, at[a]);
            const vec low = vec_mul(vec_set(term->scale), load_f32(sums[0][i]));
            if (wants(&term->b))
                store_bf16((uint16_t *)to + panel * PANEL, low, 0);
            else
                store_f32(to + panel * PANEL, low, 0);
        }
    }
    meet(worker);
}

/* A barrier of the threads of all processes; after it, every process has all rows. Between hosts, the processes' rows are added, so each
 * must hold 0 where another process computes. */
TARGET static void meet_ranks(struct ranks *ranks, float *rows, int64_t count, struct worker *worker)
{
    if (worker->thread == 0 && ranks->arrived)
        ranks_meet(ranks, &worker->ahead);
    else if (worker->thread == 0 && !ranks->lost && ranks->exchange(rows, count))
        ranks->lost = 1;
    meet(worker);
}

/* Convert this process's columns of this thread's rows to the input type of `w`, which multiplies rows of `size` features. */
TARGET static void code_columns(const struct batch *batch, const struct matrix *w, struct part from, int64_t size, int64_t first,
                                int64_t columns, const struct worker *worker)
{
    for (int64_t row = worker->from; row < worker->until; ++row) {
        struct coded to = coded_at(&batch->shared, row, size);
        to.codes += first;
        to.halves += first;
        to.scales += first / CODES;
        to.sums += first / CODES;
        to.starts += first / CODES * 2;
        code_row(from.first + row * from.stride, columns, wants(w), &to);
    }
}

/* A barrier, after which every process has whole rows of the shared `rows`, [num_rows][size], of which this process has computed
 * `columns` from `first` on. */
TARGET static void complete(const struct decoder *model, const struct batch *batch, float *rows, int64_t num_rows, int64_t size, int64_t first,
                          int64_t columns, struct worker *worker)
{
    const int64_t last = first + columns, threads = team_size(worker->team);
    if (batch->added && !model->ranks->arrived)
        for (int64_t row = num_rows * worker->thread / threads; row < num_rows * (worker->thread + 1) / threads; ++row) {
            memset(rows + row * size, 0, (size_t)first * sizeof(float));
            memset(rows + row * size + last, 0, (size_t)(size - last) * sizeof(float));
        }
    meet(worker);
    if (batch->added)
        meet_ranks(model->ranks, rows, num_rows * size, worker);
}

/* The same for the inputs of `w`; with own_codes, each process first converts its own columns to the input type of `w`. */
TARGET static void complete_inputs(const struct decoder *model, const struct batch *batch, const struct matrix *w, float *rows, int64_t size,
                                   int64_t first, int64_t columns, struct worker *worker)
{
    if (model->own_codes && wants(w)) {
        meet(worker);
        code_columns(batch, w, part_of(model, batch, w, rows, size, first, columns), size, first, columns, worker);
    }
    complete(model, batch, rows, batch->num_rows, size, first, columns, worker);
}

/* x += W y, or x += norm(W y) after a barrier if the layer has a norm there; with RESIDUAL_AFTER, x = norm(x + W y). */
TARGET static void residual(const struct decoder *model, const struct batch *batch, const struct matrix *w, const float *y, int64_t size,
                            struct low_terms low, const struct norm *post_norm, struct worker *worker)
{
    const int apart = batch->added || (post_norm->weight && model->residual != RESIDUAL_AFTER), wanted = wants(w) | low_wants(batch);
    float *const to = batch->added ? batch->added : apart ? batch->normed : batch->x;
    struct product job = {.w = w, .x = y, .y = to + model->first_hidden, .x_stride = size, .y_stride = model->hidden_size,
                          .num_rows = batch->num_rows, .epilogue = apart ? STORE : ADD, .scale = model->residual_scale, .low = low};
    if (model->own_codes) {
        job.coded = coded_at(&batch->shared, 0, size);
    } else if (wanted) {
        job.coded = code_rows(batch, y, size, wanted, worker);
        meet(worker);
    }
    shrink(&job, 1, worker);
    multiply(&job, 1, worker);
}

TARGET static void settle(const struct decoder *model, const struct batch *batch, const struct matrix *w, const struct norm *post_norm,
                          struct worker *worker)
{
    const int64_t hidden = model->hidden_size;
    const int apart = post_norm->weight && model->residual != RESIDUAL_AFTER;
    complete(model, batch, batch->added, batch->num_rows, hidden, model->first_hidden, w->num_columns, worker);
    if (batch->added && !apart)
        add_row(batch->x + worker->from * hidden, batch->added + worker->from * hidden, (worker->until - worker->from) * hidden);
    if (apart)
        norm_rows(model, batch->x, batch->added ? batch->added : batch->normed, post_norm, worker, 1);
    else if (post_norm->weight)
        norm_rows(model, batch->x, batch->x, post_norm, worker, 0);
}

/* ---- experts ---- */

#define DOTS 4 /* rows of the router whose products with x are computed together, in four streams */

/* out[j] = w[j] . x, in sums of 16 lanes. */
INLINE void dots(const float *const w[DOTS], const float *x, int64_t size, float out[DOTS])
{
    const int64_t whole = size / 16 * 16;
    float last[16] = {0}, lasts[DOTS][16] = {{0}};
    vec sums[DOTS];
    for (int j = 0; j < DOTS; ++j) {
        sums[j] = vec_zero();
        memcpy(lasts[j], w[j] + whole, (size_t)(size - whole) * sizeof(float));
    }
    memcpy(last, x + whole, (size_t)(size - whole) * sizeof(float));
    for (int64_t d = 0; d < whole; d += 16)
        for (int j = 0; j < DOTS; ++j) {
            fetch((const char *)(w[j] + d) + FETCH_AHEAD);
            sums[j] = vec_fma(load_f32(x + d), load_f32(w[j] + d), sums[j]);
        }
    for (int j = 0; j < DOTS; ++j)
        out[j] = lanes_sum(vec_fma(load_f32(last), load_f32(lasts[j]), sums[j]));
}

/* scores = W normed, in dot products of 16 lanes: as panels, few experts would be work for one thread. */
TARGET static void score_experts(const struct experts *experts, const struct batch *batch, int64_t hidden, struct worker *worker)
{
    const int stage = worker->stage++;
    const int64_t parts = (experts->num + DOTS - 1) / DOTS, total = batch->num_rows * parts;
    for (int64_t item; (item = team_next(worker->team, stage, worker->thread, total)) < total;) {
        const int64_t row = item / parts, first = item % parts * DOTS;
        const float *w[DOTS];
        float scores[DOTS];
        for (int j = 0; j < DOTS; ++j)
            w[j] = experts->router + (first + j < experts->num ? first + j : experts->num - 1) * hidden;
        dots(w, batch->normed + row * hidden, hidden, scores);
        for (int j = 0; j < DOTS && first + j < experts->num; ++j)
            batch->routing.scores[row * experts->num + first + j] = scores[j];
    }
}

/* The index of the largest of values that is not taken; of equal ones the lower index. */
INLINE int best_of(const float *values, const char *taken, int num)
{
    int best = -1;
    for (int e = 0; e < num; ++e)
        if (!taken[e] && (best < 0 || values[e] > values[best]))
            best = e;
    return best;
}

/* Mark the experts of all but the best groups as taken. */
TARGET static void close_groups(const struct experts *experts, const float *values, char *taken)
{
    const int num = experts->num_groups, size = experts->num / num;
    float of_group[MAX_EXPERTS];
    char open[MAX_EXPERTS] = {0};
    for (int g = 0; g < num; ++g) {
        char seen[MAX_EXPERTS] = {0};
        of_group[g] = 0.0f;
        for (int i = 0; i < (experts->by_sigmoid && size > 1 ? 2 : 1); ++i) {
            const int best = best_of(values + g * size, seen, size);
            seen[best] = 1;
            of_group[g] += values[g * size + best];
        }
    }
    for (int i = 0; i < experts->top_groups; ++i)
        open[best_of(of_group, open, num)] = 1;
    for (int e = 0; e < experts->num; ++e)
        taken[e] = !open[e / size];
}

/* The top_k of the experts and their weights. */
TARGET static void choose_experts(const struct experts *experts, const float *scores, float *shares, int32_t *chosen)
{
    float most = scores[0], total = 0.0f, kept = 0.0f, values[MAX_EXPERTS];
    char taken[MAX_EXPERTS] = {0};
    for (int e = 1; e < experts->num; ++e)
        most = scores[e] > most ? scores[e] : most;
    for (int e = 0; e < experts->num; ++e) {
        total += expf(scores[e] - most);
        values[e] = (experts->by_sigmoid ? 1.0f / (1.0f + expf(-scores[e])) : scores[e]) + (experts->bias ? experts->bias[e] : 0.0f);
    }
    if (experts->num_groups > 1)
        close_groups(experts, values, taken);
    for (int i = 0; i < experts->top_k; ++i) {
        const int best = best_of(values, taken, experts->num);
        taken[best] = 1;
        chosen[i] = best;
        kept += shares[i] = experts->by_sigmoid ? 1.0f / (1.0f + expf(-scores[best])) : expf(scores[best] - most) / total;
    }
    for (int i = 0; i < experts->top_k && experts->normalize; ++i)
        shares[i] /= kept;
    for (int i = 0; i < experts->top_k && experts->scale != 1.0f; ++i)
        shares[i] *= experts->scale;
}

/* Compute the start of every list and the places of every row. */
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

/* One product for each list: x and y have a row per place. If the matrices are quantized, the inputs are first. inner: x holds the
 * experts' inner features, which may be fewer than x's stride. */
TARGET static void multiply_lists(const struct experts *experts, const struct batch *batch, const struct matrix *w, struct product form,
                                  int inner, struct worker *worker)
{
    const int32_t *first_column = inner ? experts->first_out : experts->first_inner;
    const int lists = experts->num + experts->has_shared;
    const int32_t *first = batch->routing.first;
    struct product jobs[MAX_EXPERTS];
    int wanted = 0;
    for (int e = 0; e < lists; ++e) {
        jobs[e] = form;
        jobs[e].w = &w[e];
        jobs[e].x += first[e] * form.x_stride;
        jobs[e].y += first[e] * form.y_stride + first_column[e];
        jobs[e].coded = coded_at(&batch->inputs, first[e], form.x_stride);
        jobs[e].num_rows = first[e + 1] - first[e];
        wanted |= wants(&w[e]);
    }
    for (int e = 0; e < lists && wanted; ++e) {
        const int64_t rows = w[e].num_columns ? jobs[e].num_rows : 0, threads = team_size(worker->team);
        const int64_t size = !inner ? form.x_stride : e < experts->num ? experts->inner_size : experts->shared_size;
        for (int64_t row = rows * worker->thread / threads; row < rows * (worker->thread + 1) / threads; ++row) {
            const struct coded to = coded_at(&batch->inputs, first[e] + row, form.x_stride);
            code_row(jobs[e].x + row * form.x_stride, size, wanted, &to);
        }
    }
    if (wanted)
        meet(worker);
    multiply(jobs, lists, worker);
    meet(worker);
}

/* Announce the products that follow a layer. */
TARGET static void expect_next(const struct decoder *model, int index, const struct batch *batch, struct worker *worker)
{
    const struct layer *next = &model->layers[index + 1];
    if (index + 1 == batch->until_layer && index + 1 < model->num_layers)
        return; /* the expert may be on its way from a disk */
    if (index + 1 < model->num_layers && model->latent_rank)
        expect((const struct matrix *const[]){&next->latent, model->q_latent_rank ? &next->q_latent : &next->q}, 2, batch->num_rows, worker);
    else if (index + 1 < model->num_layers)
        expect((const struct matrix *const[]){&next->q, &next->k, &next->v}, 3, batch->num_rows, worker);
    else
        expect((const struct matrix *const[]){&model->head}, 1, batch->num_logits, worker);
}

/* x += the weighted outputs of the experts, whose inputs are the normalized rows. */
TARGET static void routed(const struct decoder *model, int layer, const struct batch *batch, struct worker *worker)
{
    const struct experts *experts = model->layers[layer].experts;
    struct ranks *ranks = model->ranks;
    const int64_t hidden = model->hidden_size, top_k = experts->top_k, copies = top_k + experts->has_shared;
    const struct routing *routing = &batch->routing;
    const int64_t places = batch->num_rows * copies;
    float *out = routing->out + (ranks ? ranks->turn % 2 * ranks->turn_size : 0);
    const struct product gated = {.x = routing->gathered, .y = routing->act, .x_stride = hidden, .y_stride = experts->widest,
                                  .epilogue = GATED, .activation = model->activation};
    const struct product down = {.x = routing->act, .y = out, .x_stride = experts->widest, .y_stride = hidden};
    score_experts(experts, batch, hidden, worker);
    meet(worker);
    for (int64_t row = worker->from; row < worker->until; ++row)
        choose_experts(experts, routing->scores + row * experts->num, routing->shares + row * top_k, routing->chosen + row * top_k);
    meet(worker);
    if (worker->thread == 0)
        make_lists(experts, routing, batch->num_rows);
    if (worker->thread == 0 && experts->store)
        store_claim(experts, routing);
    meet(worker);
    if (experts->store)
        store_read(experts, worker->thread, team_size(worker->team));
    for (int64_t row = worker->from; row < worker->until; ++row)
        for (int64_t i = 0; i < copies; ++i)
            if (experts->gate_up[i < top_k ? routing->chosen[row * top_k + i] : experts->num].num_columns)
                memcpy(routing->gathered + routing->place[row * (top_k + 1) + i] * hidden, batch->normed + row * hidden,
                       (size_t)hidden * sizeof(float));
    if (ranks && !ranks->arrived) {
        memset(routing->act + worker->from * copies * experts->widest, 0,
               (size_t)((worker->until - worker->from) * copies * experts->widest) * sizeof(float));
        memset(out + worker->from * copies * hidden, 0, (size_t)((worker->until - worker->from) * copies * hidden) * sizeof(float));
    }
    meet(worker);
    multiply_lists(experts, batch, experts->gate_up, gated, 0, worker);
    if (ranks && experts->is_cut)
        meet_ranks(ranks, routing->act, places * experts->widest, worker);
    multiply_lists(experts, batch, experts->down, down, 1, worker);
    expect_next(model, layer, batch, worker);
    if (ranks) {
        meet_ranks(ranks, out, places * hidden, worker);
        if (worker->thread == 0)
            ++ranks->turn; /* read by all threads in the next routed layer, after barriers */
    }
    for (int64_t row = worker->from; row < worker->until; ++row) {
        float *x = batch->x + row * hidden;
        const int32_t *place = routing->place + row * (top_k + 1);
        float open = 1.0f;
        if (experts->has_shared && experts->shared_gate) {
            open = 0.0f;
            for (int64_t d = 0; d < hidden; ++d)
                open += batch->normed[row * hidden + d] * experts->shared_gate[d];
            open = 1.0f / (1.0f + expf(-open));
        }
        for (int64_t d = 0; d < hidden; ++d) {
            float sum = experts->has_shared ? open * out[place[top_k] * hidden + d] : 0.0f;
            for (int64_t i = 0; i < top_k; ++i)
                sum += routing->shares[row * top_k + i] * out[place[i] * hidden + d];
            x[d] += sum;
        }
    }
}

/* ---- the model ---- */

/* x = W normed for the first num_rows rows, from `from` features to `to`. Begins and ends with a barrier. */
TARGET static void resize(const struct batch *batch, const struct matrix *w, int32_t num_rows, int64_t from, int64_t to, struct worker *worker)
{
    struct product job = {.w = w, .x = batch->normed, .y = batch->x, .x_stride = from, .y_stride = to, .num_rows = num_rows};
    job.coded = code_rows(batch, batch->normed, from, wants(w), worker);
    meet(worker);
    multiply(&job, 1, worker);
    meet(worker);
}

/* What is added to a row's embedding for its position. */
INLINE const float *position_of(const struct decoder *model, const struct batch *batch, int row, int sequence, int64_t size)
{
    return model->positions + (batch->start[sequence] + row - batch->first_row[sequence]) * size;
}

/* Embed this thread's rows, and add positions and token types. If matrices are cut, the process that has a token's row embeds it. */
TARGET static void embed(const struct decoder *model, const struct batch *batch, struct worker *worker)
{
    const int64_t hidden = model->hidden_size, size = model->embed_size, resized = model->embed_in.num_columns;
    float *const embedded = resized ? batch->normed : batch->x, *const rows = batch->added ? batch->added : embedded;
    for (int sequence = 0, row = (int)worker->from; row < worker->until; ++row) {
        float *x = rows + row * size;
        const int64_t id = batch->ids[row] - model->first_token;
        while (row >= batch->first_row[sequence + 1])
            ++sequence;
        if (batch->added && (id < 0 || id >= model->num_tokens)) {
            if (!model->ranks->arrived)
                memset(x, 0, (size_t)size * sizeof(float));
            continue;
        }
        embed_row(model, id, x);
        if (model->token_types)
            add_row(x, model->token_types + (batch->types ? batch->types[row] : 0) * size, size);
        if (model->positions && !model->late_positions)
            add_row(x, position_of(model, batch, row, sequence, size), size);
        norm_row(model, x, x, &model->embed_norm, size, 0);
    }
    if (batch->added) {
        complete(model, batch, batch->added, batch->num_rows, size, 0, size, worker);
        memcpy(embedded + worker->from * size, batch->added + worker->from * size,
               (size_t)((worker->until - worker->from) * size) * sizeof(float));
    }
    if (resized)
        resize(batch, &model->embed_in, batch->num_rows, size, hidden, worker);
    for (int sequence = 0, row = (int)worker->from; row < worker->until && model->late_positions; ++row) {
        while (row >= batch->first_row[sequence + 1])
            ++sequence;
        add_row(batch->x + row * hidden, position_of(model, batch, row, sequence, hidden), hidden);
    }
}

/* ---- latent attention [DeepSeek-AI 2024, arXiv:2405.04434, 2.1] ----
 * A position's keys and values are products of one latent c: W_k c and W_v c for each head. q . (W_k c) = (W_k^T q) . c, and the weighted
 * sum of the W_v c is W_v times the weighted sum of the c. So all heads attend to one key-value head, the latents, which the cache has. */

/* One product for each head, of `size` features of x. In x and y the heads are x_step and y_step features apart. */
TARGET static void multiply_heads(const struct decoder *model, const struct batch *batch, const struct matrix *w, const struct product form,
                                  int64_t size, int64_t x_step, int64_t y_step, struct worker *worker)
{
    const int64_t heads = model->num_heads, rows = batch->num_rows;
    struct product jobs[MAX_EXPERTS];
    for (int64_t head = 0; head < heads; ++head) {
        jobs[head] = form;
        jobs[head].w = w + head;
        jobs[head].x += head * x_step;
        jobs[head].y += head * y_step;
        jobs[head].num_rows = (int32_t)rows;
        jobs[head].coded = coded_at(&batch->inputs, head * rows, size);
    }
    for (int64_t row = worker->from; row < worker->until && wants(w); ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const struct coded to = coded_at(&batch->inputs, head * rows + row, size);
            code_row(jobs[head].x + row * form.x_stride, size, wants(w), &to);
        }
    meet(worker);
    multiply(jobs, (int)heads, worker);
}

/* Compute queries and latent keys from the normalized rows, whose codes are `coded`. Ends with a barrier. */
TARGET static void project_latents(const struct decoder *model, const struct layer *layer, const struct batch *batch, struct coded coded,
                                   struct worker *worker)
{
    const int64_t dim = model->head_dim, heads = model->num_heads, rank = model->latent_rank, q_rank = model->q_latent_rank;
    const int64_t turned = layer->rotary_dim, narrow = model->plain_dim + turned, width = (heads + 2) * dim;
    float *const keys = batch->qkv + heads * dim;
    struct product first[2] = {{.w = &layer->latent, .x = batch->normed, .coded = coded, .y = keys, .x_stride = model->hidden_size,
                                .y_stride = width, .num_rows = batch->num_rows}};
    struct product q = {.w = &layer->q, .x = batch->low_q, .y = batch->narrow, .x_stride = q_rank, .y_stride = heads * narrow,
                        .num_rows = batch->num_rows};
    first[1] = first[0];
    first[1].w = q_rank ? &layer->q_latent : &layer->q;
    first[1].y = q_rank ? batch->low_q : batch->narrow;
    first[1].y_stride = q_rank ? q_rank : heads * narrow;
    multiply(first, 2, worker);
    expect((const struct matrix *const[]){q_rank ? &layer->q : layer->k_heads}, 1, batch->num_rows, worker);
    meet(worker);
    for (int64_t row = worker->from; row < worker->until; ++row) {
        float *const key = keys + row * width, *const low = batch->low_q + row * q_rank;
        rms_norm(key + turned, key + turned, layer->latent_norm, rank, model->latent_eps, 0);
        memcpy(key + dim, key, (size_t)dim * sizeof(float)); /* the value; its first features are not used */
        if (q_rank)
            rms_norm(low, low, layer->q_latent_norm, q_rank, model->latent_eps, 0);
    }
    if (q_rank) {
        q.coded = code_rows(batch, batch->low_q, q_rank, wants(q.w), worker);
        meet(worker);
        multiply(&q, 1, worker);
        meet(worker);
    }
    for (int64_t row = worker->from; row < worker->until; ++row)
        for (int64_t head = 0; head < heads; ++head)
            memcpy(batch->qkv + row * width + head * dim, batch->narrow + (row * heads + head) * narrow, (size_t)turned * sizeof(float));
    const struct product form = {.x = batch->narrow + turned, .y = batch->qkv + turned, .x_stride = heads * narrow, .y_stride = width};
    multiply_heads(model, batch, layer->k_heads, form, model->plain_dim, narrow, dim, worker);
    expect((const struct matrix *const[]){layer->v_heads}, 1, batch->num_rows, worker);
    meet(worker);
}

/* Normalize the queries over all heads together, and so the keys. Ends with a barrier. */
TARGET static void norm_whole(const struct decoder *model, const struct layer *layer, const struct batch *batch, struct worker *worker)
{
    const int64_t dim = model->head_dim, all_q = model->attended_size, all_k = model->keys_size;
    const int64_t q_width = model->num_heads * dim, kv_width = model->num_kv_heads * dim, width = q_width + 2 * kv_width;
    if (batch->added) { /* if several processes have a key, only the first of them adds it */
        const int64_t own = model->first_attended % (all_q / all_k * dim) ? 0 : kv_width;
        for (int64_t row = worker->from; row < worker->until; ++row) {
            memcpy(batch->all_q + row * all_q + model->first_attended, batch->qkv + row * width, (size_t)q_width * sizeof(float));
            memcpy(batch->all_k + row * all_k + model->first_key, batch->qkv + row * width + q_width, (size_t)kv_width * sizeof(float));
        }
        complete(model, batch, batch->all_q, batch->num_rows, all_q, model->first_attended, q_width, worker);
        complete(model, batch, batch->all_k, batch->num_rows, all_k, model->first_key, own, worker);
    }
    for (int64_t row = worker->from; row < worker->until; ++row) {
        float *q = batch->qkv + row * width, *k = q + q_width;
        const float *of_q = batch->added ? batch->all_q + row * all_q : q, *of_k = batch->added ? batch->all_k + row * all_k : k;
        scale_row(q, q, layer->q_norm.weight, q_width, rms_factor(of_q, all_q, model->norm_eps), 0);
        scale_row(k, k, layer->k_norm.weight, kv_width, rms_factor(of_k, all_k, model->norm_eps), 0);
    }
    meet(worker);
}

TARGET static void run(const struct decoder *model, const struct batch *batch, struct team *team, int thread, float *scratch)
{
    const int64_t hidden = model->hidden_size, dim = model->head_dim;
    const int64_t q_width = model->num_heads * dim, kv_width = model->num_kv_heads * dim, width = q_width + 2 * kv_width;
    const int64_t inner = model->intermediate_size, attended = model->attended_size, values = model->num_heads * model->value_dim;
    struct worker self = {.team = team, .thread = thread, .scratch = scratch}, *const worker = &self;
    share(worker, batch->num_rows);
    if (!batch->first_layer)
        embed(model, batch, worker);
    for (int index = batch->first_layer; index < batch->until_layer; ++index) {
        const struct layer *layer = &model->layers[index];
        const struct matrix *const w[] = {&layer->q, &layer->k, &layer->v};
        float *const y[] = {batch->qkv, batch->qkv + q_width, batch->qkv + q_width + kv_width};
        struct product qkv[4];
        const int64_t columns = layer->gate_up.num_columns / (model->plain ? 1 : 2);
        const struct part act = part_of(model, batch, &layer->down, batch->act, inner, model->first_inner, columns);
        struct product gated = {.w = &layer->gate_up, .x = batch->normed, .y = act.first,
                                .x_stride = hidden, .y_stride = act.stride, .num_rows = batch->num_rows,
                                .epilogue = model->plain ? ACTIVATED : GATED, .activation = model->activation,
                                .low = low_of(batch, index, model->plain ? LOW_UP : LOW_GATE)};
        const int parallel = model->residual == RESIDUAL_PARALLEL, joined = parallel && !layer->mlp_norm.weight;
        norm_rows(model, batch->normed, batch->x, &layer->input_norm, worker, 0);
        const int of_keys = model->latent_rank ? wants(&layer->latent) : wants(w[1]) | wants(w[2]);
        const int wanted = wants(w[0]) | of_keys | (joined ? wants(gated.w) : 0) | low_wants(batch);
        const struct coded coded = code_rows(batch, batch->normed, hidden, wanted, worker);
        for (int i = 0; i < 3; ++i)
            qkv[i] = (struct product){.w = w[i], .x = batch->normed, .coded = coded, .y = y[i], .x_stride = hidden, .y_stride = width,
                                      .num_rows = batch->num_rows, .low = low_of(batch, index, LOW_Q + i)};
        gated.coded = coded;
        qkv[3] = gated;
        meet(worker);
        if (model->latent_rank) {
            project_latents(model, layer, batch, coded, worker);
        } else {
            shrink(qkv, 3 + joined, worker);
            multiply(qkv, 3 + joined, worker);
            expect((const struct matrix *const[]){&layer->out}, 1, batch->num_rows, worker);
            meet(worker);
        }
        if (parallel && !joined) { /* before attention, which changes x */
            norm_rows(model, batch->normed, batch->x, &layer->mlp_norm, worker, 0);
            gated.coded = code_rows(batch, batch->normed, hidden, wants(gated.w) | low_wants(batch), worker);
            meet(worker);
            shrink(&gated, 1, worker);
            multiply(&gated, 1, worker);
        }
        if (model->qk_norm_whole)
            norm_whole(model, layer, batch, worker);
        if (!placed_when_attended(model, batch)) {
            for (int sequence = 0, row = (int)worker->from; row < worker->until; ++row) {
                while (row >= batch->first_row[sequence + 1])
                    ++sequence;
                for (int64_t kv_head = 0; kv_head < model->num_kv_heads; ++kv_head)
                    place_key(model, layer, batch, row, sequence, kv_head);
            }
            meet(worker);
        }
        attention(model, layer, batch, worker);
        if (model->latent_rank) {
            const struct part to = part_of(model, batch, &layer->out, batch->attended, attended, model->first_attended, values);
            const struct product form = {.x = batch->mixed + layer->rotary_dim, .y = to.first, .x_stride = q_width, .y_stride = to.stride};
            meet(worker);
            multiply_heads(model, batch, layer->v_heads, form, model->latent_rank, dim, model->value_dim, worker);
        }
        complete_inputs(model, batch, &layer->out, batch->attended, attended, model->first_attended, values, worker);
        residual(model, batch, &layer->out, batch->attended, attended, low_of(batch, index, LOW_OUT), &layer->attn_post_norm, worker);
        if (!layer->experts)
            expect((const struct matrix *const[]){parallel ? &layer->down : &layer->gate_up}, 1, batch->num_rows, worker);
        settle(model, batch, &layer->out, &layer->attn_post_norm, worker);
        if (parallel && batch->added) /* here, so that all have read `added` */
            complete_inputs(model, batch, &layer->down, batch->act, inner, model->first_inner, columns, worker);
        if (!parallel) {
            norm_rows(model, batch->normed, batch->x, &layer->mlp_norm, worker, 0);
            if (layer->experts) {
                meet(worker);
                routed(model, index, batch, worker);
                continue;
            }
            gated.coded = code_rows(batch, batch->normed, hidden, wants(gated.w) | low_wants(batch), worker);
            meet(worker);
            shrink(&gated, 1, worker);
            multiply(&gated, 1, worker);
            expect((const struct matrix *const[]){&layer->down}, 1, batch->num_rows, worker);
            complete_inputs(model, batch, &layer->down, batch->act, inner, model->first_inner, columns, worker);
        }
        residual(model, batch, &layer->down, batch->act, inner, low_of(batch, index, LOW_DOWN), &layer->mlp_post_norm, worker);
        expect_next(model, index, batch, worker);
        settle(model, batch, &layer->down, &layer->mlp_post_norm, worker);
    }
    if (batch->until_layer < model->num_layers)
        return;
    meet(worker);
    share(worker, batch->num_logits);
    for (int64_t i = worker->from; i < worker->until; ++i) {
        norm_row(model, batch->normed + i * hidden, batch->x + batch->logit_rows[i] * hidden, &model->final_norm, hidden, 0);
    }
    struct product head = {.w = &model->head, .x = batch->normed, .y = batch->logits + model->first_token, .x_stride = hidden,
                           .y_stride = model->vocab_size, .num_rows = batch->num_logits, .scale = model->logit_scale};
    if (model->embed_out.num_columns) {
        resize(batch, &model->embed_out, batch->num_logits, hidden, model->embed_size, worker);
        head.x = batch->x;
        head.x_stride = model->embed_size;
    }
    head.coded = code_rows(batch, head.x, head.x_stride, wants(head.w), worker);
    meet(worker);
    multiply(&head, 1, worker);
    if (batch->added && (model->vocab_size || model->ranks->arrived)) /* without logits a barrier: the next forward writes `added` */
        complete(model, batch, batch->logits, batch->num_logits, model->vocab_size, model->first_token, model->head.num_columns, worker);
    if (model->logit_softcap > 0.0f && !(batch->added && model->ranks->index)) {
        meet(worker);
        share(worker, batch->num_logits * model->vocab_size);
        for (int64_t i = worker->from; i < worker->until; ++i)
            batch->logits[i] = model->logit_softcap * tanhf(batch->logits[i] / model->logit_softcap);
    }
}

/* ---- one product ---- */

TARGET static void linear(const struct linear *of, struct team *team, int thread, float *scratch)
{
    struct worker self = {.team = team, .thread = thread, .scratch = scratch}, *const worker = &self;
    const int wanted = wants(of->w);
    for (int64_t row = 0; row < of->num_rows; row += LINEAR_ROWS) {
        const int64_t left = of->num_rows - row, rows = left < LINEAR_ROWS ? left : LINEAR_ROWS;
        struct product job = {.w = of->w, .x = of->x + row * of->num_features, .y = of->y + row * of->w->num_columns,
                              .x_stride = of->num_features, .y_stride = of->w->num_columns, .num_rows = (int32_t)rows};
        if (wanted) {
            if (row)
                meet(worker); /* the codes of the rows before these were read */
            share(worker, rows);
            job.coded = code_rows(&of->batch, job.x, of->num_features, wanted, worker);
            meet(worker);
        }
        multiply(&job, 1, worker);
    }
}
#endif

const struct decoder_isa OF_ISA(decoder) = TABLE(run, linear, choose);
