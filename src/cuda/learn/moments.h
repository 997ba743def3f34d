/* moments.h - the moments of a transform's keys and queries, from sums at position 0.
 *
 * The formulas are those of src/cache/solve.c: sums become means about a centre, RoPE takes them to
 * a run of position buckets, the centres of stretches of positions are subtracted, and moments off
 * the diagonal are damped. A team makes the tables of a sub-head and a transform. Then a thread
 * makes the moments of two pairs of channels. */
#pragma once

#include "rotations.h"
#include "tile.h"

#define LEARN_KEYS_DAMPING 0.25
#define LEARN_QUERIES_DAMPING 1.0

/* The sums of a sub-head, in GPU memory. Each slice of the vectors has its own sums: of keys n
 * numbers, and of products n x n, of which the lower triangle counts. */
typedef struct learn_sums {
    const uint8_t *counts; /* of keys, then of queries: whether a vector counts */
    int n_keys, n_queries; /* vectors; without queries all directions of queries count alike */
    int key_slices, query_slices;
    const float *origin, *key, *keys, *queries;
} learn_sums;

/* Tables of a sub-head and a transform, in GPU memory. */
typedef struct learn_tables {
    double *counted;      /* how many keys and queries count */
    double *about, *mean; /* the mean of keys about the origin, and about 0: n numbers each */
    learn_rotations rotations;
} learn_tables;

/* Where moments go, and by how much those off the diagonal are damped. */
typedef struct learn_moments {
    double *keys, *queries;
    int n;
    double key_factor, query_factor;
} learn_moments;

TEAM_FN void learn_put(const learn_moments *m, int i, int j, double key, double query)
{
    key *= i == j ? 1 : m->key_factor;
    query *= i == j ? 1 : m->query_factor;
    m->keys[i * m->n + j] = m->keys[j * m->n + i] = key;
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

TEAM_FN double learn_key_at(const learn_sums *s, const learn_tables *t, int n, int i, int j)
{
    return learn_sum_at(s->keys, s->key_slices, n, i, j) * (1 / fmax(t->counted[0], 1.0)) -
           t->about[i] * t->about[j] + t->mean[i] * t->mean[j];
}

TEAM_FN double learn_query_at(const learn_sums *s, const learn_tables *t, int n, int i, int j)
{
    if (s->n_queries == 0)
        return i == j;
    return learn_sum_at(s->queries, s->query_slices, n, i, j) * (1 / fmax(t->counted[1], 1.0));
}

/* Subtracts the products of the centres of pairs x and y. */
TEAM_FN void learn_subtract_centers(const learn_rotations *r, uint32_t center_span, int x, int y,
                                    learn_products *keys)
{
    for (int i = 0; center_span && i < r->n_buckets; i++) {
        const learn_complex zx = r->own[i * r->n + x], zy = r->own[i * r->n + y],
                            *step = r->stretch + i * r->n;
        const double length = learn_stretch(r, i, center_span);
        learn_subtract(keys, 1.0 / r->n_buckets,
                       learn_times(learn_times(zx, learn_conjugate(zy)),
                                   learn_mean_rotation(r, x, y, true, i, i + 1, step, length)),
                       learn_times(learn_times(zx, zy),
                                   learn_mean_rotation(r, x, y, false, i, i + 1, step, length)));
    }
    if (!center_span) {
        const learn_complex zx = learn_times(r->mean[x], learn_whole_rotation(r, x, -1, false)),
                            zy = learn_times(r->mean[y], learn_whole_rotation(r, y, -1, false));
        learn_subtract(keys, 1, learn_times(zx, learn_conjugate(zy)), learn_times(zx, zy));
    }
}

/* Makes the moments of pairs x and y. */
TEAM_FN void learn_pair(const learn_sums *s, const learn_tables *t, uint32_t center_span,
                        const learn_moments *m, int x, int y)
{
    const learn_rotations *r = &t->rotations;
    const kvant_cuda_rope_pair px = r->pairs[x], py = r->pairs[y];
    const int a[2] = { px.first, px.second }, b[2] = { py.first, py.second };
    double k[4], q[4];
    for (int i = 0; i < 4; i++) {
        k[i] = learn_key_at(s, t, m->n, a[i / 2], b[i % 2]);
        q[i] = learn_query_at(s, t, m->n, a[i / 2], b[i % 2]);
    }
    const learn_complex minus = learn_whole_rotation(r, x, y, true),
                        plus = learn_whole_rotation(r, x, y, false);
    learn_products keys = learn_rotated(learn_products_of(k[0], k[1], k[2], k[3]), minus, plus);
    learn_subtract_centers(r, center_span, x, y, &keys);
    learn_put_products(m, px, py, keys,
                       learn_rotated(learn_products_of(q[0], q[1], q[2], q[3]), minus, plus));
}

/* Where the moments of a sub-head go. */
TEAM_FN learn_moments learn_moments_of(const learn_tables *t, uint32_t head_dim, double *keys,
                                       double *queries)
{
    const double n_keys = t->counted[0], n_queries = t->counted[1];
    const learn_moments m = { keys, queries, 2 * t->rotations.n,
                              n_keys / (n_keys + LEARN_KEYS_DAMPING * head_dim),
                              n_queries / (n_queries + LEARN_QUERIES_DAMPING * head_dim) };
    return m;
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

/* Fills the tables of a sub-head and a transform, and finds the centres (rotations.h). part:
 * LEARN_MOST numbers of room. */
TEAM_FN void learn_make_tables(const learn_sums *s, const learn_tables *t, uint32_t center_span,
                               double *part, float *center, float *start)
{
    const double n_keys = learn_count(s->counts, s->n_keys, part),
                 n_queries = s->n_queries ? learn_count(s->counts + s->n_keys, s->n_queries, part)
                                          : KVANT_CUDA_LEARN_LEAST,
                 inverse = 1 / fmax(n_keys, 1.0);
    const int n = 2 * t->rotations.n;
    TEAM_EACH (i, 0, n) {
        t->about[i] = learn_sum_slices(s->key + i, (size_t)n, s->key_slices) * inverse;
        t->mean[i] = t->about[i] + s->origin[i];
    }
    if (TEAM_IS_FIRST) {
        t->counted[0] = n_keys;
        t->counted[1] = n_queries;
    }
    TEAM_SYNC();
    learn_make_rotations(&t->rotations, center_span, t->mean);
    learn_find_centers(&t->rotations, center, start);
}
