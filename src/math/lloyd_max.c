/* lloyd_max.c - solves the two Lloyd-Max conditions (each level the centroid of its cell, each threshold halfway between
 * two levels) on the half-line x > 0 of the symmetric density f(x) = (1 - x^2)^((d - 3) / 2).
 *
 * A few Lloyd iterations bring every level near its place; Newton's method on the centroid conditions, whose Jacobian
 * is tridiagonal, finishes in a handful of steps where Lloyd alone would need thousands at 8 bits. f is log-concave,
 * so the solution is unique. No function of the C library's but sqrt (exact by IEEE 754) is used. */
#include "lloyd_max.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define MAX_LEVELS 128 /* half of 2^8 */
#define LLOYD_STEPS 40
#define NEWTON_STEPS 60

typedef struct problem {
    uint32_t d, n;             /* n levels on the half-line */
    double c[MAX_LEVELS];      /* levels */
    double t[MAX_LEVELS + 1];  /* thresholds, t[0] = 0, t[n] = 1 */
    double mass[MAX_LEVELS];   /* integral of f over a cell */
    double moment[MAX_LEVELS]; /* integral of x f */
} problem;

static double power(double x, uint32_t n)
{
    double result = 1;
    for (; n; n >>= 1, x *= x)
        if (n & 1)
            result *= x;
    return result;
}

/* (1 - x^2)^(k / 2) */
static double half_power(double x, uint32_t k)
{
    double y = 1 - x * x;
    if (y <= 0)
        return 0;
    return power(y, k / 2) * (k & 1 ? sqrt(y) : 1);
}

static double density(const problem *p, double x)
{
    return half_power(x, p->d - 3);
}

/* Gauss-Legendre with 8 points (Abramowitz and Stegun, table 25.4) on pieces of at most half a standard deviation, where
 * the integrand is smooth enough for full double precision. */
static double integrate(const problem *p, double a, double b)
{
    static const double node[4] = { 0.1834346424956498, 0.5255324099163290, 0.7966664774136267,
                                    0.9602898564975363 };
    static const double weight[4] = { 0.3626837833783620, 0.3137066458778873, 0.2223810344533745,
                                      0.1012285362903763 };
    uint32_t pieces = 1 + (uint32_t)((b - a) * 2 * sqrt((double)p->d));
    double half = (b - a) / (2.0 * pieces), sum = 0;
    for (uint32_t i = 0; i < pieces; i++) {
        double middle = a + half * (2 * i + 1);
        for (uint32_t k = 0; k < 4; k++)
            sum += weight[k] * (density(p, middle - half * node[k]) + density(p, middle + half * node[k]));
    }
    return sum * half;
}

static void update_cells(problem *p)
{
    p->t[0] = 0;
    p->t[p->n] = 1;
    for (uint32_t i = 1; i < p->n; i++)
        p->t[i] = (p->c[i - 1] + p->c[i]) / 2;
    for (uint32_t i = 0; i < p->n; i++) {
        p->mass[i] = integrate(p, p->t[i], p->t[i + 1]);
        p->moment[i] = (half_power(p->t[i], p->d - 1) - half_power(p->t[i + 1], p->d - 1)) / (p->d - 1);
    }
}

static double centroid(const problem *p, uint32_t i)
{
    /* A cell so far out that f underflows keeps its middle: it never receives a number. */
    return p->mass[i] > 0 ? p->moment[i] / p->mass[i] : (p->t[i] + p->t[i + 1]) / 2;
}

static void lloyd_step(problem *p)
{
    update_cells(p);
    for (uint32_t i = 0; i < p->n; i++)
        p->c[i] = centroid(p, i);
}

/* Solves J step = c - centroid(c) by the Thomas algorithm and applies it; false when the step would disorder the levels. */
static bool newton_step(problem *p, double *largest)
{
    double lower[MAX_LEVELS], diagonal[MAX_LEVELS], upper[MAX_LEVELS], step[MAX_LEVELS], next[MAX_LEVELS];
    update_cells(p);
    for (uint32_t i = 0; i < p->n; i++) {
        double g = centroid(p, i), inverse = p->mass[i] > 0 ? 0.5 / p->mass[i] : 0;
        lower[i] = i > 0 ? -density(p, p->t[i]) * (g - p->t[i]) * inverse : 0;
        upper[i] = i + 1 < p->n ? -density(p, p->t[i + 1]) * (p->t[i + 1] - g) * inverse : 0;
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
        if (!(next[i] > (i ? next[i - 1] : 0)) || !(next[i] < 1))
            return false;
    memcpy(p->c, next, p->n * sizeof next[0]);
    return true;
}

/* Total squared error: E x^2 - sum of c_i E[x; cell i], by the centroid condition; E x^2 = 1 / d. */
static double distortion(problem *p)
{
    update_cells(p);
    double mass = 0, explained = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        mass += p->mass[i];
        explained += p->c[i] * p->moment[i];
    }
    return 1 - explained / mass * p->d;
}

double kvant_lloyd_max(uint32_t d, uint32_t bits, float *codebook)
{
    problem p = { .d = d, .n = 1u << (bits - 1) };
    double sigma = 1 / sqrt((double)d), reach = fmin(0.98, sigma * (0.8 + 0.47 * bits));
    for (uint32_t i = 0; i < p.n; i++)
        p.c[i] = reach * (i + 0.5) / p.n;
    for (int i = 0; i < LLOYD_STEPS; i++)
        lloyd_step(&p);
    double largest = 1;
    for (int i = 0; i < NEWTON_STEPS && largest > 1e-15; i++)
        if (!newton_step(&p, &largest))
            lloyd_step(&p);
    for (uint32_t i = 0; i < p.n; i++) {
        float level = (float)(p.c[i] * sqrt((double)d));
        codebook[p.n + i] = level;
        codebook[p.n - 1 - i] = -level;
    }
    return distortion(&p);
}
