/* os_posix.c - os.h for Linux and macOS. */
#if defined(__linux__)
#define _GNU_SOURCE /* dladdr, flock, pipe2 */
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE /* dladdr, flock, statvfs */
#endif
#include "os.h"

#include "progress.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/prctl.h>
#elif defined(__APPLE__)
#include <mach-o/dyld.h>
#include <math.h>
#endif

bool os_start(void)
{
    return true;
}

bool os_resolve(const char *path, char *real, size_t bytes)
{
    char *found = realpath(path, NULL);
    bool ok = found != NULL && access(found, R_OK) == 0;
    if (ok && strlen(found) >= bytes) {
        ok = false;
        errno = ENAMETOOLONG;
    }
    if (ok)
        strcpy(real, found);
    free(found);
    return ok;
}

bool os_own_path(char *path, size_t bytes)
{
#if defined(__APPLE__)
    char own[OS_MAX_PATH];
    uint32_t room = sizeof own;
    return _NSGetExecutablePath(own, &room) == 0 && os_resolve(own, path, bytes);
#else
    const ssize_t n = readlink("/proc/self/exe", path, bytes);
    if (n <= 0 || (size_t)n >= bytes)
        return false;
    path[n] = 0;
    return true;
#endif
}

bool os_library_of(const void *function, char *path, size_t bytes)
{
    Dl_info library;
    return dladdr(function, &library) != 0 &&
           (size_t)snprintf(path, bytes, "%s", library.dli_fname) < bytes;
}

/* libNAME.so, libNAME.so.0 and libNAME.v0.5.0.so, or the same with dylib. */
bool os_is_library(const char *file, const char *name)
{
#if defined(__APPLE__)
    static const char ending[] = ".dylib";
#else
    static const char ending[] = ".so";
#endif
    const size_t n = strlen(name);
    const char *end = strstr(file, ending), *next = end != NULL ? end + sizeof ending - 1 : NULL;
    return strncmp(file, "lib", 3) == 0 && strncmp(file + 3, name, n) == 0 && file[3 + n] == '.' &&
           end != NULL && (*next == 0 || *next == '.');
}

void *os_open_global(const char *path)
{
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

bool os_set_variable(const char *name, const char *value)
{
    return (value != NULL ? setenv(name, value, 1) : unsetenv(name)) == 0;
}

bool os_set_default(const char *name, const char *value)
{
    return setenv(name, value, 0) == 0;
}

static bool is_executable(const char *path)
{
    struct stat state;
    return stat(path, &state) == 0 && S_ISREG(state.st_mode) && access(path, X_OK) == 0;
}

bool os_find_program(const char *word, char *path, size_t bytes)
{
    if (strchr(word, '/') != NULL)
        return is_executable(word) && (size_t)snprintf(path, bytes, "%s", word) < bytes;
    const char *at = getenv("PATH");
    while (at != NULL && *at != 0) {
        const size_t n = strcspn(at, ":");
        const int length = snprintf(path, bytes, "%.*s%s%s", (int)n, at, n > 0 ? "/" : "", word);
        if (length > 0 && (size_t)length < bytes && is_executable(path))
            return true;
        at += n + (at[n] == ':');
    }
    return false;
}

bool os_is_program(const char head[4], bool scripts)
{
#if defined(__APPLE__)
    static const char programs[][5] = { "\xcf\xfa\xed\xfe", "\xca\xfe\xba\xbe" };
#else
    static const char programs[][5] = { "\177ELF" };
#endif
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (memcmp(head, programs[i], 4) == 0)
            return true;
    return scripts && memcmp(head, "#!", 2) == 0;
}

void os_become(char *const *words)
{
    execvp(words[0], words);
}

/* The child becomes the program. It is the first one of a group, and ends with this process. */
static void become_quiet(char *const *words, char *const *variables, int n, int out)
{
    const int nothing = open("/dev/null", O_RDWR);
    setpgid(0, 0);
#if defined(__linux__)
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    for (int i = 0; i < n; i++)
        putenv(variables[i]);
    if (nothing >= 0 && dup2(nothing, 0) >= 0 && dup2(nothing, 2) >= 0 && dup2(out, 1) >= 0)
        execvp(words[0], words);
    _exit(127);
}

/* Reads to the end or until text, which has room for a 0 behind it, is full. False: too late. */
static bool read_all(int in, int seconds, char *text, size_t bytes)
{
    const int64_t end = monotonic_milliseconds() + seconds * 1000;
    size_t n = 0;
    ssize_t got = 1;
    while (n < bytes && got > 0) {
        const int64_t left = end - monotonic_milliseconds();
        struct pollfd ready = { .fd = in, .events = POLLIN };
        if (left <= 0 || poll(&ready, 1, (int)left) <= 0)
            return false;
        got = read(in, text + n, bytes - n);
        n += got > 0 ? (size_t)got : 0;
        text[n] = 0;
    }
    return true;
}

bool os_read_output(char *const *words, char *const *variables, int n, int seconds, char *text,
                    size_t bytes, bool *late)
{
    int ends[2];
    *late = false;
    text[0] = 0;
    if (pipe(ends) != 0)
        return false;
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    const pid_t child = fork();
    if (child == 0)
        become_quiet(words, variables, n, ends[1]);
    close(ends[1]);
    if (child > 0) {
        setpgid(child, child); /* the child does it, too: whoever comes first */
        *late = !read_all(ends[0], seconds, text, bytes - 1);
        kill(-child, SIGKILL); /* with the program that a script started */
        waitpid(child, NULL, 0);
    }
    close(ends[0]);
    return child > 0;
}

bool os_open_or_create(const char *path, int *file)
{
    *file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return *file >= 0;
}

bool os_resize(int file, uint64_t bytes)
{
    return ftruncate(file, (off_t)bytes) == 0;
}

/* macOS has no such call: there a full disk ends the process when a mapping is written to. */
bool os_take_room(int file, uint64_t bytes)
{
#if defined(__APPLE__)
    return os_resize(file, bytes);
#else
    const int reason = posix_fallocate(file, 0, (off_t)bytes);
    errno = reason;
    return reason == 0;
#endif
}

void *os_map_to_write(int file, size_t bytes)
{
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return map != MAP_FAILED ? map : NULL;
}

bool os_lock(int file)
{
    return flock(file, LOCK_EX | LOCK_NB) == 0;
}

bool os_make_folder(const char *path)
{
    return mkdir(path, 0777) == 0 || errno == EEXIST;
}

bool os_is_folder(const char *path)
{
    struct stat state;
    return stat(path, &state) == 0 && S_ISDIR(state.st_mode);
}

bool os_can_write_to(const char *folder)
{
    return access(folder, W_OK | X_OK) == 0;
}

bool os_free_bytes(const char *folder, double *bytes)
{
    struct statvfs disk;
    if (statvfs(folder, &disk) != 0)
        return false;
    *bytes = (double)disk.f_bavail * (double)disk.f_frsize;
    return true;
}

double os_bytes_on_disk(const char *path)
{
    struct stat state;
    return stat(path, &state) == 0 ? (double)state.st_blocks * 512 : 0;
}

bool os_each_file(const char *folder, bool (*see)(void *context, const char *name), void *context)
{
    DIR *files = opendir(folder);
    if (files == NULL)
        return false;
    for (struct dirent *entry = readdir(files); entry != NULL; entry = readdir(files))
        if (see(context, entry->d_name))
            break;
    closedir(files);
    return true;
}

bool os_stream_open(os_stream *s)
{
    *s = (os_stream){ .text = NULL };
    s->file = open_memstream(&s->text, &s->bytes);
    return s->file != NULL;
}

char *os_stream_text(os_stream *s, size_t *bytes)
{
    if (s->file == NULL)
        return NULL;
    bool ok = !ferror(s->file);
    ok = fclose(s->file) == 0 && ok;
    char *text = s->text;
    if (!ok)
        free(text);
    if (ok && bytes != NULL)
        *bytes = s->bytes;
    *s = (os_stream){ .text = NULL };
    return ok ? text : NULL;
}

bool os_errors_on_terminal(void)
{
    return isatty(STDERR_FILENO) == 1;
}

#if defined(__APPLE__)
double os_idle_cpus(void)
{
    return HUGE_VAL; /* macOS lends no program the times of its CPUs */
}
#endif

void os_names(char *system, char *machine, size_t bytes)
{
    struct utsname names;
    const bool known = uname(&names) == 0;
    snprintf(system, bytes, "%s", known ? names.sysname : "");
    snprintf(machine, bytes, "%s", known ? names.machine : "");
}
