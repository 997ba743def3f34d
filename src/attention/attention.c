/* attention.c - runs a plan: prepares queries, runs the work items in parallel, combines splits,
 * writes outputs.
 *
 * A call is one loop. In a step its first body ends the write of the new row, mostly on the calling
 * thread while further threads begin. The next bodies compute what several work items share, the
 * phases first, because every work item waits for them. The row is encoded after that, because only
 * the last work items read it. Then come the work items. Rows that are due for sealing come last,
 * because no work item reads their codes. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "../base/error.h"
#include "../base/parallel.h"
#include "work_item.h"

typedef struct job {
    const kvant_attention_plan *plan;
    const kvant_kernels *kernels;
    float *workspace;
    size_t n_new, n_items; /* bodies that encode the step's row, and work items */
} job;

/* The place of a row's sums and totals, one of each per transform of the values. */
typedef struct row_sums {
    float *sums;          /* of the first transform */
    size_t stride;        /* distance to the sums of the next transform */
    const float *totals;  /* of the first transform */
    size_t totals_stride; /* distance to the total of the next transform */
} row_sums;

static size_t row_index(const kvant_attention_plan *plan, uint32_t query, uint32_t head)
{
    uint32_t kv_head = head / plan->group_heads, g = head % plan->group_heads;
    return ((size_t)kv_head * plan->problem.n_queries + query) * plan->group_heads + g;
}

static float *queries_of(const job *j, uint32_t view, size_t row)
{
    return j->workspace + j->plan->queries + (view * j->plan->n_rows + row) * j->plan->k_dim;
}

static float *offsets_of(const job *j, uint32_t view, size_t row)
{
    return j->workspace + j->plan->offsets + view * j->plan->n_rows + row;
}

static float *products_of(const job *j, uint32_t view, size_t row)
{
    return j->plan->centered
               ? j->workspace + j->plan->products + (view * j->plan->n_rows + row) * j->plan->k_dim
               : NULL;
}

/* The number of finished parts of each kv head, then whether the phases are there, then the number
 * of encoded rows of each kv head. */
static atomic_uint *ready_of(const job *j)
{
    return (atomic_uint *)(void *)(j->workspace + j->plan->ready);
}

static atomic_uint *encoded_of(const job *j, uint32_t kv_head)
{
    return ready_of(j) + j->plan->n_kv_heads + 1 + kv_head;
}

/* Prepares all queries of a kv head for a view. */
static void prepare_queries(const job *j, uint32_t kv_head, uint32_t view)
{
    const kvant_attention_plan *plan = j->plan;
    const size_t row = row_index(plan, 0, kv_head * plan->group_heads);
    plan->reader->queries(plan, j->kernels, view, 0, plan->problem.n_queries, kv_head,
                          queries_of(j, view, row), offsets_of(j, view, row),
                          products_of(j, view, row));
}

/* Computes a part that several work items share. */
static void run_part(const job *j, size_t part)
{
    const kvant_attention_plan *plan = j->plan;
    const size_t phases = plan->centered ? 1 : 0;
    if (part < phases) {
        plan->reader->phases(plan, j->workspace + plan->phases);
        kvant_parallel_count(ready_of(j) + plan->n_kv_heads);
        return;
    }
    const uint32_t kv_head = (uint32_t)((part - phases) / plan->k_views.n);
    prepare_queries(j, kv_head, (uint32_t)((part - phases) % plan->k_views.n));
    kvant_parallel_count(ready_of(j) + kv_head);
}

/* Whether a work item reads the block of the step's row. */
static bool reads_row(const kvant_attention_plan *plan, const kvant_attention_item *item)
{
    for (uint32_t page = item->end_page; plan->write && page-- > item->first_page;)
        if (kvant_attention_block(plan, page) == plan->written_block)
            return true;
    return false;
}

/* Waits for the parts that a work item needs. */
static void await_parts(const job *j, const kvant_attention_item *item)
{
    const kvant_attention_plan *plan = j->plan;
    if (plan->centered)
        kvant_parallel_await(ready_of(j) + plan->n_kv_heads, 1);
    if (plan->n_splits > 1)
        kvant_parallel_await(ready_of(j) + item->kv_head, plan->k_views.n);
    if (reads_row(plan, item)) /* of keys and of values */
        kvant_parallel_await(encoded_of(j, item->kv_head), 2);
}

/* Adds the sink's logit to the denominator, where alone it counts. Returns the factor by which sums
 * with the old maximum have to be multiplied. */
static float join_sink(const kvant_attention_problem *p, uint32_t head, float *max, float *total)
{
    if (!p->sinks)
        return 1;
    float sink = p->sinks[head];
    if (sink <= *max) {
        *total += expf(sink - *max);
        return 1;
    }
    float factor = *max == -INFINITY ? 0 : expf(*max - sink);
    *total = *total * factor + 1;
    *max = sink;
    return factor;
}

/* Whether the query holds a NaN. Products with integers lose NaNs, so the output is set to NaN for
 * such a query. */
static bool has_nan(const job *j, uint32_t query, uint32_t head)
{
    const kvant_attention_problem *p = &j->plan->problem;
    const float *q = p->q + query * p->q_token_stride + head * p->q_head_stride;
    return j->kernels->magnitude(q, j->plan->k ? j->plan->k->head_dim : j->plan->k_dim) >
           KVANT_INFINITY_BITS;
}

static void fill_nan(const kvant_attention_plan *plan, uint32_t query, uint32_t head)
{
    const kvant_attention_problem *p = &plan->problem;
    float *out = p->out + query * p->out_token_stride + head * p->out_head_stride;
    uint32_t d = plan->v ? plan->v->head_dim : plan->v_dim;
    for (uint32_t i = 0; i < d; i++)
        out[i] = NAN;
    if (p->lse)
        p->lse[(size_t)query * p->n_heads + head] = NAN;
}

static void finish_row(const job *j, uint32_t query, uint32_t head, float max, const row_sums *from)
{
    const kvant_attention_plan *plan = j->plan;
    const kvant_attention_problem *p = &plan->problem;
    float total = 0;
    for (uint32_t v = 0; v < plan->v_transforms.n; v++)
        total += from->totals[v * from->totals_stride];
    if (isnan(total) || has_nan(j, query, head)) {
        fill_nan(plan, query, head);
        return;
    }
    float factor = join_sink(p, head, &max, &total);
    float inverse = total > 0 ? factor / total : 0;
    float *out = p->out + query * p->out_token_stride + head * p->out_head_stride;
    memset(out, 0, (plan->v ? plan->v->head_dim : plan->v_dim) * sizeof *out);
    for (uint32_t v = 0; v < plan->v_transforms.n; v++)
        plan->reader->output(plan, j->kernels, v, head, from->sums + v * from->stride, inverse,
                             from->totals[v * from->totals_stride] * inverse, out);
    if (p->lse)
        p->lse[(size_t)query * p->n_heads + head] = total > 0 ? max + logf(total) : -INFINITY;
}

static float *partial(const job *j, size_t row, uint32_t split)
{
    return j->workspace + j->plan->partials +
           (row * j->plan->n_splits + split) * j->plan->partial_stride;
}

/* The number of finished splits for each (tile, kv head). */
static atomic_uint *counters_of(const job *j)
{
    _Static_assert(sizeof(atomic_uint) <= sizeof(float), "the workspace is counted in floats");
    return (atomic_uint *)(void *)(j->workspace + j->plan->counters);
}

static void store_partials(const job *j, const kvant_attention_item *item, size_t first,
                           uint32_t split)
{
    const kvant_attention_plan *plan = j->plan;
    for (uint32_t row = 0; row < item->n_rows; row++) {
        float *p = partial(j, first + row, split);
        p[0] = item->max[row];
        for (uint32_t v = 0; v < plan->v_transforms.n; v++) {
            p[1 + v] = item->totals[v][row];
            memcpy(p + KVANT_ATTENTION_HEAD + (size_t)v * plan->v_dim,
                   item->sums[v] + (size_t)row * plan->v_dim, plan->v_dim * sizeof *p);
        }
    }
}

static void finish_item(const job *j, const kvant_attention_item *item)
{
    const kvant_attention_plan *plan = j->plan;
    size_t transforms = plan->v_transforms.n;
    for (uint32_t row = 0; row < item->n_rows; row++) {
        row_sums from = { item->sums[0] + (size_t)row * plan->v_dim, 0, item->totals[0] + row, 0 };
        if (transforms > 1) {
            from.stride = (size_t)(item->sums[1] - item->sums[0]);
            from.totals_stride = (size_t)(item->totals[1] - item->totals[0]);
        }
        finish_row(j, item->first_query + row / plan->group_heads,
                   item->kv_head * plan->group_heads + row % plan->group_heads, item->max[row],
                   &from);
    }
}

/* Adds the splits of a row into the first one. The order does not depend on which thread computed a
 * split. */
static void combine_row(const job *j, uint32_t query, uint32_t head)
{
    const kvant_attention_plan *plan = j->plan;
    size_t row = row_index(plan, query, head), n = plan->partial_stride - KVANT_ATTENTION_HEAD;
    float *first = partial(j, row, 0), *sums = first + KVANT_ATTENTION_HEAD, max = first[0];
    for (uint32_t split = 1; split < plan->n_splits; split++)
        max = fmaxf(max, partial(j, row, split)[0]);
    for (uint32_t split = 0; split < plan->n_splits; split++) {
        const float *p = partial(j, row, split);
        float factor = p[0] == -INFINITY ? 0 : expf(p[0] - max);
        for (uint32_t v = 0; v < plan->v_transforms.n; v++)
            first[1 + v] = (split ? first[1 + v] : 0) + p[1 + v] * factor;
        for (size_t i = 0; i < n; i++)
            sums[i] = (split ? sums[i] : 0) + p[KVANT_ATTENTION_HEAD + i] * factor;
    }
    row_sums from = { sums, plan->v_dim, first + 1, 1 };
    finish_row(j, query, head, max, &from);
}

/* Stores a split. The thread that stores the last split of these rows combines them. */
static void store_split(const job *j, const kvant_attention_item *item, size_t first,
                        uint32_t split, atomic_uint *done)
{
    const kvant_attention_plan *plan = j->plan;
    store_partials(j, item, first, split);
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) + 1 < plan->n_splits)
        return;
    for (uint32_t row = 0; row < item->n_rows; row++)
        combine_row(j, item->first_query + row / plan->group_heads,
                    item->kv_head * plan->group_heads + row % plan->group_heads);
}

static void run_item(const job *j, size_t index, uint32_t worker)
{
    const kvant_attention_plan *plan = j->plan;
    /* A long work item at the end would leave the remaining threads idle. So the last split comes
     * last for all kv heads: it may be shorter than other splits. The last tile comes first: with a
     * causal mask it takes longest. */
    const size_t n_rests = (size_t)plan->n_tiles * plan->n_kv_heads, rest = index % n_rests;
    uint32_t split = (uint32_t)(index / n_rests);
    uint32_t tile = plan->n_tiles - 1 - (uint32_t)(rest / plan->n_kv_heads);
    kvant_attention_item item = { .kv_head = (uint32_t)(rest % plan->n_kv_heads),
                                  .first_query = tile * plan->tile_queries,
                                  .phases = j->workspace + plan->phases,
                                  .first_page = split * plan->split_pages };
    uint32_t left = plan->problem.n_queries - item.first_query,
             pages_left = plan->n_pages - item.first_page;
    item.n_queries = left < plan->tile_queries ? left : plan->tile_queries;
    item.n_rows = item.n_queries * plan->group_heads;
    item.end_page =
        item.first_page + (pages_left < plan->split_pages ? pages_left : plan->split_pages);
    size_t row = row_index(plan, item.first_query, item.kv_head * plan->group_heads);
    item.queries = queries_of(j, 0, row);
    item.offsets = offsets_of(j, 0, row);
    item.products = products_of(j, 0, row);
    if (plan->reader->begin)
        plan->reader->begin(plan, &item);
    await_parts(j, &item);
    kvant_attention_item_run(plan, j->kernels, &item,
                             j->workspace + plan->scratch + worker * plan->scratch_stride);
    if (plan->n_splits > 1)
        store_split(j, &item, row, split, &counters_of(j)[rest]);
    else
        finish_item(j, &item);
}

static void run_index(void *context, size_t index, uint32_t worker)
{
    const job *j = context;
    const size_t n_parts = j->plan->n_parts, n_beside = j->plan->beside ? 1 : 0;
    if (index < n_beside) {
        j->plan->beside(j->plan->user);
        return;
    }
    index -= n_beside;
    if (index < n_parts)
        run_part(j, index);
    else if ((index -= n_parts) < j->n_new)
        kvant_parallel_count(encoded_of(j, kvant_write_encode_new(j->plan->write->jobs, index)));
    else if ((index -= j->n_new) < j->n_items)
        run_item(j, index, worker);
    else
        kvant_write_encode_due(j->plan->write->jobs, index - j->n_items);
}

kvant_status kvant_attention_run(const kvant_attention_plan *plan, void *workspace, size_t bytes)
{
    const size_t n_rests = (size_t)plan->n_tiles * plan->n_kv_heads;
    if (!workspace || (uintptr_t)workspace % 64 || bytes / sizeof(float) < plan->total)
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "attention: the workspace has %zu of %zu bytes, or is NULL or not aligned to 64 bytes",
            bytes, plan->total * sizeof(float));
    job j = { .plan = plan,
              .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
              .workspace = workspace,
              .n_items = n_rests * plan->n_splits };
    size_t n_due = 0;
    if (plan->write) {
        j.n_new = kvant_write_new_bodies(plan->write->jobs, plan->write->n_jobs);
        n_due = kvant_write_due_bodies(plan->write->jobs, plan->write->n_jobs);
    }
    for (size_t i = 0; plan->n_splits > 1 && i < n_rests; i++)
        atomic_init(&counters_of(&j)[i], 0);
    for (size_t i = 0; i <= 2 * (size_t)plan->n_kv_heads; i++)
        atomic_init(&ready_of(&j)[i], 0);
    kvant_parallel_for((plan->beside ? 1 : 0) + j.n_new + plan->n_parts + j.n_items + n_due,
                       plan->n_threads, run_index, &j);
    return KVANT_OK;
}
