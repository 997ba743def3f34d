/* team.h - what lets one source be both the code of a thread block of a GPU and plain C for one
 * thread of a CPU, which the mock device of the tests runs.
 *
 * A team's threads form lines of 32 lanes. Every sum has an order that does not depend on the
 * number of threads, and no product is fused with a sum unless the source says so. So results have
 * the same bits on every GPU and on a CPU. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../base/attributes.h"

#define TEAM_THREADS 512
#define TEAM_WIDTH 32 /* lanes of a line, whose partial sums are added as a tree */

#ifdef __CUDACC__
#define TEAM_FN static __device__ __forceinline__
#define TEAM_EACH(i, first, end)                                                                   \
    for (int i = (first) + (int)threadIdx.x; i < (end); i += TEAM_THREADS)
#define TEAM_LINE_STEP (TEAM_THREADS / TEAM_WIDTH)
#define TEAM_LANE_STEP TEAM_WIDTH
#define TEAM_LINE ((int)(threadIdx.x / TEAM_WIDTH))
#define TEAM_LANE ((int)(threadIdx.x % TEAM_WIDTH))
#define TEAM_SPREAD 1 /* lanes whose partial sums a thread has */
#define TEAM_SYNC() __syncthreads()
#define TEAM_LINE_SYNC() __syncwarp()
#else
#define TEAM_FN static inline
#define TEAM_EACH(i, first, end) for (int i = (first); i < (end); i++)
#define TEAM_LINE_STEP 1
#define TEAM_LANE_STEP 1
#define TEAM_LINE 0
#define TEAM_LANE 0
#define TEAM_SPREAD TEAM_WIDTH
#define TEAM_SYNC() ((void)0)
#define TEAM_LINE_SYNC() ((void)0)
#endif
#define TEAM_LINES(i, first, end) for (int i = (first) + TEAM_LINE; i < (end); i += TEAM_LINE_STEP)
#define TEAM_LANES(i, first, end) for (int i = (first) + TEAM_LANE; i < (end); i += TEAM_LANE_STEP)
#define TEAM_IS_FIRST_LINE (TEAM_LINE == 0)
#define TEAM_IS_FIRST_LANE (TEAM_LANE == 0)
#define TEAM_IS_FIRST (TEAM_IS_FIRST_LINE && TEAM_IS_FIRST_LANE)

/* The partial sums of the lanes that a thread has. */
typedef struct line_sum_parts {
    double of[TEAM_SPREAD];
} line_sum_parts;

/* The sum of all lanes' partial sums, which every lane of a line gets. */
TEAM_FN double line_total(line_sum_parts sum)
{
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
#ifdef __CUDACC__
        sum.of[0] += __shfl_xor_sync(0xffffffffu, sum.of[0], width);
#else
        for (int i = 0; i < width; i++)
            sum.of[i] += sum.of[i + width];
#endif
    return sum.of[0];
}

/* The sum of a[i], from the first-th number on. */
TEAM_FN double line_sum(const double *a, int first, int end)
{
    line_sum_parts sum = { { 0 } };
    TEAM_LANES (i, first, end)
        sum.of[(i - first) % TEAM_SPREAD] += a[i];
    return line_total(sum);
}

/* The number that a lane of the line has. */
TEAM_FN double line_at(double number, int lane)
{
#ifdef __CUDACC__
    return __shfl_sync(0xffffffffu, number, lane);
#else
    (void)lane;
    return number;
#endif
}

/* The largest of the lanes' numbers, for all lanes of a line. */
TEAM_FN double line_most(double most)
{
#ifdef __CUDACC__
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
        most = fmax(most, __shfl_xor_sync(0xffffffffu, most, width));
#endif
    return most;
}
