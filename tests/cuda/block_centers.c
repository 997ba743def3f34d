/* block_centers.c - see block_centers.h. It is compiled so that every product and every sum is
 * rounded. */
#include "block_centers.h"

#include <kvant/tensor_hooks.h>

enum { MOST_DIM = 512 };

void block_centers_open(test_block_centers_of *t, const block_centers_shape *shape, size_t n_blocks,
                        uint32_t n_ids, const uint8_t *transform_ids, float size)
{
    const size_t d = shape->head_dim, starts = n_ids * shape->n_kv_heads * d;
    float frequencies[MOST_DIM / 2];
    for (uint32_t i = 0; i < shape->n_dims / 2; i++)
        frequencies[i] = (float)pow(10000, -2.0 * i / shape->n_dims);
    const kvant_rope rope = { .size = sizeof rope,
                              .n_dims = shape->n_dims,
                              .interleaved = shape->interleaved,
                              .frequencies = frequencies };
    *t = (test_block_centers_of){ .head_dim = shape->head_dim,
                                  .n_kv_heads = shape->n_kv_heads,
                                  .n_ids = n_ids };
    t->pairs = malloc(d * sizeof *t->pairs);
    t->phases = malloc(n_blocks * d * sizeof *t->phases);
    for (size_t i = 0; i < n_blocks; i++) {
        assert_int_equal(kvant_rope_phase(&rope, shape->head_dim, (int32_t)(random_bits() % 100000),
                                          t->phases + i * d, t->pairs),
                         KVANT_OK);
        if (random_bits() % 8 == 0)
            memset(t->phases + i * d, 0, d * sizeof *t->phases);
    }
    t->start = malloc(starts * sizeof *t->start);
    for (size_t i = 0; i < starts; i++)
        t->start[i] = random_normal() * size;
    t->gpu_pairs = device_copy(t->pairs, d * sizeof *t->pairs);
    t->gpu_phases = device_copy(t->phases, n_blocks * d * sizeof *t->phases);
    t->gpu_start = device_copy(t->start, starts * sizeof *t->start);
    if (transform_ids) {
        t->transform_ids = memcpy(malloc(n_blocks), transform_ids, n_blocks);
        t->gpu_transform_ids = device_copy(transform_ids, n_blocks);
    }
}

void block_centers_close(test_block_centers_of *t)
{
    free(t->pairs);
    free(t->start);
    free(t->phases);
    free(t->transform_ids);
    cudaFree(t->gpu_pairs);
    cudaFree(t->gpu_start);
    cudaFree(t->gpu_phases);
    cudaFree(t->gpu_transform_ids);
}

kvant_cuda_block_centers gpu_block_centers(const test_block_centers_of *t)
{
    return (kvant_cuda_block_centers){ t->gpu_pairs, t->gpu_start, t->gpu_phases,
                                       t->gpu_transform_ids };
}

static const float *start_of(const test_block_centers_of *t, size_t block, uint32_t kv_head)
{
    return t->start + ((t->transform_ids ? t->transform_ids[block] : 0) * t->n_kv_heads + kv_head) *
                          t->head_dim;
}

void rotated_center(const test_block_centers_of *t, size_t block, uint32_t kv_head, float *center)
{
    const float *start = start_of(t, block, kv_head), *phase = t->phases + block * t->head_dim;
    for (uint32_t i = 0; i < t->head_dim / 2; i++) {
        const uint32_t first = t->pairs[2 * i], second = t->pairs[2 * i + 1];
        const float a = start[first], b = start[second], cosine = phase[i],
                    sine = phase[t->head_dim / 2 + i];
        center[first] = a * cosine - b * sine;
        center[second] = b * cosine + a * sine;
    }
}

double centered_product(const test_block_centers_of *t, size_t block, uint32_t kv_head,
                        const float *q, double *size)
{
    const float *start = start_of(t, block, kv_head);
    float center[MOST_DIM];
    double sum = 0;
    rotated_center(t, block, kv_head, center);
    for (uint32_t j = 0; j < t->head_dim; j++)
        sum += (double)q[j] * center[j];
    *size = 0;
    for (uint32_t i = 0; i < t->head_dim / 2; i++) {
        const uint32_t first = t->pairs[2 * i], second = t->pairs[2 * i + 1];
        *size += (fabs(q[first]) + fabs(q[second])) * (fabs(start[first]) + fabs(start[second]));
    }
    return sum;
}
