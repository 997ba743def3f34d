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

#define TEAM_THREADS 512
#define TEAM_CHUNK 4  /* numbers of a lane, or rows of a line, that are loaded together */
#define TEAM_WIDTH 32 /* lanes of a line, whose partial sums are added as a tree */

#ifdef __CUDACC__
#define TEAM_FN static __device__ __forceinline__
#define TEAM_APART static __device__ __noinline__
#define TEAM_EACH(i, first, end)                                                                   \
    for (int i = (first) + (int)threadIdx.x; i < (end); i += TEAM_THREADS)
#define TEAM_LINES(i, first, end)                                                                  \
    for (int i = (first) + (int)(threadIdx.x / TEAM_WIDTH); i < (end);                             \
         i += TEAM_THREADS / TEAM_WIDTH)
#define TEAM_LANES(i, first, end)                                                                  \
    for (int i = (first) + (int)(threadIdx.x % TEAM_WIDTH); i < (end); i += TEAM_WIDTH)
#define TEAM_LANE ((int)(threadIdx.x % TEAM_WIDTH))
#define TEAM_LANE_STEP TEAM_WIDTH
#define TEAM_LINE ((int)(threadIdx.x / TEAM_WIDTH))
#define TEAM_LINE_STEP (TEAM_THREADS / TEAM_WIDTH)
#define TEAM_IS_FIRST_LINE (threadIdx.x < TEAM_WIDTH)
#define TEAM_IS_FIRST (threadIdx.x == 0)
#define TEAM_IS_FIRST_LANE (threadIdx.x % TEAM_WIDTH == 0)
#define TEAM_SYNC() __syncthreads()
#define TEAM_LINE_SYNC() __syncwarp()
#else
#define TEAM_FN static inline
#define TEAM_APART static inline
#define TEAM_EACH(i, first, end) for (int i = (first); i < (end); i++)
#define TEAM_LINES(i, first, end) TEAM_EACH (i, first, end)
#define TEAM_LANES(i, first, end) TEAM_EACH (i, first, end)
#define TEAM_LANE 0
#define TEAM_LANE_STEP 1
#define TEAM_LINE 0
#define TEAM_LINE_STEP 1
#define TEAM_IS_FIRST_LINE 1
#define TEAM_IS_FIRST 1
#define TEAM_IS_FIRST_LANE 1
#define TEAM_SYNC() ((void)0)
#define TEAM_LINE_SYNC() ((void)0)
#endif

/* The sum of the lanes' numbers, which every lane of a line gets. On a CPU one thread has the
 * numbers of all lanes. */
#ifdef __CUDACC__
TEAM_FN double line_total(double sum)
{
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, width);
    return sum;
}
#else
TEAM_FN double line_total(double *sum)
{
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            sum[i] += sum[i + width];
    return sum[0];
}
#endif

/* The sum of a[i] b[i], likewise. */
TEAM_FN double line_dot(const double *a, const double *b, int first, int end)
{
#ifdef __CUDACC__
    double sum = 0, x[TEAM_CHUNK], y[TEAM_CHUNK];
    for (int i = first + TEAM_LANE; i < end; i += TEAM_CHUNK * TEAM_WIDTH) {
        for (int c = 0; c < TEAM_CHUNK; c++) {
            x[c] = i + c * TEAM_WIDTH < end ? a[i + c * TEAM_WIDTH] : 0;
            y[c] = i + c * TEAM_WIDTH < end ? b[i + c * TEAM_WIDTH] : 0;
        }
        for (int c = 0; c < TEAM_CHUNK; c++)
            sum = fma(x[c], y[c], sum);
    }
#else
    double sum[TEAM_WIDTH] = { 0 };
    for (int i = first; i < end; i++)
        sum[(i - first) % TEAM_WIDTH] = fma(a[i], b[i], sum[(i - first) % TEAM_WIDTH]);
#endif
    return line_total(sum);
}

/* The sum of a[i], likewise. */
TEAM_FN double line_sum(const double *a, int first, int end)
{
#ifdef __CUDACC__
    double sum = 0;
    TEAM_LANES (i, first, end)
        sum += a[i];
#else
    double sum[TEAM_WIDTH] = { 0 };
    for (int i = first; i < end; i++)
        sum[(i - first) % TEAM_WIDTH] += a[i];
#endif
    return line_total(sum);
}

/* The largest magnitude of a line's numbers factor a[i * stride], rounded to binary32. */
TEAM_FN float line_largest(const double *a, size_t stride, int end, double factor)
{
    float most = 0;
    TEAM_LANES (i, 0, end)
        most = fmaxf(most, fabsf((float)(factor * a[(size_t)i * stride])));
#ifdef __CUDACC__
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, width));
#endif
    return most;
}
