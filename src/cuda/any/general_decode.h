/* general_decode.h - rows of pages in the general form (general.h). A team decodes a token: its
 * codes to space.codes, and their numbers to space.y. */
#pragma once

#include "general.h"

/* ---- numbers of codes, all channels; to: a row, codes: in space.codes ---- */

KVANT_INLINE void general_point(float u, float w, float point[3])
{
    const float z = general_sub(general_sub(1, fabsf(u)), fabsf(w)), fold = z < 0 ? -z : 0;
    point[0] = general_sub(u, copysignf(fold, u));
    point[1] = general_sub(w, copysignf(fold, w));
    point[2] = z;
}

KVANT_INLINE void general_triplet(const kvant_general *g, uint32_t code, float scale,
                                  float numbers[3])
{
    const uint32_t bits = g->view.chunks.index_bits / 2, mask = (1u << bits) - 1;
    const float *direction = g->tables + g->view.chunks.direction,
                *norm = g->tables + g->view.chunks.norm;
    general_point(direction[code & mask], direction[code >> bits & mask], numbers);
    const float den =
        general_dot3(numbers[0], numbers[0], numbers[1], numbers[1], numbers[2], numbers[2]);
    const float factor = general_div(general_mul(scale, norm[code >> 2 * bits]), general_sqrt(den));
    unrolled_for (int i = 0; i < 3; i++)
        numbers[i] = general_mul(factor, numbers[i]);
}

KVANT_INLINE void general_triplets(general_team team, const kvant_general *g, const uint32_t *codes,
                                   float scale, float *to)
{
    for (int c = team.lane; c < (int)g->view.chunks.n; c += team.lanes) {
        float numbers[3];
        general_triplet(g, codes[c], scale, numbers);
        unrolled_for (int i = 0; i < 3; i++)
            if (3 * c + i < (int)g->head_dim)
                to[3 * c + i] = numbers[i];
    }
}

/* Decodes directions. slots: the slots of the token's outliers, whose numbers are halves. */
KVANT_INLINE void general_directions(general_team team, const kvant_general *g,
                                     const uint32_t *codes, float scale, const uint16_t *slots,
                                     float *to)
{
    const uint32_t bits = g->view.chunks.index_bits;
    for (int c = team.lane; c < (int)g->view.chunks.n; c += team.lanes) {
        const uint32_t index = codes[c] & ((1u << bits) - 1), above = codes[c] >> bits;
        const float *word = g->tables + g->view.chunks.codewords + (size_t)4 * index,
                    radius = general_mul(scale, (float)above);
        const bool outlier = index == g->view.chunks.n_codewords && above < g->view.chunks.slots;
        unrolled_for (int i = 0; i < 4; i++)
            to[4 * c + i] = outlier
                                ? general_from_half(slots[4 * GENERAL_TOKENS * above + (uint32_t)i])
                                : general_mul(radius, word[i]);
    }
}

/* The book of a pair of a list: cosines and sines of levels, then of thresholds. */
KVANT_INLINE const float *general_polar_book(const kvant_general *g, int list, bool last)
{
    return g->tables + (last ? g->view.polar.last_books : g->view.polar.books) +
           (size_t)list * g->view.polar.stride;
}

/* A number is a product over the lists, from the root on: the radius times a cosine or a sine of
 * each list. */
KVANT_INLINE float general_polar_number(const kvant_general *g, const uint32_t *codes, int channel)
{
    const int d = (int)g->head_dim;
    float radius = g->view.polar.sqrt_dim;
    int end = d - 1; /* the end of the list's codes */
    for (int list = (int)g->view.polar.depth - 1; list >= 0; list--) {
        const int nodes = (d - 1) / (1 << list) + 1, pairs = nodes / 2, node = channel >> list,
                  pair = node >> 1;
        end -= pairs;
        if (pair >= pairs)
            continue;
        const float *book = general_polar_book(g, list, pair == pairs - 1);
        radius = general_mul(radius, book[(node & 1 ? 16 : 0) + codes[end + pair]]);
    }
    return radius;
}

KVANT_INLINE void general_polar(general_team team, const kvant_general *g, const uint32_t *codes,
                                float scale, float *to)
{
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        to[j] = general_mul(general_polar_number(g, codes, j), scale);
}

/* A group's number is scale * code + zero (codec/uniform.h). */
typedef struct general_line {
    float scale, zero;
} general_line;

enum {
    GENERAL_ASYM,
    GENERAL_SYM,
    GENERAL_HYBRID_PAPER,
    GENERAL_HYBRID_CODE
}; /* kvant_uniform_mode */

KVANT_INLINE general_line general_line_of(const kvant_general *g, const uint16_t *stored)
{
    const uint32_t mode = g->view.uniform.mode;
    const bool asymmetric = mode == GENERAL_ASYM || (mode != GENERAL_SYM && stored[0] >> 15);
    const float size =
        general_from_half(mode >= GENERAL_HYBRID_PAPER ? stored[0] & 0x7fff : stored[0]);
    const general_line line = { size, asymmetric
                                          ? general_from_half(stored[g->view.uniform.n_scales])
                                          : general_mul(-size, g->view.uniform.bias) };
    return line;
}

KVANT_INLINE int general_scale_place(const kvant_general *g, int token, int channel)
{
    const int group = (int)g->view.uniform.group;
    return g->view.uniform.per_channel ? token / group * (int)g->head_dim + channel
                                       : channel / group * GENERAL_TOKENS + token;
}

/* The token's centroid, or NULL when the token was never written. */
KVANT_INLINE const float *general_centroid(general_team team, const kvant_general *g,
                                           const void *page, int token)
{
    const uint32_t bytes = g->view.uniform.index_bytes;
    const uint8_t *index = (const uint8_t *)page + g->view.uniform.index + bytes * (uint32_t)token;
    const uint32_t asked = bytes == 0   ? 0
                           : bytes == 1 ? index[0]
                                        : index[0] | (uint32_t)index[1] << 8;
    return general_halves(page, g->metadata)[token] == 0
               ? NULL
               : general_table(team, g, g->view.uniform.centroids) +
                     (size_t)(asked < g->view.uniform.clusters ? asked : 0) * g->head_dim;
}

KVANT_INLINE float general_uniform_number(const kvant_general *g, const void *page, int token,
                                          int channel)
{
    const general_line line = general_line_of(g, general_halves(page, g->metadata) +
                                                     general_scale_place(g, token, channel));
    const uint32_t code =
        general_get_code(g, general_words(page, 0), (int)g->view.uniform.bits, token, channel);
    return general_add(general_mul(line.scale, (float)code), line.zero);
}

KVANT_INLINE void general_uniform(general_team team, const kvant_general *g, const void *page,
                                  int token, float *to)
{
    const bool centred = g->view.uniform.clusters != 0;
    const float *centroid = centred ? general_centroid(team, g, page, token) : NULL;
    for (int first = team.lane; first < (int)g->head_dim; first += GENERAL_AT_ONCE * team.lanes) {
        float x[GENERAL_AT_ONCE] = { 0 };
        unrolled_for (int i = 0; i < GENERAL_AT_ONCE; i++) {
            const int j = first + i * team.lanes;
            if (j < (int)g->head_dim)
                x[i] = general_uniform_number(g, page, token, j);
        }
        unrolled_for (int i = 0; i < GENERAL_AT_ONCE; i++) {
            const int j = first + i * team.lanes;
            if (j < (int)g->head_dim)
                to[j] = !centred ? x[i] : centroid ? general_add(x[i], centroid[j]) : 0;
        }
    }
}

/* ---- tiers ---- */

/* The index of a channel in the page's order, in which outliers come first. */
KVANT_INLINE int general_rank(const uint32_t *mask, int head_dim, int channel)
{
    int before = 0, all = 0;
    for (int word = 0; 32 * word < head_dim; word++) {
        const int left = head_dim - 32 * word, own = channel - 32 * word;
        const uint32_t bits = left < 32 ? mask[word] & ((1u << left) - 1) : mask[word];
        all += general_ones(bits);
        before += own >= 32 ? general_ones(bits)
                  : own > 0 ? general_ones(bits & ((1u << own) - 1))
                            : 0;
    }
    return mask[channel / 32] >> channel % 32 & 1 ? before : all + channel - before;
}

KVANT_INLINE void general_tiers(general_team team, const kvant_general *g, const void *page,
                                int token, const general_space *s)
{
    for (int k = 0; k < 2; k++) {
        const kvant_codebook_position *book = &g->view.books[k];
        const float scale = general_from_half(general_halves(page, g->view.tiers.scales[k])[token]);
        general_meet();
        for (int j = team.lane; j < (int)book->n; j += team.lanes)
            s->a[j] = general_mul(
                scale, g->tables[book->values +
                                 general_get_chunk(g, general_words(page, g->view.tiers.codes[k]),
                                                   (int)book->n, (int)book->bits, token, j)]);
        general_rotate_back(team, &g->view.tiers.rotations[k], g->tables, s->a,
                            s->b + (k ? g->view.books[0].n : 0));
    }
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        s->y[j] = s->b[general_rank(general_words(page, g->view.tiers.mask), (int)g->head_dim, j)];
}

/* ---- rows ---- */

/* Computes the numbers of the codes in s->codes with the token's scale, for kinds with one code per
 * channel or chunk. `to` is a row. */
KVANT_INLINE void general_numbers(general_team team, const kvant_general *g, const uint32_t *codes,
                                  float scale, const uint16_t *slots, float *to)
{
    switch (g->view.kind) {
    case KVANT_GENERAL_TRIPLETS: general_triplets(team, g, codes, scale, to); break;
    case KVANT_GENERAL_DIRECTIONS: general_directions(team, g, codes, scale, slots, to); break;
    case KVANT_GENERAL_POLAR: general_polar(team, g, codes, scale, to); break;
    case KVANT_GENERAL_CODEBOOK:
        for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
            to[j] = general_mul(scale, g->tables[g->view.books[0].values + codes[j]]);
        break;
    default: /* a sketch alone */
        for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
            to[j] = 0;
    }
}

/* Reads the codes of a token in the form that general_numbers takes. */
KVANT_INLINE void general_get_codes(general_team team, const kvant_general *g, const void *page,
                                    int token, uint32_t *codes)
{
    const uint32_t *words = general_words(page, 0);
    const bool chunks =
        g->view.kind == KVANT_GENERAL_TRIPLETS || g->view.kind == KVANT_GENERAL_DIRECTIONS;
    const int n = chunks                                 ? (int)g->view.chunks.n
                  : g->view.kind == KVANT_GENERAL_SKETCH ? 0
                                                         : (int)g->head_dim,
              bits = g->view.kind == KVANT_GENERAL_POLAR ? (int)g->view.polar.bits
                                                         : (int)g->view.books[0].bits;
    for (int first = team.lane; first < n; first += GENERAL_AT_ONCE * team.lanes) {
        uint32_t x[GENERAL_AT_ONCE] = { 0 };
        unrolled_for (int i = 0; i < GENERAL_AT_ONCE; i++) {
            const int at = first + i * team.lanes;
            if (at < n)
                x[i] = chunks ? general_get_chunk(g, words, n, general_chunk_bits(g), token, at)
                              : general_get_code(g, words, bits, token, at);
        }
        unrolled_for (int i = 0; i < GENERAL_AT_ONCE; i++)
            if (first + i * team.lanes < n)
                codes[first + i * team.lanes] = x[i];
    }
}

/* y += the estimate that the sketch gives of the residual. */
KVANT_INLINE void general_add_sketch(general_team team, const kvant_general *g, const void *page,
                                     int token, const general_space *s)
{
    const float norm = general_from_half(general_halves(page, g->view.sketch_norms)[token]),
                scale = general_mul(norm, 1.2533141373155003f);
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        s->a[j] = general_get_code(g, general_words(page, g->view.sketch_codes), 1, token, j)
                      ? -1.0f
                      : 1.0f;
    general_rotate_back(team, &g->view.projection, g->tables, s->a, s->b);
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        s->y[j] = general_add(s->y[j], general_mul(scale, s->b[j]));
}

KVANT_INLINE float general_raw_number(const kvant_general *g, const void *page, size_t i)
{
    if (g->view.raw == 0)
        return ((const float *)page)[i];
    const uint16_t bits = ((const uint16_t *)page)[i];
    return g->view.raw == 1 ? general_from_half(bits) : general_from_bits((uint32_t)bits << 16);
}

/* Decodes a token to s->y, transformed. s->codes may be s->a; s->sums is not used. */
KVANT_INLINE void general_decode(general_team team, const kvant_general *g, const void *page,
                                 int token, const general_space *s)
{
    general_meet();
    if (g->view.kind == KVANT_GENERAL_RAW) {
        for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
            s->y[j] = general_raw_number(g, page, (size_t)token * (size_t)g->head_dim + (size_t)j);
    } else if (g->view.kind == KVANT_GENERAL_UNIFORM) {
        general_uniform(team, g, page, token, s->y);
    } else if (g->view.kind == KVANT_GENERAL_TIERS) {
        general_tiers(team, g, page, token, s);
    } else {
        const uint16_t *numbers = general_halves(page, g->metadata);
        general_get_codes(team, g, page, token, s->codes);
        general_meet();
        general_numbers(team, g, s->codes, general_from_half(numbers[token]),
                        numbers + GENERAL_TOKENS + 4 * token, s->y);
        general_meet();
        if (g->view.sketched)
            general_add_sketch(team, g, page, token, s);
    }
    general_meet();
}
