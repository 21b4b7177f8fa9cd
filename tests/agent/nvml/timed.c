/* How much of a process's CPU time is the stand-in's own: the time in its exported functions, waits left out.
 *
 * Linked in by `build(..., timed=True)`, which has gcc call these two functions around each exported one. The sum, in
 * nanoseconds, stands in the file named by STANDIN_NVML_TIME (8 bytes, made by who wants to read it), so that another
 * process can look at it; without such a file, nowhere.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PLAIN __attribute__((no_instrument_function))
#define HOOK PLAIN __attribute__((visibility("hidden"))) /* libc has hooks of these names, which do nothing */

static uint64_t nowhere, *total_ns = &nowhere;
static __thread int depth; /* exported functions call each other */
static __thread uint64_t began_ns;

PLAIN __attribute__((constructor)) static void share_total(void) {
    const char *path = getenv("STANDIN_NVML_TIME");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *total_ns, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) total_ns = mapped;
    close(file);
}

PLAIN static uint64_t thread_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

HOOK void __cyg_profile_func_enter(void *function, void *caller) {
    (void)function, (void)caller;
    if (depth++ == 0) began_ns = thread_ns();
}

HOOK void __cyg_profile_func_exit(void *function, void *caller) {
    (void)function, (void)caller;
    if (--depth == 0) __atomic_fetch_add(total_ns, thread_ns() - began_ns, __ATOMIC_RELAXED);
}
