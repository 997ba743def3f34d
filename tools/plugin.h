/* plugin.h - where libggml-kvant.so is, and the environment it reads its settings from. */
#ifndef KVANT_TOOLS_PLUGIN_H
#define KVANT_TOOLS_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>

#define PLUGIN_DEVICE "KVANT"  /* the device's name, and the back-end registry's */
#define PLUGIN_ENV_K "KVANT_K" /* codec spec of keys, read when a context's cache is allocated */
#define PLUGIN_ENV_V "KVANT_V"
#define PLUGIN_ENV_PATH "KVANT_PLUGIN" /* overrides where the plug-in is looked for */

/* The absolute path of the plug-in. False after complaining where it was looked for. */
bool plugin_path(char *path, size_t bytes);

/* Sets KVANT_K and KVANT_V of this process. */
bool plugin_set_specs(const char *k, const char *v);

/* Whether both specs create a codec; complains with the library's own words when one does not. */
bool plugin_check_specs(const char *k, const char *v);

#endif /* KVANT_TOOLS_PLUGIN_H */
