/* turning.h - random centres of blocks that RoPE rotates with positions (kvant_cuda_turning), on
 * the host and on the device. */
#ifndef KVANT_TESTS_CUDA_TURNING_H
#define KVANT_TESTS_CUDA_TURNING_H

#include "cuda_support.h"

typedef struct test_turning {
    uint32_t head_dim, n_kv_heads, n_numbers;
    uint16_t *pairs;
    float *start, *phases;
    uint8_t *numbers; /* NULL: all 0 */
    void *gpu_pairs, *gpu_start, *gpu_phases, *gpu_numbers;
} test_turning;

/* How RoPE rotates keys; n_dims: channels of a head that it rotates. */
typedef struct turning_shape {
    uint32_t head_dim, n_kv_heads, n_dims;
    bool interleaved;
} turning_shape;

/* Makes centres for n_blocks blocks; some blocks have none. numbers: the centre's number of each
 * block, below n_numbers, or NULL; they are copied. size: size of a centre's numbers. */
void turning_open(test_turning *t, const turning_shape *shape, size_t n_blocks, uint32_t n_numbers,
                  const uint8_t *numbers, float size);
void turning_close(test_turning *t);
kvant_cuda_turning gpu_turning(const test_turning *t);

/* The centre of a block, in the CPU's arithmetic. */
void turned_center(const test_turning *t, size_t block, uint32_t kv_head, float *center);

/* The product of q and a block's centre. *size: the sum of the magnitudes of its products, which
 * bounds the error of a kernel that adds them one after another. */
double turned_product(const test_turning *t, size_t block, uint32_t kv_head, const float *q,
                      double *size);

#endif
