/* 16 fp32 lanes in two AVX2 registers. See kernels.c for the meaning of each operation. */
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define KNOW_RECIPES 1 /* of the optimizers: optim_body.h */
#define FOR_AVX2 1

/* The decoder's tiles: see decoder_products.h. */
#define WIDE 2
#define DOTS_BF16 0

typedef struct {
    __m256 low, high;
} vec;
typedef struct {
    __m256d a, b, c, d;
} vec64;

INLINE vec vec_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec vec_add(vec a, vec b) { return (vec){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE vec vec_sub(vec a, vec b) { return (vec){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE vec vec_mul(vec a, vec b) { return (vec){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE vec vec_div(vec a, vec b) { return (vec){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
INLINE vec vec_sqrt(vec a) { return (vec){_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }

INLINE vec vec_fma(vec a, vec b, vec c) { return (vec){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
INLINE vec vec_min(vec a, vec b) { return (vec){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
INLINE vec vec_max(vec a, vec b) { return (vec){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE vec vec_pick(vec a, vec least, vec yes, vec no)
{
    return (vec){_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, least.low, _CMP_GE_OQ)),
                 _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, least.high, _CMP_GE_OQ))};
}
/* A set bit for each lane without a sign; +-size by such bits; size with the signs of other lanes. size: not negative. */
INLINE uint32_t vec_signs(vec a)
{
    return ~(uint32_t)(_mm256_movemask_ps(a.low) | _mm256_movemask_ps(a.high) << 8);
}
INLINE vec vec_by_bits(uint32_t bits, vec size)
{
    const __m256i wide = _mm256_set1_epi32((int32_t)~bits), sign = _mm256_set1_epi32(INT32_MIN);
    const __m256i low = _mm256_sllv_epi32(wide, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    const __m256i high = _mm256_sllv_epi32(wide, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16));
    return (vec){_mm256_or_ps(size.low, _mm256_castsi256_ps(_mm256_and_si256(low, sign))),
                 _mm256_or_ps(size.high, _mm256_castsi256_ps(_mm256_and_si256(high, sign)))};
}
INLINE vec vec_with_sign(vec size, vec a)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vec){_mm256_or_ps(size.low, _mm256_and_ps(a.low, sign)), _mm256_or_ps(size.high, _mm256_and_ps(a.high, sign))};
}
INLINE __m256 pow2(__m256 n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE vec vec_pow2(vec n) { return (vec){pow2(n.low), pow2(n.high)}; }
INLINE vec vec_abs(vec a)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vec){_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
INLINE __m256 larger(__m256 a, __m256 b)
{
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
INLINE vec vec_larger(vec a, vec b) { return (vec){larger(a.low, b.low), larger(a.high, b.high)}; }
INLINE int vec_has_nan(vec a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.low, a.high, _CMP_UNORD_Q)) != 0; }

INLINE vec load_f32(const void *p)
{
    const float *x = p;
    return (vec){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
INLINE __m256 widen_bf16(__m128i bits)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
INLINE vec load_bf16(const void *p)
{
    const __m128i *x = p;
    return (vec){widen_bf16(_mm_loadu_si128(x)), widen_bf16(_mm_loadu_si128(x + 1))};
}
/* Deinterleave 16 adjacent pairs of bf16. */
INLINE __m256 even_bf16(const void *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16)); }
INLINE __m256 odd_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p), _mm256_set1_epi32((int32_t)0xffff0000)));
}
INLINE vec load_even_bf16(const char *p) { return (vec){even_bf16(p), even_bf16(p + 32)}; }
INLINE vec load_odd_bf16(const char *p) { return (vec){odd_bf16(p), odd_bf16(p + 32)}; }
INLINE vec load_f16(const void *p)
{
    const __m128i *x = p;
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x + 1))};
}

#include "vec_codes.h"
#include "vec_lanes.h"

INLINE float lanes_sum(vec a) { return halves_sum(a.low, a.high); }
INLINE float lanes_max(vec a) { return halves_max(a.low, a.high); }
INLINE void store_i8(void *p, vec a) { halves_store_i8(p, a.low, a.high); }
INLINE void store_u8(void *p, vec a) { halves_store_u8(p, a.low, a.high); }
INLINE void store_codes(void *p, vec a, vec b, int negative) { halves_store_codes(p, a.low, a.high, b.low, b.high, negative); }
INLINE uint32_t lanes_largest(vec a) { return halves_largest(_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)); }
INLINE vec load_i8(const void *p) { return (vec){widen_i8(p), widen_i8((const char *)p + 8)}; }
INLINE vec load_u8(const void *p) { return (vec){widen_u8(p), widen_u8((const char *)p + 8)}; }

/* Look up 16 4-bit numbers in a table. */
INLINE __m256 looked_up(__m128i eight, vec table)
{
    const __m256i number = _mm256_cvtepu8_epi32(eight);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(number, 28)); /* bit 3 as the sign */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, number), _mm256_permutevar8x32_ps(table.high, number), upper);
}
INLINE vec load_nibbles(const void *p, vec table)
{
    const __m128i numbers = nibbles(p);
    return (vec){looked_up(numbers, table), looked_up(_mm_srli_si128(numbers, 8), table)};
}

INLINE vec ivec_to_vec(ivec a) { return (vec){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
INLINE vec pairs_to_vec(ivec a)
{
    const __m256i ones = _mm256_set1_epi16(1);
    return (vec){_mm256_cvtepi32_ps(_mm256_madd_epi16(a.low, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(a.high, ones))};
}

INLINE vec store_f32(void *p, vec a, int stream)
{
    float *x = p;
    if (stream) {
        _mm256_stream_ps(x, a.low);
        _mm256_stream_ps(x + 8, a.high);
    } else {
        _mm256_storeu_ps(x, a.low);
        _mm256_storeu_ps(x + 8, a.high);
    }
    return a;
}
/* bf16 bits in the low half of each 32-bit lane, rounded to nearest even; with `nans`, a NaN becomes 0xffff. */
INLINE __m256i round_bf16(__m256 a, int nans)
{
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even_up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); /* all ones, itself a NaN */
    return _mm256_srli_epi32(nans ? _mm256_or_si256(even_up, is_nan) : even_up, 16);
}
INLINE vec store_bf16_numbers(void *p, vec a, int stream, int nans)
{
    __m256i low = round_bf16(a.low, nans), high = round_bf16(a.high, nans);
    store_halves(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8), stream);
    return (vec){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
INLINE vec store_bf16(void *p, vec a, int stream) { return store_bf16_numbers(p, a, stream, 1); }
INLINE vec store_f16(void *p, vec a, int stream)
{
    __m128i low = _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128i high = _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store_halves(p, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), stream);
    return (vec){_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)};
}

/* bf16 in pairs: the first of each in `low`, the second in `high`. Neither loads nor stores cross lanes. */
INLINE __m256i pairs(__m256i low, __m256i high) { return _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa); }
INLINE vec load_bf16_pairs(const char *p) { return (vec){even_bf16(p), odd_bf16(p)}; }

typedef struct {
    __m256i low, high;
} words;
/* Each lane's own random number, and the other number of its word: [Note: Random bits]. */
INLINE words own_half(halves x, int paired)
{
    if (paired)
        return (words){_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(x, 16)};
    return (words){_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
INLINE words other_half(halves x, int paired)
{
    const words own = own_half(paired ? x : halves_swapped(x), paired);
    return paired ? (words){own.high, own.low} : own;
}
INLINE vec words_to_vec(words a) { return (vec){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
/* a + below, whose upper half is bf16, rounded up if `below` (16 bits) carries. A NaN stays NaN. */
INLINE __m256i carried(__m256 a, __m256i below, int nans)
{
    const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(a), below);
    return nans ? _mm256_or_si256(sum, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q))) : sum;
}
INLINE vec store_bf16_up(void *p, vec a, words below, int paired, int nans)
{
    const __m256i low = carried(a.low, below.low, nans), high = carried(a.high, below.high, nans);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
    if (paired)
        _mm256_storeu_si256(p, pairs(low, high));
    else
        _mm256_storeu_si256(
            p, _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16)), 0xd8));
    return (vec){_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
}

INLINE vec64 vec64_zero(void)
{
    __m256d zero = _mm256_setzero_pd();
    return (vec64){zero, zero, zero, zero};
}
INLINE __m256d add_squares(__m256d sum, __m128 a)
{
    __m256d wide = _mm256_cvtps_pd(a);
    return _mm256_fmadd_pd(wide, wide, sum);
}
INLINE vec64 vec64_add_squares(vec64 sum, vec a)
{
    sum.a = add_squares(sum.a, _mm256_castps256_ps128(a.low));
    sum.b = add_squares(sum.b, _mm256_extractf128_ps(a.low, 1));
    sum.c = add_squares(sum.c, _mm256_castps256_ps128(a.high));
    sum.d = add_squares(sum.d, _mm256_extractf128_ps(a.high, 1));
    return sum;
}
INLINE void vec64_store(double *lanes, vec64 sum)
{
    _mm256_storeu_pd(lanes, sum.a);
    _mm256_storeu_pd(lanes + 4, sum.b);
    _mm256_storeu_pd(lanes + 8, sum.c);
    _mm256_storeu_pd(lanes + 12, sum.d);
}

/* Non-temporal stores are weakly ordered: call this before publishing that the data is written. */
INLINE void fence_streams(void) { _mm_sfence(); }
