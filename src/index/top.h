/* top.h - keeps the k largest of (key, id) pairs in a binary heap whose root is the worst of them.
 * If keys are equal, the smaller id counts as larger, so the result does not depend on the order in
 * which pairs are entered. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct kvant_found {
    float key;
    uint32_t slot;
    uint64_t id;
} kvant_found;

typedef struct kvant_top {
    kvant_found *found; /* room for k */
    uint32_t n, k;
} kvant_top;

static inline bool kvant_worse(const kvant_found *a, const kvant_found *b)
{
    return a->key != b->key ? a->key < b->key : a->id > b->id;
}

/* Keys below this are not kept. */
static inline float kvant_top_threshold(const kvant_top *top)
{
    return top->n < top->k ? -INFINITY : top->found[0].key;
}

static inline void kvant_top_sink(kvant_found *found, uint32_t n, uint32_t at, kvant_found x)
{
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && kvant_worse(&found[child + 1], &found[child]))
            child++;
        if (!kvant_worse(&found[child], &x))
            break;
        found[at] = found[child];
    }
    found[at] = x;
}

static inline void kvant_top_add(kvant_top *top, kvant_found x)
{
    if (top->n == top->k) {
        if (kvant_worse(&top->found[0], &x))
            kvant_top_sink(top->found, top->n, 0, x);
        return;
    }
    uint32_t at = top->n++;
    for (; at > 0 && kvant_worse(&x, &top->found[(at - 1) / 2]); at = (at - 1) / 2)
        top->found[at] = top->found[(at - 1) / 2];
    top->found[at] = x;
}

/* Sorts the pairs, the best first. They are no heap afterwards. */
static inline void kvant_top_sort(kvant_top *top)
{
    for (uint32_t n = top->n; n > 1; n--) {
        const kvant_found worst = top->found[0];
        kvant_top_sink(top->found, n - 1, 0, top->found[n - 1]);
        top->found[n - 1] = worst;
    }
}
