/* The entry point of the passes of a transformer layer; callers split the rows over threads. */
#include "fused.h"

#include <string.h>

const char *slipstream_kernels_isa(void);

SLIPSTREAM_API void slipstream_fused(int pass, const struct fused *s, int64_t begin, int64_t end)
{
    const struct fused_isa *tables[] = {fused_avx512, fused_avx2, fused_portable};
    const struct fused_isa *table = fused_portable;
    for (int i = 0; i < 3; ++i)
        if (tables[i] && strcmp(tables[i]->name, slipstream_kernels_isa()) == 0)
            table = tables[i];
    table->passes[pass](s, begin, end);
}
