/* rotation.h - a random orthogonal matrix from a seed, with equal bits on every machine
 * (format.md, "Transform"). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <kvant/kvant.h>

/* Fills matrix (d x d, row-major) with orthonormal rows. KVANT_ERR_MEMORY: there is no memory for
 * scratch. */
kvant_status kvant_random_rotation(uint32_t d, uint64_t seed, float *matrix);

/* Fills matrix with n approximately normal numbers of mean 0 and standard deviation sigma. Each is
 * the sum of 16 uniform numbers, so the excess kurtosis is -0.075. */
void kvant_random_normals(size_t n, double sigma, uint64_t seed, float *matrix);
