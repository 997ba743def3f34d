/* turboquant.h - what turboquant.c calls in papers/. -DKVANT_PAPERS=OFF leaves these functions
 * out. */
#pragma once

#include "codebook.h"

typedef struct turboquant_variant {
    uint32_t bits; /* as in the name, without its fraction */
    bool tiers;    /* 2.5 or 3.5 */
    bool unbiased;
    int sketch; /* kvant_sketch of papers/qjl.h */
    uint64_t seed;
} turboquant_variant;

/* Both complete a codec that has its transform. */

/* (bits - 1)-bit codes and a sketch of what they leave. */
kvant_status kvant_turboquant_create_sketched(kvant_codec *codec,
                                              const turboquant_variant *variant);

/* Pages of their own choice of outlier channels, which have bits + 1, the others bits. */
kvant_status kvant_turboquant_create_tiers(kvant_codec *codec, const turboquant_variant *variant,
                                           const kvant_error *error);
