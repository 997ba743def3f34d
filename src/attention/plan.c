/* plan.c - see plan.h. */
#include "codes.h"

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/parallel.h"

/* With up to this many query tokens, pages are split among work items. With more, there are enough
 * query tiles without splits. */
#define DECODE_QUERIES 8u
/* A context of up to this many pages is not split. Queries would have to be prepared before the
 * work items. Without a split, hidden pages of neighbours in a unified cache also change no bit. */
#define UNSPLIT_PAGES 4u
/* The fewest and the most pages of a split. With fewer, a work item's own cost exceeds the gain of
 * even shares. With more, long contexts would not give work items for many threads. */
#define FEWEST_PAGES 2u
#define MOST_PAGES 16u
/* The cost of a work item in addition to its pages, in pages: laying out its scratch, waiting for
 * its first page, and storing and combining its sums. With 3 query heads and a head_dim of 64 this
 * takes as long as 0.3 pages of codes, or 0.8 pages of fp16 rows. If the cost is 0, contexts of
 * some hundred tokens are cut too fine. */
#define ITEM_COST 1u
/* The time on 8 threads has this weight, and the times on 12 and 16 threads have weight 1. With a
 * larger weight half of 16 threads can be without work. With a smaller weight 8 threads wait
 * longer. The splits that come of it suit 2, 4 and 6 threads, too. */
#define WEIGHT_OF_8 4u
/* With fewer products than this, one thread is faster than two. SMALL_WORK takes about 50 us, as
 * long as it takes a sleeping thread to begin. SMALL_LENT_WORK takes 2 us and applies where the
 * host program lends its threads. */
#define SMALL_WORK (1u << 21)
#define SMALL_LENT_WORK (1u << 16)
/* With few query rows, a product with the key transform takes about 4 times as long as other
 * products, because the matrix has to come from memory. The thread limit counts it 4 times. */
#define MATRIX_READ_COST 4

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "attention: %s", what);
}

kvant_status kvant_attention_accept_problem(kvant_attention_plan *plan,
                                            const kvant_attention_problem *problem,
                                            uint32_t n_kv_heads)
{
    kvant_attention_problem *p = &plan->problem;
    if (!KVANT_ACCEPT_STRUCT(kvant_attention_problem, p, problem, exact))
        return invalid(
            "problem is NULL, or its size field is not set to sizeof(kvant_attention_problem)");
    if (!p->q || !p->out || !p->n_threads || !p->n_queries)
        return invalid("q, out, n_threads and n_queries must be set");
    if (!p->n_heads || p->n_heads % n_kv_heads)
        return invalid("n_heads is 0, or not a multiple of the number of kv heads");
    if (p->causal && p->n_queries > p->n_tokens)
        return invalid("causal is set, but n_queries is larger than n_tokens");
    plan->n_kv_heads = n_kv_heads;
    plan->n_pages = p->n_tokens / KVANT_PAGE_TOKENS + (p->n_tokens % KVANT_PAGE_TOKENS != 0);
    return KVANT_OK;
}

kvant_status kvant_attention_check_blocks(const kvant_attention_plan *plan, uint32_t n)
{
    const int32_t *table = plan->problem.block_table;
    if (!table && (uint64_t)plan->problem.first_block + plan->n_pages > n)
        return invalid("first_block and n_tokens name more blocks than the tensors have");
    for (uint32_t page = 0; table && page < plan->n_pages; page++)
        if (table[page] >= (int64_t)n)
            return invalid(
                "block_table has an entry that is larger than the last block of the tensors");
    return KVANT_OK;
}

/* Reserves count * size floats of the workspace, in whole cache lines; false on overflow. */
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
    size_t rows = kvant_attention_rows(plan), padded_rows = (rows + 15) / 16 * 16;
    size_t k_views = plan->k_views.n, v_transforms = plan->v_transforms.n;
    size_t scratch = (size_t)KVANT_PAGE_TOKENS * (plan->k_dim + plan->v_dim) /* tiles */
                     + rows * KVANT_PAGE_TOKENS                              /* scores */
                     + v_transforms * rows * plan->v_dim                     /* sums */
                     + (size_t)plan->tile_queries * KVANT_PAGE_TOKENS        /* masks */
                     + (1 + v_transforms) * padded_rows                      /* maxima, totals */
                     /* scores of a page for slots with one shift */
                     + (plan->centered ? k_views * rows * KVANT_ATTENTION_CHUNK : 0) +
                     (plan->mixed ? rows * KVANT_PAGE_TOKENS : 0) +
                     kvant_attention_ready_floats(plan) + padded_rows * plan->own_per_row +
                     kvant_attention_codes_floats(plan);
    plan->n_rows = (size_t)plan->problem.n_queries * plan->problem.n_heads;
    plan->partial_stride = KVANT_ATTENTION_HEAD + v_transforms * plan->v_dim;
    plan->scratch_stride = (scratch + 15) / 16 * 16;
    return reserve(&plan->total, plan->n_rows * k_views, plan->k_dim, &plan->queries) &&
           reserve(&plan->total, plan->n_rows, k_views, &plan->offsets) &&
           reserve(&plan->total, plan->centered ? plan->n_rows * k_views : 0, plan->k_dim,
                   &plan->products) &&
           reserve(&plan->total, plan->centered ? kvant_attention_chunks(plan) + 1 : 0,
                   kvant_attention_chunk_floats(plan), &plan->phases) &&
           reserve(&plan->total, plan->n_splits > 1 ? plan->n_rows * plan->n_splits : 0,
                   plan->partial_stride, &plan->partials) &&
           reserve(&plan->total, plan->n_tiles, plan->n_kv_heads, &plan->counters) &&
           reserve(&plan->total, 2 * plan->n_kv_heads + (size_t)1, 1, &plan->ready) &&
           reserve(&plan->total, plan->problem.n_threads, plan->scratch_stride, &plan->scratch);
}

/* When the work items end on some threads, in pages. A split of `pages` pages gives long work
 * items, which begin first, and at most one shorter item for each kv head. */
static uint64_t end_of_items(const kvant_attention_plan *plan, uint32_t pages, uint32_t threads)
{
    const uint32_t n_heads = plan->n_kv_heads, rest = plan->n_pages % pages,
                   end = pages + ITEM_COST, short_end = rest + ITEM_COST;
    const uint64_t n_long = (uint64_t)(plan->n_pages / pages) * n_heads,
                   rounds = (n_long + threads - 1) / threads;
    const uint32_t n_free = (uint32_t)(rounds * threads - n_long);
    if (!rest)
        return rounds * end;
    if (!n_free)
        return rounds * end + (n_heads + threads - 1) / threads * short_end;
    const uint32_t alone = (n_heads + n_free - 1) / n_free * short_end, /* on the free threads */
        after = end + (n_heads + threads - 1) / threads * short_end;
    return (rounds - 1) * end + (alone <= end ? end : alone < after ? alone : after);
}

static uint32_t find_split(const kvant_attention_plan *plan)
{
    uint32_t best = MOST_PAGES;
    uint64_t least = UINT64_MAX;
    for (uint32_t pages = MOST_PAGES; pages >= FEWEST_PAGES && plan->n_pages > UNSPLIT_PAGES;
         pages--) {
        const uint64_t end = WEIGHT_OF_8 * end_of_items(plan, pages, 8) +
                             end_of_items(plan, pages, 12) + end_of_items(plan, pages, 16);
        if (end < least)
            best = pages;
        least = end < least ? end : least;
    }
    return best;
}

/* Pages of a split. With few query tokens the context is split, so that the kv heads together give
 * work items for all threads. The actual number of threads does not count, because results must not
 * depend on it. The last answer is kept, because a model's layers ask one after another. */
static uint32_t split_pages(const kvant_attention_plan *plan)
{
    static _Thread_local struct {
        uint32_t n_kv_heads, n_pages, split;
    } last;
    if (plan->problem.n_queries > DECODE_QUERIES)
        return plan->n_pages ? plan->n_pages : 1;
    if (!last.split || last.n_kv_heads != plan->n_kv_heads || last.n_pages != plan->n_pages) {
        last.n_kv_heads = plan->n_kv_heads;
        last.n_pages = plan->n_pages;
        last.split = find_split(plan);
    }
    return last.split;
}

static uint32_t threads_for(const kvant_attention_plan *plan, double work)
{
    return work < (kvant_parallel_is_lent() ? SMALL_LENT_WORK : SMALL_WORK)
               ? 1
               : plan->problem.n_threads;
}

static bool has_matrices(const kvant_attention_plan *plan)
{
    bool any = false;
    for (uint32_t i = 0; plan->k && i < plan->k_views.n; i++)
        any |= plan->k->transforms[plan->k_views.transform_id[i]].key_transform != NULL;
    return any;
}

bool kvant_attention_cut(kvant_attention_plan *plan)
{
    const kvant_attention_problem *p = &plan->problem;
    plan->group_heads = p->n_heads / plan->n_kv_heads;
    plan->tile_queries = KVANT_ATTENTION_MAX_ROWS / plan->group_heads;
    if (plan->tile_queries < 1)
        plan->tile_queries = 1;
    if (plan->tile_queries > p->n_queries)
        plan->tile_queries = p->n_queries;
    plan->n_tiles = (p->n_queries + plan->tile_queries - 1) / plan->tile_queries;
    plan->split_pages = split_pages(plan);
    plan->n_splits =
        plan->n_pages ? (plan->n_pages + plan->split_pages - 1) / plan->split_pages : 1;
    plan->score_scale = p->logit_softcap > 0 ? p->scale / p->logit_softcap : p->scale;
    plan->n_parts = (plan->centered ? 1 : 0) +
                    (plan->n_splits > 1 ? (size_t)plan->n_kv_heads * plan->k_views.n : 0);
    const double rows = (double)p->n_queries * p->n_heads,
                 products = (double)p->n_tokens * (plan->k_dim + plan->v_dim),
                 transforms = (double)plan->k_views.n * plan->k_dim * plan->k_dim *
                              (has_matrices(plan) ? MATRIX_READ_COST : 1);
    plan->n_threads = threads_for(plan, rows * (products + (plan->n_splits > 1 ? transforms : 0)));
    return lay_out_workspace(plan);
}
