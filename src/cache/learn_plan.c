/* learn_plan.c - the arguments of learning on a GPU (kvant_cuda_learn): the parts of a head, the
 * pairs of channels that RoPE rotates, and position buckets. Also tells how many bytes learned
 * matrices take. Needs no GPU. */
#include "learning.h"

#include <kvant/cuda_kernels.h>

#include "../base/abi.h"
#include "../base/attributes.h"
#include "../device/learn_room.h"
#include "../math/compact.h"

_Static_assert(KVANT_CUDA_LEARN_BUCKETS > KVANT_MOST_BUCKETS, "a span can have all buckets");

#define MOST_PART 128u /* channels, for which kernels have room */

static bool add_span(kvant_cuda_learn_args *args, const kvant_rope_state *of, uint32_t first,
                     uint32_t end)
{
    kvant_cuda_learn_span *span = &args->spans[args->n_transforms];
    if (args->n_transforms == KVANT_CUDA_LEARN_TRANSFORMS)
        return false;
    span->n_buckets = end - first;
    for (uint32_t i = first; i < end; i++)
        kvant_rope_bucket_edges(of, i, span->edges + (i - first));
    args->n_transforms++;
    return true;
}

/* Pairs of all parts; false: RoPE rotates channels of different parts together. */
static bool find_pairs(const kvant_rope *rope, kvant_cuda_learn_args *args)
{
    const uint32_t n = args->part, parts = args->head_dim / n;
    kvant_pair pairs[KVANT_MAX_HEAD_DIM / 2];
    bool whole = rope && kvant_rope_check(rope, args->head_dim) == KVANT_OK;
    for (uint32_t part = 0; part < parts && whole; part++)
        whole = kvant_rope_part_pairs(rope, args->head_dim, n, part, pairs + part * (n / 2));
    for (uint32_t i = 0; i < args->head_dim / 2; i++)
        args->pairs[i] =
            whole ? (kvant_cuda_rope_pair){ pairs[i].first, pairs[i].second, pairs[i].frequency }
                  : (kvant_cuda_rope_pair){ (uint16_t)(i % (n / 2)),
                                            (uint16_t)(i % (n / 2) + n / 2), 0 };
    return whole;
}

static bool accept(const kvant_cuda_learn_args *from, kvant_cuda_learn_args *args)
{
    return KVANT_ACCEPT_STRUCT(kvant_cuda_learn_args, args, from, workspace_bytes);
}

static kvant_status give_back(kvant_cuda_learn_args *to, const kvant_cuda_learn_args *args)
{
    return KVANT_RETURN_STRUCT(kvant_cuda_learn_args, to, args, workspace_bytes)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}

kvant_status kvant_cuda_learn_plan(const kvant_rope *rope, kvant_cuda_learn_args *args,
                                   uint32_t *knows_rope)
{
    kvant_cuda_learn_args a;
    kvant_rope r = { 0 };
    KVANT_RETURN_IF(!knows_rope || !accept(args, &a) || !a.head_dim ||
                        (rope && !KVANT_ACCEPT_STRUCT(kvant_rope, &r, rope, n_position_transforms)),
                    KVANT_ERR_ARGUMENT);
    a.part = kvant_key_transform_part(a.head_dim);
    KVANT_RETURN_IF(a.part > MOST_PART || a.part % 2 || a.head_dim % a.part, KVANT_ERR_UNSUPPORTED);
    *knows_rope = find_pairs(rope ? &r : NULL, &a);
    kvant_rope_state of = { .n_positions = *knows_rope && r.n_positions ? r.n_positions : 1 };
    of.n_buckets = kvant_rope_buckets(of.n_positions);
    a.center_span = *knows_rope && r.block_centers ? KVANT_PAGE_TOKENS : 0;
    a.n_transforms = 0;
    add_span(&a, &of, 0, of.n_buckets);
    return give_back(args, &a);
}

kvant_status kvant_cuda_learn_span_add(kvant_cuda_learn_args *args, int32_t first, int32_t last)
{
    const kvant_rope_state all = { .n_buckets = KVANT_MOST_BUCKETS, .n_positions = INT32_MAX };
    kvant_cuda_learn_args a;
    KVANT_RETURN_IF(first < 0 || last < first || !accept(args, &a), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(
        !add_span(&a, &all, kvant_rope_bucket(&all, first), kvant_rope_bucket(&all, last) + 1),
        KVANT_ERR_ARGUMENT);
    return give_back(args, &a);
}

size_t kvant_cuda_learn_bytes(const kvant_cuda_learn_args *args)
{
    kvant_cuda_learn_args a;
    return accept(args, &a) && a.part ? kvant_learn_room_of(&a).bytes : 0;
}

size_t kvant_cuda_triangle_halves(uint32_t head_dim, uint32_t n_kv_heads)
{
    const uint32_t part = kvant_key_transform_part(head_dim);
    return (size_t)n_kv_heads * (head_dim / part) * kvant_triangle_size(part);
}

size_t kvant_cuda_compact_bytes(uint32_t head_dim, uint32_t n_kv_heads)
{
    return kvant_compact_size(head_dim, n_kv_heads);
}
