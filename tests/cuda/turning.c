/* turning.c - see turning.h. It is compiled so that every product and every sum is rounded. */
#include "turning.h"

#include <math.h>

#include <kvant/tensor_hooks.h>

enum { MOST_DIM = 512 };

void turning_open(test_turning *t, const turning_shape *shape, size_t n_blocks, uint32_t n_numbers,
                  const uint8_t *numbers, float size)
{
    const size_t d = shape->head_dim, starts = n_numbers * shape->n_kv_heads * d;
    float frequencies[MOST_DIM / 2];
    for (uint32_t i = 0; i < shape->n_dims / 2; i++)
        frequencies[i] = (float)pow(10000, -2.0 * i / shape->n_dims);
    const kvant_rope rope = { .size = sizeof rope,
                              .n_dims = shape->n_dims,
                              .interleaved = shape->interleaved,
                              .frequencies = frequencies };
    *t = (test_turning){ .head_dim = shape->head_dim,
                         .n_kv_heads = shape->n_kv_heads,
                         .n_numbers = n_numbers };
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
    if (numbers) {
        t->numbers = memcpy(malloc(n_blocks), numbers, n_blocks);
        t->gpu_numbers = device_copy(numbers, n_blocks);
    }
}

void turning_close(test_turning *t)
{
    free(t->pairs);
    free(t->start);
    free(t->phases);
    free(t->numbers);
    cudaFree(t->gpu_pairs);
    cudaFree(t->gpu_start);
    cudaFree(t->gpu_phases);
    cudaFree(t->gpu_numbers);
}

kvant_cuda_turning gpu_turning(const test_turning *t)
{
    return (kvant_cuda_turning){ t->gpu_pairs, t->gpu_start, t->gpu_phases, t->gpu_numbers };
}

static const float *start_of(const test_turning *t, size_t block, uint32_t kv_head)
{
    return t->start +
           ((t->numbers ? t->numbers[block] : 0) * t->n_kv_heads + kv_head) * t->head_dim;
}

void turned_center(const test_turning *t, size_t block, uint32_t kv_head, float *center)
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

double turned_product(const test_turning *t, size_t block, uint32_t kv_head, const float *q,
                      double *size)
{
    const float *start = start_of(t, block, kv_head);
    float center[MOST_DIM];
    double sum = 0;
    turned_center(t, block, kv_head, center);
    for (uint32_t j = 0; j < t->head_dim; j++)
        sum += (double)q[j] * center[j];
    *size = 0;
    for (uint32_t i = 0; i < t->head_dim / 2; i++) {
        const uint32_t first = t->pairs[2 * i], second = t->pairs[2 * i + 1];
        *size += (fabs(q[first]) + fabs(q[second])) * (fabs(start[first]) + fabs(start[second]));
    }
    return sum;
}
