/* The C ABI of the kernels, and the choice of instruction set.
 *
 * The set is the processor's best (processor.c), unless build.py chooses another. Callers split arrays over threads: flat ones at
 * multiples of BLOCK elements, others by rows, groups or items.
 */
#include "fused.h"
#include "grouped.h"
#include "optim.h"
#include "quantize.h"
#include "sparse.h"

#include <string.h>

#ifndef SLIPSTREAM_SOURCE_HASH
#error "compile through ops/build.py, which defines SLIPSTREAM_SOURCE_HASH"
#endif

/* The instruction sets, each a superset of those before it. */
static const char *const names[] = {
    [PORTABLE] = "portable", [AVX2] = "avx2", [AVX512] = "avx512", [AVX512VNNI] = "avx512vnni", [AVX512BF16] = "avx512bf16"};

static _Atomic int chosen = -1;

enum isa slipstream_set(void)
{
    int set = atomic_load_explicit(&chosen, memory_order_acquire);
    if (set < 0) {
        set = (int)slipstream_best_isa();
        atomic_store_explicit(&chosen, set, memory_order_release);
    }
    return (enum isa)set;
}

/* The last two sets differ in the decoder and grouped products only. */
static enum isa lanes(void) { return slipstream_set() < AVX512 ? slipstream_set() : AVX512; }

#define IN_USE(family) ((const struct family##_isa *const[]){&family##_portable, &family##_avx2, &family##_avx512}[lanes()])

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
SLIPSTREAM_API const char *slipstream_isa(void) { return names[slipstream_set()]; }

/* The instruction set of all kernels but the decoder's and grouped products. */
SLIPSTREAM_API const char *slipstream_kernels_isa(void) { return names[lanes()]; }

/* Switch to the named instruction set; returns 0 if the processor lacks it. Also for tests and benchmarks. */
SLIPSTREAM_API int slipstream_use_isa(const char *name)
{
    for (int set = (int)slipstream_best_isa(); set >= 0; --set)
        if (strcmp(names[set], name) == 0) {
            atomic_store_explicit(&chosen, set, memory_order_release);
            return 1;
        }
    return 0;
}

static int aligned(const void *p) { return ((uintptr_t)p & 63u) == 0; }

/* out[i] = round(alpha * (sources[0][i] + sources[1][i] + ...) + (accumulate ? out[i] : 0)), added in fp32 in that order.
 * Returns the fp64 sum of squares of out, added block by block, and writes each block's sum to `blocks` unless it is NULL. The sum
 * is finite exactly if every element of out is: an fp64 sum of squares of fp32 values cannot overflow.
 * mode: bits 0-3 the dtype of the sources, or the bits of a code if they are encoded (wire_body.h), 4-5 the dtype of out, 6 accumulate,
 * 7 stream. They share one integer because each argument costs the Python caller 50 ns. */
SLIPSTREAM_API double slipstream_sum_ranks(void *out, const void *const *sources, int64_t num_sources, int64_t numel,
                                           int mode, float alpha, double *blocks)
{
    const struct kernels_isa *table = IN_USE(kernels);
    const int source = mode & 15, target = mode >> 4 & 3;
    const struct sum_args args = {
        .out = out,
        .sources = sources,
        .num_sources = num_sources,
        .alpha = alpha,
        .accumulate = mode >> 6 & 1,
        .stream = (mode >> 7 & 1) && aligned(out),
    };
    double total = 0.0;
    for (int64_t start = 0; start < numel; start += BLOCK) {
        int64_t stop = numel - start < BLOCK ? numel : start + BLOCK;
        double partial = (source < 4 ? table->sum_block : table->wire_sum)(&args, start, stop, source, target);
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
    /* All-bf16 steps use AVX2, which separates even and odd elements without crossing lanes: 512-bit vectors are 10% slower there. */
    const int narrow = lanes() == AVX512 && rule == ADAMW && step->master.kind == DTYPE_BF16 && step->first.kind == DTYPE_BF16;
    const struct kernels_isa *table = narrow ? &kernels_avx2 : IN_USE(kernels);
    for (; start < stop; start += BLOCK)
        table->step(rule, step, start, stop - start < BLOCK ? stop : start + BLOCK, sums ? sums + 2 * (start / BLOCK) : 0);
}

/* memcpy that bypasses the caches. The ranges do not overlap. */
SLIPSTREAM_API void slipstream_copy_stream(char *dst, const char *src, int64_t nbytes)
{
    int64_t head = (int64_t)(-(uintptr_t)dst & 63u), body;
    if (head > nbytes)
        head = nbytes;
    body = (nbytes - head) & ~(int64_t)63;
    memcpy(dst, src, (size_t)head);
    IN_USE(kernels)->copy(dst + head, src + head, body);
    memcpy(dst + head + body, src + head + body, (size_t)(nbytes - head - body));
}

/* Encode elements for the wire: [Note: Blocks on the wire]. `error` may be NULL. */
SLIPSTREAM_API void slipstream_wire_encode(const char *x, int dtype, int64_t numel, int bits, uint8_t *out, uint8_t *error,
                                           float beta)
{
    IN_USE(kernels)->wire_encode(x, dtype, numel, bits, out, error, beta);
}

/* Number `pass` of a family over [begin, end) of a record. */
#define ENTRY(family)                                                                                                   \
    SLIPSTREAM_API void slipstream_##family(int pass, const struct family *s, int64_t begin, int64_t end)               \
    {                                                                                                                   \
        IN_USE(family)->passes[pass](s, begin, end);                                                                    \
    }
ENTRY(onebit)
ENTRY(quantize)
ENTRY(fused)
ENTRY(sparse)

/* Each of the caller's threads calls this with the same arrays, and takes items until none are left. Requires AVX2: callers check. */
SLIPSTREAM_API void slipstream_grouped(void *call)
{
    const struct grouped_isa *const tables[] = {0, &grouped_avx2, &grouped_avx512, &grouped_avx512, &grouped_avx512bf16};
    if (tables[slipstream_set()])
        tables[slipstream_set()]->multiply(call);
}
