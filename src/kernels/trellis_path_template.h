/* trellis_path_template.h - the trellis search, a Viterbi search on a circle, around a function
 * that advances through all steps. The including file defines NAME and
 *
 *   NAME(pass)(trellis, cells, n, before, metric, decisions)
 *                      takes the last `before` steps of the circle of n steps (round the circle,
 *                      more than once where it is shorter), and then all steps. metric has the
 *                      metrics of the states before and, when it returns, after these steps.
 *                      decisions gets 64 bits for each step of the circle, first for the new states
 *                      2 i, then for 2 i + 1. A set bit means that the better path came from state
 *                      i + 32, a cleared bit that it came from state i
 *
 * The best state before the first step is not known. A warm-up over the last steps of the circle
 * gives the cost of each state. Among the paths to the end, the search looks for a path that ends
 * in its first state. If PATH_TRIES paths do not, the search starts again from one state. */
#include "../base/attributes.h"

#define PATH_TRIES 4u /* ends of paths that are tried */

/* Bit s of decisions belongs to this state. */
KVANT_INLINE uint32_t path_state(uint32_t place)
{
    return (place << 1 | place >> 5) % KVANT_TRELLIS_STATES;
}

/* The place of the first state that has the least metric. */
KVANT_INLINE uint32_t path_best(const uint16_t *metric)
{
    uint16_t least = UINT16_MAX;
    uint32_t best = 0;
    for (uint32_t i = 0; i < KVANT_TRELLIS_STATES; i++)
        least = metric[i] < least ? metric[i] : least;
    while (metric[best] != least)
        best++;
    return best >> 1 | (best & 1) << 5;
}

/* Follows the path that ends in a state back to step 0; returns the state before step 0. Both
 * states are places in decisions. */
KVANT_INLINE uint32_t path_trace(const uint64_t *decisions, uint32_t n, uint32_t place,
                                 uint8_t *bits)
{
    for (uint32_t step = n; step-- > 0;) {
        const uint32_t upper = decisions[step] >> place & 1;
        bits[step] = (uint8_t)(place >> 5);
        place = upper << 4 | (place >> 1 & 15) | (place & 1) << 5;
    }
    return place;
}

static void NAME(path)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                       uint8_t *bits)
{
    _Alignas(64) uint16_t metric[KVANT_TRELLIS_STATES] = { 0 };
    uint64_t decisions[KVANT_TRELLIS_MAX_STEPS];
    NAME(pass)(trellis, cells, n, KVANT_TRELLIS_WARM_UP, metric, decisions);
    uint32_t end = path_best(metric);
    for (uint32_t tries = 0; tries < PATH_TRIES; tries++) {
        const uint32_t begin = path_trace(decisions, n, end, bits);
        if (begin == end)
            return;
        end = begin;
    }
    memset(metric, 0xff, sizeof metric); /* KVANT_TRELLIS_IMPOSSIBLE */
    metric[path_state(end)] = 0;
    NAME(pass)(trellis, cells, n, 0, metric, decisions);
    path_trace(decisions, n, end, bits);
}
