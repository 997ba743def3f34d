/* safetensors.c - see safetensors.h. */
#define _POSIX_C_SOURCE 200809L
#include "safetensors.h"

#include "command.h"
#include "file_io.h"
#include "json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MAX_HEADER ((size_t)100 << 20) /* as the reference implementation has it */
#define MAX_BYTES 9007199254740992.0   /* 2^53: beyond, readers of JSON may round offsets */

bool safetensors_begin(safetensors *s)
{
    *s = (safetensors){ .fd = -1 };
    s->notes = open_memstream(&s->note_text, &s->note_bytes);
    s->entries = open_memstream(&s->entry_text, &s->entry_bytes);
    if (s->notes != NULL && s->entries != NULL)
        return true;
    return complain("out of memory for a safetensors file");
}

static void write_numbers(FILE *out, const uint64_t *numbers, size_t n)
{
    for (size_t i = 0; i < n; i++)
        fprintf(out, "%s%" PRIu64, i > 0 ? "," : "[", numbers[i]);
    fputs(n > 0 ? "]" : "[]", out);
}

bool safetensors_plan(safetensors *s, const char *name, const char *type, uint32_t number_bytes,
                      const uint64_t *shape, uint32_t n_dims, safetensors_tensor *tensor)
{
    double size = number_bytes;
    *tensor = (safetensors_tensor){ .offset = s->data_bytes, .bytes = number_bytes };
    for (uint32_t i = 0; i < n_dims; i++) {
        size *= (double)shape[i];
        tensor->bytes *= shape[i];
    }
    if ((double)s->data_bytes + size > MAX_BYTES)
        return complain("%s: the tensor is too large for a file", name);
    s->data_bytes += tensor->bytes;
    const uint64_t offsets[2] = { tensor->offset, s->data_bytes };
    fputs(",", s->entries);
    json_string(s->entries, name);
    fprintf(s->entries, ":{\"dtype\":\"%s\",\"shape\":", type);
    write_numbers(s->entries, shape, n_dims);
    fputs(",\"data_offsets\":", s->entries);
    write_numbers(s->entries, offsets, 2);
    fputs("}", s->entries);
    return true;
}

void safetensors_note(safetensors *s, const char *key, const char *value)
{
    fputs(ftell(s->notes) > 0 ? "," : "", s->notes);
    json_string(s->notes, key);
    fputs(":", s->notes);
    json_string(s->notes, value);
}

static bool close_stream(FILE **stream)
{
    const bool ok = *stream != NULL && !ferror(*stream);
    const bool closed = *stream != NULL && fclose(*stream) == 0;
    *stream = NULL;
    return ok && closed;
}

/* Makes the length of the header, then the header with spaces up to a multiple of 8 bytes; to be
 * freed. NULL without memory. */
static unsigned char *make_header(safetensors *s, size_t *bytes)
{
    static const char format[] = "{\"__metadata__\":{%s}%s}";
    const bool planned = close_stream(&s->notes), complete = close_stream(&s->entries) && planned;
    const size_t length = s->note_bytes + s->entry_bytes + sizeof format - 5,
                 padded = (length + 7) / 8 * 8;
    unsigned char *header = complete ? malloc(8 + padded + 1) : NULL;
    if (header == NULL)
        return NULL;
    for (int i = 0; i < 8; i++)
        header[i] = (unsigned char)((uint64_t)padded >> 8 * i);
    snprintf((char *)header + 8, padded + 1, format, s->note_text, s->entry_text);
    memset(header + 8 + length, ' ', padded - length);
    *bytes = 8 + padded;
    return header;
}

static bool has_room(const safetensors *s, uint64_t bytes)
{
    struct statvfs disk;
    if (fstatvfs(s->fd, &disk) != 0)
        return complain("%s: %s", s->path, strerror(errno));
    const double free_bytes = (double)disk.f_bavail * (double)disk.f_frsize;
    return free_bytes >= (double)bytes ||
           complain("%s: the file needs %.1f MiB, but the disk has only %.1f MiB left", s->path,
                    (double)bytes / 1048576, free_bytes / 1048576);
}

static bool cannot_write(const safetensors *s)
{
    return complain("cannot write %s: %s", s->path, strerror(errno));
}

static bool open_beside(safetensors *s, const char *path)
{
    if (snprintf(s->path, sizeof s->path, "%s", path) >= (int)sizeof s->path)
        return complain("the path %.64s... is too long", path);
    snprintf(s->beside, sizeof s->beside, "%s.XXXXXX", path);
    s->fd = mkstemp(s->beside);
    if (s->fd < 0) {
        s->beside[0] = 0;
        return complain("cannot write to the folder of %s: %s", path, strerror(errno));
    }
    const mode_t mask = umask(0);
    umask(mask);
    fchmod(s->fd, 0666 & ~mask); /* mkstemp's files are for their owner alone */
    return true;
}

bool safetensors_create(safetensors *s, const char *path)
{
    size_t bytes = 0;
    unsigned char *header = make_header(s, &bytes);
    if (header == NULL)
        return complain("out of memory for a safetensors file");
    s->data_at = bytes;
    bool ok = bytes <= MAX_HEADER ||
              complain("%s: a header of %zu bytes is longer than the format allows", path, bytes);
    ok = ok && open_beside(s, path) && has_room(s, s->data_at + s->data_bytes) &&
         ((ftruncate(s->fd, (off_t)(s->data_at + s->data_bytes)) == 0 &&
           file_write_at(s->fd, header, bytes, 0)) ||
          cannot_write(s));
    free(header);
    return ok;
}

bool safetensors_write(safetensors *s, const safetensors_tensor *tensor, uint64_t offset,
                       const void *data, size_t bytes)
{
    if (offset > tensor->bytes || bytes > tensor->bytes - offset)
        return complain("%s: more data than the %" PRIu64 " bytes of the tensor", s->path,
                        tensor->bytes);
    return file_write_at(s->fd, data, bytes, s->data_at + tensor->offset + offset) ||
           cannot_write(s);
}

bool safetensors_finish(safetensors *s)
{
    const bool flushed = fsync(s->fd) == 0;
    const int fd = s->fd;
    s->fd = -1;
    if (close(fd) != 0 || !flushed || rename(s->beside, s->path) != 0)
        return cannot_write(s);
    s->beside[0] = 0;
    return true;
}

void safetensors_close(safetensors *s)
{
    close_stream(&s->notes);
    close_stream(&s->entries);
    free(s->note_text);
    free(s->entry_text);
    if (s->fd > 0)
        close(s->fd);
    if (s->beside[0] != 0)
        unlink(s->beside);
    *s = (safetensors){ .fd = -1 };
}
