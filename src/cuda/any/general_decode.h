/* general_decode.h - rows of pages in the general form (general.h). A team decodes a token to
 * space.y. */
#pragma once

#include "general.h"

#if KVANT_PAPERS
#include "../papers/general_centroids.h"
#include "../papers/general_numbers.h"
#endif

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
                to[j] = x[i];
        }
    }
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
#if KVANT_PAPERS
        general_add_centroid(team, g, page, token, s->y);
#endif
    } else {
#if KVANT_PAPERS
        general_decode_family(team, g, page, token, s);
#endif
    }
    general_meet();
}
