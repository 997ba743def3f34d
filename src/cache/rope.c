/* rope.c - see rope.h.
 *
 * A pair of channels is a complex number z, and RoPE at position p multiplies it by e^(ipf). So the
 * moments E[z_i conj z_k] and E[z_i z_k] at p are the moments at 0 times e^(ip(f_i - f_k)) and
 * e^(ip(f_i + f_k)). Their means over positions a to b - 1 are geometric series. */
#include "learning.h"

#include <math.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "../math/trig.h"

#define MOST_FREQUENCY 1024.0f /* angles are then below 2^42, and exact enough in binary64 */
#define NO_TURN 1e-10          /* a rotation per position below this is none over all positions */

/* Sine and cosine of any angle */

void kvant_rope_sin_cos(double angle, double *sine, double *cosine)
{
    const double quarters = floor(angle / KVANT_HALF_PI), rest = angle - quarters * KVANT_HALF_PI;
    const int quarter = (int)(quarters - 4 * floor(quarters / 4));
    double s, c;
    kvant_sin_cos(rest < 0 ? 0 : rest, &s, &c);
    *sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    *cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
}

typedef struct complex_number {
    double re, im;
} complex_number;

static complex_number unit(double angle)
{
    complex_number z;
    kvant_rope_sin_cos(angle, &z.im, &z.re);
    return z;
}

static complex_number times(complex_number a, complex_number b)
{
    return (complex_number){ a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re };
}

static complex_number conjugate(complex_number a, bool really)
{
    return (complex_number){ a.re, really ? -a.im : a.im };
}

/* Setting */

kvant_status kvant_rope_check(const kvant_rope *rope, uint32_t head_dim)
{
    if (!rope->frequencies || !rope->n_dims || rope->n_dims % 2 || rope->n_dims > head_dim)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "rope: frequencies is NULL, or n_dims is odd, 0 or larger than head_dim");
    for (uint32_t i = 0; i < rope->n_dims / 2; i++) {
        if (!(fabsf(rope->frequencies[i]) <= MOST_FREQUENCY))
            return kvant_fail(
                NULL, isfinite(rope->frequencies[i]) ? KVANT_ERR_ARGUMENT : KVANT_ERR_NONFINITE,
                "rope: frequency %u is not finite, or its magnitude is larger than 1024", i);
    }
    return KVANT_OK;
}

/* The channel of a head that RoPE rotates together with this one; the channel itself if there is
 * none. *second: whether `channel` is the second of the two. */
static uint32_t partner(const kvant_rope *rope, uint32_t channel, bool *second)
{
    const uint32_t half = rope->n_dims / 2;
    *second = rope->interleaved ? channel % 2 : channel >= half;
    if (channel >= rope->n_dims)
        return channel;
    return rope->interleaved ? channel ^ 1 : *second ? channel - half : channel + half;
}

/* The index of a head's channel in a part. n: the channel is in another part. */
static uint32_t index_in_part(uint32_t d, uint32_t n, uint32_t part, uint32_t channel)
{
    for (uint32_t i = 0; i < n; i++)
        if (kvant_part_channel(d, n, part, i) == channel)
            return i;
    return n;
}

bool kvant_rope_part_pairs(const kvant_rope *rope, uint32_t d, uint32_t n, uint32_t part,
                           kvant_pair *pairs)
{
    uint32_t found = 0, alone = n;
    for (uint32_t i = 0; i < n; i++) {
        bool second;
        const uint32_t channel = kvant_part_channel(d, n, part, i),
                       other = partner(rope, channel, &second);
        const uint32_t at = index_in_part(d, n, part, other);
        if (at == n)
            return false;
        if (at == i && alone < n) {
            pairs[found++] = (kvant_pair){ (uint16_t)alone, (uint16_t)i, 0 };
            alone = n;
        } else if (at == i) {
            alone = i;
        } else if (!second) {
            pairs[found++] =
                (kvant_pair){ (uint16_t)i, (uint16_t)at,
                              rope->frequencies[rope->interleaved ? channel / 2 : channel] };
        }
    }
    return alone == n;
}

bool kvant_rope_pairs(const kvant_rope *rope, uint32_t head_dim, kvant_pair *pairs)
{
    return kvant_rope_part_pairs(rope, head_dim, head_dim, 0, pairs);
}

kvant_rope kvant_rope_of_pairs(uint32_t n_dims, uint32_t interleaved, const kvant_pair *pairs,
                               uint32_t n, float *frequencies)
{
    for (uint32_t i = 0; i < n; i++)
        frequencies[i] = 0;
    for (uint32_t i = 0; i < n_dims / 2; i++)
        for (uint32_t pair = 0; pair < n; pair++)
            if (pairs[pair].first == (interleaved ? 2 * i : i))
                frequencies[i] = pairs[pair].frequency;
    return (kvant_rope){ .size = sizeof(kvant_rope),
                         .n_dims = n_dims,
                         .interleaved = interleaved,
                         .frequencies = frequencies };
}

uint32_t kvant_rope_bucket(const kvant_rope_state *rope_state, int32_t position)
{
    uint32_t bucket = 0;
    while (bucket + 1 < rope_state->n_buckets &&
           position >= (int32_t)(KVANT_FIRST_BUCKET << bucket))
        bucket++;
    return bucket;
}

/* If the last bucket is shorter than half of its length, its positions belong to the bucket
 * before. */
uint32_t kvant_rope_buckets(uint64_t n_positions)
{
    const uint64_t most = n_positions - n_positions / 4;
    uint32_t n = 1;
    while (n < KVANT_MOST_BUCKETS && most >= (uint64_t)KVANT_FIRST_BUCKET << (n - 1))
        n++;
    return n;
}

static uint32_t edge_of(const kvant_rope_state *rope_state, uint32_t bucket)
{
    return bucket == rope_state->n_buckets ? rope_state->n_positions
           : bucket                        ? KVANT_FIRST_BUCKET << (bucket - 1)
                                           : 0;
}

void kvant_rope_bucket_edges(const kvant_rope_state *rope_state, uint32_t bucket, int32_t edges[2])
{
    edges[0] = (int32_t)edge_of(rope_state, bucket);
    edges[1] = (int32_t)edge_of(rope_state, bucket + 1);
}

/* Returns NULL with *status KVANT_OK when the parts of a head cannot be rotated alone by this
 * RoPE. */
static kvant_rope_state *make_rope_state(const kvant_tensor *tensor, const kvant_rope *rope,
                                         kvant_status *status)
{
    const uint32_t d = tensor->head_dim, n = tensor->learning->part;
    const uint64_t slots =
        KVANT_PAGE_TOKENS *
        (uint64_t)(tensor->blocks_per_sequence ? tensor->blocks_per_sequence : tensor->n_blocks);
    const uint64_t positions = rope->n_positions ? rope->n_positions : slots;
    kvant_rope_state *rope_state = kvant_alloc(1, sizeof *rope_state);
    *status = rope_state ? KVANT_OK : KVANT_ERR_MEMORY;
    if (!rope_state)
        return NULL;
    *rope_state =
        (kvant_rope_state){ .n_dims = rope->n_dims,
                            .interleaved = rope->interleaved != 0,
                            .n_positions = positions < INT32_MAX ? (uint32_t)positions : INT32_MAX,
                            .n_position_transforms = rope->n_position_transforms,
                            .block_centers = rope->block_centers != 0,
                            .part = n };
    memcpy(rope_state->frequencies, rope->frequencies,
           rope->n_dims / 2 * sizeof *rope_state->frequencies);
    rope_state->n_buckets = kvant_rope_buckets(rope_state->n_positions);
    bool whole = true;
    for (uint32_t part = 0; part < d / n; part++)
        whole = whole && kvant_rope_part_pairs(rope, d, n, part, rope_state->pairs + part * n / 2);
    if (!whole)
        kvant_free(rope_state);
    return whole ? rope_state : NULL;
}

kvant_status kvant_tensor_set_rope(kvant_tensor *tensor, const kvant_rope *rope)
{
    kvant_rope r;
    kvant_status status = KVANT_OK;
    if (!tensor || (rope && !KVANT_ACCEPT_STRUCT(kvant_rope, &r, rope, n_position_transforms)))
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "rope: tensor is NULL, or the size field of rope is not set to sizeof(kvant_rope)");
    if (rope)
        KVANT_FORWARD(kvant_rope_check(&r, tensor->head_dim));
    if (rope && r.block_centers && tensor->device)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "rope: block_centers needs a tensor in the computer's memory");
    kvant_learning *l = tensor->learning;
    if (!l || kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V)
        return KVANT_OK;
    kvant_rope_state *rope_state = rope ? make_rope_state(tensor, &r, &status) : NULL;
    const bool same = l->rope && rope_state ? memcmp(l->rope, rope_state, sizeof *rope_state) == 0
                                            : l->rope == rope_state;
    if (!same && status == KVANT_OK) {
        kvant_learning_reset(tensor);
        kvant_free(l->rope);
        l->rope = rope_state;
        l->schedule.n_buckets = rope_state ? rope_state->n_buckets : 0;
        l->schedule.most = rope_state ? rope_state->n_position_transforms : 0;
    } else {
        kvant_free(rope_state);
    }
    return status;
}

kvant_status kvant_tensor_next_positions(kvant_tensor *tensor, const int32_t *positions, size_t n)
{
    KVANT_RETURN_IF(!tensor || (n && !positions), KVANT_ERR_ARGUMENT);
    if (tensor->learning) {
        tensor->learning->positions = positions;
        tensor->learning->n_positions = n;
    }
    return KVANT_OK;
}

/* Vectors */

void kvant_rope_rotation_begin(kvant_rope_rotation *rotation, const kvant_rope_state *rope_state,
                               uint32_t part)
{
    kvant_rope_rotation_over(rotation,
                             rope_state ? rope_state->pairs + part * rope_state->part / 2 : NULL,
                             rope_state ? rope_state->part / 2 : 0);
}

void kvant_rope_rotation_over(kvant_rope_rotation *rotation, const kvant_pair *pairs, uint32_t n)
{
    rotation->pairs = pairs;
    rotation->n = n;
    rotation->position = rotation->step = 0;
    rotation->halves = true;
    for (uint32_t i = 0; i < rotation->n; i++) {
        rotation->halves &=
            rotation->pairs[i].first == i && rotation->pairs[i].second == i + rotation->n;
        rotation->at.cosine[i] = rotation->by.cosine[i] = rotation->cosine[i] = 1;
        rotation->at.sine[i] = rotation->by.sine[i] = rotation->sine[i] = 0;
    }
}

void kvant_rope_rotation_expect(kvant_rope_rotation *rotation, int64_t step, const double *cosine,
                                const double *sine)
{
    rotation->step = step;
    memcpy(rotation->by.cosine, cosine, rotation->n * sizeof *cosine);
    memcpy(rotation->by.sine, sine, rotation->n * sizeof *sine);
}

static void move_to(kvant_rope_rotation *t, int64_t position)
{
    const int64_t step = position - t->position;
    for (uint32_t i = 0; i < t->n && step != t->step; i++)
        kvant_rope_sin_cos((double)step * t->pairs[i].frequency, &t->by.sine[i], &t->by.cosine[i]);
    t->step = step;
    t->position = position;
    for (uint32_t i = 0; i < t->n; i++) {
        const double cosine = t->at.cosine[i], sine = t->at.sine[i];
        t->at.cosine[i] = cosine * t->by.cosine[i] - sine * t->by.sine[i];
        t->at.sine[i] = cosine * t->by.sine[i] + sine * t->by.cosine[i];
    }
    for (uint32_t i = 0; i < t->n; i++) {
        t->cosine[i] = (float)t->at.cosine[i];
        t->sine[i] = (float)t->at.sine[i];
    }
}

/* This is a function because its `restrict` parameters let the compiler vectorise the loop. */
static void rotate_halves(uint32_t n, const float *restrict cosine, const float *restrict sine,
                          float *restrict first, float *restrict second)
{
    for (uint32_t i = 0; i < n; i++) {
        const float a = first[i], b = second[i];
        first[i] = a * cosine[i] + b * sine[i];
        second[i] = b * cosine[i] - a * sine[i];
    }
}

void kvant_rope_rotation_move(kvant_rope_rotation *t, int64_t position)
{
    if (t->n && position != t->position)
        move_to(t, position);
}

void kvant_rope_rotate_back(kvant_rope_rotation *t, int64_t position, float *x)
{
    kvant_rope_rotation_move(t, position);
    if (t->halves)
        rotate_halves(t->n, t->cosine, t->sine, x, x + t->n);
    for (uint32_t i = 0; i < t->n && !t->halves; i++)
        rotate_halves(1, t->cosine + i, t->sine + i, x + t->pairs[i].first, x + t->pairs[i].second);
}

/* Moments */

/* A list of position intervals between edges a_0 < a_1 < ..., all of which count the same. The mean
 * of e^(ipx) over them is the sum of share_m e^(i a_m x), divided by e^(ix) - 1. */
typedef struct series {
    const kvant_pair *pairs;
    uint32_t n, n_edges;
    double step; /* of positions; edges are in steps */
    double edge[KVANT_MOST_BUCKETS + 1], share[KVANT_MOST_BUCKETS + 1];
    complex_number *at; /* n_edges x n: each pair at each edge; then n: each pair at position 1 */
} series;

/* Computes shares and angles; the caller has set the edges. */
static kvant_status begin_series(series *s, const kvant_rope_state *rope_state, uint32_t part)
{
    const uint32_t n_parts = s->n_edges - 1;
    s->pairs = rope_state->pairs + part * rope_state->part / 2;
    s->n = rope_state->part / 2;
    s->at = kvant_alloc((s->n_edges + 1) * (size_t)s->n, sizeof *s->at);
    KVANT_RETURN_IF(!s->at, KVANT_ERR_MEMORY);
    for (uint32_t m = 0; m < n_parts; m++) {
        const double share = 1 / ((s->edge[m + 1] - s->edge[m]) * n_parts);
        s->share[m] -= share;
        s->share[m + 1] += share;
    }
    for (uint32_t m = 0; m <= s->n_edges; m++)
        for (uint32_t i = 0; i < s->n; i++)
            s->at[m * s->n + i] =
                unit((m < s->n_edges ? s->edge[m] : 1) * s->step * (double)s->pairs[i].frequency);
    return KVANT_OK;
}

/* The mean of e^(ip(f_i + f_k)), or with `minus` of e^(ip(f_i - f_k)). With k = n it is the mean of
 * e^(ipf_i). */
static complex_number mean_of(const series *s, uint32_t i, uint32_t k, bool minus)
{
    complex_number sum = { 0, 0 };
    const complex_number one = { 1, 0 };
    for (uint32_t m = 0; m < s->n_edges; m++) {
        const complex_number *at = s->at + m * s->n,
                             z = times(at[i], k < s->n ? conjugate(at[k], minus) : one);
        sum.re += s->share[m] * z.re;
        sum.im += s->share[m] * z.im;
    }
    const complex_number *at = s->at + s->n_edges * s->n,
                         z = times(at[i], k < s->n ? conjugate(at[k], minus) : one);
    const complex_number below = { z.re - 1, -z.im };
    const double size = below.re * below.re + below.im * below.im;
    if (size < NO_TURN * NO_TURN)
        return one;
    const complex_number product = times(sum, below);
    return (complex_number){ product.re / size, product.im / size };
}

static void rotate_mean(const kvant_pair *pair, complex_number by, double *mean)
{
    const complex_number z = times((complex_number){ mean[pair->first], mean[pair->second] }, by);
    mean[pair->first] = z.re;
    mean[pair->second] = z.im;
}

/* The rotations of two pairs: the means for frequencies f_i - f_k and f_i + f_k. */
typedef struct rotations {
    complex_number minus, plus;
} rotations;

struct kvant_rope_means {
    const kvant_pair *pairs;
    uint32_t n;
    complex_number *alone; /* by pair: the mean for f_i */
    rotations of[];        /* of pairs i and k <= i: row after row; `alone` follows */
};

kvant_status kvant_rope_means_new(const kvant_rope_state *rope_state, uint32_t part,
                                  kvant_bucket_span span, uint32_t step, kvant_rope_means **out)
{
    series s = { .n_edges = span.end - span.first + 1u, .step = step };
    for (uint32_t m = 0; m < s.n_edges; m++)
        s.edge[m] = (double)edge_of(rope_state, span.first + m) / step;
    KVANT_FORWARD(begin_series(&s, rope_state, part));
    const size_t n = s.n, n_both = n * (n + 1) / 2;
    kvant_rope_means *means = *out =
        kvant_alloc(1, sizeof *means + n_both * sizeof *means->of + n * sizeof *means->alone);
    if (means) {
        rotations *to = means->of;
        *means = (kvant_rope_means){ s.pairs, s.n, (complex_number *)(void *)(to + n_both) };
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t k = 0; k <= i; k++)
                *to++ = (rotations){ mean_of(&s, i, k, true), mean_of(&s, i, k, false) };
            means->alone[i] = mean_of(&s, i, s.n, false);
        }
    }
    kvant_free(s.at);
    return means ? KVANT_OK : KVANT_ERR_MEMORY;
}

void kvant_rope_means_free(kvant_rope_means *means)
{
    kvant_free(means);
}

/* Rotates the moments of pair x with pair y, but not of pair y with pair x, which are the same. In
 * the names a is the real part and b the imaginary part. */
static void rotate_block(const kvant_pair *x, const kvant_pair *y, const rotations *by, size_t d,
                         double *m)
{
    double *first = m + x->first * d, *second = m + x->second * d;
    const double aa = first[y->first], ab = first[y->second], ba = second[y->first],
                 bb = second[y->second];
    const complex_number minus = times((complex_number){ aa + bb, ba - ab }, by->minus),
                         plus = times((complex_number){ aa - bb, ba + ab }, by->plus);
    first[y->first] = (minus.re + plus.re) / 2;
    second[y->second] = (minus.re - plus.re) / 2;
    second[y->first] = (plus.im + minus.im) / 2;
    first[y->second] = (plus.im - minus.im) / 2;
}

/* Pairs whose moments are copied together, because a column of a large matrix does not stay in the
 * first-level cache. */
#define TOGETHER 8u

/* Copies the moments of pair i with pair k < i. Pair k has the same moments with pair i. */
static void mirror(const kvant_pair *pairs, uint32_t n, double *m)
{
    const size_t d = 2 * (size_t)n;
    for (uint32_t group = 0; group < n; group += TOGETHER)
        for (uint32_t k = 0; k < n; k++)
            for (uint32_t i = group > k ? group : k + 1; i < n && i < group + TOGETHER; i++) {
                const kvant_pair *x = &pairs[i], *y = &pairs[k];
                m[y->first * d + x->first] = m[x->first * d + y->first];
                m[y->second * d + x->second] = m[x->second * d + y->second];
                m[y->first * d + x->second] = m[x->second * d + y->first];
                m[y->second * d + x->first] = m[x->first * d + y->second];
            }
}

void kvant_rope_means_apply(const kvant_rope_means *means, double *mean, double *moments)
{
    const rotations *by = means->of;
    for (uint32_t i = 0; mean && i < means->n; i++)
        rotate_mean(&means->pairs[i], means->alone[i], mean);
    for (uint32_t i = 0; i < means->n; i++)
        for (uint32_t k = 0; k <= i; k++, by++)
            rotate_block(&means->pairs[i], &means->pairs[k], by, 2 * (size_t)means->n, moments);
    mirror(means->pairs, means->n, moments);
}

kvant_status kvant_rope_mean(const kvant_rope_state *rope_state, uint32_t part, int32_t first,
                             int32_t last, double *mean)
{
    series s = { .n_edges = 2, .step = 1, .edge = { first, last + 1.0 } };
    KVANT_FORWARD(begin_series(&s, rope_state, part));
    for (uint32_t i = 0; i < s.n; i++)
        rotate_mean(&s.pairs[i], mean_of(&s, i, s.n, false), mean);
    kvant_free(s.at);
    return KVANT_OK;
}
