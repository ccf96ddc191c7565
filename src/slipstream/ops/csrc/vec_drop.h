/* Dropout that stores nothing: whether an element is kept is a hash of its place. Included after a vec_*.h. */
#ifndef SLIPSTREAM_VEC_DROP_H
#define SLIPSTREAM_VEC_DROP_H

/* 1 / (1 - p), or 0 for a dropped element, of 16 neighbors: 16 bits each of a hash of (seed, row, panel of 16 columns).
 * least: the least 16-bit number that is kept, 65536 p. The twin is `kept` in ops/fused.py. */
INLINE vec vec_kept(uint32_t seed, uint32_t row, uint32_t panel, float least)
{
    uint32_t x = seed ^ row * 0x85ebca6bu;
    x = ((x ^ x >> 15) + panel * 0xc2b2ae35u) * 0x27d4eb2fu;
    return vec_pick(words_to_vec(own_half(halves_of(x ^ x >> 13), 0)), vec_set(least), vec_set(65536.0f / (65536.0f - least)),
                    vec_set(0.0f));
}

#endif
