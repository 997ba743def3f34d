/* center.h - centres that turn with positions, as keys do (RoPE). The mean of keys over many positions is none: what turns fast is
 * gone from it, what turns slowly points elsewhere. So a version with matrices (weights.h) keeps the mean over 64 positions from 0
 * on, and each block whose positions are known is about that, turned to its own first position. Nothing is stored for a block
 * but this position. */
#pragma once

#include "turn.h"

struct kvant_centers {
    uint32_t n_dims, interleaved;
    uint32_t n;   /* pairs of channels of a head; those that do not turn have frequency 0 */
    float *start; /* n_kv_heads x head_dim: the centre of a block at position 0 */
    /* Likewise: the centre of the block placed last, at position `last`. A token alone needs no other.
     * Changed by writers. */
    float *placed;
    int32_t last;
    kvant_pair *pairs;
    double *step; /* from a block to the next: cosines, then sines, of all pairs */
};

/* Of keys that turn like this (checked); start is left to the caller. Freed with kvant_free. KVANT_ERR_MEMORY; KVANT_ERR_FORMAT
 * where a channel is left alone. */
kvant_status kvant_centers_create(const kvant_tensor *tensor, const kvant_rope *rope,
                                  kvant_centers **centers);

/* NULL stays NULL; otherwise NULL: no memory. */
kvant_centers *kvant_centers_copy(const kvant_tensor *tensor, const kvant_centers *centers);
bool kvant_centers_equal(const kvant_tensor *tensor, const kvant_centers *a,
                         const kvant_centers *b);
size_t kvant_centers_bytes(const kvant_tensor *tensor);

/* Centre and scale of a kv head in a version, for a block at a position (KVANT_NO_POSITION: what all of the version's blocks
 * without one share). room: head_dim numbers that the result may point to. */
kvant_affine kvant_affine_at(const kvant_tensor *tensor, uint32_t version, uint32_t head,
                             int32_t position, float *room);

/* The same of a block, in its own version or in another one. */
static inline kvant_affine kvant_block_affine(const kvant_tensor *tensor, uint32_t block,
                                              uint32_t version, uint32_t head, float *room)
{
    return kvant_affine_at(tensor, version, head, tensor->blocks[block].position, room);
}

/* As kvant_version_affine, with the largest magnitudes that a block's centre can have. */
kvant_affine kvant_affine_widest(const kvant_tensor *tensor, uint32_t version, uint32_t head,
                                 float *room);

/* A version's, or NULL. */
static inline kvant_centers *kvant_version_centers(const kvant_tensor *tensor, uint32_t version)
{
    const kvant_weights *weights = tensor->versions[version].weights;
    return weights ? weights->centers : NULL;
}

/* Those that a block has a centre of its own from, or NULL. */
static inline kvant_centers *kvant_block_centers(const kvant_tensor *tensor, uint32_t block)
{
    const kvant_block *b = &tensor->blocks[block];
    return b->position == KVANT_NO_POSITION ? NULL : kvant_version_centers(tensor, b->version);
}

/* A block is about to be written: its centre is kept for those who check and encode rows. */
void kvant_centers_recall(kvant_tensor *tensor, uint32_t block);

/* The first position of a block that the rows first .. first + n - 1 of a write begin; KVANT_NO_POSITION where they do not follow
 * each other as its slots do, or nobody knows. */
int32_t kvant_position_of_rows(const kvant_tensor *tensor, const int64_t *slots, size_t n_slots,
                               size_t first, size_t n);

/* Whether blocks of two versions turn alike. */
bool kvant_centers_turn_alike(const kvant_centers *a, const kvant_centers *b);

/* For attention: <q, a block's centre> is the sum over pairs of products[i] cos + products[n + i] sin, of angles position x
 * frequency. */
void kvant_center_products(const kvant_tensor *tensor, uint32_t version, uint32_t head,
                           const float *q, float factor, float *products);
