/* directions.h - arguments of the kernel that decodes chunks of 4 channels: a table of directions,
 * and the outlier chunks, which are stored separately from the codes. The formulas are in
 * format.md, "Direction codes". */
#pragma once

#include <stdint.h>

typedef struct kvant_direction_book {
    /* 2^index_bits entries of 4 numbers, aligned to 16; entries from n_codewords on are zero */
    const float *codewords;
    uint32_t n_codewords, index_bits;
    /* Outliers that a token has room for. A chunk with index n_codewords is an outlier, and its
     * radius is the number of its slot. */
    uint32_t slots;
} kvant_direction_book;
