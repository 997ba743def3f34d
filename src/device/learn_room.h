/* learn_room.h - the working memory of kvant_cuda_learn: what lies where. libkvant tells its size,
 * and libkvant_cuda uses it. */
#pragma once

#include <kvant/cuda_kernels.h>

#ifdef __CUDACC__
#define KVANT_LEARN_BOTH static __host__ __device__ inline
#else
#define KVANT_LEARN_BOTH static inline
#endif

typedef struct kvant_learn_room {
    size_t phases;  /* two numbers per key or query token and pair */
    size_t flags;   /* a byte per sub-head and vector */
    size_t counts;  /* per sub-head: the keys and queries that count */
    size_t sums;    /* per sub-head: origin, sum of keys, sums of products of keys and of queries */
    size_t balance; /* two numbers per transform and sub-head */
    size_t work;    /* per transform and sub-head: four matrices */
    size_t bytes;
} kvant_learn_room;

KVANT_LEARN_BOTH size_t kvant_learn_vectors(const kvant_cuda_learn_args *args)
{
    return args->n_rows + (size_t)args->n_tokens * args->group;
}

/* Numbers of a sub-head's sums. */
KVANT_LEARN_BOTH size_t kvant_learn_sums(uint32_t part)
{
    return 2 * (size_t)part + 2 * (size_t)part * part;
}

/* Numbers of a matrix in working memory. Smaller ones also serve as tables of turns and of nodes
 * (src/cuda/learn). */
KVANT_LEARN_BOTH size_t kvant_learn_matrix(uint32_t part)
{
    return (size_t)part * (part > 72 ? part : 72);
}

KVANT_LEARN_BOTH size_t kvant_learn_next(size_t *at, size_t bytes)
{
    const size_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

KVANT_LEARN_BOTH kvant_learn_room kvant_learn_room_of(const kvant_cuda_learn_args *args)
{
    const size_t subs = (size_t)args->n_kv_heads * (args->head_dim / args->part),
                 all = subs * args->n_transforms;
    kvant_learn_room room;
    size_t at = 0;
    room.phases = kvant_learn_next(&at, (args->n_rows + (size_t)args->n_tokens) * args->head_dim *
                                            sizeof(float));
    room.flags = kvant_learn_next(&at, subs * kvant_learn_vectors(args));
    room.counts = kvant_learn_next(&at, subs * 2 * sizeof(uint32_t));
    room.sums = kvant_learn_next(&at, subs * kvant_learn_sums(args->part) * sizeof(float));
    room.balance = kvant_learn_next(&at, all * 2 * sizeof(double));
    room.work = kvant_learn_next(&at, all * 4 * kvant_learn_matrix(args->part) * sizeof(double));
    room.bytes = at;
    return room;
}
