/* quaternion.c - see quaternion.h. format.md, "Direction codes", has the constructions. */
#include "quaternion.h"

#include <math.h>

#include "../base/random.h"

kvant_quaternion kvant_quaternion_multiply(const kvant_quaternion *a, const kvant_quaternion *b)
{
    const double *x = a->c, *y = b->c;
    return (kvant_quaternion){ { x[0] * y[0] - x[1] * y[1] - x[2] * y[2] - x[3] * y[3],
                                 x[0] * y[1] + x[1] * y[0] + x[2] * y[3] - x[3] * y[2],
                                 x[0] * y[2] - x[1] * y[3] + x[2] * y[0] + x[3] * y[1],
                                 x[0] * y[3] + x[1] * y[2] - x[2] * y[1] + x[3] * y[0] } };
}

kvant_quaternion kvant_hurwitz_unit(uint32_t p)
{
    kvant_quaternion unit = { { 0 } };
    if (p < 8)
        unit.c[p / 2] = p % 2 ? -1 : 1;
    else
        for (uint32_t i = 0; i < 4; i++)
            unit.c[i] = (p - 8) >> i & 1 ? -0.5 : 0.5;
    return unit;
}

double kvant_hurwitz_closeness(const kvant_quaternion *y)
{
    double largest = 0, sum = 0;
    for (int i = 0; i < 4; i++) {
        double magnitude = fabs(y->c[i]);
        largest = magnitude > largest ? magnitude : largest;
        sum += magnitude;
    }
    return largest > sum * 0.5 ? largest : sum * 0.5;
}

/* Draws points until one lies in the ball, as 31 % of them do. The squared length is an exact
 * integer, so nothing is rounded before the square root. Coordinates are odd: so none is zero, and
 * their distribution is symmetric. */
kvant_quaternion kvant_quaternion_random(uint64_t *state)
{
    int64_t v[4];
    uint64_t squares;
    do {
        uint64_t word = kvant_splitmix64(state);
        squares = 0;
        for (int i = 0; i < 4; i++) {
            v[i] = 2 * (int64_t)(word >> (16 * i) & 0xffff) - 65535;
            squares += (uint64_t)(v[i] * v[i]);
        }
    } while (squares > (uint64_t)65535 * 65535);
    double length = sqrt((double)squares);
    kvant_quaternion q;
    for (int i = 0; i < 4; i++)
        q.c[i] = (double)v[i] / length;
    return q;
}

/* The largest <c, p s[i]> over all units p and all n quaternions, computed as <c, p s> = <c
 * conj(s), p>. */
static double closeness_to_cosets(const kvant_quaternion *c, const kvant_quaternion *s, uint32_t n)
{
    double closest = 0;
    for (uint32_t i = 0; i < n; i++) {
        kvant_quaternion conjugate = { { s[i].c[0], -s[i].c[1], -s[i].c[2], -s[i].c[3] } };
        kvant_quaternion y = kvant_quaternion_multiply(c, &conjugate);
        double closeness = kvant_hurwitz_closeness(&y);
        closest = closeness > closest ? closeness : closest;
    }
    return closest;
}

void kvant_quaternion_spread(uint64_t *state, uint32_t n, kvant_quaternion *s)
{
    for (uint32_t i = 0; i < n; i++) {
        double best = 2;
        for (uint32_t k = 0; k < KVANT_SPREAD_CANDIDATES; k++) {
            kvant_quaternion candidate = kvant_quaternion_random(state);
            double closeness = closeness_to_cosets(&candidate, s, i);
            if (closeness < best) {
                best = closeness;
                s[i] = candidate;
            }
        }
    }
}
