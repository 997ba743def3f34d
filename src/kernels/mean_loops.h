/* mean_loops.h - a factor of the geometric mean of two matrices, and the inverse of such a factor.
 *
 * Plain C that compilers vectorise: loops_c.c and the file of each CPU level include it. Every
 * number is a sum in an order that no vector's width changes, so without contraction all levels
 * agree. The including file defines NAME. */
#include <math.h>
#include <string.h>

#include "../base/attributes.h"
#include "../math/sums.h"
#include "kernels.h"

/* to[j] += factors[0] x_0[j] + factors[1] x_1[j] + ..., one term after another, for j from first to
 * end. The x_k are rows of a matrix, which have zeros left of column k (ROWS_UPPER) or right of it
 * (ROWS_LOWER). */
typedef enum row_shape { ROWS_FULL, ROWS_UPPER, ROWS_LOWER } row_shape;

KVANT_INLINE void NAME(add_multiples)(double *restrict to, const double *restrict factors,
                                      const double *restrict x, size_t stride, size_t n_x,
                                      size_t first, size_t end, row_shape shape)
{
    size_t k = 0;
    for (; k + 4 <= n_x; k += 4) {
        const double *restrict x0 = x + k * stride, *restrict x1 = x0 + stride,
                               *restrict x2 = x1 + stride, *restrict x3 = x2 + stride;
        const double f0 = factors[k], f1 = factors[k + 1], f2 = factors[k + 2], f3 = factors[k + 3];
        const size_t from = shape == ROWS_UPPER && k > first ? k : first,
                     last = shape == ROWS_LOWER && k + 4 < end ? k + 4 : end;
        for (size_t j = from; j < last; j++)
            to[j] = (((to[j] + f0 * x0[j]) + f1 * x1[j]) + f2 * x2[j]) + f3 * x3[j];
    }
    for (; k < n_x; k++)
        for (size_t j = shape == ROWS_UPPER && k > first ? k : first; j < end; j++)
            to[j] += factors[k] * x[k * stride + j];
}

/* Row i of the inverse is row i of the identity, less multiples of the rows before it; the factors
 * are row i of l. */
KVANT_LOOP KVANT_LOWER_INVERSE_FN(NAME(lower_inverse))
{
    for (size_t i = 0; i < n; i++) {
        double *row = l + i * n;
        const double inverse = 1 / row[i];
        for (size_t k = 0; k < i; k++) {
            column[k] = -row[k] * inverse;
            row[k] = 0;
        }
        NAME(add_multiples)(row, column, l, n, i, 0, i, ROWS_LOWER);
        row[i] = inverse;
    }
}

/* Replaces the upper triangle of a by R with a = R^T R; false when a pivot is not above 0. column:
 * n numbers of room. */
static bool NAME(factor)(size_t n, double *a, double *column)
{
    for (size_t i = 0; i < n; i++) {
        double *row = a + i * n;
        for (size_t k = 0; k < i; k++)
            column[k] = -a[k * n + i];
        NAME(add_multiples)(row, column, a, n, i, i, n, ROWS_FULL);
        if (!(row[i] > 0))
            return false;
        const double inverse = 1 / sqrt(row[i]);
        for (size_t j = i; j < n; j++)
            row[j] *= inverse;
    }
    return true;
}

/* Copies the lower triangle to the upper triangle. */
static void NAME(mirror)(size_t n, double *m)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            m[i * n + j] = m[j * n + i];
}

/* Replaces a by U, upper with zeros below, with a = U U^T. This is the factor of the matrix with
 * reversed rows and columns. */
static bool NAME(factor_from_end)(size_t n, double *a, double *room, double *column)
{
    for (size_t i = 0; i < n * n; i++)
        room[i] = a[n * n - 1 - i];
    if (!NAME(factor)(n, room, column))
        return false;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++)
            a[i * n + j] = j < i ? 0 : room[(n - 1 - j) * n + n - 1 - i];
    return true;
}

/* out = U^T b U of a symmetric b. */
static void NAME(sandwich)(size_t n, const double *u, const double *b, double *out, double *row,
                           double *column)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k <= i; k++)
            column[k] = u[k * n + i];
        memset(row, 0, n * sizeof *row);
        NAME(add_multiples)(row, column, b, n, i + 1, 0, n, ROWS_FULL);
        memset(out + i * n, 0, n * sizeof *out);
        NAME(add_multiples)(out + i * n, row, u, n, n, i, n, ROWS_UPPER);
    }
    NAME(mirror)(n, out);
}

/* Makes v, a column, the vector of the reflection 1 - beta v v^T that zeroes all numbers of the
 * column but the first. Returns the first number. */
static double NAME(reflect)(double *v, size_t n, double *beta)
{
    const double rest = kvant_dot_lanes(v + 1, v + 1, n - 1), first = v[0],
                 length = sqrt(first * first + rest);
    *beta = 0;
    if (rest == 0)
        return first;
    const double kept = first > 0 ? -length : length;
    v[0] = first - kept;
    *beta = 2 / (v[0] * v[0] + rest);
    return kept;
}

/* a -= v w^T + w v^T, and sum = next times the new a, in rows from `row` on and columns from
 * `first` on. */
static void NAME(update)(size_t n, double *a, size_t row, size_t first, const double *restrict v,
                         const double *restrict w, const double *restrict next,
                         double *restrict sum)
{
    memset(sum + first, 0, (n - first) * sizeof *sum);
    for (; row + 4 <= n; row += 4) {
        double *restrict r0 = a + row * n, *restrict r1 = r0 + n, *restrict r2 = r1 + n,
                         *restrict r3 = r2 + n;
        const double v0 = v[row], v1 = v[row + 1], v2 = v[row + 2], v3 = v[row + 3], w0 = w[row],
                     w1 = w[row + 1], w2 = w[row + 2], w3 = w[row + 3], n0 = next[row],
                     n1 = next[row + 1], n2 = next[row + 2], n3 = next[row + 3];
        for (size_t j = first; j < n; j++) {
            r0[j] -= v0 * w[j] + w0 * v[j];
            r1[j] -= v1 * w[j] + w1 * v[j];
            r2[j] -= v2 * w[j] + w2 * v[j];
            r3[j] -= v3 * w[j] + w3 * v[j];
            sum[j] = (((sum[j] + n0 * r0[j]) + n1 * r1[j]) + n2 * r2[j]) + n3 * r3[j];
        }
    }
    for (; row < n; row++)
        for (size_t j = first; j < n; j++) {
            a[row * n + j] -= v[row] * w[j] + w[row] * v[j];
            sum[j] += next[row] * a[row * n + j];
        }
}

/* Completes w, on entry a matrix times v, so that the reflection of both sides of the matrix is the
 * matrix less v w^T + w v^T. */
static void NAME(weigh)(size_t n, const double *v, double beta, double *w)
{
    for (size_t i = 0; i < n; i++)
        w[i] *= beta;
    kvant_add_multiple(w, -beta / 2 * kvant_dot_lanes(w, v, n), v, n);
}

/* Makes the matrix tridiagonal. Returns its diagonal, and the numbers next to the diagonal in
 * off_diagonal. The vector of reflection k stays in row k, behind zeros. A pass over the rows
 * applies one reflection and, at once, multiplies them by the next vector. Columns left of the
 * current one, up to the vectors' alignment, become arbitrary. */
static void NAME(tridiagonalise)(size_t n, double *a, double *diagonal, double *off_diagonal,
                                 double *betas, const double *zeros, double *sums)
{
    const double *v = zeros, *w = zeros;
    for (size_t k = 0; k < n; k++) {
        double *row = a + k * n, *sum = sums + k % 2 * n;
        for (size_t j = k; j < n; j++)
            row[j] -= v[k] * w[j] + w[k] * v[j];
        diagonal[k] = row[k];
        memset(row, 0, (k + 1) * sizeof *row);
        if (k + 1 == n)
            return;
        off_diagonal[k] = NAME(reflect)(row + k + 1, n - k - 1, &betas[k]);
        NAME(update)(n, a, k + 1, (k + 1) / 8 * 8, v, w, row, sum);
        NAME(weigh)(n - k - 1, row + k + 1, betas[k], sum + k + 1);
        v = row;
        w = sum;
    }
}

/* Replaces m by Q m Q^T, where Q is the product of the reflections in a's rows, the last one first.
 * Rows from k on are complete; the numbers above them are taken from their columns, as m is
 * symmetric. */
static void NAME(reflect_back)(size_t n, const double *a, const double *betas, double *m,
                               const double *zeros, double *sums)
{
    const double *v = zeros, *w = zeros;
    for (size_t k = n; k-- > 0;) {
        const double *next = k ? a + (k - 1) * n : zeros;
        double *sum = sums + k % 2 * n, *row = m + k * n;
        NAME(update)(n, m, k + 1, 0, v, w, next, sum);
        for (size_t j = k + 1; j < n; j++)
            row[j] = m[j * n + k];
        kvant_add_multiple(sum, next[k], row, n);
        NAME(weigh)(n, next, k ? betas[k - 1] : 0, sum);
        v = next;
        w = sum;
    }
}

/* The square root of a positive x is the constant 2 ln 2 / pi times the sum of 2^j x / (x + 4^j)
 * over all whole j. Its relative error is 2.7e-6. The sum stands for the integral over t of 2 / pi
 * x / (x + t^2), with t = 2^j. The code takes ROOT_NODES - 2 of its terms, from 2^-46 of a bound of
 * x on. Two more nodes replace the terms at either end and agree with them in first and second
 * order. */
#define ROOT_NODES KVANT_MEAN_NODES
#define ROOT_LOWEST (-26) /* 4^-26 times the bound */
#define ROOT_FACTOR 0.44127120030605137

typedef struct NAME(nodes) {
    double shift[ROOT_NODES], weight[ROOT_NODES],
        sum; /* sum of weights of 1 - shift / (x + shift); weight is already multiplied by shift */
} NAME(nodes);

static void NAME(make_nodes)(double bound, NAME(nodes) * nodes)
{
    int exponent;
    frexp(bound, &exponent);
    exponent =
        (exponent + (exponent > 0)) / 2 + ROOT_LOWEST; /* bound <= 4^(exponent - ROOT_LOWEST) */
    nodes->sum = 0;
    for (int k = 0; k < ROOT_NODES; k++) {
        const bool low = k == 0, high = k == ROOT_NODES - 1;
        const int j = exponent + k - !low - high;
        const double weight = ROOT_FACTOR * ldexp(high ? 7 : 1, j);
        nodes->shift[k] = ldexp(high ? 7 : 1, 2 * j) / (low ? 7 : 1);
        nodes->weight[k] = weight * nodes->shift[k];
        nodes->sum += weight;
    }
}

/* The largest sum of magnitudes of a row, which bounds the eigenvalues. */
static double NAME(bound_of)(size_t n, const double *diagonal, const double *off_diagonal)
{
    double bound = 0;
    for (size_t i = 0; i < n; i++) {
        const double sum = fabs(diagonal[i]) + (i ? fabs(off_diagonal[i - 1]) : 0) +
                           (i + 1 < n ? fabs(off_diagonal[i]) : 0);
        bound = sum > bound ? sum : bound;
    }
    return bound;
}

/* Computes pivots and ratios of T + shift = L D L^T for every node; false when a pivot is not above
 * 0. */
static bool NAME(factor_shifted)(size_t n, const double *diagonal, const double *off_diagonal,
                                 const double *shift, double *pivots, double *ratios)
{
    bool positive = true;
    for (size_t i = 0; i < n; i++) {
        double *pivot = pivots + i * ROOT_NODES, *ratio = ratios + i * ROOT_NODES;
        const double before = i ? off_diagonal[i - 1] : 0, after = i + 1 < n ? off_diagonal[i] : 0;
        for (size_t k = 0; k < ROOT_NODES; k++) {
            pivot[k] = diagonal[i] + shift[k] - (i ? before * ratio[k - ROOT_NODES] : 0);
            ratio[k] = after / pivot[k];
        }
        for (size_t k = 0; k < ROOT_NODES; k++)
            positive = positive && pivot[k] > 0;
    }
    return positive;
}

/* root = T^(1/2) of the tridiagonal T. Row i of the inverse of T + shift is row i + 1 times a
 * number, except on the diagonal. room: 3 n ROOT_NODES numbers. */
static bool NAME(root)(size_t n, const double *diagonal, const double *off_diagonal, double *root,
                       double *room)
{
    NAME(nodes) nodes;
    double *pivots = room, *ratios = pivots + n * ROOT_NODES, *rows = ratios + n * ROOT_NODES;
    NAME(make_nodes)(NAME(bound_of)(n, diagonal, off_diagonal), &nodes);
    if (!NAME(factor_shifted)(n, diagonal, off_diagonal, nodes.shift, pivots, ratios))
        return false;
    memset(root, 0, n * n * sizeof *root);
    for (size_t i = n; i-- > 0;) {
        double *restrict to = root + i * n;
        for (size_t k = 0; k < ROOT_NODES; k += 4) {
            const double *ratio = ratios + i * ROOT_NODES + k;
            double *restrict x0 = rows + k * n, *restrict x1 = x0 + n, *restrict x2 = x1 + n,
                             *restrict x3 = x2 + n;
            const double f0 = ratio[0], f1 = ratio[1], f2 = ratio[2], f3 = ratio[3];
            for (size_t j = i + 1; j < n; j++) {
                x0[j] *= -f0, x1[j] *= -f1, x2[j] *= -f2, x3[j] *= -f3;
                to[j] = (((to[j] - x0[j]) - x1[j]) - x2[j]) - x3[j];
            }
        }
        to[i] = nodes.sum;
        for (size_t k = 0; k < ROOT_NODES; k++) {
            const double ratio = ratios[i * ROOT_NODES + k];
            double *x = rows + k * n + i;
            x[0] = nodes.weight[k] / pivots[i * ROOT_NODES + k] - (i + 1 < n ? ratio * x[1] : 0);
            to[i] -= x[0];
        }
    }
    NAME(mirror)(n, root);
    return true;
}

/* Solves W U = R for upper triangles; W replaces R. */
static void NAME(divide)(size_t n, double *r, const double *u)
{
    for (size_t k = 0; k < n; k++) {
        const double inverse = 1 / u[k * n + k];
        for (size_t i = 0; i <= k; i++) {
            const double factor = r[i * n + k] *= inverse;
            kvant_add_multiple(r + i * n + k + 1, -factor, u + k * n + k + 1, n - k - 1);
        }
    }
}

/* Replaces b by (U^T b U)^(1/2), where a = U U^T. */
static bool NAME(inner_root)(size_t n, double *a, double *b, double *room)
{
    double *inner = room, *sums = inner + n * n, *diagonal = sums + 2 * n,
           *off_diagonal = diagonal + n, *betas = off_diagonal + n, *zeros = betas + n,
           *work = zeros + n;
    memset(zeros, 0, n * sizeof *zeros);
    memset(sums, 0, 2 * n * sizeof *sums);
    if (!NAME(factor_from_end)(n, a, work, sums))
        return false;
    NAME(sandwich)(n, a, b, inner, sums, diagonal);
    NAME(tridiagonalise)(n, inner, diagonal, off_diagonal, betas, zeros, sums);
    if (!NAME(root)(n, diagonal, off_diagonal, b, work))
        return false;
    NAME(reflect_back)(n, inner, betas, b, zeros, sums);
    return true;
}

/* The mean is a^-1 # b = U^-T (U^T b U)^(1/2) U^-1. The trace of a times the mean is the trace of
 * the root. */
KVANT_LOOP KVANT_MEAN_FACTOR_FN(NAME(mean_factor))
{
    double trace = 0;
    if (!NAME(inner_root)(n, a, b, room))
        return 0;
    for (size_t i = 0; i < n; i++)
        trace += b[i * n + i];
    if (!NAME(factor)(n, b, room))
        return 0;
    NAME(divide)(n, b, a);
    return trace;
}
