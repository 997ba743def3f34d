/* center.h - centres that RoPE rotates. A mean of keys over many positions is useless as a centre:
 * fast rotations cancel out in it, and slow ones make it point in another direction. So a transform
 * with W (key_transform.h) keeps the mean over positions 0 to 63. Each block whose position is
 * known has this mean, rotated to the block's first position, as its centre. Only the position is
 * stored per block. */
#pragma once

#include "rope.h"

struct kvant_centers {
    uint32_t n_dims, interleaved;
    uint32_t n;   /* pairs of channels of a head; frequency 0: RoPE does not rotate the pair */
    float *start; /* n_kv_heads x head_dim: the centre of a block at position 0 */
    /* n_kv_heads x head_dim: the centre of the block that was placed last, at position `last`. A
     * single token needs no other centre. Only writers change it. */
    float *placed;
    int32_t last;
    kvant_pair *pairs;
    double *step; /* the rotation by 64 positions: cosines of all pairs, then sines */
};

/* Creates centres for a RoPE that kvant_rope_check accepted. The caller fills `start` and frees the
 * centres with kvant_free. KVANT_ERR_MEMORY; KVANT_ERR_FORMAT when a channel has no partner. */
kvant_status kvant_centers_create(const kvant_tensor *tensor, const kvant_rope *rope,
                                  kvant_centers **centers);

/* Copies centres. The copy of NULL is NULL. Otherwise NULL means that memory is short. */
kvant_centers *kvant_centers_copy(const kvant_tensor *tensor, const kvant_centers *centers);
bool kvant_centers_equal(const kvant_tensor *tensor, const kvant_centers *a,
                         const kvant_centers *b);
size_t kvant_centers_bytes(const kvant_tensor *tensor);

/* The centre and scale of a kv head in a transform, for a block at a position. KVANT_NO_POSITION:
 * the centre of all blocks whose position is not known. room: head_dim numbers, to which the result
 * may point. */
kvant_affine kvant_affine_at(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                             int32_t position, float *room);

/* The centre and scale of a kv head for this block, in the block's own transform or in another
 * one. */
static inline kvant_affine kvant_block_affine(const kvant_tensor *tensor, uint32_t block,
                                              uint32_t transform_id, uint32_t head, float *room)
{
    return kvant_affine_at(tensor, transform_id, head, tensor->blocks[block].position, room);
}

/* Like kvant_tensor_transform_affine, but the centre has the largest magnitudes that the centre of
 * any block can have. */
kvant_affine kvant_affine_widest(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                                 float *room);

/* The centres of a transform, or NULL. */
static inline kvant_centers *kvant_tensor_transform_centers(const kvant_tensor *tensor,
                                                            uint32_t transform_id)
{
    const kvant_key_transform *key_transform = tensor->transforms[transform_id].key_transform;
    return key_transform ? key_transform->centers : NULL;
}

/* The centres from which a block gets its own centre, or NULL. */
static inline kvant_centers *kvant_block_centers(const kvant_tensor *tensor, uint32_t block)
{
    const kvant_block *b = &tensor->blocks[block];
    return b->position == KVANT_NO_POSITION
               ? NULL
               : kvant_tensor_transform_centers(tensor, b->transform_id);
}

/* Call it before a block is written. It computes the block's centre for the functions that check
 * and encode the rows. */
void kvant_centers_recall(kvant_tensor *tensor, uint32_t block);

/* The first position of the block in which rows first to first + n - 1 of a write are.
 * KVANT_NO_POSITION when the rows' positions do not follow each other like their slots, or are not
 * known. */
int32_t kvant_position_of_rows(const kvant_tensor *tensor, const int64_t *slots, size_t n_slots,
                               size_t first, size_t n);

/* Whether the same RoPE rotates the centres of two transforms. */
bool kvant_centers_same_rope(const kvant_centers *a, const kvant_centers *b);

/* For attention. With angle = position x frequency, <q, the centre of a block> is the sum over
 * pairs i of products[i] cos(angle_i) + products[n + i] sin(angle_i). */
void kvant_center_products(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                           const float *q, float factor, float *products);
