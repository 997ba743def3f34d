/* lloyd_max.h - optimal scalar quantisers for smooth densities on [0, end], and for one coordinate
 * of a uniform point on a sphere.
 *
 * TurboQuant (section 1.1) rotates a vector at random. Then each coordinate of the unit vector has
 * the density f(x) ~ (1 - x^2)^((d - 3) / 2), and the Lloyd-Max codebook of f quantises the
 * coordinate. Results have the same bits on every machine, because only + - * / and square root are
 * used. Densities must use only these operations, too. */
#pragma once

#include <stdint.h>

#define KVANT_LLOYD_MAX_BITS 8     /* a code is a byte at most */
#define KVANT_LLOYD_MAX_LEVELS 128 /* on [0, end] */

typedef struct kvant_density kvant_density;

/* Integrals of f and of x f over a cell. */
typedef struct kvant_moments {
    double mass, first;
} kvant_moments;

/* A density on [0, end], not normalised. A symmetric density is given by its positive half. */
struct kvant_density {
    double (*value)(const kvant_density *density, double x);
    double end;
    double spread; /* over half of this the density is smooth enough for a quadrature of 8 points */
    uint32_t d;    /* a parameter for the functions of the density, if they need one */
    /* Integrates cells i from t[i] to t[i + 1]. NULL: by quadrature. */
    void (*integrate)(const kvant_density *density, const double *t, uint32_t n,
                      kvant_moments *cells);
};

/* x to the power of n by repeated squaring. */
double kvant_power(double x, uint32_t n);

/* (1 - x^2)^(k / 2), the common part of all marginals of a sphere. */
double kvant_half_power(double x, uint32_t k);

/* Moments over [a, b] by quadrature. */
kvant_moments kvant_density_moments(const kvant_density *density, double a, double b);

/* Improves a first guess, n increasing levels, to the Lloyd-Max codebook of the density. Then every
 * level is the centroid of its cell and every threshold lies halfway between two levels. n: 1 ..
 * KVANT_LLOYD_MAX_LEVELS. */
void kvant_lloyd_max_solve(const kvant_density *density, uint32_t n, double *levels);

/* Makes a first guess: n levels that are spread evenly over [0, reach]. */
void kvant_lloyd_max_spread(uint32_t n, double reach, double *levels);

/* Fills codebook with 2^bits increasing, odd-symmetric levels for the coordinates of a vector of
 * norm sqrt(d). The dimension d is at least 4, and bits is 1 to 8. */
void kvant_lloyd_max(uint32_t d, uint32_t bits, float *codebook);
