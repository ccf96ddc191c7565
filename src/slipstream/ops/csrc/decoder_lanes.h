/* Definitions shared by the parts of the forward: the state of a thread, and functions of 16 lanes. */
#ifndef SLIPSTREAM_DECODER_LANES_H
#define SLIPSTREAM_DECODER_LANES_H

#include "vec_activation.h"

#define MASKED (-1e30f)

/* One thread of a forward. Every thread runs the same stages; its own rows are [from, until). */
struct worker {
    struct team *team;
    int thread, stage;
    float *scratch;
    int64_t from, until;
    struct ahead ahead;
};

INLINE vec vec_tanh(vec x)
{
    const vec one = vec_set(1.0f);
    return vec_sub(one, vec_div(vec_set(2.0f), vec_add(vec_exp(vec_min(vec_add(x, x), vec_set(80.0f))), one)));
}

TARGET static float exp_of(float x)
{
    float lanes[16];
    store_f32(lanes, vec_exp(vec_set(x)), 0);
    return lanes[0];
}

#endif
