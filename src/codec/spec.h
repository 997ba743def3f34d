/* spec.h - splits codec spec strings, `name[-bits][:key=value,...]`, into pieces; knows no codec
 * and no option. options.h reads values. */
#pragma once

#include <stdbool.h>

#include "../base/error.h"

/* A parsed spec is a struct without allocations. Longer specs, and specs with more options, are
 * refused. */
#define KVANT_SPEC_MAX_LENGTH 255
#define KVANT_SPEC_MAX_OPTIONS 16

typedef struct kvant_spec_option {
    const char *key;
    const char *value; /* NULL for a flag, "key" alone */
    bool used;
} kvant_spec_option;

typedef struct kvant_spec {
    char text[KVANT_SPEC_MAX_LENGTH + 1]; /* the pieces point in here */
    const char *name;
    const char *variant; /* what follows the first dash of the name, or NULL */
    uint32_t n_options;
    kvant_spec_option options[KVANT_SPEC_MAX_OPTIONS];
} kvant_spec;

/* Splits text. KVANT_ERR_SPEC with a message for anything that does not follow the grammar. */
kvant_status kvant_spec_parse(const char *text, kvant_spec *spec, const kvant_error *error);

/* *bits = the variant as a number of bits from min to max; KVANT_ERR_SPEC otherwise, or when it is
 * absent. */
kvant_status kvant_spec_bits(const kvant_spec *spec, uint32_t min, uint32_t max, uint32_t *bits,
                             const kvant_error *error);

/* Digits to a number; false for anything else and for more than 6 digits (no option is that
 * large). */
bool kvant_spec_number(const char *text, uint32_t *number);

/* The option of this key, which counts as read from now on, or NULL. */
const kvant_spec_option *kvant_spec_take_option(kvant_spec *spec, const char *key);

/* KVANT_ERR_SPEC when the spec has an option that nobody has read; valid names the options that
 * exist. */
kvant_status kvant_spec_finish(const kvant_spec *spec, const char *valid, const kvant_error *error);
