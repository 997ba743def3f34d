/* chunk_tiles_c.c - pages of chunk codes as tiles in portable C, the reference for every level.
 * Operations and their order are the decoder's. */
#include <math.h>
#include <stdbool.h>

#include "../math/octahedral.h"
#include "chunk_tiles.h"

/* The place for a chunk's numbers: component j goes to out[j * step], for as many components as
 * there are channels. */
typedef struct target {
    float *out;
    size_t step[4];
    uint32_t n;
} target;

static uint32_t components(uint32_t dim, uint32_t chunk, uint32_t size)
{
    uint32_t left = dim - size * chunk;
    return left < size ? left : size;
}

static void place_triplet(const kvant_triplet_book *book, uint32_t code, float scale,
                          const target *to)
{
    uint32_t mask = (1u << book->direction_bits) - 1;
    float u = book->direction[code & mask],
          w = book->direction[code >> book->direction_bits & mask], x[3];
    kvant_octahedral_point(u, w, &x[0], &x[1], &x[2]);
    float norm = book->norm[code >> (2 * book->direction_bits)];
    float factor = scale * norm / sqrtf(x[0] * x[0] + x[1] * x[1] + x[2] * x[2]);
    for (uint32_t j = 0; j < to->n; j++)
        to->out[to->step[j]] = factor * x[j];
}

KVANT_UNPACK_TRIPLETS_FN(kvant_unpack_triplets_c)
{
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    const bool key = layout->role == KVANT_ROLE_K;
    const size_t padded = kvant_padded_dim(dim);
    const kvant_triplet_positions places = kvant_triplet_positions_of(dim);
    if (key)
        kvant_clear_padding(dim, tile);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        uint32_t position = kvant_token_position(t);
        kvant_chunk_layout_get(layout, page, t, codes);
        for (uint32_t c = 0; c < layout->n_chunks; c++) {
            target to = { tile + position * padded + c,
                          { places.first[0], places.first[1], places.first[2], 0 },
                          components(dim, c, 3) };
            if (key)
                to = (target){ tile + (size_t)3 * c * KVANT_PAGE_TOKENS + position,
                               { 0, KVANT_PAGE_TOKENS, 2 * KVANT_PAGE_TOKENS, 0 },
                               to.n };
            place_triplet(book, codes[c], scale[position], &to);
        }
    }
}

KVANT_UNPACK_DIRECTIONS_FN(kvant_unpack_directions_c)
{
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    const bool key = layout->role == KVANT_ROLE_K;
    const size_t padded = kvant_padded_dim(dim);
    if (key)
        kvant_clear_padding(dim, tile);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        uint32_t position = kvant_token_position(t);
        kvant_chunk_layout_get(layout, page, t, codes);
        for (uint32_t c = 0; c < layout->n_chunks; c++) {
            float *out = key ? tile + (size_t)4 * c * KVANT_PAGE_TOKENS + position
                             : tile + position * padded + 4 * c;
            const uint32_t index = codes[c] & ((1u << book->index_bits) - 1),
                           above = codes[c] >> book->index_bits;
            const float radius = scale[position] * (float)above;
            for (uint32_t j = 0; j < components(dim, c, 4); j++)
                out[key ? j * KVANT_PAGE_TOKENS : j] =
                    radius * book->codewords[(size_t)4 * index + j];
            if (index == book->n_codewords && above < book->slots)
                kvant_place_outlier(outliers, above, t, components(dim, c, 4),
                                    key ? KVANT_PAGE_TOKENS : 1, out);
        }
    }
}
