/* polar_angles.h - codebooks for the angles of recursive polar coordinates (PolarQuant).
 *
 * A normally distributed vector has two parts with n1 and n2 numbers. The angle between the parts,
 * psi = atan(|second| / |first|), has the density cos(psi)^(n1 - 1) sin(psi)^(n2 - 1) on [0, pi /
 * 2]. A pair of numbers has a uniform angle on the circle. Angles are stored as unit vectors:
 * encoders compare cross products and need no arc tangent. */
#pragma once

#include <stdint.h>

#define KVANT_POLAR_MIN_BITS 2
#define KVANT_POLAR_MAX_BITS 4
#define KVANT_POLAR_MAX_LEVELS 16

typedef struct kvant_polar_book {
    float cos_level[KVANT_POLAR_MAX_LEVELS], sin_level[KVANT_POLAR_MAX_LEVELS];
    /* threshold i lies between levels i and i + 1; entries beyond the last are zero */
    float cos_threshold[KVANT_POLAR_MAX_LEVELS], sin_threshold[KVANT_POLAR_MAX_LEVELS];
} kvant_polar_book;

/* The Lloyd-Max codebook of psi, 2^bits levels in increasing order, 2^bits - 1 thresholds; n1, n2
 * >= 2 and at most 512. The same bits on every machine: computed from + - * / and square root
 * alone. */
void kvant_polar_angle_book(uint32_t n1, uint32_t n2, uint32_t bits, kvant_polar_book *book);

/* The circle in 2^bits equal sectors, sector k from k pi / 2^(bits-1): levels are their middles;
 * the 2^(bits-2) - 1 thresholds are those inside the first quadrant. */
void kvant_polar_circle_book(uint32_t bits, kvant_polar_book *book);
