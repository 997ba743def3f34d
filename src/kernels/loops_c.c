/* loops_c.c - the loops that every level compiles from the same source, in portable C. */
#define NAME(function) function##_c
#include "feedback_loops.h"
#include "mean_loops.h"
#include "octahedral_loops.h"
#include "quaternion_loops.h"

#define triangle_row_c kvant_triangle_row_c

#include "triangle_loops.h"

KVANT_FEEDBACK_CODES_FN(kvant_feedback_codes_c)
{
    feedback_codes_c(feedback, z, thresholds, values, bits, codes, sums);
}

KVANT_MEAN_FACTOR_FN(kvant_mean_factor_c)
{
    return mean_factor_c(n, a, b, room);
}

KVANT_LOWER_INVERSE_FN(kvant_lower_inverse_c)
{
    lower_inverse_c(n, l, column);
}

KVANT_TRIANGLE_FN(kvant_solve_upper_c)
{
    solve_upper_c(triangle, n, n_x, x);
}

KVANT_TRIPLET_CODES_FN(kvant_triplet_codes_c)
{
    triplet_codes_c(book, n, t);
}

KVANT_CLOSEST_COSETS_FN(kvant_closest_cosets_c)
{
    closest_cosets_c(x, stride, secondaries, n, which);
}

KVANT_LARGEST_PRODUCTS_FN(kvant_largest_products_c)
{
    largest_products_c(x, stride, entries, n, which);
}
