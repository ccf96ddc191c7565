/* The optimizers: one pass over gradient, master, states and weights, written once over 16 fp32 lanes.
 *
 * Each array is fp32, bf16 or fp16, the states also 8-bit codes; all is computed in fp32. A rule is a function of 16 elements;
 * the pass around it is one text, compiled for each rule, and for AdamW's common recipes by themselves. The torch twins in
 * ops/optim_reference.py do the same operations in the same order, and ops/optim.py gives the coefficients their values.
 *
 * [Note: Codes] A block of 256 elements has one fp32 scale, the largest magnitude in it, and a code counts 127ths of it in a
 * momentum. Of a sum of squares the root is kept, in 255ths, and never less than one, because what divides a step must not become
 * zero: such an element is stepped too little, not too far. A block's new values stay in first-level cache until its new scale is
 * known. What is not finite makes the scale NaN, and so the whole block.
 *
 * [Note: Random bits] With STOCHASTIC, what rests narrow is rounded up with the probability that makes it right on average, so
 * that updates below half a unit of the last place are not lost. The bits are a hash of the keys (seed and step) and of the
 * element's number: neither threads nor shards nor chunks change them.
 */

#include "optim.h"

#define AHEAD 512 /* elements */

/* ---- what rests narrow ---- */

/* Bits for elements number to number + 15; number is a multiple of 16. Two rounds of a multiplicative mixer. */
INLINE words random_words(int64_t number, const uint32_t *keys)
{
    const uint32_t high = keys[1] + (uint32_t)((uint64_t)number >> 32) * 0x9e3779b9u;
    words x = words_from((uint32_t)number);
    x = words_xor(x, words_set(keys[0]));
    x = words_mul(words_xor(x, words_right(x, 16)), words_set(0x7feb352du));
    x = words_xor(x, words_set(high));
    x = words_mul(words_xor(x, words_right(x, 15)), words_set(0x846ca68bu));
    return words_xor(x, words_right(x, 16));
}

INLINE int64_t bytes_of(int64_t kind) { return kind == DTYPE_F32 ? 4 : kind == CODES ? 1 : 2; }

/* 16 elements from i of an array that is no codes. */
INLINE vec get(struct array from, int64_t i) { return load_vec((const char *)from.data + i * bytes_of(from.kind), (int)from.kind); }

/* unit: the block's scale over the largest code. Of a sum of squares this is the root. */
INLINE vec get_codes(struct array from, int64_t i, vec unit, int negative)
{
    const char *p = (const char *)from.data + i;
    return vec_mul(negative ? load_i8(p) : load_u8(p), unit);
}

/* The processor's own prefetching stops at each page. */
INLINE void prefetch(struct array from, int64_t i)
{
    __builtin_prefetch((const char *)from.data + (i + AHEAD) * bytes_of(from.kind));
}

/* Returns the values as they read back. below: 16 random bits. */
INLINE vec put(struct array to, int64_t i, vec x, int stochastic, words below, int stream)
{
    char *p = (char *)to.data + i * bytes_of(to.kind);
    return stochastic && to.kind == DTYPE_BF16 ? store_bf16_up(p, x, below) : store_vec(p, x, (int)to.kind, stream);
}

/* A block's new values to codes and scale. most: the largest magnitudes, lane by lane. dither: what is added before a code is
 * rounded to nearest, or NULL. */
TARGET __attribute__((noinline)) static void encode(struct array to, int64_t i, int64_t count, const float *values, vec most,
                                                    const float *dither, int negative)
{
    const vec full = vec_set(negative ? 127.0f : 255.0f), least = vec_set(negative ? -127.0f : 1.0f);
    char *codes = (char *)to.data + i;
    int32_t lanes[16], largest = 0;
    float scale;
    store_f32(lanes, most, 0);
    for (int lane = 0; lane < 16; ++lane) /* as whole numbers, among which a NaN is above infinity */
        largest = lanes[lane] > largest ? lanes[lane] : largest;
    largest = largest < 0x7f800000 ? largest : 0x7fc00000;
    memcpy(&scale, &largest, sizeof scale);
    to.scales[i / CODED] = scale;
    const vec inverse = vec_div(full, vec_max(vec_set(scale), vec_set(0x1p-100f)));
    for (int64_t k = 0; k < count; k += 16) {
        vec c = vec_mul(load_f32(values + k), inverse);
        if (dither)
            c = vec_add(c, load_f32(dither + k));
        c = vec_max(vec_min(c, full), least);
        if (negative)
            store_i8(codes + k, c);
        else
            store_u8(codes + k, c);
    }
}

/* ---- rules ---- */

/* Of 16 elements: weights, the two states, the root of the second. */
typedef struct {
    vec p, m, v, root;
} lanes;

/* a + rate * (b - a). The step starts from whichever of state and gradient weighs more, as torch.lerp does: with beta = 0 the
 * result is the gradient itself. */
INLINE vec lerp(vec m, vec g, vec rate, int from_grad)
{
    const vec a = from_grad ? g : m, b = from_grad ? m : g;
    return vec_add(a, vec_mul(rate, vec_sub(b, a)));
}

INLINE lanes average(lanes x, vec g, const vec *c, int flags)
{
    x.m = lerp(x.m, g, c[RATE], flags & FROM_GRAD);
    x.v = vec_add(vec_mul(x.v, c[BETA]), vec_mul(vec_mul(c[REST], g), g));
    return x;
}

INLINE lanes adamw(lanes x, vec g, const vec *c, int flags)
{
    x.p = vec_mul(x.p, c[KEEP]);
    x = average(x, g, c, flags);
    x.root = vec_sqrt(x.v);
    x.p = vec_sub(x.p, vec_div(vec_mul(c[LR], x.m), vec_add(vec_mul(x.root, c[CORRECTION2]), c[EPS])));
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

/* What LAMB subtracts, but for the rate. */
INLINE vec lamb_update(lanes x, const vec *c, int flags)
{
    const vec v = vec_mul(x.v, c[CORRECTION2]);
    const vec denominator = flags & EPS_INSIDE ? vec_sqrt(vec_add(v, c[EPS])) : vec_add(vec_sqrt(v), c[EPS]);
    const vec divisor = vec_max(vec_set(0x1p-126f), denominator); /* also where eps is 0: zeros stay zeros */
    return vec_add(vec_div(vec_mul(x.m, c[CORRECTION1]), divisor), vec_mul(c[L2], x.p));
}

/* ---- the pass ---- */

/* Elements [start, stop), a multiple of 16 of them. weights, states: the kinds of the master and of both states where the compiler
 * is to know them, else ANY. */
enum { ANY = -1 };
INLINE void pass(enum rule rule, const struct step *step, int64_t start, int64_t stop, double *sums, int weights, int states)
{
    struct step s = *step;
    s.master.kind = weights == ANY ? s.master.kind : weights;
    s.first.kind = states == ANY ? s.first.kind : states;
    s.second.kind = states == ANY ? s.second.kind : states;
    const int stochastic = s.flags & STOCHASTIC, has_l2 = s.coefficients[L2] != 0.0f;
    const int reads_grad = rule != LAMB_APPLY, writes_states = rule != LAMB_APPLY, writes_weights = rule != LAMB_UPDATE;
    const int adds_l2 = rule == ADAMW || rule == SGD || rule == ADAGRAD;
    const int has_first = rule != ADAGRAD && (rule != SGD || s.first.data), has_second = rule != LION && rule != SGD;
    const int may_code = rule == ADAMW || rule == LION || rule == SGD;
    const int codes_first = may_code && has_first && s.first.kind == CODES;
    const int codes_second = may_code && has_second && s.second.kind == CODES;
    vec c[NUM_COEFFICIENTS];
    for (int k = 0; k < NUM_COEFFICIENTS; ++k)
        c[k] = vec_set(s.coefficients[k]);
    vec64 weight_squares = vec64_zero(), update_squares = vec64_zero();
    float first[CODED], second[CODED], dither[CODED]; /* of a block with codes: new values, random numbers from -1/2 to 1/2 */
    for (int64_t at = start; at < stop; at += CODED) {
        const int64_t end = stop - at < CODED ? stop : at + CODED;
        const vec first_unit = codes_first ? vec_set(s.first.scales[at / CODED] / 127.0f) : vec_set(0.0f);
        const vec second_unit = codes_second ? vec_set(s.second.scales[at / CODED] / 255.0f) : vec_set(0.0f);
        vec first_most = vec_set(0.0f), second_most = vec_set(0.0f);
        for (int64_t i = at; i < end; i += 16) {
            prefetch(s.master, i);
            if (reads_grad)
                prefetch(s.grad, i);
            if (has_first && !codes_first)
                prefetch(s.first, i);
            if (has_second && !codes_second)
                prefetch(s.second, i);
            lanes x = {get(s.master, i), vec_set(0.0f), vec_set(0.0f), vec_set(0.0f)};
            vec g = reads_grad ? vec_mul(get(s.grad, i), c[SCALE]) : vec_set(0.0f);
            if (has_first)
                x.m = codes_first ? get_codes(s.first, i, first_unit, 1) : get(s.first, i);
            if (codes_second) {
                x.root = get_codes(s.second, i, second_unit, 0);
                x.v = vec_mul(x.root, x.root);
            } else if (has_second) {
                x.v = get(s.second, i);
            }

            if (adds_l2 && has_l2)
                g = vec_add(g, vec_mul(c[L2], x.p));
            if (rule == ADAMW)
                x = adamw(x, g, c, s.flags);
            else if (rule == LION)
                x = lion(x, g, c, s.flags);
            else if (rule == SGD)
                x = sgd(x, g, c, s.flags, has_first);
            else if (rule == ADAGRAD)
                x = adagrad(x, g, c);
            else if (rule == LAMB_UPDATE)
                x = average(x, g, c, s.flags);
            else
                x.p = vec_sub(x.p, vec_mul(c[LR], lamb_update(x, c, s.flags)));

            words weight_bits = words_set(0), state_bits = words_set(0);
            if (stochastic) {
                const words random = random_words(s.offset + i, s.keys);
                weight_bits = words_right(random, 16);
                state_bits = words_and(random, words_set(0xffff));
            }
            if (stochastic && (codes_first || codes_second)) {
                const vec unit = vec_mul(words_to_vec(state_bits), vec_set(0x1p-16f));
                store_f32(dither + (i - at), vec_sub(unit, vec_set(0.5f - 0x1p-17f)), 0);
            }
            if (codes_first) {
                store_f32(first + (i - at), x.m, 0);
                first_most = vec_larger(first_most, vec_abs(x.m));
            } else if (writes_states && has_first)
                x.m = put(s.first, i, x.m, stochastic, state_bits, 0);
            if (codes_second) {
                store_f32(second + (i - at), x.root, 0);
                second_most = vec_larger(second_most, vec_abs(x.root));
            } else if (writes_states && has_second)
                x.v = put(s.second, i, x.v, stochastic, state_bits, 0);
            if (rule == LAMB_UPDATE) {
                weight_squares = vec64_add_squares(weight_squares, x.p);
                update_squares = vec64_add_squares(update_squares, lamb_update(x, c, s.flags));
            }
            if (writes_weights) {
                x.p = put(s.master, i, x.p, stochastic, weight_bits, 0);
                if (s.out.data)
                    put(s.out, i, x.p, 0, weight_bits, s.flags & STREAM);
            }
        }
        if (codes_first)
            encode(s.first, at, end - at, first, first_most, stochastic ? dither : 0, 1);
        if (codes_second)
            encode(s.second, at, end - at, second, second_most, stochastic ? dither : 0, 0);
    }
    if (s.flags & STREAM)
        fence_streams();
    if (rule == LAMB_UPDATE) {
        sums[0] += folded(weight_squares);
        sums[1] += folded(update_squares);
    }
}

/* The kinds are those of the recipe, which the compiler then knows. */
#define RECIPE(rule, weights, states)                                                               \
    if (step->master.kind == (weights) && first == (states) && second == (states)) {                \
        pass(rule, step, start, stop, sums, weights, states);                                       \
        return;                                                                                     \
    }
#define PASS(name, rule)                                                                            \
    TARGET static void name(const struct step *step, int64_t start, int64_t stop, double *sums)     \
    {                                                                                               \
        const int64_t first = rule == ADAGRAD ? step->second.kind : step->first.kind;               \
        const int64_t second = rule == LION || rule == SGD ? first : step->second.kind;             \
        if (KNOW_RECIPES) {                                                                         \
            RECIPE(rule, DTYPE_F32, DTYPE_F32)                                                      \
            if (rule == ADAMW) {                                                                    \
                RECIPE(rule, DTYPE_F32, DTYPE_BF16)                                                 \
                RECIPE(rule, DTYPE_F32, CODES)                                                      \
                RECIPE(rule, DTYPE_BF16, DTYPE_BF16)                                                \
                RECIPE(rule, DTYPE_BF16, CODES)                                                     \
            }                                                                                       \
        }                                                                                           \
        pass(rule, step, start, stop, sums, ANY, ANY);                                              \
    }
PASS(adamw_pass, ADAMW)
PASS(lion_pass, LION)
PASS(sgd_pass, SGD)
PASS(adagrad_pass, ADAGRAD)
PASS(lamb_update_pass, LAMB_UPDATE)
PASS(lamb_apply_pass, LAMB_APPLY)

static void (*const passes[NUM_RULES])(const struct step *, int64_t, int64_t, double *) = {
    adamw_pass, lion_pass, sgd_pass, adagrad_pass, lamb_update_pass, lamb_apply_pass};

/* What is left of a last block goes through a copy with zeros behind it. */
TARGET static void step(int rule, const struct step *whole, int64_t start, int64_t stop, double *sums)
{
    const int64_t rest = stop % 16 ? stop % CODED : 0;
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
    passes[rule](&s, 0, (rest + 15) / 16 * 16, sums);
    for (int k = 0; k < 5; ++k)
        if (from[k] && k != 1)
            memcpy(from[k], padded[k], (size_t)(rest * bytes_of(arrays[k]->kind)));
}
