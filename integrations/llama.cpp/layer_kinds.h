/* layer_kinds.h - what the layers of one llama.cpp context keep: keys and values, which are
 * compressed, or something else, which stays llama.cpp's own.
 *
 * It counts layers and writes the lines about them. It does not decide what is compressed.
 * kv_bind.c owns one per context.
 */
#ifndef KVP_LAYER_KINDS_H
#define KVP_LAYER_KINDS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvp_layer_kinds {
    uint32_t *cached; /* layers with a compressed cache, ascending */
    uint32_t n_cached;
    uint32_t n_states, states_end; /* layers with recurrent state; the highest one, plus one */
    bool keys_alone;               /* a cache of keys without values stays llama.cpp's own */
    bool elsewhere;                /* a layer's cache is in another device's memory */
} kvp_layer_kinds;

void kvp_layer_kinds_free(kvp_layer_kinds *kinds);

/* A layer with a compressed cache, in any order, any number of times; false without memory. */
bool kvp_layer_kinds_add(kvp_layer_kinds *kinds, uint32_t layer);

/* How many layers with a compressed cache come before this one. */
uint32_t kvp_layer_kinds_rank(const kvp_layer_kinds *kinds, uint32_t layer);

/* A layer with recurrent state; llama.cpp asks for one layer after the other. */
void kvp_layer_kinds_add_state(kvp_layer_kinds *kinds, uint32_t layer);

/* "12 of 48 layers have a KV cache and are compressed; 36 keep recurrent state, ...", where layers
 * have recurrent state. n_layers: the model's. */
void kvp_layer_kinds_say(const kvp_layer_kinds *kinds, uint32_t n_layers);

#endif /* KVP_LAYER_KINDS_H */
