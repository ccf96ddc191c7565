/* The threads of a decoder or a sampler, and the entry points that run a forward, a product or the choice of tokens on them.
 *
 * A team's threads sleep between forwards and spin inside one: a forward has hundreds of barriers, microseconds apart. Threads
 * take work item by item (team_next), so that a descheduled thread delays one item only. Each thread starts with its own share,
 * in order: it reads memory in one stream and can prefetch the next addresses while it waits.
 */
#include "decoder.h"
#include "slipstream_ops.h"
#include "threads.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SPINS 4000 /* about 50 us, then yield */
#define SLEEP_NS 50000000 /* the longest sleep before it checks whether a process is lost */

void slipstream_store_release_and_wake(_Atomic uint32_t *at, uint32_t value); /* words.c */
int slipstream_wait_at_least(_Atomic uint32_t *at, uint32_t value, int64_t spin_ns, int64_t timeout_ns);

/* Functions of the OpenMP library that torch uses. */
struct openmp {
    void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags); /* GOMP_parallel */
    int (*thread)(void), (*threads)(void); /* omp_get_thread_num, omp_get_num_threads */
};

struct team {
    int size, stop;
    struct openmp openmp; /* its threads run the tasks if it gives enough of them; else the team has its own */
    atomic_int lacks;     /* OpenMP has given fewer threads than asked */
    pthread_t threads[MAX_THREADS];
    float *scratch[MAX_THREADS];
    size_t scratch_bytes;
    pthread_mutex_t mutex;
    pthread_cond_t posted;
    uint64_t posts; /* counts tasks; guarded by mutex */
    void (*task)(struct team *, int thread);
    const struct decoder *model; /* the arguments of a forward */
    const struct batch *batch;
    const struct linear *linear; /* those of a product on its own */
    const struct sampling *rows; /* those of a choice of tokens */
    struct steps *steps; /* those of several forwards */
    int64_t num_rows, vocab_size, *tokens;
    const struct decoder_isa *isa;
    float *sums; /* [slots][sums_size] attention's sums of ranges of positions */
    atomic_int *ended; /* [slots] how many items of a tile have ended, kept in one of its slots; 0 between layers */
    int64_t sums_size, num_slots, num_sums;
    char *inputs; /* scratch of a product on its own */
    size_t input_bytes;
    int num_stages;
    int more; /* whether another step follows */
    atomic_llong *next; /* [size][num_stages] how many items of a thread's share are taken */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int generation;
    _Alignas(64) atomic_int done;
};

struct seat {
    struct team *team;
    int thread;
};

static void relax(int spins)
{
    if (spins % SPINS == SPINS - 1)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

void team_wait(struct team *team, struct ahead *ahead)
{
    if (team->size == 1)
        return;
    const int generation = atomic_load_explicit(&team->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->generation, memory_order_acquire) == generation; ++spins)
        if (ahead->from < ahead->until) {
            __builtin_prefetch(ahead->from, 0, 2);
            ahead->from += 64;
        } else {
            relax(spins % (1 << 30));
        }
}

int64_t team_next(struct team *team, int stage, int thread, int64_t total)
{
    for (int i = 0; i < team->size; ++i) {
        const int owner = (thread + i) % team->size;
        const int64_t from = total * owner / team->size, share = total * (owner + 1) / team->size - from;
        atomic_llong *next = &team->next[(int64_t)owner * team->num_stages + stage];
        if (atomic_load_explicit(next, memory_order_relaxed) < share) {
            const int64_t taken = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
            if (taken < share)
                return from + taken;
        }
    }
    return total;
}

int team_size(const struct team *team) { return team->size; }

float *team_sums(struct team *team, int64_t slot) { return team->sums + slot * team->sums_size; }

int team_ends(struct team *team, int64_t slot, int64_t items)
{
    if (atomic_fetch_add_explicit(&team->ended[slot], 1, memory_order_acq_rel) < items - 1)
        return 0;
    atomic_store_explicit(&team->ended[slot], 0, memory_order_relaxed);
    return 1;
}

/* Arrivals are released and acquired, so that all of a process's writes before a barrier are visible after it. A process adds itself to
 * the sleepers before it sleeps, and reads that count after it announces its arrival, so no process sleeps through the last arrival. */
void ranks_meet(struct ranks *ranks, struct ahead *ahead)
{
    _Atomic uint32_t *const words = (_Atomic uint32_t *)ranks->arrived, *const sleepers = words + ranks->size * 16;
    const uint32_t meeting = ++ranks->meetings;
    atomic_store(words + ranks->index * 16, meeting);
    if (atomic_load(sleepers))
        slipstream_store_release_and_wake(words + ranks->index * 16, meeting);
    for (int i = 0; i < ranks->size; ++i) {
        _Atomic uint32_t *const word = words + i * 16;
        for (int spins = 0; (int32_t)(atomic_load_explicit(word, memory_order_acquire) - meeting) < 0; ++spins) {
            if (__atomic_load_n(&ranks->lost, __ATOMIC_RELAXED))
                return;
            if (ahead->from < ahead->until) {
                __builtin_prefetch(ahead->from, 0, 2);
                ahead->from += 64;
            } else if (spins < ranks->spins) {
                relax(spins);
            } else {
                atomic_fetch_add(sleepers, 1);
                slipstream_wait_at_least(word, meeting, 0, SLEEP_NS);
                atomic_fetch_sub(sleepers, 1);
            }
        }
    }
}

static void run_forward(struct team *team, int thread) { team->isa->run(team->model, team->batch, team, thread, team->scratch[thread]); }

static void run_linear(struct team *team, int thread) { team->isa->linear(team->linear, team, thread, team->scratch[thread]); }

static void run_choice(struct team *team, int thread)
{
    for (int64_t row; (row = team_next(team, 0, thread, team->num_rows)) < team->num_rows;)
        team->tokens[row] = team->isa->choose(&team->rows[row], team->vocab_size, team->scratch[thread]);
}

/* Begin the next stages of all threads. */
static void reset(struct team *team)
{
    for (int i = 0; i < team->num_stages * team->size; ++i)
        atomic_store_explicit(&team->next[i], 0, memory_order_relaxed);
}

/* Make the drawn tokens the rows of the next step; returns whether there is one. One thread calls it, while the others wait. */
static int advance(struct team *team, struct steps *steps)
{
    const int num = team->batch->num_rows;
    const int64_t *drawn = steps->tokens + (int64_t)steps->done++ * num;
    int more = steps->done < steps->num_steps && !__atomic_load_n(steps->stop, __ATOMIC_RELAXED);
    for (int row = 0; row < num && more; ++row) {
        more = drawn[row] >= 0;
        for (int i = steps->first_end[row]; i < steps->first_end[row + 1]; ++i)
            more &= drawn[row] != steps->ends[i];
    }
    for (int row = 0; row < num && more; ++row) {
        steps->ids[row] = (int32_t)drawn[row];
        ++steps->start[row];
        steps->rows[row].u = steps->u[(int64_t)steps->done * num + row];
    }
    reset(team);
    return more;
}

/* The threads keep running from step to step: waking them costs more than drawing a token. */
static void run_steps(struct team *team, int thread)
{
    struct steps *const steps = team->steps;
    const int64_t num = team->batch->num_rows, vocab_size = team->model->vocab_size;
    struct ahead none = {0, 0};
    do {
        run_forward(team, thread);
        team_wait(team, &none);
        for (int64_t row = thread; row < num; row += team->size)
            steps->tokens[steps->done * num + row] = team->isa->choose(&steps->rows[row], vocab_size, team->scratch[thread]);
        team_wait(team, &none);
        if (thread == 0)
            team->more = advance(team, steps);
        team_wait(team, &none);
    } while (team->more);
}

static void *work(void *argument)
{
    struct seat seat = *(struct seat *)argument;
    struct team *team = seat.team;
    free(argument);
    for (uint64_t seen = 0;;) {
        pthread_mutex_lock(&team->mutex);
        while (team->posts == seen && !team->stop)
            pthread_cond_wait(&team->posted, &team->mutex);
        seen = team->posts;
        const int stop = team->stop;
        pthread_mutex_unlock(&team->mutex);
        if (stop)
            return NULL;
        team->task(team, seat.thread);
        atomic_fetch_add_explicit(&team->done, 1, memory_order_release);
    }
}

SLIPSTREAM_API void slipstream_team_free(struct team *team)
{
    pthread_mutex_lock(&team->mutex);
    team->stop = 1;
    pthread_cond_broadcast(&team->posted);
    pthread_mutex_unlock(&team->mutex);
    for (int i = 1; i < team->size; ++i)
        pthread_join(team->threads[i], NULL);
    for (int i = 0; i < team->size; ++i)
        free(team->scratch[i]);
    free(team->next);
    free(team->sums);
    free(team->ended);
    free(team->inputs);
    pthread_mutex_destroy(&team->mutex);
    pthread_cond_destroy(&team->posted);
    free(team);
}

/* A team of `size` threads, including the caller's; NULL if they cannot be created. */
SLIPSTREAM_API struct team *slipstream_team_new(int size)
{
    struct team *team = size >= 1 && size <= MAX_THREADS ? aligned_alloc(64, (sizeof(struct team) + 63) / 64 * 64) : NULL;
    if (!team)
        return NULL;
    memset(team, 0, sizeof *team);
    team->size = 1;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->posted, NULL);
    for (int i = 1; i < size; ++i) {
        struct seat *seat = malloc(sizeof *seat);
        if (seat)
            *seat = (struct seat){team, i};
        if (!seat || pthread_create(&team->threads[i], NULL, work, seat)) {
            free(seat);
            slipstream_team_free(team);
            return NULL;
        }
        team->size = i + 1;
    }
    return team;
}

/* Run tasks on OpenMP's threads, which wait for torch's next operation: the team's own would compete with them for the cores. */
SLIPSTREAM_API void slipstream_team_join(struct team *team, void (*parallel)(void (*)(void *), void *, unsigned, unsigned),
                                         int (*thread)(void), int (*threads)(void))
{
    team->openmp = (struct openmp){parallel, thread, threads};
}

/* Allocate each thread's scratch memory and the counters of `stages`. */
static int prepare(struct team *team, int64_t scratch_bytes, int stages)
{
    const size_t bytes = (size_t)scratch_bytes;
    if (bytes > team->scratch_bytes) {
        for (int i = 0; i < team->size; ++i) {
            free(team->scratch[i]);
            team->scratch[i] = aligned_alloc(64, (bytes + 63) / 64 * 64);
            if (!team->scratch[i]) {
                team->scratch_bytes = 0;
                return -1;
            }
        }
        team->scratch_bytes = bytes;
    }
    if (stages > team->num_stages) {
        atomic_llong *next = realloc(team->next, (size_t)stages * (size_t)team->size * sizeof *next);
        if (!next)
            return -1;
        team->next = next;
        team->num_stages = stages;
    }
    reset(team);
    return 0;
}

/* Allocate the sums of the ranges that are items, for the layer that has the most. */
static int prepare_sums(struct team *team, const struct decoder *model, const struct batch *batch)
{
    int64_t slots = 0;
    for (int i = batch->first_layer; i < batch->until_layer; ++i) {
        const struct layer *layer = &model->layers[i];
        if (i > batch->first_layer && layer->window == layer[-1].window)
            continue;
        const int64_t most = most_together(model, layer, batch, team->size);
        int64_t needed = 0;
        for (int sequence = 0; sequence < batch->num_sequences; ++sequence)
            if (ranges_of(layer, batch, sequence) > most)
                needed += items_of(model, layer, batch, sequence, most);
        slots = needed > slots ? needed : slots;
    }
    team->sums_size = ROWS * SUMS(model->head_dim);
    if (slots * team->sums_size > team->num_sums) {
        free(team->sums);
        team->sums = aligned_alloc(64, (size_t)(slots * team->sums_size) * sizeof(float));
        team->num_sums = team->sums ? slots * team->sums_size : 0;
        if (!team->sums)
            return -1;
    }
    if (slots > team->num_slots) {
        free(team->ended);
        team->ended = calloc((size_t)slots, sizeof *team->ended);
        team->num_slots = team->ended ? slots : 0;
        if (!team->ended)
            return -1;
    }
    return 0;
}

/* Bytes of scratch memory. For products, a block of panels in fp32 and the sums of a part's rows; attention needs less: a tile of
 * queries and its sums, 18 numbers for each feature of a head and 384 more. */
static int64_t scratch_to_multiply(int64_t head_dim)
{
    return (head_dim > DEPTH + PART_ROWS ? head_dim : DEPTH + PART_ROWS) * 4 * PANEL * (int64_t)sizeof(float);
}

static const struct decoder_isa *isa_in_use(void)
{
    return (const struct decoder_isa *const[]){
        &decoder_portable, &decoder_avx2, &decoder_avx512, &decoder_avx512vnni, &decoder_avx512bf16}[slipstream_set()];
}

static void run_in_region(void *argument)
{
    struct team *team = argument;
    if (team->openmp.threads() == team->size)
        team->task(team, team->openmp.thread());
    else
        atomic_store_explicit(&team->lacks, 1, memory_order_relaxed);
}

/* Run a task on all threads, and wait for it. */
static void run_all(struct team *team, void (*task)(struct team *, int thread))
{
    pthread_mutex_lock(&team->mutex);
    team->task = task;
    team->isa = isa_in_use();
    if (team->openmp.parallel && team->size > 1) {
        pthread_mutex_unlock(&team->mutex);
        atomic_store_explicit(&team->lacks, 0, memory_order_relaxed);
        team->openmp.parallel(run_in_region, team, (unsigned)team->size, 0);
        if (!atomic_load_explicit(&team->lacks, memory_order_relaxed))
            return;
        pthread_mutex_lock(&team->mutex);
    }
    atomic_store_explicit(&team->done, 1, memory_order_relaxed);
    ++team->posts;
    pthread_cond_broadcast(&team->posted);
    pthread_mutex_unlock(&team->mutex);
    task(team, 0);
    for (int spins = 0; atomic_load_explicit(&team->done, memory_order_acquire) < team->size; ++spins)
        relax(spins % (1 << 30));
}

/* Run one forward; returns -1 if memory is short, -2 if another process is lost. One call at a time per team. */
SLIPSTREAM_API int slipstream_decoder_forward(struct team *team, const struct decoder *model, const struct batch *batch)
{
    if (prepare(team, scratch_to_multiply(model->head_dim), model->num_layers * 10 + 3) || prepare_sums(team, model, batch))
        return -1;
    team->model = model;
    team->batch = batch;
    run_all(team, run_forward);
    return model->ranks && __atomic_load_n(&model->ranks->lost, __ATOMIC_RELAXED) ? -2 : 0;
}

/* Run up to steps->num_steps forwards of all layers, in one process, and draw their tokens; steps->done is the number of forwards.
 * Returns -1 if memory is short. One call at a time per team. */
SLIPSTREAM_API int slipstream_decoder_steps(struct team *team, const struct decoder *model, const struct batch *batch, struct steps *steps)
{
    const int64_t forward = scratch_to_multiply(model->head_dim), choice = scratch_to_choose(model->vocab_size);
    if (prepare(team, forward > choice ? forward : choice, model->num_layers * 10 + 3))
        return -1;
    for (int row = 0; row < batch->num_rows; ++row) {
        steps->start[row] += steps->num_steps - 1; /* the last step has the most ranges, but not always the most items */
        steps->rows[row].logits = batch->logits + row * model->vocab_size;
    }
    for (int step = 0; step < steps->num_steps; ++step) {
        if (prepare_sums(team, model, batch))
            return -1;
        for (int row = 0; row < batch->num_rows && step < steps->num_steps - 1; ++row)
            --steps->start[row];
    }
    steps->done = 0;
    team->model = model;
    team->batch = batch;
    team->steps = steps;
    run_all(team, run_steps);
    return 0;
}

/* y = x W^T + bias: x fp32 [num_rows][num_features], y fp32 [num_rows][columns of w]; `bias` as in struct matrix. Returns -1 if memory
 * is short. One call at a time per team. */
SLIPSTREAM_API int slipstream_linear(struct team *team, const struct matrix *w, const float *bias, const float *x, float *y,
                                     int64_t num_rows, int64_t num_features)
{
    struct matrix biased = *w;
    const int64_t rows = num_rows < LINEAR_ROWS ? num_rows : LINEAR_ROWS, groups = (num_features + CODES - 1) / CODES;
    const size_t numbers = (size_t)(rows * groups * CODES), scales = (size_t)(rows * groups);
    const size_t bytes = numbers * 3 + scales * 16;
    if (num_rows == 0)
        return 0;
    if (bytes > team->input_bytes) {
        free(team->inputs);
        team->inputs = aligned_alloc(64, (bytes + 63) / 64 * 64);
        team->input_bytes = team->inputs ? bytes : 0;
    }
    if (!team->inputs || prepare(team, scratch_to_multiply(0), (int)((num_rows + LINEAR_ROWS - 1) / LINEAR_ROWS)))
        return -1;
    char *const in = team->inputs; /* each group takes a multiple of 32 bytes in each part, so all parts are aligned */
    biased.bias = bias;
    const struct linear of = {&biased, x, y, num_rows, num_features,
                              {.inputs = {.codes = (int8_t *)in, .halves = (uint16_t *)(in + numbers),
                                          .scales = (float *)(in + numbers * 3), .starts = (int32_t *)(in + numbers * 3 + scales * 8)}}};
    team->linear = &of;
    run_all(team, run_linear);
    return 0;
}

/* Sample a token from each row; -1: its logits allow none. Returns -1 if memory is short. One call at a time per team. */
SLIPSTREAM_API int slipstream_choose(struct team *team, const struct sampling *rows, int64_t num_rows, int64_t vocab_size, int64_t *tokens)
{
    if (prepare(team, scratch_to_choose(vocab_size), 1))
        return -1;
    team->rows = rows;
    team->num_rows = num_rows;
    team->vocab_size = vocab_size;
    team->tokens = tokens;
    if (num_rows > 1)
        run_all(team, run_choice);
    else /* not worth waking the others */
        for (int64_t row = 0; row < num_rows; ++row)
            tokens[row] = isa_in_use()->choose(&rows[row], vocab_size, team->scratch[0]);
    return 0;
}

/* The nibbles of 8 features, first feature lowest -> 4 bytes, the first four features in the low halves. */
static uint32_t halves_apart(uint32_t eight)
{
    uint32_t first = eight & 0xffff, second = eight >> 16;
    first = (first | first << 8) & 0x00ff00ff, second = (second | second << 8) & 0x00ff00ff;
    return ((first | first << 4) & 0x0f0f0f0f) | ((second | second << 4) & 0x0f0f0f0f) << 4;
}

#define PACK(word_type, CHANGE)                                                                                         \
    for (int64_t k = 0; k < num_words; ++k)                                                                             \
        for (int lane = 0; lane < PANEL; ++lane) {                                                                      \
            const int64_t left = lane < lanes ? row_bytes - k * size : 0;                                               \
            word_type word = 0;                                                                                         \
            if (left >= size)                                                                                           \
                memcpy(&word, row + lane * row_bytes + k * size, sizeof word);                                          \
            else if (left > 0)                                                                                          \
                memcpy(&word, row + lane * row_bytes + k * size, (size_t)left);                                         \
            memcpy(to + (k * PANEL + lane) * size, &(word_type){CHANGE(word)}, sizeof word);                            \
        }
#define AS_IT_IS(word) word

/* Rows of a matrix [columns][row_bytes] -> panels [word][PANEL], each `stride` bytes after the other, in words of `size`
 * bytes (1, 2 or 4; with `nibbles`, 4 bytes are 8 features). Missing columns, and words after a row's end, are zeros. */
SLIPSTREAM_API void slipstream_pack(const char *rows, int64_t columns, int64_t row_bytes, char *panels, int64_t num_panels,
                                    int64_t num_words, int64_t stride, int size, int nibbles)
{
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const char *row = rows + panel * PANEL * row_bytes;
        char *to = panels + panel * stride;
        const int64_t lanes = columns - panel * PANEL;
        if (nibbles)
            PACK(uint32_t, halves_apart)
        else if (size == 4)
            PACK(uint32_t, AS_IT_IS)
        else if (size == 2)
            PACK(uint16_t, AS_IT_IS)
        else
            PACK(uint8_t, AS_IT_IS)
    }
}
