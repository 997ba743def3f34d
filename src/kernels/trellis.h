/* trellis.h - arguments of the trellis kernels: levels, the function from a window of bits to a
 * subset of levels, and the costs of a search. The formulas are in format.md, "Trellis codes". */
#pragma once

#include <stdint.h>

#define KVANT_TRELLIS_SUBSETS 8u
#define KVANT_TRELLIS_PARITIES 3u
#define KVANT_TRELLIS_MAX_LEVELS 64u
#define KVANT_TRELLIS_MIN_MEMORY 8u
#define KVANT_TRELLIS_MAX_MEMORY 12u
#define KVANT_TRELLIS_MAX_STEPS 512u
#define KVANT_TRELLIS_CELLS 512u     /* numbers are rounded to this many cells before the search */
#define KVANT_TRELLIS_NO_NUMBER 512u /* the cell of a step whose code is 0 */
/* Steps that the search does before the first step, so that it knows the cost of each first state.
 * With fewer steps it would more often choose a first state that is not the best. */
#define KVANT_TRELLIS_WARM_UP 32u
/* The difference in subset between windows that differ in their newest and oldest bits only. */
#define KVANT_TRELLIS_SWAP 2u

/* The taps for 256 states. Kernels use them as constants. Bit 6 of a window changes no subset. */
#define KVANT_TRELLIS_256_TAP_0 030
#define KVANT_TRELLIS_256_TAP_1 0441
#define KVANT_TRELLIS_256_TAP_2 0202

typedef struct kvant_trellis {
    uint32_t memory; /* bits of a state: 8, 10 or 12 */
    uint32_t bits;   /* bits of a code: 2, 3 or 4 */
    /* bit i of a subset is the parity of some code bits; bit j of the tap selects the bit of j
     * steps ago */
    uint16_t taps[KVANT_TRELLIS_PARITIES];
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
    /* The subset z of window 2 i, for i below half the states, as the two bytes 2 z and 2 z + 1.
     * Subsets are parities, so the subset of window i ^ j is the exclusive or of both subsets. */
    _Alignas(64) uint8_t subsets[1u << (KVANT_TRELLIS_MAX_MEMORY - 1)][2];
} kvant_trellis;

/* The memory of a search. When it has room for fewer steps than the circle has, the search repeats
 * steps whose decisions it did not keep. This gives the same bits, but is slower. */
typedef struct kvant_trellis_work {
    uint16_t *metric;    /* 2 << memory numbers, aligned to 64 */
    uint32_t *decisions; /* room << memory bits */
    uint32_t room;       /* steps, at least 1 */
} kvant_trellis_work;

/* Computes the subset of every step of a circle of n steps, from the trellis bits of all steps. n
 * is larger than the memory. */
void kvant_trellis_subsets(const kvant_trellis *trellis, const uint8_t *bits, uint32_t n,
                           uint8_t *subsets);
