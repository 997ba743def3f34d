/* queries.c - accumulates queries: their second moments, which are added together with the next
 * rows, and a sample, by which transforms are judged. */
#include "learning.h"

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/parallel.h"

#define MOST_TOKENS 128u /* at most this many tokens of a call count */
/* The same for a call of fewer than 1024 tokens, and for every call after enough was learned. Then
 * queries are kept only in case rows of another kind follow. */
#define FEW_TOKENS 64u
/* When this many queries per channel are accumulated, only one in SELDOM further single tokens
 * counts. */
#define ENOUGH_PER_CHANNEL 8u
#define SELDOM 8

/* For values, which have no queries: a sample of random signs, as if the outputs were used equally
 * in all directions. */
void kvant_queries_assume(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    kvant_learn_assume_queries(l->queries, SAMPLE_QUERIES * kvant_tensor_width(tensor));
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        l->n_queries[head] = SAMPLE_QUERIES;
}

void kvant_queries_assume_moments(const kvant_learning *l)
{
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++) {
        for (uint32_t j = 0; j < l->part; j++)
            l->sub_heads[sub_head].queries[kvant_lower_position(l->part, j, j)] =
                KVANT_LEARN_SAMPLES;
        l->sub_heads[sub_head].n_queries = KVANT_LEARN_SAMPLES;
    }
}

typedef struct query_job {
    const kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const kvant_queries *queries;
    uint32_t n_tokens, group; /* tokens looked at, heads of a kv head */
} query_job;

static size_t token_of(const query_job *job, uint32_t i)
{
    return (size_t)(i / job->group) * job->queries->n_tokens / job->n_tokens;
}

static int32_t position_of_query(const query_job *job, uint32_t i)
{
    const size_t token = token_of(job, i), next = (size_t)job->tensor->learning->next + token;
    return job->queries->positions ? job->queries->positions[token]
           : next < INT32_MAX      ? (int32_t)next
                                   : -1;
}

/* The i-th of a kv head's queries. NULL: it is not finite, or its square might not be. */
static const float *query_of(const query_job *job, size_t head, uint32_t i)
{
    const kvant_queries *q = job->queries;
    const size_t token = token_of(job, i);
    const float *x =
        q->q + token * q->token_stride + (head * job->group + i % job->group) * q->head_stride;
    return job->kernels->magnitude(x, job->tensor->head_dim) < 0x5f000000u ? x : NULL; /* 2^63 */
}

static void accumulate_unit(void *context, size_t sub_head, uint32_t worker)
{
    const query_job *job = context;
    kvant_learning *l = job->tensor->learning;
    sub_head_moments *u = &l->sub_heads[sub_head];
    kvant_rope_rotation rotation;
    kvant_moment_batch sums;
    (void)worker;
    if (!u->n_pending) /* the former sums were kept, for a write that fails */
        memset(u->pending, 0, kvant_lower_floats(l->part) * sizeof *u->pending);
    kvant_moment_batch_begin(&sums, l, u->pending);
    kvant_rope_rotation_begin(&rotation, l->rope, kvant_sub_head_part(job->tensor, sub_head));
    for (uint32_t i = 0; i < job->n_tokens * job->group; i++) {
        const float *query = query_of(job, kvant_sub_head_kv_head(job->tensor, sub_head), i);
        const int32_t at = l->rope ? position_of_query(job, i) : 0;
        if (!query || at < 0)
            continue;
        float *x = kvant_moment_batch_next(&sums);
        kvant_sub_head_gather(job->tensor, sub_head, query, false, x);
        kvant_rope_rotate_back(&rotation, at, x);
        sums.n++;
        u->n_pending++;
    }
    kvant_moment_batch_end(&sums);
}

/* Puts some of the queries into the sample by which transforms are judged. */
static void sample_queries(const query_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    const uint32_t n = job->n_tokens * job->group,
                   step = n > SAMPLE_QUERIES ? n / SAMPLE_QUERIES : 1;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        for (uint32_t i = 0; i < n; i += step) {
            const float *query = query_of(job, head, i);
            const size_t at =
                head * SAMPLE_QUERIES + tensor->learning->n_queries[head] % SAMPLE_QUERIES;
            if (!query)
                continue;
            memcpy(tensor->learning->queries + at * tensor->head_dim, query,
                   tensor->head_dim * sizeof *query);
            tensor->learning->query_positions[at] = position_of_query(job, i);
            tensor->learning->n_queries[head]++;
        }
}

/* Whether a token may be left out, because its queries would hardly change a matrix. */
static bool may_be_skipped(const kvant_learning *l, size_t n_tokens)
{
    return n_tokens == 1 &&
           l->sub_heads[0].n_queries + l->sub_heads[0].n_pending >= ENOUGH_PER_CHANNEL * l->part &&
           l->n_single % SELDOM;
}

int kvant_tensor_wants_queries(const kvant_tensor *tensor, size_t n_tokens)
{
    if (!tensor || !tensor->learning || kvant_learns_values(tensor) || !n_tokens ||
        may_be_skipped(tensor->learning, n_tokens))
        return false;
    return kvant_learn_wants_queries(&tensor->learning->schedule, !tensor->device, n_tokens);
}

/* Single tokens */

static query_job job_of(const kvant_tensor *tensor, const kvant_queries *queries, uint32_t most)
{
    return (query_job){ .tensor = tensor,
                        .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                        .queries = queries,
                        .n_tokens = queries->n_tokens < most ? queries->n_tokens : most,
                        .group = queries->n_heads / tensor->n_kv_heads };
}

void kvant_queries_settle(const kvant_tensor *tensor, uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const kvant_queries queries = { .q = l->pending_queries,
                                    .token_stride = (size_t)l->pending_heads * tensor->head_dim,
                                    .head_stride = tensor->head_dim,
                                    .n_tokens = l->n_pending_tokens,
                                    .n_heads = l->pending_heads,
                                    .positions = l->pending_positions };
    query_job job = job_of(tensor, &queries, MOST_SINGLE);
    if (l->n_pending_tokens)
        kvant_parallel_for(l->n_sub_heads, n_threads, accumulate_unit, &job);
    l->n_pending_tokens = 0;
}

static bool have_room(const kvant_tensor *tensor, uint32_t n_heads, uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    if (l->pending_queries && l->pending_heads == n_heads)
        return true;
    kvant_queries_settle(tensor, n_threads);
    kvant_free(l->pending_queries);
    l->pending_queries =
        kvant_alloc((size_t)MOST_SINGLE * n_heads * tensor->head_dim, sizeof *l->pending_queries);
    l->pending_heads = l->pending_queries ? n_heads : 0;
    return l->pending_queries;
}

bool kvant_queries_only_copies(const kvant_tensor *tensor, uint32_t n_heads)
{
    const kvant_learning *l = tensor->learning;
    return l && l->pending_queries && l->pending_heads == n_heads &&
           l->n_pending_tokens + 1 < MOST_SINGLE;
}

/* Makes the queries of a single token pending. The sines of a position and a pass over the sums
 * take longer than the few queries of a token, so several tokens are accumulated together. Returns
 * false when memory is short. */
static bool make_pending(const query_job *job, uint32_t n_threads)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_queries *q = job->queries;
    kvant_learning *l = tensor->learning;
    if (!have_room(tensor, q->n_heads, n_threads))
        return false;
    float *to = l->pending_queries + (size_t)l->n_pending_tokens * q->n_heads * tensor->head_dim;
    for (uint32_t head = 0; head < q->n_heads; head++)
        memcpy(to + (size_t)head * tensor->head_dim, q->q + head * q->head_stride,
               tensor->head_dim * sizeof *to);
    l->pending_positions[l->n_pending_tokens++] = position_of_query(job, 0);
    if (l->n_pending_tokens == MOST_SINGLE)
        kvant_queries_settle(tensor, n_threads);
    return true;
}

kvant_status kvant_tensor_note_queries(kvant_tensor *tensor, const kvant_queries *queries,
                                       uint32_t n_threads)
{
    kvant_queries q;
    KVANT_RETURN_IF(!tensor || !KVANT_ACCEPT_STRUCT(kvant_queries, &q, queries, n_heads) || !q.q ||
                        !q.n_heads || q.n_heads % tensor->n_kv_heads || !n_threads,
                    KVANT_ERR_ARGUMENT);
    if (!kvant_tensor_wants_queries(tensor, q.n_tokens))
        return KVANT_OK;
    KVANT_FORWARD(kvant_learning_reserve(tensor));
    const uint32_t most =
        tensor->learning->schedule.done || q.n_tokens < 8 * MOST_TOKENS ? FEW_TOKENS : MOST_TOKENS;
    query_job job = job_of(tensor, &q, most);
    sample_queries(&job);
    if (q.n_tokens == 1 && make_pending(&job, n_threads))
        return KVANT_OK;
    kvant_queries_settle(tensor, n_threads);
    kvant_parallel_for(tensor->learning->n_sub_heads, n_threads, accumulate_unit, &job);
    return KVANT_OK;
}
