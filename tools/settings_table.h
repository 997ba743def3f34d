/* settings_table.h - prints a settings file layer by layer, with the bits of each codec. */
#ifndef KVANT_TOOLS_SETTINGS_TABLE_H
#define KVANT_TOOLS_SETTINGS_TABLE_H

#include <stdbool.h>

/* Loads and checks the file and prints a row a layer. The exit code. */
int settings_table_print(const char *path, bool json);

#endif /* KVANT_TOOLS_SETTINGS_TABLE_H */
