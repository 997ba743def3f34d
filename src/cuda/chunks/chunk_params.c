/* chunk_params.c - the part of params.c for chunk codes: triplets (octopus) and quaternions
 * (hqmq). */
#include <string.h>

#include "../params.h"

static void init_common(kvant_cuda_params *params, kvant_cuda_book *book,
                        const kvant_chunk_view *chunk)
{
    params->bits = chunk->index_bits + chunk->length_bits;
    params->symmetric = 1;
    params->unbiased = chunk->unbiased;
    params->inverse_sqrt_dim = chunk->inverse_sqrt_dim;
    book->n_chunks = chunk->n_chunks;
}

/* Whether triplets have a usual split and a usual way of encoding. */
static bool init_triplets(kvant_cuda_params *params, kvant_cuda_book *book,
                          const kvant_codec_view *view)
{
    static const kvant_cuda_kind kinds[] = { KVANT_CUDA_OCTOPUS2, KVANT_CUDA_OCTOPUS3,
                                             KVANT_CUDA_OCTOPUS4 };
    const kvant_chunk_view *chunk = &view->of.chunk;
    const uint32_t b = chunk->length_bits + 1, coordinate = chunk->index_bits / 2;
    if (coordinate != b + 1 || b < 2 || b > 4 || chunk->rounding > 3 || chunk->zero_padding)
        return false;
    params->codes = KVANT_CUDA_CODES_TRIPLETS;
    params->kind = kinds[b - 2];
    init_common(params, book, chunk);
    book->direction_bits = coordinate;
    book->norm_bits = chunk->length_bits;
    book->rounding = chunk->rounding;
    memcpy(book->direction, chunk->direction, sizeof book->direction);
    memcpy(book->direction_thresholds, chunk->direction_thresholds,
           sizeof book->direction_thresholds);
    memcpy(book->norm, chunk->length, sizeof book->norm);
    memcpy(book->norm_thresholds, chunk->length_thresholds, sizeof book->norm_thresholds);
    return true;
}

/* Initialises quaternions whose books fit a launch and that have no outliers. */
static bool init_quaternions(kvant_cuda_params *params, kvant_cuda_book *book,
                             const kvant_codec_view *view)
{
    const kvant_chunk_view *chunk = &view->of.chunk;
    const uint32_t n = chunk->n_secondaries;
    const uint32_t s96 = n == 96 && chunk->length_bits == 4,
                   s192 = n == 192 && chunk->length_bits == 6;
    if (n > KVANT_CUDA_MAX_SECONDARIES || chunk->outliers)
        return false;
    params->codes = KVANT_CUDA_CODES_QUATERNIONS;
    params->kind = s96    ? KVANT_CUDA_HQMQ_S96R4
                   : s192 ? KVANT_CUDA_HQMQ_S192R6
                          : KVANT_CUDA_HQMQ_ANY;
    init_common(params, book, chunk);
    book->index_bits = chunk->index_bits;
    book->radius_bits = chunk->length_bits;
    book->n_secondaries = n;
    memcpy(book->secondaries, chunk->secondaries, n * sizeof *book->secondaries);
    return true;
}

bool kvant_cuda_chunk_init(kvant_cuda_params *params, kvant_cuda_book *book,
                           const kvant_codec_view *view)
{
    switch (view->of.chunk.kind) {
    case KVANT_CHUNK_TRIPLETS: return init_triplets(params, book, view);
    case KVANT_CHUNK_QUATERNIONS: return init_quaternions(params, book, view);
    case KVANT_CHUNK_TABLE: break;
    }
    return false;
}
