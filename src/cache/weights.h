/* weights.h - matrices of transform=first: a W per kv head, made of lower triangles in binary16.
 *
 * Up to head_dim 128 W is one matrix; beyond, it is block diagonal of parts of at most 64 channels
 * (transform.h), because the time to solve for a matrix grows with the third power of its size. */
#pragma once

#include "tensor.h"

/* Channels of a part. On Gemma-3 parts of 128 are no better (learning.md). */
static inline uint32_t kvant_weights_part(uint32_t head_dim)
{
    uint32_t parts = 1;
    while (head_dim > 128 && (head_dim / parts > 64 || head_dim % (2 * parts)) &&
           2 * parts <= head_dim)
        parts++;
    return head_dim % (2 * parts) ? head_dim : head_dim / parts;
}

/* Numbers in the triangles of all parts of all kv heads, one after another. */
static inline size_t kvant_weights_halves(const kvant_tensor *tensor)
{
    const uint32_t part = kvant_weights_part(tensor->head_dim);
    return kvant_tensor_width(tensor) / part * kvant_triangle_size(part);
}

/* Triangles are copied; rows can be written. KVANT_ERR_FORMAT when one has no good inverse, KVANT_ERR_MEMORY. */
kvant_status kvant_weights_create(const kvant_tensor *tensor, const uint16_t *triangles,
                                  uint32_t n_threads, kvant_weights **weights);

void kvant_weights_free(kvant_weights **weights);

/* Rows can be written with a version. A version with a dense R has (R W)^T from then on, until rows
 * were written without the version for a while (kvant_versions_age). KVANT_ERR_MEMORY. */
kvant_status kvant_version_prepare(kvant_tensor *tensor, uint32_t version);
void kvant_versions_age(kvant_tensor *tensor, size_t n);

/* Bytes of all versions' matrices, a device's copies among them: now, and the most that one text
 * makes of them. A text makes a version for every octave of positions that a sequence has blocks
 * for, and two early ones that later versions improve on. */
size_t kvant_weights_bytes(const kvant_tensor *tensor);
size_t kvant_weights_most(const kvant_tensor *tensor);

/* Puts a version's W before a rotation, as the matrices of kvant_transform_weigh. */
kvant_status kvant_version_weigh(const kvant_tensor *tensor, uint32_t version, uint32_t kv_head,
                                 kvant_transform *transform);

/* kvant_tensor_make_codec of a version, for a block at a position or KVANT_NO_POSITION, and whether it makes a codec like this one
 * (NULL: no). */
bool kvant_version_takes(const kvant_tensor *tensor, const kvant_codec *like);
kvant_status kvant_version_codec(const kvant_tensor *tensor, uint32_t version, int32_t position,
                                 uint32_t kv_head, const kvant_codec *like, kvant_codec **codec);
