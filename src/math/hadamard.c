/* hadamard.c - see hadamard.h. Every output is a tree of additions. The file is compiled without
 * contraction and reassociation, so no vectorisation changes a bit. */
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

/* Distances 1, 2 and 4 on 8 neighbouring numbers, written out: as loops of one, two and four steps
 * they would take most of the time. The operations and their operands are the same. */
static void butterflies_of_8(float *x)
{
    float a0 = x[0] + x[1], a1 = x[0] - x[1], a2 = x[2] + x[3], a3 = x[2] - x[3];
    float a4 = x[4] + x[5], a5 = x[4] - x[5], a6 = x[6] + x[7], a7 = x[6] - x[7];
    float b0 = a0 + a2, b1 = a1 + a3, b2 = a0 - a2, b3 = a1 - a3;
    float b4 = a4 + a6, b5 = a5 + a7, b6 = a4 - a6, b7 = a5 - a7;
    x[0] = b0 + b4, x[1] = b1 + b5, x[2] = b2 + b6, x[3] = b3 + b7;
    x[4] = b0 - b4, x[5] = b1 - b5, x[6] = b2 - b6, x[7] = b3 - b7;
}

void kvant_hadamard(float *x, uint32_t n, uint32_t block)
{
    for (uint32_t i = 0; block >= 8 && i < n; i += 8)
        butterflies_of_8(x + i);
    for (uint32_t distance = block >= 8 ? 8 : 1; distance < block; distance *= 2)
        butterflies(x, n, distance);
    float scale = (float)(1.0 / sqrt((double)block));
    for (uint32_t i = 0; i < n; i++)
        x[i] *= scale;
}
