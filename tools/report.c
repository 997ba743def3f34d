/* report.c - tables, JSON and CSV from the same cells. */
#include "report.h"

#include "command.h"
#include "json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CELL_BYTES 96
#define MIB 1048576.0

/* Rows */

void report_row(report_rows *r)
{
    r->n_rows++;
}

static void add(report_rows *r, report_column column, report_cell cell)
{
    if (r->n_cells == r->room) {
        const size_t room = 2 * r->room + REPORT_MAX_COLUMNS;
        report_cell *grown = realloc(r->cells, room * sizeof *grown);
        if (grown == NULL) {
            r->no_memory = true;
            return;
        }
        r->cells = grown;
        r->room = room;
    }
    if (r->n_rows == 1)
        r->columns[r->n_columns++] = column;
    r->cells[r->n_cells++] = cell;
}

void report_text(report_rows *r, const char *key, const char *heading, const char *text)
{
    add(r, (report_column){ key, heading, COLUMN_TEXT, 0 }, (report_cell){ .text = text });
}

void report_number_as(report_rows *r, column_kind kind, const char *key, const char *heading,
                      int precision, double number)
{
    add(r, (report_column){ key, heading, kind, precision }, (report_cell){ .number = number });
}

void report_number(report_rows *r, const char *key, const char *heading, int precision,
                   double number)
{
    report_number_as(r, COLUMN_NUMBER, key, heading, precision, number);
}

/* The three forms */

static const char *cell_text(const report_column *column, const report_cell *cell, char *buffer)
{
    if (column->kind == COLUMN_TEXT)
        return cell->text != NULL ? cell->text : "-";
    if (!isfinite(cell->number))
        return "-";
    if (column->kind == COLUMN_BOOL)
        return cell->number != 0 ? "yes" : "no";
    const double scale = column->kind == COLUMN_MIB       ? 1 / MIB
                         : column->kind == COLUMN_PERCENT ? 100.0
                                                          : 1.0;
    const double shown = cell->number * scale;
    const bool zero = fabs(shown) < 0.5 * pow(10, -column->precision); /* no "-0.00" */
    snprintf(buffer, CELL_BYTES, "%.*f", column->precision, zero ? 0 : shown);
    return buffer;
}

static size_t column_width(const report_rows *r, size_t column)
{
    char buffer[CELL_BYTES];
    const report_column *c = &r->columns[column];
    size_t width = strlen(c->heading);
    for (size_t i = 0; i < r->n_rows; i++) {
        const size_t length = strlen(cell_text(c, &r->cells[i * r->n_columns + column], buffer));
        if (length > width)
            width = length;
    }
    return width;
}

/* cells: NULL for the line of headings. */
static void print_row(const report_rows *r, const size_t *widths, const report_cell *cells)
{
    char buffer[CELL_BYTES];
    int blanks = 0; /* blanks owed after the last cell, so that no line ends with blanks */
    for (size_t c = 0; c < r->n_columns; c++) {
        const report_column *column = &r->columns[c];
        if (column->heading == NULL)
            continue;
        const char *text = cells != NULL ? cell_text(column, &cells[c], buffer) : column->heading;
        const int padding = (int)(widths[c] - strlen(text));
        const bool left = column->kind == COLUMN_TEXT;
        printf("%*s", blanks + (left ? 0 : padding), "");
        print_plain(stdout, text);
        blanks = 2 + (left ? padding : 0);
    }
    putchar('\n');
}

static void print_table(const report_rows *r)
{
    size_t widths[REPORT_MAX_COLUMNS] = { 0 };
    for (size_t c = 0; c < r->n_columns; c++)
        if (r->columns[c].heading != NULL)
            widths[c] = column_width(r, c);
    print_row(r, widths, NULL);
    for (size_t i = 0; i < r->n_rows; i++)
        print_row(r, widths, &r->cells[i * r->n_columns]);
}

static void print_json_cell(const report_column *column, const report_cell *cell)
{
    if (column->kind == COLUMN_TEXT)
        json_string(stdout, cell->text);
    else if (column->kind == COLUMN_BOOL && isfinite(cell->number))
        fputs(cell->number != 0 ? "true" : "false", stdout);
    else
        json_number(stdout, cell->number);
}

/* One object per line. */
static void print_json(const report_rows *r)
{
    fputs("[", stdout);
    for (size_t i = 0; i < r->n_rows; i++) {
        const char *before = i > 0 ? ",\n {" : "\n {";
        for (size_t c = 0; c < r->n_columns; c++) {
            if (r->columns[c].key == NULL)
                continue;
            fputs(before, stdout);
            json_string(stdout, r->columns[c].key);
            fputs(": ", stdout);
            print_json_cell(&r->columns[c], &r->cells[i * r->n_columns + c]);
            before = ", ";
        }
        putchar('}');
    }
    fputs("\n]\n", stdout);
}

/* Quoted where RFC 4180 wants it. */
static void print_csv_text(const char *text)
{
    if (strpbrk(text, ",\"\r\n") == NULL) {
        fputs(text, stdout);
        return;
    }
    putchar('"');
    for (; *text != 0; text++) {
        if (*text == '"')
            putchar('"');
        putchar(*text);
    }
    putchar('"');
}

static void print_csv_cell(const report_column *column, const report_cell *cell)
{
    if (column->kind == COLUMN_TEXT && cell->text != NULL)
        print_csv_text(cell->text);
    else if (column->kind != COLUMN_TEXT && isfinite(cell->number))
        json_number(stdout, cell->number);
}

static void print_csv(const report_rows *r)
{
    for (size_t line = 0; line <= r->n_rows; line++) {
        const char *comma = "";
        for (size_t c = 0; c < r->n_columns; c++) {
            if (r->columns[c].key == NULL)
                continue;
            fputs(comma, stdout);
            comma = ",";
            if (line == 0)
                print_csv_text(r->columns[c].key);
            else
                print_csv_cell(&r->columns[c], &r->cells[(line - 1) * r->n_columns + c]);
        }
        putchar('\n');
    }
}

bool report_print(report_rows *r, const char *command, report_format format)
{
    const bool ok = !r->no_memory || complain("%s: out of memory", command);
    if (ok && format == REPORT_JSON)
        print_json(r);
    else if (ok && r->n_columns > 0) /* an interrupted command may have no row */
        (format == REPORT_CSV ? print_csv : print_table)(r);
    report_free(r);
    return ok && finish_output() == EXIT_OK;
}

void report_free(report_rows *r)
{
    free(r->cells);
    *r = (report_rows){ .n_rows = 0 };
}
