/* mean.h - an upper factor W of the geometric mean W^T W = a^-1 # b of two positive definite
 * matrices, by a team (team.h).
 *
 * The steps are those of src/kernels/mean_loops.h, which explains them: a = U U^T, the square root
 * of U^T b U by a tridiagonal matrix, its Cholesky factor R, and W = R U^-1. Sums have another
 * order. */
#pragma once

#include "team.h"

#define LEARN_MOST 128 /* channels */
#define LEARN_NODES 32
#define LEARN_GROUPS(n) ((n) > 64 ? 4 : 8) /* of rows, whose partial sums are added one by one */

/* A team's working memory. `fast` is shared memory if a GPU has enough of it. */
typedef struct learn_space {
    double *fast;                              /* n x n */
    double *upper, *other, *third;             /* n x n each */
    double *v, *w, *next, *part, *diagonal;    /* n, n, n, 4 x LEARN_MOST, n */
    double *beside, *beta, *inverse, *scalars; /* n, n, n, 3 x LEARN_NODES */
} learn_space;

#define LEARN_SMALL (11 * LEARN_MOST + 3 * LEARN_NODES) /* numbers of v to scalars */

TEAM_FN void learn_set_small(learn_space *s, double *at)
{
    s->v = at;
    s->w = at + LEARN_MOST;
    s->next = at + 2 * LEARN_MOST;
    s->diagonal = at + 3 * LEARN_MOST;
    s->beside = at + 4 * LEARN_MOST;
    s->beta = at + 5 * LEARN_MOST;
    s->inverse = at + 6 * LEARN_MOST;
    s->part = at + 7 * LEARN_MOST;
    s->scalars = at + 11 * LEARN_MOST;
}

/* Replaces the upper triangle of m by R with m = R^T R; false when a pivot is not above 0. */
TEAM_APART bool learn_factor(int n, double *m, double *inverse)
{
    for (int k = 0; k < n; k++) {
        const double *row = m + k * n, pivot = row[k];
        if (!(pivot > 0))
            return false;
        const double reciprocal = 1 / pivot;
        TEAM_LINES(i, k + 1, n)
        {
            const double factor = -(row[i] * reciprocal);
            TEAM_LANES(j, i, n)
            m[i * n + j] = fma(factor, row[j], m[i * n + j]);
        }
        TEAM_SYNC();
    }
    TEAM_EACH(i, 0, n)
    inverse[i] = 1 / sqrt(m[i * n + i]);
    TEAM_SYNC();
    TEAM_LINES(i, 0, n)
    TEAM_LANES(j, i, n)
    m[i * n + j] *= inverse[i];
    TEAM_SYNC();
    return true;
}

/* Four columns of a row of a product; columns from n on repeat the first one. */
typedef struct learn_quad {
    int at[4];
    double sum[4];
} learn_quad;

TEAM_FN learn_quad quad_at(int n, int j)
{
    learn_quad q;
    for (int c = 0; c < 4; c++) {
        q.at[c] = j + c * TEAM_LANE_STEP < n ? j + c * TEAM_LANE_STEP : j;
        q.sum[c] = 0;
    }
    return q;
}

#ifdef __CUDACC__
#define LEARN_QUADS(j, n) TEAM_LANES(j, 0, TEAM_WIDTH)
#else
#define LEARN_QUADS(j, n) for (int j = 0; j < (n); j += 4)
#endif
#ifdef __CUDACC__
#define LEARN_UNROLL _Pragma("unroll 4")
#else
#define LEARN_UNROLL
#endif

/* out = b u of an upper u and a symmetric b. */
TEAM_APART void learn_times_upper(int n, const double *b, const double *u, double *out)
{
    TEAM_LINES(i, 0, n)
    LEARN_QUADS(j, n)
    {
        if (j >= n)
            continue;
        learn_quad q = quad_at(n, j);
        LEARN_UNROLL
        for (int k = 0; k < n; k++)
            for (int c = 0; c < 4; c++)
                q.sum[c] = fma(b[i * n + k], u[k * n + q.at[c]], q.sum[c]);
        for (int c = 3; c >= 0; c--)
            out[i * n + q.at[c]] = q.sum[c];
    }
    TEAM_SYNC();
}

/* The lower triangle of out = u^T c of an upper u. */
TEAM_APART void learn_upper_times(int n, const double *u, const double *c, double *out)
{
    TEAM_LINES(i, 0, n)
    LEARN_QUADS(j, n)
    {
        if (j >= n)
            continue;
        learn_quad q = quad_at(n, j);
        LEARN_UNROLL
        for (int k = 0; k <= i; k++)
            for (int l = 0; l < 4; l++)
                q.sum[l] = fma(u[k * n + i], c[k * n + q.at[l]], q.sum[l]);
        for (int l = 3; l >= 0; l--)
            out[i * n + q.at[l]] = q.sum[l];
    }
    TEAM_SYNC();
}

/* Completes w, the sums of parts times beta, so that reflecting both sides of a symmetric matrix
 * subtracts v w^T + w v^T. v is zero before `first`. Of the first line. */
TEAM_FN void learn_weigh(int n, double beta, const double *v, double *w, int from, int first)
{
    TEAM_LINE_SYNC();
    const double factor = -(beta / 2) * line_dot(w, v, first, n);
    TEAM_LANES(j, from, n)
    w[j] = fma(factor, v[j], w[j]);
    TEAM_LINE_SYNC();
}

TEAM_FN double learn_sum_parts(int n, const double *part, int j)
{
    double sum = 0;
    for (int g = 0; g < LEARN_GROUPS(n); g++)
        sum += part[g * n + j];
    return sum;
}

/* Row k of the matrix with the pending reflection becomes the vector of the next reflection. Of the
 * first line. */
TEAM_FN void learn_reflect(int n, int k, double *row, const learn_space *s)
{
    TEAM_LANES(j, k, n)
    s->next[j] = fma(-s->w[k], s->v[j], fma(-s->v[k], s->w[j], row[j]));
    TEAM_LINE_SYNC();
    const double diagonal = s->next[k], first = k + 1 < n ? s->next[k + 1] : 0,
                 rest = line_dot(s->next, s->next, k + 2, n), length = sqrt(first * first + rest),
                 kept = rest == 0   ? first
                        : first > 0 ? -length
                                    : length,
                 lead = rest == 0 ? first : first - kept;
    TEAM_LINE_SYNC();
    if (TEAM_IS_FIRST_LANE) {
        s->diagonal[k] = diagonal;
        s->beside[k] = kept;
        s->beta[k] = rest == 0 ? 0 : 2 / (lead * lead + rest);
        if (k + 1 < n)
            s->next[k + 1] = lead;
    }
    TEAM_LINE_SYNC();
    TEAM_LANES(j, k + 1, n)
    row[j] = s->next[j];
}

/* m -= v w^T + w v^T in rows and columns from k + 1 on, and part = next times the new rows. */
TEAM_FN void learn_update(int n, int k, int first, double *m, const learn_space *s, bool mirrors)
{
    TEAM_EACH(t, 0, LEARN_GROUPS(n) * n)
    {
        const int g = t / n, j = t - g * n;
        double sum = 0;
        if (j < first)
            continue;
        const double v = s->v[j], w = s->w[j];
        for (int i = k + 1 + g; i < n; i += LEARN_GROUPS(n)) {
            const double x = fma(-s->w[i], v, fma(-s->v[i], w, m[i * n + j]));
            m[i * n + j] = x;
            sum = fma(s->next[i], x, sum);
            if (mirrors && j == k)
                m[k * n + i] = x;
        }
        s->part[t] = sum;
    }
}

TEAM_FN void learn_advance(learn_space *s)
{
    double *const former = s->v;
    s->v = s->next;
    s->next = former;
}

/* Makes m tridiagonal: s->diagonal and s->beside. The vector of reflection k stays in row k, right
 * of the diagonal. */
TEAM_APART void learn_tridiagonalise(int n, double *m, learn_space s)
{
    TEAM_EACH(j, 0, n)
    s.v[j] = s.w[j] = s.next[j] = 0;
    TEAM_SYNC();
    for (int k = 0; k < n; k++) {
        if (TEAM_IS_FIRST_LINE) {
            TEAM_LANES(j, k, k ? n : 0)
            s.w[j] = s.beta[k - 1] * learn_sum_parts(n, s.part, j);
            if (k)
                learn_weigh(n, s.beta[k - 1], s.v, s.w, k, k);
            learn_reflect(n, k, m + k * n, &s);
        }
        TEAM_SYNC();
        if (k + 1 < n)
            learn_update(n, k, k + 1, m, &s, false);
        learn_advance(&s);
        TEAM_SYNC();
    }
}

/* The nodes of the sum for a square root: shift, weight, and the sum of all weights. */
TEAM_FN void learn_nodes(int n, const learn_space *s)
{
    double *shift = s->scalars, *weight = shift + LEARN_NODES, *sum = weight + LEARN_NODES;
    double bound = 0, all = 0;
    int exponent;
    if (!TEAM_IS_FIRST)
        return;
    for (int i = 0; i < n; i++)
        bound = fmax(bound, fabs(s->diagonal[i]) + (i ? fabs(s->beside[i - 1]) : 0) +
                                (i + 1 < n ? fabs(s->beside[i]) : 0));
    frexp(bound, &exponent);
    exponent = (exponent + (exponent > 0)) / 2 - 26;
    for (int k = 0; k < LEARN_NODES; k++) {
        const bool low = k == 0, high = k == LEARN_NODES - 1;
        const int j = exponent + k - !low - high;
        const double factor = 0.44127120030605137 * ldexp(high ? 7.0 : 1.0, j);
        shift[k] = ldexp(high ? 7.0 : 1.0, 2 * j) / (low ? 7 : 1);
        weight[k] = factor * shift[k];
        all += factor;
    }
    sum[0] = all;
}

/* For each node, by row: the ratios of T + shift = L D L^T, and the diagonal of its inverse times
 * the weight. s->inverse[k] becomes 1 for a node whose pivots are all above 0. */
TEAM_FN void learn_shifted(int n, const learn_space *s, double *ratios, double *diagonals)
{
    TEAM_EACH(k, 0, LEARN_NODES)
    {
        const double shift = s->scalars[k], weight = s->scalars[LEARN_NODES + k];
        double ratio = 0, below = 0;
        bool positive = true;
        for (int i = 0; i < n; i++) {
            const double pivot = s->diagonal[i] + shift - (i ? s->beside[i - 1] * ratio : 0);
            ratio = i + 1 < n ? s->beside[i] / pivot : 0;
            positive = positive && pivot > 0;
            ratios[i * LEARN_NODES + k] = ratio;
            diagonals[i * LEARN_NODES + k] = weight / pivot;
        }
        for (int i = n - 1; i >= 0; i--) {
            ratio = ratios[i * LEARN_NODES + k];
            below = fma(ratio * ratio, below, diagonals[i * LEARN_NODES + k]);
            diagonals[i * LEARN_NODES + k] = below;
        }
        s->inverse[k] = positive;
    }
}

/* root = T^(1/2) of the tridiagonal T; false when it is not positive. A thread walks up a column:
 * each number of the inverse of T + shift is the number below it times a ratio. */
TEAM_APART bool learn_root(int n, const learn_space *s, double *root, double *ratios)
{
    double *diagonals = ratios + n * LEARN_NODES;
    bool positive = true;
    learn_nodes(n, s);
    TEAM_SYNC();
    learn_shifted(n, s, ratios, diagonals);
    TEAM_SYNC();
    for (int k = 0; k < LEARN_NODES; k++)
        positive = positive && s->inverse[k] > 0;
    if (!positive)
        return false;
    TEAM_EACH(j, 0, n)
    {
        double x[LEARN_NODES];
        for (int k = 0; k < LEARN_NODES; k++)
            x[k] = 0;
        for (int i = n - 1; i >= 0; i--) {
            double sum[4] = { 0, 0, 0, 0 };
            for (int k = 0; k < LEARN_NODES; k++) {
                const double ratio = ratios[i * LEARN_NODES + k];
                x[k] = i == j ? diagonals[i * LEARN_NODES + k] : -(x[k] * ratio);
                sum[k % 4] += x[k];
            }
            const double all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
            if (i <= j)
                root[i * n + j] = root[j * n + i] =
                    i == j ? s->scalars[2 * LEARN_NODES] - all : -all;
        }
    }
    TEAM_SYNC();
    return true;
}

/* Replaces m by Q m Q^T, where Q is the product of the reflections in the rows of `vectors`. */
TEAM_APART void learn_reflect_back(int n, const double *vectors, double *m, learn_space s)
{
    TEAM_EACH(j, 0, n)
    {
        s.v[j] = s.w[j] = 0;
        s.next[j] = j >= n - 1 && n > 1 ? vectors[(n - 2) * n + j] : 0;
    }
    TEAM_SYNC();
    for (int k = n - 1; k >= 0; k--) {
        learn_update(n, k, 0, m, &s, true);
        TEAM_SYNC();
        if (k == 0)
            return;
        if (TEAM_IS_FIRST_LINE) {
            TEAM_LANES(j, 0, n)
            s.w[j] = s.beta[k - 1] * fma(s.next[k], m[k * n + j], learn_sum_parts(n, s.part, j));
            learn_weigh(n, s.beta[k - 1], s.next, s.w, 0, k);
            TEAM_LANES(j, 0, n) /* room of v */
            s.v[j] = k > 1 && j >= k - 1 ? vectors[(k - 2) * n + j] : 0;
        }
        learn_advance(&s);
        TEAM_SYNC();
    }
}

/* Solves W u = r for upper triangles; W replaces r. Rows do not depend on one another. */
TEAM_APART void learn_divide(int n, double *r, const double *u)
{
    TEAM_LINES(i, 0, n)
    for (int k = i; k < n; k++) {
        const double factor = r[i * n + k] / u[k * n + k];
        TEAM_LINE_SYNC();
        TEAM_LANES(j, k, n)
        r[i * n + j] = j == k ? factor : fma(-factor, u[k * n + j], r[i * n + j]);
        TEAM_LINE_SYNC();
    }
    TEAM_SYNC();
}

/* On entry s->fast is a with rows and columns in reverse order, and s->other is b. On success
 * s->fast has W in its upper triangle. Returns the trace of a times the mean; 0: a or b is not
 * positive definite. */
TEAM_APART double learn_mean_factor(int n, const learn_space *s)
{
    double *m = s->fast, trace = 0;
    if (!learn_factor(n, m, s->inverse))
        return 0;
    TEAM_LINES(i, 0, n)
    TEAM_LANES(j, 0, n)
    s->upper[i * n + j] = j < i ? 0 : m[(n - 1 - j) * n + n - 1 - i];
    TEAM_SYNC();
    TEAM_EACH(i, 0, n * n)
    m[i] = s->upper[i];
    TEAM_SYNC();
    learn_times_upper(n, s->other, m, s->third);
    learn_upper_times(n, m, s->third, s->other);
    TEAM_LINES(i, 0, n)
    TEAM_LANES(j, 0, n)
    m[i * n + j] = s->other[j <= i ? i * n + j : j * n + i];
    TEAM_SYNC();
    learn_tridiagonalise(n, m, *s);
    TEAM_EACH(i, 0, n * n)
    s->third[i] = m[i];
    TEAM_SYNC();
    if (!learn_root(n, s, m, s->other))
        return 0;
    learn_reflect_back(n, s->third, m, *s);
    for (int i = 0; i < n; i++)
        trace += m[i * n + i];
    TEAM_SYNC();
    if (!learn_factor(n, m, s->inverse))
        return 0;
    learn_divide(n, m, s->upper);
    return trace;
}
