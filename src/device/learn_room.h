/* learn_room.h - the working memory of kvant_cuda_learn: what lies where. libkvant tells its size,
 * and libkvant_cuda uses it. */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../base/attributes.h"

#define KVANT_LEARN_SLICE 128u /* vectors whose products are added apart */

typedef struct kvant_learn_room {
    size_t phases;  /* two numbers per key or query token and pair */
    size_t flags;   /* a byte per sub-head and vector */
    size_t rules;   /* per sub-head: origin, scales, and the length of a key that counts */
    size_t sums;    /* per sub-head and slice: sums of products; of keys also their sum */
    size_t tables;  /* per transform and sub-head: counts, means of keys, and rotations by RoPE */
    size_t balance; /* two numbers per transform and sub-head */
    /* per sub-head the vectors that are added; afterwards, per transform and sub-head, three
     * matrices and a table of nodes */
    size_t work;
    size_t bytes;
} kvant_learn_room;

/* The parts of all kv heads of a layer, and of all layers. */
KVANT_ON_BOTH static inline uint32_t kvant_learn_subs(const kvant_cuda_learn_args *args)
{
    return args->n_kv_heads * (args->head_dim / args->part);
}

KVANT_ON_BOTH static inline uint32_t kvant_learn_all_subs(const kvant_cuda_learn_args *args)
{
    return (args->n_layers > 0 ? args->n_layers : 1) * kvant_learn_subs(args);
}

KVANT_ON_BOTH static inline size_t kvant_learn_vectors(const kvant_cuda_learn_args *args)
{
    return args->n_rows + (size_t)args->n_tokens * args->group;
}

KVANT_ON_BOTH static inline uint32_t kvant_learn_key_slices(const kvant_cuda_learn_args *args)
{
    return (args->n_rows + KVANT_LEARN_SLICE - 1) / KVANT_LEARN_SLICE;
}

KVANT_ON_BOTH static inline uint32_t kvant_learn_query_slices(const kvant_cuda_learn_args *args)
{
    return (args->n_tokens * args->group + KVANT_LEARN_SLICE - 1) / KVANT_LEARN_SLICE;
}

KVANT_ON_BOTH static inline size_t kvant_learn_rule(uint32_t part)
{
    return 2 * (size_t)part + 1;
}

/* Numbers of a sub-head's sums: sums of keys, then products of keys, then products of queries. */
KVANT_ON_BOTH static inline size_t kvant_learn_sums(const kvant_cuda_learn_args *args)
{
    const size_t n = args->part, keys = kvant_learn_key_slices(args);
    return keys * n + (keys + kvant_learn_query_slices(args)) * n * n;
}

/* Numbers of the tables of a sub-head and a transform (src/cuda/learn/moments.h). The most buckets
 * that a transform can have are counted, because a caller plans memory before it knows buckets. */
KVANT_ON_BOTH static inline size_t kvant_learn_tables(uint32_t part)
{
    return 2 + (2 + 3 * KVANT_CUDA_LEARN_BUCKETS + 4) * (size_t)part;
}

/* Numbers of the matrices of a sub-head and a transform. A table has 32 nodes for each channel. */
KVANT_ON_BOTH static inline size_t kvant_learn_matrices(uint32_t part)
{
    return (3 * (size_t)part + 32) * part;
}

KVANT_ON_BOTH static inline size_t kvant_learn_next(size_t *at, size_t bytes)
{
    const size_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

KVANT_ON_BOTH static inline kvant_learn_room kvant_learn_room_of(const kvant_cuda_learn_args *args)
{
    const size_t subs = kvant_learn_all_subs(args), all = subs * args->n_transforms,
                 matrices = all * kvant_learn_matrices(args->part) * sizeof(double),
                 vectors = subs * kvant_learn_vectors(args) * args->part * sizeof(float);
    kvant_learn_room room;
    size_t at = 0;
    room.phases = kvant_learn_next(&at, (args->n_rows + (size_t)args->n_tokens) * args->head_dim *
                                            sizeof(float));
    room.flags = kvant_learn_next(&at, subs * kvant_learn_vectors(args));
    room.rules = kvant_learn_next(&at, subs * kvant_learn_rule(args->part) * sizeof(float));
    room.sums = kvant_learn_next(&at, subs * kvant_learn_sums(args) * sizeof(float));
    room.tables = kvant_learn_next(&at, all * kvant_learn_tables(args->part) * sizeof(double));
    room.balance = kvant_learn_next(&at, all * 2 * sizeof(double));
    room.work = kvant_learn_next(&at, matrices > vectors ? matrices : vectors);
    room.bytes = at;
    return room;
}
