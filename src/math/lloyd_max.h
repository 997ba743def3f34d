/* lloyd_max.h - the optimal scalar quantiser for one coordinate of a uniform point on a sphere.
 *
 * TurboQuant (section 1.1) rotates a vector at random, after which each coordinate of the unit vector has the density
 * f(x) ~ (1 - x^2)^((d - 3) / 2), and quantises it with the Lloyd-Max codebook of f. */
#ifndef KVANT_MATH_LLOYD_MAX_H
#define KVANT_MATH_LLOYD_MAX_H

#include <stdint.h>

#define KVANT_LLOYD_MAX_BITS 8

/* Fills codebook[0 .. 2^bits - 1] with increasing, odd-symmetric values for coordinates of a vector of norm sqrt(d),
 * and returns the mean squared error of one coordinate (variance 1). d >= 4, bits 1 .. 8. The result has the same
 * bits on every machine: it is computed from + - * / and square root alone. */
double kvant_lloyd_max(uint32_t d, uint32_t bits, float *codebook);

#endif
