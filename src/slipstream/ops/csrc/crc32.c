/* CRC-32 as zlib has it, of bytes that are copied on the way: one pass over memory for a checkpoint's copy and its checksums.
 *
 * Carry-less multiplication folds 64 bytes at a time onto the next 64 (Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel 2009): what is folded leaves the same remainder as what it came from, so that in the end
 * sixteen bytes stand for all before them, and those and a tail are divided bit by bit. Where the processor lacks the
 * instruction, ops/checksum.py takes zlib.
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

/* `to` may be NULL; else it is a multiple of 16 and written past the caches. */
FOLDS static inline __m128i take(const char *from, char *to)
{
    __m128i x = _mm_loadu_si128((const __m128i *)from);
    if (to)
        _mm_stream_si128((__m128i *)to, x);
    return x;
}

/* Whole multiples of 16 bytes, at least 64. */
FOLDS static inline uint32_t run(uint32_t crc, char *to, const char *from, int64_t nbytes)
{
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4); /* x^(512-32), x^(512+32) mod P, bits reversed */
    const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i x[4];
    for (int i = 0; i < 4; i++)
        x[i] = take(from + 16 * i, to ? to + 16 * i : 0);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    int64_t at = 64;
    for (; at + 64 <= nbytes; at += 64)
        for (int i = 0; i < 4; i++)
            x[i] = fold(x[i], by_512, take(from + at + 16 * i, to ? to + at + 16 * i : 0));
    for (int i = 1; i < 4; i++)
        x[0] = fold(x[0], by_128, x[i]);
    for (; at < nbytes; at += 16)
        x[0] = fold(x[0], by_128, take(from + at, to ? to + at : 0));
    unsigned char left[16];
    _mm_storeu_si128((__m128i *)left, x[0]);
    return divide(0, left, 16);
}

SLIPSTREAM_API int slipstream_has_crc32(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_PCLMUL) != 0;
}

SLIPSTREAM_API uint32_t slipstream_crc32(uint32_t crc, char *to, const char *from, int64_t nbytes)
{
    int64_t head = to ? (int64_t)(-(uintptr_t)to & 15u) : 0, body;
    crc = ~crc;
    if (head > nbytes || nbytes - head < 64)
        head = nbytes;
    body = (nbytes - head) & ~(int64_t)15;
    crc = divide(crc, (const unsigned char *)from, head);
    if (body)
        crc = to ? run(crc, to + head, from + head, body) : run(crc, 0, from + head, body);
    crc = divide(crc, (const unsigned char *)from + head + body, nbytes - head - body);
    if (to) {
        __builtin_memcpy(to, from, (size_t)head);
        __builtin_memcpy(to + head + body, from + head + body, (size_t)(nbytes - head - body));
        _mm_sfence(); /* another thread hands the bytes to the disk */
    }
    return ~crc;
}

#else

SLIPSTREAM_API int slipstream_has_crc32(void) { return 0; }

#endif
