/* plan.h - cuts an attention call into work items and lays out its workspace.
 *
 * The cut depends on the problem alone, never on the number of threads, so results are
 * reproducible. */
#pragma once

#include <kvant/attention.h>

#include "../cache/write.h"

struct kvant_attention_reader;

/* The transforms (kvant_version) that the pages of a problem use, numbered from 0. */
typedef struct kvant_used_transforms {
    uint32_t n;
    uint8_t transforms[KVANT_MAX_TRANSFORMS];
    uint8_t number[KVANT_MAX_TRANSFORMS]; /* the number of each transform */
} kvant_used_transforms;

/* A view is a pair of a transform and a shift of slots (cache/shift.h). All keys of a view need the
 * same transformed queries. */
#define KVANT_MAX_VIEWS (KVANT_MAX_TRANSFORMS * KVANT_MOST_SHIFTS)
#define KVANT_NO_VIEW UINT16_MAX

/* The views that query tokens of a problem see, numbered from 0. */
typedef struct kvant_used_views {
    uint32_t n;
    uint8_t transform_id[KVANT_MAX_VIEWS], shift[KVANT_MAX_VIEWS];
    /* the number of each view; KVANT_NO_VIEW: not seen */
    uint16_t number[KVANT_MAX_TRANSFORMS][KVANT_MOST_SHIFTS];
} kvant_used_views;

typedef struct kvant_attention_plan {
    kvant_attention_problem problem;
    const struct kvant_attention_reader *reader; /* reads the pages (work_item.h) */
    /* the tensors that the tensor reader reads, or NULL */
    const kvant_tensor *k, *v;
    const void *source; /* private data of the reader */
    /* A row of k and v that the same loop encodes, or NULL; and its block. */
    const kvant_write *write;
    uint32_t written_block;
    /* The same loop calls this first, before the work items; or NULL. */
    void (*beside)(void *user);
    void *user;
    kvant_used_views k_views;
    kvant_used_transforms v_transforms;
    uint32_t n_kv_heads, group_heads; /* query heads per kv head */
    uint32_t k_dim, v_dim;            /* padded to multiples of 16 */
    uint32_t tile_queries, n_tiles;   /* query tokens of a work item */
    uint32_t n_pages, split_pages, n_splits;
    uint32_t n_threads; /* threads that are worth using */
    /* Parts that come before the work items: the phases if centered, and with several splits the
     * queries of each view and kv head. */
    size_t n_parts;
    size_t own_per_row; /* floats per row of a work item's scratch that belong to the reader */
    float score_scale;  /* factor of the query: scale, or scale / softcap */
    bool centered;      /* some blocks of the keys have their own centre (cache/center.h) */
    bool mixed;         /* some blocks have slots with different shifts */
    /* Workspace, in floats from its start. A row is (kv head, query token, group head). */
    size_t n_rows;
    size_t queries;  /* [view of k][row][k_dim], transformed and scaled */
    size_t offsets;  /* [view of k][row]: the term that the scores of the view's pages lack */
    size_t products; /* [view of k][row][k_dim]: kvant_center_products, if centered */
    /* The phases of the blocks' positions, if centered: cosines, then sines. The first part is
     * [k_dim][page] for KVANT_ATTENTION_CHUNK consecutive blocks from position 0 on. Then each
     * chunk has a part. The part's last number is 1 if the chunk's blocks are consecutive,
     * otherwise 0. With 1 the part begins with [k_dim] for the position of its first block; with 0
     * it has [k_dim][page] for all its blocks. */
    size_t phases;
    /* If n_splits > 1: [row][split][KVANT_ATTENTION_HEAD + the transforms of v x v_dim rounded up
     * to 16]. */
    size_t partials;
    size_t partial_stride;
    size_t counters; /* [tile][kv head]: finished splits */
    size_t ready;    /* finished parts: [kv head], then the phases, then encoded rows: [kv head] */
    size_t scratch, scratch_stride; /* one per thread */
    size_t total;
} kvant_attention_plan;

/* The most query rows of a work item, unless a single query token has more. */
#define KVANT_ATTENTION_MAX_ROWS 96u
/* Floats before the sums of a partial result: its maximum and one total per transform of the
 * values. */
#define KVANT_ATTENTION_HEAD 16u
#define KVANT_ATTENTION_CHUNK 16u /* Pages whose blocks' centres are multiplied together. */

/* Cuts the problem. The caller has checked it and set plan->problem, reader, n_kv_heads, k_dim,
 * v_dim, versions and centered. False when the workspace's size overflows. */
bool kvant_attention_cut(kvant_attention_plan *plan);

/* Returns KVANT_ERR_ARGUMENT when a page's block is not below n. */
kvant_status kvant_attention_check_blocks(const kvant_attention_plan *plan, uint32_t n);

/* Copies the caller's problem into the plan and checks everything that does not depend on the
 * source of keys and values. */
kvant_status kvant_attention_accept_problem(kvant_attention_plan *plan,
                                            const kvant_attention_problem *problem,
                                            uint32_t n_kv_heads);

/* The most query rows that a work item can have. */
static inline uint32_t kvant_attention_rows(const kvant_attention_plan *plan)
{
    return plan->tile_queries * plan->group_heads;
}

static inline size_t kvant_attention_chunks(const kvant_attention_plan *plan)
{
    return (plan->n_pages + (size_t)KVANT_ATTENTION_CHUNK - 1) / KVANT_ATTENTION_CHUNK;
}

/* Floats for a work item's record of its views (work_item.h), in whole cache lines. */
static inline size_t kvant_attention_ready_floats(const kvant_attention_plan *plan)
{
    return (3 * (size_t)plan->k_views.n + 15) / 16 * 16;
}

/* Floats of the phases of one chunk, in whole cache lines. */
static inline size_t kvant_attention_chunk_floats(const kvant_attention_plan *plan)
{
    return (plan->k_dim + (size_t)1) * KVANT_ATTENTION_CHUNK;
}

/* The block that holds a page of the sequence; negative when the page is hidden. */
static inline int64_t kvant_attention_block(const kvant_attention_plan *plan, uint32_t page)
{
    const int32_t *table = plan->problem.block_table;
    return table ? table[page] : (int64_t)plan->problem.first_block + page;
}
