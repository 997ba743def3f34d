/* cuda_attention.h - a call of attention on a GPU: of a cache (cuda_attention.c), or of a step (cuda_steps.c). */
#pragma once

#include "cuda_layers.h"

/* Pages to gather, for each kv role and state. */
typedef struct gather_list {
    int32_t *from, *to; /* staging */
    uint32_t n;
} gather_list;

typedef struct attention_call {
    const kvant_cache *cache;
    cuda_memory *memory;
    cuda_layer *layer;
    uint32_t number; /* of the layer */
    const kvant_attention_problem *p;
    const int32_t *sequences;
    uint32_t batch, stride; /* sequences; blocks of the longest */
    int32_t *blocks;        /* staging: batch x stride, without dropped ones, KVANT_NO_BLOCK behind the last */
    uint32_t n_blocks, dropped, n_kv_heads, head_dim; /* n_blocks: batch x stride; dropped: tokens, of one sequence */
    uint32_t n_gathered;
    cuda_buffer *gathered; /* their pages */
    gather_list lists[2][2]; /* by kvant_role, SEALED or OPEN */
    uint32_t n_parts;
    uint8_t versions[KVANT_CUDA_MOST_PARTS][2]; /* of keys, of values */
    int32_t *tables; /* staging: n_parts x batch x stride */
    const int32_t *on_device; /* tables */
    const int32_t *lengths;   /* on the device */
    kvant_cuda_type type;     /* of queries and outputs */
    bool steps;               /* the block of each sequence's next row is its number's page of those gathered */
    const int32_t
        *in_place; /* of steps: the plan's pages of these blocks; NULL: they are gathered */
    bool any_open;            /* entries below 0 */
    bool merged;
    bool centers_back;                     /* keys are gathered with their centre */
    uint32_t ends[2][KVANT_MAX_VERSIONS]; /* of keys' lists then: by state, where each version's blocks end */
} attention_call;

/* With buffers of the cache, for float queries. */
attention_call kvant_cuda_call_of(kvant_cache *cache, uint32_t layer, const int32_t *sequences, uint32_t n_sequences,
                                  const kvant_attention_problem *p);

/* Blocks of the longest sequence, what stride is at least. */
uint32_t kvant_cuda_call_blocks(const attention_call *c);

/* Finds blocks, versions and tables, copies these to the device and gathers pages. */
kvant_status kvant_cuda_call_stage(attention_call *c);

/* The pages that were gathered; whether a part's keys have a centre. */
kvant_cuda_pages kvant_cuda_call_pages(const attention_call *c, int role);
bool kvant_cuda_call_centred(const attention_call *c);

/* Memory that run needs; then run only enqueues work. */
kvant_status kvant_cuda_call_room(const attention_call *c);
kvant_status kvant_cuda_call_run(attention_call *c);
