/* chunk_params.c - the part of params.c for codecs that quantise several channels at once: octopus and
 * hqmq. */
#include "../params.h"

#include <string.h>

#include "../../base/error.h"
#include "../../codec/papers/direction.h"
#include "../../codec/papers/hqmq.h"
#include "../../codec/papers/octopus.h"

kvant_status kvant_cuda_octopus_init(kvant_cuda_params *params, kvant_cuda_book *book, const kvant_codec *codec,
                                     char *err, size_t errlen)
{
    static const kvant_cuda_kind kinds[] = { KVANT_CUDA_OCTOPUS2, KVANT_CUDA_OCTOPUS3, KVANT_CUDA_OCTOPUS4 };
    const kvant_error error = { err, errlen };
    const octopus_book *from = octopus_book_of(codec);
    const kvant_triplet_book *t = &from->triplets;
    const uint32_t b = t->norm_bits + 1;
    if (strstr(codec->spec, "qjl"))
        return kvant_fail(&error, KVANT_ERR_UNSUPPORTED, "not on the GPU: %s; octopus there has no sketch",
                          codec->spec);
    if (t->direction_bits != b + 1 || b < 2 || b > 4)
        return kvant_fail(&error, KVANT_ERR_UNSUPPORTED,
                          "not on the GPU: %s; octopus there has 2, 3 or 4 bits and the usual split of them",
                          codec->spec);
    params->kind = kinds[b - 2];
    params->bits = 2 * t->direction_bits + t->norm_bits;
    params->symmetric = 1;
    params->unbiased = from->unbiased;
    params->inverse_sqrt_dim = from->inverse_sqrt_dim;
    book->n_chunks = from->n_triplets;
    book->direction_bits = t->direction_bits;
    book->norm_bits = t->norm_bits;
    book->rounding = (uint32_t)t->rounding;
    memcpy(book->direction, t->direction, sizeof book->direction);
    memcpy(book->direction_thresholds, t->direction_thresholds, sizeof book->direction_thresholds);
    memcpy(book->norm, t->norm, sizeof book->norm);
    memcpy(book->norm_thresholds, t->norm_thresholds, sizeof book->norm_thresholds);
    return KVANT_OK;
}

kvant_status kvant_cuda_hqmq_init(kvant_cuda_params *params, kvant_cuda_book *book, const kvant_codec *codec,
                                  char *err, size_t errlen)
{
    const kvant_error error = { err, errlen };
    const kvant_direction *direction = kvant_direction_of(codec);
    uint32_t n;
    const kvant_quaternion *secondaries = kvant_hqmq_secondaries(codec, &n);
    const bool s96 = n == 96 && direction->radius_bits == 4, s192 = n == 192 && direction->radius_bits == 6;
    if (!s96 && !s192)
        return kvant_fail(&error, KVANT_ERR_UNSUPPORTED, "not on the GPU: %s; there are hqmq-s96r4 and hqmq-s192r6",
                          codec->spec);
    if (direction->slots)
        return kvant_fail(&error, KVANT_ERR_UNSUPPORTED,
                          "not on the GPU: %s; hqmq there has no outliers (med3, med)", codec->spec);
    params->kind = s96 ? KVANT_CUDA_HQMQ_S96R4 : KVANT_CUDA_HQMQ_S192R6;
    params->bits = direction->index_bits + direction->radius_bits;
    params->symmetric = 1;
    params->unbiased = direction->unbiased;
    book->n_chunks = direction->n_chunks;
    book->index_bits = direction->index_bits;
    book->radius_bits = direction->radius_bits;
    book->n_secondaries = n;
    for (uint32_t i = 0; i < n; i++)
        memcpy(book->secondaries[i], secondaries[i].c, sizeof book->secondaries[i]);
    return KVANT_OK;
}
