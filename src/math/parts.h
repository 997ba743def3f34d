/* parts.h - into which parts a W of transform=first falls (cache/key_transform.h). */
#pragma once

#include <stdint.h>

/* The channels of a part. Parts of 128 channels are no better on Gemma-3 (learning.md). */
static inline uint32_t kvant_key_transform_part(uint32_t head_dim)
{
    uint32_t parts = 1;
    while (head_dim > 128 && (head_dim / parts > 64 || head_dim % (2 * parts)) &&
           2 * parts <= head_dim)
        parts++;
    return head_dim % (2 * parts) ? head_dim : head_dim / parts;
}
