/* host_linux.c - host.h for Linux. */
#define _GNU_SOURCE /* dladdr1, RTLD_DL_LINKMAP, MAP_ANONYMOUS, mincore, madvise, SOCK_CLOEXEC */

#include "host.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define LOW_PRIORITY 10 /* a nice value, so that the program's own threads go first */

void *kvp_host_library_of(const void *code)
{
    Dl_info info;
    void *found = NULL;
    const struct link_map *map;

    if (!dladdr1(code, &info, &found, RTLD_DL_LINKMAP) || found == NULL)
        return NULL;
    map = found;
    /* The main program has no name in the link map, and dlopen opens it as NULL. */
    return dlopen(map->l_name[0] ? map->l_name : NULL, RTLD_LAZY | RTLD_NOLOAD);
}

void *kvp_host_open_library(const char *file)
{
    return dlopen(file, RTLD_NOW);
}

void kvp_host_close_library(void *library)
{
    dlclose(library);
}

void *kvp_host_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}

void *kvp_host_reserve(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory != MAP_FAILED ? memory : NULL;
}

void kvp_host_release(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

void kvp_host_refuse_huge_pages(void *memory, size_t bytes)
{
    madvise(memory, bytes, MADV_NOHUGEPAGE);
}

/* Zeroes memory. Whole pages are dropped if the system allows each advice of the list for them.
 * Linux zeroes the pages that MADV_DONTNEED drops. */
static void clear(void *at, size_t bytes, const int *advice, int n)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = (uintptr_t)at, last = first + bytes;
    const uintptr_t inner_first = (first + page - 1) / page * page, inner_last = last / page * page;
    bool dropped = inner_first < inner_last;

    for (int i = 0; i < n && dropped; i++)
        dropped = madvise((void *)inner_first, inner_last - inner_first, advice[i]) == 0;
    if (!dropped) {
        memset(at, 0, bytes);
        return;
    }
    memset((void *)first, 0, inner_first - first);
    memset((void *)inner_last, 0, last - inner_last);
}

void kvp_host_clear(void *at, size_t bytes)
{
    clear(at, bytes, (const int[]){ MADV_DONTNEED }, 1);
}

/* Linux allows MADV_FREE only for private memory without a file behind it. */
void kvp_host_clear_foreign(void *at, size_t bytes)
{
    clear(at, bytes, (const int[]){ MADV_FREE, MADV_DONTNEED }, 2);
}

size_t kvp_host_resident(const void *memory, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), resident = 0;
    char *base = (char *)(uintptr_t)memory;
    unsigned char state[4096];

    for (size_t at = 0; at < bytes; at += sizeof(state) * page) {
        size_t n = bytes - at < sizeof(state) * page ? bytes - at : sizeof(state) * page;
        size_t n_pages = (n + page - 1) / page;
        if (mincore(base + at, n, state) != 0)
            return resident;
        for (size_t i = 0; i < n_pages; i++)
            resident += (state[i] & 1u) * page;
    }
    return resident;
}

/* One field of /proc/meminfo in bytes; 0 when it cannot be read. */
static size_t meminfo(const char *format)
{
    FILE *file = fopen("/proc/meminfo", "r");
    unsigned long long kib = 0;
    char line[128];

    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, format, &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return (size_t)kib * 1024;
}

void kvp_host_memory(size_t *available, size_t *total)
{
    *available = meminfo("MemAvailable: %llu");
    *total = meminfo("MemTotal: %llu");
}

bool kvp_host_is_file(const char *path)
{
    struct stat state;

    return stat(path, &state) == 0 && S_ISREG(state.st_mode);
}

FILE *kvp_host_open(const char *path)
{
    return fopen(path, "rbe");
}

uint64_t kvp_host_file_bytes(FILE *file)
{
    struct stat state;

    return fstat(fileno(file), &state) == 0 && state.st_size > 0 ? (uint64_t)state.st_size : 0;
}

/* Whether the open file is the one of this name. Another process may have given its file the place
 * in between. */
static bool is_named(FILE *file, const char *name)
{
    struct stat here, there;

    return fstat(fileno(file), &here) == 0 && stat(name, &there) == 0 &&
           here.st_dev == there.st_dev && here.st_ino == there.st_ino;
}

FILE *kvp_host_create(const char *path, char *name, size_t n)
{
    struct stat state;
    const bool in_place = lstat(path, &state) == 0 && !S_ISREG(state.st_mode);
    const int length = snprintf(name, n, "%s%s", path, in_place ? "" : ".kvant-part");
    FILE *file;
    int id;

    errno = ENAMETOOLONG;
    if (length < 0 || (size_t)length >= n)
        return NULL;
    id = open(name, O_WRONLY | O_CREAT | O_CLOEXEC | (in_place ? O_TRUNC : 0), 0666);
    file = id >= 0 ? fdopen(id, "wb") : NULL;
    if (file == NULL || in_place)
        return file;
    /* it is emptied once it is locked, because another process may be writing it */
    if (flock(id, LOCK_EX | LOCK_NB) == 0 && is_named(file, name) && ftruncate(id, 0) == 0)
        return file;
    fclose(file);
    errno = EBUSY;
    return NULL;
}

bool kvp_host_finish(FILE *file, const char *path, const char *name, bool keep)
{
    const bool written = fflush(file) == 0 && ferror(file) == 0 && keep,
               in_place = strcmp(path, name) == 0,
               done = written && (in_place || rename(name, path) == 0);
    const int error = errno;

    if (!done && !in_place)
        unlink(name);
    fclose(file); /* gives the lock back, so it comes last */
    errno = error;
    return done;
}

void kvp_host_file_state(const char *path, char *text, size_t n)
{
    struct stat state = { 0 };

    stat(path, &state);
    snprintf(text, n, "%jd %jd %ld", (intmax_t)state.st_size, (intmax_t)state.st_mtim.tv_sec,
             state.st_mtim.tv_nsec);
}

void kvp_host_mapped_files(void (*see)(void *context, const char *path), void *context)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL, *path;
    size_t bytes = 0;

    while (maps != NULL && getline(&line, &bytes, maps) > 0) {
        line[strcspn(line, "\n")] = '\0';
        path = strchr(line, '/');
        if (path != NULL)
            see(context, path);
    }
    free(line);
    if (maps != NULL)
        fclose(maps);
}

bool kvp_host_start_thread(pthread_t *thread, void *(*run)(void *), void *context)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
    sigset_t blocked, former;
    bool started;

    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &former);
    started = pthread_create(thread, NULL, run, context) == 0;
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    return started;
}

void kvp_host_yield(void)
{
    sched_yield();
}

void kvp_host_lower_priority(void)
{
    setpriority(PRIO_PROCESS, 0, LOW_PRIORITY); /* of this thread only, on Linux */
}

/* The socket's name is abstract, because its first byte is 0: no file has to be removed. A program
 * may close every descriptor that it inherits, so an inherited pipe would not do. */
void kvp_host_send(const char *name, const char *line)
{
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    const size_t n = strlen(name);
    int out;

    if (n == 0 || n >= sizeof(to.sun_path))
        return;
    memcpy(to.sun_path + 1, name, n);
    out = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (out < 0)
        return;
    (void)!sendto(out, line, strlen(line), MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&to,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n));
    close(out);
}
