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
 * With q the transformed query, delta is scale times the largest over tokens of
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

/* Calls of engines: one token, a short step, two chunks of a prompt. GPUs have kernels for each:
 * query rows of a kv head are 4, 32, 128 and 512. */
static const struct {
    uint32_t n_queries, step;
} shapes[TEST_CALLS] = { { 1, 1 }, { 8, 1 }, { 32, 2 }, { 128, 4 } };

/* A row of keys or values. */
typedef struct row_size {
    double sum, length, largest; /* |y|_1, |y|, max |y| */
    double error[2];             /* e(y) of the head comment: on GPUs, on CPUs */
} row_size;

typedef struct reference {
    const test_problem *p;
    float *keys;        /* decoded keys less their centre */
    row_size *sizes[2]; /* per row and kv head */
    double *weights;
    double longest; /* value */
} reference;

static bool begins(const char *spec, const char *word)
{
    return strncmp(spec, word, strlen(word)) == 0;
}

/* e(y) on GPUs: shares of the row's root mean square and of its largest number. */
typedef struct gpu_error {
    double mean, largest;
} gpu_error;

static gpu_error gpu_error_of(const char *spec)
{
    static const char *const bytes[] = { "turboquant-2", "turboquant-3", "turboquant-4", "hqmq-",
                                         "addvq-" };
    gpu_error e = { 0, begins(spec, "polar-") ? 0x1p-7 : 0x1p-8 };
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        e.mean = begins(spec, bytes[i]) ? 1.0 / 24 : e.mean;
    if (begins(spec, "spherical-") || strstr(spec, "qjl") != NULL)
        e.mean = 0.25;
    return e;
}

/* Rows in transformed space: sums over a page with the weight 1 for one token. */
static bool measure_page(reference *r, kvant_role role, uint32_t block, uint32_t head)
{
    const test_problem *p = r->p;
    const uint32_t d = p->pair.head_dim;
    const gpu_error gpu = gpu_error_of(role == KVANT_ROLE_K ? p->pair.k : p->pair.v);
    float *y = calloc((size_t)64 * d + 64 * 64, sizeof *y), *weights = y + (size_t)64 * d;
    for (uint32_t t = 0; y != NULL && t < 64; t++)
        weights[t * 64 + t] = 1;
    if (y != NULL)
        kvant_codec_accumulate(p->codec[role][head],
                               p->pages[role] + test_page_at(p, role, block, head), weights, 64, y,
                               d);
    for (uint32_t t = 0; y != NULL && t < 64; t++) {
        row_size s = { 0 };
        for (uint32_t j = 0; j < d; j++) {
            const double number = fabs((double)y[t * d + j]);
            s.sum += number;
            s.length += number * number;
            s.largest = fmax(s.largest, number);
        }
        s.length = sqrt(s.length);
        s.error[TEST_ON_GPU] = gpu.mean * s.length / sqrt(d) + gpu.largest * s.largest;
        s.error[TEST_ON_CPU] = s.length / sqrt(d) / 128;
        r->sizes[role][(block * 64 + t) * TEST_KV_HEADS + head] = s;
    }
    free(y);
    return y != NULL;
}

/* The token that a query looks for, of n; -1: it has equal scores everywhere. */
static int32_t target_of(uint32_t query, uint32_t head, uint32_t n)
{
    return (query + head) % 4 == 3 ? -1 : (int32_t)((query * 61 + head * 17 + 5) % n);
}

static uint32_t seen_by(const test_call *c, uint32_t query)
{
    return TEST_TOKENS - c->n_queries + query + 1;
}

static void make_query(const reference *r, const test_call *c, uint32_t query, uint32_t head)
{
    const uint32_t d = r->p->pair.head_dim;
    float *q = c->q + ((size_t)query * TEST_HEADS + head) * d;
    const int32_t target = target_of(query, head, seen_by(c, query));
    if (target < 0)
        return;
    const float *key = r->keys + ((size_t)target * TEST_KV_HEADS + head / TEST_GROUP) * d;
    double square = 1e-30;
    for (uint32_t j = 0; j < d; j++)
        square += (double)key[j] * key[j];
    for (uint32_t j = 0; j < d; j++)
        q[j] = test_cut(TARGET_SCORE * sqrt(d) / square * key[j]);
}

/* The largest error of a score, delta, on GPUs and on CPUs. */
static void score_errors(const reference *r, const float *q, uint32_t kv, uint32_t n, double *delta)
{
    const uint32_t d = r->p->pair.head_dim;
    float y[KVANT_MAX_HEAD_DIM];
    double sum = 0, square = 0, largest = 0;
    kvant_codec_transform_query(r->p->codec[KVANT_ROLE_K][kv], &r->p->affine[KVANT_ROLE_K][kv], q,
                                y);
    for (uint32_t j = 0; j < d; j++) {
        sum += fabs((double)y[j]);
        square += (double)y[j] * y[j];
        largest = fmax(largest, fabs((double)y[j]));
    }
    const double length = sqrt(square), unit = largest > 0 ? exp2(floor(log2(largest)) + 1) : 0;
    delta[TEST_ON_GPU] = delta[TEST_ON_CPU] = 0;
    for (uint32_t t = 0; t < n; t++) {
        const row_size *key = &r->sizes[KVANT_ROLE_K][t * TEST_KV_HEADS + kv];
        const double sums = (d + 40) * 0x1p-22 * length * key->length;
        const double halves = 0x1p-12 * unit * key->sum;
        const double integers =
            0x1p-19 * d * length * key->sum + length * d * 4 / 3 * key->largest / 32639;
        delta[TEST_ON_GPU] =
            fmax(delta[TEST_ON_GPU], (key->error[TEST_ON_GPU] * sum + halves + sums) / sqrt(d));
        delta[TEST_ON_CPU] =
            fmax(delta[TEST_ON_CPU], (key->error[TEST_ON_CPU] * sum + integers + sums) / sqrt(d));
    }
}

/* Fills r->weights with probabilities; returns the log-sum-exp. */
static double soften(const reference *r, const float *q, uint32_t kv, uint32_t n)
{
    const uint32_t d = r->p->pair.head_dim;
    double top = -INFINITY, total = 0;
    for (uint32_t t = 0; t < n; t++) {
        const float *key = r->keys + ((size_t)t * TEST_KV_HEADS + kv) * d;
        double sums[4] = { 0, 0, 0, 0 };
        for (uint32_t j = 0; j < d; j++)
            sums[j % 4] += (double)q[j] * key[j];
        r->weights[t] = (sums[0] + sums[1] + sums[2] + sums[3]) / sqrt(d);
        top = fmax(top, r->weights[t]);
    }
    for (uint32_t t = 0; t < n; t++)
        total += r->weights[t] = exp(r->weights[t] - top);
    for (uint32_t t = 0; t < n; t++)
        r->weights[t] /= total;
    return top + log(total);
}

static const float *value_at(const reference *r, uint32_t t, uint32_t kv)
{
    return r->p->decoded[KVANT_ROLE_V] + ((size_t)t * TEST_KV_HEADS + kv) * r->p->pair.head_dim;
}

static double distance(const float *value, const double *out, uint32_t d)
{
    double square = 0;
    for (uint32_t j = 0; j < d; j++)
        square += (value[j] - out[j]) * (value[j] - out[j]);
    return sqrt(square);
}

/* What bounds the error of an output, beside delta. */
typedef struct weighted {
    double spread;   /* sum p_t |v_t - out| */
    double error[2]; /* the largest e(v_t) */
    double peaks;    /* the sum over pages of the largest probability */
} weighted;

static weighted weigh(const reference *r, const double *out, uint32_t kv, uint32_t n)
{
    weighted w = { 0 };
    double peak = 0;
    for (uint32_t t = 0; t < n; t++) {
        const row_size *value = &r->sizes[KVANT_ROLE_V][t * TEST_KV_HEADS + kv];
        w.spread += r->weights[t] * distance(value_at(r, t, kv), out, r->p->pair.head_dim);
        for (int i = 0; i < 2; i++)
            w.error[i] = fmax(w.error[i], value->error[i]);
        peak = t % 64 ? fmax(peak, r->weights[t]) : r->weights[t];
        w.peaks += t % 64 == 63 || t + 1 == n ? peak : 0;
    }
    return w;
}

static void attend(const reference *r, test_call *c, uint32_t query, uint32_t head)
{
    const uint32_t d = r->p->pair.head_dim, kv = head / TEST_GROUP, n = seen_by(c, query);
    const size_t row = (size_t)(query / c->step) * TEST_HEADS + head;
    const float *q = c->q + ((size_t)query * TEST_HEADS + head) * d;
    const float *center = r->p->affine[KVANT_ROLE_K][kv].center;
    double *out = c->out + row * d, delta[2];
    c->lse[row] = soften(r, q, kv, n);
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < d; j++)
            out[j] += r->weights[t] * value_at(r, t, kv)[j];
    for (uint32_t j = 0; center != NULL && j < d; j++)
        c->center[row] += (double)q[j] * center[j] / sqrt(d);
    const weighted w = weigh(r, out, kv, n);
    score_errors(r, q, kv, n, delta);
    for (int i = 0; i < 2; i++) {
        const double integers = i == TEST_ON_CPU ? 64.0 / 2 / 8192 * w.peaks * 8 * r->longest : 0;
        c->bound[i][row] = (exp(2 * delta[i]) - 1) * w.spread + sqrt(d) * w.error[i] + integers;
        c->lse_bound[i][row] =
            delta[i] + (n + 40) * 0x1p-23 * (1 + fabs(c->lse[row]) + fabs(c->center[row]));
    }
}

static bool allocate_call(test_call *c, size_t which, uint32_t d)
{
    c->n_queries = shapes[which].n_queries, c->step = shapes[which].step;
    const size_t rows = (size_t)c->n_queries / c->step * TEST_HEADS;
    c->q = calloc((size_t)c->n_queries * TEST_HEADS * d, sizeof *c->q);
    c->out = calloc(rows * d, sizeof *c->out);
    c->lse = calloc(6 * rows, sizeof *c->lse);
    if (c->q == NULL || c->out == NULL || c->lse == NULL)
        return false;
    c->center = c->lse + rows;
    for (int i = 0; i < 2; i++) {
        c->bound[i] = c->center + (1 + (size_t)i) * rows;
        c->lse_bound[i] = c->center + (3 + (size_t)i) * rows;
    }
    return true;
}

static bool make_call(const reference *r, test_call *c, size_t which)
{
    if (!allocate_call(c, which, r->p->pair.head_dim))
        return false;
    for (uint32_t i = 0; i < c->n_queries; i++)
        for (uint32_t head = 0; head < TEST_HEADS; head++) {
            make_query(r, c, i, head);
            if (i % c->step == c->step - 1)
                attend(r, c, i, head);
        }
    return true;
}

/* Decoded keys less their centre, and what bounds the errors of rows. */
static bool measure(reference *r)
{
    const test_problem *p = r->p;
    const uint32_t d = p->pair.head_dim;
    for (size_t i = 0; i < (size_t)TEST_ROWS * TEST_KV_HEADS * d; i++) {
        const float *center = p->affine[KVANT_ROLE_K][i / d % TEST_KV_HEADS].center;
        r->keys[i] = p->decoded[KVANT_ROLE_K][i] - (center != NULL ? center[i % d] : 0);
    }
    for (uint32_t i = 0; i < 2 * TEST_BLOCKS * TEST_KV_HEADS; i++)
        if (!measure_page(r, (kvant_role)(i % 2), i / 2 / TEST_KV_HEADS, i / 2 % TEST_KV_HEADS))
            return false;
    static const double zeros[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < TEST_ROWS * TEST_KV_HEADS; i++)
        r->longest = fmax(r->longest, distance(p->decoded[KVANT_ROLE_V] + (size_t)i * d, zeros, d));
    return true;
}

bool test_calls_make(test_problem *p)
{
    const size_t n = (size_t)TEST_ROWS * TEST_KV_HEADS;
    reference r = { .p = p,
                    .keys = malloc(n * p->pair.head_dim * sizeof *r.keys),
                    .sizes = { malloc(n * sizeof(row_size)), malloc(n * sizeof(row_size)) },
                    .weights = malloc(TEST_ROWS * sizeof *r.weights) };
    bool ok = r.keys != NULL && r.sizes[0] != NULL && r.sizes[1] != NULL && r.weights != NULL &&
              measure(&r);
    for (size_t i = 0; ok && i < TEST_CALLS; i++)
        ok = make_call(&r, &p->calls[i], i);
    free(r.keys);
    free(r.sizes[0]);
    free(r.sizes[1]);
    free(r.weights);
    return ok;
}
