/* ggml_tables.h - whether the ggml that loads the plug-in keeps its tables where abi.h has them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "ggml_api.h"

/* Calls functions of the library on objects of our own and compares each place, size and number
 * that shows with abi.h. Sets api->api, api->op and api->n_rows. Needs api's required functions.
 * False after writing the row that differs to err. */
bool kvp_ggml_tables_match(void *library, kvp_ggml *api, char *err, size_t errlen);
