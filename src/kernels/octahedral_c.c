/* octahedral_c.c - codes of triplets in portable C. Every level compiles the same source. */
#define NAME(function) function##_c
#include "octahedral_loops.h"

KVANT_TRIPLET_CODES_FN(kvant_triplet_codes_c)
{
    triplet_codes_c(book, n, t);
}
