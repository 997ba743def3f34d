/* os_posix.c - os.h for Linux and macOS. */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity, MAP_ANONYMOUS */
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE /* sysctlbyname, MAP_ANONYMOUS */
#endif
#include "os.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <mach/mach.h>
#include <sys/sysctl.h>
#endif

bool kvant_os_open(const char *path, int *file)
{
    *file = open(path, O_RDONLY | O_CLOEXEC);
    return *file >= 0;
}

bool kvant_os_create(const char *path, int *file)
{
    *file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return *file >= 0;
}

bool kvant_os_close(int file)
{
    return close(file) == 0;
}

bool kvant_os_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

bool kvant_os_remove(const char *path)
{
    return unlink(path) == 0;
}

bool kvant_os_is_special(const char *path)
{
    struct stat state;
    return stat(path, &state) == 0 && !S_ISREG(state.st_mode) && !S_ISDIR(state.st_mode);
}

bool kvant_os_size(int file, uint64_t *bytes)
{
    struct stat state;
    if (fstat(file, &state) != 0)
        return false;
    if (!S_ISREG(state.st_mode)) {
        errno = EINVAL;
        return false;
    }
    *bytes = (uint64_t)state.st_size;
    return true;
}

#define HERE UINT64_MAX /* in place of an offset: the file's own position */

/* Calls move(), which is like pread() or pwrite(), until n bytes are done. */
static bool move_all(ssize_t (*move)(int, uint8_t *, size_t, uint64_t), int file, void *bytes,
                     size_t n, uint64_t at)
{
    for (uint8_t *next = bytes; n > 0;) {
        const ssize_t done = move(file, next, n, at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0) {
            errno = done == 0 ? EIO : errno;
            return false;
        }
        next += done;
        n -= (size_t)done;
        at += at != HERE ? (uint64_t)done : 0;
    }
    return true;
}

static ssize_t read_some(int file, uint8_t *bytes, size_t n, uint64_t at)
{
    return at == HERE ? read(file, bytes, n) : pread(file, bytes, n, (off_t)at);
}

static ssize_t write_some(int file, uint8_t *bytes, size_t n, uint64_t at)
{
    return at == HERE ? write(file, bytes, n) : pwrite(file, bytes, n, (off_t)at);
}

bool kvant_os_read(int file, void *bytes, size_t n)
{
    return move_all(read_some, file, bytes, n, HERE);
}

bool kvant_os_read_at(int file, void *bytes, size_t n, uint64_t at)
{
    return move_all(read_some, file, bytes, n, at);
}

bool kvant_os_write(int file, const void *bytes, size_t n)
{
    return move_all(write_some, file, (void *)(uintptr_t)bytes, n, HERE);
}

bool kvant_os_write_at(int file, const void *bytes, size_t n, uint64_t at)
{
    return move_all(write_some, file, (void *)(uintptr_t)bytes, n, at);
}

bool kvant_os_flush(int file)
{
    return fsync(file) == 0;
}

bool kvant_os_replace(const char *from, const char *to)
{
    return rename(from, to) == 0;
}

/* Whether the open file is the one of this name. Another process may have given its file the place
 * in between. */
static bool is_named(int file, const char *name)
{
    struct stat here, there;
    return fstat(file, &here) == 0 && stat(name, &there) == 0 && here.st_dev == there.st_dev &&
           here.st_ino == there.st_ino;
}

bool kvant_os_begin(const char *path, char *name, size_t n, int *file)
{
    const int length = snprintf(name, n, "%s" KVANT_OS_PART, path);
    errno = ENAMETOOLONG;
    if (length < 0 || (size_t)length >= n)
        return false;
    *file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (*file < 0)
        return false;
    /* it is emptied once it is locked, because another process may be writing it */
    if (flock(*file, LOCK_EX | LOCK_NB) == 0 && is_named(*file, name) && ftruncate(*file, 0) == 0)
        return true;
    close(*file);
    errno = EBUSY;
    return false;
}

bool kvant_os_finish(int file, const char *path, const char *name, bool keep)
{
    const bool done = keep && rename(name, path) == 0;
    const int error = errno;
    if (!done)
        unlink(name);
    close(file); /* gives the lock back, so it comes last */
    errno = error;
    return done;
}

const char *kvant_os_file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool kvant_os_is_absolute(const char *path)
{
    return path[0] == '/';
}

const char *kvant_os_variable(const char *name)
{
    return getenv(name);
}

uint64_t kvant_os_process(void)
{
    return (uint64_t)getpid();
}

const void *kvant_os_map_file(int file, size_t n)
{
    void *memory = mmap(NULL, n, PROT_READ, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Pages of smaller memory are made at once, because a page fault for each takes longer. Callers use
 * all of such memory. Larger memory may stay unused in part. */
#define MOST_PREPARED ((size_t)4 << 20)

#if defined(MAP_POPULATE)
#define PREPARED MAP_POPULATE
#else
#define PREPARED 0 /* other systems than Linux make pages one by one */
#endif

void *kvant_os_map_memory(size_t n)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (n <= MOST_PREPARED ? PREPARED : 0);
    void *memory = mmap(NULL, n, PROT_READ | PROT_WRITE, flags, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void kvant_os_unmap(const void *memory, size_t n)
{
    munmap((void *)(uintptr_t)memory, n);
}

#if defined(__APPLE__)
void kvant_os_memory(size_t *available, size_t *total)
{
    vm_statistics64_data_t pages;
    mach_msg_type_number_t n = HOST_VM_INFO64_COUNT;
    uint64_t bytes = 0;
    size_t room = sizeof bytes;
    const bool known =
        host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&pages, &n) == 0;
    *total = sysctlbyname("hw.memsize", &bytes, &room, NULL, 0) == 0 ? (size_t)bytes : 0;
    *available =
        known ? ((size_t)pages.free_count + pages.inactive_count) * (size_t)sysconf(_SC_PAGESIZE)
              : 0;
}
#else
void kvant_os_memory(size_t *available, size_t *total)
{
    FILE *file = fopen("/proc/meminfo", "re");
    size_t kib[2] = { 0, 0 };
    char line[128];
    while (file && fgets(line, sizeof line, file))
        (void)(sscanf(line, "MemAvailable: %zu", &kib[0]) ||
               sscanf(line, "MemTotal: %zu", &kib[1]));
    if (file)
        fclose(file);
    *available = kib[0] * 1024;
    *total = kib[1] * 1024;
}
#endif

void *kvant_os_alloc(size_t alignment, size_t n)
{
    return aligned_alloc(alignment, n);
}

void kvant_os_free(void *memory)
{
    free(memory);
}

void *kvant_os_open_library(const char *file)
{
    return dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

void *kvant_os_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}

void kvant_os_close_library(void *library)
{
    dlclose(library);
}

const char *kvant_os_library_error(void)
{
    const char *reason = dlerror();
    return reason ? reason : "unknown reason";
}

/* The mask has 8192 bits, because the kernel refuses a mask with fewer bits than CPUs. */
uint32_t kvant_os_processors(void)
{
#if defined(__linux__)
    cpu_set_t sets[8192 / CPU_SETSIZE];
    if (sched_getaffinity(0, sizeof sets, sets) == 0)
        return (uint32_t)CPU_COUNT_S(sizeof sets, sets);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

bool kvant_os_has_arm_dot_product(void)
{
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
#else
    return false;
#endif
}

/* A thread starts with the signal mask of the thread that creates it. A program's handlers may need
 * more stack than the library's threads have, or locks that the creator holds. So these threads
 * block signals. Signals of faults are not blocked: they go to the thread with the fault, and
 * debuggers and sanitisers need them. */
static void block_signals(sigset_t *former)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, former);
}

bool kvant_os_start_thread(pthread_t *thread, void *(*body)(void *), void *argument, size_t stack)
{
    pthread_attr_t attributes;
    pthread_t detached;
    sigset_t former;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    if (stack > 0)
        pthread_attr_setstacksize(&attributes, stack);
    if (!thread)
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    block_signals(&former);
    int reason = pthread_create(thread ? thread : &detached, &attributes, body, argument);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    pthread_attr_destroy(&attributes);
    errno = reason;
    return reason == 0;
}

void kvant_os_yield(void)
{
    sched_yield();
}

void kvant_os_after_fork(void (*in_child)(void))
{
    pthread_atfork(NULL, NULL, in_child);
}
