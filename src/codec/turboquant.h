/* turboquant.h - the functions of papers/ that turboquant.c calls. -DKVANT_PAPERS=OFF leaves them
 * out. */
#pragma once

#include "codebook.h"

typedef struct turboquant_variant {
    uint32_t bits; /* as in the name, without its fraction */
    bool tiers;    /* 2.5 or 3.5 */
    bool unbiased;
    int sketch; /* `kvant_sketch` of papers/qjl.h */
    uint64_t seed;
} turboquant_variant;

/* Both functions complete a codec that has its transform. */

/* Codes of bits - 1 bits, and a sketch of their residual. */
kvant_status kvant_turboquant_create_sketched(kvant_codec *codec,
                                              const turboquant_variant *variant);

/* Codes in two tiers: each page chooses its outlier channels, which have bits + 1 bits; all
 * remaining channels have `bits` bits. */
kvant_status kvant_turboquant_create_tiers(kvant_codec *codec, const turboquant_variant *variant,
                                           const kvant_error *error);
