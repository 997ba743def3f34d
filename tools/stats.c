/* stats.c - mean, standard error, percentiles. */
#include "stats.h"

#include <math.h>
#include <stdlib.h>

void stats_mean(const double *x, size_t n, double *mean, double *error)
{
    *mean = *error = NAN;
    if (n == 0)
        return;
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i];
    *mean = sum / (double)n;
    if (n < 2)
        return;
    double squares = 0;
    for (size_t i = 0; i < n; i++)
        squares += (x[i] - *mean) * (x[i] - *mean);
    *error = sqrt(squares / (double)n / (double)(n - 1));
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double stats_percentile(double *x, size_t n, double p)
{
    if (n == 0)
        return NAN;
    qsort(x, n, sizeof *x, ascending);
    const double position = p * (double)(n - 1);
    const size_t below = (size_t)position;
    const size_t above = below + 1 < n ? below + 1 : below;
    const double part = position - (double)below;
    return (1 - part) * x[below] + part * x[above];
}
