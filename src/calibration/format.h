/* format.h - the calibration file of calibration.md in memory: a block of bytes, and the places of
 * its arrays. The file calibration.c parses, looks up, loads and saves; finish.c makes new
 * files. */
#pragma once

#include <stdbool.h>

#include <kvant/calibration.h>

#include "../base/file.h"

/* The head of the file, and the largest numbers in it (calibration.md). A reader refuses larger
 * numbers before it allocates memory. */
#define KVANT_CALIBRATION_MAGIC "kvantcal"
#define KVANT_CALIBRATION_VERSION 2u
#define KVANT_CALIBRATION_ALIGN 64u
#define KVANT_CALIBRATION_MAX_NAME 255u
#define KVANT_CALIBRATION_MAX_LAYERS 4096u
#define KVANT_CALIBRATION_MAX_KV_HEADS 4096u

/* The beginning of a file. The cluster counts, the model's name and the table follow. */
typedef struct kvant_calibration_header {
    char magic[8];
    uint32_t version, n_locations;
    uint64_t bytes, checksum, fingerprint, n_tokens, seed;
    uint32_t name_bytes, n_codebooks;
} kvant_calibration_header;
_Static_assert(sizeof(kvant_calibration_header) == KVANT_FILE_HEAD, "calibration.md");

/* A line of the table. */
typedef struct kvant_calibration_line {
    uint32_t layer, role, n_kv_heads, head_dim;
    uint64_t zeros[2];
} kvant_calibration_line;

/* One layer and role: a line of the table, the place of its arrays in the file, and the place of
 * each array from there, counted in floats. */
typedef struct kvant_calibration_location {
    uint32_t layer, role, n_kv_heads, head_dim;
    size_t offset; /* in the file, in bytes */
    size_t mean, min, max, moment, diagonal, matrix, centroids[KVANT_CALIBRATION_MAX_CODEBOOKS];
    size_t bytes; /* with padding */
} kvant_calibration_location;

struct kvant_calibration {
    uint8_t *bytes; /* the file, aligned to 64 */
    kvant_calibration_location *locations;
    uint32_t n_locations;
    char model[KVANT_CALIBRATION_MAX_NAME + 1];
    kvant_calibration_info info;
};

/* Whether n cluster counts are within the limits and in increasing order. */
bool kvant_calibration_valid_clusters(const uint32_t *clusters, uint32_t n);

/* Places the arrays of a site whose first four fields are set. The fields must be within the limits
 * above. */
void kvant_calibration_set_offsets(kvant_calibration_location *location,
                                   const kvant_calibration_info *info);

/* How many bytes are before the arrays of the first site. */
size_t kvant_calibration_arrays_start(uint32_t n_codebooks, uint32_t name_bytes,
                                      uint32_t n_locations);

/* The 64-bit FNV-1a of the file, with its checksum field counted as zero. */
uint64_t kvant_calibration_checksum(const uint8_t *bytes, size_t n);

/* Parses a file's bytes (from kvant_alloc). With KVANT_OK they belong to *calibration; otherwise
 * they stay the caller's. */
kvant_status kvant_calibration_parse(uint8_t *bytes, size_t n, kvant_calibration **calibration,
                                     const kvant_error *error);
