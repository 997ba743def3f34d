/* general_numbers.h - rows of pages in the general form (any/general.h) that only families of
 * papers have: from codes of triplets, directions, polar coordinates, tiers and sketches to
 * numbers. A team decodes a token: its codes to space.codes, and their numbers to space.y. */
#pragma once

#include "../any/general.h"

/* ---- numbers ---- */

KVANT_INLINE float general_dot3(float a, float b, float c, float d, float e, float f)
{
    return general_add(general_add(general_mul(a, b), general_mul(c, d)), general_mul(e, f));
}

/* (a b + c d) + (e f + g h) of four numbers each */
KVANT_INLINE float general_dot4(const float *x, const float *w)
{
    return general_add(general_add(general_mul(x[0], w[0]), general_mul(x[1], w[1])),
                       general_add(general_mul(x[2], w[2]), general_mul(x[3], w[3])));
}

/* The sum of products of two rows; with b NULL, the sum of the numbers a. All lanes get the sum. */
KVANT_INLINE float general_sum(general_team team, float *sums, const float *a, const float *b,
                               int n)
{
    general_meet();
    for (int j = team.lane; j < 16; j += team.lanes) {
        float sum = 0;
        for (int i = j; i < n; i += 16)
            sum = general_add(sum, b ? general_mul(a[i], b[i]) : a[i]);
        sums[j] = sum;
    }
    general_meet();
    return general_tree(sums);
}

/* A dot product by one lane. */
KVANT_INLINE float general_own_dot(const float *a, const float *b, int n)
{
    float s[16] = { 0 };
    int at = 0;
    for (; at + 16 <= n; at += 16)
        unrolled_for (int i = 0; i < 16; i++)
            s[i] = general_add(s[i], general_mul(a[at + i], b[at + i]));
    unrolled_for (int i = 0; i < 16; i++)
        if (at + i < n)
            s[i] = general_add(s[i], general_mul(a[at + i], b[at + i]));
    return general_tree(s);
}

/* ---- rotations ---- */

KVANT_INLINE void general_hadamard(general_team team, float *x, int n, float scale)
{
    for (int distance = 1; distance < n; distance *= 2) {
        general_meet();
        for (int i = team.lane; i < n / 2; i += team.lanes) {
            const int at = 2 * i - (i & (distance - 1));
            const float p = x[at], q = x[at + distance];
            x[at] = general_add(p, q);
            x[at + distance] = general_sub(p, q);
        }
    }
    general_meet();
    for (int i = team.lane; i < n; i += team.lanes)
        x[i] = general_mul(x[i], scale);
    general_meet();
}

/* to = R from; to and from do not overlap. */
KVANT_INLINE void general_rotate(general_team team, const kvant_rotation_position *place,
                                 const float *tables, const float *from, float *to)
{
    const int n = (int)place->n;
    const float *numbers = tables + place->numbers;
    general_meet();
    for (int i = team.lane; i < n; i += team.lanes)
        to[i] = place->dense ? general_own_dot(numbers + (size_t)i * (size_t)n, from, n)
                             : general_mul(from[i], numbers[i]);
    if (place->dense)
        general_meet();
    else
        general_hadamard(team, to, n, place->scale);
}

/* Sum over j of weights[j] rows[j][i], in this order, for rows of n numbers. Loads sixteen numbers
 * at a time, because they come from device memory. */
KVANT_INLINE float general_combine(const float *rows, const float *weights, int n, int i)
{
    float sum = 0, x[16];
    for (int first = 0; first < n; first += 16) {
        unrolled_for (int j = 0; j < 16; j++)
            x[j] = first + j < n ? rows[(size_t)(first + j) * (size_t)n + (size_t)i] : 0;
        unrolled_for (int j = 0; j < 16; j++)
            sum = first + j < n ? general_add(sum, general_mul(weights[first + j], x[j])) : sum;
    }
    return sum;
}

/* to = R^T from; from is overwritten. */
KVANT_INLINE void general_rotate_back(general_team team, const kvant_rotation_position *place,
                                      const float *tables, float *from, float *to)
{
    const int n = (int)place->n;
    const float *numbers = tables + place->numbers;
    if (!place->dense)
        general_hadamard(team, from, n, place->scale);
    general_meet();
    for (int i = team.lane; i < n; i += team.lanes)
        to[i] =
            place->dense ? general_combine(numbers, from, n, i) : general_mul(from[i], numbers[i]);
    general_meet();
}

/* A chunk code of `bits` bits. */
KVANT_INLINE uint32_t general_get_chunk(const kvant_general *g, const uint32_t *words, int n_chunks,
                                        int bits, int token, int chunk)
{
    uint32_t code = 0;
    for (int p = 16, shift = 0; p > 0; p /= 2) {
        if (!(bits & p))
            continue;
        const kvant_code_position at = chunk_place(p, n_chunks, g->keys, token, chunk);
        code |= (words[at.word] >> at.bit & ((1u << p) - 1)) << shift;
        words += chunk_plane_words(p, n_chunks, g->keys);
        shift += p;
    }
    return code;
}

KVANT_INLINE void general_put_chunk(const kvant_general *g, uint32_t *words, int n_chunks, int bits,
                                    int token, int chunk, uint32_t code)
{
    for (int p = 16, shift = 0; p > 0; p /= 2) {
        if (!(bits & p))
            continue;
        const kvant_code_position at = chunk_place(p, n_chunks, g->keys, token, chunk);
        const uint32_t ones = (1u << p) - 1;
        general_put_bits(words + at.word, (code >> shift & ones) << at.bit, ones << at.bit);
        words += chunk_plane_words(p, n_chunks, g->keys);
        shift += p;
    }
}

KVANT_INLINE bool general_has_chunks(const kvant_general *g)
{
    return g->view.kind == KVANT_GENERAL_TRIPLETS || g->view.kind == KVANT_GENERAL_DIRECTIONS ||
           g->view.kind == KVANT_GENERAL_FIELDS;
}

KVANT_INLINE int general_chunk_bits(const kvant_general *g)
{
    return (int)(g->view.chunks.index_bits + g->view.chunks.length_bits);
}

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

/* The place of the 4 halves of an outlier that a code names, from the page's first slot on; -1: the
 * code names none that exists. */
KVANT_INLINE int general_outlier_at(const kvant_general *g, uint32_t code, int token)
{
    const uint32_t bits = g->view.chunks.index_bits, index = code & ((1u << bits) - 1),
                   above = code >> bits, first = g->view.chunks.n_codewords;
    if (!g->view.chunks.pool)
        return index == first && above < g->view.chunks.slots
                   ? (int)(4 * (GENERAL_TOKENS * above + (uint32_t)token))
                   : -1;
    const bool named = g->view.kind == KVANT_GENERAL_FIELDS ? index == 0 : index >= first;
    const uint32_t slot = (index - first) << g->view.chunks.length_bits | above;
    return named && slot < g->view.chunks.pool ? (int)(4 * slot) : -1;
}

/* Decodes directions. slots: the page's slots, whose numbers are halves. */
KVANT_INLINE void general_directions(general_team team, const kvant_general *g,
                                     const uint32_t *codes, float scale, const uint16_t *slots,
                                     int token, float *to)
{
    const uint32_t bits = g->view.chunks.index_bits;
    for (int c = team.lane; c < (int)g->view.chunks.n; c += team.lanes) {
        const uint32_t index = codes[c] & ((1u << bits) - 1), above = codes[c] >> bits;
        const float *word = g->tables + g->view.chunks.codewords + (size_t)4 * index,
                    radius = general_mul(scale, (float)above);
        const int outlier = general_outlier_at(g, codes[c], token);
        unrolled_for (int i = 0; i < 4; i++)
            to[4 * c + i] =
                outlier < 0 ? general_mul(radius, word[i]) : general_from_half(slots[outlier + i]);
    }
}

/* The same for chunks of 4 symmetric integers. A slot that does not exist means zeros. */
KVANT_INLINE void general_fields(general_team team, const kvant_general *g, const uint32_t *codes,
                                 float scale, const uint16_t *slots, float *to)
{
    const uint32_t bits = g->view.chunks.index_bits, mask = (1u << bits) - 1;
    const int middle = 1 << (bits - 1);
    for (int c = team.lane; c < (int)g->view.chunks.n; c += team.lanes) {
        const int outlier = general_outlier_at(g, codes[c], 0);
        const bool zeros = outlier < 0 && (codes[c] & mask) == 0;
        unrolled_for (int i = 0; i < 4; i++) {
            const int level = (int)(codes[c] >> (uint32_t)i * bits & mask) - middle;
            to[4 * c + i] = zeros         ? 0
                            : outlier < 0 ? general_mul(scale, (float)level)
                                          : general_from_half(slots[outlier + i]);
        }
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
                                  float scale, const uint16_t *slots, int token, float *to)
{
    switch (g->view.kind) {
    case KVANT_GENERAL_TRIPLETS: general_triplets(team, g, codes, scale, to); break;
    case KVANT_GENERAL_DIRECTIONS:
        general_directions(team, g, codes, scale, slots, token, to);
        break;
    case KVANT_GENERAL_FIELDS: general_fields(team, g, codes, scale, slots, to); break;
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
    const bool chunks = general_has_chunks(g);
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

/* Decodes a token to s->y. */
KVANT_INLINE void general_decode_family(general_team team, const kvant_general *g, const void *page,
                                        int token, const general_space *s)
{
    if (g->view.kind == KVANT_GENERAL_TIERS) {
        general_tiers(team, g, page, token, s);
        return;
    }
    const uint16_t *numbers = general_halves(page, g->metadata);
    general_get_codes(team, g, page, token, s->codes);
    general_meet();
    general_numbers(team, g, s->codes, general_from_half(numbers[token]), numbers + GENERAL_TOKENS,
                    token, s->y);
    general_meet();
    if (g->view.sketched)
        general_add_sketch(team, g, page, token, s);
}
