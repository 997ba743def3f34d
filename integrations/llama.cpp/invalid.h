/* invalid.h - cells whose rows were refused.
 *
 * A codec refuses a row with a NaN, an infinity or a number beyond fp16's range, and memory may run
 * out. Most calls of llama.cpp that write rows cannot report this, and one client's bad row must
 * not fail the batch of all clients. So the cell of such a row becomes invalid: reading the cell
 * gives NaN, and attention gives NaN to a token that sees the cell, as llama.cpp's f16 cache does.
 * Nobody reads the row that the cell held before. The next row that is stored makes the cell valid.
 *
 * This file owns the marks of a tensor's cells and the lines that are printed for refusals. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvp_invalid {
    uint64_t *bits; /* by cell, of all streams */
    size_t n_cells;
    size_t n; /* cells that are marked */
} kvp_invalid;

/* False without memory. */
bool kvp_invalid_create(kvp_invalid *invalid, size_t n_cells);
void kvp_invalid_free(kvp_invalid *invalid);

/* Marks n cells from the first on, or removes their marks. */
void kvp_invalid_set(kvp_invalid *invalid, size_t first, size_t n, bool marked);
void kvp_invalid_clear(kvp_invalid *invalid);
void kvp_invalid_copy(const kvp_invalid *from, size_t first, kvp_invalid *to, size_t to_first,
                      size_t n);

static inline bool kvp_invalid_has(const kvp_invalid *invalid, size_t cell)
{
    return (invalid->bits[cell / 64] >> cell % 64 & 1) != 0;
}

/* Fills the rows of marked cells with NaN. rows has the rows of n cells from the first on. */
void kvp_invalid_fill(const kvp_invalid *invalid, size_t first, size_t n, float *rows,
                      size_t width);

/* A refusal of some cells' rows, for the log. A call of llama.cpp that writes many cells, such as
 * restoring a state, gets one line; so does a client whose rows are refused graph after graph. */
typedef struct kvp_refusal {
    const char *name; /* name of the tensor */
    size_t cell, n;   /* the first cell, and the number of cells */
    const char *why;
    bool by_graph; /* true: a graph wrote the rows; false: a call that cannot report a refusal */
} kvp_refusal;

void kvp_invalid_report(const kvp_refusal *refusal);

/* Says that a graph is about to be computed. */
void kvp_invalid_graph_begins(void);
