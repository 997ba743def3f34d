/* settings_table.h - prints a settings file layer by layer, with the bits of each codec. */
#ifndef KVANT_TOOLS_SETTINGS_TABLE_H
#define KVANT_TOOLS_SETTINGS_TABLE_H

#include <kvant/settings.h>
#include <stdbool.h>

/* Loads and checks the file and prints a row a layer. The exit code. */
int settings_table_print(const char *path, bool json);

/* What a layer has, as it is shown: its spec, or "a | b", those of its kv heads in order; the
 * caller frees it. NULL without memory. */
char *layer_specs(const kvant_settings_layer *layer);

#endif /* KVANT_TOOLS_SETTINGS_TABLE_H */
