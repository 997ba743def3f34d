/* octahedral.h - the octahedral map from directions in space to a square, and the codebooks of
 * random triplets.
 *
 * The map divides a direction (x, y, z) by |x| + |y| + |z|, which puts it on the octahedron. With t
 * = max(-z, 0) the lower half is folded outwards: u = x + copysign(t, x), w = y + copysign(t, y),
 * both in [-1, 1]. The inverse has the same form: z = 1 - |u| - |w|, t = max(-z, 0), x = u -
 * copysign(t, u), y = w - copysign(t, w), then a division by the norm.
 *
 * Sources: OCTOPUS, equations 5 and 6; Cigolle and others, A survey of efficient representations
 * for independent unit vectors, 2014. */
#pragma once

#include <math.h>
#include <stdint.h>

#define KVANT_OCTAHEDRAL_BITS 8
#define KVANT_TRIPLET_NORM_BITS 7

/* The point of the octahedron at (u, w), not normalised; its components sum to 1 in magnitude. */
static inline void kvant_octahedral_point(float u, float w, float *x, float *y, float *z)
{
    float height = 1 - fabsf(u) - fabsf(w), fold = height < 0 ? -height : 0;
    *x = u - copysignf(fold, u);
    *y = w - copysignf(fold, w);
    *z = height;
}

/* Fills levels[0 .. 2^bits - 1] with the increasing, odd-symmetric Lloyd-Max codebook of u (and of
 * w) for uniform random directions. bits: 1 .. KVANT_OCTAHEDRAL_BITS. Same bits on every machine.
 * The density is symmetric about 1/2 as well, so positive levels are 1/2 plus an odd function of
 * their distance from the middle one: for decoders that would rather compute than look up, one of
 * degree 5 meets the levels of 4 to 6 bits to 6e-5, one of degree 3 to 7e-4. */
void kvant_octahedral_codebook(uint32_t bits, float *levels);

/* Fills levels[0 .. 2^bits - 1] with the increasing Lloyd-Max codebook of the norm of three
 * coordinates of a uniform point on the sphere of radius sqrt(d) in d dimensions. d >= 6, bits: 0
 * (one level, the mean) .. KVANT_TRIPLET_NORM_BITS. Same bits on every machine. */
void kvant_triplet_norm_codebook(uint32_t d, uint32_t bits, float *levels);
