/* Sampling a token from one row of logits, over 16 fp32 lanes; included by forward.c. The numpy twin inference/sampler.py
 * gives the reasons. A row's sums are over fixed blocks, whatever else is sampled.
 *
 * Weights (probabilities up to a factor, the largest is 1) are not stored: a row is read once for its largest logit and once for
 * the sum and the largest weight of each block. Filters list the blocks that may have a weight to keep, and compute these again. */

/* 16 logits; -inf beyond the end. */
INLINE vec some_logits(const float *logits, int64_t at, int64_t size)
{
    if (at + 16 <= size)
        return load_f32(logits + at);
    float lanes[16];
    for (int lane = 0; lane < 16; ++lane)
        lanes[lane] = at + lane < size ? logits[at + lane] : -INFINITY;
    return load_f32(lanes);
}

/* A row, and memory of its thread. */
struct row {
    const float *logits;
    int64_t size, blocks, num_listed;
    float largest, temperature;
    float *most;                            /* [blocks] the largest logit of a block, then the largest weight */
    double *sums;                           /* [blocks], then [listed] */
    float *weights, *candidates, *masked;   /* [listed][BLOCK_OF_SUMS]; as weights; [blocks][BLOCK_OF_SUMS] */
    float *listed_most;                     /* [listed] */
    int32_t *listed;                        /* numbers of blocks, ascending */
};

/* Replace the row by a copy in which tokens without a bit in `allowed` have -inf. */
TARGET static void mask_row(struct row *row, const uint32_t *allowed)
{
    for (int64_t i = 0; i < row->size; i += 16) {
        const uint32_t bits = allowed[i / 32] >> i % 32 & 0xffff;
        const vec a = some_logits(row->logits, i, row->size);
        store_f32(row->masked + i, vec_pick(vec_by_bits(bits, vec_set(1)), vec_zero(), a, vec_set(-INFINITY)), 0);
    }
    row->logits = row->masked;
}

/* The largest logit, also of each block. Returns 0 if one is NaN or +inf, or if all are -inf. */
TARGET static int find_largest(struct row *row)
{
    vec all = vec_set(-INFINITY), wrong = vec_zero();
    for (int64_t b = 0; b < row->blocks; ++b) {
        vec most = vec_set(-INFINITY);
        for (int64_t i = b * BLOCK_OF_SUMS; i < (b + 1) * BLOCK_OF_SUMS; i += 16) {
            const vec a = some_logits(row->logits, i, row->size);
            most = vec_max(most, a);
            wrong = vec_fma(vec_max(vec_set(-3e38f), a), vec_zero(), wrong); /* max returns its second operand if one is NaN */
        }
        row->most[b] = lanes_max(most);
        all = vec_max(all, most);
    }
    row->largest = lanes_max(all) + lanes_sum(wrong);
    return row->largest > -INFINITY && row->largest < INFINITY;
}

/* The first of the largest logits. */
TARGET static int64_t most_likely(const struct row *row)
{
    int64_t b = 0;
    while (row->most[b] != row->largest)
        ++b;
    int64_t i = b * BLOCK_OF_SUMS;
    while (row->logits[i] != row->largest)
        ++i;
    return i;
}

INLINE vec some_weights(const struct row *row, int64_t at)
{
    vec a = vec_sub(some_logits(row->logits, at, row->size), vec_set(row->largest));
    if (row->temperature != 1)
        a = vec_div(a, vec_set(row->temperature));
    return vec_sub(vec_exp(a), vec_exp(vec_set(-1e30f))); /* what vec_exp gives on underflow becomes exactly 0 */
}

/* Sum the weights by block, and find the largest of each. Returns their sum. */
TARGET static double sum_blocks(struct row *row)
{
    double total = 0;
    for (int64_t b = 0; b < row->blocks; ++b) {
        vec sum = vec_zero(), most = vec_zero();
        for (int64_t i = b * BLOCK_OF_SUMS; i < (b + 1) * BLOCK_OF_SUMS; i += 16) {
            const vec a = some_weights(row, i);
            sum = vec_add(sum, a);
            most = vec_max(most, a);
        }
        total += row->sums[b] = (double)lanes_sum(sum);
        row->most[b] = lanes_max(most);
    }
    return total;
}

/* List the blocks with a weight of at least `least`, with their weights. */
TARGET static void list_blocks(struct row *row, float least)
{
    row->num_listed = 0;
    for (int64_t b = 0; b < row->blocks; ++b) {
        if (row->most[b] < least)
            continue;
        for (int64_t i = 0; i < BLOCK_OF_SUMS; i += 16)
            store_f32(row->weights + row->num_listed * BLOCK_OF_SUMS + i, some_weights(row, b * BLOCK_OF_SUMS + i), 0);
        row->listed_most[row->num_listed] = row->most[b];
        row->listed[row->num_listed++] = (int32_t)b;
    }
}

/* The smallest weight that is kept, and how many of those that equal it. */
struct cut {
    float weight;
    int64_t ties;
    double mass; /* sum of the kept weights */
};

/* How many weights are at or above some threshold, and their sum. */
struct share {
    double count, sum;
    float least, below; /* the smallest of them, and the largest of the others */
};

TARGET static float lanes_min(vec a)
{
    float lanes[16], least;
    store_f32(lanes, a, 0);
    least = lanes[0];
    for (int lane = 1; lane < 16; ++lane)
        least = lanes[lane] < least ? lanes[lane] : least;
    return least;
}

/* `most` has the largest weight of each block, or is NULL. */
TARGET static struct share share_from(const float *weights, const float *most, int64_t blocks, float threshold)
{
    const vec from = vec_set(threshold), one = vec_set(1);
    vec sums = vec_zero(), count = vec_zero(), least = vec_set(2), below = vec_zero();
    float skipped = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        if (most && most[b] < threshold) {
            skipped = most[b] > skipped ? most[b] : skipped;
            continue;
        }
        vec sum = vec_zero();
        for (int64_t i = b * BLOCK_OF_SUMS; i < (b + 1) * BLOCK_OF_SUMS; i += 16) {
            const vec a = load_f32(weights + i), kept = vec_pick(a, from, a, vec_zero());
            sum = vec_add(sum, kept);
            count = vec_add(count, vec_pick(a, from, one, vec_zero()));
            least = vec_min(least, vec_pick(a, from, a, vec_set(2)));
            below = vec_max(below, vec_sub(a, kept));
        }
        sums = vec_add(sums, sum);
    }
    below = vec_max(below, vec_set(skipped));
    return (struct share){(double)lanes_sum(count), (double)lanes_sum(sums), lanes_min(least), lanes_max(below)};
}

/* Copy the listed weights in [least, largest] to the candidates, padded with zeros to a whole block. Returns the number of blocks. */
TARGET static int64_t gather(const struct row *row, float least, float largest)
{
    int64_t found = 0;
    for (int64_t b = 0; b < row->num_listed; ++b)
        for (int64_t i = b * BLOCK_OF_SUMS; row->listed_most[b] >= least && i < (b + 1) * BLOCK_OF_SUMS; i += 16)
            for (uint32_t bits = 0xffff & vec_signs(vec_sub(load_f32(row->weights + i), vec_set(least))); bits; bits &= bits - 1) {
                row->candidates[found] = row->weights[i + __builtin_ctz(bits)];
                found += row->candidates[found] <= largest;
            }
    while (found % BLOCK_OF_SUMS)
        row->candidates[found++] = 0;
    return found / BLOCK_OF_SUMS;
}

/* The cut that keeps the fewest largest weights whose number (by_count) or sum is at least `wanted`; `in`: a threshold that keeps enough.
 * Bisects between two weights by their bits, whose order is that of the values in [0, 1]. Each step ends at a weight, so there are about
 * as many steps as in a bisection of their count. When few weights are left in between, it continues with these alone. */
TARGET static struct cut fewest(const struct row *row, struct share in, int by_count, double wanted)
{
    const float *weights = row->weights, *most = row->listed_most;
    int64_t blocks = row->num_listed;
    const double size = (double)(blocks * BLOCK_OF_SUMS);
    struct share above = {0, 0, 2, 1}, out = above; /* above: kept for sure, no longer in `weights`; out: a threshold that keeps too few */
    while (bits_of(out.below) > bits_of(in.least)) {
        if (most && in.count - out.count < size / 16) {
            above = out;
            blocks = gather(row, in.least, out.below);
            weights = row->candidates;
            most = 0;
        }
        const uint32_t low = bits_of(in.least) + 1, high = bits_of(out.below);
        uint32_t middle = low + (high - low) / 2;
        if (in.least == 0) { /* the midpoint of the whole range would be at 2^-64 */
            middle = bits_of(out.below * 1e-3f);
            middle = middle < low ? low : middle;
        }
        struct share half = share_from(weights, most, blocks, float_of(middle));
        half.count += above.count;
        half.sum += above.sum;
        if ((by_count ? half.count : half.sum) >= wanted)
            in = half;
        else
            out = half;
    }
    const double weight = (double)in.least, ties = in.count - out.count;
    double enough = ties;
    if (!by_count && weight > 0) {
        enough = ceil((wanted - out.sum) / weight);
        enough = enough < 1 ? 1 : enough < ties ? enough : ties;
    }
    return (struct cut){in.least, enough < ties ? (int64_t)enough : INT64_MAX, out.sum + enough * weight};
}

/* The largest weight that at least `count` blocks reach; 0 if there are fewer blocks. */
TARGET static float reached_by(const struct row *row, int64_t count)
{
    uint32_t low = 0, high = count > row->blocks ? 0 : bits_of(1);
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        int64_t reached = 0;
        for (int64_t b = 0; b < row->blocks; ++b)
            reached += row->most[b] >= float_of(middle);
        if (reached >= count)
            low = middle;
        else
            high = middle - 1;
    }
    return float_of(low);
}

/* List the blocks with weights that top-k, and then top-p of what it keeps, do not drop; returns the cut. */
TARGET static struct cut cut_at(struct row *row, int64_t top_k, double top_p, double total)
{
    struct share in = {0, 0, 0, 0};
    struct cut cut = {0, INT64_MAX, total};
    const int by_count = top_k > 0 && top_k < row->size;
    const float heads[] = {by_count ? reached_by(row, top_k) : 1e-3f, by_count ? 0 : 1e-5f, 0};
    const double wanted = by_count ? (double)top_k : top_p * total;
    for (int try = 0; try < 3 && (!try || (by_count ? in.count : in.sum) < wanted); ++try) {
        if (!try || row->num_listed < row->blocks)
            list_blocks(row, heads[try]);
        if (heads[try] > 0)
            in = share_from(row->weights, row->listed_most, row->num_listed, heads[try]);
        else /* all weights, or all but those whose sum is negligible */
            in = (struct share){(double)(row->blocks * BLOCK_OF_SUMS), total, 0, 0};
    }
    if (by_count)
        cut = fewest(row, in, 1, wanted);
    if (top_p < 1) {
        if (in.least == 0)
            in.least = (float)((total - top_p * cut.mass) / in.count / 2);
        cut = fewest(row, in, 0, top_p * cut.mass);
    }
    return cut;
}

/* Set the listed weights that are not kept to 0, and sum the others by block. Returns their sum. */
TARGET static double drop(const struct row *row, struct cut cut)
{
    double total = 0;
    for (int64_t b = 0; b < row->num_listed; ++b) {
        row->sums[b] = 0;
        if (row->listed_most[b] < cut.weight)
            continue;
        const int64_t first = b * BLOCK_OF_SUMS, end = first + BLOCK_OF_SUMS;
        if (cut.ties < INT64_MAX)
            for (int64_t i = first; i < end; ++i)
                if (row->weights[i] == cut.weight && --cut.ties < 0)
                    row->weights[i] = 0;
        vec sum = vec_zero();
        for (int64_t i = first; i < end; i += 16) {
            const vec a = load_f32(row->weights + i);
            sum = vec_add(sum, store_f32(row->weights + i, vec_pick(a, vec_set(cut.weight), a, vec_zero()), 0));
        }
        total += row->sums[b] = (double)lanes_sum(sum);
    }
    return total;
}

/* The token at which the running sum of the weights exceeds `target`; never one of weight 0. listed: sums the listed weights only. */
TARGET static int64_t token_at(struct row *row, double target, int listed)
{
    double before = 0; /* the sum of the weights before `block` */
    int64_t block = -1, token = -1;
    for (int64_t b = 0; b < (listed ? row->num_listed : row->blocks); ++b)
        if (row->sums[b] > 0) {
            before += block < 0 ? 0 : row->sums[block];
            block = b;
            if (before + row->sums[b] > target)
                break;
        }
    const int64_t number = listed ? row->listed[block] : block;
    const float *weights = row->weights + (listed ? block * BLOCK_OF_SUMS : 0);
    for (int64_t i = 0; i < BLOCK_OF_SUMS && !listed; i += 16)
        store_f32(row->weights + i, some_weights(row, block * BLOCK_OF_SUMS + i), 0);
    for (int64_t i = 0; i < BLOCK_OF_SUMS; ++i)
        if (weights[i] > 0) {
            token = number * BLOCK_OF_SUMS + i;
            before += (double)weights[i];
            if (before > target)
                break;
        }
    return token;
}

/* Sample a token of `size` from softmax(logits / temperature) after the filters, by its uniform `u`. Returns -1 if a logit is NaN or
 * +inf, or if all are -inf. `scratch`: scratch_to_choose(size) bytes. */
TARGET static int64_t choose(const struct sampling *s, int64_t size, float *scratch)
{
    const int64_t blocks = (size + BLOCK_OF_SUMS - 1) / BLOCK_OF_SUMS, whole = blocks * BLOCK_OF_SUMS;
    struct row row = {.logits = s->logits, .size = size, .blocks = blocks, .temperature = s->temperature};
    row.weights = scratch;
    row.candidates = row.weights + whole + BLOCK_OF_SUMS;
    row.masked = row.candidates + whole + BLOCK_OF_SUMS;
    row.sums = (double *)(row.masked + whole);
    row.most = (float *)(row.sums + blocks);
    row.listed_most = row.most + blocks;
    row.listed = (int32_t *)(row.listed_most + blocks);
    if (s->allowed)
        mask_row(&row, s->allowed);
    if (!find_largest(&row))
        return -1;
    if (s->temperature == 0)
        return most_likely(&row);
    double total = sum_blocks(&row);
    const int cuts = (s->top_k > 0 && s->top_k < size) || s->top_p < 1, filtered = cuts || s->min_p > 0;
    if (filtered) {
        struct cut cut = {0, INT64_MAX, 0};
        if (cuts)
            cut = cut_at(&row, s->top_k, s->top_p, total);
        else
            list_blocks(&row, s->min_p);
        if (s->min_p > cut.weight)
            cut = (struct cut){s->min_p, INT64_MAX, 0};
        total = drop(&row, cut);
    }
    return token_at(&row, s->u * total, filtered);
}
