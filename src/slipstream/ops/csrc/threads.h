/* pthread.h, with the oldest versions of its functions. They moved into libc with glibc 2.34 and have new version names there:
 * a library that was built on a new host would not load on an older one, although nothing that is used here has changed.
 */
#ifndef SLIPSTREAM_THREADS_H
#define SLIPSTREAM_THREADS_H

#include <pthread.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
#ifdef OLDEST
OLDEST(pthread_create);
OLDEST(pthread_join);
OLDEST(pthread_sigmask);
#endif

#endif
