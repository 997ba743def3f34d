/* selftest_reference.c - attention of `kvant selftest` in double precision over the rows that
 * portable C decodes, and how far from it a device may be.
 *
 * Owns that bound. An output is sum p_t v_t. A device errs in scores, by at most delta, so that its
 * probabilities are p'_t with |p'_t - p_t| <= p_t (e^(2 delta) - 1); and in numbers of values.
 * Since sum (p'_t - p_t) = 0, the output moves by at most
 *
 *     (e^(2 delta) - 1) sum p_t |v_t - out| + sqrt(head_dim) max e(v_t)
 *
 * e(y), per number of a row y in transformed space, is the most that a device errs. On GPUs
 * (docs/internals/cuda.md, "Accuracy"):
 *
 *   any row      2^-8 of its largest number: at most 5 roundings to fp16, 2^-11 each, of numbers,
 *                scales, zero points and weights below 1.5 times that; polar has 14: 2^-7
 *   byte levels  turboquant-2 to 4, hqmq, addvq. A level is off by at most half a step, and a step
 *                is at most 1 / (0.6 63) of the largest level, which is below 3.15 times the row's
 *                root mean square: 1/24. Tiers (turboquant-2.5) err as much: 3 2^-11 sqrt(d)
 *   sketches     2^-10 sqrt(pi/2) 1.5 sqrt(d) times the norm of what the codes leave, which is at
 *                most the row's: 2^-10 1.88 d times the root mean square, below 1/4 to d = 128
 *
 * On CPUs numbers of codebooks are integers of 12 bits: they are off by at most 1.2 times the
 * larger of 4 3.75 / 4095 and 1.5 sqrt(d) / 4095 of the root mean square
 * (tests/unit/attention_setup.c), 1/128.
 *
 * With q the transformed query, delta is scale times the sum of these, each the largest of all rows
 * of the kv head:
 *
 *   e(y) |q|_1                    errors of keys
 *   2^-12 unit |y|_1              GPUs round queries to fp16; unit: the power of two above max |q|
 *   |q| d (2^-19 |y|_1 + 4/3 max |y| / 32639)   CPUs round them to integers (attention_setup.c)
 *   (d + 40) 2^-22 |q| |y|        sums in binary32, on tensor cores truncated
 *
 * CPUs also round weights to integers: half a step of the page's largest weight / 8192, in 64 slots
 * with rows at most 8 times as long as the longest.
 *
 * Queries are made so that this bound is sharp. A query is a key of the cache times a factor that
 * makes its own score 32, or zeros. With the former one token has nearly all the weight, and a
 * wrong page, token or channel of keys or values shows in full. With zeros all weights are equal,
 * delta is 0, and the log-sum-exp is the logarithm of the number of tokens that were seen. */
#include "selftest.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TARGET_SCORE 32.0

/* The calls that engines make: one token, a short step, and two chunks of a prompt. GPUs have a
 * kernel for each size. A kv head has 4, 32, 128 or 512 query rows. */
static const struct {
    uint32_t n_queries, step;
} shapes[TEST_CALLS] = { { 1, 1 }, { 8, 1 }, { 32, 2 }, { 128, 4 } };

/* The largest of all rows of a kv head. */
typedef struct row_size {
    double sum, length, largest; /* |y|_1, |y|, max |y| */
    double error[2];             /* e(y) of the head comment: on GPUs, on CPUs */
} row_size;

typedef struct reference {
    const test_problem *p;
    float *keys; /* decoded keys less their centre */
    row_size sizes[2][TEST_KV_HEADS];
    double longest; /* value */
} reference;

static bool begins(const char *spec, const char *word)
{
    return strncmp(spec, word, strlen(word)) == 0;
}

/* e(y) on GPUs: shares of the row's root mean square and of its largest number. */
static void find_gpu_error(const char *spec, double *mean, double *largest)
{
    static const char *const bytes[] = { "turboquant-2", "turboquant-3", "turboquant-4", "hqmq-",
                                         "addvq-" };
    *mean = 0, *largest = begins(spec, "polar-") ? 0x1p-7 : 0x1p-8;
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        *mean = begins(spec, bytes[i]) ? 1.0 / 24 : *mean;
    if (begins(spec, "spherical-") || strstr(spec, "qjl") != NULL)
        *mean = 0.25;
}

static void measure_row(row_size *s, const float *y, uint32_t d, double mean, double largest)
{
    double sum = 0, square = 0, top = 0;
    for (uint32_t j = 0; j < d; j++) {
        const double number = fabs((double)y[j]);
        sum += number;
        square += number * number;
        top = fmax(top, number);
    }
    const double length = sqrt(square);
    s->sum = fmax(s->sum, sum);
    s->length = fmax(s->length, length);
    s->largest = fmax(s->largest, top);
    s->error[TEST_ON_GPU] = fmax(s->error[TEST_ON_GPU], mean * length / sqrt(d) + largest * top);
    s->error[TEST_ON_CPU] = fmax(s->error[TEST_ON_CPU], length / sqrt(d) / 128);
}

/* Rows in transformed space: sums over a page with the weight 1 for one token. */
static bool measure_page(reference *r, kvant_role role, uint32_t block, uint32_t head)
{
    const test_problem *p = r->p;
    const uint32_t d = p->pair.head_dim;
    double mean, largest;
    float *y = calloc((size_t)64 * d + 64 * 64, sizeof *y), *weights = y + (size_t)64 * d;
    if (y == NULL)
        return false;
    for (uint32_t t = 0; t < 64; t++)
        weights[t * 64 + t] = 1;
    kvant_codec_accumulate(p->codec[role][head], p->pages + test_page_at(p, role, block, head),
                           weights, 64, y, d);
    find_gpu_error(role == KVANT_ROLE_K ? p->pair.k : p->pair.v, &mean, &largest);
    for (uint32_t t = 0; t < 64; t++)
        measure_row(&r->sizes[role][head], y + t * d, d, mean, largest);
    free(y);
    return true;
}

static double distance(const float *value, const double *out, uint32_t d)
{
    double square = 0;
    for (uint32_t j = 0; j < d; j++)
        square += (value[j] - out[j]) * (value[j] - out[j]);
    return sqrt(square);
}

/* Decoded keys less their centre, and the sizes that bound the errors. */
static bool measure(reference *r)
{
    static const double zeros[KVANT_MAX_HEAD_DIM];
    const test_problem *p = r->p;
    const uint32_t d = p->pair.head_dim;
    for (size_t i = 0; i < (size_t)TEST_ROWS * TEST_KV_HEADS * d; i++) {
        const float *center = p->affine[KVANT_ROLE_K][i / d % TEST_KV_HEADS].center;
        r->keys[i] = p->decoded[KVANT_ROLE_K][i] - (center != NULL ? center[i % d] : 0);
    }
    for (uint32_t i = 0; i < TEST_ROWS * TEST_KV_HEADS; i++)
        r->longest = fmax(r->longest, distance(p->decoded[KVANT_ROLE_V] + (size_t)i * d, zeros, d));
    bool ok = true;
    for (uint32_t i = 0; ok && i < 2 * TEST_BLOCKS * TEST_KV_HEADS; i++)
        ok = measure_page(r, (kvant_role)(i % 2), i / 2 / TEST_KV_HEADS, i / 2 % TEST_KV_HEADS);
    return ok;
}

/* A query that looks for one of the n tokens that it sees, or has equal scores everywhere. */
static void make_query(const reference *r, float *q, uint32_t query, uint32_t head, uint32_t n)
{
    const uint32_t d = r->p->pair.head_dim, target = (query * 61 + head * 17 + 5) % n;
    const float *key = r->keys + ((size_t)target * TEST_KV_HEADS + head / TEST_GROUP) * d;
    double square = 1e-30;
    for (uint32_t j = 0; j < d; j++)
        square += (double)key[j] * key[j];
    for (uint32_t j = 0; (query + head) % 4 != 3 && j < d; j++)
        q[j] = test_cut(TARGET_SCORE * sqrt(d) / square * key[j]);
}

/* The largest error of a score, delta, on GPUs and on CPUs. */
static void score_errors(const reference *r, const float *q, uint32_t kv, double *delta)
{
    const uint32_t d = r->p->pair.head_dim;
    const row_size *keys = &r->sizes[KVANT_ROLE_K][kv];
    float y[KVANT_MAX_HEAD_DIM];
    row_size s = { 0 };
    kvant_codec_transform_query(r->p->codec[KVANT_ROLE_K][kv], &r->p->affine[KVANT_ROLE_K][kv], q,
                                y);
    measure_row(&s, y, d, 0, 0);
    const double unit = s.largest > 0 ? exp2(floor(log2(s.largest)) + 1) : 0;
    const double rounding[] = {
        [TEST_ON_GPU] = 0x1p-12 * unit * keys->sum,
        [TEST_ON_CPU] = s.length * d * (0x1p-19 * keys->sum + 4.0 / 3 * keys->largest / 32639)
    };
    for (int i = 0; i < 2; i++)
        delta[i] =
            (keys->error[i] * s.sum + rounding[i] + (d + 40) * 0x1p-22 * s.length * keys->length) /
            sqrt(d);
}

/* Fills weights with probabilities; returns the log-sum-exp. */
static double soften(const reference *r, const float *q, uint32_t kv, uint32_t n, double *weights)
{
    const uint32_t d = r->p->pair.head_dim;
    double top = -INFINITY, total = 0;
    for (uint32_t t = 0; t < n; t++) {
        const float *key = r->keys + ((size_t)t * TEST_KV_HEADS + kv) * d;
        double sums[4] = { 0, 0, 0, 0 };
        for (uint32_t j = 0; j < d; j++)
            sums[j % 4] += (double)q[j] * key[j];
        weights[t] = (sums[0] + sums[1] + sums[2] + sums[3]) / sqrt(d);
        top = fmax(top, weights[t]);
    }
    for (uint32_t t = 0; t < n; t++)
        total += weights[t] = exp(weights[t] - top);
    for (uint32_t t = 0; t < n; t++)
        weights[t] /= total;
    return top + log(total);
}

static void attend(const reference *r, const float *q, uint32_t head, uint32_t n, double *out,
                   test_output *o)
{
    const uint32_t d = r->p->pair.head_dim, kv = head / TEST_GROUP;
    const size_t stride = (size_t)TEST_KV_HEADS * d;
    const float *values = r->p->decoded[KVANT_ROLE_V] + kv * d;
    const float *center = r->p->affine[KVANT_ROLE_K][kv].center;
    double weights[TEST_ROWS], delta[2];
    double spread = 0;          /* sum p_t |v_t - out| */
    double peaks = 0, peak = 0; /* the sum over pages of the largest probability */
    o->lse = soften(r, q, kv, n, weights);
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < d; j++)
            out[j] += weights[t] * values[t * stride + j];
    for (uint32_t j = 0; center != NULL && j < d; j++)
        o->center += (double)q[j] * center[j] / sqrt(d);
    for (uint32_t t = 0; t < n; t++) {
        spread += weights[t] * distance(values + t * stride, out, d);
        peak = t % 64 ? fmax(peak, weights[t]) : weights[t];
        peaks += t % 64 == 63 || t + 1 == n ? peak : 0;
    }
    score_errors(r, q, kv, delta);
    for (int i = 0; i < 2; i++) {
        const double integers = i == TEST_ON_CPU ? 64.0 / 2 / 8192 * peaks * 8 * r->longest : 0;
        o->bound[i] = (exp(2 * delta[i]) - 1) * spread +
                      sqrt(d) * r->sizes[KVANT_ROLE_V][kv].error[i] + integers;
        o->lse_bound[i] = delta[i] + (n + 40) * 0x1p-23 * (1 + fabs(o->lse) + fabs(o->center));
    }
}

static bool make_call(const reference *r, test_call *c, size_t which)
{
    const uint32_t d = r->p->pair.head_dim;
    c->n_queries = shapes[which].n_queries, c->step = shapes[which].step;
    const size_t rows = (size_t)c->n_queries / c->step * TEST_HEADS;
    c->q = calloc((size_t)c->n_queries * TEST_HEADS * d, sizeof *c->q);
    c->out = calloc(rows * d, sizeof *c->out);
    c->outputs = calloc(rows, sizeof *c->outputs);
    if (c->q == NULL || c->out == NULL || c->outputs == NULL)
        return false;
    for (uint32_t i = 0; i < c->n_queries * TEST_HEADS; i++) {
        const uint32_t query = i / TEST_HEADS, head = i % TEST_HEADS;
        const uint32_t n = TEST_TOKENS - c->n_queries + query + 1;
        const size_t row = (size_t)(query / c->step) * TEST_HEADS + head;
        make_query(r, c->q + (size_t)i * d, query, head, n);
        if (query % c->step == c->step - 1)
            attend(r, c->q + (size_t)i * d, head, n, c->out + row * d, &c->outputs[row]);
    }
    return true;
}

bool test_calls_make(test_problem *p)
{
    const size_t n = (size_t)TEST_ROWS * TEST_KV_HEADS * p->pair.head_dim;
    reference r = { .p = p, .keys = malloc(n * sizeof *r.keys) };
    bool ok = r.keys != NULL && measure(&r);
    for (size_t i = 0; ok && i < TEST_CALLS; i++)
        ok = make_call(&r, &p->calls[i], i);
    free(r.keys);
    return ok;
}
