/* block_centers.h - random centres of blocks that RoPE rotates with positions
 * (kvant_cuda_block_centers), on the host and on the device. */
#ifndef KVANT_TESTS_CUDA_BLOCK_CENTERS_H
#define KVANT_TESTS_CUDA_BLOCK_CENTERS_H

#include "cuda_support.h"

typedef struct test_block_centers_of {
    uint32_t head_dim, n_kv_heads, n_ids;
    uint16_t *pairs;
    float *start, *phases;
    uint8_t *transform_ids; /* NULL: all 0 */
    void *gpu_pairs, *gpu_start, *gpu_phases, *gpu_transform_ids;
} test_block_centers_of;

/* How RoPE rotates keys; n_dims: channels of a head that it rotates. */
typedef struct block_centers_shape {
    uint32_t head_dim, n_kv_heads, n_dims;
    bool interleaved;
} block_centers_shape;

/* Makes centres for n_blocks blocks; some blocks have none. transform_ids: the centre's number of
 * each block, below n_ids, or NULL; they are copied. size: size of a centre's numbers. */
void block_centers_open(test_block_centers_of *t, const block_centers_shape *shape, size_t n_blocks,
                        uint32_t n_ids, const uint8_t *transform_ids, float size);
void block_centers_close(test_block_centers_of *t);
kvant_cuda_block_centers gpu_block_centers(const test_block_centers_of *t);

/* The centre of a block, in the CPU's arithmetic. */
void rotated_center(const test_block_centers_of *t, size_t block, uint32_t kv_head, float *center);

/* The product of q and a block's centre. *size: the sum of the magnitudes of its products, which
 * bounds the error of a kernel that adds them one after another. */
double centered_product(const test_block_centers_of *t, size_t block, uint32_t kv_head,
                        const float *q, double *size);

#endif
