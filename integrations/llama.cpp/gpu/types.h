/* types.h - what all headers of the GPU device need: memory, a batch's cells and positions, and the
 * numbers that bound a cache. */
#ifndef KVP_GPU_TYPES_H
#define KVP_GPU_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/cuda_kernels.h>

#include "../abi.h"
#include "../kv_tensor.h"
#include "driver.h"

typedef struct kvp_gpu_cache kvp_gpu_cache;
typedef struct kvp_gpu_cells kvp_gpu_cells;
typedef struct kvp_gpu_mask kvp_gpu_mask;

/* Memory that grows; what it held is lost, and what captured graphs use stays until the owner
 * goes. */
typedef struct kvp_gpu_memory {
    void *at;
    size_t bytes;
    struct kvp_gpu_memory *former;
} kvp_gpu_memory;

typedef struct kvp_gpu_backend kvp_gpu_backend;

typedef struct kvp_gpu kvp_gpu;

struct kvp_gpu_lesson; /* learner.h */

#define KVP_MOST_PAGES KVP_MOST_OPEN
#define KVP_FEW_TOKENS 16u    /* a step of at most 16 tokens may be captured */
#define KVP_ENOUGH_ROWS 1024u /* to learn a matrix from */
#define KVP_ASKED_TOKENS 64u  /* of a prompt's batch, whose queries are kept */
#define KVP_ASKED_BATCHES 4u  /* that are kept at once */

/* Ranges of positions that have a matrix of their own, the last one without an end. Behind them is
 * KVP_PLAIN, for keys that were sealed before their layer had a matrix. */
#define KVP_PLAIN 7u
#define KVP_MOST_RANGES (KVP_PLAIN + 1)
#define KVP_MOST_TRANSFORMS KVANT_CUDA_MOST_MATRICES
#define KVP_MOST_MOVED (KVP_MOST_TRANSFORMS - KVP_MOST_RANGES)
#define KVP_FIRST_RANGE 2048u

/* Cell numbers and positions of a batch, as llama.cpp sent them to the GPU. positions: or NULL. */
typedef struct kvp_gpu_step {
    const int64_t *cells;
    const int32_t *positions;
    size_t n;
} kvp_gpu_step;

/* Not a batch: it may be in a captured graph. */
static inline bool kvp_gpu_is_few(const kvp_gpu_step *step)
{
    return step->n <= KVP_FEW_TOKENS;
}

#endif
