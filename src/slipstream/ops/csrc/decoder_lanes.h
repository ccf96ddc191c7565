/* Definitions shared by the parts of the forward: the state of a thread, and functions of 16 lanes. */
#ifndef SLIPSTREAM_DECODER_LANES_H
#define SLIPSTREAM_DECODER_LANES_H

#include "decoder.h"

#include <math.h>
#include <string.h>

#define MASKED (-1e30f)

/* One thread of a forward. Every thread runs the same stages; its own rows are [from, until). */
struct worker {
    struct team *team;
    int thread, stage;
    float *scratch;
    int64_t from, until;
    struct ahead ahead;
};

INLINE vec vec_zero(void) { return vec_set(0.0f); }

/* e^x for x <= 88, by 2^n * polynomial; exactly 1 at 0 (Cephes' coefficients, relative error 2e-7). */
INLINE vec vec_exp(vec x)
{
    const vec magic = vec_set(12582912.0f); /* adding and subtracting it rounds to integers */
    x = vec_max(vec_min(x, vec_set(88.0f)), vec_set(-87.0f));
    vec n = vec_sub(vec_add(vec_mul(x, vec_set(1.44269504f)), magic), magic);
    vec r = vec_fma(n, vec_set(-0.693359375f), x);
    r = vec_fma(n, vec_set(2.12194440e-4f), r);
    vec p = vec_set(1.9875691500e-4f);
    p = vec_fma(p, r, vec_set(1.3981999507e-3f));
    p = vec_fma(p, r, vec_set(8.3334519073e-3f));
    p = vec_fma(p, r, vec_set(4.1665795894e-2f));
    p = vec_fma(p, r, vec_set(1.6666665459e-1f));
    p = vec_fma(p, r, vec_set(5.0000001201e-1f));
    p = vec_add(vec_fma(vec_mul(r, r), p, r), vec_set(1.0f));
    return vec_mul(p, vec_pow2(n));
}

INLINE vec vec_tanh(vec x)
{
    const vec one = vec_set(1.0f);
    return vec_sub(one, vec_div(vec_set(2.0f), vec_add(vec_exp(vec_min(vec_add(x, x), vec_set(80.0f))), one)));
}

TARGET static float exp_of(float x)
{
    float lanes[16];
    store_f32(lanes, vec_exp(vec_set(x)), 0);
    return lanes[0];
}

#endif
