/* parts.h - how the matrix W of a kv head is cut into parts, and how many halves the triangle of a
 * part takes (triangle.h). Plain functions that kernels on a GPU call, too.
 *
 * Up to head_dim 128 W is one matrix. Above, W is block diagonal with parts (sub-heads) of at most
 * 64 channels, because the time to solve for a matrix grows with the third power of its size. Parts
 * of 128 channels are no better on Gemma-3 (learning.md). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define KVANT_ON_BOTH __host__ __device__
#else
#define KVANT_ON_BOTH
#endif

/* The channels of a part. */
KVANT_ON_BOTH static inline uint32_t kvant_key_transform_part(uint32_t head_dim)
{
    uint32_t parts = 1;
    while (head_dim > 128 && (head_dim / parts > 64 || head_dim % (2 * parts)) &&
           2 * parts <= head_dim)
        parts++;
    return head_dim % (2 * parts) ? head_dim : head_dim / parts;
}

/* The channel of the whole row that is channel i of a part of n channels. The halves of a part lie
 * head_dim / 2 apart, so a part has both channels of each pair that RoPE rotates. This holds for
 * models that store pairs side by side and for models that store them half a row apart. */
KVANT_ON_BOTH static inline uint32_t kvant_part_channel(uint32_t head_dim, uint32_t n,
                                                        uint32_t part, uint32_t i)
{
    return i < n / 2 ? part * (n / 2) + i : head_dim / 2 + part * (n / 2) + i - n / 2;
}

/* Halves of a triangle of n rows. */
KVANT_ON_BOTH static inline size_t kvant_triangle_size(size_t n)
{
    return 2 * n + (n * n / 4 + 1) / 2;
}
