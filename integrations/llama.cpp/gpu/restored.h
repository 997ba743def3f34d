/* restored.h - blocks of records that come back to a cache in GPU memory, and the functions of
 * other files that put their transforms in force. */
#pragma once

#include "saved.h"

/* The blocks of a record for one tensor. */
typedef struct kvp_gpu_incoming {
    kvp_kv *kv;
    kvp_gpu_cells *cells;
    kvp_gpu_cache *cache;
    const void *transforms[KVANT_MAX_TRANSFORMS]; /* as the record has them */
    const kvant_block_slots *blocks;
    uint32_t n;
    kvant_outer_block *outer; /* by block */
    bool *taken;              /* by block */
    bool first;               /* it decides for all tensors */
    /* room for the cells of all blocks, their positions, and whether their blocks are exact */
    int64_t *cells_of;
    int32_t *positions;
    bool *exact_of;
} kvp_gpu_incoming;

static inline bool kvp_gpu_restored_is_keys(const kvp_gpu_incoming *in)
{
    return in->kv->shape.role == KVANT_ROLE_K;
}

/* restored_transforms.c. `kvp_gpu_restored_knows`: whether the cache has all transforms of the keys
 * already. `kvp_gpu_restored_free_ids` frees the ids of restored transforms that no block has any
 * more. `kvp_gpu_restored_keys` and `kvp_gpu_restored_values` put the transforms of a record in
 * force; blocks whose transform has no place are not taken. False without memory. */
bool kvp_gpu_restored_knows(const kvp_gpu_incoming *in);
void kvp_gpu_restored_free_ids(kvp_gpu_cache *cache);
bool kvp_gpu_restored_keys(const kvp_gpu_incoming *in);
void kvp_gpu_restored_values(const kvp_gpu_incoming *in);

/* Functions of kvp_remote (kv_tensor.h), which take the lock themselves. */
void kvp_gpu_hold(kvp_kv *kv, size_t cell, size_t n, bool begins);
void kvp_gpu_forget_others(kvp_kv *kv);
kvant_status kvp_gpu_restore(kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n,
                             const void *data, size_t bytes, bool is_checked, bool *taken);

/* first_matrix.c. Puts a key transform in force as if the layer had learned it. The layer has none
 * yet. Rows in exact pages take it. `made` is empty afterwards. False with a message, or without
 * memory. */
bool kvp_gpu_first_adopt(const kvp_gpu_incoming *in, kvp_gpu_learned_transform *made);

/* learn.c. The same for the centre and scale of a block of a tensor. */
bool kvp_gpu_adopt_affine(kvp_gpu_cells *cells, const kvant_tensor *from, uint32_t block);
