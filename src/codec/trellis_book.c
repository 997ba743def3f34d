/* trellis_book.c - see trellis_book.h. scripts/trellis_levels.py computes the levels. */
#include "trellis_book.h"

#include <math.h>

typedef struct level_set {
    uint32_t bits, per_deviation; /* levels per standard deviation */
    int8_t positive[KVANT_TRELLIS_MAX_LEVELS / 2];
} level_set;

static const level_set level_sets[] = {
    { 2, 58, { 2, 14, 27, 39, 47, 66, 85, 127 } },
    { 3, 44, { 2, 6, 11, 15, 19, 24, 29, 34, 39, 45, 51, 58, 67, 78, 96, 124 } },
    { 4, 38, { 0,  3,  5,  7,  8,  10, 13, 15, 16, 18, 21, 23, 25, 27, 30,  32,
               34, 36, 39, 42, 44, 47, 51, 54, 58, 62, 67, 72, 79, 89, 102, 125 } },
};

#define CELLS_PER_DEVIATION 64 /* so KVANT_TRELLIS_CELLS reach 4 deviations to both sides */

/* Squared distances of a cell to the nearest level of every subset, less the least of them. */
static void fill_cell(kvant_trellis *trellis, const level_set *set, uint32_t cell)
{
    const int64_t x = ((int64_t)cell - KVANT_TRELLIS_CELLS / 2) * set->per_deviation;
    int64_t cost[KVANT_TRELLIS_SUBSETS], least = INT64_MAX;
    for (uint32_t z = 0; z < KVANT_TRELLIS_SUBSETS; z++) {
        cost[z] = INT64_MAX;
        for (uint32_t i = 0; i < 1u << (set->bits - 1); i++) {
            const int64_t away =
                x - CELLS_PER_DEVIATION * trellis->levels[KVANT_TRELLIS_SUBSETS * i + z];
            if (away * away < cost[z]) {
                cost[z] = away * away;
                trellis->nearest[cell][z] = (uint8_t)i;
            }
        }
        least = cost[z] < least ? cost[z] : least;
    }
    for (uint32_t z = 0; z < KVANT_TRELLIS_SUBSETS; z++) {
        const int64_t more = (cost[z] - least) >> (18 - 2 * set->bits);
        trellis->costs[cell][z] =
            (uint16_t)(more < KVANT_TRELLIS_MAX_COST ? more : KVANT_TRELLIS_MAX_COST);
    }
}

static void fill_levels(kvant_trellis *trellis, const level_set *set, uint32_t plane_bits)
{
    const uint32_t n = 4u << set->bits;
    for (uint32_t i = 0; i < n / 2; i++) {
        trellis->levels[n / 2 + i] = set->positive[i];
        trellis->levels[n / 2 - 1 - i] = (int8_t)-set->positive[i];
    }
    for (uint32_t i = 0; i < KVANT_TRELLIS_MAX_LEVELS; i++) {
        const uint32_t low = plane_bits - 1,
                       last = i >> (plane_bits + 2) & ((1u << (set->bits - plane_bits)) - 1);
        const uint32_t code = (i >> 1 & ((1u << low) - 1)) | last << low; /* less its lowest bit */
        const uint32_t subset = (i & 1) | (i >> plane_bits & 3) << 1;
        trellis->in_words[i] =
            (uint8_t)(128 + trellis->levels[KVANT_TRELLIS_SUBSETS * code + subset]);
    }
}

/* The channel at (word, field, lane) of a key row in the order of steps. Steps run through
 * consecutive words first, then through the fields of a word, then through lanes. So the codes that
 * a step depends on lie in the same field of preceding words. */
static uint32_t key_channel(const kvant_plane *plane, uint32_t lane, uint32_t field, uint32_t unit)
{
    const uint32_t odd = plane->bits * field / 8, half = field % 2;
    return KVANT_TILE * (plane->tiles * unit + field / 2 % plane->tiles) + 8 * half + 2 * lane +
           odd;
}

static void fill_key_steps(kvant_trellis *trellis, const kvant_layout *layout)
{
    const kvant_plane *plane = &layout->planes[0];
    uint32_t step = 0;
    for (uint32_t lane = 0; lane < 4; lane++)
        for (uint32_t field = 0; field < 16 / plane->bits; field++)
            for (uint32_t unit = 0; unit < plane->units; unit++) {
                const uint32_t channel = key_channel(plane, lane, field, unit);
                if (channel < layout->padded_dim) /* the last unit may lack tiles */
                    trellis->steps[channel] = (uint16_t)step++;
            }
}

static void fill_value_steps(kvant_trellis *trellis, const kvant_layout *layout)
{
    uint32_t step = 0;
    for (uint32_t lane = 0; lane < 4; lane++)
        for (uint32_t half = 0; half < 2; half++)
            for (uint32_t rt = lane; rt < layout->row_tiles; rt += 4)
                for (uint32_t r = 0; r < 8; r++)
                    trellis->steps[KVANT_TILE * rt + 8 * half + r] = (uint16_t)step++;
}

void kvant_trellis_book_init(kvant_trellis_book *book, const kvant_layout *layout)
{
    kvant_trellis *trellis = &book->trellis;
    const level_set *set = &level_sets[layout->bits - 2];
    const uint32_t n = 4u << layout->bits;
    trellis->bits = layout->bits;
    fill_levels(trellis, set, layout->planes[0].bits);
    for (uint32_t i = 0; i < n; i++)
        book->values[i] = (float)(trellis->levels[i] / (double)set->per_deviation);
    book->unit = (float)(1 / (double)set->per_deviation);
    book->inverse_sqrt_dim = (float)(1 / sqrt((double)layout->head_dim));
    for (uint32_t cell = 0; cell < KVANT_TRELLIS_CELLS; cell++)
        fill_cell(trellis, set, cell);
    trellis->n_steps = layout->padded_dim;
    if (layout->role == KVANT_ROLE_K)
        fill_key_steps(trellis, layout);
    else
        fill_value_steps(trellis, layout);
}
