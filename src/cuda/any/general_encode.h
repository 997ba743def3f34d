/* general_encode.h - rows to pages in the general form (general.h). A team encodes the row in
 * space.y as a token of a page, or returns that it does not fit. The last function encodes a group
 * of tokens. */
#pragma once

#include "general_decode.h"

#if KVANT_PAPERS
#include "../papers/general_rows.h"
#endif

/* ---- uniform groups ---- */

/* One way to quantise a group: the scale and zero point to store, and the step from numbers to
 * codes. */
typedef struct general_fit {
    uint16_t scale, zero;
    float size, from, inverse, low, high, offset;
} general_fit;

/* Computes only the step from numbers to codes. */
KVANT_INLINE general_fit general_step(const kvant_general *g, bool symmetric, float from,
                                      float inverse)
{
    const float levels = symmetric ? g->view.uniform.sym_levels : g->view.uniform.asym_levels;
    const general_fit f = { 0,       0,
                            0,       from,
                            inverse, symmetric ? -levels : 0,
                            levels,  symmetric ? -g->view.uniform.bias : 0 };
    return f;
}

KVANT_INLINE general_fit general_fit_of(const kvant_general *g, float min, float max,
                                        bool symmetric)
{
    general_fit f = general_step(g, symmetric, 0, 0);
    const float range = !symmetric                ? general_add(general_sub(max, min), 0.0f)
                        : fabsf(min) > fabsf(max) ? fabsf(min)
                                                  : fabsf(max);
    f.scale = general_to_half(general_div(range, f.high));
    f.zero = symmetric ? 0 : general_to_half(general_add(min, 0.0f)); /* -0 becomes 0 */
    f.size = general_from_half(f.scale);
    f.from = general_from_half(f.zero);
    f.inverse = f.size > 0 ? general_div(1, f.size) : 0;
    return f;
}

KVANT_INLINE uint32_t general_uniform_code(const general_fit *f, float x)
{
    float level = rintf(general_mul(general_sub(x, f->from), f->inverse));
    level = level < f->low ? f->low : level > f->high ? f->high : level;
    return (uint32_t)(level - f->offset);
}

/* The sum of squared or absolute differences after decoding. */
KVANT_INLINE float general_fit_error(const kvant_general *g, const general_fit *f,
                                     const general_run *x, int n)
{
    const bool squared = g->view.uniform.mode == GENERAL_HYBRID_PAPER;
    float sums[16] = { 0 };
    for (int at = 0; at < n; at += 16)
        unrolled_for (int i = 0; i < 16; i++) {
            if (at + i >= n)
                continue;
            const float number = general_at(x, at + i),
                        level = general_add((float)general_uniform_code(f, number), f->offset),
                        off =
                            general_sub(number, general_add(general_mul(f->size, level), f->from));
            sums[i] = general_add(sums[i], squared ? general_mul(off, off) : off < 0 ? -off : off);
        }
    return general_tree(sums);
}

KVANT_INLINE general_fit general_fit_group(const kvant_general *g, const general_run *x, int n)
{
    const uint32_t mode = g->view.uniform.mode;
    float min = general_at(x, 0), max = min;
    for (int i = 1; i < n; i++) {
        const float number = general_at(x, i);
        min = number < min ? number : min;
        max = number > max ? number : max;
    }
    general_fit f = general_fit_of(g, min, max, mode != GENERAL_ASYM);
    if (mode < GENERAL_HYBRID_PAPER)
        return f;
    general_fit other = general_fit_of(g, min, max, false);
    if (!(general_fit_error(g, &other, x, n) < general_fit_error(g, &f, x, n)))
        return f; /* a scale beyond fp16 makes the error a NaN */
    other.scale |= 0x8000u;
    return other;
}

KVANT_INLINE void general_put_fit(const kvant_general *g, const general_fit *f, uint16_t *at)
{
    at[0] = f->scale;
    if (g->view.uniform.mode != GENERAL_SYM)
        at[g->view.uniform.n_scales] = f->zero;
}

KVANT_INLINE bool general_encode_uniform(general_team team, const kvant_general *g,
                                         const general_space *s, int token, void *page)
{
    const int d = (int)g->head_dim, group = (int)g->view.uniform.group;
    uint16_t *numbers = (uint16_t *)(void *)((uint8_t *)page + g->metadata);
    bool fits = true;
    for (int j = 0; j < d; j++)
        fits = fits && general_fits(fabsf(s->y[j]));
    if (!fits)
        return false;
    general_meet();
    for (int at = team.lane; at * group < d; at += team.lanes) {
        const int first = at * group, n = d - first < group ? d - first : group;
        const general_run x = { s->y + first, NULL, 1, n };
        const general_fit f = general_fit_group(g, &x, n);
        general_put_fit(g, &f, numbers + general_scale_place(g, token, first));
        s->a[at] = f.from, s->b[at] = f.inverse, s->codes[at] = f.low < 0;
    }
    general_meet();
    for (int j = team.lane; j < d; j += team.lanes) {
        const int at = j / group;
        const general_fit f = general_step(g, s->codes[at] != 0, s->a[at], s->b[at]);
        general_put_code(g, (uint32_t *)page, (int)g->view.uniform.bits, token, j,
                         general_uniform_code(&f, s->y[j]));
    }
    return true;
}

/* ---- raw rows ---- */

KVANT_INLINE bool general_encode_raw(general_team team, const kvant_general *g,
                                     const general_space *s, int token, void *page)
{
    const uint32_t raw = g->view.raw, d = g->head_dim;
    const float limit = raw == 0 ? GENERAL_LARGEST : raw == 1 ? GENERAL_HALF_MAX : 3.3895314e38f;
    const size_t first = (size_t)token * d;
    bool fits = true;
    for (uint32_t j = 0; j < d; j++)
        fits = fits && fabsf(s->y[j]) <= limit;
    for (uint32_t j = (uint32_t)team.lane; fits && j < d; j += (uint32_t)team.lanes) {
        const uint32_t bits = general_to_bits(s->y[j]);
        if (raw == 0)
            ((float *)page)[first + j] = s->y[j];
        else
            ((uint16_t *)page)[first + j] =
                raw == 1 ? general_to_half(s->y[j])
                         : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
    return fits;
}

/* Encodes the row s->y, which is overwritten, as a token of the page. False when the row does not
 * fit; then nothing is written. */
KVANT_INLINE bool general_encode(general_team team, const kvant_general *g, const general_space *s,
                                 int token, void *page)
{
    general_meet();
    if (g->view.kind == KVANT_GENERAL_RAW)
        return general_encode_raw(team, g, s, token, page);
#if KVANT_PAPERS
    if (g->view.uniform.clusters) {
        const uint32_t nearest = general_subtract_nearest(team, g, s);
        return general_encode_uniform(team, g, s, token, page) &&
               general_put_nearest(team, g, nearest, token, page);
    }
#endif
    if (g->view.kind == KVANT_GENERAL_UNIFORM)
        return general_encode_uniform(team, g, s, token, page);
#if KVANT_PAPERS
    return general_encode_family(team, g, s, token, page);
#else
    return false;
#endif
}

/* Encodes a channel's numbers of a group of tokens from `first` on. */
KVANT_INLINE void general_encode_tokens(const kvant_general *g, const general_run *x, int first,
                                        int channel, void *page)
{
    const int n = (int)g->view.uniform.group;
    const general_fit f = general_fit_group(g, x, n);
    general_put_fit(g, &f,
                    (uint16_t *)(void *)((uint8_t *)page + g->metadata) +
                        general_scale_place(g, first, channel));
    for (int t = 0; t < n; t++)
        general_put_code(g, (uint32_t *)page, (int)g->view.uniform.bits, first + t, channel,
                         general_uniform_code(&f, general_at(x, t)));
}
