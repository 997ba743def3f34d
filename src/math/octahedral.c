/* octahedral.c - see octahedral.h. Owns the two densities; lloyd_max.c solves for their codebooks.
 *
 * The paper trains the direction codebook on samples. This file uses the closed form of the density
 * (the paper's equation 7). */
#include "octahedral.h"

#include "lloyd_max.h"

/* The density of |u| for uniform directions: the integral over w of |q|^-3 / (4 pi), where q is the
 * point of the octahedron at (u, w). The constant 2 / pi is left out. */
static double direction_density(const kvant_density *density, double a)
{
    (void)density;
    double b = 1 - a;
    return (b / (1 - 2 * a + 3 * a * a) + a / (2 - 4 * a + 3 * a * a)) / sqrt(a * a + b * b);
}

/* Lemma 3.1: rho^2 is Beta(3/2, (d - 3) / 2). */
static double norm_density(const kvant_density *density, double r)
{
    return r * r * kvant_half_power(r, density->d - 5);
}

void kvant_octahedral_codebook(uint32_t bits, float *levels)
{
    /* The nearest pole of the density is 0.47 away from [0, 1]. So pieces of 1/16 leave errors of
     * 1e-17. */
    const kvant_density density = { .value = direction_density, .end = 1, .spread = 0.125 };
    double half[KVANT_LLOYD_MAX_LEVELS];
    uint32_t n = 1u << (bits - 1);
    kvant_lloyd_max_spread(n, 1, half);
    kvant_lloyd_max_solve(&density, n, half);
    for (uint32_t i = 0; i < n; i++) {
        levels[n + i] = (float)half[i];
        levels[n - 1 - i] = -(float)half[i];
    }
}

void kvant_triplet_norm_codebook(uint32_t d, uint32_t bits, float *levels)
{
    double sigma = 1 / sqrt((double)d), solved[KVANT_LLOYD_MAX_LEVELS];
    uint32_t n = 1u << bits;
    const kvant_density density = { .value = norm_density, .end = 1, .spread = sigma, .d = d };
    kvant_lloyd_max_spread(n, fmin(0.98, sigma * (2.2 + 0.45 * bits)), solved);
    kvant_lloyd_max_solve(&density, n, solved);
    for (uint32_t i = 0; i < n; i++)
        levels[i] = (float)(solved[i] * sqrt((double)d));
}
