/* index.h - an index's codes on a GPU: calls of libkvant_cuda.so for src/index, on plain data
 * (src/index/gpu.c). The functions leave no message. */
#pragma once

#include <kvant/kvant.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvant_cuda_index kvant_cuda_index;

#define KVANT_CUDA_INDEX_MOST_K 4096u

/* Packs of 32 vectors (src/kernels/packs.h), on the host. Arrays have 32 numbers for each pack. */
typedef struct kvant_cuda_index_args {
    uint32_t bits, n_quads;
    const int8_t *levels;           /* of codes; not for 8 bits */
    uint8_t bias;                   /* level + bias is from 0 to 127; not for 8 bits */
    size_t n;                       /* slots in use: 0 .. n - 1 */
    const float *factors, *offsets; /* offsets: NULL for none */
    const uint64_t *ids;            /* n; NULL: slot s has id s */
} kvant_cuda_index_args;

/* Room for the packs on the calling thread's current GPU, and a copy of the rest. KVANT_ERR_MEMORY;
 * KVANT_ERR_UNSUPPORTED: bits that have no kernel. On an error *index is NULL. */
kvant_status kvant_cuda_index_create(const kvant_cuda_index_args *args, kvant_cuda_index **index);
void kvant_cuda_index_free(kvant_cuda_index **index);

/* Copies packs first to first + n. */
kvant_status kvant_cuda_index_put(kvant_cuda_index *index, size_t first, size_t n,
                                  const uint8_t *codes);

typedef struct kvant_cuda_found {
    float key;
    uint32_t slot;
} kvant_cuda_found;

/* n queries, as kvant_pack_queries has them 32 at a time: those of tile i at x + i * 128 n_quads. All on the host. */
typedef struct kvant_cuda_find_args {
    const int8_t *x;
    const int32_t *sums;
    const float *scales, *weights;
    size_t n;
    uint32_t k;              /* 1 to KVANT_CUDA_INDEX_MOST_K */
    const uint32_t *passes;  /* a bit per slot; NULL: all */
    kvant_cuda_found *found; /* n x k */
    uint32_t *n_found;       /* n */
} kvant_cuda_find_args;

/* found[i * k ..] = what query i finds, the largest key first, of equal keys the smallest id. One call of an index runs at
 * a time; others wait. KVANT_ERR_MEMORY, KVANT_ERR_CUDA. */
kvant_status kvant_cuda_index_find(kvant_cuda_index *index, const kvant_cuda_find_args *args);

#ifdef __cplusplus
}
#endif
