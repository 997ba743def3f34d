/* options.c - see options.h. */
#include "options.h"

#include <string.h>

const char *const kvant_scale_names[] = { "norm", "unbiased", NULL };

/* Two numbers with a dot between them. */
static bool read_pair(const char *text, uint32_t *first, uint32_t *second)
{
    char copy[16] = "";
    if (strlen(text) >= sizeof copy || !strchr(text, '.'))
        return false;
    strcpy(copy, text);
    char *dot = strchr(copy, '.');
    *dot = 0;
    return kvant_spec_number(copy, first) && kvant_spec_number(dot + 1, second);
}

static bool read_seed(const char *text, uint64_t *seed)
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

static bool read_choice(const char *const *choices, const char *text, int32_t *value)
{
    for (*value = 0; choices[*value]; (*value)++)
        if (strcmp(choices[*value], text) == 0)
            return true;
    return false;
}

/* Reads a value; text is NULL for a key without a value. False when the text is no value of the
 * option. */
static bool read_value(const kvant_option *option, const char *text, void *place)
{
    int32_t *value = place;
    uint32_t first, second;
    if (option->kind == KVANT_OPTION_FLAG ||
        (option->kind == KVANT_OPTION_FLAG_OR_CHOICE && !text)) {
        *value = option->kind == KVANT_OPTION_FLAG;
        return !text;
    }
    if (!text)
        return false;
    if (option->kind == KVANT_OPTION_SEED)
        return read_seed(text, place);
    if (option->choices)
        return read_choice(option->choices, text, value);
    if (option->kind == KVANT_OPTION_NUMBER) {
        if (!kvant_spec_number(text, &first) || first < option->min || first > option->max)
            return false;
        *value = (int32_t)first;
        return true;
    }
    if (!read_pair(text, &first, &second) || first > option->min || second > option->max)
        return false;
    value[0] = (int32_t)first;
    value[1] = (int32_t)second;
    return true;
}

static kvant_status refuse(const kvant_option *option, const char *name, const char *text,
                           const kvant_error *error)
{
    char valid[128] = "";
    if (option->kind == KVANT_OPTION_FLAG)
        return kvant_fail(error, KVANT_ERR_SPEC, "%s takes no value", option->key);
    for (int i = 0; option->choices && option->choices[i]; i++)
        kvant_append(valid, sizeof valid, "%s%s", i ? ", " : "one of ", option->choices[i]);
    if (option->kind == KVANT_OPTION_NUMBER)
        kvant_append(valid, sizeof valid, "a number from %u to %u", (unsigned)option->min,
                     (unsigned)option->max);
    if (option->kind == KVANT_OPTION_SEED)
        kvant_append(valid, sizeof valid, "a number from 0 to %llu",
                     (unsigned long long)UINT64_MAX);
    if (option->kind == KVANT_OPTION_PAIR)
        kvant_append(valid, sizeof valid, "two numbers up to %u and %u, as in %s=5.3",
                     (unsigned)option->min, (unsigned)option->max, option->key);
    return kvant_fail(error, KVANT_ERR_SPEC, "%s=%s is not valid for %s: use %s", option->key,
                      text ? text : "", name, valid);
}

kvant_status kvant_options_read(const kvant_option *table, kvant_spec *spec, void *values,
                                const kvant_error *error)
{
    for (const kvant_option *option = table; option->key; option++) {
        void *place = (char *)values + option->offset;
        const kvant_spec_option *given = kvant_spec_take_option(spec, option->key);
        int32_t *value = place;
        if (option->kind != KVANT_OPTION_SEED)
            value[0] = option->preset;
        if (option->kind == KVANT_OPTION_PAIR)
            value[1] = option->preset;
        if (given && !read_value(option, given->value, place))
            return refuse(option, spec->name, given->value, error);
    }
    return KVANT_OK;
}

static void append_key(const char *key, char *text, size_t size)
{
    kvant_append(text, size, "%c%s", strchr(text, ':') ? ',' : ':', key);
}

static void describe_seed(const char *key, uint64_t seed, char *text, size_t size)
{
    if (seed == 0)
        return;
    append_key(key, text, size);
    kvant_append(text, size, "=%llu", (unsigned long long)seed);
}

void kvant_options_describe(const kvant_option *table, const void *values, char *text, size_t size)
{
    for (const kvant_option *option = table; option->key; option++) {
        const void *place = (const char *)values + option->offset;
        if (option->kind == KVANT_OPTION_SEED) {
            describe_seed(option->key, *(const uint64_t *)place, text, size);
            continue;
        }
        const int32_t *value = place;
        if (value[0] == KVANT_OPTION_ABSENT || (option->kind == KVANT_OPTION_FLAG && value[0] == 0))
            continue;
        append_key(option->key, text, size);
        if (option->choices)
            kvant_append(text, size, "=%s", option->choices[value[0]]);
        else if (option->kind == KVANT_OPTION_NUMBER)
            kvant_append(text, size, "=%d", (int)value[0]);
        else if (option->kind == KVANT_OPTION_PAIR)
            kvant_append(text, size, "=%d.%d", (int)value[0], (int)value[1]);
    }
}

void kvant_options_list(const kvant_option *table, char *text, size_t size)
{
    for (const kvant_option *option = table; option->key; option++) {
        kvant_append(text, size, "%s%s", text[0] ? " " : "", option->key);
        if (option->kind == KVANT_OPTION_NUMBER || option->kind == KVANT_OPTION_SEED)
            kvant_append(text, size, "=N");
        if (option->kind == KVANT_OPTION_PAIR)
            kvant_append(text, size, "=D.N");
        for (uint32_t i = 0; option->choices && option->choices[i]; i++)
            kvant_append(text, size, "%c%s", i ? '|' : '=', option->choices[i]);
    }
}
