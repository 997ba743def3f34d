/* kv_layers.h - the state that the tensors of one llama context share. kv_bind.c keeps it, and
 * kv_report.c prints it. cpu_graph.c keeps its own member. No other file looks into it. */
#pragma once

#include <stdatomic.h>

#include "kv_tensor.h"
#include "layer_kinds.h"

/* Whether the CPU back end takes the nodes on a context's caches (cpu_graph.h). */
enum {
    KVP_CPU_GRAPH_ALONE, /* no: the context's CPU back end is not known */
    KVP_CPU_GRAPH_READY, /* not yet: llama.cpp looks for the device of attention */
    KVP_CPU_GRAPH_ON,
    KVP_CPU_GRAPH_NEVER /* no: a node reads a cache that kvant does not compute */
};

/* One llama context: its settings, and the tensors of all its caches (a model with a sliding window
 * has two). */
struct kvp_layers {
    size_t n_users;
    uint32_t n;      /* the highest layer number, plus one */
    uint32_t first;  /* the lowest layer number */
    uint32_t n_here; /* layers whose keys are in these caches */
    /* tensors that were created, that are bound, and that were not freed yet */
    uint32_t n_tensors, n_bound, n_alive;
    uint32_t n_positions; /* positions of the longest cache, one stream */
    kvp_kv_size full;     /* size of the bound tensors when all cells are written */
    size_t attention;     /* bytes that attention needs on a GPU, mostly for prompts */
    size_t queries;       /* bytes of a layer's queries that a GPU keeps for learning, at most */
    /* tokens that are f16 itself in every bound tensor; SIZE_MAX: no tensor is f16 */
    size_t in_place;
    uint32_t n_streams; /* streams of the bound tensors */
    bool on_gpu;        /* a bound tensor lies on a GPU */
    /* the longest cache's tokens that stay fp16, once its rows no longer fit as f16 */
    kvant_exact_part exact;
    bool reported;
    bool rotated;         /* a GPU's codecs rotate by other matrices than a CPU's */
    bool refused;         /* a graph showed that its cache cannot serve the model */
    bool copies;          /* the user was told that llama.cpp reads decoded copies */
    bool latents;         /* a cache of MLA is compressed */
    bool plans_keys_only; /* a graph that llama.cpp only plans reads values out of the keys */
    atomic_int cpu_graph;
    kvp_layer_kinds kinds;
    kvp_settings settings;
};

/* Prints, once per context when all of its tensors are bound, the line about their size and
 * content. */
void kvp_layers_report(struct kvp_layers *layers);
