/* The entry point of grouped matrix products; each of the caller's threads calls it, and takes items until there are none. */
#include "grouped.h"

#include <string.h>

const char *slipstream_isa(void);

/* Returns 0 if there is no memory, and -1 without AVX2. */
SLIPSTREAM_API int slipstream_grouped(struct grouped *s)
{
    const struct grouped_isa *tables[] = {grouped_avx512bf16, grouped_avx512, grouped_avx2};
    const char *name = strcmp(slipstream_isa(), "avx512vnni") == 0 ? "avx512" : slipstream_isa();
    for (int i = 0; i < 3; ++i)
        if (tables[i] && strcmp(tables[i]->name, name) == 0)
            return tables[i]->multiply(s);
    return -1;
}
