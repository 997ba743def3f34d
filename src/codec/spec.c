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

/* Digits to a number; false for anything else and for more than 6 digits (no option is that
 * large). */
static bool parse_number(const char *text, uint32_t *number)
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
        return kvant_fail(error, KVANT_ERR_SPEC, "'%s%s%s' is not a codec: a spec reads name-bits:key=value,...",
                          name, dash ? "-" : "", dash ? dash : "");
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
        return kvant_fail(error, KVANT_ERR_SPEC, "option '%s%s%s' does not read key or key=value", text,
                          value ? "=" : "", value ? value : "");
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (strcmp(spec->options[i].key, text) == 0)
            return kvant_fail(error, KVANT_ERR_SPEC, "option '%s' is given twice", text);
    if (spec->n_options == KVANT_SPEC_MAX_OPTIONS)
        return kvant_fail(error, KVANT_ERR_SPEC, "more than %d options", KVANT_SPEC_MAX_OPTIONS);
    spec->options[spec->n_options++] = (kvant_spec_option){ .key = text, .value = value };
    return KVANT_OK;
}

kvant_status kvant_spec_parse(const char *text, kvant_spec *spec, const kvant_error *error)
{
    *spec = (kvant_spec){ .name = NULL };
    size_t length = strlen(text);
    if (length == 0)
        return kvant_fail(error, KVANT_ERR_SPEC, "the codec spec is empty; try turboquant-4");
    if (length > KVANT_SPEC_MAX_LENGTH)
        return kvant_fail(error, KVANT_ERR_SPEC, "the codec spec is longer than %d bytes", KVANT_SPEC_MAX_LENGTH);
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
    if (spec->variant && parse_number(spec->variant, bits) && *bits >= min && *bits <= max)
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_SPEC, "%s takes %u to %u bits, as in %s-%u", spec->name, (unsigned)min,
                      (unsigned)max, spec->name, (unsigned)(max > 4 ? 4 : max));
}

static kvant_spec_option *find(kvant_spec *spec, const char *key)
{
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (strcmp(spec->options[i].key, key) == 0) {
            spec->options[i].used = true;
            return &spec->options[i];
        }
    return NULL;
}

kvant_status kvant_spec_choice(kvant_spec *spec, const char *key, const char *const *choices, int *value,
                               const kvant_error *error)
{
    const kvant_spec_option *option = find(spec, key);
    if (!option)
        return KVANT_OK;
    char list[128] = "";
    for (int i = 0; choices[i]; i++) {
        if (option->value && strcmp(choices[i], option->value) == 0) {
            *value = i;
            return KVANT_OK;
        }
        kvant_append(list, sizeof list, "%s%s", i ? ", " : "", choices[i]);
    }
    return kvant_fail(error, KVANT_ERR_SPEC, "%s=%s is not valid for %s: use one of %s", key,
                      option->value ? option->value : "", spec->name, list);
}

kvant_status kvant_spec_flag_or_choice(kvant_spec *spec, const char *key, const char *const *choices, int *value,
                                       const kvant_error *error)
{
    const kvant_spec_option *option = find(spec, key);
    if (!option || option->value)
        return kvant_spec_choice(spec, key, choices, value, error);
    *value = 0;
    return KVANT_OK;
}

kvant_status kvant_spec_number(kvant_spec *spec, const char *key, uint32_t min, uint32_t max, uint32_t *value,
                               const kvant_error *error)
{
    const kvant_spec_option *option = find(spec, key);
    if (!option)
        return KVANT_OK;
    uint32_t number;
    if (!option->value || !parse_number(option->value, &number) || number < min || number > max)
        return kvant_fail(error, KVANT_ERR_SPEC, "%s=%s is not valid for %s: use a number from %u to %u", key,
                          option->value ? option->value : "", spec->name, (unsigned)min, (unsigned)max);
    *value = number;
    return KVANT_OK;
}

/* Splits text, which must be short enough for two numbers, at its dot. */
static bool parse_pair(const char *text, uint32_t *first, uint32_t *second)
{
    char copy[16];
    size_t length = strlen(text);
    if (length >= sizeof copy)
        return false;
    memcpy(copy, text, length + 1);
    char *dot = strchr(copy, '.');
    if (!dot)
        return false;
    *dot = 0;
    return parse_number(copy, first) && parse_number(dot + 1, second);
}

kvant_status kvant_spec_pair(kvant_spec *spec, const char *key, uint32_t max_first, uint32_t max_second,
                             uint32_t *first, uint32_t *second, const kvant_error *error)
{
    const kvant_spec_option *option = find(spec, key);
    if (!option)
        return KVANT_OK;
    uint32_t a, b;
    if (!option->value || !parse_pair(option->value, &a, &b) || a > max_first || b > max_second)
        return kvant_fail(
            error, KVANT_ERR_SPEC, "%s=%s is not valid for %s: use two numbers up to %u and %u, as in %s=5.3", key,
            option->value ? option->value : "", spec->name, (unsigned)max_first, (unsigned)max_second, key);
    *first = a;
    *second = b;
    return KVANT_OK;
}

static bool parse_seed(const char *text, uint64_t *seed)
{
    if (!*text)
        return false;
    for (*seed = 0; *text >= '0' && *text <= '9'; text++) {
        uint64_t digit = (uint64_t)(*text - '0');
        if (*seed > (UINT64_MAX - digit) / 10)
            return false;
        *seed = *seed * 10 + digit;
    }
    return !*text;
}

kvant_status kvant_spec_seed(kvant_spec *spec, const char *key, uint64_t *value, const kvant_error *error)
{
    const kvant_spec_option *option = find(spec, key);
    uint64_t seed;
    if (!option)
        return KVANT_OK;
    if (!option->value || !parse_seed(option->value, &seed))
        return kvant_fail(error, KVANT_ERR_SPEC, "%s=%s is not valid for %s: use a number from 0 to %llu", key,
                          option->value ? option->value : "", spec->name, (unsigned long long)UINT64_MAX);
    *value = seed;
    return KVANT_OK;
}

kvant_status kvant_spec_flag(kvant_spec *spec, const char *key, bool *value, const kvant_error *error)
{
    const kvant_spec_option *option = find(spec, key);
    *value = option != NULL;
    if (option && option->value)
        return kvant_fail(error, KVANT_ERR_SPEC, "%s takes no value", key);
    return KVANT_OK;
}

bool kvant_spec_has(const kvant_spec *spec, const char *key)
{
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (strcmp(spec->options[i].key, key) == 0)
            return true;
    return false;
}

kvant_status kvant_spec_finish(const kvant_spec *spec, const char *valid, const kvant_error *error)
{
    for (uint32_t i = 0; i < spec->n_options; i++)
        if (!spec->options[i].used)
            return kvant_fail(error, KVANT_ERR_SPEC, "%s has no option '%s'; it has: %s", spec->name,
                              spec->options[i].key, valid);
    return KVANT_OK;
}
