/* rows.c - sums of 12 uniform numbers: near enough to normal for a speed, and without a generator of our own to explain. */
#include "rows.h"

void rows_fill(float *rows, size_t n, uint32_t seed)
{
    uint32_t state = seed;
    for (size_t i = 0; i < n; i++) {
        float sum = -6;
        for (int j = 0; j < 12; j++)
            sum += (float)((state = state * 1664525u + 1013904223u) >> 8) / 16777216.0f;
        rows[i] = sum;
    }
}
