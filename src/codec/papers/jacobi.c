/* jacobi.c - see jacobi.h. Only + - * / and square root are used. */
#include "jacobi.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "../../base/alloc.h"

/* Jacobi converges quadratically: 6 to 10 sweeps in practice. */
#define MAX_SWEEPS 40

/* Off-diagonal entries below this share of the matrix's norm are rounding errors of earlier
 * rotations. */
#define NEGLIGIBLE 1e-15

typedef struct work {
    size_t n;
    double *a;       /* n x n */
    double *v;       /* n x n, eigenvectors as rows */
    uint32_t *order; /* the order of the rows by eigenvalue */
} work;

static void rotate_rows(double *p, double *q, size_t n, double c, double s)
{
    for (size_t k = 0; k < n; k++) {
        double x = p[k], y = q[k];
        p[k] = c * x - s * y;
        q[k] = s * x + c * y;
    }
}

/* Makes a[p][q] zero. Rows are rotated as a whole, columns are their mirror image. */
static void rotate(work *w, size_t p, size_t q)
{
    size_t n = w->n;
    double *row_p = w->a + p * n, *row_q = w->a + q * n;
    double pp = row_p[p], qq = row_q[q], pq = row_p[q];
    double theta = (qq - pp) / (2 * pq);
    double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
    double c = 1 / sqrt(t * t + 1), s = t * c;
    rotate_rows(row_p, row_q, n, c, s);
    row_p[p] = pp - t * pq;
    row_q[q] = qq + t * pq;
    row_p[q] = row_q[p] = 0;
    for (size_t k = 0; k < n; k++) {
        w->a[k * n + p] = row_p[k];
        w->a[k * n + q] = row_q[k];
    }
    rotate_rows(w->v + p * n, w->v + q * n, n, c, s);
}

/* Whether any entry had to be rotated away. */
static bool sweep(work *w, double negligible)
{
    bool rotated = false;
    for (size_t p = 0; p + 1 < w->n; p++)
        for (size_t q = p + 1; q < w->n; q++)
            if (fabs(w->a[p * w->n + q]) > negligible) {
                rotate(w, p, q);
                rotated = true;
            }
    return rotated;
}

static double norm(const work *w)
{
    double sum = 0;
    for (size_t i = 0; i < w->n * w->n; i++)
        sum += w->a[i] * w->a[i];
    return sqrt(sum);
}

static void load(work *w, const double *matrix)
{
    for (size_t i = 0; i < w->n; i++) {
        for (size_t j = 0; j <= i; j++)
            w->a[i * w->n + j] = w->a[j * w->n + i] = matrix[i * w->n + j];
        w->v[i * w->n + i] = 1;
        w->order[i] = (uint32_t)i;
    }
}

/* Insertion, so that equal eigenvalues keep their order. */
static void sort(work *w)
{
    for (size_t i = 1; i < w->n; i++) {
        uint32_t row = w->order[i];
        double value = w->a[row * w->n + row];
        size_t at = i;
        for (; at > 0 && w->a[w->order[at - 1] * w->n + w->order[at - 1]] < value; at--)
            w->order[at] = w->order[at - 1];
        w->order[at] = row;
    }
}

static void store(const work *w, float *vectors)
{
    for (size_t i = 0; i < w->n; i++) {
        const double *v = w->v + w->order[i] * w->n;
        size_t largest = 0;
        for (size_t j = 1; j < w->n; j++)
            largest = fabs(v[j]) > fabs(v[largest]) ? j : largest;
        for (size_t j = 0; j < w->n; j++)
            vectors[i * w->n + j] = (float)(v[largest] < 0 ? -v[j] : v[j]);
    }
}

kvant_status kvant_eigenvectors(uint32_t n, const double *matrix, float *vectors)
{
    size_t size = (size_t)n * n;
    work w = { n, kvant_alloc(size, sizeof(double)), kvant_alloc(size, sizeof(double)),
               kvant_alloc(n, sizeof(uint32_t)) };
    kvant_status status = w.a && w.v && w.order ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        load(&w, matrix);
        double negligible = NEGLIGIBLE / n * norm(&w);
        for (uint32_t i = 0; i < MAX_SWEEPS && sweep(&w, negligible); i++)
            continue;
        sort(&w);
        store(&w, vectors);
    }
    kvant_free(w.a);
    kvant_free(w.v);
    kvant_free(w.order);
    return status;
}
