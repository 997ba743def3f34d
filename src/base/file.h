/* file.h - reads and writes whole files. A reader checks the head of a file first. A writer writes
 * a new file in the same folder and renames it (kvant_os_begin). */
#pragma once

#include <stdbool.h>

#include "error.h"

#define KVANT_FILE_HEAD 64u /* bytes that are checked before memory is allocated */

/* Checks the first KVANT_FILE_HEAD bytes of a file of n bytes. The function must refuse files that
 * are shorter than KVANT_FILE_HEAD. */
typedef kvant_status kvant_check_head_fn(const uint8_t *bytes, size_t n, const kvant_error *error);

/* Reads a regular file whose head passes the check. The caller frees *bytes with kvant_free; it is
 * NULL on an error. A path of NULL is refused. */
kvant_status kvant_read_file(const char *path, kvant_check_head_fn *check, uint8_t **bytes,
                             size_t *n, const kvant_error *error);

/* A file that is mapped, read-only, and stays open. */
typedef struct kvant_mapped_file {
    const uint8_t *bytes; /* NULL: none */
    size_t n;
    int file;
} kvant_mapped_file;

/* The same without reading. On an error mapped->bytes is NULL. */
kvant_status kvant_map_file(const char *path, kvant_check_head_fn *check, kvant_mapped_file *mapped,
                            const kvant_error *error);
void kvant_unmap_file(kvant_mapped_file *mapped);

/* Whether the file still has all bytes that were mapped. Reading bytes beyond its end would end the
 * process. */
bool kvant_mapped_file_is_whole(const kvant_mapped_file *mapped);

typedef struct kvant_file_part {
    const void *bytes;
    size_t n;
} kvant_file_part;

/* Writes a new file in the folder of path, flushes it to disk and renames it to path. So path never
 * holds half a file, and the next call overwrites what a killed process left. KVANT_ERR_ARGUMENT:
 * path names a device or a pipe, which would be replaced. */
kvant_status kvant_write_parts(const char *path, const kvant_file_part *parts, size_t n_parts,
                               const kvant_error *error);
kvant_status kvant_write_file(const char *path, const uint8_t *bytes, size_t n,
                              const kvant_error *error);
