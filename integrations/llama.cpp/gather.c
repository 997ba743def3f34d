/* gather.c - see gather.h.
 *
 * A monotonous prompt must not become a calibration. Layer 0 makes a token's value of the token
 * alone, so its signs tell tokens apart: a token counts 64 times at most, and of 1024 tokens 192 are
 * different ones. (Learnt from 130, 8 times each, keys and values lose 1.3 times as much; Python's
 * help texts have 260.) Few rows say little of what two channels have in common, so sums beside the
 * diagonal count n / (n + d / 2). */
#define _GNU_SOURCE /* pthread_timedjoin_np, pthread_tryjoin_np */

#include "gather.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <kvant/executor.h>

#include "log.h"

#define WANTED 1024u /* tokens */
#define ENOUGH 512u  /* when a run ends */
#define LEAST_DIFFERENT 192u /* of the tokens that are wanted, in proportion of fewer */
#define MOST_ALIKE 64u
#define EVERY 2u       /* a token counts */
#define LEAST_BATCH 32u
#define MOST_BYTES ((size_t)64 << 20) /* of sums; the file has 5/4 of it */
#define PATIENCE 10 /* seconds, at the end of a context */

#define PLACES (4 * WANTED) /* of kinds of tokens */
#define KIND_NUMBERS 128u
#define BLOCK 8u /* rows of a step */

/* Keys or values of a layer. Sums are about the origin, a row. */
struct slot {
    uint32_t n_kv_heads, head_dim; /* 0: nothing was seen */
    uint32_t n_rows, n_queries;    /* per kv head */
    float *origin, *sum, *min, *max;
    float *spread, *moment; /* keys: lower triangles of sums of outer products of keys and queries */
};

struct kind {
    uint64_t hash;
    uint32_t n;
};

struct kvp_gather {
    kvp_learnt learnt;
    struct slot (*slots)[2]; /* by role */
    uint32_t n_layers, first; /* layer: the first one of a batch */
    size_t bytes;
    /* The batch at hand: its tokens, and which of them count. */
    size_t n_batch;
    uint32_t *chosen, n_chosen, most_chosen;
    uint32_t n_tokens, n_different, phase;
    struct kind kinds[PLACES];
    enum { GATHERS, MAKES, ENDED } state;
    pthread_t thread;
    bool quick;        /* nobody computes beside it */
    char said[1024];   /* of the calibration; told between answers */
};

kvp_gather *kvp_gather_create(const kvp_learnt *learnt)
{
    kvp_gather *g = calloc(1, sizeof(*g));

    if (g == NULL)
        return NULL;
    g->learnt = *learnt;
    g->first = UINT32_MAX;
    return g;
}

static void free_sums(kvp_gather *g)
{
    for (uint32_t layer = 0; layer < g->n_layers; layer++)
        for (int role = 0; role < 2; role++)
            free(g->slots[layer][role].origin);
    free(g->slots);
    free(g->chosen);
    g->slots = NULL;
    g->chosen = NULL;
    g->n_layers = 0;
}

/* Nothing more is gathered. */
static void give_up(kvp_gather *g, const char *why)
{
    kvp_note("nothing is learnt: %s", why);
    free_sums(g);
    g->state = ENDED;
}

/* Which tokens count */

static uint64_t kind_of(const float *row, uint32_t width)
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (uint32_t i = 0; i < width && i < KIND_NUMBERS; i++)
        hash = (hash ^ (uint64_t)(row[i] < 0)) * 0x100000001b3u;
    return hash | 1;
}

static bool counts(kvp_gather *g, uint64_t hash)
{
    size_t at = hash % PLACES;

    while (g->kinds[at].n != 0 && g->kinds[at].hash != hash)
        at = (at + 1) % PLACES;
    if (g->kinds[at].n != 0 && (g->kinds[at].n >= MOST_ALIKE || g->n_tokens - g->n_different >= WANTED - LEAST_DIFFERENT))
        return false;
    g->n_different += g->kinds[at].n == 0;
    g->kinds[at] = (struct kind){ hash, g->kinds[at].n + 1 };
    g->n_tokens++;
    return true;
}

static void choose(kvp_gather *g, const kvp_rows *values, size_t n)
{
    g->n_batch = n;
    g->n_chosen = 0;
    if (n > g->most_chosen) {
        free(g->chosen);
        g->chosen = malloc(n * sizeof(*g->chosen));
        g->most_chosen = g->chosen != NULL ? (uint32_t)n : 0;
    }
    for (size_t i = g->phase++ % EVERY; i < n && n <= g->most_chosen && g->n_tokens < WANTED; i += EVERY)
        if (counts(g, kind_of(values->at + i * values->stride, values->kv->shape.row)))
            g->chosen[g->n_chosen++] = (uint32_t)i;
}

/* Sums */

static size_t triangle(uint32_t d)
{
    return (size_t)d * (d + 1) / 2;
}

static bool start_slot(kvp_gather *g, struct slot *s, const kvp_kv *kv)
{
    const bool keys = kv->shape.role == KVANT_ROLE_K;
    const size_t row = kv->shape.row, heads = row / kv->head_dim;
    const size_t n = 4 * row + (keys ? 2 * heads * triangle(kv->head_dim) : 0);

    g->bytes += n * sizeof(float);
    s->origin = g->bytes <= MOST_BYTES ? calloc(n, sizeof(float)) : NULL;
    if (s->origin == NULL)
        return false;
    s->n_kv_heads = (uint32_t)heads;
    s->head_dim = kv->head_dim;
    s->sum = s->origin + row;
    s->min = s->sum + row;
    s->max = s->min + row;
    s->spread = keys ? s->max + row : NULL;
    s->moment = keys ? s->spread + heads * triangle(kv->head_dim) : NULL;
    return true;
}

/* The tensor's, made when it is needed; NULL without memory. */
static struct slot *slot_of(kvp_gather *g, const kvp_kv *kv)
{
    const uint32_t layer = kv->shape.layer;

    if (layer >= g->n_layers) {
        void *larger = realloc(g->slots, (layer + 1) * sizeof(*g->slots));
        if (larger == NULL)
            return NULL;
        g->slots = larger;
        memset(g->slots + g->n_layers, 0, (layer + 1 - g->n_layers) * sizeof(*g->slots));
        g->n_layers = layer + 1;
    }
    struct slot *s = &g->slots[layer][kv->shape.role];
    return s->head_dim != 0 || start_slot(g, s, kv) ? s : NULL;
}

/* sums += x x^T of n rows, a multiple of 4, in the lower triangle. */
static void add_products(float *restrict sums, const float *restrict x, uint32_t n, uint32_t d)
{
    for (uint32_t r = 0; r < n; r += 4) {
        const float *x0 = x + (size_t)r * d, *x1 = x0 + d, *x2 = x1 + d, *x3 = x2 + d;
        float *row = sums;
        for (uint32_t i = 0; i < d; row += ++i)
            for (uint32_t j = 0; j <= i; j++)
                row[j] += x0[i] * x0[j] + x1[i] * x1[j] + x2[i] * x2[j] + x3[i] * x3[j];
    }
}

/* A loop over the kv heads of a layer on llama.cpp's threads, where they are lent. */
struct job {
    const kvp_gather *gather;
    struct slot *slot;
    const float *rows; /* row t of head h at rows + t * stride + h * head_stride */
    size_t stride, head_stride;
    const abi_tensor *q; /* instead of rows */
    atomic_uint next;
};

static const float *row_of(const struct job *job, uint32_t head, uint32_t c)
{
    const uint32_t token = job->gather->chosen[c];
    const abi_tensor *q = job->q;

    if (q == NULL)
        return job->rows + token * job->stride + head * job->head_stride;
    const uint32_t n_shared = (uint32_t)q->ne[2] / job->slot->n_kv_heads; /* their query heads take turns */
    return (const float *)(const void *)((const char *)q->data + token / (size_t)q->ne[1] * q->nb[3] +
                                         token % (size_t)q->ne[1] * q->nb[1] + (head * n_shared + c % n_shared) * q->nb[2]);
}

static void add_range(struct slot *s, uint32_t head, const float *x, bool first)
{
    float *sum = s->sum + head * s->head_dim, *min = s->min + head * s->head_dim, *max = s->max + head * s->head_dim;

    for (uint32_t j = 0; j < s->head_dim; j++) {
        sum[j] += x[j];
        min[j] = first || x[j] < min[j] ? x[j] : min[j];
        max[j] = first || x[j] > max[j] ? x[j] : max[j];
    }
}

static void add_head(const struct job *job, uint32_t head)
{
    struct slot *s = job->slot;
    const uint32_t d = s->head_dim, n = job->gather->n_chosen;
    const float *origin = s->origin + head * d;
    float block[BLOCK * KVANT_MAX_HEAD_DIM], *sums = job->q != NULL ? s->moment : s->spread;

    for (uint32_t first = 0; first < n; first += BLOCK) {
        memset(block, 0, sizeof(block));
        for (uint32_t r = 0; r < BLOCK && first + r < n; r++) {
            const float *x = row_of(job, head, first + r);
            for (uint32_t j = 0; j < d; j++)
                block[r * d + j] = job->q != NULL ? x[j] : x[j] - origin[j];
            if (job->q == NULL)
                add_range(s, head, block + r * d, s->n_rows + first + r == 0);
        }
        if (sums != NULL)
            add_products(sums + head * triangle(d), block, BLOCK, d);
    }
}

static void add_heads(void *user, uint32_t worker)
{
    struct job *job = user;

    (void)worker;
    for (uint32_t head = atomic_fetch_add(&job->next, 1); head < job->slot->n_kv_heads; head = atomic_fetch_add(&job->next, 1))
        add_head(job, head);
}

static void add_layer(struct job *job)
{
    const kvant_executor *lender = kvant_use_executor(NULL);

    kvant_use_executor(lender);
    if (lender != NULL && job->slot->n_kv_heads > 1)
        lender->run(lender->context, job->slot->n_kv_heads, add_heads, job);
    add_heads(job, 0);
}

static bool add_rows(kvp_gather *g, const kvp_rows *rows)
{
    struct slot *s = slot_of(g, rows->kv);

    if (s == NULL)
        return false;
    if (s->n_rows == 0)
        memcpy(s->origin, rows->at + g->chosen[0] * rows->stride, rows->kv->shape.row * sizeof(float));
    add_layer(&(struct job){ .gather = g, .slot = s, .rows = rows->at, .stride = rows->stride, .head_stride = s->head_dim });
    s->n_rows += g->n_chosen;
    return true;
}

void kvp_gather_queries(kvp_gather *g, const kvp_kv *keys, const abi_tensor *q)
{
    const uint32_t layer = keys->shape.layer;

    if (g == NULL || g->state != GATHERS || g->n_chosen == 0 || layer >= g->n_layers ||
        (uint64_t)(q->ne[1] * q->ne[3]) != g->n_batch || g->slots[layer][KVANT_ROLE_K].head_dim != q->ne[0])
        return;
    struct slot *s = &g->slots[layer][KVANT_ROLE_K];
    add_layer(&(struct job){ .gather = g, .slot = s, .q = q });
    s->n_queries += g->n_chosen;
}

/* The calibration */

/* As matrices about 0, which add up: damped covariances about the mean plus the mean's product. Without sums, about the origin
 * that is given as 0. */
static void fill(double *out, const float *sums, const double *mean, const double *shift, double n, uint32_t d)
{
    const double damp = n / (n + 0.5 * d);

    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            out[i * d + j] = (*sums++ - n * shift[i] * shift[j]) * (i == j ? 1 : damp) + n * mean[i] * mean[j];
}

static void fill_head(const struct slot *s, uint32_t head, double *sum, double *spread, double *moment)
{
    static const double zeros[KVANT_MAX_HEAD_DIM];
    const uint32_t d = s->head_dim;
    double mean[KVANT_MAX_HEAD_DIM], shift[KVANT_MAX_HEAD_DIM];

    for (uint32_t j = 0; j < d; j++) {
        const size_t at = (size_t)head * d + j;
        shift[j] = (double)s->sum[at] / s->n_rows;
        mean[j] = s->origin[at] + shift[j];
        sum[at] = mean[j] * s->n_rows;
        s->min[at] += s->origin[at];
        s->max[at] += s->origin[at];
    }
    if (s->spread == NULL)
        return;
    fill(spread + (size_t)head * d * d, s->spread + head * triangle(d), mean, shift, s->n_rows, d);
    fill(moment + (size_t)head * d * d, s->moment + head * triangle(d), zeros, zeros, s->n_queries, d);
}

static kvant_status add_slot(kvant_calibrator *calibrator, const struct slot *s, uint32_t layer, kvant_role role)
{
    const size_t row = (size_t)s->n_kv_heads * s->head_dim, square = row * s->head_dim;
    const bool keys = role == KVANT_ROLE_K;
    double *sum;
    kvant_status status;

    if (s->n_rows == 0 || (keys && s->n_queries == 0))
        return KVANT_ERR_ARGUMENT;
    sum = calloc(row + (keys ? 2 * square : 0), sizeof(*sum));
    if (sum == NULL)
        return KVANT_ERR_MEMORY;
    for (uint32_t head = 0; head < s->n_kv_heads; head++)
        fill_head(s, head, sum, sum + row, sum + row + square);
    status = kvant_calibrator_add_sums(calibrator, layer, role,
                                       &(kvant_calibrator_sums){ .size = sizeof(kvant_calibrator_sums),
                                                                 .n_kv_heads = s->n_kv_heads,
                                                                 .head_dim = s->head_dim,
                                                                 .n_rows = s->n_rows,
                                                                 .sum = sum,
                                                                 .min = s->min,
                                                                 .max = s->max,
                                                                 .spread = keys ? sum + row : NULL,
                                                                 .moment = keys ? sum + row + square : NULL,
                                                                 .n_queries = keys ? s->n_queries : 0 });
    free(sum);
    return status;
}

static kvant_status make(kvp_gather *g, kvant_calibration **calibration, char *err, size_t errlen)
{
    const char *slash = strrchr(g->learnt.model, '/');
    char name[256];
    kvant_calibrator *calibrator;
    kvant_status status;

    snprintf(name, sizeof(name), "%.255s", slash != NULL ? slash + 1 : g->learnt.model);
    status = kvant_calibrator_create(&(kvant_calibrator_config){ .size = sizeof(kvant_calibrator_config),
                                                                 .model = name,
                                                                 .model_fingerprint = g->learnt.fingerprint,
                                                                 .n_threads = g->quick ? (uint32_t)sysconf(_SC_NPROCESSORS_ONLN) : 1 },
                                     &calibrator, err, errlen);
    for (uint32_t i = 0; i < 2 * g->n_layers && status == KVANT_OK; i++)
        if (g->slots[i / 2][i % 2].head_dim != 0)
            status = add_slot(calibrator, &g->slots[i / 2][i % 2], i / 2, (kvant_role)(i % 2));
    free_sums(g);
    if (status == KVANT_OK)
        status = kvant_calibrator_finish(calibrator, calibration);
    kvant_calibrator_free(&calibrator);
    if (status != KVANT_OK && err[0] == '\0')
        snprintf(err, errlen, "%s", kvant_strerror(status));
    return status;
}

static void make_and_keep(kvp_gather *g)
{
    kvant_calibration *calibration = NULL;
    char err[1536] = "";

    if (make(g, &calibration, err, sizeof(err)) == KVANT_OK && kvp_learnt_keep(&g->learnt, calibration, err, sizeof(err)))
        snprintf(g->said, sizeof(g->said), "learnt a calibration from %u tokens of prompts, which the next run uses: %.900s",
                 g->n_tokens, g->learnt.path);
    else if (err[0] != '\0')
        snprintf(g->said, sizeof(g->said), "what was learnt is not kept: %.900s", err);
    kvant_calibration_free(&calibration);
}

static void end(kvp_gather *g)
{
    g->state = ENDED;
    if (g->said[0] != '\0')
        kvp_say("%s", g->said);
}

static void *run(void *user)
{
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19); /* of this thread */
    make_and_keep(user);
    return NULL;
}

/* Signals are for the program's own threads. */
static void start_thread(kvp_gather *g)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    g->state = pthread_create(&g->thread, NULL, run, g) == 0 ? MAKES : ENDED;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (g->state == ENDED)
        give_up(g, "no thread");
}

bool kvp_gather_wants(const kvp_gather *g, size_t n)
{
    return g != NULL && g->state == GATHERS && n >= LEAST_BATCH;
}

void kvp_gather_rows(kvp_gather *g, const kvp_rows *keys, const kvp_rows *values, size_t n)
{
    const uint32_t layer = keys->kv->shape.layer;

    if (g != NULL && g->state == MAKES && n >= LEAST_BATCH && pthread_tryjoin_np(g->thread, NULL) == 0)
        end(g);
    if (g == NULL || g->state != GATHERS || keys->kv->shape.role != KVANT_ROLE_K)
        return;
    if (layer <= g->first) { /* a batch begins: every layer has seen the one before */
        g->first = layer;
        g->n_chosen = 0;
        if (g->n_tokens >= WANTED) {
            start_thread(g);
            return;
        }
        if (n >= LEAST_BATCH)
            choose(g, values, n);
    }
    if (g->n_chosen > 0 && n == g->n_batch && (!add_rows(g, keys) || !add_rows(g, values)))
        give_up(g, "the model is too large");
}

void kvp_gather_free(kvp_gather *g, bool keep)
{
    struct timespec until;

    if (g == NULL)
        return;
    if (g->state == MAKES) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += PATIENCE;
        if (pthread_timedjoin_np(g->thread, NULL, &until) != 0) {
            pthread_detach(g->thread); /* it ends with the process; what it uses stays */
            return;
        }
        end(g);
    }
    g->quick = true;
    if (keep && g->state == GATHERS && g->n_tokens >= ENOUGH && g->n_different >= g->n_tokens * LEAST_DIFFERENT / WANTED) {
        make_and_keep(g);
        end(g);
    }
    free_sums(g);
    free(g);
}
