/* triangle.h - W as a rounded triangle (src/math/triangle.h), its inverse, and what a transform is
 * made of, by a team (team.h). */
#pragma once

#include "../../math/parts.h"
#include "moments.h"

#define LEARN_CODE 7
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

/* The nearest code, as kvant_triangle_code finds it. */
TEAM_FN int learn_code(float number, float step)
{
    const float size = step > 0 ? fabsf(number / step) : 0;
    const int whole = size < LEARN_CODE ? (int)size : LEARN_CODE,
              code = whole + (whole < LEARN_CODE && size - (float)whole >= 0.5f);
    return number < 0 ? -code : code;
}

/* Row i of the triangle is column i of the upper triangle w times a factor. */
TEAM_APART void learn_round(int n, const double *w, double factor, uint16_t *triangle)
{
    TEAM_LINES (i, 0, n) {
        uint8_t *codes = (uint8_t *)(triangle + 2 * n) + i * i / 4;
        const uint16_t half = learn_to_half(line_largest(w + i, (size_t)n, i, factor) / LEARN_CODE);
        const float step = learn_of_half(half);
        if (TEAM_IS_FIRST_LANE) {
            if (n % 4 == 2 && i == n - 1)
                codes[n / 2] = 0; /* the last half has one code byte only */
            triangle[i] = half;
            triangle[n + i] = learn_to_half((float)(factor * w[i * n + i]));
        }
        TEAM_LANES (j, 0, (i + 1) / 2) {
            const int low = learn_code((float)(factor * w[2 * j * n + i]), step),
                      high = 2 * j + 1 < i
                                 ? learn_code((float)(factor * w[(2 * j + 1) * n + i]), step)
                                 : 0;
            codes[j] = (uint8_t)((low & 15) | (high & 15) << 4);
        }
    }
    TEAM_SYNC();
}

TEAM_APART void learn_put_identity(int n, uint16_t *triangle)
{
    TEAM_EACH (i, 0, (int)kvant_triangle_size((size_t)n))
        triangle[i] = i >= n && i < 2 * n ? 0x3c00 : 0;
    TEAM_SYNC();
}

/* Number j of row i, j < i. */
TEAM_FN float learn_number(const uint16_t *triangle, int n, int i, int j)
{
    const uint8_t byte = ((const uint8_t *)(triangle + 2 * n) + i * i / 4)[j / 2];
    const int code = j % 2 ? byte >> 4 : byte & 15;
    return learn_of_half(triangle[i]) * (float)((code ^ 8) - 8);
}

/* The inverse of the triangle, in the lower triangle of a matrix whose rows are `stride` apart.
 * Sums are those of the CPU (kvant_kernels.lower_inverse). inverse: n numbers of room. */
TEAM_APART void learn_invert(const uint16_t *triangle, int n, double *out, int stride,
                             double *inverse)
{
    TEAM_EACH (i, 0, n)
        inverse[i] = 1 / (double)learn_of_half(triangle[n + i]);
    TEAM_SYNC();
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, 0, n)
            out[i * stride + j] = i == j ? inverse[i] : 0;
    TEAM_SYNC();
    for (int k = 0; k + 1 < n; k++) {
        const double *row = out + k * stride;
        for (int i0 = k + 1 + TEAM_LINE; i0 < n; i0 += TEAM_CHUNK * TEAM_LINE_STEP)
            for (int j0 = TEAM_LANE; j0 <= k; j0 += TEAM_CHUNK * TEAM_LANE_STEP) {
                double x[TEAM_CHUNK][TEAM_CHUNK], y[TEAM_CHUNK], factor[TEAM_CHUNK];
                for (int r = 0; r < TEAM_CHUNK; r++) {
                    const int i = i0 + r * TEAM_LINE_STEP, j = j0 + r * TEAM_LANE_STEP;
                    factor[r] = i < n ? -(double)learn_number(triangle, n, i, k) * inverse[i] : 0;
                    y[r] = j <= k ? row[j] : 0;
                    for (int c = 0; c < TEAM_CHUNK; c++)
                        x[r][c] = i < n && j0 + c * TEAM_LANE_STEP <= k
                                      ? out[i * stride + j0 + c * TEAM_LANE_STEP]
                                      : 0;
                }
                for (int r = 0; r < TEAM_CHUNK; r++)
                    for (int c = 0; c < TEAM_CHUNK; c++) {
                        const int i = i0 + r * TEAM_LINE_STEP, j = j0 + c * TEAM_LANE_STEP;
                        if (i < n && j <= k)
                            out[i * stride + j] = x[r][c] + factor[r] * y[c];
                    }
            }
        TEAM_SYNC();
    }
}

/* Whether the triangle has a good inverse. Room: s->fast, s->inverse, s->v, s->w. */
TEAM_APART bool learn_is_good(const uint16_t *triangle, int n, const learn_space *s)
{
    TEAM_EACH (i, 0, n)
        s->v[i] = triangle[n + i] > 0 && triangle[n + i] < 0x7c00 && triangle[i] < 0x7c00;
    TEAM_SYNC();
    const bool positive = line_sum(s->v, 0, n) >= n;
    TEAM_SYNC();
    if (!positive)
        return false;
    learn_invert(triangle, n, s->fast, n, s->inverse);
    TEAM_LINES (i, 0, n) {
        const double of_inverse = line_dot(s->fast + i * n, s->fast + i * n, 0, i + 1);
        if (TEAM_IS_FIRST_LANE)
            s->w[i] = of_inverse;
    }
    TEAM_EACH (i, 0, n) { /* a number is at most LEARN_CODE steps */
        const double diagonal = (double)learn_of_half(triangle[n + i]),
                     most = LEARN_CODE * (double)learn_of_half(triangle[i]);
        s->v[i] = diagonal * diagonal + i * most * most;
    }
    TEAM_SYNC();
    const double squares = line_sum(s->v, 0, n), inverses = line_sum(s->w, 0, n);
    TEAM_SYNC();
    return squares * inverses <= LEARN_CONDITION * LEARN_CONDITION;
}

/* Makes the triangle, centre and start of a sub-head (arrays by channel of the part), and the two
 * numbers that balance the parts of a head. Without enough keys or queries, or if their moments
 * have no factor, the triangle is the identity. */
TEAM_APART void learn_solve(const learn_sums *sums, learn_turns *t, uint32_t center_span,
                            uint32_t head_dim, const learn_space *s, int n, uint16_t *triangle,
                            float *center, float *start, double *balance)
{
    const double n_keys = learn_count(sums->counts, sums->n_keys, s->part),
                 n_queries = sums->n_queries ? learn_count(sums->counts + sums->n_keys,
                                                           sums->n_queries, s->part)
                                             : KVANT_CUDA_LEARN_LEAST;
    double gain = 1, keys, queries;
    bool good = n_keys >= KVANT_CUDA_LEARN_LEAST && n_queries >= KVANT_CUDA_LEARN_LEAST;
    learn_find_moments(sums, t, center_span, head_dim, s, n, n_keys, n_queries, center, start);
    keys = learn_regularise(n, s->fast, s->v);
    queries = learn_regularise(n, s->other, s->v);
    good = good && keys > 0 && queries > 0;
    if (good) {
        const double trace = n + n * LEARN_FLOOR, after = learn_mean_factor(n, s);
        good = after > 0 && after < INFINITY;
        gain = after / trace;
        if (good) {
            learn_round(n, s->fast, sqrt(trace / after), triangle);
            good = learn_is_good(triangle, n, s);
        }
    }
    TEAM_SYNC();
    if (!good)
        learn_put_identity(n, triangle);
    if (TEAM_IS_FIRST) {
        balance[0] = good ? keys : 0;
        balance[1] = good ? sqrt(queries / keys) * gain : 0;
    }
    TEAM_SYNC();
}

/* Scales the parts of a head, which share the scale of a row, as src/cache/solve.c does. A part
 * without moments is left alone. Of one thread per number. */
TEAM_APART void learn_balance(int n, int n_parts, const double *balance, uint16_t *triangles)
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
