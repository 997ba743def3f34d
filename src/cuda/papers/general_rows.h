/* general_rows.h - rows to pages in the general form (any/general.h), for the families of papers:
 * writes the codes of general_codes.h and sketches of their residuals. The last functions encode a
 * page of tiers. */
#pragma once

#include "general_codes.h"

/* Computes the sketch of the residual of s->y, for codes with this scale; returns whether it fits.
 * The residual goes to s->y, its norm to *norm, and its projection to s->b. */
KVANT_INLINE bool general_sketch(general_team team, const kvant_general *g, const general_space *s,
                                 float stored, float *norm)
{
    general_meet();
    general_numbers(team, g, s->codes, general_round_to_half(stored), NULL, 0, s->a);
    general_meet();
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        s->y[j] = general_sub(s->y[j], s->a[j]);
    *norm = general_mul(general_sqrt(general_sum(team, s->sums, s->y, s->y, (int)g->head_dim)),
                        g->view.inverse_sqrt_dim);
    general_rotate(team, &g->view.projection, g->tables, s->y, s->b);
    return general_fits(*norm);
}

KVANT_INLINE void general_put_codes(general_team team, const kvant_general *g,
                                    const general_space *s, int token, void *page)
{
    const bool chunks = general_has_chunks(g);
    const int bits =
        g->view.kind == KVANT_GENERAL_POLAR ? (int)g->view.polar.bits : (int)g->view.books[0].bits;
    for (int c = team.lane; chunks && c < (int)g->view.chunks.n; c += team.lanes)
        general_put_chunk(g, (uint32_t *)page, (int)g->view.chunks.n, general_chunk_bits(g), token,
                          c, s->codes[c]);
    for (int j = team.lane; !chunks && g->view.kind != KVANT_GENERAL_SKETCH && j < (int)g->head_dim;
         j += team.lanes)
        general_put_code(g, (uint32_t *)page, bits, token, j, s->codes[j]);
}

KVANT_INLINE general_scale general_codes(general_team team, const kvant_general *g,
                                         const general_space *s, int *n_outliers)
{
    const general_scale none = { 0, true };
    switch (g->view.kind) {
    case KVANT_GENERAL_CODEBOOK: return general_codebook(team, g, &g->view.books[0], s->y, s->a, s);
    case KVANT_GENERAL_TRIPLETS: return general_triplets_codes(team, g, s);
    case KVANT_GENERAL_DIRECTIONS: return general_directions_codes(team, g, s, NULL, n_outliers);
    case KVANT_GENERAL_POLAR: return general_polar_codes(team, g, s);
    default: return none;
    }
}

/* Encodes the row s->y as a token of the page, like general_encode. */
KVANT_INLINE bool general_encode_family(general_team team, const kvant_general *g,
                                        const general_space *s, int token, void *page)
{
    uint16_t *numbers = (uint16_t *)(void *)((uint8_t *)page + g->metadata);
    int n_outliers = 0;
    float norm = 0;
    const general_scale scale = general_codes(team, g, s, &n_outliers);
    if (!scale.fits || (g->view.sketched && !general_sketch(team, g, s, scale.stored, &norm)))
        return false;
    general_meet();
    if (team.lane == 0 && g->view.kind != KVANT_GENERAL_SKETCH)
        numbers[token] = general_to_half(scale.stored);
    general_put_codes(team, g, s, token, page);
    if (g->view.kind == KVANT_GENERAL_DIRECTIONS)
        general_put_outliers(team, g, s, n_outliers, token, numbers + GENERAL_TOKENS);
    if (!g->view.sketched)
        return true;
    if (team.lane == 0)
        *(uint16_t *)(void *)((uint8_t *)page + g->view.sketch_norms + 2 * token) =
            general_to_half(norm);
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        general_put_code(g, (uint32_t *)(void *)((uint8_t *)page + g->view.sketch_codes), 1, token,
                         j, s->b[j] < 0);
    return true;
}

/* ---- pages of 64 rows ---- */

/* Encodes the row s->y as a token of a page whose outliers are known. pool: the state at the row's
 * first chunk. A scale beyond fp16 is cut. */
KVANT_INLINE void general_encode_pooled(general_team team, const kvant_general *g,
                                        const general_space *s, int token, void *page,
                                        const general_pool *pool)
{
    uint16_t *numbers = (uint16_t *)(void *)((uint8_t *)page + g->metadata);
    int none = 0;
    general_meet();
    const float stored = g->view.kind == KVANT_GENERAL_FIELDS
                             ? general_fields_codes(team, g, s, pool)
                             : general_directions_codes(team, g, s, pool, &none).stored;
    if (team.lane == 0)
        numbers[token] = general_to_half(stored < GENERAL_HALF_MAX ? stored : GENERAL_HALF_MAX);
    general_put_codes(team, g, s, token, page);
    general_put_outliers(team, g, s, none, token, numbers + GENERAL_TOKENS);
}

/* Clears the page's slots from `used` on. */
KVANT_INLINE void general_clear_slots(general_team team, const kvant_general *g, uint32_t used,
                                      void *page)
{
    uint16_t *slots = (uint16_t *)(void *)((uint8_t *)page + g->metadata) + GENERAL_TOKENS;
    for (uint32_t i = 4 * used + (uint32_t)team.lane; i < 4 * g->view.chunks.pool;
         i += (uint32_t)team.lanes)
        slots[i] = 0;
}

/* The sum of squares of a channel's 64 numbers. */
KVANT_INLINE float general_energy(const general_run *x)
{
    float sum = 0;
    for (int t = 0; t < GENERAL_TOKENS; t++)
        sum = general_add(sum, general_mul(general_at(x, t), general_at(x, t)));
    return sum;
}

/* Whether a channel is an outlier of the page. energy: the sums of squares of all channels. */
KVANT_INLINE bool general_is_outlier(const kvant_general *g, const float *energy, int channel)
{
    uint32_t rank = 0;
    for (int k = 0; k < (int)g->head_dim; k++)
        rank +=
            k < channel ? energy[k] >= energy[channel] : k > channel && energy[k] > energy[channel];
    return rank < g->view.books[0].n;
}

/* Encodes the row s->y as a token of a page that has its mask. A scale beyond fp16 is cut. */
KVANT_INLINE void general_encode_tiers(general_team team, const kvant_general *g,
                                       const general_space *s, int token, void *page)
{
    general_meet();
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        s->a[general_rank(general_words(page, g->view.tiers.mask), (int)g->head_dim, j)] = s->y[j];
    for (int k = 0; k < 2; k++) {
        const kvant_codebook_position *book = &g->view.books[k];
        general_rotate(team, &g->view.tiers.rotations[k], g->tables,
                       s->a + (k ? g->view.books[0].n : 0), s->b);
        const float stored = general_codebook(team, g, book, s->b, s->y, s).stored;
        general_meet();
        if (team.lane == 0)
            ((uint16_t *)(void *)((uint8_t *)page + g->view.tiers.scales[k]))[token] =
                general_to_half(stored < GENERAL_HALF_MAX ? stored : GENERAL_HALF_MAX);
        for (int j = team.lane; j < (int)book->n; j += team.lanes)
            general_put_chunk(g, (uint32_t *)(void *)((uint8_t *)page + g->view.tiers.codes[k]),
                              (int)book->n, (int)book->bits, token, j, s->codes[j]);
    }
}
