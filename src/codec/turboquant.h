/* turboquant.h - what the variants of turboquant share: their options, and how turboquant.c creates each. */
#ifndef KVANT_CODEC_TURBOQUANT_H
#define KVANT_CODEC_TURBOQUANT_H

#include "codebook.h"
#include "papers/qjl.h"

typedef struct turboquant_options {
    uint32_t bits; /* as in the name, without its fraction */
    bool tiers;    /* 2.5 or 3.5 */
    bool unbiased;
    kvant_sketch sketch;
    uint64_t seed;
} turboquant_options;

/* Both complete a codec that has its transform and the beginning of its canonical spec. */

/* (bits - 1)-bit codes and a sketch of what they leave. */
kvant_status turboquant_create_sketched(kvant_codec *codec, const turboquant_options *options,
                                        const kvant_error *error);

/* Pages of their own choice of outlier channels, which have bits + 1, the others bits. */
kvant_status turboquant_create_tiers(kvant_codec *codec, const turboquant_options *options,
                                     const kvant_error *error);

#endif
