/* kv_layers.h - what the tensors of one llama context know of each other. kv_bind.c keeps it,
 * kv_tell.c tells it. No other file looks into it. */
#ifndef KVP_KV_LAYERS_H
#define KVP_KV_LAYERS_H

#include "kv_tensor.h"
#include "layer_kinds.h"

/* One llama context: its settings, and the tensors of all its caches (a model with a sliding window
 * has two). */
struct kvp_layers {
    size_t n_users;
    uint32_t n;                           /* the highest layer number, plus one */
    uint32_t first;                       /* the lowest one */
    uint32_t n_here;                      /* layers whose keys are here */
    uint32_t n_tensors, n_bound, n_alive; /* alive: of these tensors, those that were not freed */
    uint32_t n_positions;                 /* of the longest cache, one stream */
    kvp_kv_size full;                     /* of what is bound, when all cells are written */
    size_t in_place;    /* tokens that are f16 itself in all that is bound; SIZE_MAX: nothing is */
    uint32_t n_streams; /* of a tensor that is bound */
    bool on_gpu;        /* a tensor that is bound lies on a GPU */
    kvant_exact_part exact; /* of the longest cache, once rows no longer fit as f16 */
    bool told;
    bool rotated;          /* a GPU's codecs rotate by other matrices */
    bool refused;          /* a graph showed that its cache cannot serve the model */
    bool copies;           /* said that llama.cpp reads decoded copies */
    bool latents;          /* a cache of MLA is compressed */
    bool plans_keys_alone; /* a graph that is only planned reads values out of the keys */
    kvp_layer_kinds kinds;
    kvp_settings settings;
};

/* Says once per context, when all of its tensors are bound, what they take and hold. */
void kvp_layers_tell(struct kvp_layers *layers);

#endif /* KVP_KV_LAYERS_H */
