/* device.h - the inside of kvant_cache, and the functions of the device that holds its pages. The
 * file cache.c has life, rows and attention, sequence.c the blocks of sequences, and layers.c the
 * blocks of all layers.
 *
 * On every device a cache has one tensor per layer and role. A device makes the memory of the
 * tensors, passes rows to them, and computes attention: device_cpu.c in the computer's memory,
 * device_cuda.c on a GPU. Rows, queries and outputs lie on the device. The cache checks layer,
 * block and slot numbers before it calls a device. */
#pragma once

#include <kvant/cache.h>
#include <kvant/tensor.h>

#include "../store/rules.h"

#define KVANT_NO_BLOCK (-1)

typedef struct kvant_sequence {
    bool alive;
    uint32_t n_blocks; /* entries of table */
    uint32_t room;     /* for this many entries; it grows with the sequence */
    int32_t *table;    /* KVANT_NO_BLOCK for blocks that were dropped */
    uint32_t *lengths; /* per layer; a part of cache->lengths */
} kvant_sequence;

typedef struct kvant_device kvant_device;

struct kvant_cache {
    kvant_cache_params params; /* defaults resolved; strings are not kept */
    uint32_t *layers;          /* params.layers, or NULL */
    kvant_scheme *scheme, *own_scheme;
    const kvant_device *device;
    void *memory;           /* belongs to the device */
    kvant_tensor **tensors; /* per layer: keys, values */
    uint32_t n_blocks;
    uint32_t *references; /* per block: how many sequences hold it; 0: free */
    uint32_t n_free;
    kvant_exact_part exact; /* of the tensors; size 0: there is none */
    int64_t *slots;         /* of a batch */
    uint8_t *pending;       /* per layer: a value of the enum below */
    kvant_sequence *sequences;
    uint32_t *lengths; /* of all sequences */
};

/* kvant_cache.pending: for which rows the caller passed queries. */
enum {
    KVANT_PENDING_NONE,
    KVANT_PENDING_NEXT,  /* for the rows that are appended next */
    KVANT_PENDING_NEWEST /* for the rows that were appended last */
};

#define KVANT_CACHE_BATCH KVANT_EXACT_STEP /* at most this many rows are written together */

/* Returns the sequence, or NULL with a message. */
kvant_sequence *kvant_sequence_of(const kvant_cache *cache, int32_t sequence);

/* Makes tokens first to first + n - 1 of a sequence writable: adds blocks and copies shared ones.
 * After an error, added blocks stay; this changes no token. */
kvant_status kvant_sequence_reserve(kvant_cache *cache, int32_t sequence, uint32_t first,
                                    uint32_t n);

/* The same for the next n tokens of a layer. Forgets rows after the layer's length that belong to
 * another sequence or to removed tokens. */
kvant_status kvant_sequence_extend(kvant_cache *cache, int32_t sequence, uint32_t layer,
                                   uint32_t n);

/* Gives back the blocks in which no layer has a token: a reservation that was not used. */
void kvant_sequence_trim(kvant_cache *cache, int32_t sequence);

kvant_status kvant_sequences_create(kvant_cache *cache);
void kvant_sequences_destroy(kvant_cache *cache);

struct kvant_device {
    /* Makes the memory and the tensors of all layers. destroy frees cache->memory after the
     * tensors. It also frees what a failed create left. */
    kvant_status (*create)(kvant_cache *cache);
    void (*destroy)(kvant_cache *cache);

    /* Tells the device that the block was cleared in all layers and belongs to no sequence. NULL:
     * the device has nothing to do. */
    void (*release)(kvant_cache *cache, uint32_t block);

    /* Writes n rows to cache->slots. */
    kvant_status (*append)(kvant_cache *cache, uint32_t layer, const float *k, const float *v,
                           uint32_t n);

    /* Computes attention of n_sequences sequences. The device replaces n_tokens and block_table of
     * the problem by the ones of each sequence. Queries and outputs of a sequence follow the ones
     * of the sequence before it. Arrays of the problem are on the device. */
    kvant_status (*attend)(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                           uint32_t n_sequences, const kvant_attention_problem *problem);

    /* kvant_cache_read; the caller has checked that the tokens exist. */
    kvant_status (*read)(const kvant_cache *cache, uint32_t layer, int32_t sequence, uint32_t first,
                         uint32_t n, float *k, float *v);

    /* kvant_tensor_note_queries for the keys. */
    kvant_status (*note_queries)(kvant_cache *cache, uint32_t layer, const kvant_queries *queries);

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

/* The parameters of the tensor of a layer and role. */
kvant_status kvant_layers_params(const kvant_cache *cache, uint32_t layer, kvant_role role,
                                 kvant_tensor_params *params);

/* Three operations on all layers: an empty block becomes the index-th block of a sequence; a block
 * becomes empty; the empty block `to` becomes equal to `from`. */
kvant_status kvant_layers_assign(kvant_cache *cache, uint32_t block, uint32_t sequence,
                                 uint32_t index);
void kvant_layers_clear(kvant_cache *cache, uint32_t block);
kvant_status kvant_layers_copy(kvant_cache *cache, uint32_t from, uint32_t to);

/* Fills bytes, f16_bytes, true_bits and working_bytes. */
void kvant_layers_describe(const kvant_cache *cache, kvant_cache_info *info);

void kvant_layers_destroy(kvant_cache *cache);
