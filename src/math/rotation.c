/* rotation.c - see rotation.h.
 *
 * A sum of 16 uniform numbers approximates a normal number, because log and cos of the C library
 * differ between machines. After orthonormalisation the difference from a Haar matrix is far below
 * the quantisation error, because averaging over d terms shrinks the excess kurtosis of the
 * marginals (-0.075). */
#include "rotation.h"

#include <math.h>

#include "../base/alloc.h"
#include "../base/random.h"
#include "sums.h"

static double nearly_normal(uint64_t *state)
{
    uint32_t sum = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t word = kvant_splitmix64(state);
        sum += (uint32_t)(word & 0xffff) + (uint32_t)(word >> 16 & 0xffff) +
               (uint32_t)(word >> 32 & 0xffff) + (uint32_t)(word >> 48);
    }
    return (double)sum - 16 * 32767.5;
}

void kvant_random_normals(size_t n, double sigma, uint64_t seed, float *matrix)
{
    /* The variance of a uniform 16-bit integer is (2^32 - 1) / 12. */
    double scale = sigma / (4 * sqrt(4294967295.0 / 12));
    for (size_t i = 0; i < n; i++)
        matrix[i] = (float)(nearly_normal(&seed) * scale);
}

/* Subtracts from row i its projections on the rows before it. It does so twice, because
 * cancellation leaves errors after one pass. */
static void orthogonalise(double *rows, uint32_t i, uint32_t d)
{
    double *row = rows + (size_t)i * d;
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t k = 0; k < i; k++) {
            const double *other = rows + (size_t)k * d;
            double part = kvant_dot_exact(row, other, d);
            for (uint32_t j = 0; j < d; j++)
                row[j] -= part * other[j];
        }
    double norm = sqrt(kvant_dot_exact(row, row, d));
    for (uint32_t j = 0; j < d; j++)
        row[j] /= norm;
}

kvant_status kvant_random_rotation(uint32_t d, uint64_t seed, float *matrix)
{
    double *rows = kvant_alloc((size_t)d * d, sizeof(double));
    if (!rows)
        return KVANT_ERR_MEMORY;
    for (size_t i = 0; i < (size_t)d * d; i++)
        rows[i] = nearly_normal(&seed);
    for (uint32_t i = 0; i < d; i++)
        orthogonalise(rows, i, d);
    for (size_t i = 0; i < (size_t)d * d; i++)
        matrix[i] = (float)rows[i];
    kvant_free(rows);
    return KVANT_OK;
}
