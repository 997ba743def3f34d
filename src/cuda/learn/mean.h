/* mean.h - an upper factor W of the geometric mean W^T W = a^-1 # b of two positive definite
 * matrices, by a team (team.h).
 *
 * The file src/kernels/mean_loops.h takes the same steps, and explains them. a = U U^T. The square
 * root of U^T b U comes from a tridiagonal matrix. R is its Cholesky factor, and W = R U^-1. Sums
 * have another order here. One matrix at a time is in tiles; the others are in GPU memory. */
#pragma once

#include "root.h"

/* A team's memory. The matrices are in GPU memory: n x n numbers each, and n x LEARN_NODES. */
typedef struct learn_space {
    learn_shared *shared;
    double *keys;    /* moments of keys (a), then U^T */
    double *queries; /* moments of queries (b), then the vectors of reflections */
    double *other, *nodes;
} learn_space;

/* Adds multiples of row k to the rows that are not finished. from_end: these are the rows before
 * k, with the lower triangle; else the rows after k, with the upper triangle. */
TEAM_FN void tile_eliminate(int n, int k, bool from_end, const double *row, learn_tile *t)
{
    const double reciprocal = 1 / row[k];
    const tile_columns columns = tile_columns_of(row);
    unrolled_for (int a = 0; a < TILE_ROWS; a++) {
        const int i = TILE_ROW(a);
        if (from_end ? i >= k : i <= k || i >= n)
            continue;
        const double factor = -(row[i] * reciprocal);
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            const int j = TILE_COLUMN(b);
            if (from_end ? TILE_FIRST(j) <= i : TILE_LAST(j) >= i)
                t->x[a][b] = fma(factor, columns.x[b], t->x[a][b]);
        }
    }
}

/* Divides the rows of a triangle by the roots of their pivots, and sets zeros elsewhere. */
TEAM_FN void tile_scale_rows(bool lower, const double *inverse, learn_tile *t)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++) {
        const double factor = inverse[TILE_ROW(a)];
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            const int i = TILE_ROW(a), j = TILE_COLUMN(b);
            t->x[a][b] = (lower ? j <= i : j >= i) ? t->x[a][b] * factor : 0;
        }
    }
}

/* Replaces a symmetric matrix m by a triangle. from_end: a lower triangle L with m = L^T L; else an
 * upper triangle R with m = R^T R. False when a pivot is not above 0. */
TEAM_FN bool tile_factor(int n, bool from_end, learn_shared *s, learn_tile *t)
{
    rolled_for (int step = 0; step < n; step++) {
        const int k = from_end ? n - 1 - step : step;
        double *const row = s->row[step % 2];
        tile_copy_row(t, k, row);
        TEAM_SYNC();
        if (!(row[k] > 0))
            return false;
        if (TEAM_IS_FIRST)
            s->diagonal[k] = row[k];
        tile_eliminate(n, k, from_end, row, t);
    }
    TEAM_SYNC();
    TEAM_EACH (i, 0, LEARN_MOST)
        s->inverse[i] = i < n ? 1 / sqrt(s->diagonal[i]) : 0;
    TEAM_SYNC();
    tile_scale_rows(from_end, s->inverse, t);
    return true;
}

/* Subtracts multiples of row k of u, which has numbers right of the diagonal. Then column k + 1 of
 * the rows only lacks the division by the diagonal. */
TEAM_FN void tile_divide_column(int chunk, int k, double inverse, const double *u, learn_tile *t)
{
    const tile_columns columns = tile_columns_of(u);
    const tile_rows numbers = tile_column_of(t, chunk, k);
    unrolled_for (int a = 0; a < TILE_ROWS; a++) {
        if (TILE_ROW(a) > k)
            continue;
        const double factor = numbers.x[a] * inverse;
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
            if (TILE_COLUMN(b) / TEAM_WIDTH >= chunk)
                t->x[a][b] = fma(-factor, columns.x[b], t->x[a][b]);
    }
}

/* Multiplies the columns of a matrix in tiles. */
TEAM_FN void tile_scale_columns(const double *numbers, learn_tile *t)
{
    const tile_columns columns = tile_columns_of(numbers);
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
            t->x[a][b] *= columns.x[b];
}

/* Solves W u = r for upper triangles; W replaces r, in the tiles. Rows do not depend on one
 * another. lower: u^T by rows. */
TEAM_FN void tile_divide(int n, const double *lower, learn_shared *s, learn_tile *t)
{
    const panel_source u = { lower, true, true };
    double *const panel = s->u.panels.of[0];
    TEAM_SYNC();
    TEAM_EACH (k, 0, LEARN_MOST)
        s->inverse[k] = k < n ? 1 / lower[k * n + k] : 0;
    unrolled_for (int chunk = 0; chunk < LEARN_MOST / TEAM_WIDTH; chunk++) {
        const int end = (chunk + 1) * TEAM_WIDTH;
        rolled_for (int first = chunk * TEAM_WIDTH; first < end && first < n; first += PANEL_ROWS) {
            panel_load(n, u, first, panel);
            TEAM_SYNC();
            rolled_for (int k = first; k < first + PANEL_ROWS && k < n; k++)
                tile_divide_column(chunk, k, s->inverse[k], panel + (k - first) * PANEL_STRIDE, t);
            TEAM_SYNC();
        }
    }
    tile_scale_columns(s->inverse, t);
}

/* The tiles get U^T b U. */
TEAM_FN void tile_sandwich(int n, const learn_space *s, learn_tile *t)
{
    const panel_source b = { s->queries, false, false }, u = { s->keys, true, false },
                       product = { s->other, false, false };
    tile_multiply(n, b, u, s->shared, t);
    tile_store(n, t, s->other);
    TEAM_SYNC();
    tile_multiply(n, u, product, s->shared, t);
}

/* The sum of the diagonal of a matrix in GPU memory. */
TEAM_FN double learn_trace(int n, const double *m, learn_shared *s)
{
    TEAM_EACH (i, 0, n)
        s->v[i] = m[i * n + i];
    TEAM_SYNC();
    const double trace = line_sum(s->v, 0, n);
    TEAM_SYNC();
    return trace;
}

/* On success W is in the tiles. Returns the trace of a times the mean; 0: a or b is not positive
 * definite. A rotation does not change the trace, so it is the root's. */
TEAM_FN double learn_mean_factor(int n, const learn_space *s, learn_tile *t)
{
    tile_load(n, s->keys, t);
    if (!tile_factor(n, true, s->shared, t))
        return 0;
    tile_store(n, t, s->keys);
    TEAM_SYNC();
    tile_sandwich(n, s, t);
    tile_tridiagonalise(n, t, s->queries, s->shared);
    if (!learn_root(n, s->shared, s->nodes, s->other))
        return 0;
    const double trace = learn_trace(n, s->other, s->shared);
    tile_load(n, s->other, t);
    tile_reflect_back(n, s->queries, s->shared, t);
    if (!tile_factor(n, false, s->shared, t))
        return 0;
    tile_divide(n, s->keys, s->shared, t);
    return trace;
}
