/* The three passes of an optimizer that exchanges the signs of what it steps, written once over 16 fp32 lanes.
 *
 * [Note: One bit] A block of 512 elements is a record: a bf16 scale, then 64 bytes of signs (a set bit is +, also for zero). An
 * element is +-scale; the scale is the root of the mean square. What is stored is the compensated value y, before compression: the
 * error of the last step, y - scale * sign(y), is computed again in registers. An element whose `inverse` is 0 is not stepped
 * (padding, masks, weights whose gradient was always 0): its y stays 0 and does not count for the scale. */
#include <math.h>

#define SIGN_BLOCK 512
#define SIGN_NBYTES (2 + SIGN_BLOCK / 8)
#define ACTIVE 0x1p-126f

INLINE float half_scale(float scale, uint8_t *record) /* rounds to bf16, ties to even */
{
    uint32_t word;
    memcpy(&word, &scale, sizeof word);
    word = (word + 0x7fffu + (word >> 16 & 1u)) & 0xffff0000u;
    record[0] = (uint8_t)(word >> 16), record[1] = (uint8_t)(word >> 24);
    memcpy(&scale, &word, sizeof scale);
    return scale;
}

INLINE vec signed_by(vec x, vec scale, vec zero) { return vec_pick(x, zero, scale, vec_sub(zero, scale)); }

INLINE uint32_t bits_at(const uint8_t *record, int k) { return (uint32_t)record[2 + k / 8] | (uint32_t)record[3 + k / 8] << 8; }

/* The scale and the record of a block of y, of which the signs are already there. */
INLINE float finish_record(uint8_t *record, vec squares, vec count)
{
    const float active = lanes_sum(count);
    return half_scale(active > 0.0f ? sqrtf(lanes_sum(squares) / active) : 0.0f, record);
}

/* y = beta * p + factor * g * inverse + (y - scales * sign(y)), and the record of the new y. `records` holds p, the result of the last
 * exchange, and is overwritten. numel is a multiple of 512. */
TARGET static void onebit_worker(const struct onebit *s, int64_t start, int64_t stop)
{
    const vec beta = vec_set(s->beta), factor = vec_set(s->factor), zero = vec_set(0.0f), one = vec_set(1.0f), active = vec_set(ACTIVE);
    const int64_t size = itemsize(s->dtype);
    for (int64_t at = start; at < stop; at += SIGN_BLOCK) {
        const int64_t block = at / SIGN_BLOCK;
        uint8_t *record = s->records + block * SIGN_NBYTES;
        const vec scale = vec_set(s->scales[block]), mean = vec_mul(vec_set(scale_of(record)), beta), minus = vec_sub(zero, mean);
        vec squares = zero, count = zero;
        for (int k = 0; k < SIGN_BLOCK; k += 16) {
            const vec inverse = load_f32(s->inverse + at + k), old = load_f32(s->y + at + k);
            vec x = vec_mul(vec_mul(load_vec((const char *)s->grad + (at + k) * size, s->dtype), factor), inverse);
            x = vec_add(vec_add(vec_of_signs(bits_at(record, k), mean, minus), x), vec_sub(old, signed_by(old, scale, zero)));
            x = vec_pick(inverse, active, x, zero);
            count = vec_add(count, vec_pick(inverse, active, one, zero));
            store_f32(s->y + at + k, x, 0);
            squares = vec_add(squares, vec_mul(x, x));
            const uint32_t signs = vec_signs(x);
            record[2 + k / 8] = (uint8_t)signs, record[3 + k / 8] = (uint8_t)(signs >> 8);
        }
        s->scales[block] = finish_record(record, squares, count);
    }
}

/* y = alpha * (the sources' values, added in order) + (y - scales * sign(y)), and the record of the new y. */
TARGET static void onebit_server(const struct onebit *s, int64_t start, int64_t stop)
{
    const vec alpha = vec_set(s->factor), zero = vec_set(0.0f), one = vec_set(1.0f), active = vec_set(ACTIVE);
    for (int64_t at = start; at < stop; at += SIGN_BLOCK) {
        const int64_t block = at / SIGN_BLOCK;
        uint8_t *record = s->records + block * SIGN_NBYTES;
        const vec scale = vec_set(s->scales[block]);
        vec squares = zero, count = zero;
        for (int k = 0; k < SIGN_BLOCK; k += 16) {
            const vec inverse = load_f32(s->inverse + at + k), old = load_f32(s->y + at + k);
            vec sum = zero;
            for (int64_t rank = 0; rank < s->num_sources; ++rank) {
                const uint8_t *source = s->sources[rank] + block * SIGN_NBYTES;
                const vec size = vec_set(scale_of(source));
                const vec value = vec_of_signs(bits_at(source, k), size, vec_sub(zero, size));
                sum = rank ? vec_add(sum, value) : value;
            }
            vec x = vec_add(vec_mul(sum, alpha), vec_sub(old, signed_by(old, scale, zero)));
            x = vec_pick(inverse, active, x, zero);
            count = vec_add(count, vec_pick(inverse, active, one, zero));
            store_f32(s->y + at + k, x, 0);
            squares = vec_add(squares, vec_mul(x, x));
            const uint32_t signs = vec_signs(x);
            record[2 + k / 8] = (uint8_t)signs, record[3 + k / 8] = (uint8_t)(signs >> 8);
        }
        s->scales[block] = finish_record(record, squares, count);
    }
}

/* master = master * beta - p * factor, and the weights. `partly` has a 1 for each block with elements that are not stepped. */
TARGET static void onebit_update(const struct onebit *s, int64_t start, int64_t stop)
{
    const vec keep = vec_set(s->beta), rate = vec_set(s->factor), zero = vec_set(0.0f), active = vec_set(ACTIVE);
    const int64_t size = itemsize(s->dtype);
    for (int64_t at = start; at < stop; at += 16) {
        const int64_t block = at / SIGN_BLOCK;
        const uint8_t *record = s->records + block * SIGN_NBYTES;
        const vec step = vec_mul(vec_set(scale_of(record)), rate);
        vec p = vec_of_signs(bits_at(record, (int)(at % SIGN_BLOCK)), step, vec_sub(zero, step));
        if (s->partly[block])
            p = vec_pick(load_f32(s->inverse + at), active, p, zero);
        const vec w = vec_sub(vec_mul(load_f32(s->y + at), keep), p);
        store_f32(s->y + at, w, 0);
        if (s->out)
            store_vec((char *)s->out + at * size, w, s->dtype, 0);
    }
}
