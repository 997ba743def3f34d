/* configs.h - the KV cache configurations of a command line: `-k SPEC [-v SPEC]`, `--preset NAME`
 * or `--config FILE` for kvant, each with `[--fp32]` and the first two with `[--protect N]`,
 * `--stock TYPE [--accel]` for llama.cpp's own, in the order given. Protection given before the
 * first of them is that of all. */
#ifndef KVANT_TOOLS_CONFIGS_H
#define KVANT_TOOLS_CONFIGS_H

#include "choices.h"
#include "plugin.h"
#include "report.h"

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>

#define MAX_CONFIGS 1024 /* kvant tune compares one per layer and role */

typedef struct kv_config {
    bool stock;
    bool accel; /* of stock ones: attention is the plug-in's KVANT_ACCEL device */
    bool fp32;  /* of kvant's: attention without integer products */
    const char *k,
        *v; /* specs, or llama.cpp's names of types, or the settings file's name; from argv or constant */
    const char *preset;   /* where the specs come from one, or NULL */
    const char *path;     /* of the settings file, or NULL */
    kvant_scheme *scheme; /* of kvant's, once finished */
    uint32_t protect;
    const char *protect_codec; /* or NULL */
    enum ggml_type type_k, type_v;
    char stock_k[8]; /* storage for the first half of --stock K/V */
    /* "turboquant-4", or "K/V" when they differ, a preset's or a settings file's name, with "llama.cpp " or "accel " before
     * stock types, "fp32 " before codecs with fp32 products and " protect N SPEC" behind protected ones. Once finished. */
    char label[160];
} kv_config;

typedef struct kv_configs {
    kv_config items[MAX_CONFIGS];
    size_t n;
    uint32_t protect; /* of configurations to come */
    const char *protect_codec;
    const char *calibration; /* a file, or NULL */
} kv_configs;

/* For option tables: list is a kv_configs. -v is for the -k before it, --accel for the --stock, --fp32 for the -k, --preset or
 * --config. False after complaining. */
bool configs_add_preset(void *list, const char *name);
bool configs_add_file(void *list, const char *path);
bool configs_add_k(void *list, const char *spec);
bool configs_add_v(void *list, const char *spec);
bool configs_add_stock(void *list, const char *types);
bool configs_set_accel(void *list, const char *none);
bool configs_set_fp32(void *list, const char *none);
bool configs_set_protect(void *list, const char *layers);
bool configs_set_protect_codec(void *list, const char *spec);

/* Makes the schemes: checks all specs, loads settings files and calibrations, that beside the model where none was named
 * and something takes one. An empty list becomes the default preset. */
bool configs_finish(kv_configs *list, const char *model);
void configs_free(kv_configs *list);

/* Tells the plug-in of one of kvant's. False after complaining. */
bool configs_set_plugin(const kv_configs *list, const kv_config *config);

/* A fingerprint of everything that decides the results of a configuration: itself, files that it takes, and, where it
 * takes part, the plug-in. Model, text and runtime are the caller's. */
uint64_t config_key(const kv_config *config);

/* The first columns of a report about configurations, and their cells: tables have the label, programs get its parts. */
enum { N_CONFIG_COLUMNS = 9 };
/* clang-format off */
#define CONFIG_COLUMNS \
    { NULL, "cache", COLUMN_TEXT, 0 }, { "cache", NULL, COLUMN_TEXT, 0 }, { "k", NULL, COLUMN_TEXT, 0 }, \
    { "v", NULL, COLUMN_TEXT, 0 }, { "preset", NULL, COLUMN_TEXT, 0 }, { "config", NULL, COLUMN_TEXT, 0 }, \
    { "protect", NULL, COLUMN_NUMBER, 0 }, { "protect_codec", NULL, COLUMN_TEXT, 0 }, { "calibration", NULL, COLUMN_TEXT, 0 }
/* clang-format on */
void configs_fill_cells(const kv_config *config, report_cell *cells);

/* f16 for K and V in llama.cpp's own cache: what everything is compared with. */
kv_config configs_f16(void);

/* The order of a comparison: f16, then those of the list that are something else. ordered has room
 * for MAX_CONFIGS + 1; their number. */
size_t configs_after_f16(const kv_configs *list, const kv_config *f16, const kv_config **ordered);

#endif /* KVANT_TOOLS_CONFIGS_H */
