/* safetensors.c - see safetensors.h. */
#define _POSIX_C_SOURCE 200809L
#include "safetensors.h"

#include "fail.h"
#include "file_io.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define METADATA "__metadata__"
#define MAX_EXACT 9007199254740992.0 /* 2^53: cJSON's numbers are doubles */

typedef struct number_type {
    const char *name;
    uint32_t bytes;
} number_type;

static const number_type types[] = { { "F16", 2 }, { "F64", 8 }, { "I32", 4 } };

static const number_type *find_type(const char *name)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}

static bool add(uint64_t a, uint64_t b, uint64_t *sum)
{
    *sum = a + b;
    return *sum >= a;
}

static bool multiply(uint64_t a, uint64_t b, uint64_t *product)
{
    *product = a * b;
    return a == 0 || *product / a == b;
}

static bool tensor_bytes(const number_type *type, const uint64_t *shape, uint32_t n_dims, uint64_t *bytes)
{
    *bytes = type->bytes;
    for (uint32_t i = 0; i < n_dims; i++)
        if (!multiply(*bytes, shape[i], bytes))
            return false;
    return (double)*bytes <= MAX_EXACT;
}

static safetensors_tensor *append(safetensors *s)
{
    if (s->n == s->capacity) {
        const size_t capacity = s->capacity == 0 ? 64 : 2 * s->capacity;
        safetensors_tensor *larger = realloc(s->tensors, capacity * sizeof *larger);
        if (larger == NULL)
            return NULL;
        s->tensors = larger;
        s->capacity = capacity;
    }
    safetensors_tensor *t = &s->tensors[s->n++];
    *t = (safetensors_tensor){ .name = NULL };
    return t;
}

static bool ensure_header(safetensors *s)
{
    if (s->header != NULL)
        return true;
    s->fd = -1;
    s->header = cJSON_CreateObject();
    return s->header != NULL && cJSON_AddObjectToObject(s->header, METADATA) != NULL;
}

static bool describe(cJSON *entry, const safetensors_tensor *t)
{
    cJSON *shape = cJSON_AddArrayToObject(entry, "shape");
    cJSON *offsets = cJSON_AddArrayToObject(entry, "data_offsets");
    bool ok = shape != NULL && offsets != NULL && cJSON_AddStringToObject(entry, "dtype", t->type) != NULL;
    for (uint32_t i = 0; i < t->n_dims && ok; i++)
        ok = cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[i]));
    return ok && cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)t->offset)) &&
           cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(t->offset + t->bytes)));
}

bool safetensors_plan(safetensors *s, const char *name, const char *type, const uint64_t *shape, uint32_t n_dims,
                      char *err, size_t errlen)
{
    const number_type *number = find_type(type);
    uint64_t bytes = 0, end = 0;
    if (number == NULL || n_dims > SAFETENSORS_MAX_DIMS)
        return fail(err, errlen, "%s: no tensor of type %s with %lu dimensions", name, type, (unsigned long)n_dims);
    if (!tensor_bytes(number, shape, n_dims, &bytes) || !add(s->data_bytes, bytes, &end) || (double)end > MAX_EXACT)
        return fail(err, errlen, "%s: too large for a file", name);
    if (!ensure_header(s) || cJSON_GetObjectItemCaseSensitive(s->header, name) != NULL)
        return fail(err, errlen, "%s: out of memory, or added twice", name);
    cJSON *entry = cJSON_AddObjectToObject(s->header, name);
    safetensors_tensor *t = entry != NULL ? append(s) : NULL;
    if (t == NULL)
        return fail(err, errlen, "out of memory");
    t->name = entry->string;
    t->type = number->name;
    t->n_dims = n_dims;
    memcpy(t->shape, shape, n_dims * sizeof *shape);
    t->offset = s->data_bytes;
    t->bytes = bytes;
    s->data_bytes = end;
    return describe(entry, t) || fail(err, errlen, "out of memory");
}

bool safetensors_note(safetensors *s, const char *key, const char *value)
{
    return ensure_header(s) &&
           cJSON_AddStringToObject(cJSON_GetObjectItemCaseSensitive(s->header, METADATA), key, value) != NULL;
}

static bool has_room(const char *path, int fd, uint64_t bytes, char *err, size_t errlen)
{
    struct statvfs disk;
    if (fstatvfs(fd, &disk) != 0)
        return fail(err, errlen, "%s: %s", path, strerror(errno));
    const double free_bytes = (double)disk.f_bavail * (double)disk.f_frsize;
    return free_bytes >= (double)bytes || fail(err, errlen, "%s: %.1f MiB are needed, the disk has %.1f MiB left",
                                               path, (double)bytes / 1048576, free_bytes / 1048576);
}

static bool write_at(int fd, const char *path, const void *data, size_t bytes, uint64_t offset, char *err,
                     size_t errlen)
{
    return file_write_at(fd, data, bytes, offset) ||
           fail(err, errlen, "cannot write %s: %s", path, strerror(errno));
}

static bool write_header(safetensors *s, const char *json, char *err, size_t errlen)
{
    const size_t length = strlen(json), padded = (length + 7) / 8 * 8;
    unsigned char prefix[8];
    char spaces[8] = "        ";
    for (int i = 0; i < 8; i++)
        prefix[i] = (unsigned char)((uint64_t)padded >> 8 * i);
    if (padded > SAFETENSORS_MAX_HEADER)
        return fail(err, errlen, "%s: a header of %zu bytes is longer than the format allows", s->path, padded);
    s->data_at = 8 + padded;
    const uint64_t bytes = s->data_at + s->data_bytes;
    if (!has_room(s->path, s->fd, bytes, err, errlen))
        return false;
    if (ftruncate(s->fd, (off_t)bytes) != 0)
        return fail(err, errlen, "cannot write %s: %s", s->beside, strerror(errno));
    return write_at(s->fd, s->beside, prefix, sizeof prefix, 0, err, errlen) &&
           write_at(s->fd, s->beside, json, length, 8, err, errlen) &&
           write_at(s->fd, s->beside, spaces, padded - length, 8 + length, err, errlen);
}

bool safetensors_create(safetensors *s, const char *path, char *err, size_t errlen)
{
    if (!ensure_header(s))
        return fail(err, errlen, "out of memory");
    if (snprintf(s->path, sizeof s->path, "%s", path) >= (int)sizeof s->path)
        return fail(err, errlen, "the path is too long");
    snprintf(s->beside, sizeof s->beside, "%s.XXXXXX", path);
    s->fd = mkstemp(s->beside);
    if (s->fd < 0) {
        s->beside[0] = 0;
        return fail(err, errlen, "cannot write beside %s: %s", path, strerror(errno));
    }
    const mode_t mask = umask(0);
    umask(mask);
    fchmod(s->fd, 0666 & ~mask); /* mkstemp's files are for their owner alone */
    char *json = cJSON_PrintUnformatted(s->header);
    const bool ok = json != NULL ? write_header(s, json, err, errlen) : fail(err, errlen, "out of memory");
    cJSON_free(json);
    return ok;
}

static bool inside(const safetensors_tensor *t, uint64_t offset, size_t bytes)
{
    return offset <= t->bytes && bytes <= t->bytes - offset;
}

bool safetensors_write(safetensors *s, const safetensors_tensor *tensor, uint64_t offset, const void *data,
                       size_t bytes, char *err, size_t errlen)
{
    if (!inside(tensor, offset, bytes))
        return fail(err, errlen, "%s has %llu bytes", tensor->name, (unsigned long long)tensor->bytes);
    return write_at(s->fd, s->beside, data, bytes, s->data_at + tensor->offset + offset, err, errlen);
}

bool safetensors_finish(safetensors *s, char *err, size_t errlen)
{
    const bool flushed = fsync(s->fd) == 0;
    const int fd = s->fd;
    s->fd = -1;
    if (close(fd) != 0 || !flushed || rename(s->beside, s->path) != 0)
        return fail(err, errlen, "cannot write %s: %s", s->path, strerror(errno));
    s->beside[0] = 0;
    return true;
}

void safetensors_close(safetensors *s)
{
    if (s->fd > 0)
        close(s->fd);
    if (s->beside[0] != 0)
        unlink(s->beside);
    cJSON_Delete(s->header);
    free(s->tensors);
    *s = (safetensors){ .fd = -1 };
}
