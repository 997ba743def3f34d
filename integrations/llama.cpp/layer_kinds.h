/* layer_kinds.h - the kinds of a llama.cpp context's layers. A layer keeps keys and values, which
 * kvant compresses, or something else, which stays llama.cpp's own.
 *
 * It counts layers and writes the lines about them. It does not decide which layers are compressed.
 * kv_bind.c owns one per context.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct kvp_layer_kinds {
    uint32_t *cached; /* layers with a compressed cache, ascending */
    uint32_t n_cached;
    /* layers with recurrent state; the highest such layer plus one */
    uint32_t n_states, states_end;
    bool keys_only; /* a cache of keys without values stays llama.cpp's own */
    bool elsewhere; /* a layer's cache is in another device's memory */
} kvp_layer_kinds;

void kvp_layer_kinds_free(kvp_layer_kinds *kinds);

/* Notes a layer with a compressed cache, in any order and any number of times; false without
 * memory. */
bool kvp_layer_kinds_add(kvp_layer_kinds *kinds, uint32_t layer);

/* The number of layers with a compressed cache before this one. */
uint32_t kvp_layer_kinds_rank(const kvp_layer_kinds *kinds, uint32_t layer);

/* Notes a layer with recurrent state. llama.cpp asks for the layers in their order. */
void kvp_layer_kinds_add_state(kvp_layer_kinds *kinds, uint32_t layer);

/* Prints a line like "12 of 48 layers have a KV cache and are compressed; 36 keep recurrent state,
 * ..." if layers do so. n_layers: the model's number of layers. */
void kvp_layer_kinds_report(const kvp_layer_kinds *kinds, uint32_t n_layers);
