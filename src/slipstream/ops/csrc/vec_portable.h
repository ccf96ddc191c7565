/* 16 fp32 lanes for any processor, in the vector types that gcc and clang share: they become whatever the machine has
 * (SSE2, NEON). Half precision is converted in integer arithmetic. See kernels.h for the meaning of each operation. */
#include <math.h>
#include <string.h>

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors wider than the machine's are never passed: all is inlined */
#endif

#define TARGET
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef double vec64 __attribute__((vector_size(128)));
typedef int32_t ints __attribute__((vector_size(64))); /* a comparison's result: all ones where true */
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

INLINE vec vec_set(float x) { return x - (vec){0}; }
INLINE vec vec_add(vec a, vec b) { return a + b; }
INLINE vec vec_sub(vec a, vec b) { return a - b; }
INLINE vec vec_mul(vec a, vec b) { return a * b; }
INLINE vec vec_div(vec a, vec b) { return a / b; }
INLINE vec vec_sqrt(vec a)
{
    float lanes[16];
    memcpy(lanes, &a, sizeof lanes);
    for (int lane = 0; lane < 16; ++lane)
        lanes[lane] = sqrtf(lanes[lane]);
    memcpy(&a, lanes, sizeof lanes);
    return a;
}
INLINE words select(ints mask, words yes, words no) { return ((words)mask & yes) | (~(words)mask & no); }

INLINE words load_halves(const void *p)
{
    halves bits;
    memcpy(&bits, p, sizeof bits);
    return __builtin_convertvector(bits, words);
}
INLINE void store_halves(void *p, words a)
{
    halves bits = __builtin_convertvector(a, halves);
    memcpy(p, &bits, sizeof bits);
}

INLINE vec load_f32(const void *p)
{
    vec r;
    memcpy(&r, p, sizeof r);
    return r;
}
/* There is no portable way past the caches: `stream` is ignored here. */
INLINE vec store_f32(void *p, vec a, int stream)
{
    (void)stream;
    memcpy(p, &a, sizeof a);
    return a;
}

INLINE vec load_bf16(const void *p) { return (vec)(load_halves(p) << 16); }
INLINE vec store_bf16(void *p, vec a, int stream)
{
    (void)stream;
    words bits = (words)a;
    words even_up = bits + 0x7fffu + ((bits >> 16) & 1u);
    words rounded = select(a != a, bits | 0x400000u, even_up) >> 16;
    store_halves(p, rounded);
    return (vec)(rounded << 16);
}

/* Shift the fields into place and let a multiplication by 2^112 move the exponent's bias: exact, subnormals too. */
INLINE vec widen_f16(words half)
{
    words magnitude = (half & 0x7fffu) << 13;
    words finite = (words)((vec)magnitude * 0x1p112f);
    words wide = select(magnitude >= 0x0f800000u, magnitude | 0x7f800000u, finite);
    return (vec)(wide | ((half & 0x8000u) << 16));
}
INLINE vec load_f16(const void *p) { return widen_f16(load_halves(p)); }
/* To nearest even: in the normal range by integer carry; below it by adding 0.5, whose last place is fp16's smallest
 * subnormal, so that the adder rounds; infinite from 65520 up. */
INLINE vec store_f16(void *p, vec a, int stream)
{
    (void)stream;
    words bits = (words)a, magnitude = bits & 0x7fffffffu;
    words normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    words subnormal = (words)((vec)magnitude + 0.5f) - 0x3f000000u;
    words nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    words half = select(magnitude < 0x38800000u, subnormal, normal);
    half = select(magnitude >= 0x477ff000u, (words){0} + 0x7c00u, half);
    half = select(magnitude > 0x7f800000u, nan, half) | ((bits >> 16) & 0x8000u);
    store_halves(p, half);
    return widen_f16(half);
}

INLINE vec64 vec64_zero(void) { return (vec64){0}; }
INLINE vec64 vec64_add_squares(vec64 sum, vec a)
{
    vec64 wide = __builtin_convertvector(a, vec64);
    return sum + wide * wide;
}
INLINE void vec64_store(double *lanes, vec64 sum) { memcpy(lanes, &sum, sizeof sum); }

INLINE void copy_256_bytes(char *dst, const char *src) { memcpy(dst, src, 256); }
INLINE void fence_streams(void) {}
