/* loops_c.c - the loops that every level compiles from the same source, in portable C. */
#define NAME(function) kvant_##function##_c
#define KVANT_LOOP /* the reference is called by name */

#include "feedback_loops.h"
#include "mean_loops.h"
#include "octahedral_loops.h"
#include "quaternion_loops.h"
#include "triangle_loops.h"
