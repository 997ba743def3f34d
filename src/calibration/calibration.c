/* calibration.c - parses the bytes of a calibration file and looks statistics up.
 *
 * Refuses every deviation from calibration.md. The format gives its writer no choice, so every
 * field can be checked. */
#include "format.h"

#include <inttypes.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/fnv.h"
#include "../base/os.h"

/* Files have some MB and are read once, so a faster hash would save only milliseconds. */
uint64_t kvant_calibration_checksum(const uint8_t *bytes, size_t n)
{
    static const uint8_t own[8] = { 0 };
    const size_t before = offsetof(kvant_calibration_header, checksum),
                 behind = before + sizeof own;
    if (n < behind)
        return kvant_fnv1a(KVANT_FNV_START, bytes, n);
    uint64_t hash = kvant_fnv1a(kvant_fnv1a(KVANT_FNV_START, bytes, before), own, sizeof own);
    return kvant_fnv1a(hash, bytes + behind, n - behind);
}

static size_t padded(size_t bytes)
{
    return (bytes + KVANT_CALIBRATION_ALIGN - 1) / KVANT_CALIBRATION_ALIGN *
           KVANT_CALIBRATION_ALIGN;
}

size_t kvant_calibration_arrays_start(uint32_t n_codebooks, uint32_t name_bytes,
                                      uint32_t n_locations)
{
    size_t table = padded(sizeof(kvant_calibration_header) + (size_t)4 * n_codebooks + name_bytes);
    return padded(table + n_locations * sizeof(kvant_calibration_line));
}

/* How many numbers the lower triangles of all kv heads have. */
static size_t matrix_halves(const kvant_calibration_location *location)
{
    return (size_t)location->n_kv_heads * location->head_dim * (location->head_dim + 1) / 2;
}

/* The limits keep every product below 2^12 heads x (2^19 + 8 x 2^12 x 2^9) numbers, so 64 bits
 * cannot overflow. */
void kvant_calibration_set_offsets(kvant_calibration_location *location,
                                   const kvant_calibration_info *info)
{
    size_t row = (size_t)location->n_kv_heads * location->head_dim, at = 0;
    location->mean = at;
    location->min = at += row;
    location->max = at += row;
    location->moment = at += row;
    location->diagonal = at += location->role == KVANT_ROLE_K ? row * location->head_dim : 0;
    location->matrix = at += location->role == KVANT_ROLE_K ? row : 0;
    at += location->role == KVANT_ROLE_K ? (matrix_halves(location) + 1) / 2 : 0;
    for (uint32_t i = 0; i < info->n_codebooks; i++) {
        location->centroids[i] = at;
        at += row * info->clusters[i];
    }
    location->bytes = padded(at * sizeof(float));
}

bool kvant_calibration_valid_clusters(const uint32_t *clusters, uint32_t n)
{
    bool valid = true;
    for (uint32_t i = 0; i < n; i++)
        valid &= clusters[i] >= 2 && clusters[i] <= KVANT_CALIBRATION_MAX_CLUSTERS &&
                 (i == 0 || clusters[i] > clusters[i - 1]);
    return valid;
}

static kvant_status damaged(const kvant_error *error, const char *what)
{
    return kvant_fail(error, KVANT_ERR_FORMAT,
                      "the calibration file is damaged: %s; make it again with kvant calibrate",
                      what);
}

/* Checks the first KVANT_FILE_HEAD bytes of a file of n bytes: kind, version and length. */
static kvant_status check_header(const uint8_t *bytes, size_t n, const kvant_error *error)
{
    kvant_calibration_header header;
    if (n < sizeof header || memcmp(bytes, KVANT_CALIBRATION_MAGIC, sizeof header.magic) != 0)
        return kvant_fail(error, KVANT_ERR_FORMAT, "this is not a calibration file of kvant");
    memcpy(&header, bytes, sizeof header);
    if (header.version != KVANT_CALIBRATION_VERSION)
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the calibration file has version %" PRIu32
                          ", this library reads version %u: make it again with kvant calibrate",
                          header.version, KVANT_CALIBRATION_VERSION);
    if (header.bytes != n)
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the calibration file is %s: it has %zu bytes of %" PRIu64
                          "; make it again with kvant calibrate",
                          n < header.bytes ? "cut short" : "too long", n, header.bytes);
    return KVANT_OK;
}

static const kvant_calibration_header *header_of(const kvant_calibration *c)
{
    return (const kvant_calibration_header *)(const void *)c->bytes;
}

/* Reads the part of the head that says how long the rest of the head is. */
static kvant_status read_info(kvant_calibration *c, const kvant_error *error)
{
    const kvant_calibration_header *header = header_of(c);
    const uint8_t *at = (const uint8_t *)(header + 1);
    kvant_calibration_info *info = &c->info;
    c->n_locations = header->n_locations;
    if (header->n_codebooks > KVANT_CALIBRATION_MAX_CODEBOOKS ||
        header->name_bytes > KVANT_CALIBRATION_MAX_NAME || c->n_locations == 0 ||
        c->n_locations > 2 * KVANT_CALIBRATION_MAX_LAYERS)
        return damaged(error, "a count in its head is larger than the format allows");
    if (kvant_calibration_arrays_start(header->n_codebooks, header->name_bytes, c->n_locations) >
        info->bytes)
        return damaged(error, "its table is longer than the file");
    info->n_codebooks = header->n_codebooks;
    memcpy(info->clusters, at, info->n_codebooks * sizeof *info->clusters);
    if (!kvant_calibration_valid_clusters(info->clusters, info->n_codebooks))
        return damaged(error, "its numbers of clusters are not in increasing order from 2 on");
    memcpy(c->model, at + info->n_codebooks * sizeof *info->clusters, header->name_bytes);
    if (memchr(c->model, 0, header->name_bytes))
        return damaged(error, "the name of its model holds a zero byte");
    info->model = c->model;
    info->model_fingerprint = header->fingerprint;
    info->checksum = header->checksum;
    info->n_tokens = header->n_tokens;
    info->seed = header->seed;
    return KVANT_OK;
}

static kvant_status read_location(kvant_calibration *c, uint32_t i,
                                  const kvant_calibration_line *line, const kvant_error *error)
{
    kvant_calibration_location *location = &c->locations[i];
    *location = (kvant_calibration_location){ .layer = line->layer,
                                              .role = line->role,
                                              .n_kv_heads = line->n_kv_heads,
                                              .head_dim = line->head_dim };
    if (location->layer >= KVANT_CALIBRATION_MAX_LAYERS || location->role > KVANT_ROLE_V ||
        location->n_kv_heads == 0 || location->n_kv_heads > KVANT_CALIBRATION_MAX_KV_HEADS ||
        location->head_dim == 0 || location->head_dim > KVANT_MAX_HEAD_DIM || line->zeros[0] ||
        line->zeros[1])
        return damaged(
            error,
            "an entry of its table has a layer, role or size that the format does not allow");
    if (i > 0 && 2 * location->layer + location->role <= 2 * location[-1].layer + location[-1].role)
        return damaged(error, "the entries of its table are not in order");
    kvant_calibration_set_offsets(location, &c->info);
    return KVANT_OK;
}

static void extend_info(kvant_calibration_info *info, const kvant_calibration_location *location)
{
    info->n_layers = location->layer + 1;
    info->n_kv_heads =
        location->n_kv_heads > info->n_kv_heads ? location->n_kv_heads : info->n_kv_heads;
    info->head_dim = location->head_dim > info->head_dim ? location->head_dim : info->head_dim;
}

static kvant_status read_locations(kvant_calibration *c, const kvant_error *error)
{
    size_t name_bytes = strlen(c->model);
    size_t offset =
        kvant_calibration_arrays_start(c->info.n_codebooks, (uint32_t)name_bytes, c->n_locations);
    const size_t table =
        kvant_calibration_arrays_start(c->info.n_codebooks, (uint32_t)name_bytes, 0);
    const kvant_calibration_line *lines =
        (const kvant_calibration_line *)(const void *)(c->bytes + table);
    for (uint32_t i = 0; i < c->n_locations; i++) {
        KVANT_FORWARD(read_location(c, i, &lines[i], error));
        extend_info(&c->info, &c->locations[i]);
        c->locations[i].offset = offset;
        if (c->locations[i].bytes > c->info.bytes - offset)
            return damaged(error, "its arrays are longer than the file");
        offset += c->locations[i].bytes;
    }
    return offset == c->info.bytes ? KVANT_OK
                                   : damaged(error, "the file is longer than its table says");
}

static bool all_finite(const float *numbers, size_t n)
{
    bool finite = true;
    for (size_t i = 0; i < n; i++)
        finite &= numbers[i] - numbers[i] == 0;
    return finite;
}

/* Checks that factors and their inverses are normal numbers, as the factors of a calibrator are. */
static bool valid_factors(const float *factors, size_t n)
{
    bool valid = true;
    for (size_t i = 0; i < n; i++)
        valid &= factors[i] >= 0x1p-16f && factors[i] <= 0x1p16f;
    return valid;
}

static bool finite_halves(const uint16_t *halves, size_t n)
{
    bool finite = true;
    for (size_t i = 0; i < n; i++)
        finite &= (halves[i] & 0x7c00u) != 0x7c00u;
    return finite;
}

static kvant_status check_numbers(const kvant_calibration *c, const kvant_error *error)
{
    for (uint32_t i = 0; i < c->n_locations; i++) {
        const kvant_calibration_location *location = &c->locations[i];
        const float *arrays = (const float *)(const void *)(c->bytes + location->offset);
        const uint16_t *halves = (const uint16_t *)(const void *)(arrays + location->matrix);
        size_t before = location->matrix,
               n_halves = location->role == KVANT_ROLE_K ? matrix_halves(location) : 0;
        size_t behind = before + (n_halves + 1) / 2;
        if (!all_finite(arrays, before) || !finite_halves(halves, n_halves) ||
            !all_finite(arrays + behind, location->bytes / sizeof(float) - behind))
            return damaged(error, "it holds a NaN or an infinity");
        if (!valid_factors(arrays + location->diagonal, location->matrix - location->diagonal))
            return damaged(error, "a factor of a channel is not larger than 0");
    }
    return KVANT_OK;
}

static kvant_status parse(kvant_calibration *c, const kvant_error *error)
{
    KVANT_FORWARD(check_header(c->bytes, c->info.bytes, error));
    if (header_of(c)->checksum != kvant_calibration_checksum(c->bytes, c->info.bytes))
        return damaged(error, "its checksum does not match");
    KVANT_FORWARD(read_info(c, error));
    c->locations = kvant_alloc(c->n_locations, sizeof *c->locations);
    if (!c->locations)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for a calibration");
    KVANT_FORWARD(read_locations(c, error));
    return check_numbers(c, error);
}

kvant_status kvant_calibration_parse(uint8_t *bytes, size_t n, kvant_calibration **out,
                                     const kvant_error *error)
{
    *out = NULL;
    kvant_calibration *c = kvant_alloc(1, sizeof *c);
    if (!c)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for a calibration");
    c->bytes = bytes;
    c->info = (kvant_calibration_info){ .size = sizeof c->info, .bytes = n };
    kvant_status status = parse(c, error);
    if (status != KVANT_OK) {
        c->bytes = NULL;
        kvant_calibration_free(&c);
    }
    *out = c;
    return status;
}

void kvant_calibration_free(kvant_calibration **calibration)
{
    if (!calibration || !*calibration)
        return;
    kvant_free((*calibration)->bytes);
    kvant_free((*calibration)->locations);
    kvant_free(*calibration);
    *calibration = NULL;
}

kvant_status kvant_calibration_get_info(const kvant_calibration *calibration,
                                        kvant_calibration_info *info)
{
    KVANT_RETURN_IF(!calibration, KVANT_ERR_ARGUMENT);
    return KVANT_RETURN_STRUCT(kvant_calibration_info, info, &calibration->info, checksum)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}

static const kvant_calibration_location *find(const kvant_calibration *c, uint32_t layer,
                                              kvant_role role)
{
    for (uint32_t i = 0; i < c->n_locations; i++)
        if (c->locations[i].layer == layer && c->locations[i].role == (uint32_t)role)
            return &c->locations[i];
    return NULL;
}

kvant_status kvant_calibration_get_entry(const kvant_calibration *calibration, uint32_t layer,
                                         uint32_t kv_head, kvant_role role,
                                         kvant_calibration_entry *entry)
{
    KVANT_RETURN_IF(!calibration, KVANT_ERR_ARGUMENT);
    const kvant_calibration_location *location = find(calibration, layer, role);
    KVANT_RETURN_IF(!location || kv_head >= location->n_kv_heads, KVANT_ERR_ARGUMENT);
    const float *arrays = (const float *)(const void *)(calibration->bytes + location->offset);
    size_t d = location->head_dim, row = kv_head * d;
    kvant_calibration_entry full = { .head_dim = location->head_dim,
                                     .mean = arrays + location->mean + row,
                                     .min = arrays + location->min + row,
                                     .max = arrays + location->max + row };
    if (role == KVANT_ROLE_K) {
        full.query_moment = arrays + location->moment + row * d;
        full.diagonal = arrays + location->diagonal + row;
        full.matrix =
            (const uint16_t *)(const void *)(arrays + location->matrix) + row * (d + 1) / 2;
    }
    for (uint32_t i = 0; i < calibration->info.n_codebooks; i++)
        full.centroids[i] = arrays + location->centroids[i] + row * calibration->info.clusters[i];
    return KVANT_RETURN_STRUCT(kvant_calibration_entry, entry, &full, centroids)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}

kvant_status kvant_calibration_load(const char *path, kvant_calibration **out, char *err,
                                    size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!out)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the calibration is NULL");
    *out = NULL;
    uint8_t *bytes;
    size_t n;
    KVANT_FORWARD(kvant_read_file(path, check_header, &bytes, &n, &error));
    kvant_status status = kvant_calibration_parse(bytes, n, out, &error);
    if (status != KVANT_OK)
        kvant_free(bytes);
    return status;
}

kvant_status kvant_calibration_save(const kvant_calibration *calibration, const char *path,
                                    char *err, size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!calibration || !path)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "calibration or path is NULL");
    return kvant_write_file(path, calibration->bytes, calibration->info.bytes, &error);
}

uint64_t kvant_model_fingerprint(const char *path)
{
    enum { BLOCKS = 256, BLOCK = 4096 };
    unsigned char block[BLOCK];
    uint64_t size = 0, fingerprint = 0;
    int file = -1;
    if (!path || !kvant_os_open(path, &file))
        return 0;
    bool ok = kvant_os_size(file, &size);
    if (ok)
        fingerprint = kvant_fnv1a(KVANT_FNV_START, &size, sizeof size);
    for (uint64_t i = 0; ok && i < BLOCKS; i++) {
        const uint64_t at = size / BLOCKS * i;
        const size_t n = size - at < BLOCK ? (size_t)(size - at) : BLOCK;
        ok = kvant_os_read_at(file, block, n, at);
        if (ok)
            fingerprint = kvant_fnv1a(fingerprint, block, n);
    }
    kvant_os_close(file);
    return ok ? fingerprint : 0;
}
