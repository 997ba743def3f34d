/* decoders.h - which decoders of tiles a codec needs. A kernel contains few decoders, because one
 * that needs many registers would force attention's sums into memory for all codecs. */
#pragma once

#include "../params.h"

namespace kvant
{

/* The sets of codes that a kernel can decode, as bits. */
enum Decoders : unsigned {
    PLAIN = 0,  /* rows of numbers, and pages with a code per channel and a scale per token */
    GROUPS = 1, /* scales of groups */
    TRELLISES = 2,
    CHUNKS = 4,   /* codes of several channels */
    FAMILIES = 8, /* everything else that the general form has */
    ALL_DECODERS = 15
};

__host__ __device__ inline bool has_groups(const kvant_general &g)
{
    return g.view.uniform.per_channel || g.view.uniform.group < g.head_dim;
}

__host__ __device__ inline bool is_uniform(const kvant_cuda_codec &codec)
{
    return codec.params.codes != KVANT_CUDA_CODES_TRELLIS &&
           codec.general.view.kind == KVANT_GENERAL_UNIFORM &&
           codec.general.view.uniform.clusters == 0;
}

__host__ __device__ inline unsigned decoders_for(const kvant_cuda_codec &codec)
{
    const kvant_general_view &view = codec.general.view;
    switch (codec.params.codes) {
    case KVANT_CUDA_CODES_OPEN:
    case KVANT_CUDA_CODES_CODEBOOK: return PLAIN;
    case KVANT_CUDA_CODES_TRELLIS: return TRELLISES;
    default: break;
    }
    if (is_uniform(codec))
        return has_groups(codec.general) ? GROUPS : PLAIN;
    if (view.kind == KVANT_GENERAL_RAW)
        return PLAIN;
    const bool chunks =
        view.kind == KVANT_GENERAL_TRIPLETS || view.kind == KVANT_GENERAL_DIRECTIONS;
    return chunks && !view.sketched && !view.chunks.pool ? CHUNKS : FAMILIES;
}

} // namespace kvant
