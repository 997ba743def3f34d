/* quaternion_c.c - the search for the nearest direction in portable C. Every level compiles the
 * same source. */
#define NAME(function) function##_c
#include "quaternion_loops.h"

KVANT_CLOSEST_COSETS_FN(kvant_closest_cosets_c)
{
    closest_cosets_c(x, stride, secondaries, n, which);
}

KVANT_LARGEST_PRODUCTS_FN(kvant_largest_products_c)
{
    largest_products_c(x, stride, entries, n, which);
}
