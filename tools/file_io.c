/* file_io.c - see file_io.h. */
#define _XOPEN_SOURCE 700 /* pread */
#include "file_io.h"

#include <errno.h>
#include <sys/types.h>
#include <unistd.h>

/* Goes on after `done` bytes; false when there is nothing to go on with. */
static bool advance(ssize_t done, size_t *n, uint64_t *at)
{
    if (done < 0)
        return errno == EINTR;
    if (done == 0) {
        errno = 0;
        return false;
    }
    *n -= (size_t)done;
    *at += (uint64_t)done;
    return true;
}

bool file_read_at(int file, void *bytes, size_t n, uint64_t at)
{
    const uint64_t first = at;
    while (n > 0)
        if (!advance(pread(file, (char *)bytes + (at - first), n, (off_t)at), &n, &at))
            return false;
    return true;
}

bool file_write_at(int file, const void *bytes, size_t n, uint64_t at)
{
    const uint64_t first = at;
    while (n > 0)
        if (!advance(pwrite(file, (const char *)bytes + (at - first), n, (off_t)at), &n, &at)) {
            errno = errno != 0 ? errno : EIO;
            return false;
        }
    return true;
}
