/* spec.c - see spec.h. */
#include "spec.h"

#include <ctype.h>
#include <string.h>

static bool is_word(const char *text)
{
    if (!*text)
        return false;
    for (; *text; text++)
        if (!isalnum((unsigned char)*text) && *text != '.' && *text != '_')
            return false;
    return true;
}

bool kvant_spec_number(const char *text, uint32_t *number)
{
    size_t length = strlen(text);
    if (length == 0 || length > 6)
        return false;
    *number = 0;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return false;
        *number = *number * 10 + (uint32_t)(*text - '0');
    }
    return true;
}

static kvant_status parse_name(kvant_spec *spec, char *name, const kvant_error *error)
{
    char *dash = strchr(name, '-');
    if (dash)
        *dash++ = 0;
    if (!is_word(name) || (dash && !is_word(dash)))
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "'%s%s%s' is not a codec: write name-bits:key=value,...", name,
                          dash ? "-" : "", dash ? dash : "");
    spec->name = name;
    spec->variant = dash;
    return KVANT_OK;
}

static kvant_status parse_option(kvant_spec *spec, char *text, const kvant_error *error)
{
    char *value = strchr(text, '=');
    if (value)
        *value++ = 0;
    if (!is_word(text) || (value && !is_word(value)))
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "option '%s%s%s' is not of the form key or key=value", text,
                          value ? "=" : "", value ? value : "");
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (strcmp(spec->options[i].key, text) == 0)
            return kvant_fail(error, KVANT_ERR_SPEC,
                              "option '%s' is given twice: leave one of them out", text);
    if (spec->n_options == KVANT_SPEC_MAX_OPTIONS)
        return kvant_fail(error, KVANT_ERR_SPEC, "the codec spec has more than %d options",
                          KVANT_SPEC_MAX_OPTIONS);
    spec->options[spec->n_options++] = (kvant_spec_option){ .key = text, .value = value };
    return KVANT_OK;
}

kvant_status kvant_spec_parse(const char *text, kvant_spec *spec, const kvant_error *error)
{
    *spec = (kvant_spec){ .name = NULL };
    size_t length = strlen(text);
    if (length == 0)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "the codec spec is empty: write a codec, for example turboquant-4");
    if (length > KVANT_SPEC_MAX_LENGTH)
        return kvant_fail(error, KVANT_ERR_SPEC, "the codec spec is longer than %d bytes",
                          KVANT_SPEC_MAX_LENGTH);
    memcpy(spec->text, text, length + 1);
    char *options = strchr(spec->text, ':');
    if (options)
        *options++ = 0;
    KVANT_FORWARD(parse_name(spec, spec->text, error));
    while (options) {
        char *next = strchr(options, ',');
        if (next)
            *next++ = 0;
        KVANT_FORWARD(parse_option(spec, options, error));
        options = next;
    }
    return KVANT_OK;
}

kvant_status kvant_spec_bits(const kvant_spec *spec, uint32_t min, uint32_t max, uint32_t *bits,
                             const kvant_error *error)
{
    if (spec->variant && kvant_spec_number(spec->variant, bits) && *bits >= min && *bits <= max)
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_SPEC, "%s takes %u to %u bits, as in %s-%u", spec->name,
                      (unsigned)min, (unsigned)max, spec->name, (unsigned)(max > 4 ? 4 : max));
}

const kvant_spec_option *kvant_spec_take_option(kvant_spec *spec, const char *key)
{
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (strcmp(spec->options[i].key, key) == 0) {
            spec->options[i].used = true;
            return &spec->options[i];
        }
    return NULL;
}

kvant_status kvant_spec_finish(const kvant_spec *spec, const char *valid, const kvant_error *error)
{
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (!spec->options[i].used)
            return kvant_fail(error, KVANT_ERR_SPEC,
                              "%s has no option '%s': leave it out; it has: %s", spec->name,
                              spec->options[i].key, valid);
    return KVANT_OK;
}
