/* stats.h - the statistics of results. */
#pragma once

#include <stddef.h>

/* Mean and its standard error, sqrt((E[x^2] - E[x]^2) / (n - 1)); the error is NaN below two
 * values, both are without any. */
void stats_mean(const double *x, size_t n, double *mean, double *error);

/* Linear interpolation between order statistics at p (n - 1), as llama-perplexity does. Sorts x. */
double stats_percentile(double *x, size_t n, double p);
