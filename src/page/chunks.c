/* chunks.c - see chunks.h. format.md, "Chunk codes", has the formulas. */
#include "chunks.h"

void kvant_chunk_layout_init(kvant_chunk_layout *layout, kvant_role role, uint32_t n_chunks,
                             uint32_t bits)
{
    *layout = (kvant_chunk_layout){ .role = role, .n_chunks = n_chunks, .bits = bits };
    size_t words = 0;
    uint32_t shift = 0;
    for (uint32_t p = 16; p; p /= 2) {
        if (!(bits & p))
            continue;
        layout->planes[layout->n_planes++] =
            (kvant_chunk_plane){ .bits = p, .shift = shift, .word_offset = words };
        words +=
            role == KVANT_ROLE_K ? (size_t)4 * p * ((n_chunks + 1) / 2) : (size_t)2 * p * n_chunks;
        words = (words + 3) / 4 * 4;
        shift += p;
    }
    layout->code_bytes = words * sizeof(uint32_t);
}

/* The place of a token's codes in a plane: chunk c is in word first + step (c / pair), at bit
 * `bit` + 16 (c mod pair). */
typedef struct place {
    size_t first, step;
    uint32_t bit, pair;
} place;

/* For K, tokens are rows of an operand. A GPU lane owns the tokens with the same t mod 8 and finds
 * them in 4 neighbouring words. Two chunks share a word, 16 bits apart. */
static place key_place(const kvant_chunk_plane *plane, uint32_t token)
{
    uint32_t p = plane->bits, position = 32 * (token % 16 / 8) + 4 * (token % 8) + token / 16;
    return (place){ plane->word_offset + position % (4 * p), 4 * p, p * (position / (4 * p)), 2 };
}

/* For V, tokens are columns. A GPU lane owns pairs of neighbouring tokens of one chunk, 16 bits
 * apart. */
static place value_place(const kvant_chunk_layout *layout, const kvant_chunk_plane *plane,
                         uint32_t token)
{
    uint32_t p = plane->bits, fields = 16 / p;
    uint32_t k = 8 * (token % 8 / 2) + 4 * (token % 16 / 8) + token / 16;
    return (place){ plane->word_offset + (size_t)(k / fields) * layout->n_chunks, 1,
                    p * (k % fields) + 16 * (token % 2), 1 };
}

static place place_of(const kvant_chunk_layout *layout, const kvant_chunk_plane *plane,
                      uint32_t token)
{
    return layout->role == KVANT_ROLE_K ? key_place(plane, token)
                                        : value_place(layout, plane, token);
}

void kvant_chunk_layout_put(const kvant_chunk_layout *layout, void *page, uint32_t token,
                            const uint32_t *codes)
{
    uint32_t *words = page;
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_chunk_plane *plane = &layout->planes[i];
        place at = place_of(layout, plane, token);
        uint32_t mask = (1u << plane->bits) - 1;
        for (uint32_t c = 0; c < layout->n_chunks; c++) {
            uint32_t *word = words + at.first + at.step * (c / at.pair),
                     bit = at.bit + 16 * (c % at.pair);
            *word = (*word & ~(mask << bit)) | (codes[c] >> plane->shift & mask) << bit;
        }
    }
}

void kvant_chunk_layout_get(const kvant_chunk_layout *layout, const void *page, uint32_t token,
                            uint32_t *codes)
{
    const uint32_t *words = page;
    for (uint32_t c = 0; c < layout->n_chunks; c++)
        codes[c] = 0;
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_chunk_plane *plane = &layout->planes[i];
        place at = place_of(layout, plane, token);
        uint32_t mask = (1u << plane->bits) - 1;
        for (uint32_t c = 0; c < layout->n_chunks; c++)
            codes[c] |=
                (words[at.first + at.step * (c / at.pair)] >> (at.bit + 16 * (c % at.pair)) & mask)
                << plane->shift;
    }
}
