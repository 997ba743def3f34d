/* trellis.h - arguments of the trellis kernels: levels, the function from a window of bits to a
 * subset of levels, and the costs of a search. The formulas are in format.md, "Trellis codes". */
#pragma once

#include <stdint.h>

#define KVANT_TRELLIS_SUBSETS 8u
#define KVANT_TRELLIS_PARITIES 3u
#define KVANT_TRELLIS_MAX_LEVELS 64u
#define KVANT_TRELLIS_MEMORY 6u /* bits of a state; a window has one bit more */
#define KVANT_TRELLIS_STATES (1u << KVANT_TRELLIS_MEMORY)
#define KVANT_TRELLIS_MAX_STEPS 512u
#define KVANT_TRELLIS_CELLS 512u     /* numbers are rounded to this many cells before the search */
#define KVANT_TRELLIS_NO_NUMBER 512u /* the cell of a step whose code is 0 */
/* Steps that the search does before the first step, so that it knows the cost of each first state.
 * With fewer steps it would more often choose a first state that is not the best. */
#define KVANT_TRELLIS_WARM_UP 24u
/* The largest cost of a step. Metrics have 16 bits, and the search subtracts the least metric every
 * KVANT_TRELLIS_LOWER_STEPS steps. Every possible state is KVANT_TRELLIS_MEMORY steps away from the
 * state that had the least metric. So no metric exceeds (6 + 8) * 4095 = 57330. The number 65535 is
 * left for impossible states. They keep it when the least metric is subtracted, because a padding
 * step leaves them in the pass for six steps, in which possible states may exceed 65535 - 8 *
 * 4095. */
#define KVANT_TRELLIS_MAX_COST 4095u
#define KVANT_TRELLIS_LOWER_STEPS 8u
#define KVANT_TRELLIS_IMPOSSIBLE UINT16_MAX
/* The difference in subset between windows that differ in their newest and oldest bits only. */
#define KVANT_TRELLIS_SWAP 2u

/* Bit i of a subset is the parity of the code bits that tap i selects. Bit j of a tap selects the
 * bit of j steps before. Kernels use the taps as constants. Sparse taps are cheap to decode: each
 * costs one exclusive or less than it has bits, on whole words of codes. */
#define KVANT_TRELLIS_TAP_0 010
#define KVANT_TRELLIS_TAP_1 0101
#define KVANT_TRELLIS_TAP_2 042

typedef struct kvant_trellis {
    uint32_t bits; /* bits of a code: 2, 3 or 4 */
    uint32_t n_steps;
    uint16_t steps[KVANT_TRELLIS_MAX_STEPS]; /* the step of each channel, padding included */
    /* ascending and symmetric around 0; level i is in subset i mod 8 */
    int8_t levels[KVANT_TRELLIS_MAX_LEVELS];
    /* Levels + 128 in the order of the index that kernels compute from words. The index has, from
     * the lowest bit: bit 0 of the subset; the bits above the lowest bit of the code's part in
     * plane 0; bits 1 and 2 of the subset; the code's bit in plane 1. Fewer than 64 levels are
     * repeated. */
    _Alignas(64) uint8_t in_words[KVANT_TRELLIS_MAX_LEVELS];
    /* Cost of the nearest level of a subset; 0 for KVANT_TRELLIS_NO_NUMBER. */
    _Alignas(64) uint16_t costs[KVANT_TRELLIS_CELLS + 1][KVANT_TRELLIS_SUBSETS];
    uint8_t nearest[KVANT_TRELLIS_CELLS][KVANT_TRELLIS_SUBSETS]; /* level / 8 */
} kvant_trellis;

/* The subset of a window. The bit of the newest step is the lowest. */
static inline uint32_t kvant_trellis_subset(uint32_t window)
{
    return (window >> 3 & 1) | ((window ^ window >> 6) & 1) << 1 |
           ((window >> 1 ^ window >> 5) & 1) << 2;
}

/* Computes the subset of every step of a circle of n steps, from the trellis bits of all steps. n
 * is larger than the memory. */
void kvant_trellis_subsets(const uint8_t *bits, uint32_t n, uint8_t *subsets);
