/* jacobi.h - eigenvectors of a symmetric matrix by cyclic Jacobi rotations in binary64, with equal
 * bits on every machine. The order of operations is part of the format (format.md, "Query basis"),
 * so math/tridiagonal.h cannot be used here. `math/tridiagonal.h` is about ten times as fast at 256
 * x 256, so the vector index does not use jacobi.h. */
#pragma once

#include <stdint.h>

#include <kvant/kvant.h>

/* Fills vectors (n x n, row-major) with orthonormal eigenvectors as rows, by descending eigenvalue.
 * The largest component of each (the first of equals) is positive. matrix: n x n, finite; only its
 * lower triangle is read. KVANT_ERR_MEMORY. */
kvant_status kvant_eigenvectors(uint32_t n, const double *matrix, float *vectors);
