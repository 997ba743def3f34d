/* index.h - the codes of a vector index on a GPU: calls of libkvant_cuda.so for src/index/gpu.c, on
 * plain data. The functions leave no message. */
#pragma once

#include <kvant/kvant.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvant_cuda_index kvant_cuda_index;

#define KVANT_CUDA_INDEX_MOST_K 4096u /* a list of candidates has at most LONG_LIST places */

/* Packs of 32 vectors (src/kernels/packs.h), on the host. Arrays have 32 elements per pack. */
typedef struct kvant_cuda_index_args {
    uint32_t bits, n_quads;
    const int8_t *levels;           /* by code; unused at 8 bits */
    uint8_t bias;                   /* level + bias is from 0 to 127; unused at 8 bits */
    size_t n;                       /* slots 0 .. n - 1 are in use */
    const float *factors, *offsets; /* offsets NULL: there are none */
    const uint64_t *ids;            /* n; NULL: slot s has id s */
} kvant_cuda_index_args;

/* Allocates memory for the packs on the calling thread's current GPU, and copies everything except
 * the packs. KVANT_ERR_MEMORY; KVANT_ERR_UNSUPPORTED: no kernel reads codes of these bits. On an
 * error *index is NULL. */
kvant_status kvant_cuda_index_create(const kvant_cuda_index_args *args, kvant_cuda_index **index);
void kvant_cuda_index_free(kvant_cuda_index **index);

/* Copies packs first to first + n - 1. */
kvant_status kvant_cuda_index_put(kvant_cuda_index *index, size_t first, size_t n,
                                  const uint8_t *codes);

typedef struct kvant_cuda_found {
    float key;
    uint32_t slot;
} kvant_cuda_found;

/* n queries in host memory, in tiles of 32 as kvant_pack_queries arranges them. Tile i begins at x
 * + i * 128 n_quads. */
typedef struct kvant_cuda_find_args {
    const int8_t *x;
    const int32_t *sums;
    const float *scales, *weights;
    size_t n;
    uint32_t k;              /* 1 to KVANT_CUDA_INDEX_MOST_K */
    const uint32_t *passes;  /* a bit per slot that may be found; NULL: all may */
    kvant_cuda_found *found; /* n x k */
    uint32_t *n_found;       /* n */
} kvant_cuda_find_args;

/* found[i * k ..] = the vectors that query i finds, the largest key first; among equal keys the
 * smallest id first. A call waits while another call for the same index runs. KVANT_ERR_MEMORY,
 * KVANT_ERR_CUDA. */
kvant_status kvant_cuda_index_find(kvant_cuda_index *index, const kvant_cuda_find_args *args);

#ifdef __cplusplus
}
#endif
