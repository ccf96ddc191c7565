/* The passes of a transformer layer for any processor. */
#include "fused.h"
#include "vec_portable.h"
#include "fused_body.h"

static const struct fused_isa table = {"portable", {add_norm, add_norm_backward, activate, activate_backward, rotate, lose, lose_backward}};
const struct fused_isa *const fused_portable = &table;
