/* root.h - the square root of a positive definite matrix in tiles (tile.h), by way of a tridiagonal
 * matrix. The file src/kernels/mean_loops.h takes the same steps, and explains them. Sums have
 * another order here.
 *
 * A reflection takes two steps. The first line makes the vectors v and w that change the matrix.
 * Then all lines change the matrix and, at once, multiply it by the vector of the next
 * reflection. */
#pragma once

#include "tile.h"

/* t -= v w^T + w v^T, and sums = t times next. Rows and columns up to k are finished (whole: they
 * are not, but their numbers in v are zeros, and those of next before number k). */
TEAM_FN void tile_reflect(int n, int k, bool whole, learn_shared *s, learn_tile *t)
{
    const tile_columns v = tile_columns_of(s->v), w = tile_columns_of(s->w),
                       next = tile_columns_of(s->next);
    tile_sums sums;
    tile_clear_sums(&sums);
    unrolled_for (int a = 0; a < TILE_ROWS; a++) {
        const int i = TILE_ROW(a);
        if (i >= n || (!whole && i <= k))
            continue;
        const double row_v = -s->v[i], row_w = -s->w[i];
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            const int last = TILE_LAST(TILE_COLUMN(b));
            if (whole ? i <= k && last < k : last <= k)
                continue;
            t->x[a][b] = fma(row_w, v.x[b], fma(row_v, w.x[b], t->x[a][b]));
            double *const sum = &sums.of[a].of[TILE_COLUMN(b) % TEAM_SPREAD];
            *sum = fma(t->x[a][b], next.x[b], *sum);
        }
    }
    tile_total_sums(&sums, s->sums);
}

/* The reflection that zeroes all numbers of a row except the first one. The sums are the product of
 * the matrix with the row. The product with the vector v is these sums, less `kept` times the row
 * of the matrix. */
typedef struct learn_reflection {
    double lead;       /* the first number of v; the others are the row's */
    double kept, beta; /* the number that stays; 2 / |v|^2 */
    double half;       /* half of beta v^T times the product */
} learn_reflection;

/* Makes the reflection of row k - 1, whose numbers from column k on are in s->next. The first line
 * calls it. */
TEAM_FN learn_reflection tridiagonal_reflection(int n, int k, const learn_shared *s)
{
    line_sum_parts rests = { { 0 } }, products = { { 0 } };
    TEAM_LANES (j, 0, n) {
        const double x = s->next[j];
        rests.of[j % TEAM_SPREAD] = fma(j > k ? x : 0, x, rests.of[j % TEAM_SPREAD]);
        products.of[j % TEAM_SPREAD] =
            fma(j >= k ? s->sums[j] : 0, x, products.of[j % TEAM_SPREAD]);
    }
    const double rest = line_total(rests), product = line_total(products), first = s->next[k],
                 length = sqrt(first * first + rest),
                 kept = rest == 0   ? first
                        : first > 0 ? -length
                                    : length,
                 lead = first - kept, beta = rest == 0 ? 0 : 2 / (lead * lead + rest),
                 whole = product - 2 * kept * s->sums[k] + kept * kept * s->row[0][k];
    const learn_reflection r = { lead, kept, beta, beta * whole / 2 };
    return r;
}

/* Number j of w. */
TEAM_FN double tridiagonal_w(const learn_reflection *r, const learn_shared *s, int j, double v)
{
    return r->beta * fma(-r->half, v, fma(-r->kept, s->row[0][j], s->sums[j]));
}

/* Makes v and w of row k - 1. Row k of the changed matrix becomes the row of the next reflection.
 * The first line calls it. */
TEAM_FN void tridiagonal_vectors(int n, int k, double *vectors, learn_shared *s)
{
    const learn_reflection r = tridiagonal_reflection(n, k, s);
    const double row_w = tridiagonal_w(&r, s, k, r.lead);
    TEAM_LINE_SYNC();
    unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
        const int j = TILE_COLUMN(b);
        const double v = j < k    ? 0
                         : j == k ? r.lead
                                  : s->next[j],
                     w = j < k ? 0 : tridiagonal_w(&r, s, j, v),
                     x = fma(-row_w, v, fma(-r.lead, w, s->row[0][j]));
        s->v[j] = v;
        s->w[j] = w;
        if (j < n)
            vectors[(k - 1) * n + j] = v;
        if (j == k)
            s->diagonal[k] = x;
        s->next[j] = j > k && j < n ? x : 0;
    }
    if (TEAM_IS_FIRST_LANE) {
        s->beside[k - 1] = r.kept;
        s->beta[k - 1] = r.beta;
    }
}

/* The vectors before the first reflection. */
TEAM_FN void tridiagonal_begin(int n, const learn_tile *t, learn_shared *s)
{
    tile_copy_row(t, 0, s->row[0]);
    TEAM_SYNC();
    TEAM_EACH (j, 0, LEARN_MOST) {
        s->v[j] = s->w[j] = 0;
        s->next[j] = j > 0 && j < n ? s->row[0][j] : 0;
        if (j == 0)
            s->diagonal[0] = s->row[0][0];
    }
    TEAM_SYNC();
}

/* Makes the matrix in the tiles tridiagonal: s->diagonal, and next to it s->beside. Row k of
 * `vectors` gets the vector of reflection k. */
TEAM_FN void tile_tridiagonalise(int n, learn_tile *t, double *vectors, learn_shared *s)
{
    tridiagonal_begin(n, t, s);
    rolled_for (int k = 1; k < n; k++) {
        tile_reflect(n, k - 1, false, s, t);
        tile_copy_row(t, k, s->row[0]);
        TEAM_SYNC();
        if (TEAM_IS_FIRST_LINE)
            tridiagonal_vectors(n, k, vectors, s);
        TEAM_SYNC();
    }
}

/* The nodes of the sum for a square root: shift and weight, and the weight of 1. A thread makes the
 * numbers that it reads in root_shifted. */
TEAM_FN void root_nodes(int n, learn_shared *s)
{
    double bound = 0;
    int exponent;
    TEAM_LANES (i, 0, n)
        bound = fmax(bound, fabs(s->diagonal[i]) + (i ? fabs(s->beside[i - 1]) : 0) +
                                (i + 1 < n ? fabs(s->beside[i]) : 0));
    frexp(line_most(bound), &exponent);
    exponent = (exponent + (exponent > 0)) / 2 - 26;
    TEAM_EACH (k, 0, LEARN_NODES) {
        const bool low = k == 0, high = k == LEARN_NODES - 1;
        const int j = exponent + k - !low - high;
        s->own[k] = 0.44127120030605137 * ldexp(high ? 7.0 : 1.0, j);
        s->shift[k] = ldexp(high ? 7.0 : 1.0, 2 * j) / (low ? 7 : 1);
        s->weight[k] = s->own[k] * s->shift[k];
    }
}

/* For each node, by row: the ratios of T + shift = L D L^T, and in `diagonals` the diagonal of its
 * inverse times the weight. s->positive[k] becomes 1 for a node whose pivots are all above 0. */
TEAM_FN void root_shifted(int n, learn_shared *s, double *diagonals)
{
    TEAM_EACH (k, 0, LEARN_NODES) {
        double *const at = s->u.ratios + k, ratio = 0, below = 0;
        bool positive = true;
        for (int i = 0; i < n; i++) {
            const double pivot = s->diagonal[i] + s->shift[k] - (i ? s->beside[i - 1] * ratio : 0);
            at[i * LEARN_NODES] = 1 / pivot;
            ratio = i + 1 < n ? s->beside[i] * at[i * LEARN_NODES] : 0;
            positive = positive && pivot > 0;
        }
        for (int i = n - 1; i >= 0; i--) {
            const double inverse = at[i * LEARN_NODES];
            ratio = i + 1 < n ? s->beside[i] * inverse : 0;
            below = fma(ratio * ratio, below, s->weight[k] * inverse);
            at[i * LEARN_NODES] = ratio;
            diagonals[i * LEARN_NODES + k] = below;
        }
        s->positive[k] = positive;
    }
    TEAM_SYNC();
}

#define ROOT_QUARTER (LEARN_NODES / 4)

/* A quarter of the nodes walks up column j: x are its numbers of the inverses in row i, from which
 * those of row i - 1 follow. Returns their sum. */
TEAM_FN double root_walk(bool begins, const double *ratios, const double *diagonals, double *x)
{
    double sum[2] = { 0, 0 };
    unrolled_for (int k = 0; k < ROOT_QUARTER; k++) {
        x[k] = begins ? diagonals[k] : -(x[k] * ratios[k]);
        sum[k % 2] += x[k];
    }
    return sum[0] + sum[1];
}

/* Column j of the root; four threads on a GPU. Lines begin with the last of their columns. */
TEAM_FN void root_column(int n, int j, int quarter, double weight, const learn_shared *s,
                         const double *diagonals, double *root)
{
#ifdef __CUDACC__
    double x[ROOT_QUARTER] = {};
    for (int i = (j | 7) < n ? j | 7 : n - 1; i >= 0; i--) {
        const int at = i * LEARN_NODES + quarter * ROOT_QUARTER;
        double all = root_walk(i == j, s->u.ratios + at, diagonals + at, x);
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        if (i <= j && j < n && quarter == 0)
            root[i * n + j] = root[j * n + i] = i == j ? weight - all : -all;
    }
#else
    double x[4][ROOT_QUARTER] = { { 0 } }, sum[4];
    for (int i = quarter == 0 && j < n ? j : -1; i >= 0; i--) {
        for (int q = 0; q < 4; q++) {
            const int at = i * LEARN_NODES + q * ROOT_QUARTER;
            sum[q] = root_walk(i == j, s->u.ratios + at, diagonals + at, x[q]);
        }
        const double all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        root[i * n + j] = root[j * n + i] = i == j ? weight - all : -all;
    }
#endif
}

/* root = T^(1/2) of the tridiagonal T; false when it is not positive. diagonals: n x LEARN_NODES
 * numbers of room. */
TEAM_FN bool learn_root(int n, learn_shared *s, double *diagonals, double *root)
{
    double weight = 0;
    bool positive = true;
    root_nodes(n, s);
    root_shifted(n, s, diagonals);
    for (int k = 0; k < LEARN_NODES; k++) {
        positive = positive && s->positive[k] > 0;
        weight += s->own[k];
    }
    if (!positive)
        return false;
    TEAM_EACH (x, 0, 4 * LEARN_MOST)
        if (x / 4 < (n + 7) / 8 * 8) /* whole lines */
            root_column(n, x / 4, x % 4, weight, s, diagonals, root);
    TEAM_SYNC();
    return true;
}

/* Makes w of reflection k, whose vector is in s->next, and brings the vector of the reflection
 * before it. The first line calls it. */
TEAM_FN void back_vectors(int n, int k, const tile_columns *before, learn_shared *s)
{
    line_sum_parts products = { { 0 } };
    TEAM_LANES (j, 0, n)
        products.of[j % TEAM_SPREAD] = fma(s->sums[j], s->next[j], products.of[j % TEAM_SPREAD]);
    const double half = s->beta[k] * line_total(products) / 2;
    unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
        const int j = TILE_COLUMN(b);
        const double v = s->next[j];
        s->v[j] = v;
        s->w[j] = j < n ? s->beta[k] * fma(-half, v, s->sums[j]) : 0;
        s->next[j] = before->x[b];
    }
}

/* The vector of reflection k; zeros if there is none. The vectors' numbers left of the diagonal are
 * zeros. */
TEAM_FN tile_columns back_vector(int n, int k, const double *vectors)
{
    tile_columns c;
    unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
        c.x[b] = k >= 0 && TILE_COLUMN(b) < n ? vectors[k * n + TILE_COLUMN(b)] : 0;
    return c;
}

/* Replaces the matrix m in the tiles by Q m Q^T, where Q is the product of the reflections in the
 * rows of `vectors`, the last one first. The vector of a reflection comes from GPU memory while the
 * reflection before it takes place. */
TEAM_FN void tile_reflect_back(int n, const double *vectors, learn_shared *s, learn_tile *t)
{
    TEAM_EACH (j, 0, LEARN_MOST) {
        s->v[j] = s->w[j] = 0;
        s->next[j] = j < n ? vectors[(n - 2) * n + j] : 0;
    }
    tile_columns before = back_vector(n, n - 3, vectors);
    TEAM_SYNC();
    tile_reflect(n, n - 1, true, s, t);
    TEAM_SYNC();
    rolled_for (int k = n - 2; k >= 0; k--) {
        if (TEAM_IS_FIRST_LINE) {
            back_vectors(n, k, &before, s);
            before = back_vector(n, k - 2, vectors);
        }
        TEAM_SYNC();
        tile_reflect(n, k, true, s, t);
        TEAM_SYNC();
    }
}
