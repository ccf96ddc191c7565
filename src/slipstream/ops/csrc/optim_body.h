/* The optimizers: one pass over gradient, master, states and weights, written once over 16 fp32 lanes.
 *
 * Each array is fp32, bf16 or fp16, the states also 8-bit codes; all is computed in fp32. A rule is a function of 16 elements;
 * the pass around it is one text, compiled once per rule. The torch twins in ops/optim_reference.py do the same operations in
 * the same order, and ops/optim.py gives the rules' coefficients their values.
 *
 * [Note: Codes] A block of 256 elements has one fp32 scale, the largest magnitude m in it. A momentum x is sign(c) (c/127)^2 m;
 * of a sum of squares the root is kept, (c/255)^2 m, and c is at least 1, because what divides a step must not become zero.
 * Squares because values spread over orders of magnitude: the smallest step is 1/65025 of the largest value, and no table has to
 * be searched. A block's new values stay in first-level cache until its new scale is known. What is not finite makes the scale
 * NaN, and so the whole block.
 *
 * [Note: Random bits] With STOCHASTIC, what rests narrow is rounded up with the probability that makes it right on average, so
 * that updates below half a unit of the last place are not lost. The bits are a hash of the keys (seed and step) and of the
 * element's number: neither threads nor shards nor chunks change them.
 */

#include "optim.h"

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

/* Elements [i, i + width) of an array that is no codes; lanes past the width are zero. */
INLINE vec get(struct array from, int64_t i, int64_t width)
{
    padded_group padded;
    const char *p = (const char *)from.data + i * bytes_of(from.kind);
    return load_vec(width < 16 ? pad(padded, p, width * bytes_of(from.kind)) : p, (int)from.kind);
}

/* unit: the block's scale over the square of the largest code. Of a sum of squares this is the root. */
INLINE vec get_codes(struct array from, int64_t i, int64_t width, vec unit, int negative)
{
    padded_group padded;
    const char *p = (const char *)from.data + i;
    if (width < 16)
        p = pad(padded, p, width);
    const vec c = negative ? load_i8(p) : load_u8(p);
    return vec_mul(vec_mul(c, vec_abs(c)), unit);
}

/* Returns the values as they read back. below: 16 random bits. */
INLINE vec put(struct array to, int64_t i, int64_t width, vec x, int stochastic, words below, int stream)
{
    padded_group padded;
    char *p = (char *)to.data + i * bytes_of(to.kind);
    if (stochastic && to.kind == DTYPE_BF16)
        x = vec_cut_bf16(x, below);
    if (width == 16)
        return store_vec(p, x, (int)to.kind, stream);
    x = store_vec(padded, x, (int)to.kind, 0);
    memcpy(p, padded, (size_t)(width * bytes_of(to.kind)));
    return x;
}

typedef struct {
    float values[CODED]; /* new values of a block */
    vec most;            /* the largest magnitude, lane by lane */
} block;

INLINE void keep(block *to, int64_t i, vec x)
{
    store_f32(to->values + i % CODED, x, 0);
    to->most = vec_larger(to->most, vec_abs(x));
}

/* A block's new values to codes and scale. Elements [i, i + count). */
TARGET __attribute__((noinline)) static void encode(struct array to, int64_t i, int64_t count, const block *from,
                                                    const struct step *s, int negative)
{
    const vec full = vec_set(negative ? 127.0f : 255.0f), least = vec_set(negative ? 0.0f : 1.0f);
    int32_t lanes[16], most = 0;
    float scale;
    store_f32(lanes, from->most, 0);
    for (int lane = 0; lane < 16; ++lane) /* as whole numbers, among which a NaN is above infinity */
        most = lanes[lane] > most ? lanes[lane] : most;
    most = most < 0x7f800000 ? most : 0x7fc00000;
    memcpy(&scale, &most, sizeof scale);
    to.scales[i / CODED] = scale;
    const vec inverse = vec_div(vec_set(1.0f), vec_max(vec_set(scale), vec_set(0x1p-100f)));
    for (int64_t k = 0; k < count; k += 16) {
        const vec x = load_f32(from->values + k);
        vec c = vec_mul(vec_sqrt(vec_mul(vec_abs(x), inverse)), full);
        if (s->flags & STOCHASTIC) { /* -1/2 to 1/2, and then to the nearest whole number */
            const vec random = words_to_vec(words_and(random_words(s->offset + i + k, s->keys), words_set(0xffff)));
            c = vec_add(c, vec_sub(vec_mul(random, vec_set(0x1p-16f)), vec_set(0.5f - 0x1p-17f)));
        }
        c = vec_max(vec_min(c, full), least);
        char codes[16], *data = (char *)to.data + i + k, *p = count - k < 16 ? codes : data;
        if (negative)
            store_i8(p, vec_sign_like(c, x));
        else
            store_u8(p, c);
        if (count - k < 16)
            memcpy(data, codes, (size_t)(count - k));
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
    return vec_add(vec_div(vec_mul(x.m, c[CORRECTION1]), denominator), vec_mul(c[L2], x.p));
}

/* ---- the pass ---- */

INLINE vec scale_of(struct array a, int64_t i, float full)
{
    return vec_set(a.kind == CODES ? a.scales[i / CODED] / (full * full) : 0.0f);
}

INLINE void pass(enum rule rule, const struct step *step, int64_t start, int64_t stop, double *sums)
{
    const struct step s = *step;
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
    block first, second;
    for (int64_t at = start; at < stop; at += CODED) {
        const int64_t end = stop - at < CODED ? stop : at + CODED;
        const vec first_unit = scale_of(s.first, at, 127.0f), second_unit = scale_of(s.second, at, 255.0f);
        first.most = second.most = vec_set(0.0f);
        for (int64_t i = at; i < end; i += 16) {
            const int64_t width = end - i < 16 ? end - i : 16;
            lanes x = {get(s.master, i, width), vec_set(0.0f), vec_set(0.0f), vec_set(0.0f)};
            vec g = vec_set(0.0f);
            if (reads_grad)
                g = vec_mul(get(s.grad, i, width), c[SCALE]);
            if (has_first)
                x.m = codes_first ? get_codes(s.first, i, width, first_unit, 1) : get(s.first, i, width);
            if (codes_second) {
                x.root = get_codes(s.second, i, width, second_unit, 0);
                x.v = vec_mul(x.root, x.root);
            } else if (has_second) {
                x.v = get(s.second, i, width);
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
            if (writes_states && has_first) {
                if (codes_first)
                    keep(&first, i, x.m);
                else
                    x.m = put(s.first, i, width, x.m, stochastic, state_bits, 0);
            }
            if (writes_states && has_second) {
                if (codes_second)
                    keep(&second, i, x.root);
                else
                    x.v = put(s.second, i, width, x.v, stochastic, state_bits, 0);
            }
            if (rule == LAMB_UPDATE) {
                weight_squares = vec64_add_squares(weight_squares, x.p);
                update_squares = vec64_add_squares(update_squares, lamb_update(x, c, s.flags));
            }
            if (writes_weights) {
                x.p = put(s.master, i, width, x.p, stochastic, weight_bits, 0);
                if (s.out.data)
                    put(s.out, i, width, x.p, 0, weight_bits, s.flags & STREAM);
            }
        }
        if (codes_first)
            encode(s.first, at, end - at, &first, &s, 1);
        if (codes_second)
            encode(s.second, at, end - at, &second, &s, 0);
    }
    if (s.flags & STREAM)
        fence_streams();
    if (rule == LAMB_UPDATE) {
        sums[0] = folded(weight_squares);
        sums[1] = folded(update_squares);
    }
}

#define PASS(name, rule)                                                                            \
    TARGET static void name(const struct step *step, int64_t start, int64_t stop, double *sums)     \
    {                                                                                               \
        pass(rule, step, start, stop, sums);                                                        \
    }
PASS(adamw_pass, ADAMW)
PASS(lion_pass, LION)
PASS(sgd_pass, SGD)
PASS(adagrad_pass, ADAGRAD)
PASS(lamb_update_pass, LAMB_UPDATE)
PASS(lamb_apply_pass, LAMB_APPLY)

static const struct passes passes = {{adamw_pass, lion_pass, sgd_pass, adagrad_pass, lamb_update_pass, lamb_apply_pass}};
