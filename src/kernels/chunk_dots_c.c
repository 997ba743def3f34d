/* chunk_dots_c.c - products of chunk codes and integers in portable C, the reference for every
 * level. */
#include <stdbool.h>
#include <string.h>

#include "chunk_tiles.h"

/* The index of a token's number in the order of channels: of queries for K, of unpacked tiles for
 * V. */
static uint32_t number_place(const kvant_chunk_values *numbers, bool key, uint32_t chunk,
                             uint32_t j)
{
    if (key || numbers->components == 4)
        return kvant_key_position(numbers->components, chunk, j);
    return kvant_triplet_positions_of(numbers->dim).first[j] + chunk;
}

static void read_numbers(const kvant_chunk_values *numbers, const kvant_chunk_layout *layout,
                         const void *page, uint32_t token, int16_t *out)
{
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    const uint32_t size = numbers->components;
    kvant_chunk_layout_get(layout, page, token, codes);
    for (uint32_t c = 0; c < layout->n_chunks; c++) {
        const uint32_t index = codes[c] & ((1u << numbers->index_bits) - 1),
                       above = codes[c] >> numbers->index_bits;
        const int32_t length =
            numbers->step ? numbers->step * (int32_t)above : numbers->lengths[above];
        for (uint32_t j = 0; j < size && size * c + j < numbers->dim; j++)
            out[number_place(numbers, layout->role == KVANT_ROLE_K, c, j)] =
                (int16_t)kvant_scale_word(numbers->entries[4 * index + j], length);
    }
}

static uint32_t key_numbers(const kvant_chunk_values *numbers, const kvant_chunk_layout *layout)
{
    return kvant_key_position(numbers->components, layout->n_chunks + layout->n_chunks % 2, 0);
}

static int32_t dot(const int16_t *a, const int16_t *b, uint32_t n)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

KVANT_CHUNK_DOTS_FN(kvant_chunk_dots_c)
{
    int16_t row[4 * (KVANT_MAX_HEAD_DIM / 3 + 1)] = { 0 };
    const bool key = layout->role == KVANT_ROLE_K;
    const uint32_t padded = kvant_padded_dim(numbers->dim);
    for (uint32_t i = 0; i < n && !key; i++)
        memset(dots + i * dots_stride, 0, padded * sizeof *dots);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        const uint32_t position = kvant_token_position(t);
        read_numbers(numbers, layout, page, t, row);
        for (uint32_t i = 0; i < n; i++) {
            int32_t *out = dots + i * dots_stride;
            if (key)
                out[position] = dot(row, x + i * x_stride, key_numbers(numbers, layout));
            for (uint32_t j = 0; j < padded && !key; j++)
                out[j] += row[j] * x[i * x_stride + position];
        }
    }
}
