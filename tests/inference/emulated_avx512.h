/* AVX-512 for machines without it: the intrinsics that csrc/vec_avx512*.h use, by SIMDe and, where SIMDe 0.7 lacks one, from
 * AVX2's. Included before each source of csrc that is to be emulated. */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <string.h>

#define EMULATED static inline __attribute__((always_inline))

EMULATED __m256i part(__m512i a, int which)
{
    __m256i half;
    memcpy(&half, (const char *)&a + 32 * which, 32);
    return half;
}
EMULATED __m512i whole(__m256i low, __m256i high)
{
    __m512i both;
    memcpy(&both, &low, 32);
    memcpy((char *)&both + 32, &high, 32);
    return both;
}
EMULATED __m256 part_ps(__m512 a, int which) { return _mm256_castsi256_ps(part(_mm512_castps_si512(a), which)); }
EMULATED __m512 whole_ps(__m256 low, __m256 high)
{
    return _mm512_castsi512_ps(whole(_mm256_castps_si256(low), _mm256_castps_si256(high)));
}

EMULATED __m512i cvtps_epi32(__m512 a) { return whole(_mm256_cvtps_epi32(part_ps(a, 0)), _mm256_cvtps_epi32(part_ps(a, 1))); }
EMULATED __m512 cvtepi32_ps(__m512i a) { return whole_ps(_mm256_cvtepi32_ps(part(a, 0)), _mm256_cvtepi32_ps(part(a, 1))); }
EMULATED __m512i cvtepu16_epi32(__m256i a)
{
    return whole(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
EMULATED __m256i cvtepi32_epi16(__m512i a)
{
    int32_t wide[16];
    int16_t low[16];
    __m256i r;
    memcpy(wide, &a, sizeof wide);
    for (int i = 0; i < 16; ++i)
        low[i] = (int16_t)wide[i];
    memcpy(&r, low, sizeof r);
    return r;
}
/* 16 bytes: with `most`, numbers above it become it; else the lowest 8 bits of each. */
EMULATED __m128i to_bytes(__m512i a, uint32_t most)
{
    uint32_t words[16];
    uint8_t bytes[16];
    __m128i r;
    memcpy(words, &a, sizeof words);
    for (int i = 0; i < 16; ++i)
        bytes[i] = (uint8_t)(most && words[i] > most ? most : words[i]);
    memcpy(&r, bytes, sizeof r);
    return r;
}
EMULATED __m512i cvtepi8_epi32(__m128i a) { return whole(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))); }
EMULATED __m512i cvtepu8_epi32(__m128i a) { return whole(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))); }
EMULATED __m512 cvtph_ps(__m256i a)
{
    return whole_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
EMULATED __m256i cvtps_ph(__m512 a) /* to nearest even, the one mode that is used */
{
    const __m128i low = _mm256_cvtps_ph(part_ps(a, 0), 0), high = _mm256_cvtps_ph(part_ps(a, 1), 0);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
EMULATED __m512d cvtps_pd(__m256 a)
{
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    __m512d both;
    memcpy(&both, &low, 32);
    memcpy((char *)&both + 32, &high, 32);
    return both;
}

#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtps_pd
#undef _mm512_stream_ps
#undef _mm512_stream_si512
#define _mm512_cvtps_epi32(a) cvtps_epi32(a)
#define _mm512_cvtepi32_ps(a) cvtepi32_ps(a)
#define _mm512_cvtepu16_epi32(a) cvtepu16_epi32(a)
#define _mm512_cvtepi32_epi16(a) cvtepi32_epi16(a)
#define _mm512_cvtepi8_epi32(a) cvtepi8_epi32(a)
#define _mm512_cvtepu8_epi32(a) cvtepu8_epi32(a)
#define _mm512_cvtepi32_epi8(a) to_bytes(a, 0)
#define _mm512_cvtusepi32_epi8(a) to_bytes(a, 255)
#define _mm512_shuffle_epi32(a, order) whole(_mm256_shuffle_epi32(part(a, 0), order), _mm256_shuffle_epi32(part(a, 1), order))
#define _mm512_cvtph_ps(a) cvtph_ps(a)
#define _mm512_cvtps_ph(a, mode) cvtps_ph(a)
#define _mm512_cvtps_pd(a) cvtps_pd(a)
#define _mm512_stream_ps(p, a) _mm512_storeu_ps(p, a)
#define _mm512_stream_si512(p, a) _mm512_storeu_si512(p, a)

#define target(features) /* no function is compiled for AVX-512 */
