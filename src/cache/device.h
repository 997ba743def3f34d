/* device.h - the inside of kvant_cache (cache.c: life, rows, attention; sequence.c: blocks of sequences;
 * layers.c: blocks of all layers), and what it asks of the device that holds its pages.
 *
 * A cache is a tensor per layer and role on every device. A device makes the tensors' memory, brings
 * rows to them, and computes attention: device_cpu.c in the computer's memory, device_cuda.c on a
 * GPU. Rows, queries and outputs lie on the device. layers.c has what concerns all layers alike.
 *
 * Layer, block and slot numbers are right when a device gets them. */
#pragma once

#include <kvant/cache.h>
#include <kvant/tensor.h>

#define KVANT_NO_BLOCK (-1)

typedef struct kvant_sequence {
    bool alive;
    uint32_t n_blocks; /* entries of table */
    int32_t *table;    /* max_blocks entries; KVANT_NO_BLOCK for blocks that were dropped */
    uint32_t *lengths; /* per layer */
} kvant_sequence;

typedef struct kvant_device kvant_device;

struct kvant_cache {
    kvant_cache_params params; /* defaults resolved; strings are not kept */
    uint32_t *layers;          /* params.layers, or NULL */
    kvant_scheme *scheme, *own_scheme;
    const kvant_device *device;
    void *memory;           /* the device's */
    kvant_tensor **tensors; /* per layer: keys, values */
    uint32_t n_blocks;
    uint32_t *references; /* per block: sequences that hold it; 0: free */
    uint32_t n_free;
    kvant_exact_part exact; /* of its tensors; size 0: none */
    int64_t *slots;         /* of a batch of rows */
    uint8_t *noted;         /* per layer: whose queries the caller noted */
    kvant_sequence *sequences;
};

/* kvant_cache.noted */
enum {
    KVANT_NOTED_NONE,
    KVANT_NOTED_NEXT,
    KVANT_NOTED_NEWEST
}; /* of the rows that are appended next, of those appended last */

#define KVANT_CACHE_BATCH 512u /* rows that are written together */

/* The sequence, or NULL with a message. */
kvant_sequence *kvant_sequence_of(const kvant_cache *cache, int32_t sequence);

/* Makes tokens first .. first + n - 1 of a sequence writable: blocks are added, shared ones copied.
 * On an error blocks that were added stay, which changes no token. */
kvant_status kvant_sequence_reserve(kvant_cache *cache, int32_t sequence, uint32_t first,
                                    uint32_t n);

/* The same for the next n tokens of a layer. Rows beyond the layer's length, of another sequence or
 * of tokens that were cut, are forgotten. */
kvant_status kvant_sequence_extend(kvant_cache *cache, int32_t sequence, uint32_t layer,
                                   uint32_t n);

kvant_status kvant_sequences_create(kvant_cache *cache);
void kvant_sequences_destroy(kvant_cache *cache);

struct kvant_device {
    /* Makes memory and tensors of all layers. destroy frees cache->memory after the tensors, also
     * what a failed create left. */
    kvant_status (*create)(kvant_cache *cache);
    void (*destroy)(kvant_cache *cache);

    /* The block, cleared in all layers, belongs to no sequence any more; NULL: nothing to do. */
    void (*release)(kvant_cache *cache, uint32_t block);

    /* Writes n rows to cache->slots. */
    kvant_status (*append)(kvant_cache *cache, uint32_t layer, const float *k, const float *v,
                           uint32_t n);

    /* The problem of each sequence, whose queries and outputs follow those of the sequence before it; n_tokens and
     * block_table are the sequence's. Arrays of the problem are on the device. */
    kvant_status (*attend)(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                           uint32_t n_sequences, const kvant_attention_problem *problem);

    /* What cache.h says of kvant_cache_read; tokens are there. */
    kvant_status (*read)(const kvant_cache *cache, uint32_t layer, int32_t sequence, uint32_t first,
                         uint32_t n, float *k, float *v);

    /* kvant_tensor_note_queries and kvant_tensor_wants_queries of the keys; NULL: nothing is learnt from queries. */
    kvant_status (*note_queries)(kvant_cache *cache, uint32_t layer, const kvant_queries *queries);
    bool (*wants_queries)(const kvant_cache *cache, uint32_t layer, size_t n_tokens);

    /* kvant_steps_begin, kvant_steps_next, kvant_cache_step; NULL: there are no steps. */
    kvant_status (*steps_begin)(kvant_cache *cache, const int32_t *sequences, uint32_t n,
                                kvant_steps_info *info);
    kvant_status (*steps_next)(kvant_cache *cache);
    kvant_status (*step)(kvant_cache *cache, uint32_t layer, const kvant_step *step);
};

extern const kvant_device kvant_device_cpu, kvant_device_cuda;

static inline kvant_tensor **kvant_cache_tensor(const kvant_cache *cache, uint32_t layer,
                                                kvant_role role)
{
    return &cache->tensors[2 * layer + (uint32_t)role];
}

/* cache.c: the codecs of the kv heads of a layer, which live as long as the scheme. */
kvant_status kvant_cache_codecs(const kvant_cache *cache, uint32_t layer, kvant_role role,
                                const kvant_codec *const **codecs);

/* layers.c */

/* What the tensor of a layer and role is made of. */
kvant_status kvant_layers_params(const kvant_cache *cache, uint32_t layer, kvant_role role,
                                 kvant_tensor_params *params);

/* Of all layers: an empty block becomes the index-th of a sequence; a block becomes empty; the empty
 * block `to` becomes equal to `from`. */
kvant_status kvant_layers_assign(kvant_cache *cache, uint32_t block, uint32_t sequence,
                                 uint32_t index);
void kvant_layers_clear(kvant_cache *cache, uint32_t block);
kvant_status kvant_layers_copy(kvant_cache *cache, uint32_t from, uint32_t to);

/* Whether a block has these slots in every layer. */
bool kvant_layers_have(const kvant_cache *cache, uint32_t block, uint64_t slots);

/* bytes, f16_bytes, true_bits and working_bytes. */
void kvant_layers_describe(const kvant_cache *cache, kvant_cache_info *info);

void kvant_layers_destroy(kvant_cache *cache);
