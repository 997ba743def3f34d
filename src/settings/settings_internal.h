/* settings_internal.h - settings in memory, shared by settings.c, parse.c and format.c. */
#pragma once

#include <kvant/settings.h>

#include "../base/error.h"
#include "../codec/spec.h"

#define KVANT_SETTINGS_VERSION 1u
#define KVANT_SETTINGS_MAX_NAME 255u
#define KVANT_SETTINGS_CHECK                                                                       \
    "check " /* what the last line begins with: FNV-1a of all bytes before it follows */

typedef struct kvant_settings_entry {
    uint32_t n_kv_heads, head_dim; /* 0: nothing is known of this layer yet */
    uint32_t n_specs;              /* 1: all kv heads have the same; else n_kv_heads */
    const char **specs;            /* with the text behind them; NULL: not given yet */
} kvant_settings_entry;

struct kvant_settings {
    char model[KVANT_SETTINGS_MAX_NAME + 1];
    uint64_t model_fingerprint;
    char calibration[KVANT_SETTINGS_MAX_PATH + 1]; /* "": none */
    uint64_t calibration_checksum;
    uint32_t n_layers, n_specs;    /* n_specs: of all entries */
    kvant_settings_entry *entries; /* 2 n_layers, NULL before n_layers is known */
    char *folder;                  /* of the file they came from, with its slash; NULL: from none */
};

/* Room for the entries of n_layers, none of them filled. */
kvant_status kvant_settings_set_layers(kvant_settings *s, uint32_t n_layers,
                                       const kvant_error *error);

/* Limits of an entry's fields and the grammar of its spec. */
kvant_status kvant_settings_check_entry(const kvant_settings_layer *layer,
                                        const kvant_error *error);

/* Gives an empty entry its shape and room for n_specs (1 or n_kv_heads) of them. */
kvant_status kvant_settings_open_entry(kvant_settings *s, kvant_settings_entry *entry,
                                       uint32_t n_kv_heads, uint32_t head_dim, uint32_t n_specs,
                                       const kvant_error *error);

/* The one way to give a spec: it is copied. */
void kvant_settings_set_spec(kvant_settings_entry *entry, uint32_t index, const char *spec);

/* kv heads that were given the same become one spec: there is one way to say a thing. */
void kvant_settings_close_entry(kvant_settings *s, kvant_settings_entry *entry);

/* Whether spec number a of one entry and b of another are the same codec for the same shape. */
bool kvant_settings_same(const kvant_settings_entry *x, uint32_t a, const kvant_settings_entry *y,
                         uint32_t b);

/* Whether no spec before number index of entry i is the same in this role. */
bool kvant_settings_is_first(const kvant_settings *s, uint32_t i, uint32_t index);

/* Fills s, which is zeroed, from a file's n bytes; on an error what s holds is to be freed. */
kvant_status kvant_settings_parse(kvant_settings *s, const char *text, size_t n,
                                  const kvant_error *error);

/* The file's bytes (from kvant_alloc). */
kvant_status kvant_settings_format(const kvant_settings *s, char **text, size_t *n,
                                   const kvant_error *error);
