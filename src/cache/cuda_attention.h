/* cuda_attention.h - a call of attention on a GPU: by a cache (cuda_attention.c), or by a decode
 * step (cuda_steps.c). cuda_attention_stage.c finds the blocks of the call. */
#pragma once

#include "cuda_layers.h"

/* Pages that one launch decodes into the gathered pages. */
typedef struct gather_list {
    int role, state;
    uint32_t transform_id, n;
    const int32_t *from, *to; /* staging */
} gather_list;

/* One per role, state and transform. */
#define KVANT_CUDA_MOST_LISTS (2u * 2u * KVANT_MAX_TRANSFORMS)

/* The transforms of the blocks of a call. Arrays are by kvant_role. */
typedef struct call_transforms {
    uint32_t used[2], first[2]; /* a bit per transform; the lowest one */
    bool centred[2], scaled[2]; /* whether some transform has a centre, or a scale */
    bool through;               /* queries go through the matrix of each transform of keys */
} call_transforms;

typedef struct attention_call {
    const kvant_cache *cache;
    cuda_memory *memory;
    cuda_layer *layer;
    uint32_t number; /* of the layer */
    const kvant_attention_problem *p;
    const int32_t *sequences;
    uint32_t batch, stride; /* sequences; blocks of the longest sequence */
    /* On the host: batch x stride block numbers, without dropped blocks. After a sequence's last
     * block the entries are KVANT_NO_BLOCK. */
    int32_t *blocks;
    uint32_t n_blocks, dropped; /* batch x stride; dropped tokens, if there is one sequence */
    uint32_t n_kv_heads, head_dim;
    call_transforms transforms;
    bool gathers;  /* open blocks, or all blocks, are copied to the gathered pages */
    bool any_open; /* the table has entries below 0 */
    uint32_t n_gathered, n_lists;
    cuda_buffer *gathered; /* the gathered pages */
    gather_list lists[KVANT_CUDA_MOST_LISTS];
    /* On the host: batch x stride entries, then the transform of each entry's keys, a byte each. */
    int32_t *table;
    const int32_t *on_device; /* a copy of table on the device */
    const int32_t *lengths;   /* on the device */
    kvant_cuda_type type;     /* of queries and outputs */
    bool steps;               /* gathered page i holds the block of the next row of sequence i */
    /* For steps: the exact pages of these blocks. NULL: the blocks are gathered. */
    const int32_t *in_place;
} attention_call;

/* The i-th sequence of the call. */
static inline const kvant_sequence *sequence_of(const attention_call *c, uint32_t i)
{
    return &c->cache->sequences[c->sequences[i]];
}

/* Whether the blocks of the call have several transforms of keys, or of values. */
static inline bool has_several(const attention_call *c, int role)
{
    const uint32_t used = c->transforms.used[role];
    return used & (used - 1);
}

/* Makes a call with the cache's buffers and float queries. */
attention_call kvant_cuda_call_of(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                  uint32_t n_sequences, const kvant_attention_problem *p);

/* The blocks of the longest sequence: `stride` must be at least this. */
uint32_t kvant_cuda_call_blocks(const attention_call *c);

/* Finds blocks and transforms, makes the table, copies it to the device and gathers pages. */
kvant_status kvant_cuda_call_stage(attention_call *c);

/* How many 32-bit words the table and its transforms take. */
size_t kvant_cuda_call_words(const attention_call *c);

/* The gathered pages; whether their rows include their centre. */
kvant_cuda_pages kvant_cuda_call_pages(const attention_call *c, int role);
bool kvant_cuda_call_centers_back(const attention_call *c, int role);

/* Allocates the memory that kvant_cuda_call_run needs. After that kvant_cuda_call_run only enqueues
 * work. */
kvant_status kvant_cuda_call_room(const attention_call *c);
kvant_status kvant_cuda_call_run(attention_call *c);
