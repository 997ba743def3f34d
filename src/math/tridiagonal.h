/* tridiagonal.h - eigenvalues and eigenvectors of a symmetric matrix. */
#pragma once

#include <stdint.h>

#include <kvant/kvant.h>

/* Fills `values` with the eigenvalues, in no order, and `vectors` (n x n, row-major) with
 * orthonormal eigenvectors as rows. Both are exact within about n 2^-53 of the matrix's norm.
 * matrix: n x n, symmetric; it is destroyed. KVANT_ERR_MEMORY; KVANT_ERR_ARGUMENT when the steps do
 * not converge, which happens only with numbers that are not finite. */
kvant_status kvant_tridiagonal_eigen(uint32_t n, double *matrix, double *values, double *vectors);
