/* device.h - what a cache asks of the device that holds its pages.
 *
 * cache.c and sequence.c know blocks and lengths. A device knows memory: device_cpu.c keeps tensors,
 * device_cuda.c and cuda_layers.c keep pages on a GPU. Rows, queries and outputs lie on the device.
 *
 * Layer, block and slot numbers are right when a device gets them. */
#ifndef KVANT_CACHE_DEVICE_H
#define KVANT_CACHE_DEVICE_H

#include "cache.h"

/* Keys or values of a layer. */
typedef struct kvant_device_info {
    size_t bytes;          /* of the blocks in use */
    size_t sealed_bytes;   /* of one sealed block */
    size_t written_blocks; /* blocks that are not empty */
} kvant_device_info;

struct kvant_device {
    /* Makes memory for all layers and sets cache->memory. destroy frees it, also what a failed create left. */
    kvant_status (*create)(kvant_cache *cache);
    void (*destroy)(kvant_cache *cache);

    /* An empty block becomes the index-th of a sequence. */
    kvant_status (*assign)(kvant_cache *cache, uint32_t block, uint32_t sequence, uint32_t index);

    /* Writes n rows to cache->slots. A refused row: an error; the slots of the call then hold
     * anything, but count as not written. */
    kvant_status (*append)(kvant_cache *cache, uint32_t layer, const float *k, const float *v, uint32_t n);

    /* block_table is on the host, other arrays of the problem are on the device. */
    kvant_status (*attend)(kvant_cache *cache, uint32_t layer, const kvant_attention_problem *problem);

    /* Of all layers: a block becomes empty; the empty block `to` becomes equal to `from`. */
    void (*clear)(kvant_cache *cache, uint32_t block);
    kvant_status (*copy)(kvant_cache *cache, uint32_t from, uint32_t to);

    /* As kvant_tensor_export_size, _export and _import; data is on the host. */
    size_t (*export_size)(const kvant_cache *cache, uint32_t layer, kvant_role role);
    kvant_status (*export)(const kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block, void *data,
                           size_t bytes, size_t *used);
    kvant_status (*import)(kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block, const void *data,
                           size_t bytes);

    /* A bit per slot of a block. */
    uint64_t (*written)(const kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block);
    void (*get_info)(const kvant_cache *cache, uint32_t layer, kvant_role role, kvant_device_info *info);
};

extern const kvant_device kvant_device_cpu, kvant_device_cuda;

/* cache.c: the codecs of the kv heads of a layer, which live as long as the scheme. */
kvant_status kvant_cache_codecs(const kvant_cache *cache, uint32_t layer, kvant_role role,
                                const kvant_codec *const **codecs);

#endif
