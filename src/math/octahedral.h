/* octahedral.h - the octahedral map from directions in space to a square, and the codebooks of
 * random triplets.
 *
 * The map divides a direction (x, y, z) by |x| + |y| + |z|, which puts it on the octahedron. Then
 * it folds the lower half outwards:
 *
 *     t = max(-z, 0)                            z = 1 - |u| - |w|
 *     u = x + copysign(t, x)                    x = u - copysign(t, u)
 *     w = y + copysign(t, y)                    y = w - copysign(t, w)
 *
 * u and w are in [-1, 1]. The inverse, on the right, has the same form with the same t. A division
 * by the norm follows it.
 *
 * Sources: OCTOPUS, equations 5 and 6; Cigolle and others, A survey of efficient representations
 * for independent unit vectors, 2014. */
#pragma once

#include <math.h>
#include <stdint.h>

/* Bits of a coordinate and of a norm. The tables of a view (codec/view.h) have room for 256 and 128
 * numbers. */
#define KVANT_OCTAHEDRAL_BITS 8
#define KVANT_TRIPLET_NORM_BITS 7

/* The point of the octahedron at (u, w), not normalised. The magnitudes of its components sum to
 * 1. */
static inline void kvant_octahedral_point(float u, float w, float *x, float *y, float *z)
{
    float height = 1 - fabsf(u) - fabsf(w), fold = height < 0 ? -height : 0;
    *x = u - copysignf(fold, u);
    *y = w - copysignf(fold, w);
    *z = height;
}

/* Fills levels[0 .. 2^bits - 1] with the Lloyd-Max codebook of u (and of w) for uniform random
 * directions. Levels are increasing and odd-symmetric. bits: 1 .. KVANT_OCTAHEDRAL_BITS. The bits
 * of the levels are the same on every machine.
 *
 * The density is also symmetric about 1/2. So positive levels are 1/2 plus an odd function of their
 * distance from the middle level. A decoder may compute the levels of 4 to 6 bits instead of
 * looking them up. An odd polynomial of degree 5 meets them to 6e-5, and one of degree 3 to
 * 7e-4. */
void kvant_octahedral_codebook(uint32_t bits, float *levels);

/* Fills levels[0 .. 2^bits - 1] with the increasing Lloyd-Max codebook of the norm of three
 * coordinates of a random point. The point is uniform on the sphere of radius sqrt(d) in d
 * dimensions, with d at least 6. bits: 0 (one level, the mean) .. KVANT_TRIPLET_NORM_BITS. The bits
 * of the levels are the same on every machine. */
void kvant_triplet_norm_codebook(uint32_t d, uint32_t bits, float *levels);
