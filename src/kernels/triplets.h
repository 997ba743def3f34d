/* triplets.h - arguments of the kernel that quantises triplets of channels: a codebook, and
 * triplets side by side. */
#pragma once

#include <stdint.h>

/* A multiple of 16: head_dim 512 has 171 triplets, and the last one may be tried with several
 * paddings. */
#define KVANT_MAX_TRIPLETS 192u

/* Which levels around the nearest levels are tried as a direction. Values up to 3 are the number of
 * candidates per coordinate. */
typedef enum kvant_triplet_rounding {
    KVANT_ROUND_FULL = 0, /* all levels */
    KVANT_ROUND_SCALAR = 1,
    KVANT_ROUND_2X2 = 2,
    KVANT_ROUND_3X3 = 3,
    /* the nearest level and the next higher one, as in the program of OCTOPUS's authors (2x2) */
    KVANT_ROUND_NEXT = 4
} kvant_triplet_rounding;

typedef struct kvant_triplet_book {
    uint32_t direction_bits, norm_bits; /* 1 to 8 bits, and 0 to 7 bits */
    kvant_triplet_rounding rounding;
    float direction[256],
        direction_thresholds
            [256]; /* levels of u and w; threshold k lies between levels k and k + 1 */
    float norm[128], norm_thresholds[128];
} kvant_triplet_book;

typedef struct kvant_triplets {
    float x[KVANT_MAX_TRIPLETS], y[KVANT_MAX_TRIPLETS], z[KVANT_MAX_TRIPLETS]; /* input */
    /* output: u | w << direction_bits | norm << 2 direction_bits */
    uint32_t code[KVANT_MAX_TRIPLETS];
    float along[KVANT_MAX_TRIPLETS]; /* output: product of the triplet and its coded direction */
    float norm[KVANT_MAX_TRIPLETS];  /* output: the coded norm */
} kvant_triplets;
