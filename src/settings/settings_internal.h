/* settings_internal.h - settings in memory, shared by settings.c, parse.c and format.c. */
#pragma once

#include <kvant/settings.h>

#include "../base/error.h"
#include "../codec/spec.h"

#define KVANT_SETTINGS_VERSION 1u    /* of the file (settings.md) */
#define KVANT_SETTINGS_MAX_NAME 255u /* bytes of a model's name in the file */
/* The last line begins with this text. After it comes the FNV-1a of all bytes before the line. */
#define KVANT_SETTINGS_CHECK "check "

typedef struct kvant_settings_entry {
    uint32_t n_kv_heads, head_dim; /* 0: the layer is not known yet */
    uint32_t n_specs;              /* 1: all kv heads share a spec; otherwise n_kv_heads */
    const char **specs;            /* the text follows in the same memory; NULL: not set yet */
} kvant_settings_entry;

struct kvant_settings {
    char model[KVANT_SETTINGS_MAX_NAME + 1];
    uint64_t model_fingerprint;
    char calibration[KVANT_SETTINGS_MAX_PATH + 1]; /* "": none */
    uint64_t calibration_checksum;
    uint32_t n_layers, n_specs;    /* n_specs: the sum over all entries */
    kvant_settings_entry *entries; /* 2 n_layers; NULL before n_layers is known */
    char *folder;                  /* of the file, with its slash; NULL: not from a file */
};

/* Allocates empty entries for n_layers layers. */
kvant_status kvant_settings_set_layers(kvant_settings *s, uint32_t n_layers,
                                       const kvant_error *error);

/* Checks the limits of an entry's fields and the grammar of its specs. */
kvant_status kvant_settings_check_entry(const kvant_settings_layer *layer,
                                        const kvant_error *error);

/* Gives an empty entry its shape, and room for n_specs specs (1 or n_kv_heads). */
kvant_status kvant_settings_open_entry(kvant_settings *s, kvant_settings_entry *entry,
                                       uint32_t n_kv_heads, uint32_t head_dim, uint32_t n_specs,
                                       const kvant_error *error);

/* Sets a spec, which is copied. Every spec is set by this function. */
void kvant_settings_set_spec(kvant_settings_entry *entry, uint32_t index, const char *spec);

/* Reduces equal specs of all kv heads to one spec, so that equal settings have equal files. */
void kvant_settings_close_entry(kvant_settings *s, kvant_settings_entry *entry);

/* Whether spec a of one entry and spec b of another name the same codec for the same shape. */
bool kvant_settings_same(const kvant_settings_entry *x, uint32_t a, const kvant_settings_entry *y,
                         uint32_t b);

/* Whether no spec of this role before spec `index` of entry i is the same. */
bool kvant_settings_is_first(const kvant_settings *s, uint32_t i, uint32_t index);

/* Fills s, which is zeroed, from the n bytes of a file. The caller frees the content of s, also
 * after an error. */
kvant_status kvant_settings_parse(kvant_settings *s, const char *text, size_t n,
                                  const kvant_error *error);

/* Writes the file's bytes to *text (from kvant_alloc). */
kvant_status kvant_settings_format(const kvant_settings *s, char **text, size_t *n,
                                   const kvant_error *error);
