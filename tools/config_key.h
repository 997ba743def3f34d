/* config_key.h - a fingerprint of everything that decides the results of a configuration. Kept
 * results are found again by it. */
#ifndef KVANT_TOOLS_CONFIG_KEY_H
#define KVANT_TOOLS_CONFIG_KEY_H

#include "configs.h"

/* Of the configuration, files that it takes, and, where it takes part, the plug-in. Model, text and
 * runtime are the caller's. */
uint64_t config_key(const kv_configs *list, const kv_config *config);

#endif /* KVANT_TOOLS_CONFIG_KEY_H */
