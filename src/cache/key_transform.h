/* key_transform.h - the matrices of transform=first: one W per kv head, stored as lower triangles
 * in 4 bits (math/triangle.h).
 *
 * Up to head_dim 128 W is one matrix. Above, W is block diagonal with parts (sub-heads) of at most
 * 64 channels (transform.h), because the time to solve for a matrix grows with the third power of
 * its size. */
#pragma once

#include "../math/parts.h"
#include "tensor.h"

/* How many halves the triangles of all sub-heads of all kv heads take. They lie one after
 * another. */
static inline size_t kvant_key_transform_halves(const kvant_tensor *tensor)
{
    const uint32_t part = kvant_key_transform_part(tensor->head_dim);
    return kvant_tensor_width(tensor) / part * kvant_triangle_size(part);
}

/* Makes matrices from triangles, which are copied. Rows can then be written with them.
 * KVANT_ERR_FORMAT when a triangle has no good inverse. KVANT_ERR_MEMORY. */
kvant_status kvant_key_transform_create(const kvant_tensor *tensor, const uint16_t *triangles,
                                        uint32_t n_threads, kvant_key_transform **key_transform);

void kvant_key_transform_free(kvant_key_transform **key_transform);

/* Prepares a transform for writing rows. With a dense R the transform then keeps (R W)^T.
 * kvant_transforms_age counts n written rows and frees (R W)^T of transforms that no row has used
 * for a while. KVANT_ERR_MEMORY. */
kvant_status kvant_transforms_prepare(kvant_tensor *tensor, uint32_t transform_id);
void kvant_transforms_age(kvant_tensor *tensor, size_t n);

/* Bytes of the matrices of all transforms, including copies on a device: now, and the most that one
 * text causes. A text causes one transform for each position bucket for which a sequence has
 * blocks, and two early ones that later transforms improve on. */
size_t kvant_key_transform_bytes(const kvant_tensor *tensor);
size_t kvant_key_transform_most(const kvant_tensor *tensor);

/* Puts the W of a transform before a rotation, like kvant_transform_set_matrix. */
kvant_status kvant_transforms_set_matrix(const kvant_tensor *tensor, uint32_t transform_id,
                                         uint32_t kv_head, kvant_transform *transform);
