/* spd.c - see spd.h. */
#include "spd.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "sums.h"
#include "tridiagonal.h"

double kvant_trace(uint32_t n, const double *m)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += m[i * n + i];
    return sum;
}

bool kvant_spd_regularise(uint32_t n, double *m, double floor)
{
    size_t d = n;
    double sum = kvant_trace(n, m), factor = (double)d / sum;
    bool positive = sum > 0 && factor < INFINITY;
    for (size_t i = 0; positive && i < d * d; i++)
        m[i] *= factor;
    for (size_t i = 0; positive && i < d; i++) {
        m[i * d + i] += floor;
        positive = m[i * d + i] > 0;
    }
    return positive;
}

double kvant_frobenius(uint32_t n, const double *m)
{
    double sum = 0;
    for (size_t i = 0; i < (size_t)n * n; i++)
        sum += m[i] * m[i];
    return sqrt(sum);
}

/* Replaces the lower triangle of m by L, with m = L L^T. Returns false when a pivot is not above
 * 0. */
static bool factorise(size_t n, double *m)
{
    for (size_t j = 0; j < n; j++) {
        double *row = m + j * n;
        for (size_t i = 0; i <= j; i++) {
            const double sum = row[i] - kvant_dot_lanes(row, m + i * n, i);
            if (i == j && !(sum > 0))
                return false;
            row[i] = i == j ? sqrt(sum) : sum / m[i * n + i];
        }
    }
    return true;
}

/* Copies the lower triangle to the upper triangle. */
static void mirror(size_t n, double *m)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            m[j * n + i] = m[i * n + j];
}

/* Inverts L by forward substitution: row i of the inverse is row i of the identity minus multiples
 * of the rows before it. */
static void invert(size_t n, double *l)
{
    for (size_t i = 0; i < n; i++) {
        double *row = l + i * n;
        const double inverse = 1 / row[i];
        for (size_t k = 0; k < i; k++) {
            const double factor = -row[k] * inverse;
            row[k] = 0;
            kvant_add_multiple(row, factor, l + k * n, k + 1);
        }
        row[i] = inverse;
    }
}

kvant_status kvant_spd_inverse(uint32_t n, const double *m, double *inverse)
{
    size_t d = n;
    double *l = kvant_alloc(d * d, sizeof *l);
    KVANT_RETURN_IF(!l, KVANT_ERR_MEMORY);
    memcpy(l, m, d * d * sizeof *l);
    bool ok = factorise(d, l);
    if (ok)
        invert(d, l);
    memset(inverse, 0, d * d * sizeof *inverse);
    for (size_t k = 0; ok && k < d; k++) /* inverse = L^-T L^-1 */
        for (size_t i = 0; i <= k; i++)
            kvant_add_multiple(inverse + i * d, l[k * d + i], l + k * d, i + 1);
    mirror(d, inverse);
    kvant_free(l);
    return ok ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

/* out = sum over i of factors[i] v_i v_i^T, where v_i is row i of `vectors`. */
static void compose(size_t n, const double *vectors, const double *factors, double *out)
{
    memset(out, 0, n * n * sizeof *out);
    for (size_t k = 0; k < n; k++)
        for (size_t i = 0; i < n; i++) {
            double factor = factors[k] * vectors[k * n + i];
            for (size_t j = 0; j <= i; j++)
                out[i * n + j] += factor * vectors[k * n + j];
        }
    mirror(n, out);
}

kvant_status kvant_spd_roots(uint32_t n, const double *m, double *root, double *inverse_root)
{
    size_t d = n;
    double *vectors = kvant_alloc((2 * d + 1) * d, sizeof *vectors), *copy = vectors + d * d,
           *values = copy + d * d;
    KVANT_RETURN_IF(!vectors, KVANT_ERR_MEMORY);
    memcpy(copy, m, d * d * sizeof *copy);
    kvant_status status = kvant_tridiagonal_eigen(n, copy, values, vectors);
    for (size_t i = 0; status == KVANT_OK && i < d; i++) {
        status = values[i] > 0 ? KVANT_OK : KVANT_ERR_ARGUMENT;
        values[i] = sqrt(values[i]);
    }
    if (status == KVANT_OK)
        compose(d, vectors, values, root);
    for (size_t i = 0; status == KVANT_OK && i < d; i++)
        values[i] = 1 / values[i];
    if (status == KVANT_OK && inverse_root)
        compose(d, vectors, values, inverse_root);
    kvant_free(vectors);
    return status;
}

static void multiply(size_t n, const double *a, const double *b, double *out)
{
    memset(out, 0, n * n * sizeof *out);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++)
            for (size_t j = 0; j < n; j++)
                out[i * n + j] += a[i * n + k] * b[k * n + j];
}

void kvant_spd_sandwich(uint32_t n, const double *s, const double *m, double *scratch, double *out)
{
    multiply(n, s, m, scratch);
    multiply(n, scratch, s, out);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            out[i * n + j] = out[j * n + i] = (out[i * n + j] + out[j * n + i]) / 2;
}

kvant_status kvant_spd_unit_lower(uint32_t n, const double *m, double *lower, double *pivots)
{
    size_t d = n;
    double *l = kvant_alloc(d * d, sizeof *l);
    KVANT_RETURN_IF(!l, KVANT_ERR_MEMORY);
    /* In reverse order, so that the factorisation gives lower^T D lower. */
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            l[i * d + j] = m[(d - 1 - i) * d + d - 1 - j];
    bool ok = factorise(d, l);
    for (size_t i = 0; ok && i < d; i++) {
        double pivot = l[(d - 1 - i) * d + d - 1 - i];
        pivots[i] = pivot * pivot;
        for (size_t j = 0; j < d; j++)
            lower[i * d + j] = j > i ? 0 : l[(d - 1 - j) * d + d - 1 - i] / pivot;
    }
    kvant_free(l);
    return ok ? KVANT_OK : KVANT_ERR_ARGUMENT;
}
