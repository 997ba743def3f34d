/* file.c - see file.h. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc.h"

static kvant_status system_error(const kvant_error *error, const char *verb, const char *path)
{
    return kvant_fail(error, KVANT_ERR_IO, "cannot %s %s: %s", verb, path, strerror(errno));
}

static bool read_all(int fd, uint8_t *bytes, size_t n)
{
    while (n > 0) {
        ssize_t got = read(fd, bytes, n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            errno = got == 0 ? EIO : errno; /* 0: the file has become shorter */
            return false;
        }
        bytes += got;
        n -= (size_t)got;
    }
    return true;
}

/* Checks the head before memory of the stated size is allocated. */
static kvant_status read_head(int fd, const char *path, kvant_check_head_fn *check,
                              uint8_t head[KVANT_FILE_HEAD], size_t *n, const kvant_error *error)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return system_error(error, "read", path);
    if (!S_ISREG(st.st_mode) || (uintmax_t)st.st_size > SIZE_MAX - KVANT_FILE_HEAD)
        return kvant_fail(
            error, KVANT_ERR_IO,
            "cannot read %s: it is not a regular file, or it is larger than memory can be", path);
    *n = (size_t)st.st_size;
    if (!read_all(fd, head, *n < KVANT_FILE_HEAD ? *n : KVANT_FILE_HEAD))
        return system_error(error, "read", path);
    return check(head, *n, error);
}

static kvant_status read_checked(int fd, const char *path, kvant_check_head_fn *check,
                                 uint8_t **bytes, size_t *n, const kvant_error *error)
{
    uint8_t head[KVANT_FILE_HEAD] = { 0 };
    KVANT_FORWARD(read_head(fd, path, check, head, n, error));
    *bytes = kvant_alloc(*n, 1);
    if (!*bytes)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for the %zu bytes of %s", *n,
                          path);
    memcpy(*bytes, head, sizeof head);
    if (!read_all(fd, *bytes + sizeof head, *n - sizeof head))
        return system_error(error, "read", path);
    return KVANT_OK;
}

static kvant_status open_file(const char *path, int *fd, const kvant_error *error)
{
    if (!path)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "the path is NULL");
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    return *fd < 0 ? system_error(error, "open", path) : KVANT_OK;
}

kvant_status kvant_read_file(const char *path, kvant_check_head_fn *check, uint8_t **bytes,
                             size_t *n, const kvant_error *error)
{
    *bytes = NULL;
    int fd = -1;
    KVANT_FORWARD(open_file(path, &fd, error));
    kvant_status status = read_checked(fd, path, check, bytes, n, error);
    close(fd);
    if (status != KVANT_OK) {
        kvant_free(*bytes);
        *bytes = NULL;
    }
    return status;
}

kvant_status kvant_map_file(const char *path, kvant_check_head_fn *check, const uint8_t **bytes,
                            size_t *n, const kvant_error *error)
{
    uint8_t head[KVANT_FILE_HEAD] = { 0 };
    *bytes = NULL;
    int fd = -1;
    KVANT_FORWARD(open_file(path, &fd, error));
    kvant_status status = read_head(fd, path, check, head, n, error);
    if (status == KVANT_OK) {
        void *mapped = mmap(NULL, *n, PROT_READ, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED)
            status = system_error(error, "map", path);
        else
            *bytes = mapped;
    }
    close(fd);
    return status;
}

void kvant_unmap_file(const uint8_t *bytes, size_t n)
{
    munmap((void *)(uintptr_t)bytes, n);
}

static bool write_all(int fd, const uint8_t *bytes, size_t n)
{
    while (n > 0) {
        ssize_t done = write(fd, bytes, n);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return false;
        bytes += done;
        n -= (size_t)done;
    }
    return true;
}

/* Writes a new file and flushes it before the caller renames it. Otherwise a crash soon after the
 * rename could leave the new name without content. */
static bool write_new(const char *path, const kvant_file_part *parts, size_t n_parts)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return false;
    bool ok = true;
    for (size_t i = 0; ok && i < n_parts; i++)
        ok = write_all(fd, parts[i].bytes, parts[i].n);
    ok = ok && fsync(fd) == 0;
    int reason = errno;
    if (close(fd) != 0 && ok) {
        ok = false;
        reason = errno;
    }
    errno = reason;
    return ok;
}

kvant_status kvant_write_parts(const char *path, const kvant_file_part *parts, size_t n_parts,
                               const kvant_error *error)
{
    char temporary[PATH_MAX];
    int length = snprintf(temporary, sizeof temporary, "%s.%ld.tmp", path, (long)getpid());
    if (length < 0 || (size_t)length >= sizeof temporary)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "the path is longer than %d bytes", PATH_MAX);
    if (write_new(temporary, parts, n_parts) && rename(temporary, path) == 0)
        return KVANT_OK;
    /* A process with the same id that was killed may have left the temporary file. */
    bool someone_elses = errno == EEXIST;
    kvant_status status = system_error(error, "write", someone_elses ? temporary : path);
    if (!someone_elses)
        unlink(temporary);
    return status;
}

kvant_status kvant_write_file(const char *path, const uint8_t *bytes, size_t n,
                              const kvant_error *error)
{
    const kvant_file_part whole = { bytes, n };
    return kvant_write_parts(path, &whole, 1, error);
}
