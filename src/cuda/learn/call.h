/* call.h - a call of kvant_cuda_learn: where a sub-head's numbers lie in working memory. A thread
 * block has one part of a kv head ("sub-head"). The functions are the same on a GPU and on a
 * CPU. */
#pragma once

#include "../../device/learn_room.h"
#include "sums.h"

/* The arguments of all kernels. A call has sub-heads of all its layers, layer after layer. */
typedef struct learn_call {
    kvant_cuda_learn_args args;
    kvant_learn_room room;
    kvant_cuda_learn_layer one; /* the only layer, if the arguments have no others */
} learn_call;

KVANT_ON_BOTH static inline learn_call learn_call_of(const kvant_cuda_learn_args *args)
{
    learn_call call = { *args, kvant_learn_room_of(args), { args->rows, { 0 }, 0, 0, 0 } };
    for (uint32_t i = 0; i < KVANT_CUDA_LEARN_BATCHES; i++)
        call.one.queries[i] = args->queries[i];
    call.one.triangles = args->triangles;
    call.one.centers = args->centers;
    call.one.start = args->start;
    return call;
}

TEAM_FN const kvant_cuda_learn_layer *learn_layer_of(const learn_call *call, uint32_t sub)
{
    return call->args.n_layers > 0 ? call->args.layers + sub / kvant_learn_subs(&call->args)
                                   : &call->one;
}

TEAM_FN char *learn_room_at(const learn_call *call, size_t offset)
{
    return (char *)call->args.workspace + offset;
}

TEAM_FN uint32_t learn_parts(const learn_call *call)
{
    return call->args.head_dim / call->args.part;
}

TEAM_FN learn_input learn_input_of(const learn_call *call, uint32_t sub)
{
    const size_t vectors = kvant_learn_vectors(&call->args);
    const learn_input in = { &call->args,
                             learn_layer_of(call, sub),
                             sub % kvant_learn_subs(&call->args) / learn_parts(call),
                             sub % learn_parts(call),
                             (const float *)(void *)learn_room_at(call, call->room.phases),
                             (uint8_t *)learn_room_at(call, call->room.flags) + sub * vectors,
                             (float *)(void *)learn_room_at(call, call->room.work) +
                                 sub * vectors * call->args.part };
    return in;
}

TEAM_FN learn_rule learn_rule_of(const learn_call *call, uint32_t sub)
{
    float *const at = (float *)(void *)learn_room_at(call, call->room.rules) +
                      sub * kvant_learn_rule(call->args.part);
    const learn_rule rule = { at, at + call->args.part, at + 2 * call->args.part };
    return rule;
}

/* The vectors of a slice, of keys and then of queries, and where their sums go. */
typedef struct learn_slice {
    const float *vectors;
    int n_vectors;
    float *products, *total; /* total: the sum of keys; NULL for queries */
} learn_slice;

TEAM_FN float *learn_sums_at(const learn_call *call, uint32_t sub)
{
    return (float *)(void *)learn_room_at(call, call->room.sums) +
           sub * kvant_learn_sums(&call->args);
}

TEAM_FN learn_slice learn_slice_of(const learn_call *call, uint32_t sub, uint32_t slice)
{
    const kvant_cuda_learn_args *args = &call->args;
    const size_t n = args->part, keys = kvant_learn_key_slices(args);
    const bool is_key = slice < keys;
    const size_t first = (is_key ? slice : slice - keys) * KVANT_LEARN_SLICE,
                 all = is_key ? args->n_rows : (size_t)learn_n_queries(args), left = all - first;
    float *const sums = learn_sums_at(call, sub);
    const learn_slice s = { learn_input_of(call, sub).vectors +
                                ((is_key ? 0 : args->n_rows) + first) * n,
                            (int)(left < KVANT_LEARN_SLICE ? left : KVANT_LEARN_SLICE),
                            sums + keys * n + slice * n * n, is_key ? sums + slice * n : NULL };
    return s;
}

TEAM_FN learn_sums learn_sums_of(const learn_call *call, uint32_t sub)
{
    const kvant_cuda_learn_args *args = &call->args;
    const size_t n = args->part, keys = kvant_learn_key_slices(args);
    const float *const at = learn_sums_at(call, sub);
    const learn_sums sums = { learn_input_of(call, sub).counts,
                              (int)args->n_rows,
                              learn_n_queries(args),
                              (int)keys,
                              (int)kvant_learn_query_slices(args),
                              learn_rule_of(call, sub).origin,
                              at,
                              at + keys * n,
                              at + keys * n * (n + 1) };
    return sums;
}

/* Which sub-head and transform: the numbers of transform 0 come first. */
TEAM_FN size_t learn_index(const learn_call *call, uint32_t sub, uint32_t transform)
{
    return (size_t)transform * kvant_learn_all_subs(&call->args) + sub;
}

TEAM_FN learn_tables learn_tables_of(const learn_call *call, uint32_t sub, uint32_t transform)
{
    const kvant_cuda_learn_args *args = &call->args;
    const uint32_t n = args->part;
    double *const at = (double *)(void *)learn_room_at(call, call->room.tables) +
                       learn_index(call, sub, transform) * kvant_learn_tables(n);
    const learn_tables t = { at, at + 2, at + 2 + n,
                             learn_rotations_at(args->pairs + sub % learn_parts(call) * (n / 2),
                                                (int)(n / 2), &args->spans[transform],
                                                (learn_complex *)(void *)(at + 2 + 2 * n)) };
    return t;
}

/* The matrices of a sub-head and a transform. */
TEAM_FN learn_space learn_space_of(const learn_call *call, uint32_t sub, uint32_t transform,
                                   learn_shared *shared)
{
    const size_t n = call->args.part;
    double *const at = (double *)(void *)learn_room_at(call, call->room.work) +
                       learn_index(call, sub, transform) * kvant_learn_matrices(call->args.part);
    const learn_space space = { shared, at, at + n * n, at + 2 * n * n, at + 3 * n * n };
    return space;
}

TEAM_FN uint16_t *learn_triangle_of(const learn_call *call, uint32_t sub, uint32_t transform)
{
    const uint32_t subs = kvant_learn_subs(&call->args);
    return learn_layer_of(call, sub)->triangles +
           ((size_t)transform * subs + sub % subs) * kvant_triangle_size(call->args.part);
}

TEAM_FN double *learn_balance_of(const learn_call *call, uint32_t sub, uint32_t transform)
{
    return (double *)(void *)learn_room_at(call, call->room.balance) +
           2 * learn_index(call, sub, transform);
}

/* The work of each kernel of a team. The caller has the shared memory. */

TEAM_FN void learn_call_tables(const learn_call *call, uint32_t sub, uint32_t transform,
                               double *part, float *center, float *start)
{
    const kvant_cuda_learn_args *args = &call->args;
    const learn_sums sums = learn_sums_of(call, sub);
    const learn_tables tables = learn_tables_of(call, sub, transform);
    const kvant_cuda_learn_layer *const layer = learn_layer_of(call, sub);
    const uint32_t n = args->part, parts = learn_parts(call),
                   kv_head = sub % kvant_learn_subs(args) / parts;
    learn_make_tables(&sums, &tables, args->center_span, part, center, start);
    TEAM_SYNC();
    TEAM_EACH (i, 0, (int)n) {
        const size_t channel = (size_t)kv_head * args->head_dim +
                               kvant_part_channel(args->head_dim, n, sub % parts, (uint32_t)i);
        layer->centers[(size_t)transform * args->n_kv_heads * args->head_dim + channel] = center[i];
        if (transform == 0)
            layer->start[channel] = start[i];
    }
}

TEAM_FN void learn_call_pair(const learn_call *call, uint32_t sub, uint32_t transform, int x, int y)
{
    const learn_sums sums = learn_sums_of(call, sub);
    const learn_tables tables = learn_tables_of(call, sub, transform);
    const learn_space space = learn_space_of(call, sub, transform, NULL);
    const learn_moments moments =
        learn_moments_of(&tables, call->args.head_dim, space.keys, space.queries);
    learn_pair(&sums, &tables, call->args.center_span, &moments, x, y);
}

TEAM_FN void learn_call_solve(const learn_call *call, uint32_t sub, uint32_t transform,
                              learn_shared *shared)
{
    const learn_space space = learn_space_of(call, sub, transform, shared);
    learn_solve(learn_tables_of(call, sub, transform).counted, &space, (int)call->args.part,
                learn_triangle_of(call, sub, transform), learn_balance_of(call, sub, transform));
}

/* head: which kv head of all layers. */
TEAM_FN void learn_call_balance(const learn_call *call, uint32_t head, uint32_t transform)
{
    const uint32_t parts = learn_parts(call), sub = head * parts;
    learn_balance((int)call->args.part, (int)parts, learn_balance_of(call, sub, transform),
                  learn_triangle_of(call, sub, transform));
}
