/* configs.h - the KV cache configurations of a command line, in the order given. kvant's are
 * `-k SPEC [-v SPEC]`, `--preset NAME` and `--config FILE`. llama.cpp's are
 * `--stock TYPE [--accel]`. `[--fp32]` may follow each of kvant's, and `[--protect N]` the first
 * two. A --protect before the first configuration holds for all of them. */
#pragma once

#include "choices.h"
#include "plugin.h"
#include "report.h"

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>

#define MAX_CONFIGS 1024 /* kvant tune compares one per layer and role */

typedef struct kv_config {
    bool stock;
    bool accel; /* stock only: the plug-in's device KVANT_ACCEL computes attention */
    bool fp32;  /* kvant only: attention without integer products */
    /* Codec specs, names of llama.cpp's types, or the settings file's name. Not owned. */
    const char *k, *v;
    const char *preset;   /* the preset that the specs come from, or NULL */
    const char *path;     /* of the settings file, or NULL */
    kvant_scheme *scheme; /* kvant only, once configs_finish() has returned */
    uint32_t protect;
    const char *protect_codec; /* or NULL */
    enum ggml_type type_k, type_v;
    char stock_k[8]; /* storage for the first half of --stock K/V */
    /* The name in reports, set by configs_finish(): "turboquant-4", "K/V" when K and V differ, or
     * the name of a preset or settings file. The words "llama.cpp " or "accel " precede stock
     * types, "fp32 " precedes codecs with fp32 products, and " protect N SPEC" follows protected
     * configurations. */
    char label[160];
} kv_config;

typedef struct kv_configs {
    kv_config items[MAX_CONFIGS];
    size_t n;
    uint32_t protect; /* for the configurations that follow on the command line */
    const char *protect_codec;
    const char *calibration; /* a file, or NULL */
} kv_configs;

/* Functions for option tables; list is a kv_configs. The option `-v` belongs to the -k before it,
 * `--accel` to the --stock before it. `--fp32` belongs to the -k, --preset or --config before it.
 * False after complaining. */
bool configs_add_preset(void *list, const char *name);
bool configs_add_file(void *list, const char *path);
bool configs_add_k(void *list, const char *spec);
bool configs_add_v(void *list, const char *spec);
bool configs_add_stock(void *list, const char *types);
bool configs_set_accel(void *list, const char *none);
bool configs_set_fp32(void *list, const char *none);
bool configs_set_protect(void *list, const char *layers);
bool configs_set_protect_codec(void *list, const char *spec);

/* Makes the schemes: checks all specs, and loads settings files and calibrations. When no
 * calibration was named and a codec uses one, it loads the file next to the model. An empty list
 * becomes the default preset. False after complaining. */
bool configs_finish(kv_configs *list, const char *model);
void configs_free(kv_configs *list);

/* Sets the plug-in to one of kvant's configurations. False after complaining. */
bool configs_set_plugin(const kv_configs *list, const kv_config *config);

/* A fingerprint of the configuration, of the files that it reads and, where the plug-in computes,
 * of the plug-in. Model, text and runtime also decide results; the caller adds them. */
uint64_t config_key(const kv_config *config);

/* The first columns of a report about configurations, and their cells. Tables show the label; JSON
 * and CSV have its parts. */
void configs_add_cells(const kv_config *config, report_rows *row);

/* f16 for K and V in llama.cpp's own cache: every configuration is compared with it. */
kv_config configs_f16(void);

/* Writes the order of a comparison into `ordered`: f16 first, then every configuration of the list
 * that is not f16. ordered has room for MAX_CONFIGS + 1. Returns their number. */
size_t configs_after_f16(const kv_configs *list, const kv_config *f16, const kv_config **ordered);
