/* chunk_numbers.h - what a chunk's code means, in integers: a direction of a table times a length.
 *
 * Number j of the chunk of a code is round(entries[4 (code mod 2^index_bits) + j] length / 2^15), halves rounded up, where length is
 * that of code / 2^index_bits: step times it, or with step 0 lengths[] of it. */
#ifndef KVANT_KERNELS_CHUNK_NUMBERS_H
#define KVANT_KERNELS_CHUNK_NUMBERS_H

#include <stdint.h>

#define KVANT_NUMBER_MAX_BITS 16u   /* of a code */
#define KVANT_NUMBER_MAX_INDEX 12u  /* 32 KB of entries: more would not stay in the nearest cache */
#define KVANT_NUMBER_MAX_LENGTHS 4u /* bits, where they have a table */

typedef struct kvant_chunk_numbers {
    const int16_t *
        entries; /* 2^index_bits of 4, aligned to 8, no magnitude above 32767; the fourth is 0 where chunks have 3 */
    uint32_t components; /* 3 or 4 channels a chunk */
    uint32_t dim, index_bits;
    int32_t step; /* no length exceeds KVANT_CODE_VALUE_MAX */
    int16_t lengths[1 << KVANT_NUMBER_MAX_LENGTHS];
} kvant_chunk_numbers;

#endif
