/* format.c - writes the settings file of settings.md. Equal layers share a line, so that a file
 * shows the differences. */
#include "settings_internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/fnv.h"

/* Text that grows. When memory is short, text stays NULL and the rest is dropped. */
typedef struct buffer {
    char *text;
    size_t n, room;
    bool failed;
} buffer;

static void grow(buffer *b, size_t more)
{
    if (b->failed || b->room - b->n > more)
        return;
    size_t room = 2 * b->room + more + 1;
    char *larger = kvant_alloc(room, 1);
    if (larger && b->n)
        memcpy(larger, b->text, b->n);
    kvant_free(b->text);
    b->failed = !larger;
    b->text = larger;
    b->room = room;
}

enum { MAX_PIECE = 2048 }; /* longer than any piece; the longest is a path of 1023 bytes */

static void put(buffer *b, const char *format, ...) KVANT_PRINTF(2, 3);

static void put(buffer *b, const char *format, ...)
{
    va_list args;
    grow(b, MAX_PIECE);
    if (b->failed)
        return;
    va_start(args, format);
    b->n += (size_t)vsnprintf(b->text + b->n, MAX_PIECE, format, args);
    va_end(args);
}

/* Whether all kv heads of entry i have the codec of spec number `index` of `entry`. */
static bool whole_layer(const kvant_settings *s, uint32_t i, const kvant_settings_entry *entry,
                        uint32_t index)
{
    return i < 2 * s->n_layers && s->entries[i].n_specs == 1 &&
           kvant_settings_same(&s->entries[i], 0, entry, index);
}

/* Writes a layer whose kv heads differ: N/H for each kv head H that has the codec. */
static const char *put_heads(buffer *b, const kvant_settings *s, uint32_t i,
                             const kvant_settings_entry *entry, uint32_t index,
                             const char *separator)
{
    for (uint32_t head = 0; s->entries[i].n_specs > 1 && head < s->entries[i].n_specs; head++)
        if (kvant_settings_same(&s->entries[i], head, entry, index)) {
            put(b, "%s%" PRIu32 "/%" PRIu32, separator, i / 2, head);
            separator = ",";
        }
    return separator;
}

/* Writes a line with spec number `index` of entry i and all layers and kv heads that share it. It
 * is the first of them. */
static void put_codec(buffer *b, const kvant_settings *s, uint32_t i, uint32_t index)
{
    const kvant_settings_entry *entry = &s->entries[i];
    const char *separator = i % 2 ? "v " : "k ";
    for (uint32_t j = i; j < 2 * s->n_layers; j += 2) {
        uint32_t first = j;
        if (!whole_layer(s, j, entry, index)) {
            separator = put_heads(b, s, j, entry, index, separator);
            continue;
        }
        while (whole_layer(s, j + 2, entry, index))
            j += 2;
        put(b, "%s%" PRIu32, separator, first / 2);
        if (j > first)
            put(b, "-%" PRIu32, j / 2);
        separator = ",";
    }
    put(b, " %" PRIu32 "x%" PRIu32 " %s\n", entry->n_kv_heads, entry->head_dim,
        entry->specs[index]);
}

kvant_status kvant_settings_format(const kvant_settings *s, char **text, size_t *n,
                                   const kvant_error *error)
{
    buffer b = { .text = NULL };
    put(&b, "kvant-settings %u\n", KVANT_SETTINGS_VERSION);
    if (s->model[0])
        put(&b, "model %s\n", s->model);
    if (s->model_fingerprint)
        put(&b, "fingerprint %016" PRIx64 "\n", s->model_fingerprint);
    put(&b, "layers %" PRIu32 "\n", s->n_layers);
    if (s->calibration[0])
        put(&b, "calibration %016" PRIx64 " %s\n", s->calibration_checksum, s->calibration);
    for (uint32_t role = 0; role < 2; role++)
        for (uint32_t i = role; i < 2 * s->n_layers; i += 2)
            for (uint32_t index = 0; index < s->entries[i].n_specs; index++)
                if (kvant_settings_is_first(s, i, index))
                    put_codec(&b, s, i, index);
    if (!b.failed)
        put(&b, KVANT_SETTINGS_CHECK "%016" PRIx64 "\n", kvant_fnv1a(KVANT_FNV_START, b.text, b.n));
    *text = b.text;
    *n = b.n;
    if (b.failed)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for a settings file");
    if (b.n <= KVANT_SETTINGS_MAX_BYTES)
        return KVANT_OK;
    kvant_free(b.text);
    return kvant_fail(error, KVANT_ERR_ARGUMENT,
                      "the settings file would have %zu bytes, more than the format allows", b.n);
}
