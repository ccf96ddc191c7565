/* Batches of reads and writes of one file through an io_uring, by raw system calls (io_uring_setup(2) and related).
 *
 * One dedicated thread per disk owns the ring, because the kernel runs a request's completion on the thread that submitted it,
 * interrupting that thread, and cancels the requests of a thread that ends. Callers append a batch to the queue of its direction
 * and write to an eventfd, which the ring polls, so that the thread sleeps in one place for both completions and new batches. It
 * cuts batches into blocks, keeps up to `depth` of them in flight in each direction, resubmits the remainder of a short transfer,
 * and stores batch->done when no block of the batch is in flight any more.
 *
 * A batch and its parts belong to the caller (ops/disk.py keeps them and the memory alive until `done`), so that nothing is
 * allocated here per batch and no error path frees anything. After a failed block no further block of its batch starts; other
 * batches continue.
 */
#define _GNU_SOURCE
#include "slipstream_ops.h"

#include <errno.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif
#endif

struct disk_part {
    char *memory;
    int64_t offset; /* in the file */
    int64_t nbytes;
};

struct disk_batch {
    uint32_t done; /* a word for slipstream_wait_at_least */
    int32_t error; /* of the first block that failed: an errno, or SHORT; 0 if none did */
    int64_t offset, asked, moved; /* that block's offset, its size, and how much of it was transferred */
    const struct disk_part *parts;
    int64_t num_parts;
    int32_t write;
    /* the thread's own fields follow */
    int32_t taken; /* all blocks of the batch have left the queue */
    int64_t part, part_taken; /* the next block starts at byte part_taken of this part */
    int64_t in_flight;
    struct disk_batch *next;
};

struct disk;

#define SHORT (-1)

#if defined(IORING_FEAT_RW_CUR_POS) && defined(SYS_io_uring_setup) /* headers of Linux 5.6, which have IORING_OP_READ */

#include "threads.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WAKE UINT64_MAX /* user_data of the eventfd's poll; that of a block is its slot number */

void slipstream_store_release_and_wake(uint32_t *at, uint32_t value); /* words.c */

/* A block in flight. */
struct slot {
    struct disk_batch *batch; /* NULL: free */
    char *memory;
    int64_t offset, asked, moved;
};

struct disk {
    pthread_mutex_t lock; /* guards first, last and closing */
    struct disk_batch *first[2], *last[2]; /* queues: [0] of reads, [1] of writes */
    int closing;

    pthread_t thread;
    int file, ring, wake, depth, broken;
    int64_t block, in_flight[2];
    struct slot *slots; /* 2 * depth */

    char *rings; /* one mapping of the submission and the completion queue */
    size_t rings_nbytes, entries_nbytes;
    struct io_uring_sqe *entries;
    unsigned *sq_tail, *sq_array, sq_mask, unsubmitted;
    unsigned *cq_head, *cq_tail, cq_mask;
    struct io_uring_cqe *completions;
};

/* The submission queue cannot overflow: it has one entry per slot and one for the poll. */
static void push(struct disk *d, const struct io_uring_sqe *entry)
{
    unsigned tail = *d->sq_tail, index = tail & d->sq_mask;
    d->entries[index] = *entry;
    d->sq_array[index] = index;
    __atomic_store_n(d->sq_tail, tail + 1, __ATOMIC_RELEASE);
    d->unsubmitted++;
}

static void poll_wake(struct disk *d)
{
    struct io_uring_sqe entry = {.opcode = IORING_OP_POLL_ADD, .fd = d->wake, .poll_events = POLLIN, .user_data = WAKE};
    push(d, &entry);
}

/* Submit the remainder of the slot's block. */
static void send_slot(struct disk *d, const struct slot *s)
{
    struct io_uring_sqe entry = {.opcode = s->batch->write ? IORING_OP_WRITE : IORING_OP_READ,
                                 .fd = d->file,
                                 .addr = (uintptr_t)(s->memory + s->moved),
                                 .len = (uint32_t)(s->asked - s->moved),
                                 .off = (uint64_t)(s->offset + s->moved),
                                 .user_data = (uint64_t)(s - d->slots)};
    push(d, &entry);
}

static void fail(struct disk_batch *b, const struct slot *s, int error)
{
    if (!b->error) {
        b->offset = s->offset, b->asked = s->asked, b->moved = s->moved;
        b->error = error;
    }
}

/* Cut the next block of this direction into `s`; returns 0 if there is none. Batches without further blocks leave the queue. */
static int take_block(struct disk *d, int write, struct slot *s)
{
    struct disk_batch *b;
    while ((b = d->first[write])) {
        if (d->broken && !b->error)
            b->error = d->broken;
        if (b->part < b->num_parts && !b->error) {
            const struct disk_part *p = &b->parts[b->part];
            int64_t left = p->nbytes - b->part_taken;
            *s = (struct slot){b, p->memory + b->part_taken, p->offset + b->part_taken, left < d->block ? left : d->block, 0};
            b->part_taken += s->asked;
            if (b->part_taken == p->nbytes)
                b->part++, b->part_taken = 0;
            b->in_flight++;
            return 1;
        }
        d->first[write] = b->next;
        b->taken = 1;
        if (!b->in_flight)
            slipstream_store_release_and_wake(&b->done, 1); /* from here on the caller owns b: do not touch it */
    }
    return 0;
}

static void start_blocks(struct disk *d)
{
    pthread_mutex_lock(&d->lock);
    for (int write = 0; write < 2; write++) {
        struct slot *s = d->slots + write * d->depth;
        for (; d->in_flight[write] < d->depth; d->in_flight[write]++) {
            while (s->batch) /* a free slot follows, because in_flight < depth */
                s++;
            if (!take_block(d, write, s))
                break;
            send_slot(d, s);
        }
    }
    pthread_mutex_unlock(&d->lock);
}

static void end_slot(struct disk *d, struct slot *s)
{
    struct disk_batch *b = s->batch;
    s->batch = NULL;
    d->in_flight[b->write]--;
    if (--b->in_flight == 0 && b->taken)
        slipstream_store_release_and_wake(&b->done, 1);
}

static void complete(struct disk *d, uint64_t user_data, int result)
{
    uint64_t count;
    if (user_data == WAKE) {
        if (read(d->wake, &count, sizeof count) == sizeof count || errno == EINTR)
            poll_wake(d);
        return;
    }
    struct slot *s = &d->slots[user_data];
    if (result > 0)
        s->moved += result;
    else if (result != -EINTR && result != -EAGAIN)
        fail(s->batch, s, result == 0 ? SHORT : -result);
    if (s->moved < s->asked && !s->batch->error)
        send_slot(d, s);
    else
        end_slot(d, s);
}

/* The ring is unusable (its descriptor was closed): every current and later batch fails with this errno. */
static void break_down(struct disk *d, int error)
{
    d->broken = error;
    for (struct slot *s = d->slots; s < d->slots + 2 * d->depth; s++)
        if (s->batch) {
            fail(s->batch, s, error);
            end_slot(d, s);
        }
}

static void *run(void *argument)
{
    struct disk *d = argument;
    uint64_t count;
    poll_wake(d);
    for (;;) {
        start_blocks(d);
        pthread_mutex_lock(&d->lock);
        int leave = d->closing && !d->first[0] && !d->first[1] && !d->in_flight[0] && !d->in_flight[1];
        pthread_mutex_unlock(&d->lock);
        if (leave)
            return NULL;
        if (d->broken) {
            if (read(d->wake, &count, sizeof count) < 0)
                nanosleep(&(struct timespec){0, 1000000}, NULL);
            continue;
        }
        long sent = syscall(SYS_io_uring_enter, d->ring, d->unsubmitted, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (sent >= 0)
            d->unsubmitted -= (unsigned)sent;
        else if (errno == EAGAIN || errno == EBUSY || errno == ENOMEM) /* the kernel is temporarily short of memory */
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        else if (errno != EINTR)
            break_down(d, errno);
        unsigned head = *d->cq_head;
        for (; head != __atomic_load_n(d->cq_tail, __ATOMIC_ACQUIRE) && !d->broken; head++) {
            const struct io_uring_cqe *c = &d->completions[head & d->cq_mask];
            complete(d, c->user_data, c->res);
            __atomic_store_n(d->cq_head, head + 1, __ATOMIC_RELEASE);
        }
    }
}

static void release(struct disk *d)
{
    if (d->rings)
        munmap(d->rings, d->rings_nbytes);
    if (d->entries)
        munmap(d->entries, d->entries_nbytes);
    if (d->ring >= 0)
        close(d->ring);
    if (d->wake >= 0)
        close(d->wake);
    pthread_mutex_destroy(&d->lock);
    free(d->slots);
    free(d);
}

static void *map(int ring, size_t nbytes, int64_t what)
{
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    return at == MAP_FAILED ? NULL : at;
}

/* Returns 0 or an errno. */
static int set_up(struct disk *d)
{
    struct io_uring_params p = {0};
    d->slots = calloc(2 * (size_t)d->depth, sizeof *d->slots);
    d->wake = eventfd(0, EFD_CLOEXEC);
    d->ring = (int)syscall(SYS_io_uring_setup, 2 * d->depth + 1, &p);
    if (!d->slots)
        return ENOMEM;
    if (d->wake < 0 || d->ring < 0)
        return errno;
    if (!(p.features & IORING_FEAT_RW_CUR_POS)) /* before Linux 5.6 */
        return ENOSYS;
    size_t of_sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    size_t of_cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    d->rings_nbytes = of_sq > of_cq ? of_sq : of_cq;
    d->entries_nbytes = p.sq_entries * sizeof(struct io_uring_sqe);
    d->rings = map(d->ring, d->rings_nbytes, IORING_OFF_SQ_RING);
    d->entries = map(d->ring, d->entries_nbytes, IORING_OFF_SQES);
    if (!d->rings || !d->entries)
        return errno;
    d->sq_tail = (unsigned *)(d->rings + p.sq_off.tail);
    d->sq_array = (unsigned *)(d->rings + p.sq_off.array);
    d->sq_mask = *(unsigned *)(d->rings + p.sq_off.ring_mask);
    d->cq_head = (unsigned *)(d->rings + p.cq_off.head);
    d->cq_tail = (unsigned *)(d->rings + p.cq_off.tail);
    d->cq_mask = *(unsigned *)(d->rings + p.cq_off.ring_mask);
    d->completions = (struct io_uring_cqe *)(d->rings + p.cq_off.cqes);

    sigset_t all, before; /* block all signals in the new thread: Python's threads handle them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&d->thread, NULL, run, d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Open a ring for `file`, which the caller keeps. Returns NULL, and the errno in *error, if io_uring is refused. */
SLIPSTREAM_API struct disk *slipstream_disk_open(int file, int64_t block, int depth, int *error)
{
    struct disk *d = calloc(1, sizeof *d);
    if (!d) {
        *error = ENOMEM;
        return NULL;
    }
    d->file = file, d->block = block, d->depth = depth, d->ring = d->wake = -1;
    pthread_mutex_init(&d->lock, NULL);
    if ((*error = set_up(d))) {
        release(d);
        return NULL;
    }
    return d;
}

static void wake(struct disk *d)
{
    uint64_t one = 1;
    while (write(d->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

SLIPSTREAM_API void slipstream_disk_submit(struct disk *d, struct disk_batch *b)
{
    int write = b->write;
    pthread_mutex_lock(&d->lock);
    if (d->first[write])
        d->last[write]->next = b;
    else
        d->first[write] = b;
    d->last[write] = b;
    pthread_mutex_unlock(&d->lock);
    wake(d);
}

/* Waits for all submitted batches. */
SLIPSTREAM_API void slipstream_disk_close(struct disk *d)
{
    pthread_mutex_lock(&d->lock);
    d->closing = 1;
    pthread_mutex_unlock(&d->lock);
    wake(d);
    pthread_join(d->thread, NULL);
    release(d);
}

#else /* ops/disk.py then uses its threads and calls nothing else */

SLIPSTREAM_API struct disk *slipstream_disk_open(int file, int64_t block, int depth, int *error)
{
    (void)file, (void)block, (void)depth;
    *error = ENOSYS;
    return NULL;
}

#endif
