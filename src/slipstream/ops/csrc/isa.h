/* The instruction set that a source is compiled for, and its 16 fp32 lanes. ops/build.py compiles some sources several times, with
 * ISA defined as the name of a set (`enum isa` in lower case). If the compiler lacks its instructions, KNOWN is 0: the source then
 * has an empty table. See kernels.c for the meaning of each operation of a vec_*.h. */
#ifndef SLIPSTREAM_ISA_H
#define SLIPSTREAM_ISA_H

#include "slipstream_ops.h"

#include <math.h>
#include <string.h>

#define JOIN(a, b) a##b
#define JOINED(a, b) JOIN(a, b)
#define QUOTE(x) #x
#define QUOTED(x) QUOTE(x)
#define KNOWN JOINED(KNOWS_, ISA)
#define OF_ISA(name) JOINED(name##_, ISA) /* fused_avx2 */

#if KNOWN
#define TABLE(...) {__VA_ARGS__}

/* A number's bits, and the number of bits. */
static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* A bf16 number at any address. */
static inline float bf16_at(const uint8_t *p) { return float_of((uint32_t)p[0] << 16 | (uint32_t)p[1] << 24); }

#include QUOTED(JOINED(vec_, ISA).h)

INLINE int64_t itemsize(int dtype) { return dtype == DTYPE_F32 ? 4 : 2; }

INLINE vec load_vec(const void *p, int dtype)
{
    return dtype == DTYPE_BF16 ? load_bf16(p) : dtype == DTYPE_F32 ? load_f32(p) : load_f16(p);
}

/* Returns the values as stored. stream: past the caches. */
INLINE vec store_vec(void *p, vec a, int dtype, int stream)
{
    if (dtype == DTYPE_BF16)
        return stream ? store_bf16(p, a, 1) : store_bf16(p, a, 0);
    if (dtype == DTYPE_F32)
        return stream ? store_f32(p, a, 1) : store_f32(p, a, 0);
    return stream ? store_f16(p, a, 1) : store_f16(p, a, 0);
}

/* The same for the last `count` elements, if fewer than 16: the other lanes are loaded as 0. */
INLINE vec load_part(const void *p, int64_t count, int dtype)
{
    char rest[64] = {0};
    if (count >= 16)
        return load_vec(p, dtype);
    memcpy(rest, p, (size_t)(count * itemsize(dtype)));
    return load_vec(rest, dtype);
}
INLINE vec store_part(void *p, vec a, int64_t count, int dtype)
{
    char rest[64];
    if (count >= 16)
        return store_vec(p, a, dtype, 0);
    a = store_vec(rest, a, dtype, 0);
    memcpy(p, rest, (size_t)(count * itemsize(dtype)));
    return a;
}

INLINE vec lane_numbers(void)
{
    static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_f32(numbers);
}

/* The first `count` lanes of a, then those of `rest`. */
INLINE vec first_lanes(vec a, int64_t count, vec rest) { return count < 16 ? vec_pick(lane_numbers(), vec_set((float)count), rest, a) : a; }
#else
#define TABLE(...) {0}
#endif

#endif
