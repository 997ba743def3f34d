/* file.c - see file.h. */
#include "file.h"

#include <errno.h>
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

/* The file is flushed before it gets its place. Otherwise a crash soon after could leave the new
 * name without content. */
static bool write_all(int fd, const kvant_file_part *parts, size_t n_parts)
{
    bool ok = true;
    for (size_t i = 0; ok && i < n_parts; i++)
        ok = kvant_os_write(fd, parts[i].bytes, parts[i].n);
    return ok && kvant_os_flush(fd);
}

kvant_status kvant_write_parts(const char *path, const kvant_file_part *parts, size_t n_parts,
                               const kvant_error *error)
{
    char part[KVANT_OS_MAX_PATH];
    int fd = -1;
    if (kvant_os_is_special(path))
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "cannot write %s: it is a device or a pipe; name a file", path);
    if (kvant_os_begin(path, part, sizeof part, &fd) &&
        kvant_os_finish(fd, path, part, write_all(fd, parts, n_parts)))
        return KVANT_OK;
    if (errno == EBUSY)
        return kvant_fail(error, KVANT_ERR_IO,
                          "cannot write %s: another process or thread is writing it", path);
    return system_error(error, "write", path);
}

kvant_status kvant_write_file(const char *path, const uint8_t *bytes, size_t n,
                              const kvant_error *error)
{
    const kvant_file_part whole = { bytes, n };
    return kvant_write_parts(path, &whole, 1, error);
}
