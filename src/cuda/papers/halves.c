/* halves.c - see halves.h. */
#include "halves.h"

#include <stdbool.h>

#include "../../base/half.h"
#include "../params.h"

static bool has_codewords(const kvant_general *g)
{
    return g->view.kind == KVANT_GENERAL_DIRECTIONS && !g->view.chunks.pool;
}

size_t kvant_cuda_halves_bytes(const kvant_general *g)
{
    if (has_codewords(g))
        return (4 * sizeof(uint16_t)) << g->view.chunks.index_bits;
    const bool direct =
        g->view.kind == KVANT_GENERAL_TIERS && (g->head_dim == 64 || g->head_dim == 128);
    return g->view.sketched || direct ? (size_t)g->head_dim * g->head_dim * sizeof(uint16_t) : 0;
}

static float sign_of_hadamard(uint32_t i, uint32_t j)
{
    float sign = 1;
    for (uint32_t both = i & j; both; both &= both - 1)
        sign = -sign;
    return sign;
}

/* An element of the rotation, as general_rotate_back multiplies it. */
static float number_of(const kvant_rotation_position *place, const float *tables, uint32_t i,
                       uint32_t j)
{
    const float *numbers = tables + place->numbers;
    return place->dense ? numbers[(size_t)i * place->n + j]
                        : sign_of_hadamard(i, j) * place->scale * numbers[j];
}

/* An element of the matrix of both tiers, which are blocks on its diagonal. */
static float number_at(const kvant_general *g, const float *tables, uint32_t i, uint32_t j)
{
    if (g->view.sketched)
        return number_of(&g->view.projection, tables, i, j);
    const uint32_t n = g->view.books[0].n;
    if ((i < n) != (j < n))
        return 0;
    return i < n ? number_of(&g->view.tiers.rotations[0], tables, i, j)
                 : number_of(&g->view.tiers.rotations[1], tables, i - n, j - n);
}

static void put_rotation(const kvant_general *g, const float *tables, uint16_t *to)
{
    const uint32_t tiles = g->head_dim / 16;
    for (uint32_t at = 0; at < g->head_dim * g->head_dim; at++) {
        const uint32_t k = at % 2 + at / 2 % 2 * 8, right = at / 4 % 2, lane = at / 8 % 32,
                       step = at / 256 % tiles, pair = at / 256 / tiles;
        const uint32_t row = 16 * step + 2 * (lane % 4) + k,
                       column = 16 * pair + 8 * right + lane / 4;
        const bool rotated = g->keys && !g->view.sketched;
        to[at] = kvant_half_from_float(
            number_at(g, tables, rotated ? column : row, rotated ? row : column));
    }
}

void kvant_cuda_halves(const kvant_general *g, const void *tables, uint16_t *to)
{
    if (!has_codewords(g)) {
        put_rotation(g, tables, to);
        return;
    }
    const float *codewords = (const float *)tables + g->view.chunks.codewords;
    for (uint32_t i = 0; i < 4u << g->view.chunks.index_bits; i++)
        to[i] = kvant_half_from_float(codewords[i]);
}
