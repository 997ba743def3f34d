/* configs.c - configurations from --preset, --config, -k, -v and --stock. */
#include "configs.h"

#include "args.h"
#include "command.h"
#include "fingerprint.h"
#include "os.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct stock_type {
    const char *name;
    enum ggml_type type;
} stock_type;

/* The types that llama.cpp's own programs accept for -ctk and -ctv. */
static const stock_type stock_types[] = {
    { "f32", GGML_TYPE_F32 },   { "f16", GGML_TYPE_F16 },   { "bf16", GGML_TYPE_BF16 },
    { "q8_0", GGML_TYPE_Q8_0 }, { "q5_1", GGML_TYPE_Q5_1 }, { "q5_0", GGML_TYPE_Q5_0 },
    { "q4_1", GGML_TYPE_Q4_1 }, { "q4_0", GGML_TYPE_Q4_0 }, { "iq4_nl", GGML_TYPE_IQ4_NL },
};

static bool stock_type_of(const char *name, enum ggml_type *type)
{
    for (size_t i = 0; i < sizeof stock_types / sizeof *stock_types; i++) {
        if (strcmp(stock_types[i].name, name) == 0) {
            *type = stock_types[i].type;
            return true;
        }
    }
    complain("--stock: llama.cpp has no cache type '%s'", name);
    return hint("its types are f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 and iq4_nl; two as "
                "K/V, for example q8_0/q4_0");
}

static kv_config *last_of(kv_configs *list)
{
    return list->n > 0 ? &list->items[list->n - 1] : NULL;
}

static kv_config *append(kv_configs *list)
{
    if (list->n == MAX_CONFIGS) {
        complain("more than %d configurations are given", MAX_CONFIGS);
        return NULL;
    }
    kv_config *config = &list->items[list->n++];
    *config = (kv_config){ .type_k = GGML_TYPE_F16,
                           .type_v = GGML_TYPE_F16,
                           .protect = list->protect,
                           .protect_codec = list->protect_codec };
    return config;
}

bool configs_add_k(void *list, const char *spec)
{
    kv_config *config = append(list);
    if (config != NULL)
        config->k = spec;
    return config != NULL;
}

bool configs_add_preset(void *list, const char *name)
{
    kv_config *config = append(list);
    if (config != NULL)
        config->preset = name;
    return config != NULL;
}

bool configs_add_file(void *list, const char *path)
{
    kv_config *config = append(list);
    if (config == NULL)
        return false;
    config->path = path;
    config->k = config->v = kvant_os_file_name(path);
    return true;
}

bool configs_add_v(void *list, const char *spec)
{
    kv_config *last = last_of(list);
    if (last == NULL || last->k == NULL || last->v != NULL) {
        complain("-v %s has no -k before it", spec);
        return hint("give them in pairs: -k SPEC -v SPEC; -k f16 keeps keys in 16 bits");
    }
    last->v = spec;
    return true;
}

bool configs_add_stock(void *list, const char *types)
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
    return stock_type_of(config->k, &config->type_k) && stock_type_of(config->v, &config->type_v);
}

bool configs_set_accel(void *list, const char *none)
{
    kv_config *last = last_of(list);
    (void)none;
    if (last != NULL && last->stock)
        return last->accel = true;
    complain("--accel has no --stock before it");
    return hint("it computes attention on llama.cpp's own cache: --stock q8_0 --accel");
}

bool configs_set_fp32(void *list, const char *none)
{
    kv_config *last = last_of(list);
    (void)none;
    if (last != NULL && !last->stock)
        return last->fp32 = true;
    complain("--fp32 has no -k, --preset or --config before it");
    return hint("give a codec twice to compare: -k SPEC -k SPEC --fp32");
}

static bool last_takes_codecs(kv_configs *list, const char *option)
{
    const kv_config *last = last_of(list);
    if (last == NULL || !last->stock)
        return true;
    complain("%s: llama.cpp's own cache has no codecs", option);
    return hint("it belongs to the -k or --preset before it, or, before the first one, to all");
}

bool configs_set_protect(void *configs, const char *layers)
{
    kv_configs *list = configs;
    uint32_t *protect = list->n > 0 ? &last_of(list)->protect : &list->protect;
    return last_takes_codecs(list, "--protect") &&
           args_u32("--protect", layers, 0, PLUGIN_MAX_PROTECT, protect);
}

bool configs_set_protect_codec(void *configs, const char *spec)
{
    kv_configs *list = configs;
    *(list->n > 0 ? &last_of(list)->protect_codec : &list->protect_codec) = spec;
    return last_takes_codecs(list, "--protect-codec");
}

/* The parameters of a scheme that the command line asks for. */
static kvant_scheme_params scheme_params_of(const kv_configs *list, const kv_config *config,
                                            const char *model)
{
    kvant_scheme_params p = { .size = sizeof p,
                              .preset = config->preset,
                              .settings = config->path,
                              .calibration = list->calibration,
                              .protect = config->protect,
                              .protect_codec = config->protect_codec,
                              .model = model };
    if (config->preset == NULL && config->path == NULL) {
        p.k = config->k;
        p.v = config->v;
    }
    return p;
}

bool configs_set_plugin(const kv_configs *list, const kv_config *config)
{
    const kvant_scheme_params p = scheme_params_of(list, config, NULL);
    return plugin_set(&p, config->scheme, config->fp32);
}

static const char *protect_codec(const kv_config *config)
{
    if (config->stock || config->protect == 0)
        return NULL;
    return config->protect_codec != NULL ? config->protect_codec : PLUGIN_PROTECT_CODEC;
}

void configs_add_cells(const kv_config *config, report_rows *row)
{
    const bool read_calibration = config->scheme != NULL && config->path == NULL;
    report_text(row, NULL, "cache", config->label);
    report_text(row, "cache", NULL,
                config->accel   ? "accel"
                : config->stock ? "llama.cpp"
                : config->fp32  ? "kvant fp32"
                                : "kvant");
    report_text(row, "k", NULL, config->k);
    report_text(row, "v", NULL, config->v);
    report_text(row, "preset", NULL, config->preset);
    report_text(row, "config", NULL, config->path);
    report_number(row, "protect", NULL, 0,
                  config->stock || config->path != NULL ? NAN : (double)config->protect);
    report_text(row, "protect_codec", NULL, protect_codec(config));
    report_text(row, "calibration", NULL,
                read_calibration ? scheme_info(config->scheme).calibration_path : NULL);
}

static bool check_protection(const kv_config *config)
{
    if (config->path != NULL && (config->protect > 0 || config->protect_codec != NULL)) {
        complain("--config %s sets the codec of every layer, so --protect does not apply",
                 config->path);
        return hint("--protect belongs to the -k or --preset before it, or, before the first "
                    "configuration, to all");
    }
    if (config->protect_codec == NULL || config->protect > 0)
        return true;
    complain("--protect-codec %s without --protect", config->protect_codec);
    return hint("--protect N says how many of the first and of the last layers use it");
}

static void write_label(kv_config *c)
{
    const char *kind = c->accel ? "accel " : c->stock ? "llama.cpp " : c->fp32 ? "fp32 " : "";
    const bool one = c->preset != NULL || strcmp(c->k, c->v) == 0;
    const int used =
        snprintf(c->label, sizeof c->label, "%s%s%s%s", kind, c->preset != NULL ? c->preset : c->k,
                 one ? "" : "/", one ? "" : c->v);
    if (c->protect > 0 && used > 0 && (size_t)used < sizeof c->label)
        snprintf(c->label + used, sizeof c->label - (size_t)used, " protect %lu %s",
                 (unsigned long)c->protect, protect_codec(c));
}

static bool finish(const kv_configs *list, kv_config *config, const char *model,
                   const kvant_scheme *like, bool *told)
{
    if (!check_protection(config))
        return false;
    kvant_scheme_params p = scheme_params_of(list, config, model);
    p.like = like;
    if (!scheme_make(&p, &config->scheme, told))
        return false;
    const kvant_scheme_info info = scheme_info(config->scheme);
    if (config->path == NULL) { /* what a preset means, and values as keys where -v was not given */
        config->k = info.k;
        config->v = info.v;
    }
    return true;
}

bool configs_finish(kv_configs *list, const char *model)
{
    bool told = false, ok = list->n > 0 || configs_add_preset(list, KVANT_PRESET_DEFAULT);
    const kvant_scheme *calibrated = NULL;
    for (size_t i = 0; i < list->n && ok; i++) {
        ok = list->items[i].stock || finish(list, &list->items[i], model, calibrated, &told);
        if (ok)
            write_label(&list->items[i]);
        if (ok && calibrated == NULL && !list->items[i].stock &&
            scheme_info(list->items[i].scheme).calibration != NULL)
            calibrated = list->items[i].scheme;
    }
    if (!ok)
        configs_free(list);
    return ok;
}

void configs_free(kv_configs *list)
{
    for (size_t i = 0; i < list->n; i++)
        kvant_scheme_free(&list->items[i].scheme);
}

/* The plug-in's own fingerprint is part of the key, because another build may round differently. */
uint64_t config_key(const kv_config *c)
{
    const uint32_t numbers[] = { c->stock, c->accel, c->type_k, c->type_v, c->protect, c->fp32 };
    uint64_t h = kvant_fnv1a(FINGERPRINT_START, numbers, sizeof numbers);
    if (!c->stock || c->accel)
        h = fingerprint_number(h, plugin_fingerprint());
    if (c->stock)
        return h;
    const char *const files[] = { c->path, scheme_info(c->scheme).calibration_path };
    const bool by_file = c->path != NULL; /* its name does not matter */
    const char *const words[] = { by_file ? NULL : c->k, by_file ? NULL : c->v, protect_codec(c),
                                  getenv("KVANT_SEED"), getenv(PLUGIN_ENV_CPU) };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        h = fingerprint_number(h, files[i] != NULL ? fingerprint_whole_file(files[i]) : 0);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        h = fingerprint_string(h, words[i]);
    return h;
}

kv_config configs_f16(void)
{
    return (kv_config){ .stock = true,
                        .k = "f16",
                        .v = "f16",
                        .type_k = GGML_TYPE_F16,
                        .type_v = GGML_TYPE_F16,
                        .label = "llama.cpp f16" };
}

static bool is_f16(const kv_config *config)
{
    return config->stock && !config->accel && config->type_k == GGML_TYPE_F16 &&
           config->type_v == GGML_TYPE_F16;
}

size_t configs_after_f16(const kv_configs *list, const kv_config *f16, const kv_config **ordered)
{
    size_t n = 0;
    ordered[n++] = f16;
    for (size_t i = 0; i < list->n; i++)
        if (!is_f16(&list->items[i]))
            ordered[n++] = &list->items[i];
    return n;
}
