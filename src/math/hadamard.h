/* hadamard.h - the fast Walsh-Hadamard transform on blocks: Sylvester order, orthonormal
 * (format.md). */
#ifndef KVANT_MATH_HADAMARD_H
#define KVANT_MATH_HADAMARD_H

#include <stdint.h>

/* In place on n floats, block by block. block is a power of two that divides n. The transform is
 * its own inverse. The order of operations is part of the format: butterflies at distance 1, 2,
 * 4, ..., then one product per number. */
void kvant_hadamard(float *x, uint32_t n, uint32_t block);

#endif
