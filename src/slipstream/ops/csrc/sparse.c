/* The entry points of block-sparse attention; callers split the items over threads. */
#include "sparse.h"

#include <string.h>

const char *slipstream_kernels_isa(void);

SLIPSTREAM_API int slipstream_sparse(int backward, const struct sparse *s, int64_t begin, int64_t end)
{
    const struct sparse_isa *tables[] = {sparse_avx512, sparse_avx2, sparse_portable};
    const struct sparse_isa *table = sparse_portable;
    for (int i = 0; i < 3; ++i)
        if (tables[i] && strcmp(tables[i]->name, slipstream_kernels_isa()) == 0)
            table = tables[i];
    return (backward ? table->backward : table->forward)(s, begin, end);
}
