/* quaternion.h - unit quaternions: the 24 Hurwitz units, seeded points on the 3-sphere, and the
 * closeness of a point to a coset of the units. The direction codebooks of hqmq, spherical and
 * addvq use them.
 *
 * All arithmetic is binary64 with + - * / and square root, one operation at a time, so tables have
 * the same bits on every machine. */
#pragma once

#include <stdint.h>

#define KVANT_HURWITZ_UNITS 24u /* all that there are */

/* Components in the order 1, i, j, k. */
typedef struct kvant_quaternion {
    double c[4];
} kvant_quaternion;

/* The Hamilton product a b. */
kvant_quaternion kvant_quaternion_multiply(const kvant_quaternion *a, const kvant_quaternion *b);

/* Unit p of the binary tetrahedral group, which are the vertices of the 24-cell. For p < 8 only
 * component p / 2 is not zero: +1 for even p, -1 for odd p. For p = 8 + m every component is 1/2 in
 * magnitude; component i is negative if bit i of m is set. */
kvant_quaternion kvant_hurwitz_unit(uint32_t p);

/* The largest <y, p> over the 24 units p. It is the largest |y_i|, or half the sum of all |y_i|. */
double kvant_hurwitz_closeness(const kvant_quaternion *y);

/* A uniformly distributed unit quaternion: a random point of a 4-ball with 16-bit coordinates,
 * divided by its length. */
kvant_quaternion kvant_quaternion_random(uint64_t *state);

/* Finds n quaternions s whose cosets {p s} lie far apart. Each is the best of
 * KVANT_SPREAD_CANDIDATES random ones: the one that is farthest from all cosets before it. Takes 16
 * n^2 steps. With 96 quaternions they take 3 ms. For 1024 quaternions they are 0.3 s. */
#define KVANT_SPREAD_CANDIDATES 32
void kvant_quaternion_spread(uint64_t *state, uint32_t n, kvant_quaternion *s);
