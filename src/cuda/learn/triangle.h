/* triangle.h - W as a rounded triangle (src/math/triangle.h), its inverse, and what a transform is
 * made of, by a team (team.h). */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../../math/parts.h"
#include "mean.h"

#define LEARN_CODE 7
#define LEARN_FLOOR 3e-4        /* added to the diagonal of moments, whose trace is n */
#define LEARN_CONDITION 32768.0 /* half of what records accept, as balancing rounds once more */

#ifdef __CUDACC__
TEAM_FN uint16_t learn_to_half(float x)
{
    return __half_as_ushort(__float2half_rn(x));
}
TEAM_FN float learn_of_half(uint16_t x)
{
    return __half2float(__ushort_as_half(x));
}
#else
TEAM_FN uint16_t learn_to_half(float x)
{
    return kvant_half_from_float(x);
}
TEAM_FN float learn_of_half(uint16_t x)
{
    return kvant_half_to_float(x);
}
#endif

/* The largest magnitude of n numbers. */
TEAM_FN float line_largest(const float *x, int n)
{
    double most = 0;
    TEAM_LANES (i, 0, n)
        most = fmax(most, (double)fabsf(x[i]));
    return (float)line_most(most);
}

/* The nearest code, as kvant_triangle_code finds it. */
TEAM_FN int learn_code(float number, float step)
{
    const float size = step > 0 ? fabsf(number / step) : 0;
    const int whole = size < LEARN_CODE ? (int)size : LEARN_CODE,
              code = whole + (whole < LEARN_CODE && size - (float)whole >= 0.5f);
    return number < 0 ? -code : code;
}

/* Copies W times a factor from the tiles to shared memory, as the rows of W^T. */
TEAM_FN void learn_transpose(int n, const learn_tile *w, double factor, float *lower)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            const int i = TILE_COLUMN(b), j = TILE_ROW(a);
            if (i < n && j <= i)
                lower[i * (i + 1) / 2 + j] = (float)(factor * w->x[a][b]);
        }
    TEAM_SYNC();
}

/* Rounds the rows of W^T. */
TEAM_FN void learn_round(int n, const float *lower, uint16_t *triangle)
{
    TEAM_LINES (i, 0, n) {
        const float *const row = lower + i * (i + 1) / 2;
        uint8_t *codes = (uint8_t *)(triangle + 2 * n) + i * i / 4;
        const uint16_t half = learn_to_half(line_largest(row, i) / LEARN_CODE);
        const float step = learn_of_half(half);
        if (TEAM_IS_FIRST_LANE) {
            if (n % 4 == 2 && i == n - 1)
                codes[n / 2] = 0; /* the last half has one code byte only */
            triangle[i] = half;
            triangle[n + i] = learn_to_half(row[i]);
        }
        TEAM_LANES (j, 0, LEARN_MOST / 2) {
            if (2 * j >= i)
                continue;
            const int low = learn_code(row[2 * j], step),
                      high = 2 * j + 1 < i ? learn_code(row[2 * j + 1], step) : 0;
            codes[j] = (uint8_t)((low & 15) | (high & 15) << 4);
        }
    }
    TEAM_SYNC();
}

TEAM_FN void learn_put_identity(int n, uint16_t *triangle)
{
    TEAM_EACH (i, 0, (int)kvant_triangle_size((size_t)n))
        triangle[i] = i >= n && i < 2 * n ? 0x3c00 : 0;
}

/* Number j of row i, j < i. */
TEAM_FN float learn_number(const uint16_t *triangle, int n, int i, int j)
{
    const uint8_t byte = ((const uint8_t *)(triangle + 2 * n) + i * i / 4)[j / 2];
    const int code = j % 2 ? byte >> 4 : byte & 15;
    return learn_of_half(triangle[i]) * (float)((code ^ 8) - 8);
}

/* Whether all numbers of the triangle are finite, and its diagonal is above 0. */
TEAM_FN bool learn_is_positive(const uint16_t *triangle, int n, learn_shared *s)
{
    TEAM_EACH (i, 0, n)
        s->v[i] = triangle[n + i] > 0 && triangle[n + i] < 0x7c00 && triangle[i] < 0x7c00;
    TEAM_SYNC();
    const double positive = line_sum(s->v, 0, n);
    TEAM_SYNC();
    return positive >= n;
}

/* A bound of the sum of squares of the triangle; a number is at most LEARN_CODE steps. */
TEAM_FN double learn_squares(const uint16_t *triangle, int n, learn_shared *s)
{
    TEAM_EACH (i, 0, n) {
        const double diagonal = (double)learn_of_half(triangle[n + i]),
                     most = LEARN_CODE * (double)learn_of_half(triangle[i]);
        s->v[i] = diagonal * diagonal + i * most * most;
    }
    TEAM_SYNC();
    return line_sum(s->v, 0, n);
}

/* The sum of squares of the triangle's inverse, which is made in the tiles. The numbers of the
 * triangle go to s->other. */
TEAM_FN double learn_inverse_squares(const uint16_t *triangle, int n, const learn_space *s,
                                     learn_tile *t)
{
    tile_sums sums;
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, 0, i + 1)
            s->other[i * n + j] = i == j ? (double)learn_of_half(triangle[n + i])
                                         : (double)learn_number(triangle, n, i, j);
    tile_set_identity(n, t);
    tile_divide(n, s->other, s->shared, t);
    tile_clear_sums(&sums);
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            double *const sum = &sums.of[a].of[TILE_COLUMN(b) % TEAM_SPREAD];
            *sum = fma(t->x[a][b], t->x[a][b], *sum);
        }
    tile_total_sums(&sums, s->shared->sums);
    TEAM_SYNC();
    return line_sum(s->shared->sums, 0, n);
}

/* Whether the triangle has a good inverse. */
TEAM_FN bool learn_is_good(const uint16_t *triangle, int n, const learn_space *s, learn_tile *t)
{
    if (!learn_is_positive(triangle, n, s->shared))
        return false;
    const double squares = learn_squares(triangle, n, s->shared);
    return squares * learn_inverse_squares(triangle, n, s, t) <= LEARN_CONDITION * LEARN_CONDITION;
}

/* Scales a matrix to trace n and adds to its diagonal. A thread scales the numbers that it has in
 * tiles. Returns the former trace; 0: it is not above 0, or not finite. */
TEAM_FN double learn_regularise(int n, double *m, learn_shared *s)
{
    const double trace = learn_trace(n, m, s), factor = n / trace;
    if (!(trace > 0) || !(trace < INFINITY) || !(factor < INFINITY))
        return 0;
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, 0, n)
            m[i * n + j] = m[i * n + j] * factor + (i == j ? LEARN_FLOOR : 0);
    return trace;
}

/* Makes the triangle from the moments in s->keys and s->queries. Returns by how much the mean
 * changes the trace; 0: there is no good triangle. */
TEAM_FN double learn_make_triangle(int n, const learn_space *s, uint16_t *triangle)
{
    learn_tile t;
    const double trace = n + n * LEARN_FLOOR, after = learn_mean_factor(n, s, &t);
    if (!(after > 0 && after < INFINITY))
        return 0;
    learn_transpose(n, &t, sqrt(trace / after), s->shared->u.lower);
    learn_round(n, s->shared->u.lower, triangle);
    return learn_is_good(triangle, n, s, &t) ? after / trace : 0;
}

/* Makes the triangle of a sub-head from its moments, and the two numbers that balance the parts of
 * a head. counted: keys and queries. Without enough of them, or if their moments have no factor,
 * the triangle is the identity. */
TEAM_FN void learn_solve(const double *counted, const learn_space *s, int n, uint16_t *triangle,
                         double *balance)
{
    const bool enough =
        counted[0] >= KVANT_CUDA_LEARN_LEAST && counted[1] >= KVANT_CUDA_LEARN_LEAST;
    const double keys = enough ? learn_regularise(n, s->keys, s->shared) : 0,
                 queries = enough ? learn_regularise(n, s->queries, s->shared) : 0,
                 gain = keys > 0 && queries > 0 ? learn_make_triangle(n, s, triangle) : 0;
    if (gain == 0)
        learn_put_identity(n, triangle);
    if (TEAM_IS_FIRST) {
        balance[0] = gain > 0 ? keys : 0;
        balance[1] = gain > 0 ? sqrt(queries / keys) * gain : 0;
    }
}

/* Scales the parts of a head, which share the scale of a row, as src/cache/solve.c does. A part
 * without moments is left alone. Of one thread per number. */
TEAM_FN void learn_balance(int n, int n_parts, const double *balance, uint16_t *triangles)
{
    double before = 0, after = 0;
    for (int p = 0; p < n_parts; p++) {
        before += balance[2 * p];
        after += balance[2 * p] * balance[2 * p + 1];
    }
    TEAM_EACH (i, 0, n_parts * 2 * n) {
        const int p = i / (2 * n);
        uint16_t *at = triangles + (size_t)p * kvant_triangle_size((size_t)n) + i % (2 * n);
        if (after > 0 && balance[2 * p + 1] > 0)
            *at = learn_to_half(learn_of_half(*at) *
                                (float)sqrt(balance[2 * p + 1] * before / after));
    }
}
