/* mean.h - an upper factor W of the geometric mean W^T W = a^-1 # b of two positive definite
 * matrices, by a team (team.h).
 *
 * The file src/kernels/mean_loops.h takes the same steps, and explains them. a = U U^T. The square
 * root of U^T b U comes from a tridiagonal matrix. R is its Cholesky factor, and W = R U^-1. Sums
 * have another order here. */
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

/* m[i][j] += factors[i] row[j] with factors -row[i] * reciprocal, for rows i and columns j >= i
 * from k + 1 on. */
TEAM_FN void learn_eliminate(int n, int k, double *m, double reciprocal)
{
    const double *row = m + k * n;
    for (int i0 = k + 1 + TEAM_LINE; i0 < n; i0 += TEAM_CHUNK * TEAM_LINE_STEP)
        for (int j0 = k + 1 + TEAM_LANE; j0 < n; j0 += TEAM_CHUNK * TEAM_LANE_STEP) {
            double x[TEAM_CHUNK][TEAM_CHUNK], y[TEAM_CHUNK], factor[TEAM_CHUNK];
            for (int r = 0; r < TEAM_CHUNK; r++) {
                const int i = i0 + r * TEAM_LINE_STEP, j = j0 + r * TEAM_LANE_STEP;
                factor[r] = i < n ? -(row[i] * reciprocal) : 0;
                y[r] = j < n ? row[j] : 0;
                for (int c = 0; c < TEAM_CHUNK; c++) {
                    const int at = j0 + c * TEAM_LANE_STEP;
                    x[r][c] = at < n && i <= at ? m[i * n + at] : 0;
                }
            }
            for (int r = 0; r < TEAM_CHUNK; r++)
                for (int c = 0; c < TEAM_CHUNK; c++) {
                    const int i = i0 + r * TEAM_LINE_STEP, j = j0 + c * TEAM_LANE_STEP;
                    if (j < n && i <= j)
                        m[i * n + j] = fma(factor[r], y[c], x[r][c]);
                }
        }
}

/* Replaces the upper triangle of m by R with m = R^T R; false when a pivot is not above 0. */
TEAM_APART bool learn_factor(int n, double *m, double *inverse)
{
    for (int k = 0; k < n; k++) {
        const double pivot = m[k * n + k];
        if (!(pivot > 0))
            return false;
        learn_eliminate(n, k, m, 1 / pivot);
        TEAM_SYNC();
    }
    TEAM_EACH (i, 0, n)
        inverse[i] = 1 / sqrt(m[i * n + i]);
    TEAM_SYNC();
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, i, n)
            m[i * n + j] *= inverse[i];
    TEAM_SYNC();
    return true;
}

#define LEARN_ROWS 8 /* of a line, whose products are added together */

typedef struct learn_tile {
    double sum[LEARN_ROWS][TEAM_CHUNK];
} learn_tile;

TEAM_FN void learn_store_tile(int n, int i0, int j0, const learn_tile *t, double *out)
{
    for (int r = 0; r < LEARN_ROWS; r++)
        for (int c = 0; c < TEAM_CHUNK; c++) {
            const int i = i0 + r * TEAM_LINE_STEP, j = j0 + c * TEAM_LANE_STEP;
            if (i < n && j < n)
                out[i * n + j] = t->sum[r][c];
        }
}

/* out = a b, or a^T b (transposed). */
TEAM_FN void learn_multiply(int n, const double *a, bool transposed, const double *b, double *out)
{
    for (int i0 = TEAM_LINE; i0 < n; i0 += LEARN_ROWS * TEAM_LINE_STEP)
        for (int j0 = TEAM_LANE; j0 < n; j0 += TEAM_CHUNK * TEAM_LANE_STEP) {
            learn_tile t = { { { 0 } } };
            for (int k = 0; k < n; k++) {
                double x[LEARN_ROWS], y[TEAM_CHUNK];
                for (int r = 0; r < LEARN_ROWS; r++) {
                    const int i = i0 + r * TEAM_LINE_STEP;
                    x[r] = i < n ? a[transposed ? k * n + i : i * n + k] : 0;
                }
                for (int c = 0; c < TEAM_CHUNK; c++) {
                    const int j = j0 + c * TEAM_LANE_STEP;
                    y[c] = j < n ? b[k * n + j] : 0;
                }
                for (int r = 0; r < LEARN_ROWS; r++)
                    for (int c = 0; c < TEAM_CHUNK; c++)
                        t.sum[r][c] = fma(x[r], y[c], t.sum[r][c]);
            }
            learn_store_tile(n, i0, j0, &t, out);
        }
    TEAM_SYNC();
}

TEAM_APART void learn_times_upper(int n, const double *b, const double *u, double *out)
{
    learn_multiply(n, b, false, u, out);
}

TEAM_APART void learn_upper_times(int n, const double *u, const double *c, double *out)
{
    learn_multiply(n, u, true, c, out);
}

/* Completes w, the sums of parts times beta, so that reflecting both sides of a symmetric matrix
 * subtracts v w^T + w v^T. v is zero before `first`. The first line calls it. */
TEAM_FN void learn_weigh(int n, double beta, const double *v, double *w, int from, int first)
{
    TEAM_LINE_SYNC();
    const double factor = -(beta / 2) * line_dot(w, v, first, n);
    for (int j0 = from + TEAM_LANE; j0 < n; j0 += TEAM_CHUNK * TEAM_LANE_STEP) {
        double x[TEAM_CHUNK], y[TEAM_CHUNK];
        for (int c = 0; c < TEAM_CHUNK; c++) {
            const int j = j0 + c * TEAM_LANE_STEP;
            x[c] = j < n ? v[j] : 0;
            y[c] = j < n ? w[j] : 0;
        }
        for (int c = 0; c < TEAM_CHUNK; c++)
            if (j0 + c * TEAM_LANE_STEP < n)
                w[j0 + c * TEAM_LANE_STEP] = fma(factor, x[c], y[c]);
    }
    TEAM_LINE_SYNC();
}

/* w = beta times the sums of parts, in columns from `from` on; more: row k of m times next[k] is
 * added first (m NULL: not). The first line calls it. */
TEAM_FN void learn_sum_parts(int n, double beta, int from, const learn_space *s, double next,
                             const double *row)
{
    for (int j0 = from + TEAM_LANE; j0 < n; j0 += TEAM_CHUNK * TEAM_LANE_STEP) {
        double sum[TEAM_CHUNK];
        for (int c = 0; c < TEAM_CHUNK; c++) {
            const int j = j0 + c * TEAM_LANE_STEP;
            sum[c] = row && j < n ? next * row[j] : 0;
            for (int g = 0; g < LEARN_GROUPS(n); g++)
                sum[c] += j < n ? s->part[g * n + j] : 0;
        }
        for (int c = 0; c < TEAM_CHUNK; c++)
            if (j0 + c * TEAM_LANE_STEP < n)
                s->w[j0 + c * TEAM_LANE_STEP] = beta * sum[c];
    }
}

/* next = row k of the matrix with the pending reflection. The first line calls it. */
TEAM_FN void learn_read_row(int n, int k, const double *row, const learn_space *s)
{
    const double vk = -s->v[k], wk = -s->w[k];
    for (int j0 = k + TEAM_LANE; j0 < n; j0 += TEAM_CHUNK * TEAM_LANE_STEP) {
        double x[TEAM_CHUNK];
        for (int c = 0; c < TEAM_CHUNK; c++) {
            const int j = j0 + c * TEAM_LANE_STEP;
            x[c] = j < n ? fma(wk, s->v[j], fma(vk, s->w[j], row[j])) : 0;
        }
        for (int c = 0; c < TEAM_CHUNK; c++)
            if (j0 + c * TEAM_LANE_STEP < n)
                s->next[j0 + c * TEAM_LANE_STEP] = x[c];
    }
    TEAM_LINE_SYNC();
}

/* Row k of the matrix with the pending reflection becomes the vector of the next reflection. The
 * first line calls it. */
TEAM_FN void learn_reflect(int n, int k, double *row, const learn_space *s)
{
    learn_read_row(n, k, row, s);
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
    TEAM_LANES (j, k + 1, n)
        row[j] = s->next[j];
}

/* m -= v w^T + w v^T in rows from k + 1 on and columns from `first` on, and part = next times the
 * new rows. mirrors: column k becomes row k. */
TEAM_FN void learn_update(int n, int k, int first, double *m, const learn_space *s, bool mirrors)
{
    TEAM_EACH (t, 0, LEARN_GROUPS(n) * n) {
        const int g = t / n, j = t - g * n, step = LEARN_GROUPS(n);
        double sum = 0;
        if (j < first)
            continue;
        const double v = -s->v[j], w = -s->w[j];
        for (int i0 = k + 1 + g; i0 < n; i0 += TEAM_CHUNK * step) {
            double x[TEAM_CHUNK], next[TEAM_CHUNK];
            for (int r = 0; r < TEAM_CHUNK; r++) {
                const int i = i0 + r * step;
                x[r] = i < n ? fma(s->w[i], v, fma(s->v[i], w, m[i * n + j])) : 0;
                next[r] = i < n ? s->next[i] : 0;
            }
            for (int r = 0; r < TEAM_CHUNK; r++) {
                const int i = i0 + r * step;
                sum = fma(next[r], x[r], sum);
                if (i < n)
                    m[i * n + j] = x[r];
                if (i < n && mirrors && j == k)
                    m[k * n + i] = x[r];
            }
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

/* Makes m tridiagonal, and returns the result in s->diagonal and s->beside. The vector of
 * reflection k stays in row k, right of the diagonal. */
TEAM_APART void learn_tridiagonalise(int n, double *m, learn_space s)
{
    TEAM_EACH (j, 0, n)
        s.v[j] = s.w[j] = s.next[j] = 0;
    TEAM_SYNC();
    for (int k = 0; k < n; k++) {
        if (TEAM_IS_FIRST_LINE) {
            if (k) {
                learn_sum_parts(n, s.beta[k - 1], k, &s, 0, NULL);
                learn_weigh(n, s.beta[k - 1], s.v, s.w, k, k);
            }
            learn_reflect(n, k, m + k * n, &s);
        }
        TEAM_SYNC();
        if (k + 1 < n)
            learn_update(n, k, k + 1, m, &s, false);
        learn_advance(&s);
        TEAM_SYNC();
    }
}

/* The nodes of the sum for a square root: shift and weight, and the weight of 1. */
TEAM_FN void learn_nodes(int n, const learn_space *s)
{
    double *shift = s->scalars, *weight = shift + LEARN_NODES, *own = weight + LEARN_NODES;
    TEAM_EACH (k, 0, LEARN_NODES) {
        const bool low = k == 0, high = k == LEARN_NODES - 1;
        double bound = 0;
        int exponent;
        for (int i = 0; i < n; i++)
            bound = fmax(bound, fabs(s->diagonal[i]) + (i ? fabs(s->beside[i - 1]) : 0) +
                                    (i + 1 < n ? fabs(s->beside[i]) : 0));
        frexp(bound, &exponent);
        exponent = (exponent + (exponent > 0)) / 2 - 26;
        const int j = exponent + k - !low - high;
        own[k] = 0.44127120030605137 * ldexp(high ? 7.0 : 1.0, j);
        shift[k] = ldexp(high ? 7.0 : 1.0, 2 * j) / (low ? 7 : 1);
        weight[k] = own[k] * shift[k];
    }
}

/* For each node, by row: the ratios of T + shift = L D L^T, and the diagonal of its inverse times
 * the weight. s->inverse[k] becomes 1 for a node whose pivots are all above 0. */
TEAM_FN void learn_shifted(int n, const learn_space *s, double *ratios, double *diagonals)
{
    TEAM_EACH (k, 0, LEARN_NODES) {
        const double shift = s->scalars[k], weight = s->scalars[LEARN_NODES + k];
        double ratio = 0, below = 0;
        bool positive = true;
        for (int i = 0; i < n; i++) {
            const double pivot = s->diagonal[i] + shift - (i ? s->beside[i - 1] * ratio : 0),
                         reciprocal = 1 / pivot;
            ratio = i + 1 < n ? s->beside[i] * reciprocal : 0;
            positive = positive && pivot > 0;
            ratios[i * LEARN_NODES + k] = ratio;
            diagonals[i * LEARN_NODES + k] = weight * reciprocal;
        }
        for (int i = n - 1; i >= 0; i--) {
            ratio = ratios[i * LEARN_NODES + k];
            below = fma(ratio * ratio, below, diagonals[i * LEARN_NODES + k]);
            diagonals[i * LEARN_NODES + k] = below;
        }
        s->inverse[k] = positive;
    }
}

#define LEARN_QUARTER (LEARN_NODES / 4)

/* A quarter of the nodes walks up column j: x are its numbers of the inverses in row i, from which
 * those of row i - 1 follow. Returns their sum. */
TEAM_FN double learn_walk(int i, int j, const double *ratios, const double *diagonals, double *x)
{
    double sum[2] = { 0, 0 };
    for (int k = 0; k < LEARN_QUARTER; k++) {
        x[k] = i == j ? diagonals[i * LEARN_NODES + k] : -(x[k] * ratios[i * LEARN_NODES + k]);
        sum[k % 2] += x[k];
    }
    return sum[0] + sum[1];
}

/* Column j of the root; four threads on a GPU. */
TEAM_FN void learn_root_column(int n, int j, int quarter, double weight, const double *ratios,
                               const double *diagonals, double *root)
{
#ifdef __CUDACC__
    double x[LEARN_QUARTER];
    for (int k = 0; k < LEARN_QUARTER; k++)
        x[k] = 0;
    ratios += quarter * LEARN_QUARTER;
    diagonals += quarter * LEARN_QUARTER;
    for (int i = n - 1; i >= 0; i--) {
        double all = learn_walk(i, j, ratios, diagonals, x);
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        if (i <= j && j < n && quarter == 0)
            root[i * n + j] = root[j * n + i] = i == j ? weight - all : -all;
    }
#else
    double x[4][LEARN_QUARTER] = { { 0 } }, sum[4];
    for (int i = quarter == 0 && j < n ? n - 1 : -1; i >= 0; i--) {
        for (int q = 0; q < 4; q++)
            sum[q] =
                learn_walk(i, j, ratios + q * LEARN_QUARTER, diagonals + q * LEARN_QUARTER, x[q]);
        const double all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        if (i <= j)
            root[i * n + j] = root[j * n + i] = i == j ? weight - all : -all;
    }
#endif
}

/* root = T^(1/2) of the tridiagonal T; false when it is not positive. */
TEAM_APART bool learn_root(int n, const learn_space *s, double *root, double *ratios)
{
    double *diagonals = ratios + n * LEARN_NODES, weight = 0;
    bool positive = true;
    learn_nodes(n, s);
    TEAM_SYNC();
    learn_shifted(n, s, ratios, diagonals);
    TEAM_SYNC();
    for (int k = 0; k < LEARN_NODES; k++) {
        positive = positive && s->inverse[k] > 0;
        weight += s->scalars[2 * LEARN_NODES + k];
    }
    if (!positive)
        return false;
    TEAM_EACH (t, 0, 4 * LEARN_MOST)
        if (t / 4 < (n + 7) / 8 * 8) /* whole lines */
            learn_root_column(n, t / 4, t % 4, weight, ratios, diagonals, root);
    TEAM_SYNC();
    return true;
}

/* Replaces m by Q m Q^T, where Q is the product of the reflections in the rows of `vectors`. */
TEAM_APART void learn_reflect_back(int n, const double *vectors, double *m, learn_space s)
{
    TEAM_EACH (j, 0, n) {
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
            learn_sum_parts(n, s.beta[k - 1], 0, &s, s.next[k], m + k * n);
            learn_weigh(n, s.beta[k - 1], s.next, s.w, 0, k);
            TEAM_LANES (j, 0, n) /* room of v */
                s.v[j] = k > 1 && j >= k - 1 ? vectors[(k - 2) * n + j] : 0;
        }
        learn_advance(&s);
        TEAM_SYNC();
    }
}

/* Solves W u = r for upper triangles; W replaces r. Rows do not depend on one another, so a line
 * solves its rows together, in registers. inverse: n numbers of room. */
TEAM_APART void learn_divide(int n, double *r, const double *u, double *inverse)
{
    TEAM_EACH (k, 0, n)
        inverse[k] = 1 / u[k * n + k];
    TEAM_SYNC();
#ifdef __CUDACC__
    learn_tile t;
    const int i0 = TEAM_LINE, j0 = TEAM_LANE;
    for (int row = 0; row < LEARN_ROWS; row++)
        for (int c = 0; c < TEAM_CHUNK; c++) {
            const int i = i0 + row * TEAM_LINE_STEP, j = j0 + c * TEAM_LANE_STEP;
            t.sum[row][c] = i <= j && j < n ? r[i * n + j] : 0;
        }
#pragma unroll
    for (int chunk = 0; chunk < TEAM_CHUNK; chunk++)
#pragma unroll 1
        for (int lane = 0; lane < TEAM_WIDTH && chunk * TEAM_WIDTH + lane < n; lane++) {
            const int k = chunk * TEAM_WIDTH + lane;
            double x[TEAM_CHUNK];
            for (int c = 0; c < TEAM_CHUNK; c++) {
                const int j = j0 + c * TEAM_LANE_STEP;
                x[c] = j > k && j < n ? u[k * n + j] : 0;
            }
            for (int row = 0; row < LEARN_ROWS; row++) {
                const double factor =
                    __shfl_sync(0xffffffffu, t.sum[row][chunk], lane) * inverse[k];
                for (int c = 0; c < TEAM_CHUNK; c++)
                    t.sum[row][c] = fma(-factor, x[c], t.sum[row][c]);
                if (j0 == lane)
                    t.sum[row][chunk] = factor;
            }
        }
    TEAM_SYNC();
    learn_store_tile(n, i0, j0, &t, r);
#else
    for (int i = 0; i < n; i++)
        for (int k = i; k < n; k++) {
            const double factor = r[i * n + k] * inverse[k];
            for (int j = k + 1; j < n; j++)
                r[i * n + j] = fma(-factor, u[k * n + j], r[i * n + j]);
            r[i * n + k] = factor;
        }
#endif
    TEAM_SYNC();
}

/* On entry s->fast is a with rows and columns in reverse order, and s->other is b. On success
 * s->fast has W in its upper triangle. Returns the trace of a times the mean; 0: a or b is not
 * positive definite. */
TEAM_APART double learn_mean_factor(int n, const learn_space *s)
{
    double *m = s->fast;
    if (!learn_factor(n, m, s->inverse))
        return 0;
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, 0, n)
            s->upper[i * n + j] = j < i ? 0 : m[(n - 1 - j) * n + n - 1 - i];
    TEAM_SYNC();
    TEAM_EACH (i, 0, n * n)
        m[i] = s->upper[i];
    TEAM_SYNC();
    learn_times_upper(n, s->other, m, s->third);
    learn_upper_times(n, m, s->third, s->other);
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, 0, n)
            m[i * n + j] = s->other[j <= i ? i * n + j : j * n + i];
    TEAM_SYNC();
    learn_tridiagonalise(n, m, *s);
    TEAM_EACH (i, 0, n * n)
        s->third[i] = m[i];
    TEAM_SYNC();
    if (!learn_root(n, s, m, s->other))
        return 0;
    learn_reflect_back(n, s->third, m, *s);
    TEAM_EACH (i, 0, n)
        s->v[i] = m[i * n + i];
    TEAM_SYNC();
    const double trace = line_sum(s->v, 0, n);
    TEAM_SYNC();
    if (!learn_factor(n, m, s->inverse))
        return 0;
    learn_divide(n, m, s->upper, s->inverse);
    return trace;
}
