/* triangle_loops.h - solves a system with a lower triangle, converting one row at a time to floats.
 *
 * Plain C: loops_c.c and the file of each CPU level include it. Every number is a sum in an order
 * that no vector's width changes, so without contraction all levels agree. The including file
 * defines NAME. */
#include "../base/attributes.h"
#include "kernels.h"

KVANT_LOOP KVANT_TRIANGLE_FN(NAME(solve_upper))
{
    float row[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = n; i-- > 0;) {
        NAME(triangle_row)(triangle, n, i, row);
        const float inverse = 1 / row[i];
        for (uint32_t r = 0; r < n_x; r++) {
            float *restrict of = x + (size_t)r * n;
            const float factor = of[i] *= inverse;
            for (uint32_t j = 0; j < i; j++)
                of[j] -= factor * row[j];
        }
    }
}
