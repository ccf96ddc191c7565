/* Quantization, written once over 16 fp32 lanes: for int8 along a row, for int4 across 16 groups, one in each lane.
 * The operations and their order are those of reference.py, so that the results are bit-identical. */
#include "quantize.h"
#include "isa.h"

#if KNOWN
/* Round to integers in [least, most], ties to even: adding 1.5 * 2^23 discards the fraction. NaN stays NaN. */
INLINE vec whole_between(vec x, float least, float most)
{
    const vec magic = vec_set(12582912.0f);
    x = vec_max(vec_set(least), vec_min(vec_set(most), x));
    return vec_sub(vec_add(x, magic), magic);
}

INLINE vec at_least_tiny(vec x) { return vec_max(x, vec_set(0x1p-126f)); }

TARGET static void to_int8(const struct quantize *s, int64_t begin, int64_t end)
{
    const int dtype = s->dtype;
    const int64_t columns = s->group, size = itemsize(dtype);
    for (int64_t row = begin; row < end; ++row) {
        const char *w = s->w + row * columns * size;
        char *codes = s->codes + row * columns;
        vec largest = vec_set(0.0f), broken = vec_set(0.0f);
        for (int64_t k = 0; k < columns; k += 16) {
            const vec x = load_part(w + k * size, columns - k, dtype);
            largest = vec_max(largest, vec_abs(x));
            broken = vec_add(broken, vec_sub(x, x)); /* a maximum may drop a NaN; this is 0 until a non-finite value, then NaN */
        }
        s->scale[row] = lanes_max(largest) / 127.0f + lanes_sum(broken);
        const vec scale = at_least_tiny(vec_set(s->scale[row]));
        for (int64_t k = 0; k < columns; k += 16) {
            const int64_t width = columns - k < 16 ? columns - k : 16;
            char last[16];
            store_i8(width == 16 ? codes + k : last, whole_between(vec_div(load_part(w + k * size, width, dtype), scale), -127.0f, 127.0f));
            if (width < 16)
                memcpy(codes + k, last, (size_t)width);
        }
    }
}

typedef float across[MAX_GROUP][16]; /* element k of each of 16 groups */

INLINE vec nearest_code(vec x, vec inverse, vec low) { return whole_between(vec_mul(vec_sub(x, low), inverse), 0.0f, 15.0f); }

INLINE vec inverse_of(vec scale) { return vec_div(vec_set(1.0f), at_least_tiny(scale)); }

INLINE vec to_half(vec x)
{
    char rounded[32];
    return store_f16(rounded, x, 0);
}

/* A scale and an offset for each lane's group. Tries the whole range and five that clip outliers. For each, a least-squares fit of
 * the weights by their codes gives the scale and offset; the least squared error wins. */
TARGET static void fit(across w, int64_t group, float *scales, float *lows)
{
    static const double shrinks[] = {1.0, 0.95, 0.9, 0.85, 0.8, 0.75};
    const vec zero = vec_set(0.0f), size = vec_set((float)group);
    vec least = load_f32(w[0]), most = least, even = zero, odd = zero;
    for (int64_t k = 0; k < group; k += 2) {
        const vec a = load_f32(w[k]), b = load_f32(w[k + 1]);
        least = vec_min(least, vec_min(a, b));
        most = vec_max(most, vec_max(a, b));
        even = vec_add(even, a);
        odd = vec_add(odd, b);
    }
    const vec middle = vec_mul(vec_add(least, most), vec_set(0.5f)), span = vec_sub(most, least);
    const vec mean = vec_div(vec_add(even, odd), size);
    float smallest[16] = {0};
    for (int i = 0; i < 6; ++i) {
        across codes;
        vec low = vec_sub(middle, vec_mul(span, vec_set((float)(shrinks[i] / 2))));
        vec inverse = inverse_of(vec_mul(span, vec_set((float)(shrinks[i] / 15))));
        even = odd = zero;
        for (int64_t k = 0; k < group; k += 2) {
            even = vec_add(even, store_f32(codes[k], nearest_code(load_f32(w[k]), inverse, low), 0));
            odd = vec_add(odd, store_f32(codes[k + 1], nearest_code(load_f32(w[k + 1]), inverse, low), 0));
        }
        const vec code_mean = vec_div(vec_add(even, odd), size);
        vec even_squares = zero, odd_squares = zero;
        even = odd = zero;
        for (int64_t k = 0; k < group; k += 2) {
            const vec a = vec_sub(load_f32(codes[k]), code_mean), b = vec_sub(load_f32(codes[k + 1]), code_mean);
            even = vec_add(even, vec_mul(a, load_f32(w[k])));
            odd = vec_add(odd, vec_mul(b, load_f32(w[k + 1])));
            even_squares = vec_add(even_squares, vec_mul(a, a));
            odd_squares = vec_add(odd_squares, vec_mul(b, b));
        }
        const vec squares = vec_max(vec_add(even_squares, odd_squares), vec_set(1e-12f));
        const vec scale = to_half(vec_div(vec_add(even, odd), squares)); /* fp16, as in files and in the decoder */
        low = to_half(vec_sub(mean, vec_mul(scale, code_mean)));
        inverse = inverse_of(scale);
        even = odd = zero;
        for (int64_t k = 0; k < group; k += 2) {
            const vec a = load_f32(w[k]), b = load_f32(w[k + 1]);
            const vec error_a = vec_sub(vec_add(vec_mul(nearest_code(a, inverse, low), scale), low), a);
            const vec error_b = vec_sub(vec_add(vec_mul(nearest_code(b, inverse, low), scale), low), b);
            even = vec_add(even, vec_mul(error_a, error_a));
            odd = vec_add(odd, vec_mul(error_b, error_b));
        }
        float error[16], scale_of[16], low_of[16];
        store_f32(error, vec_add(even, odd), 0);
        store_f32(scale_of, scale, 0);
        store_f32(low_of, low, 0);
        for (int lane = 0; lane < 16; ++lane)
            if (i == 0 || error[lane] < smallest[lane]) {
                smallest[lane] = error[lane];
                scales[lane] = scale_of[lane];
                lows[lane] = low_of[lane];
            }
    }
}

TARGET static void to_int4(const struct quantize *s, int64_t begin, int64_t end)
{
    const int64_t group = s->group, size = itemsize(s->dtype), bytes = group / 2;
    for (int64_t first = begin; first < end; first += 16) {
        const int64_t lanes = end - first < 16 ? end - first : 16;
        char padded[sizeof(across)];
        float rows[sizeof(across) / sizeof(float)], scale[16], low[16];
        across turned;
        const char *from = s->w + first * group * size;
        if (lanes < 16)
            from = memcpy(memset(padded, 0, sizeof padded), from, (size_t)(lanes * group * size));
        for (int64_t i = 0; i < group; ++i) /* 16 groups are `group` vectors */
            store_f32(rows + i * 16, load_vec(from + i * 16 * size, s->dtype), 0);
        for (int lane = 0; lane < 16; ++lane)
            for (int64_t k = 0; k < group; ++k)
                turned[k][lane] = rows[lane * group + k];
        fit(turned, group, scale, low);
        const vec inverse = inverse_of(load_f32(scale)), offset = load_f32(low);
        for (int64_t k = 0; k < bytes; ++k) {
            const vec a = nearest_code(load_f32(turned[2 * k]), inverse, offset);
            const vec b = nearest_code(load_f32(turned[2 * k + 1]), inverse, offset);
            store_f32(turned[k], vec_add(a, vec_mul(b, vec_set(16.0f))), 0);
        }
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t k = 0; k < bytes; ++k)
                s->codes[(first + lane) * bytes + k] = (char)(uint8_t)turned[k][lane];
        memcpy(s->scale + first, scale, (size_t)lanes * sizeof(float));
        memcpy(s->low + first, low, (size_t)lanes * sizeof(float));
    }
}

/* Dequantization: a loop that compilers vectorize, and a table lookup of 16 4-bit codes at a time. */
TARGET static void from_int8(const struct quantize *s, int64_t begin, int64_t end)
{
    float *restrict w = (float *)s->w + begin * s->group;
    const int8_t *restrict codes = (const int8_t *)s->codes + begin * s->group;
    for (int64_t row = begin; row < end; ++row, w += s->group, codes += s->group) {
        const float scale = s->scale[row];
        for (int64_t k = 0; k < s->group; ++k)
            w[k] = (float)codes[k] * scale;
    }
}

TARGET static void from_int4(const struct quantize *s, int64_t begin, int64_t end)
{
    const int64_t group = s->group;
    float *restrict w = (float *)s->w + begin * group;
    const uint8_t *restrict codes = (const uint8_t *)s->codes + begin * group / 2;
    for (int64_t i = begin; i < end; ++i, w += group, codes += group / 2) {
        const float scale = s->scale[i], low = s->low[i];
        const vec table = vec_add(vec_mul(lane_numbers(), vec_set(scale)), vec_set(low));
        int64_t k = 0;
        for (; k + 8 <= group / 2; k += 8)
            store_f32(w + 2 * k, load_nibbles(codes + k, table), 0);
        for (; k < group / 2; ++k) {
            w[2 * k] = (float)(codes[k] & 15) * scale + low;
            w[2 * k + 1] = (float)(codes[k] >> 4) * scale + low;
        }
    }
}

TARGET static void from_rows(const struct quantize *s, int64_t begin, int64_t end)
{
    const int dtype = s->dtype;
    const int64_t size = itemsize(dtype), columns = s->columns, block = s->block, bits = s->bits;
    float values[16]; /* the values of the 16 4-bit codes */
    for (int code = 0; code < 16; ++code)
        values[code] = s->pairs[2 * code];
    const vec table = load_f32(values);
    for (int64_t row = begin; row < end; ++row) {
        const uint8_t *packed = (const uint8_t *)s->codes + row * s->row_nbytes, *scales = packed + s->code_nbytes;
        char *const w = s->w + row * columns * size;
        for (int64_t first = 0; first < columns; first += block, scales += 2) {
            const int64_t stop = columns - first < block ? columns : first + block;
            const vec scale = vec_set(bits == 8 ? bf16_at(scales) / 127.0f : bf16_at(scales));
            for (int64_t k = first; k < stop; k += 16) {
                const int64_t width = stop - k < 16 ? stop - k : 16;
                const uint8_t *codes = packed + k * bits / 8;
                uint8_t last[16] = {0};
                if (width < 16) /* do not read the scales, or past the end of the memory */
                    codes = memcpy(last, codes, (size_t)(width * bits + 7) / 8);
                const vec x = vec_mul(bits == 8 ? load_i8(codes) : load_nibbles(codes, table), scale);
                store_part(w + k * size, x, width, dtype);
            }
        }
    }
}

/* ---- rounding to a grid ---- */

/* The first element of an item, and how many it has. */
INLINE int64_t piece_of(const struct quantize *s, int64_t item, int64_t *numel)
{
    const int64_t per = (s->group + s->piece - 1) / s->piece, first = item % per * s->piece;
    *numel = s->group - first < s->piece ? s->group - first : s->piece;
    return item / per * s->group + first;
}

TARGET static void to_ends(const struct quantize *s, int64_t begin, int64_t end)
{
    for (int64_t item = begin, numel; item < end; ++item) {
        const char *w = s->w + piece_of(s, item, &numel) * itemsize(s->dtype);
        const vec zero = vec_set(0.0f), first = vec_set(lanes_sum(load_part(w, 1, s->dtype)));
        vec least = first, most = first, broken = zero;
        for (int64_t k = 0; k < numel; k += 16) {
            const vec x = first_lanes(load_part(w + k * itemsize(s->dtype), numel - k, s->dtype), numel - k, first);
            least = vec_min(least, x);
            most = vec_max(most, x);
            broken = vec_add(broken, vec_sub(x, x)); /* 0 until a value is not finite, then NaN */
        }
        s->ends[2 * item] = lanes_sum(broken) - lanes_max(vec_sub(zero, least));
        s->ends[2 * item + 1] = lanes_sum(broken) + lanes_max(most);
    }
}

TARGET static void to_grid(const struct quantize *s, int64_t begin, int64_t end)
{
    const int dtype = s->dtype;
    const float lowest = s->lowest, highest = s->highest;
    const int64_t size = itemsize(dtype);
    for (int64_t item = begin, numel; item < end; ++item) {
        const int64_t at = piece_of(s, item, &numel);
        const char *const w = s->w + at * size;
        char *const out = s->codes + at * size;
        const vec scale = vec_set(s->scale[at / s->group]), low = vec_set(s->low[at / s->group]);
        for (int64_t k = 0; k < numel; k += 16) {
            const vec steps = whole_between(vec_div(vec_sub(load_part(w + k * size, numel - k, dtype), low), scale), lowest, highest);
            store_part(out + k * size, vec_add(vec_mul(steps, scale), low), numel - k, dtype);
        }
    }
}
#endif

const struct quantize_isa OF_ISA(quantize) = TABLE({to_int8, from_int8, to_int4, from_int4, from_rows, to_ends, to_grid});
