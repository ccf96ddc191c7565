/* The entry point of grouped matrix products; each of the caller's threads calls it with the same arrays, and takes items
 * until there are none. Callers ask for AVX2 before. */
#include "grouped.h"

#include <string.h>

const char *slipstream_isa(void);

SLIPSTREAM_API void slipstream_grouped(void *call)
{
    const struct grouped_isa *tables[] = {grouped_avx512bf16, grouped_avx512, grouped_avx2};
    const char *name = strcmp(slipstream_isa(), "avx512vnni") == 0 ? "avx512" : slipstream_isa();
    for (int i = 0; i < 3; ++i)
        if (tables[i] && strcmp(tables[i]->name, name) == 0)
            tables[i]->multiply(call);
}
