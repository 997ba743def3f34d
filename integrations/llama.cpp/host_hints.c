/* host_hints.c - hints about large files and memory, for host.h. They save time and change no
 * result. On systems that have no such call they do nothing. */
#define _GNU_SOURCE /* sync_file_range, MADV_HUGEPAGE */

#include "host.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>

/* Linux's usual huge pages. If they are larger, the system uses fewer of them. */
#define HUGE_PAGE ((uintptr_t)2 << 20)

void kvp_host_want_huge_pages(void *memory, size_t bytes)
{
    const uintptr_t first = ((uintptr_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE,
                    end = ((uintptr_t)memory + bytes) / HUGE_PAGE * HUGE_PAGE;

    if (first < end)
        madvise((void *)first, end - first, MADV_HUGEPAGE);
}

void kvp_host_write_early(int file, uint64_t first, size_t bytes)
{
    sync_file_range(file, (off_t)first, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
}

void kvp_host_read_in_order(int file)
{
    posix_fadvise(file, 0, 0, POSIX_FADV_SEQUENTIAL);
}

void kvp_host_read_early(int file, uint64_t first, size_t bytes)
{
    posix_fadvise(file, (off_t)first, (off_t)bytes, POSIX_FADV_WILLNEED);
}
#else
void kvp_host_want_huge_pages(void *memory, size_t bytes)
{
    (void)memory;
    (void)bytes;
}

void kvp_host_write_early(int file, uint64_t first, size_t bytes)
{
    (void)file;
    (void)first;
    (void)bytes;
}

void kvp_host_read_in_order(int file)
{
    (void)file;
}

void kvp_host_read_early(int file, uint64_t first, size_t bytes)
{
    (void)file;
    (void)first;
    (void)bytes;
}
#endif
