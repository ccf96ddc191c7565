/* The kernels of training over flat arrays, written once over 16 fp32 lanes.
 *
 * A vec_*.h defines `vec` (16 lanes), arithmetic on it, load_/store_ for each dtype (a store returns the rounded values; with
 * `stream` it bypasses the caches) and `vec64` (16 fp64 lanes).
 * A branch per group of elements selects the dtype and is predicted after the first: a loop compiled for each combination of
 * dtypes made the library twenty times as large and took minutes to build.
 */
#include "optim.h"
#include "isa.h"

#if KNOWN

/* ---- sum_ranks: out = round(alpha * (sources in rank order) [+ out]) ---- */

typedef struct {
    vec a, b, c, d;
} group; /* 64 lanes */

typedef char padded_group[GROUP * sizeof(float)];

/* Copy a tail and pad it with zeros. */
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

TARGET static double folded(vec64 sum)
{
    double lanes[16];
    vec64_store(lanes, sum);
    for (int half = 8; half >= 1; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

TARGET static double sum_block(const struct sum_args *args, int64_t start, int64_t stop, int source, int target)
{
    const void *const *sources = args->sources;
    const int64_t num_sources = args->num_sources;
    const int accumulate = args->accumulate, stream = args->stream;
    const vec alpha = vec_set(args->alpha);
    void *out = args->out;
    vec64 squares = vec64_zero();
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
    return folded(squares);
}

/* ---- copy ---- */

TARGET static void copy(char *dst, const char *src, int64_t nbytes)
{
#pragma GCC unroll 4
    for (int64_t i = 0; i < nbytes; i += 64)
        store_f32(dst + i, load_f32(src + i), 1);
    fence_streams();
}

#include "optim_body.h"
#include "wire_body.h"
#include "onebit_body.h"
#endif

const struct kernels_isa OF_ISA(kernels) = TABLE(sum_block, copy, step, wire_encode, wire_sum);
const struct onebit_isa OF_ISA(onebit) = TABLE({onebit_worker, onebit_server, onebit_update});
