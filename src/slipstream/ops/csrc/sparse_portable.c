/* Block-sparse attention for any processor. */
#include "sparse.h"
#include "vec_portable.h"
#include "sparse_body.h"

static const struct sparse_isa table = {"portable", forward, backward};
const struct sparse_isa *const sparse_portable = &table;
