/* AVX-512 with its dot products of bf16 and of bytes (Zen 4, Cooper Lake, Sapphire Rapids): for the decoder only. */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")))
#define DOTS_BF16 1
#include "vec_avx512.h"

/* w: 16 columns of a pair each; x: a pair. */
INLINE vec dot_bf16(vec sum, const void *w, const uint16_t *x)
{
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
}

#define CODE_ROWS ROWS
#define INT8_OFFSET 128 /* one factor has to be unsigned: w + 128, so that a sum begins at -128 times that of x */

/* Products of codes, as in vec_codes.h. */
typedef __m512i ivec;
INLINE ivec ivec_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE __m512i four_codes(const int8_t *x)
{
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
INLINE ivec dot_i8(ivec sum, const void *w, const int8_t *x)
{
    return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128)), four_codes(x));
}
INLINE ivec dot_i4(ivec sum, const void *w, const int8_t *x)
{
    const __m512i both = _mm512_loadu_si512(w), mask = _mm512_set1_epi8(15);
    sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(both, mask), four_codes(x));
    return _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask), four_codes(x + 4));
}
INLINE vec ivec_to_vec(ivec a) { return _mm512_cvtepi32_ps(a); }
INLINE vec pairs_to_vec(ivec a) { return ivec_to_vec(a); }
