/* parts.h - into which parts a W of transform=first falls (cache/key_transform.h). A part of n
 * channels has both channels of each pair that RoPE rotates, for models that store pairs side by
 * side and for models that store them half a row apart. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../base/attributes.h"

/* The channels of a part. Parts of 128 channels are no better on Gemma-3 (learning.md). */
KVANT_ON_BOTH static inline uint32_t kvant_key_transform_part(uint32_t head_dim)
{
    uint32_t parts = 1;
    while (head_dim > 128 && (head_dim / parts > 64 || head_dim % (2 * parts)) &&
           2 * parts <= head_dim)
        parts++;
    return head_dim % (2 * parts) ? head_dim : head_dim / parts;
}

/* The channel of the whole row that is channel i of a part. */
KVANT_ON_BOTH static inline uint32_t kvant_part_channel(uint32_t head_dim, uint32_t n,
                                                        uint32_t part, uint32_t i)
{
    return i < n / 2 ? part * (n / 2) + i : head_dim / 2 + part * (n / 2) + i - n / 2;
}

/* Halves of the triangle of a part (triangle.h). */
KVANT_ON_BOTH static inline size_t kvant_triangle_size(size_t n)
{
    return 2 * n + (n * n / 4 + 1) / 2;
}
