/* model_file.h - finds the model that a process runs, which is the one whose file it has mapped
 * into memory, and reads that file's metadata. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define KVP_MODEL_PATH 1024u /* bytes; a model with a longer path is not found */

/* Writes the path of the file, at most KVP_MODEL_PATH bytes. False when no model is mapped, or when
 * several are, because a context may run any of them. */
bool kvp_find_model(char *model);

/* The layers of a GGUF file. 0: the file does not say. */
typedef struct kvp_model_layers {
    uint32_t all; /* all layers, without layers that only draft tokens */
    /* layers with keys and values of their own; also 0 where layers differ in kind or in their kv
     * heads */
    uint32_t with_keys;
} kvp_model_layers;

kvp_model_layers kvp_count_model_layers(const char *path);
