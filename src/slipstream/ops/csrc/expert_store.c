/* Experts in a file, the most recently used of them in memory: which slots a layer's experts take, and the reads. */
#define _GNU_SOURCE

#include "decoder.h"

#include <errno.h>
#include <unistd.h>

/* Assign a slot to every expert with rows: the one it is in, or else the least recently used. The other threads wait. There are at least
 * as many slots as a layer has experts, so a slot that this layer does not use is always found. */
void store_claim(const struct experts *experts, const struct routing *routing)
{
    struct expert_store *store = experts->store;
    int32_t *slot = store->slot + experts->first_stored;
    ++store->clock;
    store->num_loads = 0;
    for (int32_t e = 0; e < experts->num; ++e)
        if (routing->first[e] < routing->first[e + 1] && experts->stored[2 * e].num_columns && slot[e] >= 0) {
            store->last_used[slot[e]] = store->clock;
            ++store->hits;
        }
    for (int32_t e = 0; e < experts->num; ++e) {
        if (routing->first[e] == routing->first[e + 1] || !experts->stored[2 * e].num_columns || slot[e] >= 0)
            continue;
        int32_t oldest = 0;
        for (int32_t i = 1; i < store->num_slots; ++i)
            if (store->last_used[i] < store->last_used[oldest])
                oldest = i;
        if (store->owner[oldest] >= 0)
            store->slot[store->owner[oldest]] = -1;
        store->owner[oldest] = experts->first_stored + e;
        store->last_used[oldest] = store->clock;
        slot[e] = oldest;
        store->loads[store->num_loads++] = e;
        ++store->misses;
    }
}

static void place(struct matrix *to, const struct matrix *stored, const char *at)
{
    *to = *stored;
    to->data = at + (intptr_t)stored->data;
    to->scale = stored->scale ? at + (intptr_t)stored->scale : 0;
    to->low = stored->low ? at + (intptr_t)stored->low : 0;
}

/* Read this thread's part of the layer's missing experts. A failed read leaves its errno. */
void store_read(const struct experts *experts, int thread, int threads)
{
    struct expert_store *store = experts->store;
    for (int32_t i = 0; i < store->num_loads; ++i) {
        const int32_t e = store->loads[i];
        const int64_t begin = store->expert_bytes * thread / threads, end = store->expert_bytes * (thread + 1) / threads;
        char *const at = store->slots + store->slot[experts->first_stored + e] * store->expert_bytes;
        for (int64_t done = begin; done < end;) {
            const ssize_t n = pread(store->file, at + done, (size_t)(end - done),
                                    (experts->first_stored + e) * store->expert_bytes + done);
            if (n <= 0 && !(n < 0 && errno == EINTR)) {
                store->error = n ? errno : EIO;
                break;
            }
            done += n > 0 ? n : 0;
        }
        if (thread == 0) {
            place(&experts->gate_up[e], &experts->stored[2 * e], at);
            place(&experts->down[e], &experts->stored[2 * e + 1], at);
        }
    }
}
