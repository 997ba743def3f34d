/* spd.h - symmetric positive definite matrices in binary64: inverse, square root and factors.
 *
 * All matrices are n x n, row-major and full. Only + - * / and square root are used, so results
 * have the same bits on every machine. Knows nothing of keys or queries. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <kvant/kvant.h>

/* inverse = m^-1 by Cholesky's factorisation, symmetric to the bit. KVANT_ERR_ARGUMENT when m is
 * not positive definite, KVANT_ERR_MEMORY. inverse may be m. */
kvant_status kvant_spd_inverse(uint32_t n, const double *m, double *inverse);

/* root = m^(1/2), inverse_root = m^(-1/2) (NULL: not wanted). KVANT_ERR_ARGUMENT when an eigenvalue
 * is not above 0, KVANT_ERR_MEMORY. Outputs may be m. */
kvant_status kvant_spd_roots(uint32_t n, const double *m, double *root, double *inverse_root);

/* out = s m s, symmetric to the bit, for symmetric s and m. scratch: n x n. out must differ from
 * all other arguments. */
void kvant_spd_sandwich(uint32_t n, const double *s, const double *m, double *scratch, double *out);

/* m = lower^T D lower, where lower has ones on its diagonal and D is the diagonal matrix of the n
 * pivots. Errors as for the inverse. */
kvant_status kvant_spd_unit_lower(uint32_t n, const double *m, double *lower, double *pivots);

/* Scales m to trace n and adds `floor` to its diagonal. Returns false when m is zero, or so small
 * compared with the numbers from which it was computed that it holds mostly rounding errors. */
bool kvant_spd_regularise(uint32_t n, double *m, double floor);

/* The sum of the diagonal. */
double kvant_trace(uint32_t n, const double *m);

/* The Frobenius norm of any matrix: the square root of the sum of squares of all numbers. */
double kvant_frobenius(uint32_t n, const double *m);
