/* rotations.h - how far RoPE rotates each pair of channels, on average over position buckets: the
 * tables of a transform, which moments.h reads, and the centres of keys.
 *
 * The formulas are those of src/cache/rope.c. A team (team.h) fills the tables of a sub-head and a
 * transform in GPU memory. */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../../math/trig.h"
#include "team.h"

#define LEARN_NO_ROTATION 1e-10

typedef struct learn_complex {
    double re, im;
} learn_complex;

TEAM_FN learn_complex learn_times(learn_complex a, learn_complex b)
{
    const learn_complex z = { a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re };
    return z;
}

TEAM_FN learn_complex learn_conjugate(learn_complex a)
{
    const learn_complex z = { a.re, -a.im };
    return z;
}

/* Sine and cosine of any angle, as kvant_rope_sin_cos computes them. */
TEAM_FN learn_complex learn_unit(double angle)
{
    const double quarters = floor(angle / KVANT_HALF_PI), rest = angle - quarters * KVANT_HALF_PI;
    const int quarter = (int)(quarters - 4 * floor(quarters / 4));
    double s, c;
    kvant_sin_cos(rest < 0 ? 0 : rest, &s, &c);
    const learn_complex z = {
        quarter == 0   ? c
        : quarter == 1 ? -s
        : quarter == 2 ? -c
                       : s,
        quarter == 0   ? s
        : quarter == 1 ? c
        : quarter == 2 ? -s
                       : -c,
    };
    return z;
}

/* Rotations of all pairs of a part: n numbers each. */
typedef struct learn_rotations {
    const kvant_cuda_rope_pair *pairs; /* of the part */
    int n, n_buckets;
    const int32_t *edge; /* n_buckets + 1 positions */
    /* to the edges; by one position; by a block; by a stretch of each bucket; and the mean of keys
     * in the first stretch of each bucket */
    learn_complex *at, *one, *block, *stretch, *own;
    learn_complex *mean; /* of keys, at position 0 */
} learn_rotations;

/* The tables of n pairs begin at `room`, which has kvant_learn_tables numbers. */
TEAM_FN learn_rotations learn_rotations_at(const kvant_cuda_rope_pair *pairs, int n,
                                           const kvant_cuda_learn_span *span, learn_complex *room)
{
    const int n_buckets = (int)span->n_buckets;
    learn_complex *const one = room + (n_buckets + 1) * n;
    const learn_rotations r = { pairs,       n,           n_buckets,
                                span->edges, room,        one,
                                one + n,     one + 3 * n, one + (3 + n_buckets) * n,
                                one + 2 * n };
    return r;
}

TEAM_FN int learn_stretch(const learn_rotations *r, int bucket, uint32_t center_span)
{
    const uint32_t length = (uint32_t)(r->edge[bucket + 1] - r->edge[bucket]);
    return (int)(length < center_span ? length : center_span);
}

/* A rotation by the frequency of pair i, plus (minus: less) the frequency of pair k; k < 0: of pair
 * i alone. */
TEAM_FN learn_complex learn_rotation(const learn_complex *of, int i, int k, bool minus)
{
    const learn_complex one = { 1, 0 }, b = k < 0 ? one : of[k];
    return learn_times(of[i], minus ? learn_conjugate(b) : b);
}

TEAM_FN learn_complex learn_series(learn_complex sum, learn_complex step)
{
    const learn_complex below = { step.re - 1, -step.im }, one = { 1, 0 };
    const double size = below.re * below.re + below.im * below.im;
    const learn_complex product = learn_times(sum, below);
    const double inverse = 1 / size;
    const learn_complex mean = { product.re * inverse, product.im * inverse };
    return size < LEARN_NO_ROTATION * LEARN_NO_ROTATION ? one : mean;
}

/* The mean rotation over buckets first to end - 1, of which each counts the same, in steps of
 * `length` positions. step: the rotations of a step. */
TEAM_FN learn_complex learn_mean_rotation(const learn_rotations *r, int i, int k, bool minus,
                                          int first, int end, const learn_complex *step,
                                          double length)
{
    learn_complex sum = { 0, 0 }, before = learn_rotation(r->at + first * r->n, i, k, minus);
    for (int m = first; m < end; m++) {
        const learn_complex after = learn_rotation(r->at + (m + 1) * r->n, i, k, minus);
        const double share = 1 / ((r->edge[m + 1] - r->edge[m]) / length * (end - first));
        sum.re = fma(share, after.re - before.re, sum.re);
        sum.im = fma(share, after.im - before.im, sum.im);
        before = after;
    }
    return learn_series(sum, learn_rotation(step, i, k, minus));
}

/* The mean rotation over all buckets, position by position. */
TEAM_FN learn_complex learn_whole_rotation(const learn_rotations *r, int i, int k, bool minus)
{
    return learn_mean_rotation(r, i, k, minus, 0, r->n_buckets, r->one, 1);
}

/* The mean rotation over the first `length` positions, which together are `whole`. */
TEAM_FN learn_complex learn_first_rotation(const learn_rotations *r, int i, learn_complex whole,
                                           double length)
{
    const learn_complex sum = { (whole.re - 1) / length, whole.im / length };
    return learn_series(sum, r->one[i]);
}

/* Fills the tables. mean: of keys at position 0, by channel of the part. */
TEAM_FN void learn_make_rotations(const learn_rotations *r, uint32_t center_span,
                                  const double *mean)
{
    const int n = r->n;
    TEAM_EACH (x, 0, (r->n_buckets + 1) * n)
        r->at[x] = learn_unit((double)r->edge[x / n] * r->pairs[x % n].frequency);
    TEAM_EACH (i, 0, n) {
        const learn_complex z = { mean[r->pairs[i].first], mean[r->pairs[i].second] };
        r->one[i] = learn_unit(r->pairs[i].frequency);
        r->block[i] = learn_unit((double)KVANT_PAGE_TOKENS * r->pairs[i].frequency);
        r->mean[i] = z;
    }
    TEAM_SYNC();
    TEAM_EACH (x, 0, center_span ? r->n_buckets * n : 0) {
        const int i = x % n, length = learn_stretch(r, x / n, center_span);
        r->stretch[x] = learn_unit((double)length * r->pairs[i].frequency);
        r->own[x] = learn_times(r->mean[i], learn_first_rotation(r, i, r->stretch[x], length));
    }
}

/* The centre of keys, and of a block at position 0, by channel of the part. Needs no number that
 * was made after the synchronisation in learn_make_rotations. */
TEAM_FN void learn_find_centers(const learn_rotations *r, float *center, float *start)
{
    TEAM_EACH (i, 0, r->n) {
        const learn_complex all = learn_times(r->mean[i], learn_whole_rotation(r, i, -1, false)),
                            first =
                                learn_times(r->mean[i], learn_first_rotation(r, i, r->block[i],
                                                                             KVANT_PAGE_TOKENS));
        center[r->pairs[i].first] = (float)all.re;
        center[r->pairs[i].second] = (float)all.im;
        start[r->pairs[i].first] = (float)first.re;
        start[r->pairs[i].second] = (float)first.im;
    }
}
