/* polar_angles.c - the density f(psi) = cos(psi)^(n1 - 1) sin(psi)^(n2 - 1) on [0, pi / 2] for
 * lloyd_max.c.
 *
 * Integrals of f and psi f from 0 to the points of a grid are computed once. An integral up to a
 * threshold adds the rest of one interval. f is log-concave, so the codebook is unique. */
#include "polar_angles.h"

#include <math.h>

#include "lloyd_max.h"
#include "trig.h"

/* An interval is at most 1/16 radian and at most half a standard deviation. For n1 = n2 = n the
 * latter is 1 / (2 sqrt(n)). So n = 256 needs 101 intervals. */
#define GRID 128

typedef struct angle_density {
    kvant_density base;
    uint32_t n1, n2;
    kvant_moments grid[GRID + 1]; /* from 0 to grid point i */
} angle_density;

/* The factor 2^((n1 + n2 - 2) / 2) keeps f near 1. Without it f would be 1e-77 for n1 = n2 =
 * 256. */
static double value(const kvant_density *density, double psi)
{
    const angle_density *a = (const angle_density *)density;
    double s, c;
    kvant_sin_cos(psi, &s, &c);
    return kvant_power(c * 1.4142135623730951, a->n1 - 1) *
           kvant_power(s * 1.4142135623730951, a->n2 - 1);
}

static double grid_point(uint32_t i)
{
    return KVANT_HALF_PI / GRID * i;
}

static kvant_moments add(kvant_moments a, kvant_moments b)
{
    return (kvant_moments){ a.mass + b.mass, a.first + b.first };
}

static void fill_grid(angle_density *a)
{
    a->grid[0] = (kvant_moments){ 0, 0 };
    for (uint32_t i = 0; i < GRID; i++)
        a->grid[i + 1] =
            add(a->grid[i], kvant_density_moments(&a->base, grid_point(i), grid_point(i + 1)));
}

static kvant_moments integral_to(const angle_density *a, double t)
{
    uint32_t i = (uint32_t)(t * (GRID / KVANT_HALF_PI));
    return i < GRID ? add(a->grid[i], kvant_density_moments(&a->base, grid_point(i), t))
                    : a->grid[GRID];
}

static void integrate(const kvant_density *density, const double *t, uint32_t n,
                      kvant_moments *cells)
{
    const angle_density *a = (const angle_density *)density;
    kvant_moments before = { 0, 0 };
    for (uint32_t i = 0; i < n; i++) {
        kvant_moments here = integral_to(a, t[i + 1]);
        cells[i] = (kvant_moments){ here.mass - before.mass, here.first - before.first };
        before = here;
    }
}

/* Spreads the levels over the mean +- (0.6 + 0.6 bits) standard deviations, as far as the quadrant
 * reaches. */
static void first_guess(const angle_density *a, uint32_t bits, double *levels)
{
    uint32_t n = 1u << bits;
    double mean = a->grid[GRID].first / a->grid[GRID].mass,
           sigma = 0.5 / sqrt((a->n1 + a->n2) / 2.0);
    double room = 0.95 * fmin(mean, KVANT_HALF_PI - mean),
           reach = fmin(sigma * (0.6 + 0.6 * bits), room);
    for (uint32_t i = 0; i < n; i++)
        levels[i] = mean + reach * ((2 * i + 1.0) / n - 1);
}

static void store(double angle, float *sine, float *cosine)
{
    double s, c;
    kvant_sin_cos(angle, &s, &c);
    *sine = (float)s;
    *cosine = (float)c;
}

void kvant_polar_angle_book(uint32_t n1, uint32_t n2, uint32_t bits, kvant_polar_book *book)
{
    /* Quadrature never spans more than one interval of the grid, so it uses one piece. */
    angle_density density = {
        .base = { .value = value, .end = KVANT_HALF_PI, .spread = 1, .integrate = integrate },
        .n1 = n1,
        .n2 = n2
    };
    uint32_t n = 1u << bits;
    double levels[KVANT_POLAR_MAX_LEVELS];
    fill_grid(&density);
    first_guess(&density, bits, levels);
    kvant_lloyd_max_solve(&density.base, n, levels);
    *book = (kvant_polar_book){ .cos_level = { 0 } };
    for (uint32_t i = 0; i < n; i++)
        store(levels[i], &book->sin_level[i], &book->cos_level[i]);
    for (uint32_t i = 0; i + 1 < n; i++)
        store((levels[i] + levels[i + 1]) / 2, &book->sin_threshold[i], &book->cos_threshold[i]);
}

void kvant_polar_circle_book(uint32_t bits, kvant_polar_book *book)
{
    uint32_t quarter = 1u << (bits - 2);
    *book = (kvant_polar_book){ .cos_level = { 0 } };
    for (uint32_t i = 0; i + 1 < quarter; i++)
        store(KVANT_HALF_PI / quarter * (i + 1), &book->sin_threshold[i], &book->cos_threshold[i]);
    for (uint32_t i = 0; i < quarter; i++) {
        float s, c;
        store(KVANT_HALF_PI / quarter * (i + 0.5), &s, &c);
        const float cosines[] = { c, -s, -c, s }, sines[] = { s, c, -s, -c };
        for (uint32_t q = 0; q < 4; q++) {
            book->cos_level[q * quarter + i] = cosines[q];
            book->sin_level[q * quarter + i] = sines[q];
        }
    }
}
