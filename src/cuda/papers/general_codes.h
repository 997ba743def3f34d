/* general_codes.h - rows to codes in the general form (general.h): codebooks, triplets, directions,
 * polar. A team finds the codes of the row in space.y and its scale. Only outliers are written to
 * the page. */
#pragma once

#include "general_pool.h"

/* A token's scale before it is rounded to fp16, and whether the row fits. */
typedef struct general_scale {
    float stored;
    bool fits;
} general_scale;

/* fp16(length / sqrt(dim)) and its inverse, for a row whose squares have this sum. */
typedef struct general_norm {
    float exact, scale, inverse;
} general_norm;

KVANT_INLINE general_norm general_norm_of(float squares, float inverse_sqrt_dim)
{
    general_norm norm;
    norm.exact = general_mul(general_sqrt(squares), inverse_sqrt_dim);
    norm.scale = general_round_to_half(norm.exact);
    norm.inverse = norm.scale > 0 ? general_div(1, norm.scale) : 0;
    return norm;
}

/* The number of the n - 1 rising thresholds that lie below x; n is a power of two. */
KVANT_INLINE int general_count_below(const float *thresholds, int n, float x)
{
    int i = 0;
    for (int step = n / 2; step > 0; step /= 2)
        i += x > thresholds[i + step - 1] ? step : 0;
    return i;
}

/* ---- codebooks ---- */

/* Finds the codes of the book's n numbers at y. `to` is scratch for a row. */
KVANT_INLINE general_scale general_codebook(general_team team, const kvant_general *g,
                                            const kvant_codebook_position *book, const float *y,
                                            float *to, const general_space *s)
{
    const float *values = g->tables + book->values;
    const float squares = general_sum(team, s->sums, y, y, (int)book->n);
    const general_norm norm = general_norm_of(squares, book->inverse_sqrt_dim);
    general_scale scale = { norm.scale, false };
    for (int j = team.lane; j < (int)book->n; j += team.lanes) {
        s->codes[j] = (uint32_t)general_count_below(g->tables + book->thresholds, 1 << book->bits,
                                                    general_mul(y[j], norm.inverse));
        to[j] = values[s->codes[j]];
    }
    if (g->view.unbiased && norm.scale > 0) {
        const float product = general_sum(team, s->sums, y, to, (int)book->n);
        scale.stored = product > 0 ? general_div(squares, product) : 0;
    }
    scale.fits = general_fits(norm.exact) && general_fits(scale.stored);
    return scale;
}

/* ---- triplets ---- */

/* The best direction so far: the first with the highest quality, which is the squared cosine with
 * the cosine's sign, times den. */
typedef struct general_best {
    float quality, den, dot;
    int u, w;
} general_best;

KVANT_INLINE void general_try(const float *levels, const float *p, int u, int w, general_best *best)
{
    float c[3];
    general_point(levels[u], levels[w], c);
    const float dot = general_dot3(p[0], c[0], p[1], c[1], p[2], c[2]),
                den = general_dot3(c[0], c[0], c[1], c[1], c[2], c[2]),
                quality = general_mul(dot, fabsf(dot));
    if (!(general_mul(quality, best->den) > general_mul(best->quality, den)))
        return;
    best->quality = quality, best->den = den, best->dot = dot, best->u = u, best->w = w;
}

/* The first of the levels that are tried for a coordinate; -1 stands for level 0. */
KVANT_INLINE int general_first_level(const kvant_general *g, int n, float x)
{
    const uint32_t rounding = g->view.chunks.rounding;
    const int i = general_count_below(g->tables + g->view.chunks.direction_thresholds, n, x);
    return rounding == 0                                                               ? 0
           : rounding == 1 || rounding == 4                                            ? i
           : rounding == 3 || !(x > g->tables[g->view.chunks.direction + (uint32_t)i]) ? i - 1
                                                                                       : i;
}

KVANT_INLINE int general_within(int i, int n)
{
    return i < 0 ? 0 : i < n ? i : n - 1;
}

/* The code of a triplet; *along: the triplet's projection on its coded direction. */
KVANT_INLINE uint32_t general_triplet_code(const kvant_general *g, const float x[3], float *along)
{
    const int bits = (int)g->view.chunks.index_bits / 2, n = 1 << bits,
              width = g->view.chunks.rounding == 4 ? 2
                      : g->view.chunks.rounding    ? (int)g->view.chunks.rounding
                                                   : n;
    const float sum = general_add(general_add(fabsf(x[0]), fabsf(x[1])), fabsf(x[2])),
                length = sum > 0 ? sum : 1;
    const float p[3] = { general_div(x[0], length), general_div(x[1], length),
                         general_div(x[2], length) };
    const float fold = p[2] < 0 ? -p[2] : 0;
    const int u = general_first_level(g, n, general_add(p[0], copysignf(fold, p[0]))),
              w = general_first_level(g, n, general_add(p[1], copysignf(fold, p[1])));
    general_best best = { -4, 1, 0, 0, 0 };
    for (int i = 0; i < width * width; i++)
        general_try(g->tables + g->view.chunks.direction, p, general_within(u + i / width, n),
                    general_within(w + i % width, n), &best);
    *along = general_div(general_mul(length, best.dot), general_sqrt(best.den));
    const float norm = general_sqrt(general_dot3(x[0], x[0], x[1], x[1], x[2], x[2]));
    const int k = general_count_below(g->tables + g->view.chunks.norm_thresholds,
                                      1 << g->view.chunks.length_bits,
                                      g->view.chunks.rounding == 1 ? norm : *along);
    return (uint32_t)best.u | (uint32_t)best.w << bits | (uint32_t)k << 2 * bits;
}

KVANT_INLINE bool general_pads_zero(const kvant_general *g)
{
    return g->view.chunks.zero_padding || g->view.chunks.rounding == 1;
}

/* Fills the missing channels of the last triplet with multiples of the real channels' magnitudes
 * (codec/papers/octopus_book.c says why). left: the number of real channels. */
KVANT_INLINE void general_pad(int left, int trial, float size, float x[3])
{
    const float one_y[] = { -1, -1.25f, 0.375f, 0, 1.75f, 0.75f, -2, 0.75f, -0.625f, -0.125f },
                one_z[] = { 0.375f, -2, -0.375f, 0, -0.125f, -0.125f, 1, 1.25f, 2, -0.75f },
                two_z[] = { 0.3125f, 1.25f, 0.0625f, -0.625f, -2, -0.875f };
    if (left == 1)
        x[1] = general_mul(one_y[trial], size);
    x[2] = general_mul(left == 1 ? one_z[trial] : two_z[trial % 6], size);
}

/* Encodes item i of a row: a whole triplet, or a trial of the last one. along: its part of the sum
 * for the scale. */
KVANT_INLINE void general_triplet_item(const kvant_general *g, const general_space *s,
                                       float inverse, int i)
{
    const int whole = (int)g->head_dim / 3, left = (int)g->head_dim % 3;
    const bool is_whole = i < whole;
    const float *from = s->y + 3 * (is_whole ? i : whole);
    float x[3] = { general_mul(from[0], inverse),
                   is_whole || left == 2 ? general_mul(from[1], inverse) : 0,
                   is_whole ? general_mul(from[2], inverse) : 0 },
          along;
    if (!is_whole && !general_pads_zero(g))
        general_pad(left, i - whole, general_add(fabsf(x[0]), fabsf(x[1])), x);
    s->codes[i] = general_triplet_code(g, x, &along);
    s->a[i] = general_mul(
        g->tables[g->view.chunks.norm + (s->codes[i] >> g->view.chunks.index_bits)], along);
    if (is_whole)
        return;
    float decoded[3];
    general_triplet(g, s->codes[i], 1, decoded);
    const float dx = general_sub(x[0], decoded[0]),
                dy = left == 2 ? general_sub(x[1], decoded[1]) : 0;
    s->b[i] = general_add(general_mul(dx, dx), general_mul(dy, dy));
    s->a[i] =
        general_add(general_mul(x[0], decoded[0]), left == 2 ? general_mul(x[1], decoded[1]) : 0);
}

KVANT_INLINE general_scale general_triplets_codes(general_team team, const kvant_general *g,
                                                  const general_space *s)
{
    const int whole = (int)g->head_dim / 3, left = (int)g->head_dim % 3,
              trials = left == 0              ? 0
                       : general_pads_zero(g) ? 1
                       : left == 1            ? 10
                                              : 6;
    const float squares = general_sum(team, s->sums, s->y, s->y, (int)g->head_dim);
    const general_norm norm = general_norm_of(squares, g->view.inverse_sqrt_dim);
    for (int i = team.lane; i < whole + trials; i += team.lanes)
        general_triplet_item(g, s, norm.inverse, i);
    general_meet();
    int best = whole;
    for (int i = whole + 1; i < whole + trials; i++)
        best = s->b[i] < s->b[best] ? i : best;
    const uint32_t last = trials ? s->codes[best] : 0;
    const float along = trials ? s->a[best] : 0;
    general_meet();
    if (trials && team.lane == 0)
        s->codes[whole] = last, s->a[whole] = along;
    const float product = general_sum(team, s->sums, s->a, NULL, (int)g->view.chunks.n),
                unbiased =
                    product > 0 ? general_div(general_mul(squares, norm.inverse), product) : 0;
    const float stored = g->view.unbiased && product > 0 && unbiased <= general_mul(4, norm.scale)
                             ? unbiased
                             : norm.scale;
    const general_scale scale = { stored, general_fits(norm.exact) && general_fits(stored) };
    return scale;
}

/* ---- directions ---- */

/* The closest Hurwitz unit. */
KVANT_INLINE uint32_t general_closest_unit(const float y[4])
{
    float top = fabsf(y[0]);
    bool minus = y[0] < 0;
    uint32_t largest = 0, signs = 0;
    unrolled_for (uint32_t i = 0; i < 4; i++) {
        signs |= (uint32_t)(y[i] < 0) << i;
        if (fabsf(y[i]) > top)
            top = fabsf(y[i]), largest = i, minus = y[i] < 0;
    }
    const float half = general_mul(
        general_add(general_add(fabsf(y[0]), fabsf(y[1])), general_add(fabsf(y[2]), fabsf(y[3]))),
        0.5f);
    return top >= half ? 2 * largest + minus : 8 + signs;
}

/* ((a b + c d) + e f) + g h, a to d of one sign each */
KVANT_INLINE float general_chain(float a, float b, float c, float d, float e, float f, float g,
                                 float h)
{
    return general_add(
        general_add(general_add(general_mul(a, b), general_mul(c, d)), general_mul(e, f)),
        general_mul(g, h));
}

/* y = x conj(s) */
KVANT_INLINE void general_conjugate(const float *x, const float *s, float y[4])
{
    y[0] = general_chain(x[0], s[0], x[1], s[1], x[2], s[2], x[3], s[3]);
    y[1] = general_chain(x[1], s[0], -x[0], s[1], x[3], s[2], -x[2], s[3]);
    y[2] = general_chain(x[2], s[0], -x[3], s[1], -x[0], s[2], x[1], s[3]);
    y[3] = general_chain(x[3], s[0], x[2], s[1], -x[1], s[2], -x[0], s[3]);
}

KVANT_INLINE uint32_t general_closest_coset(const float *secondaries, uint32_t n, const float *x)
{
    float best = 0, y[4];
    uint32_t which = 0;
    for (uint32_t k = 0; k < n; k++) {
        general_conjugate(x, secondaries + (size_t)4 * k, y);
        const float a = fabsf(y[0]), b = fabsf(y[1]), c = fabsf(y[2]), d = fabsf(y[3]),
                    ab = a > b ? a : b, cd = c > d ? c : d, largest = ab > cd ? ab : cd,
                    half = general_mul(general_add(general_add(a, b), general_add(c, d)), 0.5f),
                    closeness = largest > half ? largest : half;
        if (closeness > best)
            best = closeness, which = k;
    }
    general_conjugate(x, secondaries + (size_t)4 * which, y);
    return 24 * which + general_closest_unit(y);
}

KVANT_INLINE float general_hurwitz(uint32_t p, uint32_t i)
{
    return p >= 8 ? (p - 8) >> i & 1 ? -0.5f : 0.5f : p / 2 != i ? 0.0f : p % 2 ? -1.0f : 1.0f;
}

KVANT_INLINE float general_length(const float *x)
{
    return general_sqrt(general_dot4(x, x));
}

/* Finds the closest unit and the signs of the remainder's projections. */
KVANT_INLINE uint32_t general_signs(const float *directions, uint32_t n_codewords, const float *x)
{
    const uint32_t unit = general_closest_unit(x);
    const float norm = general_length(x);
    float rest[4];
    uint32_t signs = 0;
    unrolled_for (uint32_t i = 0; i < 4; i++)
        rest[i] = general_sub(x[i], general_mul(norm, general_hurwitz(unit, i)));
    for (uint32_t k = 0; 24u << k < n_codewords; k++)
        signs |= (uint32_t)(general_dot4(rest, directions + (size_t)4 * k) < 0) << k;
    return unit + 24 * signs;
}

KVANT_INLINE uint32_t general_largest_product(const float *entries, uint32_t n, const float *x)
{
    float best = -GENERAL_LARGEST;
    uint32_t which = 0;
    for (uint32_t k = 0; k < n; k++) {
        const float product = general_dot4(x, entries + (size_t)4 * k);
        if (product > best)
            best = product, which = k;
    }
    return which;
}

KVANT_INLINE uint32_t general_greedy(const float *entries, uint32_t n_codewords, const float *x)
{
    uint32_t n = 1;
    while (n * n < n_codewords)
        n++;
    const uint32_t first = general_largest_product(entries, n, x);
    const float half = general_mul(general_length(x), 0.5f);
    float rest[4];
    unrolled_for (int i = 0; i < 4; i++)
        rest[i] =
            general_sub(x[i], general_mul(half, entries[(size_t)4 * (size_t)first + (size_t)i]));
    return first + n * general_largest_product(entries + (size_t)4 * n, n, rest);
}

KVANT_INLINE uint32_t general_closest_direction(const kvant_general *g, const float *x)
{
    const uint32_t n = g->view.chunks.n_codewords;
    const float *table = g->tables + g->view.chunks.table;
    switch (g->view.chunks.search) {
    case KVANT_SEARCH_COSETS: return general_closest_coset(table, n / 24, x);
    case KVANT_SEARCH_SIGNS: return general_signs(table, n, x);
    case KVANT_SEARCH_PRODUCTS:
        return general_largest_product(g->tables + g->view.chunks.codewords, n, x);
    case KVANT_SEARCH_GREEDY: break;
    }
    return general_greedy(table, n, x);
}

/* The lower median of n numbers, for all lanes: the number that has (n - 1) / 2 numbers before it
 * in rising order. */
KVANT_INLINE float general_median(general_team team, float *sums, const float *x, int n)
{
    for (int i = team.lane; i < n; i += team.lanes) {
        int before = 0;
        for (int j = 0; j < n; j++)
            before += x[j] < x[i] || (x[j] == x[i] && j < i);
        if (before == (n - 1) / 2)
            sums[0] = x[i];
    }
    general_meet();
    return sums[0];
}

/* Finds outliers among the norms in s->b. The slot of an outlier goes to s->codes, and its norm
 * becomes 0. Returns the number of outliers. */
KVANT_INLINE int general_find_outliers(general_team team, const kvant_general *g,
                                       const general_space *s)
{
    const int n = (int)g->view.chunks.n, slots = (int)g->view.chunks.slots;
    const float threshold =
        slots ? general_mul(g->view.chunks.multiple, general_median(team, s->sums, s->b, n)) : 0;
    for (int slot = 0; slot < slots; slot++) {
        int largest = 0;
        for (int c = 1; c < n; c++)
            largest = s->b[c] > s->b[largest] ? c : largest;
        if (!(s->b[largest] > threshold))
            return slot;
        general_meet();
        if (team.lane == 0)
            s->b[largest] = 0, s->codes[largest] = (uint32_t)slot;
        general_meet();
    }
    return slots;
}

/* The code that names a slot, of the token or of the page. */
KVANT_INLINE uint32_t general_slot_code(const kvant_general *g, uint32_t slot)
{
    const uint32_t bits = g->view.chunks.index_bits,
                   above = g->view.chunks.pool ? g->view.chunks.length_bits : 31;
    return (g->view.chunks.n_codewords + (slot >> above)) | (slot & ((1u << above) - 1)) << bits;
}

/* Writes codes to s->codes, also of outliers. pool: outliers of the page, as for
 * general_encode_pooled; NULL: of the token, and *n_outliers is their number. */
KVANT_INLINE general_scale general_directions_codes(general_team team, const kvant_general *g,
                                                    const general_space *s,
                                                    const general_pool *pool, int *n_outliers)
{
    const int n = (int)g->view.chunks.n, bits = (int)g->view.chunks.index_bits;
    const float top = (float)((1u << g->view.chunks.length_bits) - 1);
    float magnitude = 0, largest = 0;
    for (int j = 0; j < 4 * n; j++)
        magnitude = fabsf(s->y[j]) <= magnitude ? magnitude : fabsf(s->y[j]);
    for (int c = team.lane; c < n; c += team.lanes) {
        s->b[c] = general_length(s->y + 4 * c);
        s->codes[c] = GENERAL_NO_SLOT;
    }
    general_meet();
    if (pool)
        general_take_slots(team, g, s, pool);
    else
        *n_outliers = general_find_outliers(team, g, s);
    for (int c = 0; c < n; c++)
        if (s->codes[c] == GENERAL_NO_SLOT || g->view.chunks.whole_range)
            largest = s->b[c] > largest ? s->b[c] : largest;
    const float step = general_round_to_half(general_div(largest, top)),
                inverse = step > 0 ? general_div(1, step) : 0;
    general_meet();
    for (int c = team.lane; c < n; c += team.lanes) {
        const bool ordinary = s->codes[c] == GENERAL_NO_SLOT;
        const float *x = s->y + 4 * c, level = rintf(general_mul(ordinary ? s->b[c] : 0, inverse)),
                    radius = level < top ? level : top;
        const uint32_t index = general_closest_direction(g, x);
        s->a[c] = general_mul(
            radius, general_dot4(x, g->tables + g->view.chunks.codewords + (size_t)4 * index));
        s->b[c] = radius > 0 ? general_dot4(x, x) : 0; /* the chunks that count */
        s->codes[c] =
            ordinary ? index | (uint32_t)radius << bits : general_slot_code(g, s->codes[c]);
    }
    general_scale scale = { step, false };
    if (g->view.unbiased && step > 0) {
        const float squares = general_sum(team, s->sums, s->b, NULL, n),
                    products = general_sum(team, s->sums, s->a, NULL, n);
        scale.stored = products > 0 ? general_div(squares, products) : 0;
    }
    general_meet();
    scale.fits = general_fits(magnitude) && general_fits(scale.stored);
    return scale;
}

/* Stores outliers; free slots become zeros. */
KVANT_INLINE void general_put_outliers(general_team team, const kvant_general *g,
                                       const general_space *s, int n_outliers, int token,
                                       uint16_t *slots)
{
    for (int c = team.lane; c < (int)g->view.chunks.n; c += team.lanes) {
        const int at = general_outlier_at(g, s->codes[c], token);
        unrolled_for (int i = 0; i < 4; i++)
            if (at >= 0)
                slots[at + i] = general_to_half(s->y[4 * c + i]);
    }
    for (int slot = n_outliers + team.lane; slot < (int)g->view.chunks.slots; slot += team.lanes)
        unrolled_for (int i = 0; i < 4; i++)
            slots[4 * (GENERAL_TOKENS * slot + token) + i] = 0;
}

/* ---- fields ---- */

/* Finds the codes of 4 symmetric integers per chunk (codec/papers/naive.c). Returns the scale.
 * pool: as for general_encode_pooled. */
KVANT_INLINE float general_fields_codes(general_team team, const kvant_general *g,
                                        const general_space *s, const general_pool *pool)
{
    const uint32_t bits = g->view.chunks.index_bits;
    const int middle = 1 << (bits - 1);
    const float top = (float)(middle - 1);
    float largest = 0;
    general_take_slots(team, g, s, pool);
    for (int j = 0; j < (int)g->head_dim; j++)
        if (s->codes[j / 4] == GENERAL_NO_SLOT || g->view.chunks.whole_range)
            largest = fabsf(s->y[j]) > largest ? fabsf(s->y[j]) : largest;
    const float scale = general_round_to_half(general_div(largest, top)),
                inverse = scale > 0 ? general_div(1, scale) : 0;
    general_meet();
    for (int c = team.lane; c < (int)g->view.chunks.n; c += team.lanes) {
        uint32_t code = 0;
        unrolled_for (int i = 0; i < 4; i++) {
            const float x = general_mul(s->y[4 * c + i], inverse), cut = x < -top  ? -top
                                                                         : x > top ? top
                                                                                   : x;
            code |= (uint32_t)((int)rintf(cut) + middle) << (uint32_t)i * bits;
        }
        s->codes[c] = s->codes[c] == GENERAL_NO_SLOT ? code : s->codes[c] << bits;
    }
    general_meet();
    return scale;
}

/* ---- polar ---- */

/* Reflects (a, b) into the first quadrant and returns the quadrant; a point on a boundary counts to
 * the lower quadrant. */
KVANT_INLINE uint32_t general_fold(float *a, float *b)
{
    const float x = *a, y = *b;
    const bool left = y >= 0 ? x < 0 : x <= 0;
    const uint32_t quadrant = y >= 0 ? (left ? 1 : 0) : (left ? 2 : 3);
    *a = quadrant % 2 ? fabsf(y) : fabsf(x);
    *b = quadrant % 2 ? fabsf(x) : fabsf(y);
    return quadrant;
}

/* Makes a node and a code of a pair of nodes. */
KVANT_INLINE void general_polar_pair(const kvant_general *g, int list, bool last,
                                     const float *nodes, float *node, uint32_t *code)
{
    const int bits = (int)g->view.polar.bits, n = (1 << (list ? bits : bits - 2)) - 1;
    const float *cosines = general_polar_book(g, list, last) + 32, *sines = cosines + 16;
    float a = nodes[0], b = nodes[1];
    *code = list ? 0 : general_fold(&a, &b) << (bits - 2);
    for (int k = 0; k < n; k++)
        *code += general_mul(b, cosines[k]) > general_mul(a, sines[k]);
    *node = general_sqrt(general_add(general_mul(a, a), general_mul(b, b)));
}

KVANT_INLINE general_scale general_polar_codes(general_team team, const kvant_general *g,
                                               const general_space *s)
{
    const int d = (int)g->head_dim;
    const float squares = general_sum(team, s->sums, s->y, s->y, d);
    const general_norm norm = general_norm_of(squares, g->view.inverse_sqrt_dim);
    const float *from = s->y;
    uint32_t *codes = s->codes;
    for (int list = 0, nodes = d; list < (int)g->view.polar.depth; list++) {
        float *to = list % 2 ? s->b : s->a;
        const int pairs = nodes / 2, next = pairs + nodes % 2;
        for (int i = team.lane; i < next; i += team.lanes)
            if (i < pairs)
                general_polar_pair(g, list, i == pairs - 1, from + 2 * i, to + i, codes + i);
            else
                to[i] = from[2 * i];
        general_meet();
        from = to, codes += pairs, nodes = next;
    }
    if (team.lane == 0)
        s->codes[d - 1] = 0;
    general_scale scale = { norm.scale, false };
    if (g->view.unbiased && norm.scale > 0) {
        for (int j = team.lane; j < d; j += team.lanes)
            s->a[j] = general_polar_number(g, s->codes, j);
        const float product = general_sum(team, s->sums, s->y, s->a, d);
        scale.stored = product > 0 ? general_div(squares, product) : 0;
    }
    scale.fits = general_fits(norm.exact) && general_fits(scale.stored);
    return scale;
}
