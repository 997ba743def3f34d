/* configs.c - configurations from -k, -v and --stock. */
#include "configs.h"

#include "command.h"
#include "plugin.h"

#include <stdio.h>
#include <string.h>

typedef struct stock_type {
    const char *name;
    enum ggml_type type;
} stock_type;

/* What llama.cpp's own programs accept for -ctk and -ctv. */
static const stock_type stock_types[] = {
    { "f32", GGML_TYPE_F32 },   { "f16", GGML_TYPE_F16 },   { "bf16", GGML_TYPE_BF16 },
    { "q8_0", GGML_TYPE_Q8_0 }, { "q5_1", GGML_TYPE_Q5_1 }, { "q5_0", GGML_TYPE_Q5_0 },
    { "q4_1", GGML_TYPE_Q4_1 }, { "q4_0", GGML_TYPE_Q4_0 }, { "iq4_nl", GGML_TYPE_IQ4_NL },
};

static bool find_type(const char *name, enum ggml_type *type)
{
    for (size_t i = 0; i < sizeof stock_types / sizeof *stock_types; i++) {
        if (strcmp(stock_types[i].name, name) == 0) {
            *type = stock_types[i].type;
            return true;
        }
    }
    complain("--stock: llama.cpp has no cache type '%s'", name);
    hint("f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl; two as K/V, for example q8_0/q4_0");
    return false;
}

static kv_config *append(kv_configs *list)
{
    if (list->n == MAX_CONFIGS) {
        complain("more than %d configurations", MAX_CONFIGS);
        return NULL;
    }
    kv_config *config = &list->items[list->n++];
    *config = (kv_config){ .type_k = GGML_TYPE_F16, .type_v = GGML_TYPE_F16 };
    return config;
}

bool configs_add_k(kv_configs *list, const char *spec)
{
    kv_config *config = append(list);
    if (config != NULL)
        config->k = spec;
    return config != NULL;
}

bool configs_add_v(kv_configs *list, const char *spec)
{
    kv_config *last = list->n > 0 ? &list->items[list->n - 1] : NULL;
    if (last == NULL || last->stock || last->v != NULL) {
        complain("-v %s has no -k before it", spec);
        hint("give them in pairs: -k SPEC -v SPEC; -k f16 leaves keys as they are");
        return false;
    }
    last->v = spec;
    return true;
}

bool configs_add_stock(kv_configs *list, const char *types)
{
    kv_config *config = append(list);
    if (config == NULL)
        return false;
    const char *slash = strchr(types, '/');
    config->stock = true;
    config->k = config->v = types;
    if (slash != NULL) {
        snprintf(config->stock_k, sizeof config->stock_k, "%.*s", (int)(slash - types), types);
        config->k = config->stock_k;
        config->v = slash + 1;
    }
    return find_type(config->k, &config->type_k) && find_type(config->v, &config->type_v);
}

bool configs_finish(kv_configs *list)
{
    if (list->n == 0 && !configs_add_k(list, DEFAULT_SPEC))
        return false;
    for (size_t i = 0; i < list->n; i++) {
        kv_config *config = &list->items[i];
        if (config->stock)
            continue;
        if (config->v == NULL)
            config->v = config->k;
        if (!plugin_check_specs(config->k, config->v))
            return false;
    }
    return true;
}

kv_config configs_f16(void)
{
    return (kv_config){ .stock = true, .k = "f16", .v = "f16", .type_k = GGML_TYPE_F16, .type_v = GGML_TYPE_F16 };
}

const char *configs_label(const kv_config *config, char *buffer, size_t bytes)
{
    const char *prefix = config->stock ? "llama.cpp " : "";
    if (strcmp(config->k, config->v) == 0)
        snprintf(buffer, bytes, "%s%s", prefix, config->k);
    else
        snprintf(buffer, bytes, "%s%s/%s", prefix, config->k, config->v);
    return buffer;
}
