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

#define PATH_TRIES 4u       /* ends of paths that are tried */
#define PATH_NO_PLACE 0xffu /* is not below the number of states */

/* The state that a bit of decisions belongs to. */
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
 * states are places in decisions. places[t] becomes the place after step t. The path
 * may meet the path that is in `places` already. Then both are one path before that step, and
 * `begin` is the first state of both. */
KVANT_INLINE uint32_t path_trace(const uint64_t *decisions, uint32_t n, uint32_t place,
                                 uint8_t *places, uint32_t begin)
{
    for (uint32_t step = n; step-- > 0;) {
        if (places[step] == place)
            return begin;
        const uint32_t upper = decisions[step] >> place & 1;
        places[step] = (uint8_t)place;
        place = upper << 4 | (place >> 1 & 15) | (place & 1) << 5;
    }
    return place;
}

/* Finds a path that begins and ends in one state. */
KVANT_INLINE void NAME(path_find)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                                  uint8_t *places)
{
    _Alignas(64) uint16_t metric[KVANT_TRELLIS_STATES] = { 0 };
    uint64_t decisions[KVANT_TRELLIS_MAX_STEPS];
    NAME(pass)(trellis, cells, n, KVANT_TRELLIS_WARM_UP, metric, decisions);
    memset(places, PATH_NO_PLACE, n);
    uint32_t end = path_best(metric), begin = PATH_NO_PLACE;
    for (uint32_t tries = 0; tries < PATH_TRIES; tries++, end = begin) {
        begin = path_trace(decisions, n, end, places, begin);
        if (begin == end)
            return;
    }
    memset(metric, 0xff, sizeof metric); /* KVANT_TRELLIS_IMPOSSIBLE */
    metric[path_state(end)] = 0;
    NAME(pass)(trellis, cells, n, 0, metric, decisions);
    memset(places, PATH_NO_PLACE, n);
    path_trace(decisions, n, end, places, begin);
}

static void NAME(path)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                       uint8_t *bits)
{
    NAME(path_find)(trellis, cells, n, bits);
    for (uint32_t step = 0; step < n; step++)
        bits[step] >>= 5; /* the newest bit of the state */
}
