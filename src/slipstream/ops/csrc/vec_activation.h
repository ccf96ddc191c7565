/* Activations of 16 lanes and their derivatives. Included after a vec_*.h. */
#ifndef SLIPSTREAM_VEC_ACTIVATION_H
#define SLIPSTREAM_VEC_ACTIVATION_H

#include "vec_exp.h"

enum activation { GELU_TANH, GELU, SILU, RELU }; /* as in ops/fused.py */

/* x * sigmoid(z(x)) and its derivative; the tanh form of GELU is one of these: (1 + tanh(y)) / 2 is sigmoid(2 y). */
INLINE vec by_sigmoid(vec x, vec z, vec dz, vec *slope)
{
    const vec one = vec_set(1.0f);
    const vec s = vec_div(one, vec_add(one, vec_exp(vec_min(vec_sub(vec_zero(), z), vec_set(80.0f)))));
    const vec y = vec_mul(x, s);
    *slope = vec_fma(vec_mul(y, vec_sub(one, s)), dz, s);
    return y;
}

/* x * Phi(x), by a polynomial of erf (Abramowitz and Stegun 7.1.26, error 1.5e-7); the exponential is the density's, too. */
INLINE vec by_erf(vec x, vec *slope)
{
    const vec one = vec_set(1.0f), zero = vec_zero();
    const vec t = vec_div(one, vec_fma(vec_abs(x), vec_set(0.3275911f * 0.70710678f), one));
    const vec e = vec_exp(vec_max(vec_mul(vec_mul(x, x), vec_set(-0.5f)), vec_set(-80.0f)));
    vec p = vec_fma(t, vec_set(0.5f * 1.061405429f), vec_set(0.5f * -1.453152027f));
    p = vec_fma(t, p, vec_set(0.5f * 1.421413741f));
    p = vec_fma(t, p, vec_set(0.5f * -0.284496736f));
    p = vec_fma(t, p, vec_set(0.5f * 0.254829592f));
    const vec tail = vec_mul(vec_mul(p, t), e), share = vec_pick(x, zero, vec_sub(one, tail), tail);
    *slope = vec_fma(vec_mul(x, e), vec_set(0.39894228f), share);
    return vec_mul(x, share);
}

INLINE vec activated(int kind, vec x, vec *slope)
{
    const vec one = vec_set(1.0f), zero = vec_zero();
    if (kind == GELU_TANH) {
        const vec square = vec_mul(x, x), twice = vec_set(1.5957691216f);
        return by_sigmoid(x, vec_mul(vec_mul(twice, x), vec_fma(square, vec_set(0.044715f), one)),
                          vec_mul(twice, vec_fma(square, vec_set(0.134145f), one)), slope);
    }
    if (kind == GELU)
        return by_erf(x, slope);
    if (kind == SILU)
        return by_sigmoid(x, x, one, slope);
    *slope = vec_pick(zero, x, zero, one); /* ReLU */
    return vec_max(zero, x);
}

#endif
