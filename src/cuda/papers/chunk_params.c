/* chunk_params.c - the part of params.c for chunk codes: triplets (octopus) and quaternions
 * (hqmq). */
#include <string.h>

#include "../params.h"

static void init_triplets(kvant_cuda_params *params, kvant_cuda_directions *directions,
                          const kvant_chunk_view *chunk)
{
    static const kvant_cuda_kind kinds[] = { KVANT_CUDA_OCTOPUS2, KVANT_CUDA_OCTOPUS3,
                                             KVANT_CUDA_OCTOPUS4 };
    params->codes = KVANT_CUDA_CODES_TRIPLETS;
    params->kind = kinds[chunk->length_bits - 1];
    memcpy(directions->direction, chunk->direction, sizeof directions->direction);
    memcpy(directions->norm, chunk->length, sizeof directions->norm);
}

static void init_quaternions(kvant_cuda_params *params, kvant_cuda_directions *directions,
                             const kvant_chunk_view *chunk)
{
    params->codes = KVANT_CUDA_CODES_QUATERNIONS;
    params->kind = KVANT_CUDA_HQMQ_S96R4;
    for (uint32_t i = 0; i < 4 * KVANT_CUDA_SECONDARIES; i++)
        directions->secondaries[i / 4][i % 4] = (float)chunk->secondaries[i];
}

bool kvant_cuda_chunk_init(kvant_cuda_params *params, kvant_cuda_directions *directions,
                           const kvant_codec_view *view)
{
    const kvant_chunk_view *chunk = &view->of.chunk;
    const uint32_t b = chunk->length_bits + 1;
    if (chunk->kind == KVANT_CHUNK_TRIPLETS && chunk->index_bits == 2 * (b + 1) && b >= 2 && b <= 4)
        init_triplets(params, directions, chunk);
    else if (chunk->kind == KVANT_CHUNK_QUATERNIONS && !chunk->outliers &&
             chunk->n_secondaries == KVANT_CUDA_SECONDARIES && chunk->length_bits == 4)
        init_quaternions(params, directions, chunk);
    else
        return false;
    params->bits = chunk->index_bits + chunk->length_bits;
    params->symmetric = 1;
    return true;
}
