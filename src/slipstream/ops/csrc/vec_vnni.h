/* Products of 8-bit and 4-bit codes with AVX-512VNNI. Included after TARGET and INLINE are defined. The sums are integers, so they
 * equal those of vec_codes.h exactly. */
#define CODE_ROWS ROWS
#define UNROLL_CODES _Pragma("GCC unroll 8") /* all: else gcc moves every accumulator twice per iteration */
#define INT8_OFFSET 128 /* one factor must be unsigned: w + 128, so a sum starts at -128 times the sum of x */

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
/* Codes of at most 6 bits: 4 unsigned bytes for each of 16 columns. Some bits of each byte at p; two such joined; their products. */
typedef __m512i code_bytes;
INLINE code_bytes masked_at(const void *p, const int shift, const int mask)
{
    const __m512i v = _mm512_loadu_si512(p);
    return _mm512_and_si512(shift ? _mm512_srli_epi16(v, (unsigned)shift) : v, _mm512_set1_epi8((char)mask));
}
INLINE code_bytes either(code_bytes a, code_bytes b) { return _mm512_or_si512(a, b); }
INLINE ivec dot_bytes(ivec sum, code_bytes w, const int8_t *x) { return _mm512_dpbusd_epi32(sum, w, four_codes(x)); }
INLINE vec ivec_to_vec(ivec a) { return _mm512_cvtepi32_ps(a); }
INLINE vec pairs_to_vec(ivec a) { return ivec_to_vec(a); }
