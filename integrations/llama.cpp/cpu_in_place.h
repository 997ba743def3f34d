/* cpu_in_place.h - decides which caches in the computer's memory are f16 in place.
 *
 * While a cache holds few tokens, kvant's own work for a token (transforming queries, expanding W,
 * learning) takes longer than f16 attention. So a cache of one stream begins in place: ggml's
 * operations write and read its rows, and logits are f16's own. Its layers go to pages one by one
 * before attention reads more cells (n_kv) than kvp_kv_cells_in_place. All layers go at once before
 * a prompt that does not fit. They also go before everything that ggml cannot do on these rows: a
 * second sequence, codes that are restored, a graph that is cut for the device KVANT. The cache is
 * in place again when llama.cpp clears it, or begins a sequence in it.
 *
 * The decision depends on the graphs alone, so the same graphs give the same forms. cpu_rows.c owns
 * the rows. */
#pragma once

#include "cpu_rows.h"
#include "ops.h"

/* A computed node of a graph that writes to a cache or reads it. */
typedef struct kvp_cache_node {
    abi_tensor *node, *behind; /* behind: a view of its result that follows it, or NULL */
    kvp_kv *kv;
    bool follows; /* only views lie between it and the one before */
} kvp_cache_node;

/* Decides before a graph of the CPU back end which of its caches are in place. A result other than
 * success: there is no memory, and the graph must not be computed. */
int32_t kvp_cpu_in_place_prepare(kvp_compute *compute, const kvp_cache_node *nodes, size_t n);

/* Whether the queries of the graph at hand are noted for learning. `note` does so for an attention
 * node of a tensor in place, after the node was computed. */
bool kvp_cpu_in_place_asks(const kvp_kv *kv);
void kvp_cpu_in_place_note(kvp_compute *compute, const abi_tensor *node);
