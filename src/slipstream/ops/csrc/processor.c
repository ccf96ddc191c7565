/* The best instruction set that both the processor and the operating system support. */
#include "slipstream_ops.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Bits of XCR0: which registers the operating system saves. */
static unsigned saved_registers(void)
{
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Uses CPUID directly: __builtin_cpu_supports needs a runtime library that not every clang links. */
enum isa slipstream_best_isa(void)
{
    const unsigned ymm = 0x6, zmm = 0xe6, base = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL, bf16 = 1u << 5; /* of subleaf 1; no header names it all */
    unsigned a, b, c, d, extended, more, dots = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & base) != base || !__get_cpuid_count(7, 0, &a, &extended, &more, &d))
        return PORTABLE;
    if (!(extended & bit_AVX2) || (saved_registers() & ymm) != ymm)
        return PORTABLE;
    if (!(extended & bit_AVX512F) || (saved_registers() & zmm) != zmm)
        return AVX2;
    if (!KNOWS_avx512vnni || (extended & wide) != wide || !(more & bit_AVX512VNNI))
        return AVX512;
    if (a >= 1)
        __get_cpuid_count(7, 1, &dots, &b, &c, &d);
    return KNOWS_avx512bf16 && (dots & bf16) ? AVX512BF16 : AVX512VNNI;
}
#else
enum isa slipstream_best_isa(void) { return PORTABLE; }
#endif
