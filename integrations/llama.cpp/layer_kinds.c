/* layer_kinds.c - see layer_kinds.h. */
#include "layer_kinds.h"

#include <stdlib.h>
#include <string.h>

#include "log.h"

void kvp_layer_kinds_free(kvp_layer_kinds *kinds)
{
    free(kinds->cached);
    *kinds = (kvp_layer_kinds){ 0 };
}

uint32_t kvp_layer_kinds_rank(const kvp_layer_kinds *kinds, uint32_t layer)
{
    uint32_t rank = 0;

    while (rank < kinds->n_cached && kinds->cached[rank] < layer)
        rank++;
    return rank;
}

bool kvp_layer_kinds_add(kvp_layer_kinds *kinds, uint32_t layer)
{
    const uint32_t rank = kvp_layer_kinds_rank(kinds, layer);
    uint32_t *cached;

    if (rank < kinds->n_cached && kinds->cached[rank] == layer)
        return true;
    cached = realloc(kinds->cached, (kinds->n_cached + 1) * sizeof(*cached));
    if (cached == NULL)
        return false;
    memmove(cached + rank + 1, cached + rank, (kinds->n_cached - rank) * sizeof(*cached));
    cached[rank] = layer;
    kinds->cached = cached;
    kinds->n_cached++;
    return true;
}

void kvp_layer_kinds_add_state(kvp_layer_kinds *kinds, uint32_t layer)
{
    if (layer < kinds->states_end)
        return;
    kinds->n_states++;
    kinds->states_end = layer + 1;
}

void kvp_layer_kinds_report(const kvp_layer_kinds *kinds, uint32_t n_layers)
{
    if (kinds->n_states == 0)
        return;
    kvp_info(
        "%u of %u layers have a KV cache and are compressed; %u keep recurrent state, which is "
        "not compressed",
        kinds->n_cached, n_layers, kinds->n_states);
}
