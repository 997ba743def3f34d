/* rotation.h - a random orthogonal matrix from a seed, the same bits everywhere (docs/format.md, "Transform"). */
#ifndef KVANT_MATH_ROTATION_H
#define KVANT_MATH_ROTATION_H

#include <stdint.h>

#include <kvant/kvant.h>

/* Fills matrix (d x d, row-major) with orthonormal rows. KVANT_ERR_MEMORY when scratch cannot be had. */
kvant_status kvant_random_rotation(uint32_t d, uint64_t seed, float *matrix);

#endif
