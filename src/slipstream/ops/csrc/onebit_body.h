/* The three passes of an optimizer that exchanges the signs of what it steps, written once over 16 fp32 lanes.
 *
 * [Note: One bit] A block of 512 elements is a record: a bf16 scale, then 64 bytes of signs (a set bit is +, also for zero). An
 * element is +-scale; the scale is the root of the mean square. What is stored is the compensated value y, before compression: the
 * error of the last step, y - scale * sign(y), is computed again in registers. An element whose `inverse` is 0 is not stepped
 * (padding, masks, weights whose gradient was always 0): its y stays 0 and does not count for the scale. `partly` has a 1 for each
 * block with such elements; the others skip the tests. y is never -0, because a sum is -0 only if all of its terms are. */
#define SIGN_BLOCK 512
#define SIGN_NBYTES (2 + SIGN_BLOCK / 8)
#define SIGNS_AHEAD 1024 /* elements to prefetch: the hardware's prefetching stops at page boundaries */
#define ACTIVE 0x1p-126f

INLINE float half_scale(float scale, uint8_t *record) /* rounds to bf16, ties to even */
{
    const uint32_t exact = bits_of(scale), word = (exact + 0x7fffu + (exact >> 16 & 1u)) & 0xffff0000u;
    record[0] = (uint8_t)(word >> 16), record[1] = (uint8_t)(word >> 24);
    return float_of(word);
}

/* DO with the dtype as a constant. */
#define FOR_DTYPE(DO, dtype, ...)                                                                                       \
    switch (dtype) {                                                                                                    \
    case DTYPE_BF16: DO(__VA_ARGS__, DTYPE_BF16); break;                                                                \
    case DTYPE_F32: DO(__VA_ARGS__, DTYPE_F32); break;                                                                  \
    default: DO(__VA_ARGS__, DTYPE_F16);                                                                                \
    }

INLINE uint32_t bits_at(const uint8_t *record, int k) { return (uint32_t)record[2 + k / 8] | (uint32_t)record[3 + k / 8] << 8; }

/* A block of y being encoded: the sum of squares and the number of its active elements, and the record that gets its signs. */
struct signing {
    vec squares, count;
    uint8_t *record;
};

/* y = x + (y - scale * sign(y)) */
INLINE void compensate(struct signing *to, float *y, vec x, vec scale, const float *inverse, int k, int partly)
{
    const vec old = load_f32(y + k);
    x = vec_add(x, vec_sub(old, vec_with_sign(scale, old)));
    if (partly) {
        const vec zero = vec_set(0.0f), own = load_f32(inverse + k), active = vec_set(ACTIVE);
        x = vec_pick(own, active, x, zero);
        to->count = vec_add(to->count, vec_pick(own, active, vec_set(1.0f), zero));
    }
    store_f32(y + k, x, 0);
    to->squares = vec_add(to->squares, vec_mul(x, x));
    const uint32_t signs = vec_signs(x);
    to->record[2 + k / 8] = (uint8_t)signs, to->record[3 + k / 8] = (uint8_t)(signs >> 8);
}

INLINE float finish_record(struct signing *of, int partly)
{
    const float active = partly ? lanes_sum(of->count) : (float)SIGN_BLOCK;
    return half_scale(active > 0.0f ? sqrtf(lanes_sum(of->squares) / active) : 0.0f, of->record);
}

INLINE struct signing start_record(uint8_t *record) { return (struct signing){vec_set(0.0f), vec_set(0.0f), record}; }

INLINE void worker_block(const struct onebit *s, int64_t block, int dtype, int partly)
{
    const int64_t at = block * SIGN_BLOCK, size = itemsize(dtype);
    const float *const inverse = s->inverse + at;
    const char *const grad = (const char *)s->grad + at * size;
    float *const y = s->y + at;
    struct signing to = start_record(s->records + block * SIGN_NBYTES);
    const vec scale = vec_set(s->scales[block]), mean = vec_mul(vec_set(bf16_at(to.record)), vec_set(s->beta));
    const vec factor = vec_set(s->factor);
    for (int k = 0; k < SIGN_BLOCK; k += 16) {
        __builtin_prefetch(y + k + SIGNS_AHEAD);
        __builtin_prefetch(inverse + k + SIGNS_AHEAD);
        __builtin_prefetch(grad + (k + SIGNS_AHEAD) * size);
        const vec g = vec_mul(vec_mul(load_vec(grad + k * size, dtype), factor), load_f32(inverse + k));
        compensate(&to, y, vec_add(vec_by_bits(bits_at(to.record, k), mean), g), scale, inverse, k, partly);
    }
    s->scales[block] = finish_record(&to, partly);
}

INLINE void worker_blocks(const struct onebit *s, int64_t block, int64_t stop, int dtype)
{
    for (; block < stop; ++block)
        if (s->partly[block])
            worker_block(s, block, dtype, 1);
        else
            worker_block(s, block, dtype, 0);
}

/* y = beta * p + factor * g * inverse + (y - scales * sign(y)), and the record of the new y. `records` holds p, the result of the last
 * exchange, and is overwritten. numel is a multiple of 512. */
TARGET static void onebit_worker(const struct onebit *s, int64_t start, int64_t stop)
{
    FOR_DTYPE(worker_blocks, s->dtype, s, start / SIGN_BLOCK, stop / SIGN_BLOCK)
}

INLINE void server_block(const struct onebit *s, int64_t block, float *sizes, int partly)
{
    const int64_t at = block * SIGN_BLOCK, num = s->num_sources, own = block * SIGN_NBYTES;
    struct signing to = start_record(s->records + own);
    const vec alpha = vec_set(s->factor), scale = vec_set(s->scales[block]);
    for (int64_t rank = 0; rank < num; ++rank)
        sizes[rank] = bf16_at(s->sources[rank] + own);
    for (int k = 0; k < SIGN_BLOCK; k += 16) {
        __builtin_prefetch(s->y + at + k + SIGNS_AHEAD);
        vec sum = vec_by_bits(bits_at(s->sources[0] + own, k), vec_set(sizes[0]));
        for (int64_t rank = 1; rank < num; ++rank)
            sum = vec_add(sum, vec_by_bits(bits_at(s->sources[rank] + own, k), vec_set(sizes[rank])));
        compensate(&to, s->y + at, vec_mul(sum, alpha), scale, s->inverse + at, k, partly);
    }
    s->scales[block] = finish_record(&to, partly);
}

/* y = alpha * (the sources' values, added in order) + (y - scales * sign(y)), and the record of the new y. */
TARGET static void onebit_server(const struct onebit *s, int64_t start, int64_t stop)
{
    float sizes[s->num_sources];
    for (int64_t block = start / SIGN_BLOCK; block < stop / SIGN_BLOCK; ++block)
        if (s->partly[block])
            server_block(s, block, sizes, 1);
        else
            server_block(s, block, sizes, 0);
}

INLINE void update_block(const struct onebit *s, int64_t block, int dtype, int has_out, int partly, int stream)
{
    const int64_t at = block * SIGN_BLOCK, size = itemsize(dtype);
    const uint8_t *const record = s->records + block * SIGN_NBYTES;
    float *const master = s->y + at;
    char *const out = (char *)s->out + at * size;
    const vec keep = vec_set(s->beta), step = vec_mul(vec_set(bf16_at(record)), vec_set(s->factor));
    for (int k = 0; k < SIGN_BLOCK; k += 16) {
        __builtin_prefetch(master + k + SIGNS_AHEAD, 1);
        vec p = vec_by_bits(bits_at(record, k), step);
        if (partly)
            p = vec_pick(load_f32(s->inverse + at + k), vec_set(ACTIVE), p, vec_set(0.0f));
        const vec w = store_f32(master + k, vec_sub(vec_mul(load_f32(master + k), keep), p), 0);
        if (has_out)
            store_vec(out + k * size, w, dtype, stream);
    }
}

INLINE void update_blocks(const struct onebit *s, int64_t block, int64_t stop, int has_out, int dtype)
{
    const int stream = has_out && (uintptr_t)s->out % 64 == 0; /* to weights that are read later */
    for (; block < stop; ++block)
        if (s->partly[block])
            update_block(s, block, dtype, has_out, 1, 0);
        else if (stream)
            update_block(s, block, dtype, has_out, 0, 1);
        else
            update_block(s, block, dtype, has_out, 0, 0);
    if (stream)
        fence_streams();
}

/* master = master * beta - p * factor, and the weights. */
TARGET static void onebit_update(const struct onebit *s, int64_t start, int64_t stop)
{
    if (!s->out)
        update_blocks(s, start / SIGN_BLOCK, stop / SIGN_BLOCK, 0, DTYPE_F32);
    else
        FOR_DTYPE(update_blocks, s->dtype, s, start / SIGN_BLOCK, stop / SIGN_BLOCK, 1)
}
