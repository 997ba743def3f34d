/* hadamard.c - see hadamard.h. Every output is a tree of additions that no compiler may reorder (the file is built
 * without contraction or reassociation), so any vectorisation gives the same bits. */
#include "hadamard.h"

#include <math.h>

static void butterflies(float *x, uint32_t n, uint32_t distance)
{
    for (uint32_t i = 0; i < n; i += 2 * distance)
        for (uint32_t j = i; j < i + distance; j++) {
            float a = x[j], b = x[j + distance];
            x[j] = a + b;
            x[j + distance] = a - b;
        }
}

void kvant_hadamard(float *x, uint32_t n, uint32_t block)
{
    for (uint32_t distance = 1; distance < block; distance *= 2)
        butterflies(x, n, distance);
    float scale = (float)(1.0 / sqrt((double)block));
    for (uint32_t i = 0; i < n; i++)
        x[i] *= scale;
}
