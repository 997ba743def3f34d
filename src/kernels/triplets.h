/* triplets.h - arguments of the kernel that quantises triplets of channels: a codebook, and
 * triplets side by side. */
#pragma once

#include <stdint.h>

/* a multiple of 16: the 171 of head_dim 512 and trials for the last one */
#define KVANT_MAX_TRIPLETS 192u

/* Which levels around the nearest ones are tried as a direction; values up to 3 are the candidates
 * per coordinate. */
typedef enum kvant_triplet_rounding {
    KVANT_ROUND_FULL = 0, /* all */
    KVANT_ROUND_SCALAR = 1,
    KVANT_ROUND_2X2 = 2,
    KVANT_ROUND_3X3 = 3,
    KVANT_ROUND_NEXT = 4 /* the nearest level and the next higher one: 2x2 of OCTOPUS's authors */
} kvant_triplet_rounding;

typedef struct kvant_triplet_book {
    uint32_t direction_bits, norm_bits; /* 1 .. 8 and 0 .. 7 */
    kvant_triplet_rounding rounding;
    float direction[256],
        direction_thresholds
            [256]; /* levels of u and of w; threshold k lies between levels k and k + 1 */
    float norm[128], norm_thresholds[128];
} kvant_triplet_book;

typedef struct kvant_triplets {
    float x[KVANT_MAX_TRIPLETS], y[KVANT_MAX_TRIPLETS], z[KVANT_MAX_TRIPLETS]; /* in */
    uint32_t code[KVANT_MAX_TRIPLETS]; /* u | w << direction_bits | norm << 2 direction_bits */
    float along[KVANT_MAX_TRIPLETS];   /* product of the triplet and its coded direction */
    float norm[KVANT_MAX_TRIPLETS];    /* the coded norm */
} kvant_triplets;
