/* polar_angles.h - codebooks for the angles of recursive polar coordinates (PolarQuant).
 *
 * A normally distributed vector has two parts with n1 and n2 numbers. The angle between the parts
 * is psi = atan(|second| / |first|). On [0, pi / 2] it has the density cos(psi)^(n1 - 1)
 * sin(psi)^(n2 - 1). The angle of a pair of numbers is uniform on the circle. Angles are stored as
 * unit vectors, so encoders compare cross products and need no arc tangent. */
#pragma once

#include <stdint.h>

/* Bits of an angle. The circle needs two bits for its quadrants (kvant_polar_circle_book). */
#define KVANT_POLAR_MIN_BITS 2
#define KVANT_POLAR_MAX_BITS 4
#define KVANT_POLAR_MAX_LEVELS 16

typedef struct kvant_polar_book {
    float cos_level[KVANT_POLAR_MAX_LEVELS], sin_level[KVANT_POLAR_MAX_LEVELS];
    /* Threshold i lies between levels i and i + 1. Entries after the last threshold are zero. */
    float cos_threshold[KVANT_POLAR_MAX_LEVELS], sin_threshold[KVANT_POLAR_MAX_LEVELS];
} kvant_polar_book;

/* Computes the Lloyd-Max codebook of psi: 2^bits levels in increasing order, and the thresholds
 * between them. n1 and n2 are from 2 to 512. The result has the same bits on every machine, because
 * only + - * / and square root are used. */
void kvant_polar_angle_book(uint32_t n1, uint32_t n2, uint32_t bits, kvant_polar_book *book);

/* Divides the circle into 2^bits equal sectors; sector k begins at k pi / 2^(bits-1). The levels
 * are the middles of the sectors. The thresholds are the 2^(bits-2) - 1 borders inside the first
 * quadrant. */
void kvant_polar_circle_book(uint32_t bits, kvant_polar_book *book);
