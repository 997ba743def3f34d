/* plan.c - see plan.h. */
#include "codes.h"

#include "../base/alloc.h"
#include "../base/parallel.h"

#define DECODE_TOKENS 8u /* up to here the context is split, beyond there are enough query tiles */
#define SPLIT_PAGES 16u  /* 1024 tokens: enough work to hide a wake-up, enough pieces for many threads */
/* Products below which one thread is faster than two: about 50 us, what it takes a sleeping thread to begin, and 5 us, where
 * threads are lent. */
#define SMALL_WORK (1u << 21)
#define SMALL_LENT_WORK (1u << 18)

static bool valid(const kvant_attention_args *a)
{
    if (!a || a->size != sizeof *a || !a->k || !a->v || !a->q || !a->out || !a->n_threads || !a->n_tokens)
        return false;
    const kvant_cells_config *k = &a->k->config, *v = &a->v->config;
    if (k->codec->info.role != KVANT_ROLE_K || v->codec->info.role != KVANT_ROLE_V)
        return false;
    if (k->n_kv_heads != v->n_kv_heads || !a->n_heads || a->n_heads % k->n_kv_heads)
        return false;
    return a->stream < k->n_streams && a->stream < v->n_streams && a->n_cells <= k->n_cells &&
           a->n_cells <= v->n_cells;
}

/* offset += count floats, in whole cache lines; false on overflow. */
static bool reserve(size_t *total, size_t count, size_t size, size_t *offset)
{
    size_t floats;
    if (!kvant_mul_size(count, size, &floats) || floats > SIZE_MAX / 8 - *total)
        return false;
    *offset = *total;
    *total += (floats + 15) / 16 * 16;
    return true;
}

static bool lay_out_workspace(kvant_attention_plan *plan)
{
    size_t rows = (size_t)plan->args->n_tokens * plan->args->n_heads, unit_rows = kvant_attention_rows(plan);
    size_t scratch = (size_t)KVANT_PAGE_TOKENS * (plan->k_dim + plan->v_dim) /* tiles */
                     + unit_rows * KVANT_PAGE_TOKENS                         /* scores */
                     + unit_rows * plan->v_dim                               /* sums */
                     + (size_t)plan->tile_tokens * KVANT_PAGE_TOKENS         /* masks */
                     + 2 * ((unit_rows + 15) / 16 * 16)                      /* maxima, denominators */
                     + kvant_attention_codes_floats(plan);
    plan->partial_stride = 16 + plan->v_dim;
    plan->scratch_stride = (scratch + 15) / 16 * 16;
    return reserve(&plan->total, rows, plan->k_dim, &plan->queries) &&
           reserve(&plan->total, plan->n_splits > 1 ? rows * plan->n_splits : 0, plan->partial_stride,
                   &plan->partials) &&
           reserve(&plan->total, plan->args->n_threads, plan->scratch_stride, &plan->scratch);
}

bool kvant_attention_cut(kvant_attention_plan *plan)
{
    const kvant_attention_args *args = plan->args;
    plan->group_heads = args->n_heads / plan->n_kv_heads;
    plan->tile_tokens = KVANT_ATTENTION_MAX_ROWS / plan->group_heads;
    if (plan->tile_tokens < 1)
        plan->tile_tokens = 1;
    if (plan->tile_tokens > args->n_tokens)
        plan->tile_tokens = args->n_tokens;
    plan->n_tiles = (args->n_tokens + plan->tile_tokens - 1) / plan->tile_tokens;
    plan->n_pages = (args->n_cells + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    plan->split_pages = args->n_tokens <= DECODE_TOKENS ? SPLIT_PAGES : plan->n_pages ? plan->n_pages : 1;
    plan->n_splits = plan->n_pages ? (plan->n_pages + plan->split_pages - 1) / plan->split_pages : 1;
    plan->score_scale = args->logit_softcap > 0 ? args->scale / args->logit_softcap : args->scale;
    double work = (double)args->n_tokens * args->n_heads * args->n_cells * (plan->k_dim + plan->v_dim);
    plan->n_threads = work < (kvant_parallel_is_lent() ? SMALL_LENT_WORK : SMALL_WORK) ? 1 : args->n_threads;
    return lay_out_workspace(plan);
}

bool kvant_attention_make_plan(const kvant_attention_args *args, kvant_attention_plan *plan)
{
    if (!valid(args))
        return false;
    const kvant_codec *k = args->k->config.codec, *v = args->v->config.codec;
    *plan = (kvant_attention_plan){ .args = args,
                                    .n_kv_heads = args->k->config.n_kv_heads,
                                    .k_dim = k->layout.padded_dim,
                                    .v_dim = v->layout.padded_dim };
    return kvant_attention_cut(plan);
}
