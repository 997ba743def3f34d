/* general_centroids.h - centroids in the general form (any/general.h): uniform codes of a row minus
 * its nearest centroid (format.md, "Centroids"). */
#pragma once

#include "../any/general.h"

/* The numbers at an offset in the tables of the kv head. */
KVANT_INLINE const float *general_table(general_team team, const kvant_general *g, uint32_t place)
{
    return g->tables + (size_t)g->head_stride * (size_t)team.kv_head + place;
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

/* Adds the token's centroid to the numbers of its codes. */
KVANT_INLINE void general_add_centroid(general_team team, const kvant_general *g, const void *page,
                                       int token, float *y)
{
    if (!g->view.uniform.clusters)
        return;
    const float *centroid = general_centroid(team, g, page, token);
    for (int j = team.lane; j < (int)g->head_dim; j += team.lanes)
        y[j] = centroid ? general_add(y[j], centroid[j]) : 0;
}

/* Subtracts the nearest centroid from s->y and returns its index. */
KVANT_INLINE uint32_t general_subtract_nearest(general_team team, const kvant_general *g,
                                               const general_space *s)
{
    const int n = (int)g->view.uniform.clusters, d = (int)g->head_dim;
    const float *columns = general_table(team, g, g->view.uniform.columns);
    float least = INFINITY;
    uint32_t best = 0;
    for (int c = team.lane; n > 1 && c < n; c += team.lanes) {
        float distance = 0;
        for (int j = 0; j < d; j++) {
            const float off = general_sub(s->y[j], columns[(size_t)j * (size_t)n + (size_t)c]);
            distance = general_add(distance, general_mul(off, off));
        }
        if (distance < least)
            least = distance, best = (uint32_t)c;
    }
    s->a[team.lane] = least, s->codes[team.lane] = best;
    general_meet();
    for (int i = 0; i < team.lanes; i++)
        if (s->a[i] < least || (s->a[i] == least && s->codes[i] < best))
            least = s->a[i], best = s->codes[i];
    general_meet();
    const float *centroid =
        general_table(team, g, g->view.uniform.centroids) + (size_t)best * (size_t)d;
    for (int j = team.lane; j < d; j += team.lanes)
        s->y[j] = general_sub(s->y[j], centroid[j]);
    general_meet();
    return best;
}

/* Writes the index of the centroid. A scale of 0 would mean that the token was never written. */
KVANT_INLINE bool general_put_nearest(general_team team, const kvant_general *g, uint32_t nearest,
                                      int token, void *page)
{
    uint16_t *scale = (uint16_t *)(void *)((uint8_t *)page + g->metadata) + token;
    uint8_t *index =
        (uint8_t *)page + g->view.uniform.index + g->view.uniform.index_bytes * (uint32_t)token;
    if (team.lane == 0 && *scale == 0) /* the first group's, which lane 0 has written */
        *scale = 1;
    for (uint32_t i = (uint32_t)team.lane; i < g->view.uniform.index_bytes;
         i += (uint32_t)team.lanes)
        index[i] = (uint8_t)(nearest >> 8 * i);
    return true;
}
