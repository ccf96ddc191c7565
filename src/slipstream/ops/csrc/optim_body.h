/* The optimizers: one pass over gradient, master, states and weights, written once over 16 fp32 lanes.
 *
 * Each array is fp32, bf16 or fp16; states may also be 8-bit codes. All arithmetic is in fp32. A rule is a function of 16
 * elements. The pass around it is written once and compiled for each rule, and separately for AdamW's common recipes. The torch
 * twins in ops/optim_reference.py do the same operations in the same order; ops/optim.py sets the coefficients.
 *
 * [Note: Codes] A block of 256 elements has one fp32 scale, its largest magnitude. Codes of a momentum are 127ths of the scale.
 * Of a sum of squares the root is stored, in 255ths of the scale and at least 1, because it divides the update and must not
 * become zero: such an element gets too small a step, never too large a one. A block's new values stay in L1 cache until its new
 * scale is known. A non-finite value makes the scale NaN, and with it the whole block. AdamW decays codes as it decodes them: it
 * multiplies the scale by beta.
 *
 * [Note: Random bits] With STOCHASTIC, values stored in bf16 or in codes are rounded up with the probability that makes rounding
 * unbiased, so that updates below half a unit of the last place are not lost. The bits are a hash of the keys (seed and step)
 * and of the element's index: they do not depend on threads, shards or chunks. 16 elements use 16 numbers of 16 bits: a 64-bit
 * mix of the keys and the group's index gives one word; a 32-bit mix of that word and a position gives each of eight words, of
 * two numbers each. Weights use an element's own number, both states the other number of its word.
 */

#define AHEAD 512 /* elements */

enum { ANY = -1, NONE = -2 }; /* further kinds of an array: not known at compile time; no such array */

/* ---- loads and stores ---- */

/* For elements [number, number + 16); number is a multiple of 16. */
INLINE halves random_halves(int64_t number, const uint32_t *keys)
{
    uint64_t x = ((uint64_t)number / 16 + (keys[0] | (uint64_t)keys[1] << 32)) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return halves_of((uint32_t)(x >> 32));
}

INLINE int64_t bytes_of(int64_t kind) { return kind == DTYPE_F32 ? 4 : kind == CODES ? 1 : 2; }

/* 16 elements from i of an array that is not codes. paired: lanes as in load_bf16_pairs. */
INLINE vec get(struct array from, int64_t i, int paired)
{
    const char *p = (const char *)from.data + i * bytes_of(from.kind);
    return paired ? load_bf16_pairs(p) : load_vec(p, (int)from.kind);
}

INLINE vec get_codes(struct array from, int64_t i, int negative)
{
    const char *p = (const char *)from.data + i;
    return negative ? load_i8(p) : load_u8(p);
}

/* Hardware prefetching stops at page boundaries. */
INLINE void prefetch(struct array from, int64_t i)
{
    __builtin_prefetch((const char *)from.data + (i + AHEAD) * bytes_of(from.kind));
}
INLINE void prefetch_codes(struct array from, int64_t block)
{
    for (int k = 0; k < CODED; k += 64)
        prefetch(from, block + k);
}

/* How a pass stores: with stochastic rounding; with lanes as in load_bf16_pairs; with a test for NaNs. */
struct manner {
    int stochastic, paired, nans;
};

/* Returns the values as stored. below: 16 random bits. */
INLINE vec put(struct array to, int64_t i, vec x, struct manner manner, words below, int stream)
{
    char *p = (char *)to.data + i * bytes_of(to.kind);
    if (manner.stochastic && to.kind == DTYPE_BF16)
        return store_bf16_up(p, x, below, manner.paired, manner.nans);
    if (to.kind == DTYPE_BF16 && !manner.nans)
        return stream ? store_bf16_numbers(p, x, 1, 0) : store_bf16_numbers(p, x, 0, 0);
    return store_vec(p, x, (int)to.kind, stream);
}

/* Encode a block's new values as codes and a scale. most: the largest magnitude of each lane, compared as integers, so that NaN is
 * above infinity. dither: added before a code is rounded to nearest, or NULL. */
INLINE void encode(struct array to, int64_t i, const float *values, vec most, const float *dither, int negative)
{
    const uint32_t largest = lanes_largest(most);
    const float scale = float_of(largest < 0x7f800000 ? largest : 0x7fc00000);
    to.scales[i / CODED] = scale;
    const vec inverse = vec_set((negative ? 127.0f : 255.0f) / (scale < 0x1p-100f ? 0x1p-100f : scale));
    for (int k = 0; k < CODED; k += 32) {
        vec a = vec_mul(load_f32(values + k), inverse), b = vec_mul(load_f32(values + k + 16), inverse);
        if (dither) {
            a = vec_add(a, load_f32(dither + k));
            b = vec_add(b, load_f32(dither + k + 16));
        }
        store_codes((char *)to.data + i + k, a, b, negative);
    }
}

/* ---- rules ---- */

/* 16 elements: weights, the two states, the root of the second state. */
typedef struct {
    vec p, m, v, root;
} lanes;

/* a + rate * (b - a). Starts from state or gradient, whichever has the larger weight, as torch.lerp does: with beta = 0 the
 * result is exactly the gradient. */
INLINE vec lerp(vec m, vec g, vec rate, int from_grad)
{
    const vec a = from_grad ? g : m, b = from_grad ? m : g;
    return vec_add(a, vec_mul(rate, vec_sub(b, a)));
}

INLINE vec squares(vec v, vec g, const vec *c) { return vec_add(v, vec_mul(vec_mul(c[REST], g), g)); }

INLINE lanes average(lanes x, vec g, const vec *c, int flags)
{
    x.m = lerp(x.m, g, c[RATE], flags & FROM_GRAD);
    x.v = squares(vec_mul(x.v, c[BETA]), g, c);
    return x;
}

/* first, second: that state is in codes, and the rule gets the codes. m, v: then the factors, with decay, that turn a code of the first
 * state, and the square of one of the second, into values. */
struct kept {
    int first, second;
    vec m, v;
};

INLINE lanes adamw(lanes x, vec g, const vec *c, int flags, struct kept kept, int corrects)
{
    x.p = vec_mul(x.p, c[KEEP]);
    x.m = kept.first ? vec_add(vec_mul(x.m, kept.m), vec_mul(c[REST1], g)) : lerp(x.m, g, c[RATE], flags & FROM_GRAD);
    x.v = squares(kept.second ? vec_mul(vec_mul(x.v, x.v), kept.v) : vec_mul(x.v, c[BETA]), g, c);
    x.root = vec_sqrt(x.v);
    const vec corrected = corrects ? vec_mul(x.root, c[CORRECTION2]) : x.root;
    x.p = vec_sub(x.p, vec_div(vec_mul(c[LR], x.m), vec_add(corrected, c[EPS])));
    return x;
}

INLINE lanes lion(lanes x, vec g, const vec *c, int flags)
{
    const vec u = lerp(x.m, g, c[UPDATE_RATE], flags & UPDATE_FROM_GRAD), zero = vec_set(0.0f), one = vec_set(1.0f);
    const vec sign = vec_sub(vec_pick(u, zero, one, zero), vec_pick(vec_sub(zero, u), zero, one, zero)); /* of a NaN: 0 */
    x.p = vec_sub(vec_mul(x.p, c[KEEP]), vec_mul(c[LR], sign));
    x.m = lerp(x.m, g, c[RATE], flags & FROM_GRAD);
    return x;
}

INLINE lanes sgd(lanes x, vec g, const vec *c, int flags, int has_momentum)
{
    if (has_momentum) {
        x.m = flags & FIRST_STEP ? g : vec_add(vec_mul(x.m, c[BETA]), vec_mul(c[REST], g));
        g = flags & NESTEROV ? vec_add(g, vec_mul(c[BETA], x.m)) : x.m;
    }
    x.p = vec_sub(x.p, vec_mul(c[LR], g));
    return x;
}

INLINE lanes adagrad(lanes x, vec g, const vec *c)
{
    x.v = vec_add(x.v, vec_mul(g, g));
    x.p = vec_sub(x.p, vec_div(vec_mul(c[LR], g), vec_add(vec_sqrt(x.v), c[EPS])));
    return x;
}

/* LAMB's update, without the learning rate. */
INLINE vec lamb_update(lanes x, const vec *c, int flags)
{
    const vec v = vec_mul(x.v, c[CORRECTION2]);
    const vec denominator = flags & EPS_INSIDE ? vec_sqrt(vec_add(v, c[EPS])) : vec_add(vec_sqrt(v), c[EPS]);
    const vec divisor = vec_max(vec_set(0x1p-126f), denominator); /* zeros stay zeros even if eps is 0 */
    return vec_add(vec_div(vec_mul(x.m, c[CORRECTION1]), divisor), vec_mul(c[L2], x.p));
}

/* ---- the pass ---- */

/* The kinds of arrays that are known at compile time, else ANY. If the gradient's is known, the pass is a plain one: see RECIPE. */
struct known {
    int master, states, grad, out;
};

/* Which arrays the pass writes with `put`. */
struct written {
    int first, second, master, out;
};

/* Returns the values as stored. bits: of weights, of states. */
INLINE lanes write(const struct step *s, struct written written, int64_t i, lanes x, struct manner manner, const words *bits)
{
    if (written.first)
        x.m = put(s->first, i, x.m, manner, bits[1], 0);
    if (written.second)
        x.v = put(s->second, i, x.v, manner, bits[1], 0);
    if (written.master)
        x.p = put(s->master, i, x.p, manner, bits[0], 0);
    if (written.out)
        put(s->out, i, x.p, (struct manner){0, 0, manner.nans}, bits[0], s->flags & STREAM);
    return x;
}

/* Elements [start, stop): a multiple of 16, or of CODED if there are codes. */
INLINE void pass(enum rule rule, const struct step *step, int64_t start, int64_t stop, double *sums, struct known known)
{
    struct step s = *step;
    const int plain = known.grad != ANY;
    s.master.kind = known.master == ANY ? s.master.kind : known.master;
    s.first.kind = known.states == ANY ? s.first.kind : known.states;
    s.second.kind = known.states == ANY ? s.second.kind : known.states;
    s.grad.kind = plain ? known.grad : s.grad.kind;
    s.out.kind = plain ? known.out : s.out.kind;
    const int stochastic = plain ? known.master == DTYPE_BF16 : s.flags & STOCHASTIC, flags = plain ? 0 : s.flags;
    const int has_l2 = !plain && s.coefficients[L2] != 0.0f, has_out = plain ? known.out != NONE : s.out.data != 0;
    const int paired = known.master == DTYPE_BF16 && known.states == DTYPE_BF16 && known.grad == DTYPE_BF16 && known.out == NONE;
    const int reads_grad = rule != LAMB_APPLY, writes_states = rule != LAMB_APPLY;
    const int adds_l2 = rule == ADAMW || rule == SGD || rule == ADAGRAD;
    const int has_first = rule != ADAGRAD && (rule != SGD || s.first.data), has_second = rule != LION && rule != SGD;
    const int may_code = rule == ADAMW || rule == LION || rule == SGD;
    const int codes_first = may_code && has_first && s.first.kind == CODES;
    const int codes_second = may_code && has_second && s.second.kind == CODES;
    const struct written written = {writes_states && has_first && !codes_first, writes_states && has_second && !codes_second,
                                    rule != LAMB_UPDATE, rule != LAMB_UPDATE && has_out};
    const int64_t block = codes_first || codes_second ? CODED : stop - start;
    vec c[NUM_COEFFICIENTS];
    for (int k = 0; k < NUM_COEFFICIENTS; ++k)
        c[k] = vec_set(s.coefficients[k]);
    vec64 weight_squares = vec64_zero(), update_squares = vec64_zero();
    float first[CODED], second[CODED], dither[CODED]; /* a block in codes: its new values; random numbers in [-1/2, 1/2] */
    for (int64_t at = start; at < stop; at += block) {
        struct kept kept = {codes_first, codes_second, vec_set(0.0f), vec_set(0.0f)};
        vec first_most = vec_set(0.0f), second_most = vec_set(0.0f);
        if (codes_first) {
            const float unit = s.first.scales[at / CODED] / 127.0f;
            kept.m = vec_set(rule == ADAMW ? unit * s.coefficients[BETA1] : unit);
            prefetch_codes(s.first, at);
        }
        if (codes_second) {
            const float unit = s.second.scales[at / CODED] / 255.0f;
            kept.v = vec_set(unit * unit * s.coefficients[BETA]);
            prefetch_codes(s.second, at);
        }
        for (int64_t i = at; i < at + block; i += 16) {
            prefetch(s.master, i);
            if (reads_grad)
                prefetch(s.grad, i);
            if (has_first && !codes_first)
                prefetch(s.first, i);
            if (has_second && !codes_second)
                prefetch(s.second, i);
            lanes x = {get(s.master, i, paired), vec_set(0.0f), vec_set(0.0f), vec_set(0.0f)};
            vec g = reads_grad ? vec_mul(get(s.grad, i, paired), c[SCALE]) : vec_set(0.0f);
            if (has_first)
                x.m = codes_first ? get_codes(s.first, i, 1) : get(s.first, i, paired);
            if (codes_first && rule != ADAMW)
                x.m = vec_mul(x.m, kept.m);
            if (has_second)
                x.v = codes_second ? get_codes(s.second, i, 0) : get(s.second, i, paired);

            if (adds_l2 && has_l2)
                g = vec_add(g, vec_mul(c[L2], x.p));
            if (rule == ADAMW)
                x = adamw(x, g, c, flags, kept, !plain || known.states == DTYPE_F32);
            else if (rule == LION)
                x = lion(x, g, c, flags);
            else if (rule == SGD)
                x = sgd(x, g, c, flags, has_first);
            else if (rule == ADAGRAD)
                x = adagrad(x, g, c);
            else if (rule == LAMB_UPDATE)
                x = average(x, g, c, flags);
            else
                x.p = vec_sub(x.p, vec_mul(c[LR], lamb_update(x, c, flags)));

            words bits[2]; /* of weights, of states */
            if (stochastic) {
                const halves random = random_halves(s.offset + i, s.keys);
                bits[0] = own_half(random, paired);
                bits[1] = other_half(random, paired);
                if (codes_first || codes_second) {
                    const vec unit = vec_mul(words_to_vec(bits[1]), vec_set(0x1p-16f));
                    store_f32(dither + (i - at), vec_sub(unit, vec_set(0.5f - 0x1p-17f)), 0);
                }
            }
            if (codes_first) {
                store_f32(first + (i - at), x.m, 0);
                first_most = vec_larger(first_most, vec_abs(x.m));
            }
            if (codes_second) {
                store_f32(second + (i - at), x.root, 0);
                second_most = vec_larger(second_most, x.root);
            }
            /* In AdamW a NaN anywhere propagates to the weights. */
            const int nans = rule != ADAMW || vec_has_nan(x.p);
            if (__builtin_expect(nans, rule != ADAMW))
                x = write(&s, written, i, x, (struct manner){stochastic, paired, 1}, bits);
            else
                x = write(&s, written, i, x, (struct manner){stochastic, paired, 0}, bits);
            if (rule == LAMB_UPDATE) {
                weight_squares = vec64_add_squares(weight_squares, x.p);
                update_squares = vec64_add_squares(update_squares, lamb_update(x, c, flags));
            }
        }
        if (codes_first)
            encode(s.first, at, first, first_most, stochastic ? dither : 0, 1);
        if (codes_second)
            encode(s.second, at, second, second_most, stochastic ? dither : 0, 0);
    }
    if (s.flags & STREAM)
        fence_streams();
    if (rule == LAMB_UPDATE) {
        sums[0] += folded(weight_squares);
        sums[1] += folded(update_squares);
    }
}

/* Specialize a pass for known kinds. If the gradient's kind is known, the pass requires decoupled decay and an average that starts
 * from the state, and rounds stochastically exactly if the master is not fp32. If states are not fp32, their bias correction is
 * folded into the other coefficients (ops/optim.py). */
#define RECIPE(rule, weights, states, grads, weights_out)                                                                 \
    if (step->master.kind == (weights) && first == (states) && second == (states) &&                                      \
        ((int)(grads) == (int)ANY || (plain && step->grad.kind == (grads) && out == (weights_out) &&                      \
                                      ((int)(states) == (int)DTYPE_F32 || step->coefficients[CORRECTION2] == 1.0f)))) {   \
        pass(rule, step, start, stop, sums, (struct known){weights, states, grads, weights_out});                         \
        return;                                                                                                           \
    }
#define PASS(name, rule)                                                                                                  \
    TARGET static void name(const struct step *step, int64_t start, int64_t stop, double *sums)                           \
    {                                                                                                                     \
        const int64_t first = rule == ADAGRAD ? step->second.kind : step->first.kind;                                     \
        const int64_t second = rule == LION || rule == SGD ? first : step->second.kind;                                   \
        const int64_t out = step->out.data ? step->out.kind : NONE;                                                       \
        const int plain = rule == ADAMW && step->coefficients[L2] == 0.0f && !(step->flags & FROM_GRAD) &&                \
                          !(step->flags & STOCHASTIC) == (step->master.kind != DTYPE_BF16);                               \
        (void)plain, (void)out;                                                                                           \
        if (KNOW_RECIPES) {                                                                                               \
            if (rule == ADAMW) {                                                                                          \
                RECIPE(rule, DTYPE_F32, DTYPE_F32, DTYPE_BF16, DTYPE_BF16)                                                \
                RECIPE(rule, DTYPE_F32, DTYPE_F32, DTYPE_F32, NONE)                                                       \
                RECIPE(rule, DTYPE_F32, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16)                                               \
                RECIPE(rule, DTYPE_F32, CODES, DTYPE_BF16, DTYPE_BF16)                                                    \
                RECIPE(rule, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, NONE)                                                    \
                RECIPE(rule, DTYPE_BF16, CODES, DTYPE_BF16, NONE)                                                         \
            }                                                                                                             \
            RECIPE(rule, DTYPE_F32, DTYPE_F32, ANY, ANY)                                                                  \
        }                                                                                                                 \
        pass(rule, step, start, stop, sums, (struct known){ANY, ANY, ANY, ANY});                                          \
    }
PASS(adamw_pass, ADAMW)
PASS(lion_pass, LION)
PASS(sgd_pass, SGD)
PASS(adagrad_pass, ADAGRAD)
PASS(lamb_update_pass, LAMB_UPDATE)
PASS(lamb_apply_pass, LAMB_APPLY)

static void (*const passes[NUM_RULES])(const struct step *, int64_t, int64_t, double *) = {
    adamw_pass, lion_pass, sgd_pass, adagrad_pass, lamb_update_pass, lamb_apply_pass};

/* The remainder of the last block is processed in a copy padded with zeros. */
TARGET static void step(int rule, const struct step *whole, int64_t start, int64_t stop, double *sums)
{
    const int coded = whole->first.kind == CODES || whole->second.kind == CODES;
    const int64_t rest = coded || stop % 16 ? stop % CODED : 0;
    if (sums)
        sums[0] = sums[1] = 0.0;
    passes[rule](whole, start, stop - rest, sums);
    if (rest == 0)
        return;
    struct step s = *whole;
    struct array *const arrays[] = {&s.master, &s.grad, &s.first, &s.second, &s.out};
    char padded[5][CODED * sizeof(float)] = {0}, *from[5];
    for (int k = 0; k < 5; ++k)
        if ((from[k] = arrays[k]->data)) {
            from[k] += (stop - rest) * bytes_of(arrays[k]->kind);
            memcpy(padded[k], from[k], (size_t)(rest * bytes_of(arrays[k]->kind)));
            arrays[k]->data = padded[k];
            if (arrays[k]->scales)
                arrays[k]->scales += (stop - rest) / CODED;
        }
    s.offset += stop - rest;
    s.flags &= ~STREAM;
    passes[rule](&s, 0, coded ? CODED : (rest + 15) / 16 * 16, sums);
    for (int k = 0; k < 5; ++k)
        if (from[k] && k != 1)
            memcpy(from[k], padded[k], (size_t)(rest * bytes_of(arrays[k]->kind)));
}
