/* chunk_dots_c.c - products of chunks' numbers and integers in portable C: the reference for every other level. */
#include <stdbool.h>
#include <string.h>

#include "chunk_tiles.h"

static int32_t number_of(const kvant_chunk_numbers *numbers, uint32_t code, uint32_t j)
{
    const uint32_t index = code & ((1u << numbers->index_bits) - 1), above = code >> numbers->index_bits;
    const int32_t length = numbers->step ? numbers->step * (int32_t)above : numbers->lengths[above];
    /* Floor of a division, written so that nothing negative is shifted. */
    return (int32_t)((uint32_t)(numbers->entries[4 * index + j] * length + (1 << 14) + (1 << 30)) >> 15) -
           (1 << 15);
}

/* Where the numbers of chunk c of a value lie in dots. */
static size_t value_place(const kvant_chunk_numbers *numbers, const kvant_triplet_places *places, uint32_t c,
                          uint32_t j)
{
    return numbers->components == 3 ? places->first[j] + c : 4 * c + j;
}

KVANT_CHUNK_DOTS_FN(kvant_chunk_dots_c)
{
    const bool key = layout->role == KVANT_ROLE_K;
    const uint32_t size = numbers->components;
    const kvant_triplet_places places = kvant_triplet_places_of(numbers->dim);
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++)
        memset(dots + i * dots_stride, 0,
               (key ? KVANT_PAGE_TOKENS : kvant_padded_dim(numbers->dim)) * sizeof *dots);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        const uint32_t position = kvant_token_position(t);
        kvant_chunk_layout_get(layout, page, t, codes);
        for (uint32_t c = 0; c < layout->n_chunks; c++)
            for (uint32_t j = 0; j < size && size * c + j < numbers->dim; j++) {
                const int32_t number = number_of(numbers, codes[c], j);
                const size_t to = key ? position : value_place(numbers, &places, c, j);
                for (uint32_t i = 0; i < n; i++)
                    dots[i * dots_stride + to] += number * x[i * x_stride + (key ? 4 * c + j : position)];
            }
    }
}
