/* trig.h - sine and cosine of the first quadrant in binary64, computed with + - * only. The C
 * libraries' results differ in the last bits, but tables must be the same everywhere. */
#pragma once

#ifdef __CUDACC__
#define KVANT_TRIG_FN static __host__ __device__ inline
#else
#define KVANT_TRIG_FN static inline
#endif

#define KVANT_HALF_PI 1.5707963267948966 /* pi / 2 */

/* For 0 <= x <= pi / 2. The absolute error is below 1e-15. It takes the Taylor series of x / 16.
 * Then it doubles the angle four times, which loses no digits. It uses the formulas sin 2x = 2 sin
 * x cos x and 1 - cos 2x = 2 sin^2 x. */
KVANT_TRIG_FN void kvant_sin_cos(double x, double *sine, double *cosine)
{
    double r = x / 16, q = r * r;
    double s = r * (1 - q / 6 * (1 - q / 20 * (1 - q / 42 * (1 - q / 72 * (1 - q / 110)))));
    double v = q / 2 * (1 - q / 12 * (1 - q / 30 * (1 - q / 56 * (1 - q / 90 * (1 - q / 132)))));
    for (int i = 0; i < 4; i++) {
        double twice = 2 * s * (1 - v);
        v = 2 * s * s;
        s = twice;
    }
    *sine = s;
    *cosine = 1 - v;
}
