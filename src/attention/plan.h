/* plan.h - how an attention call is cut into units of work, and where its workspace holds what.
 *
 * The cut depends on the problem alone, never on the number of threads: that makes results reproducible. */
#ifndef KVANT_ATTENTION_PLAN_H
#define KVANT_ATTENTION_PLAN_H

#include <kvant/attention.h>

#include "../cache/cells.h"

struct kvant_attention_reader;

typedef struct kvant_attention_plan {
    const kvant_attention_args *args;            /* without k and v where source is set */
    const struct kvant_attention_reader *reader; /* of cells or of source (unit.h) */
    const void *source;                          /* what another reader than that of cells reads */
    uint32_t n_kv_heads, group_heads;            /* query heads of a kv head */
    uint32_t k_dim, v_dim;                       /* padded to multiples of 16 */
    uint32_t tile_tokens, n_tiles;               /* query tokens of a unit */
    uint32_t n_pages, split_pages, n_splits;
    uint32_t n_threads; /* worth using */
    float score_scale;  /* on the query: scale, or scale / softcap */
    /* Workspace, in floats from its start. */
    size_t queries;  /* [kv head][token][group head][k_dim], rotated and scaled */
    size_t partials; /* [kv head][token][group head][split][2 + v_dim rounded up to 16], if n_splits > 1 */
    size_t partial_stride;
    size_t scratch, scratch_stride; /* one a thread */
    size_t total;
} kvant_attention_plan;

#define KVANT_ATTENTION_MAX_ROWS 96u /* query rows (tokens x group heads) of a unit, unless one token has more */

/* False when the arguments are not valid or the workspace's size overflows. */
bool kvant_attention_make_plan(const kvant_attention_args *args, kvant_attention_plan *plan);

/* The part of it that does not depend on what is read: wants args (checked), n_kv_heads, k_dim and v_dim. */
bool kvant_attention_cut(kvant_attention_plan *plan);

/* The most query rows a unit can have. */
static inline uint32_t kvant_attention_rows(const kvant_attention_plan *plan)
{
    return plan->tile_tokens * plan->group_heads;
}

#endif
