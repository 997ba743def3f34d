/* file.c - see file.h. */
#include "file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "os.h"

static kvant_status system_error(const kvant_error *error, const char *verb, const char *path)
{
    return kvant_fail(error, KVANT_ERR_IO, "cannot %s %s: %s", verb, path, strerror(errno));
}

/* Checks the head before memory of the stated size is allocated. */
static kvant_status read_head(int fd, const char *path, kvant_check_head_fn *check,
                              uint8_t head[KVANT_FILE_HEAD], size_t *n, const kvant_error *error)
{
    uint64_t bytes = 0;
    const bool regular = kvant_os_size(fd, &bytes);
    if (!regular && errno != EINVAL)
        return system_error(error, "read", path);
    if (!regular || bytes > SIZE_MAX - KVANT_FILE_HEAD)
        return kvant_fail(
            error, KVANT_ERR_IO,
            "cannot read %s: it is not a regular file, or it is larger than memory can be", path);
    *n = (size_t)bytes;
    if (!kvant_os_read(fd, head, *n < KVANT_FILE_HEAD ? *n : KVANT_FILE_HEAD))
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
    if (!kvant_os_read(fd, *bytes + sizeof head, *n - sizeof head))
        return system_error(error, "read", path);
    return KVANT_OK;
}

static kvant_status open_file(const char *path, int *fd, const kvant_error *error)
{
    if (!path)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "the path is NULL");
    return kvant_os_open(path, fd) ? KVANT_OK : system_error(error, "open", path);
}

kvant_status kvant_read_file(const char *path, kvant_check_head_fn *check, uint8_t **bytes,
                             size_t *n, const kvant_error *error)
{
    *bytes = NULL;
    int fd = -1;
    KVANT_FORWARD(open_file(path, &fd, error));
    kvant_status status = read_checked(fd, path, check, bytes, n, error);
    kvant_os_close(fd);
    if (status != KVANT_OK) {
        kvant_free(*bytes);
        *bytes = NULL;
    }
    return status;
}

kvant_status kvant_map_file(const char *path, kvant_check_head_fn *check, kvant_mapped_file *mapped,
                            const kvant_error *error)
{
    uint8_t head[KVANT_FILE_HEAD] = { 0 };
    *mapped = (kvant_mapped_file){ .file = -1 };
    KVANT_FORWARD(open_file(path, &mapped->file, error));
    kvant_status status = read_head(mapped->file, path, check, head, &mapped->n, error);
    if (status == KVANT_OK) {
        mapped->bytes = kvant_os_map_file(mapped->file, mapped->n);
        if (!mapped->bytes)
            status = system_error(error, "map", path);
    }
    if (status != KVANT_OK)
        kvant_os_close(mapped->file);
    return status;
}

void kvant_unmap_file(kvant_mapped_file *mapped)
{
    if (!mapped->bytes)
        return;
    kvant_os_unmap(mapped->bytes, mapped->n);
    kvant_os_close(mapped->file);
    mapped->bytes = NULL;
}

bool kvant_mapped_file_is_whole(const kvant_mapped_file *mapped)
{
    uint64_t bytes;
    return !mapped->bytes || (kvant_os_size(mapped->file, &bytes) && bytes >= mapped->n);
}

/* Writes a new file and flushes it before the caller renames it. Otherwise a crash soon after the
 * rename could leave the new name without content. */
static bool write_new(const char *path, const kvant_file_part *parts, size_t n_parts)
{
    int fd = -1;
    if (!kvant_os_create(path, &fd))
        return false;
    bool ok = true;
    for (size_t i = 0; ok && i < n_parts; i++)
        ok = kvant_os_write(fd, parts[i].bytes, parts[i].n);
    ok = ok && kvant_os_flush(fd);
    int reason = errno;
    if (!kvant_os_close(fd) && ok) {
        ok = false;
        reason = errno;
    }
    errno = reason;
    return ok;
}

kvant_status kvant_write_parts(const char *path, const kvant_file_part *parts, size_t n_parts,
                               const kvant_error *error)
{
    char temporary[KVANT_OS_MAX_PATH];
    int length =
        snprintf(temporary, sizeof temporary, "%s.%" PRIu64 ".tmp", path, kvant_os_process());
    if (length < 0 || (size_t)length >= sizeof temporary)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "the path is longer than %u bytes",
                          KVANT_OS_MAX_PATH);
    if (kvant_os_is_special(path))
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "cannot write %s: it is a device or a pipe; name a file", path);
    if (write_new(temporary, parts, n_parts) && kvant_os_replace(temporary, path))
        return KVANT_OK;
    /* A process with the same id that was killed may have left the temporary file. */
    bool someone_elses = errno == EEXIST;
    kvant_status status = system_error(error, "write", someone_elses ? temporary : path);
    if (!someone_elses)
        kvant_os_remove(temporary);
    return status;
}

kvant_status kvant_write_file(const char *path, const uint8_t *bytes, size_t n,
                              const kvant_error *error)
{
    const kvant_file_part whole = { bytes, n };
    return kvant_write_parts(path, &whole, 1, error);
}
