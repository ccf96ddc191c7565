/* Choosing a token from one row of logits, over 16 fp32 lanes; included after decoder_body.h. Its twin, with the reasons,
 * is inference/sampler.py in numpy. A row's sums are taken over fixed blocks, whatever else is sampled. */

#define BLOCK_OF_SUMS 256
#define BUCKETS 1024 /* of a histogram over 10 bits of a weight, which order weights in [0, 1] as their values do */

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

/* 16 logits; beyond the end -inf. */
INLINE vec some_logits(const float *logits, int64_t at, int64_t size)
{
    if (at + 16 <= size)
        return load_f32(logits + at);
    float lanes[16];
    for (int lane = 0; lane < 16; ++lane)
        lanes[lane] = at + lane < size ? logits[at + lane] : -INFINITY;
    return load_f32(lanes);
}

/* The largest, or NaN where one of them is NaN or +inf. */
TARGET static float largest_logit(const float *logits, int64_t size)
{
    vec most = vec_set(-INFINITY), wrong = vec_zero();
    for (int64_t i = 0; i < size; i += 16) {
        const vec a = some_logits(logits, i, size);
        most = vec_max(most, a);
        wrong = vec_fma(vec_max(vec_set(-3e38f), a), vec_zero(), wrong); /* max gives its second operand beside a NaN */
    }
    return lanes_max(most) + lanes_sum(wrong);
}

/* The lowest weight that is kept, and how many of those that equal it. */
struct cut {
    uint32_t bits;
    int64_t ties;
    double mass; /* of all that is kept */
};

struct histogram {
    uint32_t counts[BUCKETS];
    double sums[BUCKETS];
};

TARGET static void count_in(struct histogram *h, int bucket, float weight)
{
    ++h->counts[bucket];
    h->sums[bucket] += (double)weight;
}

/* The bucket in which the running count (or sum) from the top reaches `wanted`, or the last that holds a weight. What
 * lies above it is added to count and mass. */
TARGET static int reach(const struct histogram *h, int by_count, double wanted, double *count, double *mass)
{
    int last = -1;
    for (int bucket = BUCKETS - 1; bucket >= 0; --bucket) {
        if (!h->counts[bucket])
            continue;
        if (last >= 0) {
            *count += h->counts[last];
            *mass += h->sums[last];
        }
        last = bucket;
        if ((by_count ? *count + h->counts[bucket] : *mass + h->sums[bucket]) >= wanted)
            break;
    }
    return last;
}

/* The fewest largest weights whose number, or sum, is at least `wanted`. A radix selection: 10 bits, then 10, then 10. */
TARGET static struct cut fewest(const struct sampling *s, int64_t blocks, int by_count, double wanted)
{
    static const float floors[] = {1e-3f, 1e-6f, -1.0f}; /* mostly the blocks that reach above the first suffice */
    struct histogram h, odd; /* two, because an addition waits for the one before it in the same bucket */
    double count = 0, mass = 0;
    for (int attempt = 0; attempt < 3; ++attempt) {
        const int whole = attempt == 2 ? 0 : (int)(weight_bits(floors[attempt]) >> 20) + 1; /* buckets that miss nothing */
        double counted = 0, sum = 0;
        memset(&h, 0, sizeof h);
        memset(&odd, 0, sizeof odd);
        for (int64_t b = 0; b < blocks; ++b)
            for (int64_t i = b * BLOCK_OF_SUMS; s->most[b] > floors[attempt] && i < (b + 1) * BLOCK_OF_SUMS; i += 2) {
                count_in(&h, (int)(weight_bits(s->weights[i]) >> 20), s->weights[i]);
                count_in(&odd, (int)(weight_bits(s->weights[i + 1]) >> 20), s->weights[i + 1]);
            }
        for (int bucket = whole; bucket < BUCKETS; ++bucket) {
            counted += h.counts[bucket] += odd.counts[bucket];
            sum += h.sums[bucket] += odd.sums[bucket];
        }
        if ((by_count ? counted : sum) > wanted)
            break;
    }
    uint32_t prefix = (uint32_t)reach(&h, by_count, wanted, &count, &mass);
    int64_t left = 0;
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t i = b * BLOCK_OF_SUMS; weight_bits(s->most[b]) >> 20 >= prefix && i < (b + 1) * BLOCK_OF_SUMS; ++i) {
            s->candidates[left] = s->weights[i];
            left += weight_bits(s->weights[i]) >> 20 == prefix;
        }
    for (int shift = 10; shift >= 0; shift -= 10) {
        memset(&h, 0, sizeof h);
        for (int64_t i = 0; i < left; ++i)
            if (weight_bits(s->candidates[i]) >> (shift + 10) == prefix)
                count_in(&h, (int)(weight_bits(s->candidates[i]) >> shift & (BUCKETS - 1)), s->candidates[i]);
        prefix = prefix << 10 | (uint32_t)reach(&h, by_count, wanted, &count, &mass);
    }
    const double weight = (double)bits_weight(prefix);
    int64_t ties = h.counts[prefix & (BUCKETS - 1)];
    if (!by_count) {
        int64_t enough = 1;
        while (enough < ties && mass + (double)enough * weight < wanted)
            ++enough;
        ties = enough;
    }
    return (struct cut){prefix, ties, mass + (double)ties * weight};
}

/* What is not kept becomes 0, in weights and sums. */
TARGET static void drop(const struct sampling *s, int64_t blocks, struct cut cut)
{
    for (int64_t b = 0; b < blocks; ++b) {
        s->sums[b] = 0;
        if (weight_bits(s->most[b]) < cut.bits)
            continue;
        vec sum = vec_zero();
        for (int64_t i = b * BLOCK_OF_SUMS; i < (b + 1) * BLOCK_OF_SUMS; ++i) {
            const uint32_t bits = weight_bits(s->weights[i]);
            const int tie = bits == cut.bits, kept = (bits > cut.bits) | (tie & (cut.ties > 0));
            cut.ties -= tie;
            s->weights[i] = kept ? s->weights[i] : 0;
        }
        for (int64_t i = b * BLOCK_OF_SUMS; i < (b + 1) * BLOCK_OF_SUMS; i += 16)
            sum = vec_add(sum, load_f32(s->weights + i));
        s->sums[b] = (double)lanes_sum(sum);
    }
}

/* A token drawn from softmax(logits / temperature) after the filters, by its uniform `u`; -1 where a logit is NaN or +inf,
 * or all are -inf. */
TARGET static int64_t choose(const float *logits, const struct sampling *s)
{
    const int64_t size = s->vocab_size, blocks = (size + BLOCK_OF_SUMS - 1) / BLOCK_OF_SUMS;
    const int filtered = (s->top_k > 0 && s->top_k < size) || s->top_p < 1 || s->min_p > 0;
    const float largest = largest_logit(logits, size);
    if (!(largest > -INFINITY && largest < INFINITY))
        return -1;
    const vec least = vec_exp(vec_set(-1e30f)); /* what vec_exp makes of all that is too small becomes exactly 0 */
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
            cut = fewest(s, blocks, 1, (double)s->top_k);
        if (s->top_p < 1)
            cut = fewest(s, blocks, 0, s->top_p * cut.mass);
        if (weight_bits(s->min_p) > cut.bits)
            cut = (struct cut){weight_bits(s->min_p), INT64_MAX, 0};
        drop(s, blocks, cut);
        total = 0;
        for (int64_t b = 0; b < blocks; ++b)
            total += s->sums[b];
    }
    const double target = s->u * total;
    double before = 0; /* the sum of what is before `block` */
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
