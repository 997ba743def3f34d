/* cache.h - inside of kvant_cache: cache.c (life, rows, attention), sequence.c (blocks of sequences),
 * layers.c (blocks of all layers), device_*.c (memory). */
#ifndef KVANT_CACHE_CACHE_H
#define KVANT_CACHE_CACHE_H

#include <kvant/cache.h>
#include <kvant/tensor.h>

#define KVANT_NO_BLOCK (-1)

typedef struct kvant_sequence {
    bool alive;
    uint32_t n_blocks;  /* entries of table */
    int32_t *table;     /* max_blocks entries; KVANT_NO_BLOCK for blocks that were dropped */
    uint32_t *lengths;  /* per layer */
} kvant_sequence;

typedef struct kvant_device kvant_device; /* device.h */

struct kvant_cache {
    kvant_cache_params params; /* defaults resolved; strings are not kept */
    kvant_scheme *scheme, *own_scheme;
    const kvant_device *device;
    void *memory;           /* the device's */
    kvant_tensor **tensors; /* per layer: keys, values */
    uint32_t n_blocks;
    uint32_t *references;  /* per block: sequences that hold it; 0: free */
    uint32_t n_free;
    int64_t *slots;        /* of a batch of rows */
    kvant_sequence *sequences;
};

#define KVANT_CACHE_BATCH 512u /* rows that are written together */

/* The sequence, or NULL with a message. */
kvant_sequence *kvant_sequence_of(const kvant_cache *cache, int32_t sequence);

/* Makes tokens first .. first + n - 1 of a sequence writable: blocks are added, shared ones copied.
 * On an error blocks that were added stay, which changes no token. */
kvant_status kvant_sequence_reserve(kvant_cache *cache, int32_t sequence, uint32_t first, uint32_t n);

kvant_status kvant_sequences_create(kvant_cache *cache);
void kvant_sequences_destroy(kvant_cache *cache);

#endif
