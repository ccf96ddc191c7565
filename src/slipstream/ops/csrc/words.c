/* Atomic words in shared memory, and futex waits on them.
 *
 * A word is a naturally aligned uint32 in a shared mapping. Stores have release semantics. Values are compared by signed
 * difference, so that counters may wrap. The futex is not FUTEX_PRIVATE_FLAG, because waiter and waker are different processes.
 */
#define _GNU_SOURCE
#include "slipstream_ops.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef _Atomic uint32_t word;

/* The longest sleep inside one call, in nanoseconds: Python then handles signals and calls again. It also bounds the delay if the
 * writer has no futex (the fallback in ops/words.py). */
#define SLICE_NS 50000000

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int reached(const word *at, uint32_t value)
{
    return (int32_t)(atomic_load_explicit((word *)at, memory_order_acquire) - value) >= 0;
}

/* Returns 0 if a signal interrupted the sleep. */
static int sleep_while_equal(word *at, uint32_t seen, int64_t ns)
{
    struct timespec limit = {ns / 1000000000, ns % 1000000000};
#if defined(__linux__)
    return !(syscall(SYS_futex, at, FUTEX_WAIT, seen, &limit, NULL, 0) == -1 && errno == EINTR);
#else
    const struct timespec nap = {0, ns < 50000 ? ns : 50000};
    (void)at, (void)seen, (void)limit;
    return nanosleep(&nap, NULL) == 0;
#endif
}

static void wake_all(word *at)
{
#if defined(__linux__)
    syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)at;
#endif
}

SLIPSTREAM_API void slipstream_store_release_and_wake(word *at, uint32_t value)
{
    atomic_store_explicit(at, value, memory_order_release);
    wake_all(at);
}

SLIPSTREAM_API uint32_t slipstream_load_acquire(word *at) { return atomic_load_explicit(at, memory_order_acquire); }

SLIPSTREAM_API uint32_t slipstream_add(word *at, uint32_t delta)
{
    uint32_t old = atomic_fetch_add_explicit(at, delta, memory_order_acq_rel);
    wake_all(at);
    return old;
}

SLIPSTREAM_API void slipstream_store64(_Atomic uint64_t *at, uint64_t value)
{
    atomic_store_explicit(at, value, memory_order_release);
}

SLIPSTREAM_API uint64_t slipstream_load64(_Atomic uint64_t *at)
{
    return atomic_load_explicit(at, memory_order_acquire);
}

/* Wait until (int32)(*at - value) >= 0: spin for spin_ns, then sleep, for at most timeout_ns and at most SLICE_NS in total.
 * Returns 1 if the value is reached, else 0. */
SLIPSTREAM_API int slipstream_wait_at_least(word *at, uint32_t value, int64_t spin_ns, int64_t timeout_ns)
{
    if (reached(at, value))
        return 1;
    const int64_t start = now_ns();
    const int64_t budget = timeout_ns < SLICE_NS ? timeout_ns : SLICE_NS;
    const int64_t spin = spin_ns < budget ? spin_ns : budget;
    while (now_ns() - start < spin)
        for (int i = 0; i < 32; ++i) {
            if (reached(at, value))
                return 1;
            PAUSE();
        }
    for (;;) {
        uint32_t seen = atomic_load_explicit(at, memory_order_acquire);
        if ((int32_t)(seen - value) >= 0)
            return 1;
        int64_t left = budget - (now_ns() - start);
        if (left <= 0)
            return 0;
        if (!sleep_while_equal(at, seen, left))
            return reached(at, value);
    }
}
