/* types.h - types and constants that all headers of the GPU device need: memory, a batch's cells
 * and positions, and the bounds of a cache. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/cuda_kernels.h>

#include "../../../src/store/learn.h"
#include "../../../src/store/plan.h"
#include "../abi.h"
#include "../kv_tensor.h"
#include "driver.h"

typedef struct kvp_gpu_cache kvp_gpu_cache;
typedef struct kvp_gpu_cells kvp_gpu_cells;
typedef struct kvp_gpu_mask kvp_gpu_mask;

/* Memory that grows and then loses its contents. Earlier allocations stay until the owner frees
 * them, because captured graphs may use them. */
typedef struct kvp_gpu_memory {
    void *at;
    size_t bytes;
    struct kvp_gpu_memory *former;
} kvp_gpu_memory;

typedef struct kvp_gpu_backend kvp_gpu_backend;

typedef struct kvp_gpu kvp_gpu;

struct kvp_gpu_learner_input; /* learner.h */

#define KVP_MOST_PAGES KVP_MOST_OPEN
/* A step of at most 16 tokens may be captured as one CUDA graph. Longer steps are mostly parts of
 * prompts, whose graphs are not computed again. */
#define KVP_SHORT_STEP_TOKENS 16u
#define KVP_KEPT_TOKENS KVANT_LEARN_QUERY_TOKENS /* of a prompt's batch: their queries are kept */
#define KVP_KEPT_BATCHES 4u                      /* batches whose queries are kept at a time */

/* Blocks of codecs whose groups have several tokens that are sealed at a time (groups.c). A step of
 * 2048 tokens in a row needs 33. For 8 kv heads of 128 numbers, 40 staging pages take 5 MiB. A step
 * with more blocks takes more passes over its rows. */
#define KVP_MOST_STAGED 40u

/* The id behind the ids of position buckets is for keys that were sealed before their layer had a
 * key transform. */
#define KVP_PLAIN KVANT_LESSON_BUCKETS
#define KVP_MOST_BUCKETS (KVP_PLAIN + 1)
#define KVP_MOST_TRANSFORMS KVANT_CUDA_MOST_MATRICES
#define KVP_MOST_MOVED (KVP_MOST_TRANSFORMS - KVP_MOST_BUCKETS)

/* How many of n blocks are sealed at a time. */
static inline uint32_t kvp_gpu_most_staged(uint32_t n)
{
    return n < KVP_MOST_STAGED ? n : KVP_MOST_STAGED;
}

/* Cell numbers and positions (or NULL) of a batch, as llama.cpp sent them to the GPU. */
typedef struct kvp_gpu_step {
    const int64_t *cells;
    const int32_t *positions;
    size_t n;
} kvp_gpu_step;

/* Whether the step is short, so that it may be in a captured graph. */
static inline bool kvp_gpu_is_short_step(const kvp_gpu_step *step)
{
    return step->n <= KVP_SHORT_STEP_TOKENS;
}
