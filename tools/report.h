/* report.h - rows of results, as a table for people, as one JSON array of flat objects or as CSV
 * with a line of names.
 *
 * All come from the same cells, so they cannot disagree. An absent number (not measured, does not
 * apply) is null in JSON, empty in CSV and "-" in the table.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef enum column_kind {
    COLUMN_TEXT,
    COLUMN_NUMBER,
    COLUMN_MIB,
    COLUMN_PERCENT,
    COLUMN_BOOL
} column_kind;

typedef struct report_column {
    const char *key;     /* in JSON and CSV, NULL to leave the column out there */
    const char *heading; /* in the table, NULL to leave the column out there */
    /* MIB: MiB in the table, bytes elsewhere. PERCENT: a share of 1 outside of the table. BOOL:
     * number is 0 or 1. */
    column_kind kind;
    int precision; /* digits after the point in the table */
} report_column;

typedef struct report_cell {
    const char *text; /* COLUMN_TEXT; NULL: absent */
    double number;    /* the others; NaN: absent */
} report_cell;

#define CELL_TEXT(s) ((report_cell){ .text = (s) })
#define CELL_NUMBER(x) ((report_cell){ .number = (double)(x) })

/* false and true for commands that know no CSV. */
typedef enum report_format { REPORT_TABLE, REPORT_JSON, REPORT_CSV } report_format;

#define REPORT_MAX_COLUMNS 32 /* of a table */

/* Prints n_rows x n_columns cells (at most REPORT_MAX_COLUMNS), row by row, to stdout, and flushes
 * it. False after complaining that it cannot be written. */
bool report_print(const report_column *columns, size_t n_columns, const report_cell *cells,
                  size_t n_rows, report_format format);
