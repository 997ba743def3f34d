/* directions.h - arguments of the kernel that decodes chunks of 4 channels: a table of directions,
 * and the outlier chunks that are stored beside the codes. format.md, "Direction codes", has
 * the formulas. */
#pragma once

#include <stdint.h>

typedef struct kvant_direction_book {
    /* 2^index_bits of 4 numbers, aligned to 16; those from n_codewords on are zero */
    const float *codewords;
    uint32_t n_codewords, index_bits;
    /* outliers a token has room for: a chunk of index n_codewords is the one of the slot that its
     * radius says */
    uint32_t slots;
} kvant_direction_book;
