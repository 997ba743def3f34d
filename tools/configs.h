/* configs.h - the KV cache configurations of a command line: `-k SPEC [-v SPEC]` for kvant, `--stock TYPE`
 * for llama.cpp's own, in the order given. */
#ifndef KVANT_TOOLS_CONFIGS_H
#define KVANT_TOOLS_CONFIGS_H

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>

#define MAX_CONFIGS 32

typedef struct kv_config {
    bool stock;
    const char *k, *v; /* specs, or llama.cpp's names of types; from argv or constant */
    enum ggml_type type_k, type_v;
    char stock_k[8]; /* storage for the first half of --stock K/V */
} kv_config;

typedef struct kv_configs {
    kv_config items[MAX_CONFIGS];
    size_t n;
} kv_configs;

bool configs_add_k(kv_configs *list, const char *spec);
bool configs_add_v(kv_configs *list, const char *spec);
bool configs_add_stock(kv_configs *list, const char *types);

/* Completes (values as keys where -v was not given) and checks all specs. An empty list becomes DEFAULT_SPEC.
 */
bool configs_finish(kv_configs *list);

/* f16 for K and V in llama.cpp's own cache: what everything is compared with. */
kv_config configs_f16(void);

/* "turboquant-4", or "K/V" when they differ, with "llama.cpp " before stock types. */
const char *configs_label(const kv_config *config, char *buffer, size_t bytes);

#endif /* KVANT_TOOLS_CONFIGS_H */
