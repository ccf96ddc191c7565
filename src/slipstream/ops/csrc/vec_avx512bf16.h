/* AVX-512 with dot products of bf16 and of bytes (Zen 4, Cooper Lake, Sapphire Rapids): for the decoder and grouped products. */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")))
#define DOTS_BF16 1
#include "vec_avx512.h"
#include "vec_vnni.h"

/* sum += lane by lane the product of w's pair with x, one pair. */
INLINE vec dot_pairs(vec sum, vec w, const uint16_t *x)
{
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(w), (__m512bh)_mm512_set1_epi32(pair));
}
/* w: 16 columns of a pair each; x: a pair. */
INLINE vec dot_bf16(vec sum, const void *w, const uint16_t *x) { return dot_pairs(sum, load_f32(w), x); }
/* Pairs with 0 in place of numbers that are not wanted. */
INLINE vec pairs_of(vec pairs, int first, int second)
{
    const uint32_t kept = (first ? 0xffff : 0) | (second ? 0xffff0000 : 0);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32((int32_t)kept)));
}
