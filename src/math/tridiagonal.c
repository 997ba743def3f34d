/* tridiagonal.c - see tridiagonal.h.
 *
 * Householder reflections make the matrix tridiagonal. QR steps with Wilkinson's shift then chase a
 * bulge down the diagonal (Golub and Van Loan, Matrix Computations, 8.3). Eigenvectors are rows, so
 * every rotation runs over memory in order. */
#include "tridiagonal.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "sums.h"

/* QR steps per eigenvalue; two or three are usual. */
#define MAX_STEPS 60

/* Makes a column v the vector of a reflection 1 - beta v v^T. The reflection maps the column to a
 * multiple of the first unit vector. Returns this multiple. */
static double reflect(double *v, size_t n, double *beta)
{
    double rest = kvant_dot_lanes(v + 1, v + 1, n - 1), first = v[0],
           length = sqrt(first * first + rest);
    *beta = 0;
    if (rest == 0)
        return first;
    double kept = first > 0 ? -length : length;
    v[0] = first - kept;
    *beta = 2 / (v[0] * v[0] + rest);
    return kept;
}

/* a = (1 - beta v v^T) a (1 - beta v v^T) for the last n rows and columns of a matrix. Its rows are
 * `stride` numbers apart. w has room for n numbers. */
static void reflect_both(double *a, size_t stride, size_t n, const double *v, double beta,
                         double *w)
{
    for (size_t i = 0; i < n; i++)
        w[i] = beta * kvant_dot_lanes(a + i * stride, v, n);
    kvant_add_multiple(w, -beta / 2 * kvant_dot_lanes(w, v, n), v, n);
    for (size_t i = 0; i < n; i++) {
        kvant_add_multiple(a + i * stride, -v[i], w, n);
        kvant_add_multiple(a + i * stride, -w[i], v, n);
    }
}

/* Computes the diagonal and the numbers next to it. The rows of q become the rows of
 * the product of all reflections. The vector of reflection k is kept in row k of a, right of the
 * diagonal. */
static void tridiagonalise(size_t n, double *a, double *diagonal, double *beside, double *q,
                           double *w)
{
    double *beta = w + n;
    for (size_t k = 0; k + 1 < n; k++) {
        double *v = a + k * n + k + 1;
        diagonal[k] = a[k * n + k];
        beside[k] = reflect(v, n - k - 1, &beta[k]);
        reflect_both(a + (k + 1) * n + k + 1, n, n - k - 1, v, beta[k], w);
    }
    diagonal[n - 1] = a[n * n - 1];
    memset(q, 0, n * n * sizeof *q);
    for (size_t i = 0; i < n; i++)
        q[i * n + i] = 1;
    for (size_t k = n - 1; k-- > 0;)
        for (size_t i = k + 1; i < n; i++) {
            const double *v = a + k * n + k + 1;
            double *row = q + i * n + k + 1;
            kvant_add_multiple(row, -beta[k] * kvant_dot_lanes(row, v, n - k - 1), v, n - k - 1);
        }
}

static void rotate_rows(double *p, double *q, size_t n, double c, double s)
{
    for (size_t k = 0; k < n; k++) {
        double x = p[k], y = q[k];
        p[k] = c * x + s * y;
        q[k] = c * y - s * x;
    }
}

/* The eigenvalue of the last 2 x 2 block that is closer to the block's last number. */
static double wilkinson_shift(double a, double b, double c)
{
    double half = (a - c) / 2, root = sqrt(half * half + b * b);
    return root > 0 ? c - b * (b / (half < 0 ? half - root : half + root)) : c;
}

/* A QR step on rows first to last. Their off-diagonal numbers are not 0. */
static void step(size_t first, size_t last, double *d, double *e, double *vectors, size_t n)
{
    double x = d[first] - wilkinson_shift(d[last - 1], e[last - 1], d[last]), z = e[first];
    for (size_t k = first; k < last; k++) {
        double r = sqrt(x * x + z * z), c = r > 0 ? x / r : 1, s = r > 0 ? z / r : 0;
        double a = d[k], b = e[k], next = d[k + 1];
        if (k > first)
            e[k - 1] = r;
        d[k] = c * c * a + 2 * c * s * b + s * s * next;
        d[k + 1] = s * s * a - 2 * c * s * b + c * c * next;
        x = e[k] = (c * c - s * s) * b + c * s * (next - a);
        if (k + 1 < last) {
            z = s * e[k + 1];
            e[k + 1] *= c;
        }
        rotate_rows(vectors + k * n, vectors + (k + 1) * n, n, c, s);
    }
}

static bool negligible(const double *d, const double *e, size_t k)
{
    return fabs(e[k]) <= 0x1p-53 * (fabs(d[k]) + fabs(d[k + 1]));
}

static bool diagonalise(size_t n, double *d, double *e, double *vectors)
{
    size_t last = n - 1, steps = 0;
    while (last > 0) {
        if (negligible(d, e, last - 1)) {
            last--;
            steps = 0;
            continue;
        }
        size_t first = last - 1;
        while (first > 0 && !negligible(d, e, first - 1))
            first--;
        if (steps++ == MAX_STEPS)
            return false;
        step(first, last, d, e, vectors, n);
    }
    return true;
}

kvant_status kvant_tridiagonal_eigen(uint32_t n, double *matrix, double *values, double *vectors)
{
    double *room = kvant_alloc((size_t)3 * n, sizeof *room);
    KVANT_RETURN_IF(!room, KVANT_ERR_MEMORY);
    tridiagonalise(n, matrix, values, room, vectors, room + n);
    bool converged = diagonalise(n, values, room, vectors);
    kvant_free(room);
    return converged ? KVANT_OK : KVANT_ERR_ARGUMENT;
}
