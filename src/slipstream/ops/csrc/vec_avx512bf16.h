/* AVX-512 with dot products of bf16 and of bytes (Zen 4, Cooper Lake, Sapphire Rapids): for the decoder and grouped products. */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")))
#define DOTS_BF16 1
#include "vec_avx512.h"
#include "vec_vnni.h"

/* w: 16 columns of a pair each; x: a pair. */
INLINE vec dot_bf16(vec sum, const void *w, const uint16_t *x)
{
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
}
