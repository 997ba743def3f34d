/* compact.h - the compact form of the matrices W of a transform in a GPU's memory: where its
 * numbers lie. Kernels and the computer's code read it.
 *
 * It begins with the triangles of all kv heads, as a cache keeps them (math/triangle.h): kv head
 * after kv head, part after part. Keys are transformed with these. From the next multiple of 16
 * bytes on, it has the inverse L^-1 = W^-T of each triangle L, for queries. The inverse of a part
 * of n channels begins with a unit for each of its rows, a power of two in binary32. Then come
 * its numbers divided by the unit of their row, in binary16, in groups of 8 columns: of group g
 * rows 8 g to n - 1, the 8 numbers of a row next to each other. Numbers above the diagonal are
 * 0. So a thread that has a row reads 16 bytes at a time, and so do its neighbours next to it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define KVANT_ON_BOTH __host__ __device__
#else
#define KVANT_ON_BOTH
#endif

/* These three are kvant_key_transform_part, kvant_part_channel and kvant_triangle_size, which only
 * the computer can call. test_compact compares them. */

/* The channels of a part. */
KVANT_ON_BOTH static inline uint32_t kvant_compact_part(uint32_t head_dim)
{
    uint32_t parts = 1;
    while (head_dim > 128 && (head_dim / parts > 64 || head_dim % (2 * parts)) &&
           2 * parts <= head_dim)
        parts++;
    return head_dim % (2 * parts) ? head_dim : head_dim / parts;
}

/* The channel of the whole row that is channel i of a part of n channels. */
KVANT_ON_BOTH static inline uint32_t kvant_compact_channel(uint32_t head_dim, uint32_t n,
                                                           uint32_t part, uint32_t i)
{
    return i < n / 2 ? part * (n / 2) + i : head_dim / 2 + part * (n / 2) + i - n / 2;
}

/* Halves of a triangle of n rows. */
KVANT_ON_BOTH static inline size_t kvant_compact_triangle(size_t n)
{
    return 2 * n + (n * n / 4 + 1) / 2;
}

#define KVANT_COMPACT_COLUMNS 8u /* of a group */

KVANT_ON_BOTH static inline size_t kvant_compact_aligned(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

/* Bytes of the triangles of a kv head. */
KVANT_ON_BOTH static inline size_t kvant_compact_triangles(uint32_t head_dim)
{
    const uint32_t n = kvant_compact_part(head_dim);
    return head_dim / n * kvant_compact_triangle(n) * sizeof(uint16_t);
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
    const uint32_t n = kvant_compact_part(head_dim);
    return head_dim / n * kvant_compact_inverse_part(n);
}

/* The offset of the inverse of kv head 0. */
KVANT_ON_BOTH static inline size_t kvant_compact_inverses_at(uint32_t head_dim, uint32_t n_kv_heads)
{
    return kvant_compact_aligned(n_kv_heads * kvant_compact_triangles(head_dim));
}

KVANT_ON_BOTH static inline size_t kvant_compact_size(uint32_t head_dim, uint32_t n_kv_heads)
{
    return kvant_compact_inverses_at(head_dim, n_kv_heads) +
           n_kv_heads * kvant_compact_inverse(head_dim);
}
