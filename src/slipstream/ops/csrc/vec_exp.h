/* e^x of 16 lanes. Included after a vec_*.h. */
#ifndef SLIPSTREAM_VEC_EXP_H
#define SLIPSTREAM_VEC_EXP_H

INLINE vec vec_zero(void) { return vec_set(0.0f); }

/* e^x for x <= 88, by 2^n * polynomial; exactly 1 at 0 (Cephes' coefficients, relative error 2e-7). NaN stays NaN: of a NaN, minimum
 * and maximum return their second operand. */
INLINE vec vec_exp(vec x)
{
    const vec magic = vec_set(12582912.0f); /* adding and subtracting it rounds to integers */
    x = vec_max(vec_set(-87.0f), vec_min(vec_set(88.0f), x));
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

#endif
