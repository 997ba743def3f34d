/* kv_steps.h - memory for the rows of a step (kvant_step_pages). The keys of all layers of a cache
 * share one, and the values of all layers share another.
 *
 * On a CPU llama.cpp computes the layers of a step one after another. It attends to the rows of a
 * layer before it stores the rows of the next layer. A buffer has the tensors of one cache. The
 * cache of a sliding window is another buffer, with other shared pages. */
#pragma once

#include "kv_tensor.h"

typedef struct kvp_steps {
    kvant_step_pages pages; /* has no memory until a tensor is bound */
} kvp_steps;

/* Pages without memory, for a tensor that only computes its size. */
kvant_step_pages *kvp_steps_none(void);

/* Bytes of the pages that the tensors of a cache share when this tensor is the largest of them. The
 * result is 0 on a GPU, and where the context's codecs keep no exact part. */
size_t kvp_steps_bytes(const kvp_kv_shape *shape, const kvp_settings *settings);

/* Makes the tensor share the pages. All tensors that share them must join before one of them is
 * bound. */
void kvp_steps_join(kvp_steps *steps, kvp_kv *kv);

/* Maps the memory once, and counts it with this tensor (kvp_kv.shared). False without memory. */
bool kvp_steps_map(kvp_kv *kv);

void kvp_steps_free(kvp_steps *steps);
