/* options.h - the options of a codec family as one table. The table parses a spec, prints the
 * canonical form and lists the options. Every value except the seed is an int32_t in a struct of
 * the family. */
#pragma once

#include "spec.h"

typedef enum kvant_option_kind {
    KVANT_OPTION_FLAG,           /* "key": 1, else 0 */
    KVANT_OPTION_CHOICE,         /* "key=word": the index of the word in choices */
    KVANT_OPTION_FLAG_OR_CHOICE, /* the same; "key" alone means the first word */
    KVANT_OPTION_NUMBER,         /* "key=N": min <= N <= max */
    KVANT_OPTION_PAIR, /* "key=D.N": D at most min, N at most max; the next int32_t holds N */
    KVANT_OPTION_SEED  /* "key=N": a uint64_t; it keeps its value when the option is missing */
} kvant_option_kind;

#define KVANT_OPTION_ABSENT (-1)

typedef struct kvant_option {
    const char *key; /* NULL ends a table */
    kvant_option_kind kind;
    const char *const *choices; /* ends with NULL */
    uint32_t min, max;
    int32_t preset; /* the value without the option; KVANT_OPTION_ABSENT: the family decides */
    size_t offset;  /* of the int32_t in the struct */
    const char *help;
} kvant_option;

/* Fills *values with the options of the spec, and with the presets of the options that the spec
 * lacks. KVANT_ERR_SPEC with a line that names the valid values. */
kvant_status kvant_options_read(const kvant_option *table, kvant_spec *spec, void *values,
                                const kvant_error *error);

/* Appends the values to a canonical spec: ":" before the first option of the text, "," before each
 * further option. Leaves out absent values, and flags and seeds that are 0. */
void kvant_options_describe(const kvant_option *table, const void *values, char *text, size_t size);

/* Appends the options with their values, as in "group=N sym axis=token|channel". */
void kvant_options_list(const kvant_option *table, char *text, size_t size);

/* Options named as the int32_t of the struct that holds them. */
#define KVANT_FLAG(type, name, text)                                                               \
    { #name, KVANT_OPTION_FLAG, NULL, 0, 0, 0, offsetof(type, name), text }
#define KVANT_NUMBER(type, name, least, most, preset, text)                                        \
    { #name, KVANT_OPTION_NUMBER, NULL, least, most, preset, offsetof(type, name), text }
#define KVANT_CHOICE(type, name, words, preset, text)                                              \
    { #name, KVANT_OPTION_CHOICE, words, 0, 0, preset, offsetof(type, name), text }

/* scale= of many families: norm keeps a row's length in its scale, unbiased its projection on the
 * decoded row. */
extern const char *const kvant_scale_names[];
enum { KVANT_SCALE_NORM = 0, KVANT_SCALE_UNBIASED = 1 };
#define KVANT_SCALE_OPTION(type, preset)                                                           \
    KVANT_CHOICE(type, scale, kvant_scale_names, preset,                                           \
                 "what a row's scale keeps: its length, or inner products on average")
