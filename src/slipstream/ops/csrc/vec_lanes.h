/* Operations across 16 lanes in two 256-bit registers, for AVX2 and AVX-512F. Included by their vec_*.h, after TARGET and INLINE
 * are defined. Reductions combine lanes i and i + 8 first, then i and i + 4, and so on. */
INLINE float halves_sum(__m256 low, __m256 high)
{
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float halves_max(__m256 low, __m256 high)
{
    const __m256 eight = _mm256_max_ps(low, high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
/* Round to the nearest integer, which is in [-128, 127] (or [0, 255]). */
INLINE void halves_store_i8(void *p, __m256 low, __m256 high)
{
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high)); /* 128 bits at a time */
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
INLINE void halves_store_u8(void *p, __m256 low, __m256 high)
{
    const __m256i words = _mm256_packus_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(p, _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
INLINE __m256 widen_i8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))); }
INLINE __m256 widen_u8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p))); }

/* 16 4-bit numbers, two per byte, the first in the low half -> bytes. */
INLINE __m128i nibbles(const void *p)
{
    const __m128i both = _mm_loadl_epi64(p), mask = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16(both, 4), mask));
}

/* 32 codes: round to the nearest integer and clamp to 8 bits; NaN becomes the lowest code. The lowest unsigned code is 1. */
INLINE void halves_store_codes(void *p, __m256 a, __m256 b, __m256 c, __m256 d, int negative)
{
    const __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)); /* 128 bits at a time */
    const __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
    const __m256i codes =
        negative ? _mm256_packs_epi16(ab, cd) : _mm256_max_epu8(_mm256_packus_epi16(ab, cd), _mm256_set1_epi8(1));
    _mm256_storeu_si256(p, _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
INLINE uint32_t halves_largest(__m256i low, __m256i high)
{
    const __m256i eight = _mm256_max_epu32(low, high);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
}

INLINE void store_halves(void *p, __m256i bits, int stream)
{
    if (stream)
        _mm256_stream_si256((__m256i *)p, bits);
    else
        _mm256_storeu_si256((__m256i *)p, bits);
}

/* 16 random 16-bit numbers: [Note: Random bits] in optim_body.h. */
typedef __m256i halves;
INLINE halves halves_of(uint32_t seed)
{
    const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i place = _mm256_mullo_epi32(number, _mm256_set1_epi32((int32_t)0x9e3779b9));
    __m256i x = _mm256_xor_si256(_mm256_set1_epi32((int32_t)seed), place);
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7feb352d));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int32_t)0x846ca68b));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}
INLINE halves halves_swapped(halves x) { return _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_srli_epi32(x, 16)); }

/* to[j][i] = word j of lines[i], from byte `at`, for 8 lines and 4 words; rows of `to` are `width` words apart. */
INLINE void transpose_8(const char *const *lines, int64_t at, uint32_t *to, int64_t width)
{
    __m256 x[4];
    for (int i = 0; i < 4; ++i)
        x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)(lines[i] + at))),
                                    _mm_loadu_ps((const float *)(lines[i + 4] + at)), 1);
    const __m256 low = _mm256_unpacklo_ps(x[0], x[1]), high = _mm256_unpackhi_ps(x[0], x[1]);
    const __m256 low2 = _mm256_unpacklo_ps(x[2], x[3]), high2 = _mm256_unpackhi_ps(x[2], x[3]);
    _mm256_storeu_ps((float *)to, _mm256_shuffle_ps(low, low2, 0x44));
    _mm256_storeu_ps((float *)(to + width), _mm256_shuffle_ps(low, low2, 0xee));
    _mm256_storeu_ps((float *)(to + 2 * width), _mm256_shuffle_ps(high, high2, 0x44));
    _mm256_storeu_ps((float *)(to + 3 * width), _mm256_shuffle_ps(high, high2, 0xee));
}
