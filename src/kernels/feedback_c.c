/* feedback_c.c - rounding with error feedback in portable C. Every level compiles the same
 * source. */
#define NAME(function) function##_c
#include "feedback_loops.h"

KVANT_FEEDBACK_CODES_FN(kvant_feedback_codes_c)
{
    feedback_codes_c(feedback, z, thresholds, values, bits, codes, sums);
}
