/* checkpoint.c - saves and restores the state of a calibrator, so that work can continue after a
 * break.
 *
 * The file is for this library on this machine: it has numbers as in memory, a version number and a
 * checksum. The version is raised when the gathered state changes. Every size is checked against
 * the limits of calibration files. */
#include "gathered.h"

#include <string.h>

#include "../base/alloc.h"

#define MAGIC "kvantpar"
#define VERSION 1u /* raise it with the gathered state */

typedef kvant_calibrator_slot slot;

/* The head of the file; slots follow it. All sizes are multiples of 8 bytes, so that arrays are
 * aligned. */
typedef struct head {
    char magic[8];
    uint64_t version, bytes;
    uint64_t checksum; /* in the same place as in calibration files */
    uint64_t key, position;
    uint64_t fingerprint, seed, sample_rows, n_slots, n_codebooks;
    uint64_t clusters[KVANT_CALIBRATION_MAX_CODEBOOKS];
    char model[KVANT_CALIBRATION_MAX_NAME + 1];
} head;

typedef struct slot_head {
    uint64_t index, n_kv_heads, head_dim, n_rows, random, has_centroids;
} slot_head;

/* How many bytes the centroids of a slot take; 0 without centroids. */
static size_t centroid_bytes(const kvant_calibrator *c, const slot *s)
{
    return s->centroids ? (kvant_calibrator_centroids(c, s) * sizeof *s->centroids + 7) / 8 * 8 : 0;
}

static size_t slot_bytes(const kvant_calibrator *c, const slot *s)
{
    return sizeof(slot_head) + s->bytes + centroid_bytes(c, s);
}

static head make_head(const kvant_calibrator *c, uint64_t key, uint64_t position)
{
    head h = { .magic = MAGIC,
               .version = VERSION,
               .bytes = sizeof h,
               .key = key,
               .position = position,
               .fingerprint = c->info.model_fingerprint,
               .seed = c->info.seed,
               .sample_rows = c->sample_rows,
               .n_codebooks = c->info.n_codebooks };
    for (uint32_t i = 0; i < c->info.n_codebooks; i++)
        h.clusters[i] = c->info.clusters[i];
    memcpy(h.model, c->model, sizeof h.model);
    for (uint32_t i = 0; i < 2 * c->n_layers; i++)
        if (c->slots[i].head_dim) {
            h.n_slots++;
            h.bytes += slot_bytes(c, &c->slots[i]);
        }
    return h;
}

static void put_slot(const kvant_calibrator *c, uint32_t index, uint8_t *at)
{
    const slot *s = &c->slots[index];
    const slot_head h = { index,     s->n_kv_heads, s->head_dim,
                          s->n_rows, s->random,     s->centroids != NULL };
    memcpy(at, &h, sizeof h);
    memcpy(at + sizeof h, s->block, s->bytes);
    if (s->centroids)
        memcpy(at + sizeof h + s->bytes, s->centroids,
               kvant_calibrator_centroids(c, s) * sizeof *s->centroids);
}

kvant_status kvant_calibrator_save(const kvant_calibrator *c, uint64_t key, uint64_t position,
                                   const char *path, char *err, size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!c || !path)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "calibrator or path is NULL");
    head h = make_head(c, key, position);
    uint8_t *bytes = kvant_alloc(h.bytes, 1), *at = bytes + sizeof h;
    if (!bytes)
        return kvant_fail(&error, KVANT_ERR_MEMORY,
                          "out of memory for the %zu bytes of a checkpoint", (size_t)h.bytes);
    memcpy(bytes, &h, sizeof h);
    for (uint32_t i = 0; i < 2 * c->n_layers; i++)
        if (c->slots[i].head_dim) {
            put_slot(c, i, at);
            at += slot_bytes(c, &c->slots[i]);
        }
    h.checksum = kvant_calibration_checksum(bytes, h.bytes);
    memcpy(bytes, &h, sizeof h);
    kvant_status status = kvant_write_file(path, bytes, h.bytes, &error);
    kvant_free(bytes);
    return status;
}

static kvant_status damaged(const kvant_error *error)
{
    return kvant_fail(error, KVANT_ERR_FORMAT, "the checkpoint is damaged");
}

static kvant_status check_head(const uint8_t *bytes, size_t n, const kvant_error *error)
{
    struct {
        char magic[8];
        uint64_t version, bytes;
    } h;
    memcpy(&h, bytes, sizeof h);
    if (n < KVANT_FILE_HEAD || memcmp(h.magic, MAGIC, sizeof h.magic) != 0 || h.version != VERSION)
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "this is not a checkpoint of kvant, or another version of kvant made it");
    return h.bytes == n && n >= sizeof(head) ? KVANT_OK : damaged(error);
}

/* Reads a slot: its head, then as many bytes as its dimensions need. Moves *at to its end. */
static kvant_status get_slot(kvant_calibrator *c, const uint8_t **at, const uint8_t *end,
                             const kvant_error *error)
{
    slot_head h;
    if ((size_t)(end - *at) < sizeof h)
        return damaged(error);
    memcpy(&h, *at, sizeof h);
    if (h.index >= 2 * KVANT_CALIBRATION_MAX_LAYERS || h.n_kv_heads < 1 || h.head_dim < 1 ||
        h.n_kv_heads > KVANT_CALIBRATION_MAX_KV_HEADS || h.head_dim > KVANT_MAX_HEAD_DIM ||
        h.has_centroids > 1)
        return damaged(error);
    /* This is checked before memory is allocated: a slot has at least a sum, and for keys three
     * moments. */
    uint64_t least = h.n_kv_heads * h.head_dim * sizeof(double) *
                     (h.index % 2 == KVANT_ROLE_K ? 3 * h.head_dim : 1);
    if (least > (size_t)(end - *at))
        return damaged(error);
    KVANT_FORWARD(kvant_calibrator_grow(c, (uint32_t)h.index / 2));
    slot *s = &c->slots[h.index];
    if (s->head_dim)
        return damaged(error);
    KVANT_FORWARD(kvant_calibrator_start_slot(c, (uint32_t)h.index, (uint32_t)h.n_kv_heads,
                                              (uint32_t)h.head_dim));
    s->n_rows = h.n_rows;
    s->random = h.random;
    if (h.has_centroids) {
        s->centroids = kvant_alloc(kvant_calibrator_centroids(c, s), sizeof *s->centroids);
        KVANT_RETURN_IF(!s->centroids, KVANT_ERR_MEMORY);
    }
    if (slot_bytes(c, s) > (size_t)(end - *at))
        return damaged(error);
    const uint8_t *from = *at + sizeof h;
    *at += slot_bytes(c, s);
    memcpy(s->block, from, s->bytes);
    if (s->centroids)
        memcpy(s->centroids, from + s->bytes,
               kvant_calibrator_centroids(c, s) * sizeof *s->centroids);
    return KVANT_OK;
}

static kvant_status parse(kvant_calibrator *c, const uint8_t *bytes, size_t n, uint64_t key,
                          uint64_t *position, const kvant_error *error)
{
    head h;
    memcpy(&h, bytes, sizeof h);
    if (h.checksum != kvant_calibration_checksum(bytes, n))
        return damaged(error);
    head own = make_head(c, key, h.position);
    own.bytes = h.bytes;
    own.checksum = h.checksum;
    own.n_slots = h.n_slots;
    if (memcmp(&own, &h, sizeof h) != 0)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "the checkpoint belongs to another text, model or option");
    const uint8_t *at = bytes + sizeof h, *end = bytes + n;
    for (uint64_t i = 0; i < h.n_slots; i++)
        KVANT_FORWARD(get_slot(c, &at, end, error));
    if (at != end)
        return damaged(error);
    *position = h.position;
    return KVANT_OK;
}

kvant_status kvant_calibrator_restore(kvant_calibrator *c, uint64_t key, const char *path,
                                      uint64_t *position, char *err, size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!c || !path || !position || c->n_layers)
        return kvant_fail(
            &error, KVANT_ERR_ARGUMENT,
            "calibrator, path or position is NULL, or the calibrator already has rows");
    uint8_t *bytes;
    size_t n;
    KVANT_FORWARD(kvant_read_file(path, check_head, &bytes, &n, &error));
    kvant_status status = parse(c, bytes, n, key, position, &error);
    kvant_free(bytes);
    if (status != KVANT_OK)
        kvant_calibrator_clear(c);
    return status;
}
