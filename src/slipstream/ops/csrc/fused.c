/* What a transformer layer computes between its products, each in one pass over memory, forward and backward. Arithmetic is fp32.
 *
 * Rows have `columns` elements of one dtype, without gaps. Vectors over the columns (biases, weights of norms, their gradients) are
 * fp32, padded with zeros to a multiple of 16. Such gradients are added to the caller's sums, one set for each thread. */
#include "fused.h"
#include "isa.h"

#if KNOWN
#include "vec_activation.h"
#include "vec_drop.h"

INLINE int64_t place(const struct fused *s, int64_t row, int64_t c) { return (row * s->columns + c) * itemsize(s->dtype); }
INLINE vec get(const struct fused *s, const char *base, int64_t row, int64_t c)
{
    return load_part(base + place(s, row, c), s->columns - c, s->dtype);
}
INLINE void put(const struct fused *s, char *base, int64_t row, int64_t c, vec a)
{
    store_part(base + place(s, row, c), a, s->columns - c, s->dtype);
}
INLINE void add_to(float *sums, int64_t c, vec a) { store_f32(sums + c, vec_add(load_f32(sums + c), a), 0); }
INLINE vec dropped(const struct fused *s, vec a, int64_t row, int64_t c)
{
    return s->least > 0 ? vec_mul(a, vec_kept(s->seed, (uint32_t)row, (uint32_t)(c / 16), s->least)) : a;
}

/* ---- sum = dropout(x + bias) + residual; out = norm(sum) ---- */

TARGET static void add_norm(const struct fused *s, int64_t begin, int64_t end)
{
    const vec zero = vec_zero();
    const int64_t columns = s->columns;
    for (int64_t row = begin; row < end; ++row) {
        vec total = zero, squares = zero;
        if (s->sum != s->x || s->bias || s->residual || s->least > 0)
            for (int64_t c = 0; c < columns; c += 16) {
                vec a = get(s, s->x, row, c);
                if (s->bias)
                    a = vec_add(a, load_f32(s->bias + c));
                a = dropped(s, a, row, c);
                if (s->residual)
                    a = vec_add(a, get(s, s->residual, row, c));
                put(s, s->sum, row, c, a);
            }
        if (s->kind == FUSED_NO_NORM)
            continue;
        if (s->kind == FUSED_LAYER_NORM)
            for (int64_t c = 0; c < columns; c += 16)
                total = vec_add(total, get(s, s->sum, row, c)); /* lanes past the end are 0 */
        const float mean = lanes_sum(total) / (float)columns;
        for (int64_t c = 0; c < columns; c += 16) {
            const vec a = first_lanes(vec_sub(get(s, s->sum, row, c), vec_set(mean)), columns - c, zero);
            squares = vec_fma(a, a, squares);
        }
        const float inverse = 1.0f / sqrtf(lanes_sum(squares) / (float)columns + s->eps);
        s->stats[2 * row] = mean, s->stats[2 * row + 1] = inverse;
        for (int64_t c = 0; c < columns; c += 16) {
            vec a = vec_mul(vec_mul(vec_sub(get(s, s->sum, row, c), vec_set(mean)), vec_set(inverse)), load_f32(s->weight + c));
            if (s->shift)
                a = vec_add(a, load_f32(s->shift + c));
            put(s, s->out, row, c, a);
        }
    }
}

/* The normalized value: of the sum, or of the norm's output (`inverse_weight` is not NULL). */
INLINE vec normal(const struct fused *s, int64_t row, int64_t c, vec mean, vec inverse)
{
    vec a = get(s, s->x, row, c);
    if (!s->inverse_weight)
        return vec_mul(vec_sub(a, mean), inverse);
    if (s->shift)
        a = vec_sub(a, load_f32(s->shift + c));
    return vec_mul(a, load_f32(s->inverse_weight + c));
}

/* x: the sum, or the norm's output. Gradients: grad, of the output; sum_grad, of the sum, or NULL. Writes those of sum and residual to
 * dsum, and that of x before dropout to dx, or NULL if it is the same. */
TARGET static void add_norm_backward(const struct fused *s, int64_t begin, int64_t end)
{
    const int64_t columns = s->columns;
    for (int64_t row = begin; row < end; ++row) {
        vec mean = vec_zero(), inverse = mean, first = mean, second = mean;
        if (s->kind != FUSED_NO_NORM) {
            mean = vec_set(s->stats[2 * row]), inverse = vec_set(s->stats[2 * row + 1]);
            for (int64_t c = 0; c < columns; c += 16) {
                const vec by = vec_mul(get(s, s->grad, row, c), load_f32(s->weight + c));
                first = vec_add(first, by);
                second = vec_fma(by, normal(s, row, c, mean, inverse), second);
            }
            first = s->kind == FUSED_LAYER_NORM ? vec_set(lanes_sum(first) / (float)columns) : vec_zero();
            second = vec_set(lanes_sum(second) / (float)columns);
        }
        for (int64_t c = 0; c < columns; c += 16) {
            vec d = vec_zero();
            if (s->kind != FUSED_NO_NORM) {
                const vec grad = get(s, s->grad, row, c), a = normal(s, row, c, mean, inverse);
                add_to(s->dweight, c, vec_mul(grad, a));
                if (s->dshift)
                    add_to(s->dshift, c, grad);
                d = vec_mul(vec_sub(vec_sub(vec_mul(grad, load_f32(s->weight + c)), first), vec_mul(a, second)), inverse);
            }
            if (s->sum_grad)
                d = vec_add(d, get(s, s->sum_grad, row, c));
            if (s->dsum)
                put(s, s->dsum, row, c, d);
            if (s->dx || s->dbias) {
                d = dropped(s, d, row, c);
                if (s->dx)
                    put(s, s->dx, row, c, d);
                if (s->dbias)
                    add_to(s->dbias, c, d);
            }
        }
    }
}

/* ---- out = activation(x + bias) [* up] ---- */

TARGET static void activate(const struct fused *s, int64_t begin, int64_t end)
{
    vec slope;
    for (int64_t row = begin; row < end; ++row)
        for (int64_t c = 0; c < s->columns; c += 16) {
            vec a = get(s, s->x, row, c);
            if (s->bias)
                a = vec_add(a, load_f32(s->bias + c));
            a = activated(s->kind, a, &slope);
            if (s->residual)
                a = vec_mul(a, get(s, s->residual, row, c));
            put(s, s->out, row, c, a);
        }
}

/* Gradients of x (dx) and up (dsum), either of which may overwrite `grad`; out: computes the output again, or NULL. */
TARGET static void activate_backward(const struct fused *s, int64_t begin, int64_t end)
{
    vec slope;
    for (int64_t row = begin; row < end; ++row)
        for (int64_t c = 0; c < s->columns; c += 16) {
            vec a = get(s, s->x, row, c), grad = get(s, s->grad, row, c);
            if (s->bias)
                a = vec_add(a, load_f32(s->bias + c));
            a = activated(s->kind, a, &slope);
            if (s->residual) {
                const vec up = get(s, s->residual, row, c);
                put(s, s->dsum, row, c, vec_mul(grad, a));
                grad = vec_mul(grad, up), a = vec_mul(a, up);
            }
            if (s->out)
                put(s, s->out, row, c, a);
            grad = vec_mul(grad, slope);
            put(s, s->dx, row, c, grad);
            if (s->dbias)
                add_to(s->dbias, c, grad);
        }
}

/* ---- rotary positions: rows are tokens, with `heads` heads of `columns` features, of which the first `rotated` are rotated ---- */

/* bias, weight: cosines and sines, fp32 [tokens, rotated]. kind: 1 rotates back. x may have gaps: `stride` elements between tokens. */
TARGET static void rotate(const struct fused *s, int64_t begin, int64_t end)
{
    const int64_t half = s->rotated / 2, size = itemsize(s->dtype);
    for (int64_t row = begin; row < end; ++row) {
        const float *cosine = s->bias + row % s->tokens * s->rotated, *sine = s->weight + row % s->tokens * s->rotated;
        for (int64_t head = 0; head < s->heads; ++head) {
            const char *from = s->x + (row * s->stride + head * s->columns) * size;
            char *to = s->out + (row * s->heads + head) * s->columns * size;
            for (int64_t c = 0; c < half; c += 16) {
                const int64_t count = half - c;
                const vec a = load_part(from + c * size, count, s->dtype), b = load_part(from + (c + half) * size, count, s->dtype);
                const vec cos_a = load_part((const char *)(cosine + c), count, DTYPE_F32);
                const vec cos_b = load_part((const char *)(cosine + half + c), count, DTYPE_F32);
                const vec sin_a = load_part((const char *)(sine + c), count, DTYPE_F32);
                const vec sin_b = load_part((const char *)(sine + half + c), count, DTYPE_F32);
                const vec turned_a = s->kind ? vec_fma(b, sin_b, vec_mul(a, cos_a)) : vec_sub(vec_mul(a, cos_a), vec_mul(b, sin_a));
                const vec turned_b = s->kind ? vec_sub(vec_mul(b, cos_b), vec_mul(a, sin_a)) : vec_fma(a, sin_b, vec_mul(b, cos_b));
                store_part(to + c * size, turned_a, count, s->dtype);
                store_part(to + (c + half) * size, turned_b, count, s->dtype);
            }
            memcpy(to + s->rotated * size, from + s->rotated * size, (size_t)((s->columns - s->rotated) * size));
        }
    }
}

/* ---- losses of logits: (1 - eps) (end - the target's logit) + eps (end - the mean logit), end being the log-sum-exp of a row ---- */

INLINE int64_t target_of(const struct fused *s, int64_t row) { return ((const int64_t *)s->residual)[row]; }
INLINE float one_of(const char *p, int dtype) { return lanes_sum(load_part(p, 1, dtype)); }

/* residual: targets, int64. Writes each row's `end` to stats and its loss to out, fp32. */
TARGET static void lose(const struct fused *s, int64_t begin, int64_t end)
{
    const vec zero = vec_zero(), least = vec_set(-INFINITY);
    const int64_t columns = s->columns;
    for (int64_t row = begin; row < end; ++row) {
        vec most = least, total = zero, exps = zero;
        int has_nan = 0;
        for (int64_t c = 0; c < columns; c += 16) {
            const vec a = get(s, s->x, row, c);
            has_nan |= vec_has_nan(a);
            total = vec_add(total, a);
            most = vec_max(most, first_lanes(a, columns - c, least));
        }
        const float top = lanes_max(most);
        for (int64_t c = 0; c < columns; c += 16)
            exps = vec_add(exps, first_lanes(vec_exp(vec_sub(get(s, s->x, row, c), vec_set(top))), columns - c, zero));
        const float sum = has_nan || isinf(top) ? NAN : top + logf(lanes_sum(exps));
        const float chosen = one_of(s->x + place(s, row, target_of(s, row)), s->dtype);
        s->stats[row] = sum;
        ((float *)s->out)[row] = sum - (s->eps > 0 ? chosen + s->eps * (lanes_sum(total) / (float)columns - chosen) : chosen);
    }
}

/* residual: targets; bias: each row's `end`; weight: the gradients of the losses. Writes the gradients of the logits to dx. */
TARGET static void lose_backward(const struct fused *s, int64_t begin, int64_t end)
{
    const float spread = s->eps / (float)s->columns;
    for (int64_t row = begin; row < end; ++row) {
        const float top = s->bias[row], by = s->weight[row];
        const int64_t target = target_of(s, row);
        const vec scale = vec_set(isfinite(top) || by == 0 ? by : NAN); /* a row without a finite loss has no gradient */
        for (int64_t c = 0; c < s->columns; c += 16) {
            const vec a = by == 0 ? vec_zero() : vec_exp(vec_sub(get(s, s->x, row, c), vec_set(top)));
            put(s, s->dx, row, c, vec_mul(vec_sub(a, vec_set(spread)), scale));
        }
        const float own = expf(one_of(s->x + place(s, row, target), s->dtype) - top) - spread - (1 - s->eps);
        if (by != 0)
            store_part(s->dx + place(s, row, target), vec_mul(vec_set(own), scale), 1, s->dtype);
    }
}
#endif

const struct fused_isa OF_ISA(fused) = TABLE({add_norm, add_norm_backward, activate, activate_backward, rotate, lose, lose_backward});
