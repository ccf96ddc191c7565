/* The C ABI of the kernels, and the choice of instruction set.
 *
 * The choice is made once, on first use, from the processor's features (processor.c). Callers split arrays over threads, at
 * multiples of BLOCK elements.
 */
#include "optim.h"

#include <stdatomic.h>
#include <string.h>

#ifndef SLIPSTREAM_SOURCE_HASH
#error "compile through ops/build.py, which defines SLIPSTREAM_SOURCE_HASH"
#endif

/* The instruction sets, each a superset of those before it. The last two differ in the decoder only (decoder.c). */
static const struct {
    const char *name;
    const struct kernels *const *kernels;
} sets[] = {
    [PORTABLE] = {"portable", &kernels_portable},
    [AVX2] = {"avx2", &kernels_avx2},
    [AVX512] = {"avx512", &kernels_avx512},
    [AVX512VNNI] = {"avx512vnni", &kernels_avx512},
    [AVX512BF16] = {"avx512bf16", &kernels_avx512},
};

static _Atomic int chosen = -1;

static int isa(void)
{
    int set = atomic_load_explicit(&chosen, memory_order_acquire);
    if (set < 0) {
        set = slipstream_default_isa();
        atomic_store_explicit(&chosen, set, memory_order_release);
    }
    return set;
}

static const struct kernels *kernels(void) { return *sets[isa()].kernels; }

SLIPSTREAM_API const char *slipstream_source_hash(void) { return SLIPSTREAM_SOURCE_HASH; }

SLIPSTREAM_API const char *slipstream_compiler(void)
{
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

/* The instruction set in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable". */
SLIPSTREAM_API const char *slipstream_isa(void) { return sets[isa()].name; }

/* The instruction set of all kernels but the decoder's. */
SLIPSTREAM_API const char *slipstream_kernels_isa(void) { return kernels()->name; }

/* Switch to the named instruction set; returns 0 if the processor lacks it. For tests and benchmarks. */
SLIPSTREAM_API int slipstream_use_isa(const char *name)
{
    for (int set = slipstream_best_isa(); set >= PORTABLE; --set)
        if (strcmp(sets[set].name, name) == 0) {
            atomic_store_explicit(&chosen, set, memory_order_release);
            return 1;
        }
    return 0;
}

static int aligned(const void *p) { return ((uintptr_t)p & 63u) == 0; }

/* out[i] = round(alpha * (sources[0][i] + sources[1][i] + ...) + (accumulate ? out[i] : 0)), added in fp32 in that order.
 * Returns the fp64 sum of squares of out, added block by block, and writes each block's sum to `blocks` unless it is NULL. The sum
 * is finite exactly if every element of out is: an fp64 sum of squares of fp32 values cannot overflow.
 * mode: bits 0-1 the dtype of the sources, 2-3 of out, 4 accumulate, 5 stream. They share one integer because each argument costs
 * the Python caller 50 ns. */
SLIPSTREAM_API double slipstream_sum_ranks(void *out, const void *const *sources, int64_t num_sources, int64_t numel,
                                           int mode, float alpha, double *blocks)
{
    const struct kernels *table = kernels();
    const int source = mode & 3, target = mode >> 2 & 3;
    const struct sum_args args = {
        .out = out,
        .sources = sources,
        .num_sources = num_sources,
        .alpha = alpha,
        .accumulate = mode >> 4 & 1,
        .stream = (mode >> 5 & 1) && aligned(out),
    };
    double total = 0.0;
    for (int64_t start = 0; start < numel; start += BLOCK) {
        int64_t stop = numel - start < BLOCK ? numel : start + BLOCK;
        double partial = table->sum_block(&args, start, stop, source, target);
        if (blocks)
            blocks[start / BLOCK] = partial;
        total += partial;
    }
    return total;
}

/* One optimizer step over elements [start, stop); start is a multiple of BLOCK. sums: the output of LAMB_UPDATE, two per BLOCK of
 * the whole array. */
SLIPSTREAM_API void slipstream_step(int rule, const struct step *step, int64_t start, int64_t stop, double *sums)
{
    const struct kernels *table = kernels();
    for (; start < stop; start += BLOCK)
        table->step(rule, step, start, stop - start < BLOCK ? stop : start + BLOCK, sums ? sums + 2 * (start / BLOCK) : 0);
}

/* memcpy that bypasses the caches. The ranges do not overlap. */
SLIPSTREAM_API void slipstream_copy_stream(char *dst, const char *src, int64_t nbytes)
{
    int64_t head = (int64_t)(-(uintptr_t)dst & 63u), body;
    if (head > nbytes)
        head = nbytes;
    body = (nbytes - head) & ~(int64_t)255;
    memcpy(dst, src, (size_t)head);
    kernels()->copy(dst + head, src + head, body);
    memcpy(dst + head + body, src + head + body, (size_t)(nbytes - head - body));
}

/* A pass of a 1-bit optimizer: [Note: One bit]. */
SLIPSTREAM_API void slipstream_onebit(int pass, const struct onebit *s, int64_t start, int64_t stop)
{
    kernels()->onebit[pass](s, start, stop);
}

/* Encode elements for the wire: [Note: Blocks on the wire]. `error` may be NULL. */
SLIPSTREAM_API void slipstream_wire_encode(const char *x, int dtype, int64_t numel, int bits, uint8_t *out, uint8_t *error,
                                           float beta)
{
    kernels()->wire_encode(x, dtype, numel, bits, out, error, beta);
}

/* As slipstream_sum_ranks, of encoded sources. mode: bits 0-3 the bits of a code, 4-5 the dtype of out, 6 accumulate. */
SLIPSTREAM_API double slipstream_wire_sum(void *out, const void *const *sources, int64_t num_sources, int64_t numel, int mode,
                                          float alpha, double *blocks)
{
    const struct sum_args args = {
        .out = out, .sources = sources, .num_sources = num_sources, .alpha = alpha, .accumulate = mode >> 6 & 1};
    double total = 0.0;
    for (int64_t start = 0; start < numel; start += BLOCK) {
        const int64_t stop = numel - start < BLOCK ? numel : start + BLOCK;
        const double partial = kernels()->wire_sum(&args, start, stop, mode & 15, mode >> 4 & 3);
        if (blocks)
            blocks[start / BLOCK] = partial;
        total += partial;
    }
    return total;
}
