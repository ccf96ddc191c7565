/* The kernels, written once over 16 fp32 lanes; each kernels_*.c compiles them for its instruction set.
 *
 * A vec_*.h gives `vec` (16 lanes), arithmetic on it, load_/store_ for each dtype (a store returns the values as they
 * read back after rounding; with `stream` it bypasses the caches), `vec64` (16 fp64 lanes) and copy_256_bytes.
 * Dtypes are chosen by a branch per group of elements, which is predicted after the first: a loop compiled for each
 * combination of dtypes made the library twenty times as large and minutes to build.
 */
#include "slipstream_ops.h"

#include <string.h>

INLINE int64_t itemsize(int dtype) { return dtype == DTYPE_F32 ? 4 : 2; }

INLINE vec load_vec(const char *p, int dtype)
{
    if (dtype == DTYPE_BF16)
        return load_bf16(p);
    return dtype == DTYPE_F32 ? load_f32(p) : load_f16(p);
}

INLINE vec store_vec(char *p, vec a, int dtype, int stream)
{
    if (dtype == DTYPE_BF16)
        return stream ? store_bf16(p, a, 1) : store_bf16(p, a, 0);
    if (dtype == DTYPE_F32)
        return stream ? store_f32(p, a, 1) : store_f32(p, a, 0);
    return stream ? store_f16(p, a, 1) : store_f16(p, a, 0);
}

/* ---- sum_ranks: out = round(alpha * (sources in rank order) [+ out]) ---- */

typedef struct {
    vec a, b, c, d;
} group; /* 64 lanes */

typedef char padded_group[GROUP * sizeof(float)];

/* A tail's elements followed by zeros. */
TARGET __attribute__((noinline)) static const char *pad(padded_group to, const char *from, int64_t nbytes)
{
    memset(to, 0, sizeof(padded_group));
    memcpy(to, from, (size_t)nbytes);
    return to;
}

/* Elements [i, i + width) of base; lanes past the width are zero. */
INLINE group load_group(const void *base, int64_t i, int64_t width, int dtype)
{
    padded_group padded;
    const char *p = (const char *)base + i * itemsize(dtype);
    if (width < GROUP)
        p = pad(padded, p, width * itemsize(dtype));
    if (dtype == DTYPE_BF16)
        return (group){load_bf16(p), load_bf16(p + 32), load_bf16(p + 64), load_bf16(p + 96)};
    if (dtype == DTYPE_F32)
        return (group){load_f32(p), load_f32(p + 64), load_f32(p + 128), load_f32(p + 192)};
    return (group){load_f16(p), load_f16(p + 32), load_f16(p + 64), load_f16(p + 96)};
}

INLINE group store_group(void *base, int64_t i, int64_t width, group x, int dtype, int stream)
{
    padded_group padded;
    const int64_t size = itemsize(dtype);
    char *p = (char *)base + i * size;
    char *to = width < GROUP ? padded : p;
    stream = stream && width == GROUP;
    x.a = store_vec(to, x.a, dtype, stream);
    x.b = store_vec(to + 16 * size, x.b, dtype, stream);
    x.c = store_vec(to + 32 * size, x.c, dtype, stream);
    x.d = store_vec(to + 48 * size, x.d, dtype, stream);
    if (width < GROUP)
        memcpy(p, padded, (size_t)(width * size));
    return x;
}

INLINE group add_groups(group x, group y)
{
    return (group){vec_add(x.a, y.a), vec_add(x.b, y.b), vec_add(x.c, y.c), vec_add(x.d, y.d)};
}

TARGET static double sum_block(const struct sum_args *args, int64_t start, int64_t stop, int source, int target)
{
    const void *const *sources = args->sources;
    const int64_t num_sources = args->num_sources;
    const int accumulate = args->accumulate, stream = args->stream;
    const vec alpha = vec_set(args->alpha);
    void *out = args->out;
    vec64 squares = vec64_zero();
    double lanes[16];
    for (int64_t i = start; i < stop; i += GROUP) {
        const int64_t width = stop - i < GROUP ? stop - i : GROUP;
        group sum = load_group(sources[0], i, width, source);
        for (int64_t rank = 1; rank < num_sources; ++rank)
            sum = add_groups(sum, load_group(sources[rank], i, width, source));
        sum = (group){vec_mul(sum.a, alpha), vec_mul(sum.b, alpha), vec_mul(sum.c, alpha), vec_mul(sum.d, alpha)};
        if (accumulate)
            sum = add_groups(sum, load_group(out, i, width, target));
        sum = store_group(out, i, width, sum, target, stream);
        squares = vec64_add_squares(squares, sum.a);
        squares = vec64_add_squares(squares, sum.b);
        squares = vec64_add_squares(squares, sum.c);
        squares = vec64_add_squares(squares, sum.d);
    }
    if (stream)
        fence_streams();
    vec64_store(lanes, squares);
    for (int half = 8; half >= 1; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* ---- adamw: one pass over master, gradient and both moments; weights written in their own dtype ---- */

/* a + rate * (b - a). The step starts from whichever of exp_avg and gradient weighs more (beta1 above or below 1/2), as
 * torch.lerp does: with beta1 = 0 the result is the gradient itself. */
INLINE vec lerp(vec a, vec b, vec rate) { return vec_add(a, vec_mul(rate, vec_sub(b, a))); }

/* Whole vectors of 16 elements from start to before stop. */
TARGET static void adamw_vectors(const struct adamw_args *args, int64_t start, int64_t stop, int grad, int target)
{
    const vec scale = vec_set(args->scale), keep = vec_set(args->keep), l2 = vec_set(args->l2);
    const vec rate = vec_set(args->rate), beta2 = vec_set(args->beta2), rest2 = vec_set(args->one_minus_beta2);
    const vec root_correction = vec_set(args->root_correction), eps = vec_set(args->eps);
    const vec step_size = vec_set(args->step_size);
    const int has_l2 = args->l2 != 0.0f, lerp_from_grad = args->lerp_from_grad, stream = args->stream;
    float *master = args->master, *exp_avg = args->exp_avg, *exp_avg_sq = args->exp_avg_sq;
    const char *grads = args->grad;
    char *out = args->out;
    for (int64_t i = start; i < stop; i += 16) {
        vec p = load_f32(master + i), m = load_f32(exp_avg + i), v = load_f32(exp_avg_sq + i);
        vec g = vec_mul(load_vec(grads + i * itemsize(grad), grad), scale);
        if (has_l2)
            g = vec_add(g, vec_mul(l2, p));
        p = vec_mul(p, keep);
        m = lerp_from_grad ? lerp(g, m, rate) : lerp(m, g, rate);
        v = vec_add(vec_mul(v, beta2), vec_mul(vec_mul(rest2, g), g));
        vec denominator = vec_add(vec_mul(vec_sqrt(v), root_correction), eps);
        p = vec_sub(p, vec_div(vec_mul(step_size, m), denominator));
        store_f32(master + i, p, 0);
        store_f32(exp_avg + i, m, 0);
        store_f32(exp_avg_sq + i, v, 0);
        if (out)
            store_vec(out + i * itemsize(target), p, target, stream);
    }
    if (stream)
        fence_streams();
}

TARGET static void adamw(const struct adamw_args *args, int64_t start, int64_t stop, int grad, int target)
{
    const int64_t whole = start + (stop - start) / 16 * 16, rest = stop - whole;
    adamw_vectors(args, start, whole, grad, target);
    if (rest == 0)
        return;
    float master[16] = {0}, exp_avg[16] = {0}, exp_avg_sq[16] = {0}, grads[16] = {0}, out[16];
    const size_t nbytes = (size_t)rest * sizeof(float);
    struct adamw_args padded = *args;
    memcpy(master, args->master + whole, nbytes);
    memcpy(exp_avg, args->exp_avg + whole, nbytes);
    memcpy(exp_avg_sq, args->exp_avg_sq + whole, nbytes);
    memcpy(grads, (const char *)args->grad + whole * itemsize(grad), (size_t)(rest * itemsize(grad)));
    padded.master = master;
    padded.exp_avg = exp_avg;
    padded.exp_avg_sq = exp_avg_sq;
    padded.grad = grads;
    padded.out = args->out ? out : NULL;
    padded.stream = 0;
    adamw_vectors(&padded, 0, 16, grad, target);
    memcpy(args->master + whole, master, nbytes);
    memcpy(args->exp_avg + whole, exp_avg, nbytes);
    memcpy(args->exp_avg_sq + whole, exp_avg_sq, nbytes);
    if (args->out)
        memcpy((char *)args->out + whole * itemsize(target), out, (size_t)(rest * itemsize(target)));
}

/* ---- copy ---- */

TARGET static void copy(char *dst, const char *src, int64_t nbytes)
{
    for (int64_t i = 0; i < nbytes; i += 256)
        copy_256_bytes(dst + i, src + i);
    fence_streams();
}
