/* Sampling a token from one row of logits, over 16 fp32 lanes; included after decoder_body.h. The numpy twin inference/sampler.py
 * gives the reasons. A row's sums are over fixed blocks, whatever else is sampled. */

#define BLOCK_OF_SUMS 256

INLINE uint32_t weight_bits(float weight)
{
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits;
}

INLINE float bits_weight(uint32_t bits)
{
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
}

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

/* The largest logit, or NaN if any is NaN or +inf. */
TARGET static float largest_logit(const float *logits, int64_t size)
{
    vec most = vec_set(-INFINITY), wrong = vec_zero();
    for (int64_t i = 0; i < size; i += 16) {
        const vec a = some_logits(logits, i, size);
        most = vec_max(most, a);
        wrong = vec_fma(vec_max(vec_set(-3e38f), a), vec_zero(), wrong); /* max returns its second operand if one is NaN */
    }
    return lanes_max(most) + lanes_sum(wrong);
}

/* The smallest weight that is kept, and how many of those that equal it. */
struct cut {
    float weight;
    int64_t ties;
    double mass; /* sum of the kept weights */
};

/* The weights at or above some threshold. */
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

/* Copy the weights in [least, largest] to the candidates, padded with zeros to a whole block. Returns the number of blocks. */
TARGET static int64_t gather(const struct sampling *s, int64_t blocks, float least, float largest)
{
    int64_t found = 0;
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t i = b * BLOCK_OF_SUMS; s->most[b] >= least && i < (b + 1) * BLOCK_OF_SUMS; ++i) {
            s->candidates[found] = s->weights[i];
            found += (s->weights[i] >= least) & (s->weights[i] <= largest);
        }
    while (found % BLOCK_OF_SUMS)
        s->candidates[found++] = 0;
    return found / BLOCK_OF_SUMS;
}

/* The fewest largest weights whose number, or sum, is at least `wanted`; `total` is the sum of all. Bisects between two weights by
 * their bits, whose order is that of the values in [0, 1]. Each step ends at a weight, so the number of steps is about that of a
 * bisection of their count. When few are left between, it continues with these alone. */
TARGET static struct cut fewest(const struct sampling *s, int64_t blocks, int by_count, double wanted, double total)
{
    const double size = (double)(blocks * BLOCK_OF_SUMS);
    const float *weights = s->weights, *most = s->most;
    struct share above = {0, 0, 2, 1}, out = above; /* no longer among `weights`; too few */
    struct share in = {size, total, 0, 0};          /* enough: all weights, or all but those whose sum is negligible */
    if (!by_count)
        in.least = (float)((total - wanted) / size / 2);
    while (weight_bits(out.below) > weight_bits(in.least)) {
        if (most && in.count - out.count < size / 16) {
            above = out;
            blocks = gather(s, blocks, in.least, out.below);
            weights = s->candidates;
            most = 0;
        }
        const uint32_t low = weight_bits(in.least) + 1, high = weight_bits(out.below);
        uint32_t middle = low + (high - low) / 2;
        if (in.least == 0) { /* the midpoint of the whole range would be at 2^-64 */
            middle = weight_bits(out.below * 1e-3f);
            middle = middle < low ? low : middle;
        }
        struct share half = share_from(weights, most, blocks, bits_weight(middle));
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

/* Set the weights that are not kept to 0, also in the sums. */
TARGET static void drop(const struct sampling *s, int64_t blocks, struct cut cut)
{
    for (int64_t b = 0; b < blocks; ++b) {
        s->sums[b] = 0;
        if (s->most[b] < cut.weight)
            continue;
        const int64_t first = b * BLOCK_OF_SUMS, end = first + BLOCK_OF_SUMS;
        if (cut.ties < INT64_MAX)
            for (int64_t i = first; i < end; ++i)
                if (s->weights[i] == cut.weight && --cut.ties < 0)
                    s->weights[i] = 0;
        vec sum = vec_zero();
        for (int64_t i = first; i < end; i += 16) {
            const vec a = load_f32(s->weights + i);
            sum = vec_add(sum, store_f32(s->weights + i, vec_pick(a, vec_set(cut.weight), a, vec_zero()), 0));
        }
        s->sums[b] = (double)lanes_sum(sum);
    }
}

/* Sample a token from softmax(logits / temperature) after the filters, by its uniform `u`. Returns -1 if a logit is NaN or +inf, or
 * if all are -inf. */
TARGET static int64_t choose(const float *logits, const struct sampling *s)
{
    const int64_t size = s->vocab_size, blocks = (size + BLOCK_OF_SUMS - 1) / BLOCK_OF_SUMS;
    const int filtered = (s->top_k > 0 && s->top_k < size) || s->top_p < 1 || s->min_p > 0;
    const float largest = largest_logit(logits, size);
    if (!(largest > -INFINITY && largest < INFINITY))
        return -1;
    const vec least = vec_exp(vec_set(-1e30f)); /* vec_exp's result for underflowing inputs; such weights become exactly 0 */
    double total = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        vec sum = vec_zero(), most = vec_zero();
        for (int64_t i = b * BLOCK_OF_SUMS; i < (b + 1) * BLOCK_OF_SUMS; i += 16) {
            vec a = vec_sub(some_logits(logits, i, size), vec_set(largest));
            if (s->temperature != 1)
                a = vec_div(a, vec_set(s->temperature));
            a = vec_sub(vec_exp(a), least);
            store_f32(s->weights + i, a, 0);
            sum = vec_add(sum, a);
            most = vec_max(most, a);
        }
        total += s->sums[b] = (double)lanes_sum(sum);
        if (filtered)
            s->most[b] = lanes_max(most);
    }
    if (filtered) {
        struct cut cut = {0, INT64_MAX, total};
        if (s->top_k > 0 && s->top_k < size)
            cut = fewest(s, blocks, 1, (double)s->top_k, total);
        if (s->top_p < 1)
            cut = fewest(s, blocks, 0, s->top_p * cut.mass, total);
        if (s->min_p > cut.weight)
            cut = (struct cut){s->min_p, INT64_MAX, 0};
        drop(s, blocks, cut);
        total = 0;
        for (int64_t b = 0; b < blocks; ++b)
            total += s->sums[b];
    }
    const double target = s->u * total;
    double before = 0; /* the sum of the weights before `block` */
    int64_t block = -1, token = -1;
    for (int64_t b = 0; b < blocks; ++b)
        if (s->sums[b] > 0) {
            before += block < 0 ? 0 : s->sums[block];
            block = b;
            if (before + s->sums[b] > target)
                break;
        }
    for (int64_t i = block * BLOCK_OF_SUMS; i < (block + 1) * BLOCK_OF_SUMS; ++i)
        if (s->weights[i] > 0) {
            token = i;
            before += (double)s->weights[i];
            if (before > target)
                break;
        }
    return token;
}
