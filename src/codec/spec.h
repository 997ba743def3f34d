/* spec.h - splits codec spec strings, `name[-bits][:key=value,...]`, into pieces; knows no codec.
 *
 * The codec that owns an option checks its value with the helpers below, so every message can name
 * the valid values. */
#ifndef KVANT_CODEC_SPEC_H
#define KVANT_CODEC_SPEC_H

#include <stdbool.h>

#include "../base/error.h"

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

/* *value = index of the option's value in choices (a NULL-terminated list), or keeps *value when it
 * is absent. */
kvant_status kvant_spec_choice(kvant_spec *spec, const char *key, const char *const *choices, int *value,
                               const kvant_error *error);

/* The same for a key that may stand alone, which means the first choice. */
kvant_status kvant_spec_flag_or_choice(kvant_spec *spec, const char *key, const char *const *choices, int *value,
                                       const kvant_error *error);

/* *value = the option's number, or keeps *value when it is absent; KVANT_ERR_SPEC unless min <=
 * value <= max. */
kvant_status kvant_spec_number(kvant_spec *spec, const char *key, uint32_t min, uint32_t max, uint32_t *value,
                               const kvant_error *error);

/* The same for an option of two numbers with a dot between them, as in split=5.3; each from 0 to
 * its maximum. */
kvant_status kvant_spec_pair(kvant_spec *spec, const char *key, uint32_t max_first, uint32_t max_second,
                             uint32_t *first, uint32_t *second, const kvant_error *error);

/* *value = the option's number of up to 64 bits, or keeps *value when it is absent. */
kvant_status kvant_spec_seed(kvant_spec *spec, const char *key, uint64_t *value, const kvant_error *error);

/* *value = whether the flag is there; KVANT_ERR_SPEC when it has a value. */
kvant_status kvant_spec_flag(kvant_spec *spec, const char *key, bool *value, const kvant_error *error);

/* Whether the option is there, with a value or without; it still wants a helper to ask for it. */
bool kvant_spec_has(const kvant_spec *spec, const char *key);

/* KVANT_ERR_SPEC when an option is left that no helper asked for; valid names the options that
 * are. */
kvant_status kvant_spec_finish(const kvant_spec *spec, const char *valid, const kvant_error *error);

#endif
