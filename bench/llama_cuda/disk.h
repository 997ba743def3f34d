/* disk.h - files that go through a disk and the median of times, for programs that measure saved
 * states. */
#ifndef DISK_H
#define DISK_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { DISK_PIECE = 8 << 20 };

/* Waits until a file is on the disk. */
static inline bool disk_sync(const char *path)
{
    const int file = open(path, O_RDONLY);
    const bool ok = file >= 0 && fsync(file) == 0;

    if (file >= 0)
        close(file);
    return ok;
}

/* Drops the system's cache of files, which needs root. */
static inline bool disk_drop_caches(void)
{
    FILE *file = fopen("/proc/sys/vm/drop_caches", "w");
    const bool ok = file != NULL && fputs("1", file) >= 0;

    return file != NULL && fclose(file) == 0 && ok;
}

static inline bool disk_move(int file, size_t n, bool writes)
{
    static unsigned char *piece;

    if (piece == NULL && posix_memalign((void **)&piece, 4096, DISK_PIECE) == 0)
        for (int i = 0; i < DISK_PIECE; i++)
            piece[i] = (unsigned char)((unsigned)i * 2654435761u >> 24);
    for (size_t i = 0; i < n; i += DISK_PIECE)
        if (piece == NULL ||
            (writes ? write(file, piece, DISK_PIECE) : read(file, piece, DISK_PIECE)) != DISK_PIECE)
            return false;
    return fsync(file) == 0;
}

/* Moves n bytes between a file and a small buffer, without the system's cache where that is
 * possible: file systems in memory have no O_DIRECT. */
static inline bool disk_alone(const char *path, size_t n, bool writes)
{
    const int flags = writes ? O_WRONLY | O_CREAT : O_RDONLY;
    int file = writes ? open(path, flags | O_DIRECT, 0600) : -1;
    bool ok;

    file = file >= 0 ? file : open(path, flags, 0600);
    ok = file >= 0 && disk_move(file, n, writes);
    if (file >= 0)
        close(file);
    return ok;
}

static inline int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Sorts the n times. */
static inline double median(double *of, int n)
{
    qsort(of, (size_t)n, sizeof(*of), ascending);
    return of[n / 2];
}

#endif /* DISK_H */
