/* check_trellis.c - the search of trellis codes: the same path at every level. */
#include "check.h"

typedef enum cost_kind { ANY_COSTS, LARGEST_COSTS, TIES, N_COST_KINDS } cost_kind;

/* Nothing of it comes from a codec's book: the search has to work with any table of costs and subsets. */
static kvant_trellis *make_trellis(checker *check, uint32_t memory, cost_kind kind)
{
    kvant_trellis *trellis = check_input(check, "trellis", sizeof *trellis, 64);
    memset(trellis, 0, sizeof *trellis);
    trellis->memory = memory;
    trellis->bits = 4;
    for (uint32_t cell = 0; cell < KVANT_TRELLIS_CELLS; cell++)
        for (uint32_t z = 0; z < KVANT_TRELLIS_SUBSETS; z++)
            trellis->costs[cell][z] = (uint16_t)(kind == LARGEST_COSTS ? 8191 - check_below(check, 2)
                                                 : kind == TIES        ? check_below(check, 3)
                                                                       : check_below(check, 1u << cell % 14));
    for (uint32_t i = 0; i < 1u << (memory - 1); i++) {
        const uint32_t z = check_below(check, KVANT_TRELLIS_SUBSETS);
        trellis->subsets[i][0] = (uint8_t)(2 * z);
        trellis->subsets[i][1] = (uint8_t)(2 * z + 1);
    }
    return trellis;
}

/* Some circles have steps without a number, a few or all. */
static uint16_t *make_cells(checker *check, uint32_t n)
{
    uint16_t *cells = check_input(check, "cells", n * sizeof *cells, sizeof *cells);
    const uint32_t without = check_below(check, 8);
    for (uint32_t step = 0; step < n; step++)
        cells[step] = (uint16_t)(without == 7 || (without > 4 && check_below(check, 4) == 0)
                                     ? KVANT_TRELLIS_NO_NUMBER
                                     : check_below(check, KVANT_TRELLIS_CELLS));
    return cells;
}

CHECK(trellis_path)
{
    static const uint32_t steps[] = { 64, 1, 7, 16, 31, 33, 48, 128, 400, KVANT_TRELLIS_MAX_STEPS };
    uint8_t want[KVANT_TRELLIS_MAX_STEPS];
    for (uint32_t round = 0; round < 4; round++)
        for (uint32_t memory = KVANT_TRELLIS_MIN_MEMORY; memory <= KVANT_TRELLIS_MAX_MEMORY; memory += 2)
            for (size_t s = 0; s < (memory == 8 ? COUNT(steps) : 4); s++)
                for (int kind = 0; kind < N_COST_KINDS; kind++) {
                    check_case(check, "memory %u, %u steps, kind %d, round %u", memory, steps[s], kind, round);
                    const kvant_trellis *trellis = make_trellis(check, memory, (cost_kind)kind);
                    const uint16_t *cells = make_cells(check, steps[s]);
                    uint8_t *bits = check_output(check, "bits", steps[s], 1);
                    if (check_compares(check))
                        c->trellis_path(trellis, cells, steps[s], want);
                    CHECK_CALL(check, kernels->trellis_path(trellis, cells, steps[s], bits));
                    check_same(check, "bits", bits, want, steps[s], 1);
                }
}

BENCH(trellis_path)
{
    for (uint32_t memory = KVANT_TRELLIS_MIN_MEMORY; memory <= KVANT_TRELLIS_MAX_MEMORY; memory += 2) {
        check_case(check, "bench");
        const kvant_trellis *trellis = make_trellis(check, memory, ANY_COSTS);
        uint16_t *cells = check_input(check, "cells", 128 * sizeof *cells, 64);
        uint8_t *bits = check_output(check, "bits", 128, 64);
        for (uint32_t step = 0; step < 128; step++)
            cells[step] = (uint16_t)check_below(check, KVANT_TRELLIS_CELLS);
        CHECK_BENCH(check, kernels->trellis_path(trellis, cells, 128, bits), "128 steps, %u states", 1u << memory);
    }
}
