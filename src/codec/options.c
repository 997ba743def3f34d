/* options.c - see options.h. */
#include "options.h"

#include <string.h>

const char *const kvant_scale_names[] = { "norm", "unbiased", NULL };

static kvant_status read_one(const kvant_option *option, kvant_spec *spec, int32_t *value, const kvant_error *error)
{
    bool flag = false;
    uint32_t number = (uint32_t)value[0], second = option->kind == KVANT_OPTION_PAIR ? (uint32_t)value[1] : 0;
    int choice = value[0];
    switch (option->kind) {
    case KVANT_OPTION_FLAG:
        KVANT_FORWARD(kvant_spec_flag(spec, option->key, &flag, error));
        value[0] = flag;
        return KVANT_OK;
    case KVANT_OPTION_CHOICE:
        KVANT_FORWARD(kvant_spec_choice(spec, option->key, option->choices, &choice, error));
        break;
    case KVANT_OPTION_FLAG_OR_CHOICE:
        KVANT_FORWARD(kvant_spec_flag_or_choice(spec, option->key, option->choices, &choice, error));
        break;
    case KVANT_OPTION_NUMBER:
        KVANT_FORWARD(kvant_spec_number(spec, option->key, option->min, option->max, &number, error));
        choice = (int)number;
        break;
    case KVANT_OPTION_SEED: return KVANT_OK; /* read elsewhere */
    case KVANT_OPTION_PAIR:
        KVANT_FORWARD(kvant_spec_pair(spec, option->key, option->min, option->max, &number, &second, error));
        choice = (int)number;
        value[1] = (int32_t)second;
        break;
    }
    value[0] = choice;
    return KVANT_OK;
}

kvant_status kvant_options_read(const kvant_option *table, kvant_spec *spec, void *values, const kvant_error *error)
{
    for (const kvant_option *option = table; option->key; option++) {
        void *place = (char *)values + option->offset;
        if (option->kind == KVANT_OPTION_SEED) {
            KVANT_FORWARD(kvant_spec_seed(spec, option->key, place, error));
            continue;
        }
        int32_t *value = place;
        value[0] = option->preset;
        if (option->kind == KVANT_OPTION_PAIR)
            value[1] = option->preset;
        KVANT_FORWARD(read_one(option, spec, value, error));
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
