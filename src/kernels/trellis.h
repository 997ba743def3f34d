/* trellis.h - arguments of the trellis kernels: levels, the function from a window of bits to a
 * subset of levels, the costs of a search. format.md, "Trellis codes", has the formulas. */
#pragma once

#include <stdint.h>

#define KVANT_TRELLIS_SUBSETS 8u
#define KVANT_TRELLIS_PARITIES 3u
#define KVANT_TRELLIS_MAX_LEVELS 64u
#define KVANT_TRELLIS_MIN_MEMORY 8u
#define KVANT_TRELLIS_MAX_MEMORY 12u
#define KVANT_TRELLIS_MAX_STEPS 512u
#define KVANT_TRELLIS_CELLS 512u     /* that a number is rounded to before the search */
#define KVANT_TRELLIS_NO_NUMBER 512u /* the cell of a step whose code is 0 */
/* steps before the first, so that the search knows what a circle's beginning costs */
#define KVANT_TRELLIS_WARM_UP 32u
/* by which the newest and the oldest bit of a window change its subset */
#define KVANT_TRELLIS_SWAP 2u

/* The taps of 256 states. Kernels take them for constants: bit 6 of a window changes no subset. */
#define KVANT_TRELLIS_256_TAP_0 030
#define KVANT_TRELLIS_256_TAP_1 0441
#define KVANT_TRELLIS_256_TAP_2 0202

typedef struct kvant_trellis {
    uint32_t memory; /* bits of a state: 8, 10 or 12 */
    uint32_t bits;   /* of a code: 2, 3 or 4 */
    /* bit j set: bit i of a subset counts the code bit of j steps ago */
    uint16_t taps[KVANT_TRELLIS_PARITIES];
    uint32_t n_steps;
    uint16_t steps[KVANT_TRELLIS_MAX_STEPS]; /* of channels, padding included */
    /* ascending, each other's negatives; level i is in subset i mod 8 */
    int8_t levels[KVANT_TRELLIS_MAX_LEVELS];
    /* Levels + 128 in the order of the index that words give. Its bits, the lowest first: bit 0 of
     * the subset; the bits above the lowest of the code's part in plane 0; bits 1 and 2 of the
     * subset; the code's bit in plane 1. Fewer than 64 levels are repeated. */
    _Alignas(64) uint8_t in_words[KVANT_TRELLIS_MAX_LEVELS];
    /* Of a subset's nearest level; 0 for KVANT_TRELLIS_NO_NUMBER. */
    _Alignas(64) uint16_t costs[KVANT_TRELLIS_CELLS + 1][KVANT_TRELLIS_SUBSETS];
    uint8_t nearest[KVANT_TRELLIS_CELLS][KVANT_TRELLIS_SUBSETS]; /* level / 8 */
    /* Subset z of window 2 i, for i below half the states, as the bytes 2 z and 2 z + 1. Subsets
     * are parities: that of i ^ j is z ^ z. */
    _Alignas(64) uint8_t subsets[1u << (KVANT_TRELLIS_MAX_MEMORY - 1)][2];
} kvant_trellis;

/* Memory of a search. With room for fewer steps than the circle has, the search repeats steps whose
 * decisions it did not keep: the same bits, but slower. */
typedef struct kvant_trellis_work {
    uint16_t *metric;    /* 2 << memory numbers, aligned to 64 */
    uint32_t *decisions; /* room << memory bits */
    uint32_t room;       /* steps, at least 1 */
} kvant_trellis_work;

/* Of every step of a circle of n, by the trellis bits of all of them; n is above the memory. */
void kvant_trellis_subsets(const kvant_trellis *trellis, const uint8_t *bits, uint32_t n,
                           uint8_t *subsets);
