/* eigen.h - eigenvectors of a symmetric matrix, the same bits everywhere (docs/format.md, "Query basis"). */
#ifndef KVANT_MATH_EIGEN_H
#define KVANT_MATH_EIGEN_H

#include <stdint.h>

#include <kvant/kvant.h>

/* Fills values with the eigenvalues in descending order and vectors (n x n, row-major) with orthonormal eigenvectors as rows in the
 * same order, each with its largest component (the first of equals) positive. matrix: n x n, finite; its lower triangle is
 * read. KVANT_ERR_MEMORY. */
kvant_status kvant_eigen(uint32_t n, const double *matrix, double *values, double *vectors);

/* The vectors alone, rounded to binary32. */
kvant_status kvant_eigenvectors(uint32_t n, const double *matrix, float *vectors);

#endif
