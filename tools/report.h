/* report.h - rows of results, as a table for people, as one JSON array of flat objects or as CSV
 * with a line of names.
 *
 * All come from the same cells, so they cannot disagree. An absent number (not measured, does not
 * apply) is null in JSON, empty in CSV and "-" in the table.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* false and true for commands that know no CSV. */
typedef enum report_format { REPORT_TABLE, REPORT_JSON, REPORT_CSV } report_format;

typedef enum column_kind {
    COLUMN_TEXT,
    COLUMN_NUMBER,
    COLUMN_MIB,     /* MiB in the table, bytes elsewhere */
    COLUMN_PERCENT, /* a share of 1 outside of the table */
    COLUMN_BOOL     /* 0 or 1 */
} column_kind;

typedef struct report_column {
    const char *key, *heading;
    column_kind kind;
    int precision;
} report_column;

typedef struct report_cell {
    const char *text; /* COLUMN_TEXT; NULL: absent */
    double number;    /* the others; NaN: absent */
} report_cell;

#define REPORT_MAX_COLUMNS 32 /* of a row */

/* Zeroed: without a row. */
typedef struct report_rows {
    report_column columns[REPORT_MAX_COLUMNS]; /* of the first row; all rows have the same */
    report_cell *cells;                        /* row by row */
    size_t n_columns, n_cells, n_rows, room;
    bool no_memory;
} report_rows;

/* Begins a row, to which the functions below add cells from left to right. */
void report_row(report_rows *r);

/* key: in JSON and CSV, NULL to leave the column out there. heading: in the table, NULL to leave
 * the column out there. Neither they nor the text are copied: they must live until the report is
 * printed. */
void report_text(report_rows *r, const char *key, const char *heading, const char *text);

/* precision: digits after the point in the table. */
void report_number(report_rows *r, const char *key, const char *heading, int precision,
                   double number);
void report_number_as(report_rows *r, column_kind kind, const char *key, const char *heading,
                      int precision, double number);

/* Prints the rows to stdout, flushes it and frees the report. False after complaining in the
 * command's name that memory was short, or that stdout cannot be written. */
bool report_print(report_rows *r, const char *command, report_format format);

void report_free(report_rows *r);
