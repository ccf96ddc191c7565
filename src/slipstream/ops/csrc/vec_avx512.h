/* 16 fp32 lanes in one AVX-512F register. See kernels.c for the meaning of each operation. */
#include <immintrin.h>

#ifndef TARGET /* vec_avx512vnni.h and vec_avx512bf16.h define it with more features, and their own products of codes */
#define TARGET __attribute__((target("avx512f,avx2,fma,f16c")))
#endif
#define INLINE static inline __attribute__((always_inline)) TARGET
#define KNOW_RECIPES 1 /* of the optimizers: optim_body.h */

#define WIDE 4 /* panels per decoder tile: see decoder_products.h */

typedef __m512 vec;
typedef struct {
    __m512d low, high;
} vec64;

INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec vec_sqrt(vec a) { return _mm512_sqrt_ps(a); }

INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vec_pick(vec a, vec least, vec yes, vec no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, least, _CMP_GE_OQ), no, yes);
}
/* A set bit for each lane without a sign; +-size by such bits; size with the signs of other lanes. size: not negative. */
INLINE uint32_t vec_signs(vec a) { return _mm512_cmpge_epi32_mask(_mm512_castps_si512(a), _mm512_setzero_si512()); }
INLINE vec vec_by_bits(uint32_t bits, vec size)
{
    const __m512i own = _mm512_castps_si512(size);
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(own, (__mmask16)~bits, own, _mm512_set1_epi32(INT32_MIN)));
}
INLINE vec vec_with_sign(vec size, vec a)
{
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(size), sign));
}
INLINE vec vec_pow2(vec n)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

INLINE vec vec_abs(vec a)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MAX)));
}
INLINE vec vec_larger(vec a, vec b)
{
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
INLINE int vec_has_nan(vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }

INLINE vec load_f32(const void *p) { return _mm512_loadu_ps(p); }
INLINE vec load_bf16(const void *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* Deinterleave 16 adjacent pairs of bf16. */
INLINE vec load_even_bf16(const char *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
INLINE vec load_odd_bf16(const char *p)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int32_t)0xffff0000)));
}
INLINE vec load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

#ifndef DOTS_BF16
#define DOTS_BF16 0
#define CODES_BY_AVX2 1 /* 256-bit instructions mixed with 512-bit ones are a quarter slower than alone (Cascade Lake) */
#define CODE_ROWS 4
#endif

#include "vec_lanes.h"

#define SIXTEEN_LINES 1 /* as transpose_8 */
INLINE void transpose_16(const char *const *lines, int64_t at, uint32_t *to, int64_t width)
{
    vec x[4];
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_castps128_ps512(_mm_loadu_ps((const float *)(lines[i] + at)));
        x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps((const float *)(lines[i + 4] + at)), 1);
        x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps((const float *)(lines[i + 8] + at)), 2);
        x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps((const float *)(lines[i + 12] + at)), 3);
    }
    const vec low = _mm512_unpacklo_ps(x[0], x[1]), high = _mm512_unpackhi_ps(x[0], x[1]);
    const vec low2 = _mm512_unpacklo_ps(x[2], x[3]), high2 = _mm512_unpackhi_ps(x[2], x[3]);
    _mm512_storeu_ps(to, _mm512_shuffle_ps(low, low2, 0x44));
    _mm512_storeu_ps(to + width, _mm512_shuffle_ps(low, low2, 0xee));
    _mm512_storeu_ps(to + 2 * width, _mm512_shuffle_ps(high, high2, 0x44));
    _mm512_storeu_ps(to + 3 * width, _mm512_shuffle_ps(high, high2, 0xee));
}
INLINE __m256 high_half(vec a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)); }
INLINE float lanes_sum(vec a) { return halves_sum(_mm512_castps512_ps256(a), high_half(a)); }
INLINE float lanes_max(vec a) { return halves_max(_mm512_castps512_ps256(a), high_half(a)); }
/* Round to the nearest integer, which is in [-128, 127] (or [0, 255]). */
INLINE void store_i8(void *p, vec a) { _mm_storeu_si128(p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
INLINE void store_u8(void *p, vec a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
/* 16 codes, rounded and clamped as in halves_store_codes. */
INLINE void store_16_codes(char *p, vec a, int negative)
{
    const __m512i whole = _mm512_cvtps_epi32(a); /* NaN becomes the smallest integer */
    _mm_storeu_si128((__m128i *)p, negative ? _mm512_cvtsepi32_epi8(whole)
                                            : _mm512_cvtusepi32_epi8(_mm512_max_epi32(whole, _mm512_set1_epi32(1))));
}
INLINE void store_codes(void *p, vec a, vec b, int negative)
{
    store_16_codes(p, a, negative);
    store_16_codes((char *)p + 16, b, negative);
}
INLINE uint32_t lanes_largest(vec a)
{
    return halves_largest(_mm256_castps_si256(_mm512_castps512_ps256(a)), _mm256_castps_si256(high_half(a)));
}
INLINE vec load_i8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
/* Look up 16 4-bit numbers in a table. */
INLINE vec load_nibbles(const void *p, vec table) { return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles(p)), table); }
INLINE vec load_u8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p))); }

INLINE vec store_f32(void *p, vec a, int stream)
{
    if (stream)
        _mm512_stream_ps((float *)p, a);
    else
        _mm512_storeu_ps(p, a);
    return a;
}
/* nans: there may be NaNs. */
INLINE vec store_bf16_numbers(void *p, vec a, int stream, int nans)
{
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even_up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    if (nans)
        even_up = _mm512_mask_set1_epi32(even_up, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), -1);
    __m512i rounded = _mm512_srli_epi32(even_up, 16);
    store_halves(p, _mm512_cvtepi32_epi16(rounded), stream);
    return _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16));
}
INLINE vec store_bf16(void *p, vec a, int stream) { return store_bf16_numbers(p, a, stream, 1); }
INLINE vec store_f16(void *p, vec a, int stream)
{
    __m256i bits = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store_halves(p, bits, stream);
    return _mm512_cvtph_ps(bits);
}

typedef __m512i words;
/* Each lane's own random number, and the other number of its word: [Note: Random bits]. */
INLINE words own_half(halves x, int paired)
{
    (void)paired;
    return _mm512_cvtepu16_epi32(x);
}
INLINE words other_half(halves x, int paired) { return _mm512_shuffle_epi32(own_half(x, paired), _MM_PERM_CDAB); }
INLINE vec words_to_vec(words a) { return _mm512_cvtepi32_ps(a); }
/* Pairs gain nothing here, because each conversion is one instruction: all lanes are in order. */
INLINE vec load_bf16_pairs(const char *p) { return load_bf16(p); }
INLINE vec store_bf16_up(void *p, vec a, words below, int paired, int nans)
{
    __m512i sum = _mm512_add_epi32(_mm512_castps_si512(a), below);
    (void)paired;
    if (nans)
        sum = _mm512_mask_set1_epi32(sum, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), -1);
    const __m512i bits = _mm512_srli_epi32(sum, 16);
    store_halves(p, _mm512_cvtepi32_epi16(bits), 0);
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

INLINE vec64 vec64_zero(void) { return (vec64){_mm512_setzero_pd(), _mm512_setzero_pd()}; }
INLINE vec64 vec64_add_squares(vec64 sum, vec a)
{
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    __m512d high = _mm512_cvtps_pd(high_half(a));
    sum.low = _mm512_fmadd_pd(low, low, sum.low);
    sum.high = _mm512_fmadd_pd(high, high, sum.high);
    return sum;
}
INLINE void vec64_store(double *lanes, vec64 sum)
{
    _mm512_storeu_pd(lanes, sum.low);
    _mm512_storeu_pd(lanes + 8, sum.high);
}

/* Non-temporal stores are weakly ordered: call this before publishing that the data is written. */
INLINE void fence_streams(void) { _mm_sfence(); }
