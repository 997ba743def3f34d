/* jacobi.h - eigenvectors of a symmetric matrix by cyclic Jacobi rotations in binary64, with equal
 * bits on every machine: format.md, "Query basis", fixes the order of operations, so
 * math/tridiagonal.h cannot serve here. It is about ten times as fast at 256 x 256, so jacobi.h
 * cannot serve search. */
#pragma once

#include <stdint.h>

#include <kvant/kvant.h>

/* Fills vectors (n x n, row-major) with orthonormal eigenvectors as rows, by descending eigenvalue,
 * each with its largest component (the first of equals) positive. matrix: n x n, finite; its lower
 * triangle is read. KVANT_ERR_MEMORY. */
kvant_status kvant_eigenvectors(uint32_t n, const double *matrix, float *vectors);
