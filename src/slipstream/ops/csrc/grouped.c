/* Grouped matrix products of fp32 and bf16, written once over 16 lanes: c = a b + bias for groups of any number of rows.
 *
 * An item is up to BLOCK_ROWS rows and s->columns columns of a group's c. Its part of a is packed once for each part of k, as tiles
 * of up to TALL rows; b, of any layout, is packed a panel of WIDE_PANEL columns at a time, which all tiles then read from the cache.
 * A part of k is 512 elements (1,024 of bf16 with dot products). A packed word is an element of fp32, or two bf16 elements that are
 * neighbors along k.
 *
 * An element of c starts with its bias and adds its terms in the order of k, in fp32, so its bits depend neither on the other rows of
 * its group nor on the number of threads. With dot products of bf16 the second term of a pair is added before the first, each is
 * rounded, and subnormal numbers count as zero: results differ in bits from those without.
 */
#include "grouped.h"
#include "isa.h"

#if KNOWN
#include <stdlib.h>

/* Accumulators of a tile: TALL x PANELS vectors; TALL is a multiple of 3. */
#if WIDE == 4 /* 32 registers of 16 lanes */
#define TALL 12
#define PANELS 2
#else /* 16 registers of 8 lanes */
#define TALL 6
#define PANELS 1
#endif
#define WIDE_PANEL (16 * PANELS)
#define PADDED ((TALL + 3) / 4 * 4) /* of a row of a packed tile */
#define TILES 24
#define BLOCK_ROWS (TALL * TILES)
#define STEPS 512 /* the most words of a line in one part of k */
typedef float __attribute__((may_alias)) lane; /* tiles are packed as words */
#define WIDENS !DOTS_BF16 /* bf16 is multiplied in fp32: tiles of a are packed in fp32, two rows a step */

/* to[j][i] = word j of lines[i], from byte `at`, for 4 lines and 4 words. */
INLINE void transpose_4(const char *const *lines, int64_t at, uint32_t *to, int64_t width)
{
    __m128i x[4];
    for (int i = 0; i < 4; ++i)
        x[i] = _mm_loadu_si128((const __m128i *)(lines[i] + at));
    const __m128i low = _mm_unpacklo_epi32(x[0], x[1]), low2 = _mm_unpacklo_epi32(x[2], x[3]);
    const __m128i high = _mm_unpackhi_epi32(x[0], x[1]), high2 = _mm_unpackhi_epi32(x[2], x[3]);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(low, low2));
    _mm_storeu_si128((__m128i *)(to + width), _mm_unpackhi_epi64(low, low2));
    _mm_storeu_si128((__m128i *)(to + 2 * width), _mm_unpacklo_epi64(high, high2));
    _mm_storeu_si128((__m128i *)(to + 3 * width), _mm_unpackhi_epi64(high, high2));
}

/* to[step][i] = the step's word of lines[i], for `width` lines, a multiple of 4. */
INLINE void pack_lines(const char *const *lines, const int width, int64_t steps, uint32_t *to)
{
    const int64_t whole = steps / 4 * 4;
    int i = 0;
#ifdef SIXTEEN_LINES
    for (; i + 16 <= width; i += 16)
        for (int64_t step = 0; step < whole; step += 4)
            transpose_16(lines + i, 4 * step, to + step * width + i, width);
#endif
    for (; i + 8 <= width; i += 8)
        for (int64_t step = 0; step < whole; step += 4)
            transpose_8(lines + i, 4 * step, to + step * width + i, width);
    for (; i < width; i += 4)
        for (int64_t step = 0; step < whole; step += 4)
            transpose_4(lines + i, 4 * step, to + step * width + i, width);
    for (int64_t step = whole; step < steps; ++step)
        for (i = 0; i < width; ++i)
            memcpy(to + step * width + i, lines[i] + 4 * step, 4);
}

/* As pack_lines, where row k has the `count` lines side by side; rows are `stride` bytes apart; zeros for the rest of `width`. */
INLINE void pack_rows(const int bf16, const char *from, int64_t stride, int64_t k, const int count, const int width, uint32_t *to)
{
    static const uint16_t none[WIDE_PANEL];
    for (int64_t at = 0; at < k; at += 1 + bf16, to += width) {
        const char *row = from + at * stride;
        if (bf16) {
            const uint16_t *even = (const uint16_t *)row, *odd = at + 1 < k ? (const uint16_t *)(row + stride) : none;
            for (int i = 0; i < count; ++i)
                to[i] = even[i] | (uint32_t)odd[i] << 16;
        } else {
            memcpy(to, row, 4 * (size_t)count);
        }
        for (int i = count; i < width; ++i)
            to[i] = 0;
    }
}

/* Pack `count` lines, `apart` bytes from each other, to words [steps][width]; elements along k are `along` bytes apart. */
INLINE void pack(const int bf16, const int full, const char *from, int64_t apart, int64_t along, int64_t k, int count, const int width,
                 uint32_t *to)
{
    const int64_t size = bf16 ? 2 : 4;
    if (apart == size && along != size) {
        if (count == full)
            pack_rows(bf16, from, along, k, full, width, to);
        else
            pack_rows(bf16, from, along, k, count, width, to);
        return;
    }
    const char *lines[WIDE_PANEL];
    const int64_t whole = bf16 ? k / 2 : k;
    for (int i = 0; i < width; ++i)
        lines[i] = from + (i < count ? i : count - 1) * apart; /* the products of further lines are not read */
    pack_lines(lines, width, whole, to);
    if (bf16 && k % 2)
        for (int i = 0; i < width; ++i) {
            uint16_t last;
            memcpy(&last, lines[i] + 4 * whole, 2);
            to[whole * width + i] = last;
        }
}

/* Convert the pairs in the second half of a tile to two rows of fp32 each, which fill the whole tile. */
TARGET static void widen_pairs(uint32_t *to, int64_t steps)
{
    const uint32_t *pairs = to + steps * PADDED;
    for (int64_t step = 0; step < steps; ++step, pairs += PADDED, to += 2 * PADDED)
        for (int i = 0; i < PADDED; ++i) {
            const uint32_t pair = pairs[i]; /* read first: the last pairs lie where their rows are written */
            to[i] = pair << 16;
            to[PADDED + i] = pair & 0xffff0000u;
        }
}

/* The fp32 rows that the sums of a tile start from, and where the sums are written: as fp32, or in the dtype of c if `rounds`. */
struct ends {
    const float *from;
    int64_t from_row; /* floats; 0: one row for all */
    char *to;
    int64_t to_row; /* bytes */
    int rounds;
};

/* A tile of a [height, k] times a panel of b. */
INLINE void tile(const int bf16, const int height, const lane *a, const char *b, int64_t steps, const struct ends *ends)
{
    vec s[TALL * PANELS];
#pragma GCC unroll 16
    for (int i = 0; i < height; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j)
            s[i * PANELS + j] = load_f32(ends->from + i * ends->from_row + 16 * j);
    for (; steps; --steps, b += 4 * WIDE_PANEL) {
#if DOTS_BF16
        if (bf16) {
#pragma GCC unroll 16
            for (int i = 0; i < height; ++i)
#pragma GCC unroll 2
                for (int j = 0; j < PANELS; ++j)
                    s[i * PANELS + j] = dot_bf16(s[i * PANELS + j], b + 64 * j, (const uint16_t *)(a + i));
            a += PADDED;
            continue;
        }
#endif
#pragma GCC unroll 2
        for (int half = 0; half <= bf16; ++half, a += PADDED) {
            vec w[PANELS];
#pragma GCC unroll 2
            for (int j = 0; j < PANELS; ++j)
                w[j] = !bf16 ? load_f32(b + 64 * j) : half ? load_odd_bf16(b + 64 * j) : load_even_bf16(b + 64 * j);
#pragma GCC unroll 16
            for (int i = 0; i < height; ++i) {
                const vec x = vec_set(a[i]);
#pragma GCC unroll 2
                for (int j = 0; j < PANELS; ++j)
                    s[i * PANELS + j] = vec_fma(x, w[j], s[i * PANELS + j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < height; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j)
            if (bf16 && ends->rounds)
                store_bf16(ends->to + i * ends->to_row + 32 * j, s[i * PANELS + j], 0);
            else
                store_f32(ends->to + i * ends->to_row + 64 * j, s[i * PANELS + j], 0);
}

TARGET static void tile_of(int bf16, int height, const lane *a, const char *b, int64_t steps, const struct ends *ends)
{
#define OF_HEIGHT(bf16)                                                                                                 \
    if (height == TALL)                                                                                                 \
        tile(bf16, TALL, a, b, steps, ends);                                                                            \
    else if (height == TALL / 3 * 2)                                                                                    \
        tile(bf16, TALL / 3 * 2, a, b, steps, ends);                                                                    \
    else                                                                                                                \
        tile(bf16, TALL / 3, a, b, steps, ends);
    if (bf16) {
        OF_HEIGHT(1)
    } else {
        OF_HEIGHT(0)
    }
}

struct item {
    const char *a, *b, *bias;
    char *c;
    int64_t m, n, k;
};

struct memory {
    uint32_t *a, *b;
    float *sums;
};

INLINE int height_of(int64_t rows) { return rows > TALL / 3 * 2 ? TALL : rows > TALL / 3 ? TALL / 3 * 2 : TALL / 3; }

/* Pack an item's part of a to tiles, `each` words apart. If the columns of a are contiguous, as in a transposed gradient, it goes column
 * by column, through all tiles. */
INLINE void pack_block(const int bf16, const struct grouped *s, const char *from, int64_t m, int64_t k, uint32_t *to, int64_t each)
{
    const int64_t size = bf16 ? 2 : 4, row = s->a.row * size, column = s->a.column * size;
    const int is_down = row == size && column != size;
    const int64_t part = is_down ? 1 + bf16 : k;
    for (int64_t at = 0; at < k; at += part, to += PADDED) {
        uint32_t *tile = to;
        for (int64_t i = 0; i < m; i += TALL, tile += each)
            pack(bf16, TALL, from + at * column + i * row, row, column, k - at < part ? k - at : part,
                 m - i < TALL ? (int)(m - i) : TALL, PADDED, tile);
    }
}

/* The first sums of a panel: its part of the bias, or zeros. */
TARGET static void start_of(const struct item *x, int bf16, int64_t j, int columns, float *to)
{
    for (int i = 0; i < WIDE_PANEL; i += 16) {
        char some[64] = {0};
        const int left = columns - i < 0 ? 0 : columns - i < 16 ? columns - i : 16, size = bf16 ? 2 : 4;
        if (x->bias)
            memcpy(some, x->bias + (j + i) * size, (size_t)(left * size));
        store_f32(to + i, bf16 ? load_bf16(some) : load_f32(some), 0);
    }
}

/* Prefetch share t of `shares` of a panel's lines, of k elements: they are too far apart for the processor's own prefetching, and the
 * panel is packed as soon as all tiles have been multiplied with the one before. */
TARGET static void fetch_panel(const char *b, int64_t apart, int64_t along, int64_t k, int64_t size, int64_t t, int64_t shares)
{
    const int is_across = along == size; /* a column of b is contiguous */
    const int64_t lines = is_across ? WIDE_PANEL : k, nbytes = (is_across ? k : WIDE_PANEL) * size, gap = is_across ? apart : along;
    const int64_t each = (nbytes + 63) / 64, end = (t + 1) * lines * each / shares;
    for (int64_t at = t * lines * each / shares, line = at / each, from = at % each; at < end; ++line, from = 0)
        for (; from < each && at < end; ++from, ++at)
            __builtin_prefetch(b + line * gap + from * 64, 0, 2);
}

/* Multiply all tiles with one packed panel of b. The first part of k starts from the bias; the last one writes c, the others sums. */
TARGET static void multiply_panel(const struct grouped *s, const struct item *x, struct memory memory, int64_t j, int64_t from,
                                  int64_t k)
{
    const int bf16 = s->dtype == DTYPE_BF16, columns = x->n - j < WIDE_PANEL ? (int)(x->n - j) : WIDE_PANEL;
    const int is_first = from == 0, is_last = from + k == x->k, is_end = j + WIDE_PANEL >= x->n;
    const int64_t size = bf16 ? 2 : 4, steps = bf16 ? (k + 1) / 2 : k, tiles = (x->m + TALL - 1) / TALL;
    const int64_t row = s->b.row * size, column = s->b.column * size;
    const char *next = x->b + (is_end ? (from + k) * row : from * row + (j + WIDE_PANEL) * column);
    float start[WIDE_PANEL], *sums = memory.sums + j * tiles * TALL;
    char edge[TALL * WIDE_PANEL * 4];
    start_of(x, bf16, j, columns, start);
    for (int64_t t = 0; t < tiles; ++t, sums += TALL * WIDE_PANEL) {
        const int64_t rows = x->m - t * TALL < TALL ? x->m - t * TALL : TALL;
        const int height = height_of(rows), fits = columns == WIDE_PANEL && rows == height;
        char *c = x->c + (t * TALL * s->c.row + j) * size;
        if (!is_end || !is_last)
            fetch_panel(next, column, row, k, size, t, tiles);
        struct ends ends = {.from = is_first ? start : sums, .from_row = is_first ? 0 : WIDE_PANEL, .rounds = is_last};
        ends.to = !is_last ? (char *)sums : fits ? c : edge;
        ends.to_row = is_last && fits ? s->c.row * size : WIDE_PANEL * (is_last ? size : 4);
        tile_of(bf16, height, (const lane *)memory.a + t * steps * PADDED * (1 + (bf16 && WIDENS)), (const char *)memory.b, steps, &ends);
        for (int64_t i = 0; i < rows && is_last && !fits; ++i)
            memcpy(c + i * s->c.row * size, edge + i * WIDE_PANEL * size, (size_t)(columns * size));
    }
}

/* Compute an item's c: for each part of k, all tiles with each panel. */
TARGET static void multiply_item(const struct grouped *s, const struct item *x, struct memory memory)
{
    const int bf16 = s->dtype == DTYPE_BF16;
    const int64_t size = bf16 ? 2 : 4, part = STEPS * (bf16 && !WIDENS ? 2 : 1), row = s->b.row * size, column = s->b.column * size;
    for (int64_t from = 0; from < x->k; from += part) {
        const int64_t k = x->k - from < part ? x->k - from : part, steps = bf16 ? (k + 1) / 2 : k;
        const int widens = bf16 && WIDENS;
        const int64_t each = steps * PADDED * (1 + widens);
        if (bf16)
            pack_block(1, s, x->a + from * s->a.column * size, x->m, k, memory.a + widens * steps * PADDED, each);
        else
            pack_block(0, s, x->a + from * s->a.column * size, x->m, k, memory.a, each);
        for (int64_t t = 0; t * TALL < x->m && widens; ++t)
            widen_pairs(memory.a + t * each, steps);
        for (int64_t j = 0; j < x->n; j += WIDE_PANEL) {
            const int columns = x->n - j < WIDE_PANEL ? (int)(x->n - j) : WIDE_PANEL;
            const char *b = x->b + from * row + j * column;
            if (bf16)
                pack(1, WIDE_PANEL, b, column, row, k, columns, WIDE_PANEL, memory.b);
            else
                pack(0, WIDE_PANEL, b, column, row, k, columns, WIDE_PANEL, memory.b);
            multiply_panel(s, x, memory, j, from, k);
        }
    }
}

/* The rows of each item of a group: equally many, because every item packs its part of b. */
INLINE int64_t block_rows(int64_t m)
{
    const int64_t blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return ((m + blocks - 1) / blocks + TALL - 1) / TALL * TALL;
}

INLINE char *group_at(const struct grouped_matrix *x, const struct grouped *s, int64_t g, int64_t size)
{
    return x->at + (s->starts[g] * x->start + g * x->group) * size;
}

TARGET static void take_item(const struct grouped *s, int64_t g, int64_t at, int64_t m, int64_t k, struct memory memory)
{
    const int64_t size = s->dtype == DTYPE_BF16 ? 2 : 4, across = (s->n + s->columns - 1) / s->columns;
    const int64_t height = block_rows(m), i = at / across * height, j = at % across * s->columns;
    const struct item x = {
        .a = group_at(&s->a, s, g, size) + i * s->a.row * size,
        .b = group_at(&s->b, s, g, size) + j * s->b.column * size,
        .c = group_at(&s->c, s, g, size) + (i * s->c.row + j) * size,
        .bias = s->bias ? s->bias + (g * s->n + j) * size : 0,
        .m = m - i < height ? m - i : height,
        .n = s->n - j < s->columns ? s->n - j : s->columns,
        .k = k,
    };
    if (k)
        multiply_item(s, &x, memory);
    else
        for (int64_t row = 0; row < x.m; ++row) {
            char *to = x.c + row * s->c.row * size;
            x.bias ? memcpy(to, x.bias, (size_t)(x.n * size)) : memset(to, 0, (size_t)(x.n * size));
        }
}

TARGET static void multiply(struct grouped *s)
{
    const size_t a = TILES * PADDED * STEPS, b = STEPS * WIDE_PANEL;
    const size_t sums = BLOCK_ROWS * (size_t)((s->columns + WIDE_PANEL - 1) / WIDE_PANEL * WIDE_PANEL);
    uint32_t *all = aligned_alloc(64, ((a + b + sums) * 4 + 63) / 64 * 64);
    if (!all) {
        s->failed = 1;
        return;
    }
    const struct memory memory = {.a = all, .b = all + a, .sums = (float *)(all + a + b)};
    int64_t first = 0, next = atomic_fetch_add(&s->next, 1);
    for (int64_t g = 0; g < s->groups; ++g) {
        const int64_t rows = s->starts[g + 1] - s->starts[g], m = s->m < 0 ? rows : s->m, k = s->k < 0 ? rows : s->k;
        const int64_t items = (m + BLOCK_ROWS - 1) / BLOCK_ROWS * ((s->n + s->columns - 1) / s->columns);
        for (; next < first + items; next = atomic_fetch_add(&s->next, 1))
            take_item(s, g, next - first, m, k, memory);
        first += items;
    }
    free(all);
}
#endif

const struct grouped_isa OF_ISA(grouped) = TABLE(multiply);
