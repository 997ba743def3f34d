/* weights.h - matrices of transform=first: a W per kv head, made of lower triangles in binary16.
 *
 * Up to head_dim 128 W is one matrix; beyond, it is block diagonal of parts of at most 128 channels
 * (transform.h), because the time to solve for a matrix grows with the third power of its size. */
#pragma once

#include "tensor.h"

/* Channels of a part. */
static inline uint32_t kvant_weights_part(uint32_t head_dim)
{
    uint32_t parts = 1;
    while (head_dim > 128 && (head_dim / parts > 128 || head_dim % (2 * parts)) && 2 * parts <= head_dim)
        parts++;
    return head_dim % (2 * parts) ? head_dim : head_dim / parts;
}

static inline size_t kvant_triangle_size(size_t n)
{
    return n * (n + 1) / 2;
}

/* Numbers in the triangles of all parts of all kv heads, one after another. */
static inline size_t kvant_weights_halves(const kvant_tensor *tensor)
{
    const uint32_t part = kvant_weights_part(tensor->head_dim);
    return kvant_tensor_width(tensor) / part * kvant_triangle_size(part);
}

/* Triangles are copied. KVANT_ERR_FORMAT when one has no good inverse, KVANT_ERR_MEMORY. */
kvant_status kvant_weights_create(const kvant_tensor *tensor, const uint16_t *triangles, uint32_t n_threads,
                                  kvant_weights **weights);

/* kvant_tensor_make_codec of a version. */
kvant_status kvant_version_codec(const kvant_tensor *tensor, uint32_t version, uint32_t kv_head, const kvant_codec *like,
                                 kvant_codec **codec);
void kvant_weights_free(const kvant_tensor *tensor, kvant_weights **weights);
