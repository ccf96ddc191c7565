/* 16 fp32 lanes for any processor, in the vector extensions of gcc and clang, which compile to the machine's instructions
 * (SSE2, NEON). Half precision is converted in integer arithmetic. See kernels.c for the meaning of each operation. */
#include <math.h>
#include <string.h>

#define TARGET
#define INLINE static inline __attribute__((always_inline))

/* The decoder's tiles: see decoder_products.h. */
#define WIDE 2
#define DOTS_BF16 0
#define CODE_ROWS 4
#define UNROLL_CODES _Pragma("GCC unroll 1")
#define INT8_OFFSET 0
#define KNOW_RECIPES 0 /* of the optimizers: conversions are calls here, so more code would gain little */

typedef float vec __attribute__((vector_size(64)));
typedef double vec64 __attribute__((vector_size(128)));
#define OUTLINED __attribute__((noinline)) static

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
INLINE vec vec_fma(vec a, vec b, vec c) { return a * b + c; }
typedef int32_t mask __attribute__((vector_size(64)));
INLINE vec vec_select(mask where, vec a, vec b) { return (vec)((where & (mask)a) | (~where & (mask)b)); }
INLINE vec vec_min(vec a, vec b) { return vec_select(a < b, a, b); }
INLINE vec vec_max(vec a, vec b) { return vec_select(a > b, a, b); }
INLINE vec vec_pick(vec a, vec least, vec yes, vec no) { return vec_select(a >= least, yes, no); }
/* A set bit for each lane without a sign; +-size by such bits; size with the signs of other lanes. size: not negative. */
INLINE uint32_t vec_signs(vec a)
{
    uint32_t bits = 0;
    for (int lane = 0; lane < 16; ++lane)
        bits |= (uint32_t)(((mask)a)[lane] >= 0) << lane;
    return bits;
}
INLINE vec vec_by_bits(uint32_t bits, vec size)
{
    mask sign;
    for (int lane = 0; lane < 16; ++lane)
        sign[lane] = bits >> lane & 1u ? 0 : INT32_MIN;
    return (vec)((mask)size | sign);
}
INLINE vec vec_with_sign(vec size, vec a) { return (vec)((mask)size | ((mask)a & INT32_MIN)); }
INLINE vec vec_abs(vec a) { return (vec)((mask)a & INT32_MAX); }
typedef uint32_t words __attribute__((vector_size(64)));
INLINE vec vec_larger(vec a, vec b) { return vec_select((words)a > (words)b, a, b); }
INLINE int vec_has_nan(vec a)
{
    (void)a;
    return 1; /* there may be a NaN */
}
INLINE vec vec_pow2(vec n)
{
    float lanes[16];
    memcpy(lanes, &n, sizeof lanes);
    for (int lane = 0; lane < 16; ++lane)
        lanes[lane] = float_of(((uint32_t)(int32_t)lanes[lane] + 127) << 23);
    memcpy(&n, lanes, sizeof lanes);
    return n;
}

INLINE vec load_f32(const void *p)
{
    vec r;
    memcpy(&r, p, sizeof r);
    return r;
}
/* Products of codes: x holds signed bytes, w 16 columns of 4 bytes each, one for each of 4 consecutive x. */
typedef int32_t ivec __attribute__((vector_size(64)));
INLINE ivec ivec_set(int32_t x) { return x - (ivec){0}; }
INLINE ivec dot_i8(ivec sum, const void *w, const int8_t *x)
{
    const int8_t *columns = w;
    for (int lane = 0; lane < 16; ++lane)
        for (int k = 0; k < 4; ++k)
            sum[lane] += columns[lane * 4 + k] * x[k];
    return sum;
}
/* 8 consecutive x: the low halves of w belong to the first four. */
INLINE ivec dot_i4(ivec sum, const void *w, const int8_t *x)
{
    const uint8_t *columns = w;
    for (int lane = 0; lane < 16; ++lane)
        for (int k = 0; k < 4; ++k)
            sum[lane] += (columns[lane * 4 + k] & 15) * x[k] + (columns[lane * 4 + k] >> 4) * x[4 + k];
    return sum;
}
/* Codes of at most 6 bits: 4 unsigned bytes for each of 16 columns. Some bits of each byte at p; two such joined; their products. */
typedef uint8_t code_bytes __attribute__((vector_size(64)));
INLINE code_bytes masked_at(const void *p, const int shift, const int bits)
{
    code_bytes v;
    memcpy(&v, p, sizeof v);
    return (v >> shift) & (uint8_t)bits;
}
INLINE code_bytes either(code_bytes a, code_bytes b) { return a | b; }
INLINE ivec dot_bytes(ivec sum, code_bytes w, const int8_t *x)
{
    for (int lane = 0; lane < 16; ++lane)
        for (int k = 0; k < 4; ++k)
            sum[lane] += w[lane * 4 + k] * x[k];
    return sum;
}
INLINE vec ivec_to_vec(ivec a) { return __builtin_convertvector(a, vec); }
INLINE vec pairs_to_vec(ivec a) { return ivec_to_vec(a); }
/* Reduce across the lanes: i and i + 8 first, then i and i + 4, and so on. */
INLINE float lanes_sum(vec a)
{
    for (int half = 8; half >= 1; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            a[lane] += a[lane + half];
    return a[0];
}
INLINE float lanes_max(vec a)
{
    for (int half = 8; half >= 1; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            a[lane] = a[lane] > a[lane + half] ? a[lane] : a[lane + half];
    return a[0];
}
/* Round to the nearest integer: adding 1.5 * 2^23 discards the fraction. */
INLINE vec vec_nearest(vec a) { return a + 12582912.0f - 12582912.0f; }
INLINE void store_i8(void *p, vec a)
{
    int8_t *codes = p;
    a = vec_nearest(a);
    for (int lane = 0; lane < 16; ++lane)
        codes[lane] = (int8_t)a[lane];
}
INLINE void store_u8(void *p, vec a)
{
    uint8_t *codes = p;
    a = vec_nearest(a);
    for (int lane = 0; lane < 16; ++lane)
        codes[lane] = (uint8_t)a[lane];
}
/* 32 codes: round to the nearest integer and clamp to 8 bits; NaN becomes the lowest code. The lowest unsigned code is 1. */
INLINE void store_codes(void *p, vec a, vec b, int negative)
{
    const vec least = vec_set(negative ? -128.0f : 1.0f), most = vec_set(negative ? 127.0f : 255.0f);
    for (int half = 0; half < 2; ++half) {
        const vec codes = vec_min(vec_max(half ? b : a, least), most);
        char *to = (char *)p + 16 * half;
        if (negative)
            store_i8(to, codes);
        else
            store_u8(to, codes);
    }
}
INLINE uint32_t lanes_largest(vec a)
{
    uint32_t largest = 0;
    for (int lane = 0; lane < 16; ++lane)
        largest = ((words)a)[lane] > largest ? ((words)a)[lane] : largest;
    return largest;
}
/* Look up 16 4-bit numbers, two per byte, the first in the low half, in a table. */
INLINE vec load_nibbles(const void *p, vec table)
{
    uint8_t codes[8];
    float values[16];
    vec a;
    memcpy(codes, p, sizeof codes);
    memcpy(values, &table, sizeof values);
    for (int lane = 0; lane < 16; ++lane)
        a[lane] = values[codes[lane / 2] >> lane % 2 * 4 & 15];
    return a;
}
INLINE vec load_i8(const void *p)
{
    int8_t codes[16];
    vec a;
    memcpy(codes, p, sizeof codes);
    for (int lane = 0; lane < 16; ++lane)
        a[lane] = codes[lane];
    return a;
}
INLINE vec load_u8(const void *p)
{
    uint8_t codes[16];
    vec a;
    memcpy(codes, p, sizeof codes);
    for (int lane = 0; lane < 16; ++lane)
        a[lane] = codes[lane];
    return a;
}
/* There are no portable non-temporal stores: `stream` is ignored here. */
INLINE vec store_f32(void *p, vec a, int stream)
{
    (void)stream;
    memcpy(p, &a, sizeof a);
    return a;
}

/* Each conversion is a loop over arrays in its own function, the form that compilers vectorize. */
OUTLINED void widen_bf16(float *to, const uint16_t *from)
{
    for (int lane = 0; lane < 16; ++lane)
        to[lane] = float_of((uint32_t)from[lane] << 16);
}
/* Round to nearest even by integer carry; NaN becomes 0xffff. */
OUTLINED void narrow_bf16(uint16_t *to, const float *from)
{
    for (int lane = 0; lane < 16; ++lane) {
        uint32_t bits = bits_of(from[lane]);
        uint32_t even_up = bits + 0x7fffu + ((bits >> 16) & 1u);
        int32_t is_nan = (int32_t)(bits & 0x7fffffffu) > 0x7f800000;
        to[lane] = (uint16_t)((is_nan ? 0xffffffffu : even_up) >> 16);
    }
}
/* Shift the fields into place, then multiply by 2^112 to adjust the exponent's bias: exact, also for subnormals. */
OUTLINED void widen_f16(float *to, const uint16_t *from)
{
    for (int lane = 0; lane < 16; ++lane) {
        int32_t half = from[lane], magnitude = (half & 0x7fff) << 13;
        int32_t finite = (int32_t)bits_of(float_of((uint32_t)magnitude) * 0x1p112f);
        int32_t wide = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;
        to[lane] = float_of((uint32_t)wide | (uint32_t)(half & 0x8000) << 16);
    }
}
/* Round to nearest even: in the normal range by integer carry; below it by adding 0.5, whose last place is fp16's smallest
 * subnormal, so that the addition rounds. Infinity from 65520 up. */
OUTLINED void narrow_f16(uint16_t *to, const float *from)
{
    for (int lane = 0; lane < 16; ++lane) {
        int32_t bits = (int32_t)bits_of(from[lane]), magnitude = bits & 0x7fffffff;
        int32_t normal = (magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
        int32_t subnormal = (int32_t)bits_of(float_of((uint32_t)magnitude) + 0.5f) - 0x3f000000;
        int32_t half = magnitude < 0x38800000 ? subnormal : normal;
        half = magnitude >= 0x477ff000 ? 0x7c00 : half;
        half = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : half;
        to[lane] = (uint16_t)(half | ((bits >> 16) & 0x8000));
    }
}

INLINE vec load_halves(const void *p, void (*widen)(float *, const uint16_t *))
{
    uint16_t bits[16];
    float lanes[16];
    memcpy(bits, p, sizeof bits);
    widen(lanes, bits);
    return load_f32(lanes);
}
INLINE vec store_halves(void *p, vec a, void (*narrow)(uint16_t *, const float *),
                        void (*widen)(float *, const uint16_t *))
{
    uint16_t bits[16];
    float lanes[16];
    memcpy(lanes, &a, sizeof lanes);
    narrow(bits, lanes);
    memcpy(p, bits, sizeof bits);
    widen(lanes, bits);
    return load_f32(lanes);
}
INLINE vec load_bf16(const void *p) { return load_halves(p, widen_bf16); }
/* 16 random 16-bit numbers: [Note: Random bits] in optim_body.h. */
typedef uint32_t halves __attribute__((vector_size(32)));
INLINE halves halves_of(uint32_t seed)
{
    halves x = (halves){0, 1, 2, 3, 4, 5, 6, 7} * 0x9e3779b9u ^ seed;
    x *= 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
/* Each lane's own random number, and the other number of its word: [Note: Random bits]. */
INLINE words own_half(halves x, int paired)
{
    words wide;
    (void)paired;
    for (int lane = 0; lane < 16; ++lane)
        wide[lane] = x[lane / 2] >> 16 * (lane % 2) & 0xffffu;
    return wide;
}
INLINE words other_half(halves x, int paired) { return own_half(x << 16 | x >> 16, paired); }
INLINE vec words_to_vec(words a) { return __builtin_convertvector((mask)a, vec); }
/* Pairs gain nothing here: all lanes are in order. */
INLINE vec load_bf16_pairs(const char *p) { return load_bf16(p); }
/* The upper halves of the bits of a + below: bf16, rounded up if `below` (16 bits) carries. A NaN stays NaN. */
INLINE vec store_bf16_up(void *p, vec a, words below, int paired, int nans)
{
    const words sum = ((words)a + below) | (words)(a != a), bits = sum >> 16;
    uint16_t narrow[16];
    (void)paired, (void)nans;
    for (int lane = 0; lane < 16; ++lane)
        narrow[lane] = (uint16_t)bits[lane];
    memcpy(p, narrow, sizeof narrow);
    return (vec)(bits << 16);
}
/* Deinterleave 16 adjacent pairs of bf16. */
INLINE vec load_even_bf16(const char *p)
{
    words pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (vec)(pairs << 16);
}
INLINE vec load_odd_bf16(const char *p)
{
    words pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (vec)(pairs & 0xffff0000u);
}
INLINE vec load_f16(const void *p) { return load_halves(p, widen_f16); }
INLINE vec store_bf16(void *p, vec a, int stream)
{
    (void)stream;
    return store_halves(p, a, narrow_bf16, widen_bf16);
}
INLINE vec store_bf16_numbers(void *p, vec a, int stream, int nans)
{
    (void)nans;
    return store_bf16(p, a, stream);
}
INLINE vec store_f16(void *p, vec a, int stream)
{
    (void)stream;
    return store_halves(p, a, narrow_f16, widen_f16);
}

INLINE vec64 vec64_zero(void) { return (vec64){0}; }
INLINE vec64 vec64_add_squares(vec64 sum, vec a)
{
    vec64 wide = __builtin_convertvector(a, vec64);
    return sum + wide * wide;
}
INLINE void vec64_store(double *lanes, vec64 sum) { memcpy(lanes, &sum, sizeof sum); }

INLINE void fence_streams(void) {}
