/* rotation.c - see rotation.h. */
#include "rotation.h"

#include <string.h>

#include "../base/alloc.h"
#include "../base/random.h"

/* Shuffles as Fisher and Yates do. The bias of the remainder is below 2^-48. */
static void shuffle(uint16_t *places, uint32_t n, uint64_t *seed)
{
    for (uint32_t i = 0; i < n; i++)
        places[i] = (uint16_t)i;
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t j = (uint32_t)(kvant_splitmix64(seed) % i);
        const uint16_t moved = places[i - 1];
        places[i - 1] = places[j];
        places[j] = moved;
    }
}

kvant_status kvant_rotation_create(kvant_rotation *rotation, uint32_t dim, uint64_t seed)
{
    const size_t n = (size_t)KVANT_ROTATION_ROUNDS * dim;
    *rotation =
        (kvant_rotation){ dim, kvant_alloc(n, sizeof(float)), kvant_alloc(n, sizeof(uint16_t)) };
    if (!rotation->signs || !rotation->places) {
        kvant_rotation_destroy(rotation);
        return KVANT_ERR_MEMORY;
    }
    for (size_t i = 0; i < n; i++)
        rotation->signs[i] = kvant_splitmix64(&seed) >> 63 ? -1.0f : 1.0f;
    for (uint32_t round = 0; round < KVANT_ROTATION_ROUNDS; round++)
        shuffle(rotation->places + (size_t)round * dim, dim, &seed);
    return KVANT_OK;
}

void kvant_rotation_destroy(kvant_rotation *rotation)
{
    kvant_free(rotation->signs);
    kvant_free(rotation->places);
    rotation->signs = NULL;
    rotation->places = NULL;
}

static void transform_blocks(const kvant_kernels *kernels, float *x, uint32_t n)
{
    for (uint32_t block = 1u << 16; block > 1; block /= 2)
        if (n & block) {
            kernels->hadamard(x, block, block);
            x += block;
        }
}

void kvant_rotation_apply(const kvant_rotation *rotation, const kvant_kernels *kernels, float *x,
                          float *scratch)
{
    const uint32_t dim = rotation->dim;
    for (uint32_t round = 0; round < KVANT_ROTATION_ROUNDS; round++) {
        const float *signs = rotation->signs + (size_t)round * dim;
        const uint16_t *places = rotation->places + (size_t)round * dim;
        for (uint32_t i = 0; i < dim; i++)
            scratch[i] = x[places[i]] * signs[i];
        transform_blocks(kernels, scratch, dim);
        memcpy(x, scratch, dim * sizeof *x);
    }
}

void kvant_rotation_undo(const kvant_rotation *rotation, const kvant_kernels *kernels, float *x,
                         float *scratch)
{
    const uint32_t dim = rotation->dim;
    for (uint32_t round = KVANT_ROTATION_ROUNDS; round-- > 0;) {
        const float *signs = rotation->signs + (size_t)round * dim;
        const uint16_t *places = rotation->places + (size_t)round * dim;
        memcpy(scratch, x, dim * sizeof *x);
        transform_blocks(kernels, scratch, dim);
        for (uint32_t i = 0; i < dim; i++)
            x[places[i]] = scratch[i] * signs[i];
    }
}
