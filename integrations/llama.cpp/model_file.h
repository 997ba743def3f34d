/* model_file.h - which model a process runs, the one whose file it has mapped into memory, and what
 * the file says of it. */
#ifndef KVP_MODEL_FILE_H
#define KVP_MODEL_FILE_H

#include <stdbool.h>
#include <stdint.h>

#define KVP_MODEL_PATH 1024u

/* Writes the path of the file, at most KVP_MODEL_PATH bytes. False when no model is mapped, or
 * several, of which a context may run any. */
bool kvp_find_model(char *model);

/* Layers of a GGUF file. 0: the file does not say. */
typedef struct kvp_model_layers {
    uint32_t all; /* without those that only draft tokens */
    /* with keys and values of their own; 0, too, where layers differ in kind or in their kv
     * heads */
    uint32_t with_keys;
} kvp_model_layers;

kvp_model_layers kvp_count_model_layers(const char *path);

#endif /* KVP_MODEL_FILE_H */
