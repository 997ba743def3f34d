/* tile.h - a matrix in the registers of a team (team.h): every thread has a tile of it. On a CPU
 * one thread has the whole matrix.
 *
 * A tile's rows are 16 rows apart and its columns 32 columns apart. So when an algorithm has
 * finished the first rows and columns, all threads still have numbers to compute. A thread skips
 * 32 columns at a time; the skipped numbers are the same on a CPU. Rows and columns outside of the
 * matrix are zeros, so loops need no other bounds. */
#pragma once

#include "team.h"

#define LEARN_MOST 128 /* channels */
#define LEARN_NODES 32
#define TILE_ROWS (LEARN_MOST / TEAM_LINE_STEP)
#define TILE_COLUMNS (LEARN_MOST / TEAM_LANE_STEP)
#define TILE_ROW(a) (TEAM_LINE + (a) * TEAM_LINE_STEP)
#define TILE_COLUMN(b) (TEAM_LANE + (b) * TEAM_LANE_STEP)

/* The first and last of the 32 columns that are skipped together. */
#define TILE_FIRST(j) ((j) & ~(TEAM_WIDTH - 1))
#define TILE_LAST(j) ((j) | (TEAM_WIDTH - 1))

/* Rows of a matrix in GPU memory that are copied to shared memory together. Two panels take 33 KB.
 * Every kernel can have 48 KB without asking for more, on all GPUs. */
#define PANEL_ROWS 16
#define PANEL_STRIDE (LEARN_MOST + 1) /* so that a column lies in different banks */

typedef struct learn_panels {
    double of[2][PANEL_ROWS * PANEL_STRIDE];
} learn_panels;

/* Shared memory of a team that makes a matrix. The first three members are never in use at the
 * same time. */
typedef struct learn_shared {
    union {
        learn_panels panels;
        double ratios[LEARN_MOST * LEARN_NODES]; /* by row of T, then by node (root.h) */
        float lower[(size_t)LEARN_MOST * (LEARN_MOST + 1) / 2]; /* W^T by rows (triangle.h) */
    } u;
    double row[2][LEARN_MOST];                             /* of the matrix in the tiles */
    double sums[LEARN_MOST];                               /* of rows */
    double v[LEARN_MOST], w[LEARN_MOST], next[LEARN_MOST]; /* of reflections (root.h) */
    double diagonal[LEARN_MOST], beside[LEARN_MOST], beta[LEARN_MOST], inverse[LEARN_MOST];
    double shift[LEARN_NODES], weight[LEARN_NODES], own[LEARN_NODES], positive[LEARN_NODES];
} learn_shared;

typedef struct learn_tile {
    double x[TILE_ROWS][TILE_COLUMNS];
} learn_tile;

/* A number for each of a thread's columns. */
typedef struct tile_columns {
    double x[TILE_COLUMNS];
} tile_columns;

TEAM_FN tile_columns tile_columns_of(const double *numbers)
{
    tile_columns c;
    unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
        c.x[b] = numbers[TILE_COLUMN(b)];
    return c;
}

TEAM_FN void tile_load(int n, const double *m, learn_tile *t)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            const int i = TILE_ROW(a), j = TILE_COLUMN(b);
            t->x[a][b] = i < n && j < n ? m[i * n + j] : 0;
        }
}

TEAM_FN void tile_store(int n, const learn_tile *t, double *m)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++) {
            const int i = TILE_ROW(a), j = TILE_COLUMN(b);
            if (i < n && j < n)
                m[i * n + j] = t->x[a][b];
        }
}

TEAM_FN void tile_set_identity(int n, learn_tile *t)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
            t->x[a][b] = TILE_ROW(a) == TILE_COLUMN(b) && TILE_ROW(a) < n;
}

/* Copies row k from the tiles that have it to shared memory. */
TEAM_FN void tile_copy_row(const learn_tile *t, int k, double *row)
{
    if (k % TEAM_LINE_STEP != TEAM_LINE)
        return;
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        if (TILE_ROW(a) == k) {
            unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
                row[TILE_COLUMN(b)] = t->x[a][b];
        }
}

/* Numbers of column k, which a line's threads get for their rows. chunk: k / TEAM_WIDTH. Registers
 * have no index, so it has to be a constant. */
typedef struct tile_rows {
    double x[TILE_ROWS];
} tile_rows;

TEAM_FN tile_rows tile_column_of(const learn_tile *t, int chunk, int k)
{
    tile_rows r;
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        r.x[a] = line_at(t->x[a][TEAM_LANE_STEP == TEAM_WIDTH ? chunk : k], k % TEAM_LANE_STEP);
    return r;
}

/* The partial sums of a thread's rows. */
typedef struct tile_sums {
    line_sum_parts of[TILE_ROWS];
} tile_sums;

TEAM_FN void tile_clear_sums(tile_sums *s)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        for (int i = 0; i < TEAM_SPREAD; i++)
            s->of[a].of[i] = 0;
}

#ifdef __CUDACC__
/* Half of the lanes keep the first half of `count` numbers, and the other lanes the second half.
 * They add the other lanes' numbers to these. */
TEAM_FN void tile_halve_sums(tile_sums *s, int count, int width)
{
    const bool second = threadIdx.x & width;
    unrolled_for (int a = 0; a < count / 2; a++) {
        const double first = s->of[a].of[0], other = s->of[a + count / 2].of[0];
        s->of[a].of[0] =
            (second ? other : first) + __shfl_xor_sync(0xffffffffu, second ? first : other, width);
    }
}
#endif

/* Writes the sums of all rows, added as line_total does, to shared memory. */
TEAM_FN void tile_total_sums(tile_sums *s, double *sums)
{
#ifdef __CUDACC__
    static_assert(TILE_ROWS == 8, "three times half of the rows are left");
    const int row = TEAM_LANE / 16 * 4 + TEAM_LANE / 8 % 2 * 2 + TEAM_LANE / 4 % 2;
    tile_halve_sums(s, 8, 16);
    tile_halve_sums(s, 4, 8);
    tile_halve_sums(s, 2, 4);
    s->of[0].of[0] += __shfl_xor_sync(0xffffffffu, s->of[0].of[0], 2);
    s->of[0].of[0] += __shfl_xor_sync(0xffffffffu, s->of[0].of[0], 1);
    if (TEAM_LANE % 4 == 0)
        sums[TILE_ROW(row)] = s->of[0].of[0];
#else
    for (int i = 0; i < TILE_ROWS; i++)
        sums[i] = line_total(s->of[i]);
#endif
}

/* Panels */

/* A matrix of a product, whose rows are needed one after another. */
typedef struct panel_source {
    const double *m;
    bool triangular; /* row k is column k of m, and zeros left of number k */
    bool strictly;   /* number k is a zero, too */
} panel_source;

/* Copies rows from the first-th on. */
TEAM_FN void panel_load(int n, panel_source from, int first, double *panel)
{
    TEAM_EACH (x, 0, PANEL_ROWS * LEARN_MOST) {
        const int row = from.triangular ? x % PANEL_ROWS : x / LEARN_MOST,
                  j = from.triangular ? x / PANEL_ROWS : x % LEARN_MOST, k = first + row;
        const bool is_there = k < n && j < n && (!from.triangular || k + from.strictly <= j);
        panel[row * PANEL_STRIDE + j] =
            is_there ? from.m[from.triangular ? j * n + k : k * n + j] : 0;
    }
}

/* t += x_k^T y_k for row k of both matrices. `first`: the first row of the panels. */
TEAM_FN void tile_add_product(int n, const double *x, bool x_triangular, const double *y,
                              bool y_triangular, int first, learn_tile *t)
{
    const tile_columns columns = tile_columns_of(y);
    unrolled_for (int a = 0; a < TILE_ROWS; a++) {
        const int i = TILE_ROW(a);
        if (i >= n || (x_triangular && i < first))
            continue;
        const double factor = x[i];
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
            if (!y_triangular || TILE_LAST(TILE_COLUMN(b)) >= first)
                t->x[a][b] = fma(factor, columns.x[b], t->x[a][b]);
    }
}

/* t = x^T y. */
TEAM_FN void tile_multiply(int n, panel_source x, panel_source y, learn_shared *s, learn_tile *t)
{
    unrolled_for (int a = 0; a < TILE_ROWS; a++)
        unrolled_for (int b = 0; b < TILE_COLUMNS; b++)
            t->x[a][b] = 0;
    rolled_for (int first = 0; first < n; first += PANEL_ROWS) {
        panel_load(n, x, first, s->u.panels.of[0]);
        panel_load(n, y, first, s->u.panels.of[1]);
        TEAM_SYNC();
        rolled_for (int k = 0; k < PANEL_ROWS && first + k < n; k++)
            tile_add_product(n, s->u.panels.of[0] + k * PANEL_STRIDE, x.triangular,
                             s->u.panels.of[1] + k * PANEL_STRIDE, y.triangular, first, t);
        TEAM_SYNC();
    }
}
