/* code_at.h - reads one scalar code of a page, for the kernels in portable C. */
#pragma once

#include "kernels.h"

/* The code in word `at` (row tiles of the group x lane + row tile) of a column tile. odd: the half
 * of the word that has the field. */
static inline uint32_t kvant_code_at(const kvant_layout *layout, const uint32_t *words,
                                     uint32_t group, uint32_t ct, uint32_t at, uint32_t field,
                                     uint32_t odd)
{
    uint32_t code = 0, tiles = kvant_layout_group_tiles(layout, group);
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_plane *plane = &layout->planes[i];
        size_t first =
            (size_t)128 * group * plane->units + (size_t)32 * tiles * (ct / plane->tiles);
        uint32_t bit = plane->bits * (4 * (ct % plane->tiles) + field) + 16 * odd;
        code |= (words[plane->word_offset + first + at] >> bit & ((1u << plane->bits) - 1))
                << plane->shift;
    }
    return code;
}
