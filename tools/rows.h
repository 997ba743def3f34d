/* rows.h - numbers for speed measurements: normally distributed, the same on every machine. */
#ifndef KVANT_TOOLS_ROWS_H
#define KVANT_TOOLS_ROWS_H

#include <stddef.h>
#include <stdint.h>

void rows_fill(float *rows, size_t n, uint32_t seed);

#endif
