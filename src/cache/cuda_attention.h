/* cuda_attention.h - a call of attention on a GPU: of a cache (cuda_attention.c), or of a step
 * (cuda_steps.c). */
#pragma once

#include "cuda_layers.h"

/* Pages to gather that one launch decodes. */
typedef struct gather_list {
    int role, state;
    uint32_t version, n;
    const int32_t *from, *to; /* staging */
} gather_list;

#define KVANT_CUDA_MOST_LISTS (2u * 2u * KVANT_MAX_VERSIONS)

/* Versions of a call's blocks. Arrays are by kvant_role. */
typedef struct call_versions {
    uint32_t used[2], first[2]; /* a bit each; the first of them */
    bool centred[2], scaled[2]; /* any of them */
    bool through;               /* queries go through the matrix of each version of keys */
} call_versions;

typedef struct attention_call {
    const kvant_cache *cache;
    cuda_memory *memory;
    cuda_layer *layer;
    uint32_t number; /* of the layer */
    const kvant_attention_problem *p;
    const int32_t *sequences;
    uint32_t batch, stride; /* sequences; blocks of the longest */
    /* staging: batch x stride, without dropped ones, KVANT_NO_BLOCK behind the last */
    int32_t *blocks;
    uint32_t n_blocks, dropped; /* batch x stride; tokens, of one sequence */
    uint32_t n_kv_heads, head_dim;
    call_versions versions;
    bool gathers;  /* blocks that are open, or all of them, are copied */
    bool any_open; /* entries below 0 */
    uint32_t n_gathered, n_lists;
    cuda_buffer *gathered; /* their pages */
    gather_list lists[KVANT_CUDA_MOST_LISTS];
    int32_t *table;           /* staging: batch x stride, then the versions of keys, a byte each */
    const int32_t *on_device; /* the same */
    const int32_t *lengths;   /* on the device */
    kvant_cuda_type type;     /* of queries and outputs */
    bool steps; /* the block of each sequence's next row is its number's page of those gathered */
    const int32_t *in_place; /* of steps: the plan's pages of these blocks; NULL: gathered */
} attention_call;

/* With buffers of the cache, for float queries. */
attention_call kvant_cuda_call_of(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                  uint32_t n_sequences, const kvant_attention_problem *p);

/* Blocks of the longest sequence, what stride is at least. */
uint32_t kvant_cuda_call_blocks(const attention_call *c);

/* Finds blocks, versions and the table, copies it to the device and gathers pages. */
kvant_status kvant_cuda_call_stage(attention_call *c);

/* Numbers of 32 bits in a table with its versions. */
size_t kvant_cuda_call_words(const attention_call *c);

/* The pages that were gathered; whether rows are gathered with their centre. */
kvant_cuda_pages kvant_cuda_call_pages(const attention_call *c, int role);
bool kvant_cuda_call_centers_back(const attention_call *c, int role);

/* Memory that run needs; then run only enqueues work. */
kvant_status kvant_cuda_call_room(const attention_call *c);
kvant_status kvant_cuda_call_run(attention_call *c);
