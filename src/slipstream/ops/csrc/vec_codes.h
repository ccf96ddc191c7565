/* Products of 8-bit and 4-bit codes with AVX2, also used for AVX-512 without VNNI. Included by vec_avx2.h, after TARGET and INLINE
 * are defined. */
#define CODE_ROWS 4 /* integer accumulators and their sums fill 16 registers */
#define UNROLL_CODES _Pragma("GCC unroll 1") /* else gcc delays all additions to the end and spills the products */
#define INT8_OFFSET 0

/* Products of codes: x holds signed bytes, w 16 columns of 4 bytes each, one for each of 4 consecutive x. */
typedef struct {
    __m256i low, high;
} ivec;
INLINE ivec ivec_set(int32_t x) { return (ivec){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE __m256i four_codes(const int8_t *x)
{
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
/* Signed w: |x| * (w with the sign of x), because one factor must be unsigned; at most 2 * 127 * 127 in 16 bits. */
INLINE __m256i dot_signed(__m256i sum, __m256i w, __m256i x)
{
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE ivec dot_i8(ivec sum, const void *w, const int8_t *x)
{
    const __m256i *columns = w, codes = four_codes(x);
    return (ivec){dot_signed(sum.low, _mm256_loadu_si256(columns), codes), dot_signed(sum.high, _mm256_loadu_si256(columns + 1), codes)};
}
/* 8 consecutive x: the low halves of w belong to the first four. Sums of pairs in 16 bits: 32 features fit (8 * 3810). */
INLINE __m256i dot_halves(__m256i sum, __m256i w, __m256i first, __m256i second)
{
    const __m256i mask = _mm256_set1_epi8(15);
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_and_si256(w, mask), first));
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), mask), second));
}
INLINE ivec dot_i4(ivec sum, const void *w, const int8_t *x)
{
    const __m256i *columns = w, first = four_codes(x), second = four_codes(x + 4);
    return (ivec){dot_halves(sum.low, _mm256_loadu_si256(columns), first, second),
                  dot_halves(sum.high, _mm256_loadu_si256(columns + 1), first, second)};
}
/* Codes of at most 6 bits: 4 unsigned bytes for each of 16 columns. Some bits of each byte at p; two such joined; their products. */
typedef ivec code_bytes;
INLINE __m256i masked_half(const void *p, const int shift, const int mask)
{
    const __m256i v = _mm256_loadu_si256(p);
    return _mm256_and_si256(shift ? _mm256_srli_epi16(v, shift) : v, _mm256_set1_epi8((char)mask));
}
INLINE code_bytes masked_at(const void *p, const int shift, const int mask)
{
    return (code_bytes){masked_half(p, shift, mask), masked_half((const char *)p + 32, shift, mask)};
}
INLINE code_bytes either(code_bytes a, code_bytes b) { return (code_bytes){_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
INLINE __m256i dot_half(__m256i sum, __m256i w, __m256i x)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
INLINE ivec dot_bytes(ivec sum, code_bytes w, const int8_t *x)
{
    const __m256i codes = four_codes(x);
    return (ivec){dot_half(sum.low, w.low, codes), dot_half(sum.high, w.high, codes)};
}
