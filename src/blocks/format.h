/* format.h - ggml's block formats: where a block keeps scale, minimum and codes, and which numbers
 * they stand for.
 *
 * Facts of the formats (ggml-common.h, ggml-quants.c of ggml 0.25 and 0.26, little-endian):
 *
 *             offset of   d   m   fifth bits  codes   bytes per block  numbers
 *   q4_0                  0                   2       18               d (c - 8)
 *   q4_1                  0   2               4       20               d c + m
 *   q5_0                  0       2           6       22               d (c - 16)
 *   q5_1                  0   2   4           8       24               d c + m
 *   q8_0                  0                   2       34               d c, c signed
 *   iq4_nl                0                   2       18               d table[c]
 *
 * A block has 32 numbers. Byte i of the 4-bit codes holds number i in its low half and number i +
 * 16 in its high half. Bit i of the fifth bits belongs to number i. d and m are fp16. f32, f16 and
 * bf16 have no blocks; they are read 16 numbers at a time. */
#pragma once

#include <stdbool.h>

#include <kvant/block_attention.h>

/* Numbers that decoders handle at once: half a block. */
#define KVANT_BLOCK_PART 16u

typedef struct kvant_block_format {
    uint32_t numbers; /* of a block; 0: no such format */
    uint32_t bytes;
    uint32_t fifths, codes; /* offsets */
    bool has_min, has_fifths;
} kvant_block_format;

extern const int8_t kvant_iq4_nl_values[16];

/* Usable in constant folding: kernels are compiled once a type. */
static inline kvant_block_format kvant_block_format_of(kvant_block_type type)
{
    switch (type) {
    case KVANT_BLOCK_F32: return (kvant_block_format){ 16, 64, 0, 0, false, false };
    case KVANT_BLOCK_F16:
    case KVANT_BLOCK_BF16: return (kvant_block_format){ 16, 32, 0, 0, false, false };
    case KVANT_BLOCK_Q4_0:
    case KVANT_BLOCK_IQ4_NL: return (kvant_block_format){ 32, 18, 0, 2, false, false };
    case KVANT_BLOCK_Q4_1: return (kvant_block_format){ 32, 20, 0, 4, true, false };
    case KVANT_BLOCK_Q5_0: return (kvant_block_format){ 32, 22, 2, 6, false, true };
    case KVANT_BLOCK_Q5_1: return (kvant_block_format){ 32, 24, 4, 8, true, true };
    case KVANT_BLOCK_Q8_0: return (kvant_block_format){ 32, 34, 0, 2, false, false };
    default: return (kvant_block_format){ 0, 0, 0, 0, false, false };
    }
}

/* Numbers of a row of n channels (a multiple of the format's), the definition of the formats for
 * every kernel: products are exact, a minimum is added with one rounding. */
void kvant_block_decode(kvant_block_type type, const uint8_t *row, uint32_t n, float *x);
