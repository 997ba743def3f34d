/* moments.h - the moments of a transform's keys and queries, from sums at position 0, by a team
 * (team.h).
 *
 * The formulas are those of src/cache/solve.c and rope.c: sums become means about a centre, RoPE
 * takes them to a run of position buckets, the centres of stretches of positions are subtracted,
 * and moments off the diagonal are damped. */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../../math/trig.h"
#include "mean.h"

#define LEARN_KEYS_DAMPING 0.25
#define LEARN_QUERIES_DAMPING 1.0
#define LEARN_FLOOR 3e-4
#define LEARN_NO_TURN 1e-10

typedef struct learn_complex {
    double re, im;
} learn_complex;

/* The sums of a sub-head, in GPU memory. Each slice of the vectors has its own sums: of keys n
 * numbers, and of products n x n, of which the lower triangle counts. */
typedef struct learn_sums {
    const uint8_t *counts; /* of keys, then of queries: whether a vector counts */
    int n_keys, n_queries; /* vectors; without queries all directions of queries count alike */
    int key_slices, query_slices;
    const float *origin, *key, *keys, *queries;
} learn_sums;

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

/* Rotations by all pairs of a part: `pairs` numbers each. */
typedef struct learn_turns {
    const kvant_cuda_rope_pair *pairs; /* of the part */
    int n, n_buckets;
    const int32_t *edge; /* n_buckets + 1 positions */
    /* at the edges; by one position; by a stretch of each bucket; by a block; and the mean of keys
     * in the first stretch of each bucket */
    learn_complex *at, *one, *stretch, *block, *own;
    learn_complex *mean; /* of keys, at position 0 */
} learn_turns;

#define LEARN_TURNS(n_buckets) (3 * (n_buckets) + 4) /* rows of these tables */

TEAM_FN int learn_stretch(const learn_turns *t, int bucket, uint32_t center_span)
{
    const uint32_t length = (uint32_t)(t->edge[bucket + 1] - t->edge[bucket]);
    return (int)(length < center_span ? length : center_span);
}

/* The mean of z over positions from the first-th edge to the end-th, where every bucket counts the
 * same. i, k: z turns by the frequency of pair i plus (minus: less) that of pair k; k < 0: of pair
 * i alone. step: the turn of a step. */
TEAM_FN learn_complex learn_turn(const learn_turns *t, int i, int k, bool minus, int at)
{
    const learn_complex a = t->at[at * t->n + i], one = { 1, 0 },
                        b = k < 0 ? one : t->at[at * t->n + k];
    return learn_times(a, minus ? learn_conjugate(b) : b);
}

TEAM_FN learn_complex learn_series(learn_complex sum, learn_complex step)
{
    const learn_complex below = { step.re - 1, -step.im }, one = { 1, 0 };
    const double size = below.re * below.re + below.im * below.im;
    const learn_complex product = learn_times(sum, below);
    const double inverse = 1 / size;
    const learn_complex mean = { product.re * inverse, product.im * inverse };
    return size < LEARN_NO_TURN * LEARN_NO_TURN ? one : mean;
}

TEAM_FN learn_complex learn_step(const learn_complex *step, int i, int k, bool minus)
{
    const learn_complex one = { 1, 0 }, b = k < 0 ? one : step[k];
    return learn_times(step[i], minus ? learn_conjugate(b) : b);
}

/* The mean over buckets first to end - 1, in steps of `length` positions. */
TEAM_FN learn_complex learn_mean_turn(const learn_turns *t, int i, int k, bool minus, int first,
                                      int end, const learn_complex *step, double length)
{
    learn_complex sum = { 0, 0 }, before = learn_turn(t, i, k, minus, first);
    for (int m = first; m < end; m++) {
        const learn_complex after = learn_turn(t, i, k, minus, m + 1);
        const double share = 1 / ((t->edge[m + 1] - t->edge[m]) / length * (end - first));
        sum.re = fma(share, after.re - before.re, sum.re);
        sum.im = fma(share, after.im - before.im, sum.im);
        before = after;
    }
    return learn_series(sum, learn_step(step, i, k, minus));
}

/* The mean over the first `length` positions, by which `turn` turns. */
TEAM_FN learn_complex learn_first_turn(const learn_turns *t, int i, learn_complex turn,
                                       double length)
{
    const learn_complex sum = { (turn.re - 1) / length, turn.im / length };
    return learn_series(sum, t->one[i]);
}

/* Fills the tables, which begin at `room`. mean: of keys at position 0, by channel of the part. */
TEAM_APART void learn_make_turns(learn_turns *t, uint32_t center_span, const double *mean,
                                 learn_complex *room)
{
    const int n = t->n, edges = t->n_buckets + 1;
    t->at = room;
    t->one = t->at + edges * n;
    t->block = t->one + n;
    t->mean = t->block + n;
    t->stretch = t->mean + n;
    t->own = t->stretch + t->n_buckets * n;
    TEAM_EACH (x, 0, edges * n)
        t->at[x] = learn_unit((double)t->edge[x / n] * t->pairs[x % n].frequency);
    TEAM_EACH (i, 0, n) {
        const learn_complex z = { mean[t->pairs[i].first], mean[t->pairs[i].second] };
        t->one[i] = learn_unit(t->pairs[i].frequency);
        t->block[i] = learn_unit((double)KVANT_PAGE_TOKENS * t->pairs[i].frequency);
        t->mean[i] = z;
    }
    TEAM_SYNC();
    TEAM_EACH (x, 0, center_span ? t->n_buckets * n : 0) {
        const int i = x % n, length = learn_stretch(t, x / n, center_span);
        t->stretch[x] = learn_unit((double)length * t->pairs[i].frequency);
        t->own[x] = learn_times(t->mean[i], learn_first_turn(t, i, t->stretch[x], length));
    }
    TEAM_SYNC();
}

/* Where moments go: keys with rows and columns in reverse order (mean.h). */
typedef struct learn_moments {
    double *keys, *queries;
    int n;
    double key_factor, query_factor; /* off the diagonal */
} learn_moments;

TEAM_FN void learn_put(const learn_moments *m, int i, int j, double key, double query)
{
    const int last = m->n - 1;
    key *= i == j ? 1 : m->key_factor;
    query *= i == j ? 1 : m->query_factor;
    m->keys[(last - i) * m->n + last - j] = m->keys[(last - j) * m->n + last - i] = key;
    m->queries[i * m->n + j] = m->queries[j * m->n + i] = query;
}

/* The moments of two pairs, as products z_x conj z_y and z_x z_y. */
typedef struct learn_products {
    learn_complex minus, plus;
} learn_products;

TEAM_FN learn_products learn_rotated(learn_products p, learn_complex minus, learn_complex plus)
{
    const learn_products out = { learn_times(p.minus, minus), learn_times(p.plus, plus) };
    return out;
}

TEAM_FN void learn_subtract(learn_products *p, double factor, learn_complex minus,
                            learn_complex plus)
{
    p->minus.re = fma(-factor, minus.re, p->minus.re);
    p->minus.im = fma(-factor, minus.im, p->minus.im);
    p->plus.re = fma(-factor, plus.re, p->plus.re);
    p->plus.im = fma(-factor, plus.im, p->plus.im);
}

TEAM_FN learn_products learn_products_of(double aa, double ab, double ba, double bb)
{
    const learn_products p = { { aa + bb, ba - ab }, { aa - bb, ba + ab } };
    return p;
}

TEAM_FN void learn_put_products(const learn_moments *m, kvant_cuda_rope_pair x,
                                kvant_cuda_rope_pair y, learn_products k, learn_products q)
{
    learn_put(m, x.first, y.first, (k.minus.re + k.plus.re) / 2, (q.minus.re + q.plus.re) / 2);
    learn_put(m, x.second, y.second, (k.minus.re - k.plus.re) / 2, (q.minus.re - q.plus.re) / 2);
    learn_put(m, x.second, y.first, (k.plus.im + k.minus.im) / 2, (q.plus.im + q.minus.im) / 2);
    if (x.first != y.first)
        learn_put(m, x.first, y.second, (k.plus.im - k.minus.im) / 2, (q.plus.im - q.minus.im) / 2);
}

TEAM_FN double learn_sum_slices(const float *sums, size_t stride, int n_slices)
{
    double sum = 0;
    for (int k = 0; k < n_slices; k++)
        sum += (double)sums[(size_t)k * stride];
    return sum;
}

TEAM_FN double learn_sum_at(const float *sums, int n_slices, int n, int i, int j)
{
    return learn_sum_slices(sums + (i > j ? i * n + j : j * n + i), (size_t)n * (size_t)n,
                            n_slices);
}

/* What the moments of keys and queries are made of. */
typedef struct learn_source {
    learn_sums sums;
    double key_inverse, query_inverse; /* of the counts */
    const double *about, *mean;        /* the mean of keys about the origin, and about 0 */
} learn_source;

TEAM_FN double learn_key_at(const learn_source *s, int n, int i, int j)
{
    return learn_sum_at(s->sums.keys, s->sums.key_slices, n, i, j) * s->key_inverse -
           s->about[i] * s->about[j];
}

TEAM_FN double learn_query_at(const learn_source *s, int n, int i, int j)
{
    if (s->sums.n_queries == 0)
        return i == j;
    return learn_sum_at(s->sums.queries, s->sums.query_slices, n, i, j) * s->query_inverse;
}

/* The moments of pairs x and y. */
TEAM_FN void learn_pair(const learn_source *s, const learn_turns *t, uint32_t center_span,
                        const learn_moments *m, int x, int y)
{
    const kvant_cuda_rope_pair px = t->pairs[x], py = t->pairs[y];
    const int a[2] = { px.first, px.second }, b[2] = { py.first, py.second };
    double k[4], q[4];
    for (int i = 0; i < 4; i++) {
        const int r = a[i / 2], c = b[i % 2];
        k[i] = learn_key_at(s, m->n, r, c) + s->mean[r] * s->mean[c];
        q[i] = learn_query_at(s, m->n, r, c);
    }
    const learn_complex minus = learn_mean_turn(t, x, y, true, 0, t->n_buckets, t->one, 1),
                        plus = learn_mean_turn(t, x, y, false, 0, t->n_buckets, t->one, 1);
    learn_products keys = learn_rotated(learn_products_of(k[0], k[1], k[2], k[3]), minus, plus);
    for (int i = 0; center_span && i < t->n_buckets; i++) {
        const learn_complex zx = t->own[i * t->n + x], zy = t->own[i * t->n + y],
                            *step = t->stretch + i * t->n;
        const double length = learn_stretch(t, i, center_span);
        learn_subtract(&keys, 1.0 / t->n_buckets,
                       learn_times(learn_times(zx, learn_conjugate(zy)),
                                   learn_mean_turn(t, x, y, true, i, i + 1, step, length)),
                       learn_times(learn_times(zx, zy),
                                   learn_mean_turn(t, x, y, false, i, i + 1, step, length)));
    }
    if (!center_span) {
        const learn_complex zx = learn_times(t->mean[x], learn_mean_turn(t, x, -1, false, 0,
                                                                         t->n_buckets, t->one, 1)),
                            zy = learn_times(t->mean[y], learn_mean_turn(t, y, -1, false, 0,
                                                                         t->n_buckets, t->one, 1));
        learn_subtract(&keys, 1, learn_times(zx, learn_conjugate(zy)), learn_times(zx, zy));
    }
    learn_put_products(m, px, py, keys,
                       learn_rotated(learn_products_of(q[0], q[1], q[2], q[3]), minus, plus));
}

/* How many of n vectors count. `part`: room. */
TEAM_FN double learn_count(const uint8_t *counts, int n, double *part)
{
    TEAM_EACH (i, 0, LEARN_MOST) {
        int counted = 0;
        for (int k = i; k < n; k += LEARN_MOST)
            counted += counts[k];
        part[i] = counted;
    }
    TEAM_SYNC();
    const double sum = line_sum(part, 0, LEARN_MOST);
    TEAM_SYNC();
    return sum;
}

/* Scales a matrix to trace n and adds to its diagonal. `diagonal`: room. Returns the former trace;
 * 0: it is not above 0, or not finite. */
TEAM_FN double learn_regularise(int n, double *m, double *diagonal)
{
    TEAM_EACH (i, 0, n)
        diagonal[i] = m[i * n + i];
    TEAM_SYNC();
    const double trace = line_sum(diagonal, 0, n), factor = n / trace;
    TEAM_SYNC();
    if (!(trace > 0) || !(factor < INFINITY))
        return 0;
    TEAM_LINES (i, 0, n)
        TEAM_LANES (j, 0, n)
            m[i * n + j] = m[i * n + j] * factor + (i == j ? LEARN_FLOOR : 0);
    TEAM_SYNC();
    return trace;
}

/* Computes the moments, and the centre of keys and of a block at position 0 by channel of the part.
 * Room: s->v, s->w and s->third. */
TEAM_APART void learn_find_moments(const learn_sums *sums, learn_turns *t, uint32_t center_span,
                                   uint32_t head_dim, const learn_space *s, int n, double n_keys,
                                   double n_queries, float *center, float *start)
{
    const learn_source source = { *sums, 1 / fmax(n_keys, 1.0), 1 / fmax(n_queries, 1.0), s->v,
                                  s->w };
    const learn_moments m = { s->fast, s->other, n,
                              n_keys / (n_keys + LEARN_KEYS_DAMPING * head_dim),
                              n_queries / (n_queries + LEARN_QUERIES_DAMPING * head_dim) };
    TEAM_EACH (i, 0, n) {
        s->v[i] = learn_sum_slices(sums->key + i, (size_t)n, sums->key_slices) * source.key_inverse;
        s->w[i] = s->v[i] + sums->origin[i];
    }
    TEAM_SYNC();
    learn_make_turns(t, center_span, s->w, (learn_complex *)(void *)s->third);
    TEAM_EACH (i, 0, t->n) {
        const learn_complex all = learn_times(t->mean[i], learn_mean_turn(t, i, -1, false, 0,
                                                                          t->n_buckets, t->one, 1)),
                            first = learn_times(
                                t->mean[i], learn_first_turn(t, i, t->block[i], KVANT_PAGE_TOKENS));
        center[t->pairs[i].first] = (float)all.re;
        center[t->pairs[i].second] = (float)all.im;
        start[t->pairs[i].first] = (float)first.re;
        start[t->pairs[i].second] = (float)first.im;
    }
    TEAM_LINES (x, 0, t->n)
        TEAM_LANES (y, 0, x + 1)
            learn_pair(&source, t, center_span, &m, x, y);
    TEAM_SYNC();
}
