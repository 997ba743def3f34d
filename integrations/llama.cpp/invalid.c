/* invalid.c - see invalid.h. */
#include "invalid.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "log.h"

/* A client whose rows are NaN has such rows in each of its graphs. Its next line is due after this
 * many graphs without any. With a smaller number one client fills the log; with a larger one the
 * next client's first refusal goes unsaid. A model on the CPU has a graph per layer and token. */
#define QUIET_GRAPHS 512u

bool kvp_invalid_create(kvp_invalid *invalid, size_t n_cells)
{
    *invalid =
        (kvp_invalid){ .bits = calloc(n_cells / 64 + 1, sizeof(uint64_t)), .n_cells = n_cells };
    return invalid->bits != NULL;
}

void kvp_invalid_free(kvp_invalid *invalid)
{
    free(invalid->bits);
    *invalid = (kvp_invalid){ 0 };
}

void kvp_invalid_set(kvp_invalid *invalid, size_t first, size_t n, bool marked)
{
    if (!marked && invalid->n == 0)
        return;
    for (size_t cell = first; cell < first + n && cell < invalid->n_cells; cell++) {
        if (kvp_invalid_has(invalid, cell) == marked)
            continue;
        invalid->bits[cell / 64] ^= (uint64_t)1 << cell % 64;
        invalid->n += marked ? 1 : (size_t)-1;
    }
}

void kvp_invalid_clear(kvp_invalid *invalid)
{
    kvp_invalid_set(invalid, 0, invalid->n_cells, false);
}

void kvp_invalid_copy(const kvp_invalid *from, size_t first, kvp_invalid *to, size_t to_first,
                      size_t n)
{
    for (size_t i = 0; (from->n > 0 || to->n > 0) && i < n; i++)
        kvp_invalid_set(to, to_first + i, 1, kvp_invalid_has(from, first + i));
}

void kvp_invalid_fill(const kvp_invalid *invalid, size_t first, size_t n, float *rows, size_t width)
{
    for (size_t i = 0; invalid->n > 0 && i < n; i++)
        for (size_t j = 0; kvp_invalid_has(invalid, first + i) && j < width; j++)
            rows[i * width + j] = NAN;
}

/* Graphs since rows of graphs and of calls were last refused. */
static atomic_uint graphs_since[2] = { QUIET_GRAPHS, QUIET_GRAPHS };

void kvp_invalid_report(const kvp_refusal *refusal)
{
    const unsigned since = atomic_exchange(&graphs_since[refusal->by_graph], 0);

    if (since < (refusal->by_graph ? QUIET_GRAPHS : 1))
        return;
    kvp_error("%s: cannot store %zu rows, the first one for cell %zu: %s; sequences with such rows "
              "get NaN (further lines like this line are left out)",
              refusal->name, refusal->n, refusal->cell, refusal->why);
}

void kvp_invalid_graph_begins(void)
{
    for (int i = 0; i < 2; i++)
        if (atomic_load(&graphs_since[i]) < QUIET_GRAPHS)
            atomic_fetch_add(&graphs_since[i], 1);
}
