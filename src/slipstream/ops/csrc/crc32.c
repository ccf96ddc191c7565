/* zlib's CRC-32 with an optional copy: one pass over memory for both a checkpoint's copy and its checksums.
 *
 * Carry-less multiplication folds 64 bytes at a time onto the next 64 (Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel 2009). Folding preserves the remainder, so in the end sixteen bytes represent all before
 * them; those and the tail are divided bit by bit. If the processor lacks the instruction, ops/checksum.py uses zlib.
 *
 * The copy bypasses the caches and is bound by memory. Two things make it as fast as a plain copy: prefetching AHEAD bytes, and,
 * with AVX-512, writing each cache line with a single store.
 */
#include "slipstream_ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static uint32_t divide(uint32_t crc, const unsigned char *bytes, int64_t nbytes)
{
    for (int64_t i = 0; i < nbytes; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
    return crc;
}

#define FOLDS __attribute__((target("pclmul")))

FOLDS static inline __m128i fold(__m128i x, __m128i by, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next);
}

#define AHEAD 4096 /* bytes; prefetching past the end is harmless */

/* Load the next 64 bytes of `from` into the lanes, and copy them to `to` (64-byte aligned) unless it is NULL. */
FOLDS static inline void take(__m128i next[4], char *to, const char *from)
{
    _mm_prefetch(from + AHEAD, _MM_HINT_T0);
    for (int i = 0; i < 4; i++) {
        next[i] = _mm_loadu_si128((const __m128i *)from + i);
        if (to)
            _mm_stream_si128((__m128i *)to + i, next[i]);
    }
}

__attribute__((target("pclmul,avx512f"))) static inline void take_wide(__m128i next[4], char *to, const char *from)
{
    _mm_prefetch(from + AHEAD, _MM_HINT_T0);
    for (int i = 0; i < 4; i++)
        next[i] = _mm_loadu_si128((const __m128i *)from + i);
    _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
}

/* nbytes is a positive multiple of 64. */
#define DEFINE_RUN(NAME, TARGET, TAKE)                                                                                          \
    __attribute__((target(TARGET))) static uint32_t NAME(uint32_t crc, char *to, const char *from, int64_t nbytes)              \
    {                                                                                                                           \
        const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4); /* x^(512-32), x^(512+32) mod P, bits reversed */    \
        const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);                                                      \
        __m128i x[4], next[4];                                                                                                  \
        TAKE(x, to, from);                                                                                                      \
        x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));                                                                \
        for (int64_t at = 64; at < nbytes; at += 64) {                                                                          \
            TAKE(next, to ? to + at : 0, from + at);                                                                            \
            for (int i = 0; i < 4; i++)                                                                                         \
                x[i] = fold(x[i], by_512, next[i]);                                                                             \
        }                                                                                                                       \
        for (int i = 1; i < 4; i++)                                                                                             \
            x[0] = fold(x[0], by_128, x[i]);                                                                                    \
        unsigned char left[16];                                                                                                 \
        _mm_storeu_si128((__m128i *)left, x[0]);                                                                                \
        return divide(0, left, 16);                                                                                             \
    }

DEFINE_RUN(run, "pclmul", take)
DEFINE_RUN(run_wide, "pclmul,avx512f", take_wide)

SLIPSTREAM_API int slipstream_has_crc32(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_PCLMUL) != 0;
}

static uint32_t crc32(uint32_t crc, char *to, const char *from, int64_t nbytes, int wide)
{
    int64_t head = to ? (int64_t)(-(uintptr_t)to & 63u) : 0, body;
    crc = ~crc;
    if (head > nbytes)
        head = nbytes;
    body = (nbytes - head) & ~(int64_t)63;
    crc = divide(crc, (const unsigned char *)from, head);
    if (body && !to)
        crc = run(crc, 0, from, body);
    else if (body)
        crc = (wide ? run_wide : run)(crc, to + head, from + head, body);
    crc = divide(crc, (const unsigned char *)from + head + body, nbytes - head - body);
    if (to) {
        __builtin_memcpy(to, from, (size_t)head);
        __builtin_memcpy(to + head + body, from + head + body, (size_t)(nbytes - head - body));
        _mm_sfence(); /* another thread writes the bytes to disk */
    }
    return ~crc;
}

/* One checksum per `block` bytes; sums[0] is continued from `crc`. */
SLIPSTREAM_API void slipstream_crc32(uint32_t *sums, uint32_t crc, char *to, const char *from, int64_t nbytes, int64_t block)
{
    static int known; /* cached, because CPUID takes microseconds in a virtual machine */
    int wide = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!wide) {
        wide = slipstream_best_isa() >= AVX512 ? 2 : 1;
        __atomic_store_n(&known, wide, __ATOMIC_RELAXED);
    }
    for (int64_t at = 0; at < nbytes; at += block, crc = 0)
        *sums++ = crc32(crc, to ? to + at : 0, from + at, nbytes - at < block ? nbytes - at : block, wide == 2);
}

#else

SLIPSTREAM_API int slipstream_has_crc32(void) { return 0; }

#endif
