/* trellis_path_template.h - the trellis search, a Viterbi search on a circle, around a function
 * that advances by one step. The including file defines
 *
 *   NAME
 *   NAME(advance)(trellis, states, cell, from, to, decisions)
 *                      computes the metrics of all states after a step; states is a constant.
 *                      decisions has one bit for each i below half the states, first for the new
 *                      states 2 i, then for 2 i + 1. A set bit means that the better path came from
 *                      state i + states / 2, a cleared bit that it came from state i
 *   NAME(lower)(metric, states)
 *                      subtracts the least metric from all
 *   NAME(best)(metric, states)
 *                      the first state with the least metric
 *
 * The best state before the first step is not known. A warm-up over the last steps of the circle
 * gives the cost of each state. Among the paths to the end, the search looks for a path that ends
 * in its first state. If PATH_TRIES paths do not, the search starts again from one state.
 *
 * Decisions are kept for a stretch of `room` steps, at first the last stretch. A trace that goes
 * back beyond the stretch repeats the pass up to it and keeps the preceding stretch. */
#include "../base/attributes.h"

#define PATH_LOWER_STEPS 16u /* steps between two calls of lower */
#define PATH_TRIES 4u        /* ends of paths that are tried */
#define PATH_ANY_STATE UINT32_MAX

typedef struct NAME(path_work) {
    const kvant_trellis *trellis;
    const uint16_t *cells;
    uint32_t n, before; /* before: the steps of the warm-up */
    uint32_t begin;     /* the state before step -before, or PATH_ANY_STATE */
    uint32_t kept;      /* the first step of the stretch whose decisions are stored */
    uint32_t room;      /* the length of a stretch, in steps */
    uint16_t *metric[2];
    uint32_t *decisions; /* states / 32 words per step */
} NAME(path_work);

KVANT_INLINE uint32_t NAME(path_first_cell)(const NAME(path_work) * w)
{
    return (w->n - w->before % w->n) % w->n;
}

/* The place for the decisions of step `step` of the pass. Decisions of steps before the stretch go
 * to the place of its first step, which overwrites them. */
KVANT_INLINE uint32_t *NAME(path_decisions)(const NAME(path_work) * w, uint32_t states,
                                            uint32_t step)
{
    const uint32_t first = w->before + w->kept;
    return w->decisions + (size_t)(step > first ? step - first : 0) * (states / 32);
}

/* Runs the warm-up and the steps up to the end of the kept stretch; returns the metrics. */
KVANT_INLINE const uint16_t *NAME(path_pass)(const NAME(path_work) * w, uint32_t states)
{
    const uint32_t left = w->n - w->kept,
                   steps = w->before + w->kept + (left < w->room ? left : w->room);
    uint32_t at = NAME(path_first_cell)(w);
    for (uint32_t step = 0; step < steps; step++) {
        uint16_t *from = w->metric[step % 2];
        if (step && step % PATH_LOWER_STEPS == 0)
            NAME(lower)(from, states);
        NAME(advance)
        (w->trellis, states, w->cells[at], from, w->metric[(step + 1) % 2],
         NAME(path_decisions)(w, states, step));
        at = at + 1 < w->n ? at + 1 : 0;
    }
    return w->metric[steps % 2];
}

/* Makes the stretch that holds `step` the kept one and runs the pass; returns the metrics at the
 * end of the stretch. */
KVANT_INLINE const uint16_t *NAME(path_keep)(NAME(path_work) * w, uint32_t states, uint32_t step)
{
    w->kept = step / w->room * w->room;
    memset(w->metric[0], w->begin == PATH_ANY_STATE ? 0 : 0xff, states * sizeof *w->metric[0]);
    if (w->begin != PATH_ANY_STATE)
        w->metric[0][w->begin] = 0;
    return NAME(path_pass)(w, states);
}

/* Follows the path that ends in `state` back to step 0; returns the state before step 0. */
KVANT_INLINE uint32_t NAME(path_trace)(NAME(path_work) * w, uint32_t states, uint32_t state,
                                       uint8_t *bits)
{
    for (uint32_t step = w->n; step-- > 0;) {
        if (KVANT_UNLIKELY(step - w->kept >= w->room))
            NAME(path_keep)(w, states, step);
        const uint32_t *decisions = w->decisions + (size_t)(step - w->kept) * (states / 32);
        const uint32_t bit = state & 1, i = state >> 1;
        bits[step] = (uint8_t)bit;
        state = i | (decisions[bit * (states / 64) + i / 32] >> i % 32 & 1) * (states / 2);
    }
    return state;
}

KVANT_INLINE void NAME(path_find)(NAME(path_work) * w, uint32_t states, uint8_t *bits)
{
    uint32_t end = NAME(best)(NAME(path_keep)(w, states, w->n - 1), states);
    for (uint32_t tries = 0; tries < PATH_TRIES; tries++) {
        const uint32_t begin = NAME(path_trace)(w, states, end, bits);
        if (begin == end)
            return;
        end = begin;
    }
    w->before = 0;
    w->begin = end;
    NAME(path_keep)(w, states, w->n - 1);
    NAME(path_trace)(w, states, end, bits);
}

static void NAME(path)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                       const kvant_trellis_work *work, uint8_t *bits)
{
    NAME(path_work)
    w = { .trellis = trellis,
          .cells = cells,
          .n = n,
          .before = KVANT_TRELLIS_WARM_UP,
          .begin = PATH_ANY_STATE,
          .room = work->room,
          .metric = { work->metric, work->metric + ((size_t)1 << trellis->memory) },
          .decisions = work->decisions };
    switch (trellis->memory) { /* so that the number of states is a constant in each loop */
    case 8: NAME(path_find)(&w, 1u << 8, bits); return;
    case 10: NAME(path_find)(&w, 1u << 10, bits); return;
    default: NAME(path_find)(&w, 1u << 12, bits); return;
    }
}
