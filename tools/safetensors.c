/* safetensors.c - see safetensors.h. */
#include "safetensors.h"

#include "command.h"
#include "json.h"
#include "os.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEADER ((size_t)100 << 20) /* as the reference implementation has it */
#define MAX_BYTES 9007199254740992.0   /* 2^53: beyond, readers of JSON may round offsets */

bool safetensors_begin(safetensors *s)
{
    *s = (safetensors){ .fd = -1 };
    if (os_stream_open(&s->notes) && os_stream_open(&s->entries))
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
    fputs(",", s->entries.file);
    json_string(s->entries.file, name);
    fprintf(s->entries.file, ":{\"dtype\":\"%s\",\"shape\":", type);
    write_numbers(s->entries.file, shape, n_dims);
    fputs(",\"data_offsets\":", s->entries.file);
    write_numbers(s->entries.file, offsets, 2);
    fputs("}", s->entries.file);
    return true;
}

void safetensors_note(safetensors *s, const char *key, const char *value)
{
    fputs(ftell(s->notes.file) > 0 ? "," : "", s->notes.file);
    json_string(s->notes.file, key);
    fputs(":", s->notes.file);
    json_string(s->notes.file, value);
}

/* Makes the length of the header, then the header with spaces up to a multiple of 8 bytes; to be
 * freed. NULL without memory. */
static unsigned char *make_header(safetensors *s, size_t *bytes)
{
    static const char format[] = "{\"__metadata__\":{%s}%s}";
    size_t note_bytes = 0, entry_bytes = 0;
    char *notes = os_stream_text(&s->notes, &note_bytes),
         *entries = os_stream_text(&s->entries, &entry_bytes);
    const size_t length = note_bytes + entry_bytes + sizeof format - 5,
                 padded = (length + 7) / 8 * 8;
    unsigned char *header = notes != NULL && entries != NULL ? malloc(8 + padded + 1) : NULL;
    if (header != NULL) {
        for (int i = 0; i < 8; i++)
            header[i] = (unsigned char)((uint64_t)padded >> 8 * i);
        snprintf((char *)header + 8, padded + 1, format, notes, entries);
        memset(header + 8 + length, ' ', padded - length);
        *bytes = 8 + padded;
    }
    free(notes);
    free(entries);
    return header;
}

static bool has_room(const safetensors *s, uint64_t bytes)
{
    char folder[sizeof s->path];
    double free_bytes;
    snprintf(folder, sizeof folder, "%.*s.", (int)(kvant_os_file_name(s->path) - s->path), s->path);
    if (!os_free_bytes(folder, &free_bytes))
        return complain("%s: %s", s->path, strerror(errno));
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
    if (kvant_os_is_special(path))
        return complain("cannot write %s: it is a device or a pipe; name a file", path);
    if (kvant_os_begin(path, s->beside, sizeof s->beside, &s->fd))
        return true;
    s->fd = -1;
    if (errno == EBUSY)
        return complain("cannot write %s: another process or thread is writing it", path);
    return complain("cannot write to the folder of %s: %s", path, strerror(errno));
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
         ((os_resize(s->fd, s->data_at + s->data_bytes) &&
           kvant_os_write_at(s->fd, header, bytes, 0)) ||
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
    return kvant_os_write_at(s->fd, data, bytes, s->data_at + tensor->offset + offset) ||
           cannot_write(s);
}

bool safetensors_finish(safetensors *s)
{
    const bool flushed = kvant_os_flush(s->fd);
    const int fd = s->fd;
    s->fd = -1;
    return kvant_os_finish(fd, s->path, s->beside, flushed) || cannot_write(s);
}

void safetensors_close(safetensors *s)
{
    free(os_stream_text(&s->notes, NULL));
    free(os_stream_text(&s->entries, NULL));
    if (s->fd > 0)
        kvant_os_finish(s->fd, s->path, s->beside, false);
    *s = (safetensors){ .fd = -1 };
}
