/* compact.h - the compact form of the matrices W of a transform in a GPU's memory: where its
 * numbers lie. Kernels and the computer's code read it.
 *
 * Keys. It begins with the triangles L = W^T as caches and records keep them (triangle.h), kv head
 * after kv head, part after part.
 *
 * Queries. From the next multiple of 16 bytes on it has the inverse L^-1 = W^-T of each triangle.
 * The inverse of a part begins with a unit for each of its rows, a power of two in binary32. Then
 * come its numbers in binary16, divided by the unit of their row, in groups of 8 columns. Group g
 * has rows 8 g to n - 1, and the 8 numbers of a row are next to each other. Numbers above the
 * diagonal are 0. A thread has a row here. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "parts.h"

#define KVANT_COMPACT_COLUMNS 8u /* of a group of the inverse */

KVANT_ON_BOTH static inline size_t kvant_compact_aligned(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

/* Bytes of the triangles of a kv head. */
KVANT_ON_BOTH static inline size_t kvant_compact_keys(uint32_t head_dim)
{
    const uint32_t n = kvant_key_transform_part(head_dim);
    return head_dim / n * kvant_triangle_size(n) * sizeof(uint16_t);
}

/* The rows of all groups before group g. */
KVANT_ON_BOTH static inline uint32_t kvant_compact_rows(uint32_t n, uint32_t g)
{
    return g * n - KVANT_COMPACT_COLUMNS / 2 * g * (g - (g > 0));
}

/* Bytes of the inverse of a part, and of a kv head. */
KVANT_ON_BOTH static inline size_t kvant_compact_inverse_part(uint32_t n)
{
    const uint32_t groups = (n + KVANT_COMPACT_COLUMNS - 1) / KVANT_COMPACT_COLUMNS;
    return kvant_compact_aligned(n * sizeof(float)) + (size_t)16 * kvant_compact_rows(n, groups);
}

KVANT_ON_BOTH static inline size_t kvant_compact_inverse(uint32_t head_dim)
{
    const uint32_t n = kvant_key_transform_part(head_dim);
    return head_dim / n * kvant_compact_inverse_part(n);
}

/* The offset of the inverse of kv head 0. */
KVANT_ON_BOTH static inline size_t kvant_compact_inverses_at(uint32_t head_dim, uint32_t n_kv_heads)
{
    return kvant_compact_aligned(n_kv_heads * kvant_compact_keys(head_dim));
}

KVANT_ON_BOTH static inline size_t kvant_compact_size(uint32_t head_dim, uint32_t n_kv_heads)
{
    return kvant_compact_inverses_at(head_dim, n_kv_heads) +
           n_kv_heads * kvant_compact_inverse(head_dim);
}
