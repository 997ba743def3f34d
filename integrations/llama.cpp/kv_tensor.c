/* kv_tensor.c - see kv_tensor.h. */
#define _GNU_SOURCE /* madvise */

#include "kv_tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "codec_cache.h"
#include "ggml_api.h"
#include "log.h"

/* Head dimensions worth reserving for when none is given: real models use multiples of 8 from 32 on.
 * Smaller ones would reserve for metadata that nobody stores. */
#define MIN_HEAD_DIM 32u
#define HEAD_DIM_STEP 8u

/* Rows are translated in batches that fit a cache. */
#define BATCH_CELLS 64u

bool kvp_kv_name(const char *name)
{
    if (strncmp(name, "cache_k_l", 9) != 0 && strncmp(name, "cache_v_l", 9) != 0)
        return false;
    name += 9;
    return name[0] != '\0' && name[strspn(name, "0123456789")] == '\0';
}

bool kvp_kv_shape_read(const abi_tensor *tensor, kvp_kv_shape *shape, char *err, size_t errlen)
{
    if (!kvp_kv_name(tensor->name)) {
        snprintf(err, errlen,
                 "the model keeps state in %s, which is not a plain KV cache; recurrent, hybrid and "
                 "indexed models are not supported, run them without --device KVANT",
                 tensor->name);
        return false;
    }
    if (tensor->type != ABI_TYPE_F16) {
        snprintf(err, errlen,
                 "the cache type is not f16; kvant compresses what llama.cpp takes for an f16 cache: "
                 "set -ctk f16 -ctv f16 and choose the codecs with KVANT_K and KVANT_V");
        return false;
    }
    if (tensor->ne[3] != 1 || tensor->ne[0] <= 0 || tensor->ne[0] > UINT32_MAX || tensor->ne[1] <= 0 ||
        tensor->ne[1] > UINT32_MAX || tensor->ne[2] <= 0 || tensor->ne[2] > UINT32_MAX) {
        snprintf(err, errlen, "%s has an unexpected shape", tensor->name);
        return false;
    }
    *shape = (kvp_kv_shape){
        .role = tensor->name[6] == 'k' ? KVANT_ROLE_K : KVANT_ROLE_V,
        .row = (uint32_t)tensor->ne[0],
        .n_cells = (uint32_t)tensor->ne[1],
        .n_streams = (uint32_t)tensor->ne[2],
    };
    return true;
}

static kvant_cells_config cells_config(const kvp_kv_shape *shape, const kvant_codec *codec, uint32_t head_dim)
{
    return (kvant_cells_config){
        .size = sizeof(kvant_cells_config),
        .codec = codec,
        .n_kv_heads = shape->row / head_dim,
        .n_streams = shape->n_streams,
        .n_cells = shape->n_cells,
        .n_open_groups = 0,
    };
}

/* Bytes for one head_dim, 0 with a reason when the codec cannot serve it. */
static size_t bytes_for(const kvp_kv_shape *shape, const kvp_settings *settings, uint32_t head_dim, char *err,
                        size_t errlen)
{
    const kvant_codec *codec =
        kvp_codec_get(settings->spec[shape->role], head_dim, shape->role, settings->seed, err, errlen);
    kvant_cells_config config;
    size_t bytes;

    if (codec == NULL)
        return 0;
    config = cells_config(shape, codec, head_dim);
    bytes = kvant_cells_bytes(&config);
    if (bytes == 0)
        snprintf(err, errlen, "%u cells x %u streams of %u numbers are too many", shape->n_cells, shape->n_streams,
                 shape->row);
    return bytes;
}

size_t kvp_kv_reserve(const kvp_kv_shape *shape, const kvp_settings *settings, char *err, size_t errlen)
{
    uint32_t first = settings->head_dim ? settings->head_dim : MIN_HEAD_DIM;
    uint32_t last = settings->head_dim ? settings->head_dim : KVANT_MAX_HEAD_DIM;
    size_t most = 0;

    snprintf(err, errlen, "no head_dim divides rows of %u numbers; set KVANT_HEAD_DIM to the model's (up to %u)",
             shape->row, KVANT_MAX_HEAD_DIM);
    for (uint32_t head_dim = first; head_dim <= last; head_dim += HEAD_DIM_STEP) {
        size_t bytes = shape->row % head_dim ? 0 : bytes_for(shape, settings, head_dim, err, errlen);
        if (bytes > most)
            most = bytes;
    }
    return most;
}

kvp_kv *kvp_kv_create(const char *name, const kvp_kv_shape *shape, const kvp_settings *settings, void *memory,
                      size_t reserved)
{
    kvp_kv *kv = calloc(1, sizeof(*kv));

    if (kv == NULL)
        return NULL;
    snprintf(kv->name, sizeof(kv->name), "%s", name);
    kv->shape = *shape;
    kv->settings = *settings;
    kv->memory = memory;
    kv->reserved = reserved;
    return kv;
}

void kvp_kv_free(kvp_kv *kv)
{
    if (kv == NULL)
        return;
    kvant_cells_free(&kv->cells);
    free(kv);
}

static bool create_cells(kvp_kv *kv, uint32_t head_dim, char *err, size_t errlen)
{
    const kvp_settings *settings = &kv->settings;
    size_t bytes = bytes_for(&kv->shape, settings, head_dim, err, errlen);
    kvant_cells_config config;
    kvant_status status;

    if (bytes == 0)
        return false;
    if (bytes > kv->reserved) {
        snprintf(err, errlen, "head_dim %u was not reserved for; set KVANT_HEAD_DIM=%u", head_dim, head_dim);
        return false;
    }
    config = cells_config(
        &kv->shape,
        kvp_codec_get(settings->spec[kv->shape.role], head_dim, kv->shape.role, settings->seed, err, errlen),
        head_dim);
    status = kvant_cells_create(&config, kv->memory, &kv->cells);
    if (status != KVANT_OK)
        snprintf(err, errlen, "%s", kvant_strerror(status));
    return status == KVANT_OK;
}

/* What was bound, in the user's terms. */
static void note_bound(const kvp_kv *kv)
{
    kvant_cells_config config = kvant_cells_get_config(kv->cells);
    kvant_codec_info info = { .size = sizeof(info) };

    if (kvant_codec_get_info(config.codec, &info) == KVANT_OK)
        kvp_note("%s: %s, head_dim %u, %u kv heads, %u streams of %u cells, %.3f bits", kv->name, info.spec,
                 kv->head_dim, config.n_kv_heads, config.n_streams, config.n_cells, info.true_bits);
}

bool kvp_kv_bind(kvp_kv *kv, uint32_t head_dim)
{
    char err[512] = "";

    if (kv->head_dim == head_dim)
        return true;
    if (kv->bind_failed)
        return false;
    if (kv->head_dim != 0)
        snprintf(err, sizeof(err), "already bound to head_dim %u", kv->head_dim);
    else if (kv->settings.head_dim != 0 && kv->settings.head_dim != head_dim)
        snprintf(err, sizeof(err), "KVANT_HEAD_DIM says %u", kv->settings.head_dim);
    else if (head_dim == 0 || kv->shape.row % head_dim != 0)
        snprintf(err, sizeof(err), "it does not divide rows of %u numbers", kv->shape.row);
    else if (create_cells(kv, head_dim, err, sizeof(err))) {
        kv->head_dim = head_dim;
        note_bound(kv);
        return true;
    }
    kv->bind_failed = true;
    kvp_error("%s cannot serve attention with head_dim %u: %s", kv->name, head_dim, err);
    return false;
}

size_t kvp_kv_row_bytes(const kvp_kv *kv)
{
    return (size_t)kv->shape.row * sizeof(uint16_t);
}

size_t kvp_kv_stream_bytes(const kvp_kv *kv)
{
    return kvp_kv_row_bytes(kv) * kv->shape.n_cells;
}

static bool in_range(const kvp_kv *kv, size_t offset, size_t size)
{
    size_t total = kvp_kv_stream_bytes(kv) * kv->shape.n_streams;

    return offset <= total && size <= total - offset;
}

/* A run of cells of one stream, at most a batch, that covers the start of the nominal bytes [offset, offset
 * + size): which cells, and which of their bytes. */
struct batch {
    size_t cell, n_cells;
    size_t skip, bytes;
};

static struct batch next_batch(const kvp_kv *kv, size_t offset, size_t size)
{
    size_t row = kvp_kv_row_bytes(kv), cell = offset / row, skip = offset % row;
    size_t left_in_stream = kv->shape.n_cells - cell % kv->shape.n_cells;
    size_t n = (skip + size + row - 1) / row;
    struct batch batch = { .cell = cell, .skip = skip };

    n = n < left_in_stream ? n : left_in_stream;
    batch.n_cells = n < BATCH_CELLS ? n : BATCH_CELLS;
    batch.bytes = batch.n_cells * row - skip;
    if (batch.bytes > size)
        batch.bytes = size;
    return batch;
}

/* Room for one batch as floats and as fp16. */
struct scratch {
    float *rows;
    uint16_t *halves;
};

static bool scratch_create(const kvp_kv *kv, struct scratch *scratch)
{
    size_t n = (size_t)BATCH_CELLS * kv->shape.row;

    scratch->rows = malloc(n * (sizeof(float) + sizeof(uint16_t)));
    if (scratch->rows == NULL) {
        kvp_error("%s: %s", kv->name, kvant_strerror(KVANT_ERR_MEMORY));
        return false;
    }
    scratch->halves = (uint16_t *)(scratch->rows + n);
    return true;
}

static bool decode_batch(const kvp_kv *kv, const struct batch *batch, struct scratch *scratch)
{
    kvant_status status = kvant_cells_read(kv->cells, batch->cell, batch->n_cells, scratch->rows, kv->shape.row);

    if (status != KVANT_OK) {
        kvp_error("%s: cannot read cells %zu to %zu: %s", kv->name, batch->cell, batch->cell + batch->n_cells - 1,
                  kvant_strerror(status));
        return false;
    }
    kvp_api.fp32_to_fp16_row(scratch->rows, scratch->halves, (int64_t)batch->n_cells * kv->shape.row);
    return true;
}

static bool encode_batch(kvp_kv *kv, const struct batch *batch, struct scratch *scratch)
{
    int64_t index[BATCH_CELLS];
    kvant_status status;

    for (size_t i = 0; i < batch->n_cells; i++)
        index[i] = (int64_t)(batch->cell + i);
    kvp_api.fp16_to_fp32_row(scratch->halves, scratch->rows, (int64_t)batch->n_cells * kv->shape.row);
    status = kvant_cells_write(kv->cells, index, batch->n_cells, scratch->rows, kv->shape.row, 1);
    if (status != KVANT_OK)
        kvp_error("%s: cannot store cells %zu to %zu: %s", kv->name, batch->cell, batch->cell + batch->n_cells - 1,
                  kvant_strerror(status));
    return status == KVANT_OK;
}

bool kvp_kv_read(const kvp_kv *kv, size_t offset, size_t size, void *out)
{
    struct scratch scratch;
    bool ok = true;

    if (!in_range(kv, offset, size)) {
        kvp_error("%s: read of %zu bytes at %zu is outside of the tensor", kv->name, size, offset);
        return false;
    }
    if (kv->cells == NULL) {
        memset(out, 0, size); /* unbound, so never written */
        return true;
    }
    if (!scratch_create(kv, &scratch))
        return false;
    while (ok && size > 0) {
        struct batch batch = next_batch(kv, offset, size);
        ok = decode_batch(kv, &batch, &scratch);
        if (ok)
            memcpy(out, (const char *)scratch.halves + batch.skip, batch.bytes);
        out = (char *)out + batch.bytes;
        offset += batch.bytes;
        size -= batch.bytes;
    }
    free(scratch.rows);
    return ok;
}

bool kvp_kv_write(kvp_kv *kv, size_t offset, size_t size, const void *data)
{
    struct scratch scratch;
    bool ok = true;

    if (!in_range(kv, offset, size)) {
        kvp_error("%s: write of %zu bytes at %zu is outside of the tensor", kv->name, size, offset);
        return false;
    }
    if (kv->cells == NULL) {
        kvp_error("%s: head_dim is not known yet, nothing was stored; set KVANT_HEAD_DIM to the model's", kv->name);
        return false;
    }
    if (!scratch_create(kv, &scratch))
        return false;
    while (ok && size > 0) {
        struct batch batch = next_batch(kv, offset, size);
        bool whole = batch.bytes == batch.n_cells * kvp_kv_row_bytes(kv);
        ok = whole || decode_batch(kv, &batch, &scratch);
        if (ok) {
            memcpy((char *)scratch.halves + batch.skip, data, batch.bytes);
            ok = encode_batch(kv, &batch, &scratch);
        }
        data = (const char *)data + batch.bytes;
        offset += batch.bytes;
        size -= batch.bytes;
    }
    free(scratch.rows);
    return ok;
}

/* Whole pages of the system inside the tensor's memory are given back, which zeroes them; the rest is
 * zeroed. */
static void release_memory(const kvp_kv *kv)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)kv->memory, last = first + kv->reserved;
    uintptr_t inner_first = (first + page - 1) / page * page, inner_last = last / page * page;

    if (inner_first >= inner_last || madvise((void *)inner_first, inner_last - inner_first, MADV_DONTNEED) != 0) {
        memset(kv->memory, 0, kv->reserved);
        return;
    }
    memset((void *)first, 0, inner_first - first);
    memset((void *)inner_last, 0, last - inner_last);
}

void kvp_kv_clear(kvp_kv *kv)
{
    char err[512] = "";

    if (kv->cells == NULL)
        return;
    kvant_cells_free(&kv->cells);
    release_memory(kv);
    if (!create_cells(kv, kv->head_dim, err, sizeof(err))) {
        kvp_error("%s: cannot start over after clearing: %s", kv->name, err);
        kv->head_dim = 0;
    }
}

bool kvp_kv_copy_stream(const kvp_kv *from, uint32_t from_stream, kvp_kv *to, uint32_t to_stream)
{
    if (from->cells == NULL)
        return to->cells == NULL;
    if (to->cells == NULL && !kvp_kv_bind(to, from->head_dim))
        return false;
    return kvant_cells_copy_stream(from->cells, from_stream, to->cells, to_stream) == KVANT_OK;
}
