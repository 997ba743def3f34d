/* lloyd_max.c - solves the two Lloyd-Max conditions for a density on [0, end]: each level is the
 * centroid of its cell, and each threshold lies halfway between two levels.
 *
 * A symmetric density is solved on one half, with a fixed threshold at 0. First some Lloyd
 * iterations move every level near its solution. Then Newton's method on the centroid conditions,
 * whose Jacobian is tridiagonal, needs only some more steps; Lloyd alone needs thousands at 8 bits.
 * The only function of the C library used is sqrt, which is exact by IEEE 754. */
#include "lloyd_max.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define MAX_LEVELS KVANT_LLOYD_MAX_LEVELS
#define LLOYD_STEPS 40  /* bring the levels so near that Newton's method converges */
#define NEWTON_STEPS 60 /* at most; steps end when no level moves by more than 1e-15 */

typedef struct problem {
    const kvant_density *density;
    uint32_t n;
    double *c;                /* levels */
    double t[MAX_LEVELS + 1]; /* thresholds, t[0] = 0, t[n] = end */
    kvant_moments cell[MAX_LEVELS];
} problem;

double kvant_power(double x, uint32_t n)
{
    double result = 1;
    for (; n; n >>= 1, x *= x)
        if (n & 1)
            result *= x;
    return result;
}

double kvant_half_power(double x, uint32_t k)
{
    double y = 1 - x * x;
    if (y <= 0)
        return 0;
    return kvant_power(y, k / 2) * (k & 1 ? sqrt(y) : 1);
}

/* Integrates with 8 points of Gauss-Legendre (Abramowitz and Stegun, table 25.4) on pieces of at
 * most half the density's spread. There the integrand is smooth enough for full double
 * precision. */
kvant_moments kvant_density_moments(const kvant_density *density, double a, double b)
{
    static const double node[4] = { 0.1834346424956498, 0.5255324099163290, 0.7966664774136267,
                                    0.9602898564975363 };
    static const double weight[4] = { 0.3626837833783620, 0.3137066458778873, 0.2223810344533745,
                                      0.1012285362903763 };
    double mass = 0, first = 0;
    uint32_t pieces = 1 + (uint32_t)((b - a) * 2 / density->spread);
    double half = (b - a) / (2.0 * pieces);
    for (uint32_t j = 0; j < pieces; j++) {
        double middle = a + half * (2 * j + 1);
        for (uint32_t k = 0; k < 4; k++) {
            double below = middle - half * node[k], above = middle + half * node[k];
            double low = density->value(density, below), high = density->value(density, above);
            mass += weight[k] * (low + high);
            first += weight[k] * (below * low + above * high);
        }
    }
    return (kvant_moments){ mass * half, first * half };
}

static void update_cells(problem *p)
{
    p->t[0] = 0;
    p->t[p->n] = p->density->end;
    for (uint32_t i = 1; i < p->n; i++)
        p->t[i] = (p->c[i - 1] + p->c[i]) / 2;
    if (p->density->integrate) {
        p->density->integrate(p->density, p->t, p->n, p->cell);
        return;
    }
    for (uint32_t i = 0; i < p->n; i++)
        p->cell[i] = kvant_density_moments(p->density, p->t[i], p->t[i + 1]);
}

/* The density at threshold i. */
static double value(const problem *p, uint32_t i)
{
    return p->density->value(p->density, p->t[i]);
}

static double centroid(const problem *p, uint32_t i)
{
    /* In a cell so far out that f underflows the level stays in the middle: no number ever gets
     * it. */
    return p->cell[i].mass > 0 ? p->cell[i].first / p->cell[i].mass : (p->t[i] + p->t[i + 1]) / 2;
}

static void lloyd_step(problem *p)
{
    update_cells(p);
    for (uint32_t i = 0; i < p->n; i++)
        p->c[i] = centroid(p, i);
}

/* Solves J step = c - centroid(c) by the Thomas algorithm and applies the step. Returns false when
 * the step would change the order of the levels. */
static bool newton_step(problem *p, double *largest)
{
    double lower[MAX_LEVELS], diagonal[MAX_LEVELS], upper[MAX_LEVELS], step[MAX_LEVELS],
        next[MAX_LEVELS];
    update_cells(p);
    for (uint32_t i = 0; i < p->n; i++) {
        double g = centroid(p, i), inverse = p->cell[i].mass > 0 ? 0.5 / p->cell[i].mass : 0;
        lower[i] = i > 0 ? -value(p, i) * (g - p->t[i]) * inverse : 0;
        upper[i] = i + 1 < p->n ? -value(p, i + 1) * (p->t[i + 1] - g) * inverse : 0;
        diagonal[i] = 1 + lower[i] + upper[i];
        step[i] = p->c[i] - g;
    }
    for (uint32_t i = 1; i < p->n; i++) {
        double factor = lower[i] / diagonal[i - 1];
        diagonal[i] -= factor * upper[i - 1];
        step[i] -= factor * step[i - 1];
    }
    *largest = 0;
    for (uint32_t i = p->n; i-- > 0;) {
        step[i] = (step[i] - (i + 1 < p->n ? upper[i] * step[i + 1] : 0)) / diagonal[i];
        next[i] = p->c[i] - step[i];
        *largest = fmax(*largest, fabs(step[i]));
    }
    for (uint32_t i = 0; i < p->n; i++)
        if (!(next[i] > (i ? next[i - 1] : 0)) || !(next[i] < p->density->end))
            return false;
    memcpy(p->c, next, p->n * sizeof next[0]);
    return true;
}

void kvant_lloyd_max_spread(uint32_t n, double reach, double *levels)
{
    for (uint32_t i = 0; i < n; i++)
        levels[i] = reach * (i + 0.5) / n;
}

void kvant_lloyd_max_solve(const kvant_density *density, uint32_t n, double *levels)
{
    problem p = { .density = density, .n = n, .c = levels };
    for (int i = 0; i < LLOYD_STEPS; i++)
        lloyd_step(&p);
    double largest = density->end;
    for (int i = 0; i < NEWTON_STEPS && largest > 1e-15 * density->end; i++)
        if (!newton_step(&p, &largest))
            lloyd_step(&p);
}

static double coordinate_density(const kvant_density *density, double x)
{
    return kvant_half_power(x, density->d - 3);
}

void kvant_lloyd_max(uint32_t d, uint32_t bits, float *codebook)
{
    double sigma = 1 / sqrt((double)d), levels[MAX_LEVELS];
    uint32_t n = 1u << (bits - 1);
    /* f is log-concave, so there is one solution */
    const kvant_density density = {
        .value = coordinate_density, .end = 1, .spread = sigma, .d = d
    };
    kvant_lloyd_max_spread(n, fmin(0.98, sigma * (0.8 + 0.47 * bits)), levels);
    kvant_lloyd_max_solve(&density, n, levels);
    for (uint32_t i = 0; i < n; i++) {
        float level = (float)(levels[i] * sqrt((double)d));
        codebook[n + i] = level;
        codebook[n - 1 - i] = -level;
    }
}
