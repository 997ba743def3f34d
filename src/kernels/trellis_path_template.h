/* trellis_path_template.h - the search of trellis codes around one step: a Viterbi search on a circle. The including file defines
 *
 *   NAME
 *   NAME(advance)(trellis, states, cell, from, to, decisions)   metrics of all states after a step, states being a constant; decisions: for
 *                                                         the new states 2 i, then for 2 i + 1, a bit for each i below half the
 *                                                         states: the better one came from state i + states / 2, not from i
 *   NAME(lower)(metric, states)                                 takes the least metric off all
 *
 * The best state before the first step is not known. Steps before it, which are the circle's last ones, tell what each costs; a path
 * that ends where it began is searched for among those that lead to the end, and where none is found soon the search starts again
 * from one state. */
#include "../base/attributes.h"

#define PATH_LOWER_STEPS 16u /* between two calls of lower */
#define PATH_TRIES 4u        /* ends that are tried */

typedef struct NAME(path_work) {
    const kvant_trellis *trellis;
    const uint16_t *cells;
    uint32_t n;
    uint16_t *metric[2];
    uint32_t *decisions; /* states / 32 words a step, the warm-up's first */
} NAME(path_work);

KVANT_INLINE uint32_t NAME(path_begin)(const NAME(path_work) * w, uint32_t before)
{
    return (w->n - before % w->n) % w->n;
}

#ifdef STATES_IN_REGISTERS
static void NAME(path_pass_in_registers)(const NAME(path_work) * w, uint32_t before)
{
    const uint32_t vectors = REGISTER_VECTORS;
    uint32_t at = NAME(path_begin)(w, before);
    vh metric[REGISTER_VECTORS];
#pragma GCC unroll 16
    for (uint32_t v = 0; v < vectors; v++)
        metric[v] = vh_load(w->metric[0] + HALVES * v);
    for (uint32_t step = 0; step < before + w->n; step++) {
        if (step && step % PATH_LOWER_STEPS == 0) {
            const vh least = least_of(metric, vectors);
#pragma GCC unroll 16
            for (uint32_t v = 0; v < vectors; v++)
                metric[v] = vh_sub(metric[v], least);
        }
        advance_in_registers(w->trellis, w->cells[at], metric,
                             w->decisions + (size_t)step * (STATES_IN_REGISTERS / 32));
        at = at + 1 < w->n ? at + 1 : 0;
    }
#pragma GCC unroll 16
    for (uint32_t v = 0; v < vectors; v++)
        vh_store(w->metric[0] + HALVES * v, metric[v]);
}
#endif

/* Steps -before ... n - 1; returns the metrics. */
KVANT_INLINE const uint16_t *NAME(path_pass)(const NAME(path_work) * w, uint32_t states, uint32_t before)
{
    uint32_t at = NAME(path_begin)(w, before);
#ifdef STATES_IN_REGISTERS
    if (states == STATES_IN_REGISTERS) {
        NAME(path_pass_in_registers)(w, before);
        return w->metric[0];
    }
#endif
    for (uint32_t step = 0; step < before + w->n; step++) {
        uint16_t *from = w->metric[step % 2];
        if (step && step % PATH_LOWER_STEPS == 0)
            NAME(lower)(from, states);
        NAME(advance)
        (w->trellis, states, w->cells[at], from, w->metric[(step + 1) % 2],
         w->decisions + (size_t)step * (states / 32));
        at = at + 1 < w->n ? at + 1 : 0;
    }
    return w->metric[(before + w->n) % 2];
}

/* The state before step 0 of the path that ends in a state. */
KVANT_INLINE uint32_t NAME(path_trace)(const NAME(path_work) * w, uint32_t states, uint32_t before, uint32_t state,
                                       uint8_t *bits)
{
    for (uint32_t step = w->n; step-- > 0;) {
        const uint32_t *decisions = w->decisions + (size_t)(before + step) * (states / 32);
        const uint32_t bit = state & 1, i = state >> 1;
        bits[step] = (uint8_t)bit;
        state = i | (decisions[bit * (states / 64) + i / 32] >> i % 32 & 1) * (states / 2);
    }
    return state;
}

KVANT_INLINE void NAME(path_find)(const NAME(path_work) * w, uint32_t states, uint8_t *bits)
{
    memset(w->metric[0], 0, states * sizeof *w->metric[0]);
    const uint16_t *metric = NAME(path_pass)(w, states, KVANT_TRELLIS_WARM_UP);
    uint32_t end = 0;
    for (uint32_t i = 1; i < states; i++)
        end = metric[i] < metric[end] ? i : end;
    for (uint32_t tries = 0; tries < PATH_TRIES; tries++) {
        const uint32_t begin = NAME(path_trace)(w, states, KVANT_TRELLIS_WARM_UP, end, bits);
        if (begin == end)
            return;
        end = begin;
    }
    memset(w->metric[0], 0xff, states * sizeof *w->metric[0]);
    w->metric[0][end] = 0;
    NAME(path_pass)(w, states, 0);
    NAME(path_trace)(w, states, 0, end, bits);
}

/* A function for each number of states, with as much stack as it needs. */
#define PATH_OF(memory)                                                                                            \
    static void NAME(path_##memory)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,               \
                                    uint8_t *bits)                                                                 \
    {                                                                                                              \
        _Alignas(64) uint16_t metric[2][1u << memory];                                                             \
        _Alignas(64) uint32_t decisions[(KVANT_TRELLIS_WARM_UP + KVANT_TRELLIS_MAX_STEPS) * (1u << memory) / 32];  \
        const NAME(path_work) w = { trellis, cells, n, { metric[0], metric[1] }, decisions };                      \
        NAME(path_find)(&w, 1u << memory, bits);                                                                   \
    }
PATH_OF(8)
PATH_OF(10)
PATH_OF(12)

static void NAME(path)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n, uint8_t *bits)
{
    switch (trellis->memory) {
    case 8: NAME(path_8)(trellis, cells, n, bits); return;
    case 10: NAME(path_10)(trellis, cells, n, bits); return;
    default: NAME(path_12)(trellis, cells, n, bits); return;
    }
}
