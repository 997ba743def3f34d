/* host_posix.c - host.h for Linux and macOS. */
#if defined(__linux__)
#define _GNU_SOURCE /* dladdr1, RTLD_DL_LINKMAP, MAP_ANONYMOUS, mincore, madvise, SOCK_CLOEXEC */
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE /* dladdr, MAP_ANON, mincore */
#endif

#include "host.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#if defined(__linux__)
#include <link.h>
#elif defined(__APPLE__)
#include <libproc.h>
#endif

#if defined(__linux__)
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
#elif defined(__APPLE__)
void *kvp_host_library_of(const void *code)
{
    Dl_info info;

    return dladdr(code, &info) != 0 ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
}
#endif

/* On Linux the linker's -z nodelete does so. */
void kvp_host_stay_loaded(void)
{
#if defined(__APPLE__)
    Dl_info info;

    if (dladdr((const void *)&kvp_host_stay_loaded, &info) != 0)
        dlopen(info.dli_fname, RTLD_LAZY); /* and never closes it */
#endif
}

bool kvp_host_reserves_nominal_bytes(void)
{
    return false;
}

void *kvp_host_reserve(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory != MAP_FAILED ? memory : NULL;
}

bool kvp_host_commit(void *at, size_t bytes)
{
    (void)at;
    (void)bytes;
    return true;
}

void kvp_host_release(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

void kvp_host_refuse_huge_pages(void *memory, size_t bytes)
{
#if defined(__linux__)
    madvise(memory, bytes, MADV_NOHUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

/* Zeroes memory. drop() zeroes whole pages and gives them back; false: it cannot. */
static void clear(void *at, size_t bytes, bool (*drop)(void *pages, size_t bytes))
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = (uintptr_t)at, last = first + bytes;
    const uintptr_t inner_first = (first + page - 1) / page * page, inner_last = last / page * page;

    if (inner_first >= inner_last || !drop((void *)inner_first, inner_last - inner_first)) {
        memset(at, 0, bytes);
        return;
    }
    memset((void *)first, 0, inner_first - first);
    memset((void *)inner_last, 0, last - inner_last);
}

/* Linux zeroes the pages that MADV_DONTNEED drops. macOS does not, so new pages take their place.
 * */
static bool drop_own(void *pages, size_t bytes)
{
#if defined(__linux__)
    return madvise(pages, bytes, MADV_DONTNEED) == 0;
#else
    return mmap(pages, bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == pages;
#endif
}

/* Linux allows MADV_FREE only for private memory without a file behind it. */
static bool drop_foreign(void *pages, size_t bytes)
{
#if defined(__linux__)
    return madvise(pages, bytes, MADV_FREE) == 0 && madvise(pages, bytes, MADV_DONTNEED) == 0;
#else
    (void)pages;
    (void)bytes;
    return false;
#endif
}

void kvp_host_clear(void *at, size_t bytes)
{
    clear(at, bytes, drop_own);
}

void kvp_host_clear_foreign(void *at, size_t bytes)
{
    clear(at, bytes, drop_foreign);
}

size_t kvp_host_resident(const void *memory, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), resident = 0;
    char *base = (char *)(uintptr_t)memory;
#if defined(__linux__)
    unsigned char state[4096];
#else
    char state[4096];
#endif

    for (size_t at = 0; at < bytes; at += sizeof(state) * page) {
        size_t n = bytes - at < sizeof(state) * page ? bytes - at : sizeof(state) * page;
        size_t n_pages = (n + page - 1) / page;
        if (mincore(base + at, n, state) != 0)
            return resident;
        for (size_t i = 0; i < n_pages; i++)
            resident += (size_t)(state[i] & 1) * page;
    }
    return resident;
}

bool kvp_host_is_file(const char *path)
{
    struct stat state;

    return stat(path, &state) == 0 && S_ISREG(state.st_mode);
}

FILE *kvp_host_open(const char *path, bool appends)
{
    return fopen(path, appends ? "abe" : "rbe");
}

uint64_t kvp_host_file_bytes(FILE *file)
{
    struct stat state;

    return fstat(fileno(file), &state) == 0 && state.st_size > 0 ? (uint64_t)state.st_size : 0;
}

bool kvp_host_create(const char *path, char *name, size_t n, int *file)
{
    struct stat state;

    if (lstat(path, &state) != 0 || S_ISREG(state.st_mode))
        return kvant_os_begin(path, name, n, file);
    errno = ENAMETOOLONG;
    if ((size_t)snprintf(name, n, "%s", path) >= n)
        return false;
    *file = open(name, O_WRONLY | O_CREAT | O_CLOEXEC | O_TRUNC, 0666);
    return *file >= 0;
}

bool kvp_host_finish(int file, const char *path, const char *name, bool keep)
{
    if (strcmp(path, name) != 0)
        return kvant_os_finish(file, path, name, keep);
    close(file);
    return keep;
}

void kvp_host_file_state(const char *path, char *text, size_t n)
{
    struct stat state = { 0 };

    stat(path, &state);
#if defined(__APPLE__)
    const struct timespec changed = state.st_mtimespec;
#else
    const struct timespec changed = state.st_mtim;
#endif
    snprintf(text, n, "%jd %jd %ld", (intmax_t)state.st_size, (intmax_t)changed.tv_sec,
             changed.tv_nsec);
}

#if defined(__linux__)
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

#elif defined(__APPLE__)
void kvp_host_mapped_files(void (*see)(void *context, const char *path), void *context)
{
    struct proc_regionwithpathinfo region;
    uint64_t at = 0;

    while (proc_pidinfo(getpid(), PROC_PIDREGIONPATHINFO, at, &region, sizeof(region)) ==
           (int)sizeof(region)) {
        if (region.prp_vip.vip_path[0] != '\0')
            see(context, region.prp_vip.vip_path);
        at = region.prp_prinfo.pri_address + region.prp_prinfo.pri_size;
    }
}
#endif

#if defined(__linux__)
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
#else
/* `kvant exec` watches programs on Linux alone. */
void kvp_host_send(const char *name, const char *line)
{
    (void)name;
    (void)line;
}
#endif
