/* Codes of gradients and weights on the wire, written once over 16 fp32 lanes and compiled per instruction set.
 *
 * [Note: Blocks on the wire] A block of 256 elements is a record: a bf16 scale, then 256 codes of 8 bits, or 128 bytes of two 4-bit
 * codes, the first in the low half. An element is code * scale. The scale is the largest magnitude / 127 (or / 7), rounded up so
 * that no code is clipped. A block with a non-finite element has the scale NaN and codes of 0: its sums are NaN, which the verdict
 * detects. The last record of an array has as many bytes as its elements need. */
#define WIRE_BLOCK 256

INLINE int64_t record_nbytes(int bits) { return 2 + WIRE_BLOCK * bits / 8; }

/* 16 values, of which each is a code. */
INLINE vec load_wire(const uint8_t *codes, int64_t k, int bits, vec table)
{
    return bits == 8 ? load_i8(codes + k) : load_nibbles(codes + k / 2, table);
}

INLINE vec wire_table(void)
{
    static const float values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return load_f32(values);
}

/* Eight numbers below 16, one per byte -> four bytes. */
INLINE uint32_t halved(uint64_t x)
{
    x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
    x = (x | x >> 8) & 0x0000ffff0000ffffu;
    return (uint32_t)(x | x >> 16);
}

TARGET static void encode_record(const float *x, int bits, uint8_t *record)
{
    const float top = bits == 8 ? 127.0f : 7.0f;
    const vec magic = vec_set(12582912.0f), least = vec_set(-top), most = vec_set(top);
    vec largest = vec_set(0.0f), broken = vec_set(0.0f);
    uint8_t *codes = record + 2;
    for (int k = 0; k < WIRE_BLOCK; k += 16) {
        const vec v = load_f32(x + k);
        largest = vec_max(largest, vec_abs(v));
        broken = vec_add(broken, vec_sub(v, v)); /* 0 until a non-finite value, then NaN */
    }
    if (lanes_sum(broken) != 0.0f) {
        record[0] = 0xc0, record[1] = 0x7f;
        memset(codes, bits == 8 ? 0 : 0x88, (size_t)(WIRE_BLOCK * bits / 8));
        return;
    }
    const uint32_t word = (bits_of(lanes_max(largest) / top) + 0xffffu) & 0xffff0000u; /* up to bf16; overflows to infinity */
    const float scale = float_of(word);
    record[0] = (uint8_t)(word >> 16), record[1] = (uint8_t)(word >> 24);
    const vec inverse = vec_set(1.0f / (scale > 0x1p-126f ? scale : 0x1p-126f));
    for (int k = 0; k < WIRE_BLOCK; k += 16) {
        vec v = vec_max(vec_min(vec_mul(load_f32(x + k), inverse), most), least);
        v = vec_sub(vec_add(v, magic), magic);
        if (bits == 8) {
            store_i8(codes + k, v);
        } else {
            uint64_t bytes[2];
            store_u8(bytes, vec_add(v, vec_set(8.0f)));
            const uint32_t packed[2] = {halved(bytes[0]), halved(bytes[1])};
            memcpy(codes + k / 2, packed, sizeof packed);
        }
    }
}

/* Encode numel elements. `error`, unless NULL, has 8-bit records of the same blocks: what it holds is added first; then it gets the old
 * error mixed with what the codes have lost: beta * old + (1 - beta) * lost. */
TARGET static void wire_encode(const char *x, int dtype, int64_t numel, int bits, uint8_t *out, uint8_t *error, float beta)
{
    const int64_t size = itemsize(dtype), nbytes = record_nbytes(bits);
    const vec table = wire_table(), keep = vec_set(beta), mix = vec_set(1.0f - beta);
    for (int64_t at = 0; at < numel; at += WIRE_BLOCK, out += nbytes) {
        const int64_t width = numel - at < WIRE_BLOCK ? numel - at : WIRE_BLOCK;
        char rest[WIRE_BLOCK * sizeof(float)];
        float sums[WIRE_BLOCK], old[WIRE_BLOCK];
        uint8_t record[2 + WIRE_BLOCK];
        const char *from = x + at * size;
        if (width < WIRE_BLOCK) {
            memset(rest, 0, sizeof rest);
            from = memcpy(rest, from, (size_t)(width * size));
        }
        const float *values = (const float *)from;
        if (dtype != DTYPE_F32 || error) {
            for (int k = 0; k < WIRE_BLOCK; k += 16)
                store_f32(sums + k, load_vec(from + k * size, dtype), 0);
            values = sums;
        }
        if (error) {
            const uint8_t *kept = error + at / WIRE_BLOCK * record_nbytes(8);
            if (width < WIRE_BLOCK) {
                memset(record, 0, sizeof record);
                kept = memcpy(record, kept, (size_t)(2 + width));
            }
            const vec scale = vec_set(bf16_at(kept));
            for (int k = 0; k < WIRE_BLOCK; k += 16) {
                const vec e = vec_mul(load_i8(kept + 2 + k), scale);
                store_f32(old + k, e, 0);
                store_f32(sums + k, vec_add(load_f32(sums + k), e), 0);
            }
        }
        encode_record(values, bits, record);
        memcpy(out, record, (size_t)(width < WIRE_BLOCK ? 2 + (width * bits + 7) / 8 : nbytes));
        if (error) {
            const vec scale = vec_set(bf16_at(record));
            for (int k = 0; k < WIRE_BLOCK; k += 16) {
                const vec lost = vec_sub(load_f32(sums + k), vec_mul(load_wire(record + 2, k, bits, table), scale));
                store_f32(old + k, vec_add(vec_mul(load_f32(old + k), keep), vec_mul(lost, mix)), 0);
            }
            encode_record(old, 8, record);
            if (record[0] == 0xc0 && record[1] == 0x7f) /* the step is skipped: its error must not stay */
                memset(record, 0, sizeof record);
            memcpy(error + at / WIRE_BLOCK * record_nbytes(8), record, (size_t)(2 + width));
        }
    }
}

/* out[i] = round(alpha * (the sources' elements, added in order) + (accumulate ? out[i] : 0)) over elements [start, stop), at most
 * one BLOCK; returns the sum of squares of out. */
TARGET static double wire_sum(const struct sum_args *args, int64_t start, int64_t stop, int bits, int target)
{
    const vec alpha = vec_set(args->alpha), table = wire_table();
    const int64_t size = itemsize(target), nbytes = record_nbytes(bits), num = args->num_sources;
    vec64 squares = vec64_zero();
    for (int64_t at = start; at < stop; at += WIRE_BLOCK) {
        const int64_t width = stop - at < WIRE_BLOCK ? stop - at : WIRE_BLOCK;
        float sums[WIRE_BLOCK];
        for (int64_t rank = 0; rank < num; ++rank) {
            const uint8_t *record = (const uint8_t *)args->sources[rank] + at / WIRE_BLOCK * nbytes;
            uint8_t rest[2 + WIRE_BLOCK];
            if (width < WIRE_BLOCK) {
                memset(rest, 0, sizeof rest);
                record = memcpy(rest, record, (size_t)(2 + (width * bits + 7) / 8));
            }
            const vec scale = vec_set(bf16_at(record));
            for (int k = 0; k < WIRE_BLOCK; k += 16) {
                const vec v = vec_mul(load_wire(record + 2, k, bits, table), scale);
                store_f32(sums + k, rank ? vec_add(load_f32(sums + k), v) : v, 0);
            }
        }
        for (int64_t k = 0; k < width; k += 16) {
            const int64_t present = width - k;
            char *const to = (char *)args->out + (at + k) * size;
            vec v = vec_mul(load_part(sums + k, present, DTYPE_F32), alpha); /* lanes past the end count as zeros */
            if (args->accumulate)
                v = vec_add(v, load_part(to, present, target));
            v = store_part(to, v, present, target);
            squares = vec64_add_squares(squares, v);
        }
    }
    return folded(squares);
}
