/* attention.c - the public call for cells, and what runs a plan: prepares queries, runs the units in parallel, combines
 * splits, writes outputs. */
#include <math.h>
#include <string.h>

#include "../base/parallel.h"
#include "unit.h"

typedef struct job {
    const kvant_attention_plan *plan;
    const kvant_kernels *kernels;
    float *workspace;
} job;

size_t kvant_attention_workspace(const kvant_attention_args *args)
{
    kvant_attention_plan plan;
    return kvant_attention_make_plan(args, &plan) ? plan.total * sizeof(float) : 0;
}

/* Row of (token, head) in queries and partials. */
static size_t row_index(const kvant_attention_plan *plan, uint32_t token, uint32_t head)
{
    uint32_t kv_head = head / plan->group_heads, g = head % plan->group_heads;
    return ((size_t)kv_head * plan->args->n_tokens + token) * plan->group_heads + g;
}

static void cells_query(const kvant_attention_plan *plan, uint32_t token, uint32_t head, float *out)
{
    const kvant_attention_args *args = plan->args;
    const float *q = args->q + token * args->q_token_stride + head * args->q_head_stride;
    const kvant_codec *codec = args->k->codecs[head / plan->group_heads];
    kvant_affine affine = kvant_cells_head_affine(args->k, head / plan->group_heads);
    kvant_codec_transform_query(codec, &affine, q, out);
    for (uint32_t i = 0; i < plan->k_dim; i++)
        out[i] = i < codec->info.head_dim ? out[i] * plan->score_scale : 0;
}

/* Restores the order of channels, un-rotates. */
static void cells_output(const kvant_attention_plan *plan, uint32_t head, const float *sums, float inverse,
                         float weight, float *out)
{
    const kvant_cells *v = plan->args->v;
    const kvant_codec *codec = v->codecs[head / plan->group_heads];
    float y[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < codec->info.head_dim; i++)
        y[i] = sums[kvant_layout_row_position(&codec->layout, i)] * inverse;
    kvant_affine affine = kvant_cells_head_affine(v, head / plan->group_heads);
    kvant_codec_transform_output(codec, &affine, weight, y, out);
}

static const kvant_attention_reader cells_reader = {
    .query = cells_query,
    .output = cells_output,
    .score_offset = kvant_attention_cells_offset,
    .begin = kvant_attention_cells_begin,
    .score = kvant_attention_cells_score,
    .add = kvant_attention_cells_add,
};

static void prepare_token(void *context, size_t token, uint32_t worker)
{
    const job *j = context;
    const kvant_attention_plan *plan = j->plan;
    (void)worker;
    for (uint32_t head = 0; head < plan->args->n_heads; head++)
        plan->reader->query(plan, (uint32_t)token, head,
                            j->workspace + plan->queries + row_index(plan, (uint32_t)token, head) * plan->k_dim);
}

/* The sink's logit joins the denominator only. Returns the factor on what was summed against max. */
static float join_sink(const kvant_attention_args *args, uint32_t head, float max, float *total)
{
    if (!args->sinks)
        return 1;
    float sink = args->sinks[head];
    if (sink <= max) {
        *total += expf(sink - max);
        return 1;
    }
    float factor = max == -INFINITY ? 0 : expf(max - sink);
    *total = *total * factor + 1;
    return factor;
}

static void finish_row(const kvant_attention_plan *plan, uint32_t token, uint32_t head, float *sums, float max,
                       float total)
{
    float weight = total;
    float factor = join_sink(plan->args, head, max, &total);
    for (uint32_t i = 0; factor != 1 && i < plan->v_dim; i++)
        sums[i] *= factor;
    float inverse = total > 0 ? 1 / total : 0;
    float *out = plan->args->out + token * plan->args->out_token_stride + head * plan->args->out_head_stride;
    plan->reader->output(plan, head, sums, inverse, weight * factor * inverse, out);
}

static float *partial(const job *j, size_t row, uint32_t split)
{
    return j->workspace + j->plan->partials + (row * j->plan->n_splits + split) * j->plan->partial_stride;
}

static void store_partials(const job *j, const kvant_attention_unit *unit, uint32_t split)
{
    const kvant_attention_plan *plan = j->plan;
    size_t first = ((size_t)unit->kv_head * plan->args->n_tokens + unit->first_token) * plan->group_heads;
    for (uint32_t row = 0; row < unit->n_rows; row++) {
        float *p = partial(j, first + row, split);
        p[0] = unit->max[row];
        p[1] = unit->total[row];
        memcpy(p + 16, unit->sums + (size_t)row * plan->v_dim, plan->v_dim * sizeof *p);
    }
}

static void run_unit(void *context, size_t index, uint32_t worker)
{
    const job *j = context;
    const kvant_attention_plan *plan = j->plan;
    uint32_t split = (uint32_t)(index % plan->n_splits);
    size_t rest = index / plan->n_splits;
    /* Last tile first: under a causal mask it is the longest, and long units should not come last. */
    uint32_t tile = plan->n_tiles - 1 - (uint32_t)(rest / plan->n_kv_heads);
    kvant_attention_unit unit = { .kv_head = (uint32_t)(rest % plan->n_kv_heads),
                                  .first_token = tile * plan->tile_tokens,
                                  .first_page = split * plan->split_pages };
    uint32_t left = plan->args->n_tokens - unit.first_token, pages_left = plan->n_pages - unit.first_page;
    unit.n_tokens = left < plan->tile_tokens ? left : plan->tile_tokens;
    unit.n_rows = unit.n_tokens * plan->group_heads;
    unit.end_page = unit.first_page + (pages_left < plan->split_pages ? pages_left : plan->split_pages);
    unit.queries = j->workspace + plan->queries +
                   row_index(plan, unit.first_token, unit.kv_head * plan->group_heads) * plan->k_dim;
    kvant_attention_unit_bind(plan, &unit, j->workspace + plan->scratch + worker * plan->scratch_stride);
    kvant_attention_unit_run(plan, j->kernels, &unit);
    if (plan->n_splits > 1) {
        store_partials(j, &unit, split);
        return;
    }
    for (uint32_t row = 0; row < unit.n_rows; row++)
        finish_row(plan, unit.first_token + row / plan->group_heads,
                   unit.kv_head * plan->group_heads + row % plan->group_heads,
                   unit.sums + (size_t)row * plan->v_dim, unit.max[row], unit.total[row]);
}

/* Adds the splits of a row in order, whatever thread computed them, into the first one. */
static void combine_row(const job *j, uint32_t token, uint32_t head)
{
    const kvant_attention_plan *plan = j->plan;
    size_t row = row_index(plan, token, head);
    float *sum = partial(j, row, 0), max = sum[0];
    for (uint32_t split = 1; split < plan->n_splits; split++)
        max = fmaxf(max, partial(j, row, split)[0]);
    float total = 0;
    for (uint32_t split = 0; split < plan->n_splits; split++) {
        const float *p = partial(j, row, split);
        float factor = p[0] == -INFINITY ? 0 : expf(p[0] - max);
        total += p[1] * factor;
        for (uint32_t i = 0; i < plan->v_dim; i++)
            sum[16 + i] = (split ? sum[16 + i] : 0) + p[16 + i] * factor;
    }
    finish_row(plan, token, head, sum + 16, max, total);
}

void kvant_attention_run(const kvant_attention_plan *plan, float *workspace)
{
    uint32_t n_tokens = plan->args->n_tokens;
    job j = { plan, kvant_kernels_get(KVANT_CPU_AUTO), workspace };
    kvant_parallel_for(n_tokens, n_tokens > 16 ? plan->n_threads : 1, prepare_token, &j);
    kvant_parallel_for((size_t)plan->n_tiles * plan->n_kv_heads * plan->n_splits, plan->n_threads, run_unit, &j);
    for (uint32_t token = 0; plan->n_splits > 1 && token < n_tokens; token++)
        for (uint32_t head = 0; head < plan->args->n_heads; head++)
            combine_row(&j, token, head);
}

kvant_status kvant_attention(const kvant_attention_args *args, void *workspace, size_t workspace_bytes)
{
    kvant_attention_plan plan;
    KVANT_RETURN_IF(!kvant_attention_make_plan(args, &plan), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!workspace || (uintptr_t)workspace % 64 || workspace_bytes / sizeof(float) < plan.total,
                    KVANT_ERR_ARGUMENT);
    plan.reader = &cells_reader;
    kvant_attention_run(&plan, workspace);
    return KVANT_OK;
}
