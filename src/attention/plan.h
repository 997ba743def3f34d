/* plan.h - cuts an attention call into units of work and lays out its workspace.
 *
 * The cut depends on the problem alone, never on the number of threads, so results are
 * reproducible. */
#pragma once

#include <kvant/attention.h>

#include "../cache/tensor.h"

struct kvant_attention_reader;

/* The versions that the pages of a problem have, numbered from 0. */
typedef struct kvant_used_versions {
    uint32_t n;
    uint8_t versions[KVANT_MAX_VERSIONS];
    uint8_t number[KVANT_MAX_VERSIONS]; /* of each version */
} kvant_used_versions;

/* Keys of one version whose slots have one shift (cache/shift.h) need the same queries. A view
 * is such a pair. */
#define KVANT_MAX_VIEWS (KVANT_MAX_VERSIONS * KVANT_MOST_SHIFTS)
#define KVANT_NO_VIEW UINT16_MAX

/* The views that query tokens of a problem see, numbered from 0. */
typedef struct kvant_used_views {
    uint32_t n;
    uint8_t version[KVANT_MAX_VIEWS], shift[KVANT_MAX_VIEWS];
    uint16_t number[KVANT_MAX_VERSIONS][KVANT_MOST_SHIFTS]; /* KVANT_NO_VIEW: none */
} kvant_used_views;

typedef struct kvant_attention_plan {
    kvant_attention_problem problem;
    const struct kvant_attention_reader *reader; /* unit.h */
    const kvant_tensor *k, *v;                   /* what the reader of tensors reads, or NULL */
    const void *source;                          /* private data of the reader */
    kvant_used_views k_views;
    kvant_used_versions v_versions;
    uint32_t n_kv_heads, group_heads; /* query heads of a kv head */
    uint32_t k_dim, v_dim;            /* padded to multiples of 16 */
    uint32_t tile_queries, n_tiles;   /* query tokens of a unit */
    uint32_t n_pages, split_pages, n_splits;
    uint32_t n_threads,
        n_preparing;    /* threads worth using, and before for queries that units share */
    size_t own_per_row; /* floats of a unit's scratch that are the reader's, per row */
    float score_scale;  /* on the query: scale, or scale / softcap */
    bool centered;      /* some blocks of the keys have centres of their own (cache/center.h) */
    bool mixed;         /* slots of some blocks have different shifts */
    /* Workspace, in floats from its start. A row is (kv head, query token, group head). */
    size_t n_rows;
    size_t queries;  /* [view of k][row][k_dim], transformed and scaled */
    size_t offsets;  /* [view of k][row]: what the scores of the view's pages lack */
    size_t products; /* [view of k][row][k_dim]: kvant_center_products, if centered */
    /* If centered, cosines, then sines. First [k_dim][page] of KVANT_ATTENTION_CHUNK blocks from
     * position 0 on. Then a part per chunk, which ends with 1 where the chunk's blocks follow each
     * other, else with 0. With 1 it begins with [k_dim] of the first block's position, with 0 it
     * has [k_dim][page] of all blocks. */
    size_t phases;
    /* [row][split][KVANT_ATTENTION_HEAD + versions of v x v_dim rounded up to 16], if n_splits >
     * 1 */
    size_t partials;
    size_t partial_stride;
    size_t counters;                /* [tile][kv head]: splits done */
    size_t scratch, scratch_stride; /* one per thread */
    size_t total;
} kvant_attention_plan;

#define KVANT_ATTENTION_MAX_ROWS 96u /* query rows of a unit, unless one query token has more */
/* floats before the sums of a partial result: its maximum, its totals */
#define KVANT_ATTENTION_HEAD 16u
#define KVANT_ATTENTION_CHUNK 16u /* pages whose blocks' centres are multiplied together */

/* Cuts the problem (checked: plan->problem), after reader, n_kv_heads, k_dim, v_dim, versions and
 * centered are set. False when the workspace's size overflows. */
bool kvant_attention_cut(kvant_attention_plan *plan);

/* KVANT_ERR_ARGUMENT when a page's block is not one of n. */
kvant_status kvant_attention_check_blocks(const kvant_attention_plan *plan, uint32_t n);

/* What does not depend on where keys and values are: copies the caller's problem into the plan and
 * checks it. */
kvant_status kvant_attention_take_problem(kvant_attention_plan *plan,
                                          const kvant_attention_problem *problem,
                                          uint32_t n_kv_heads);

/* The most query rows a unit can have. */
static inline uint32_t kvant_attention_rows(const kvant_attention_plan *plan)
{
    return plan->tile_queries * plan->group_heads;
}

static inline size_t kvant_attention_chunks(const kvant_attention_plan *plan)
{
    return (plan->n_pages + (size_t)KVANT_ATTENTION_CHUNK - 1) / KVANT_ATTENTION_CHUNK;
}

/* What a unit knows of its views (unit.h), in whole cache lines. */
static inline size_t kvant_attention_ready_floats(const kvant_attention_plan *plan)
{
    return (2 * (size_t)plan->k_views.n + 15) / 16 * 16;
}

/* Of a chunk's phases, in whole cache lines. */
static inline size_t kvant_attention_chunk_floats(const kvant_attention_plan *plan)
{
    return (plan->k_dim + (size_t)1) * KVANT_ATTENTION_CHUNK;
}

/* The block that holds a page of the sequence; negative: hidden. */
static inline int64_t kvant_attention_block(const kvant_attention_plan *plan, uint32_t page)
{
    const int32_t *table = plan->problem.block_table;
    return table ? table[page] : (int64_t)plan->problem.first_block + page;
}
