/* report.c - tables, JSON and CSV from the same cells. */
#include "report.h"

#include "command.h"
#include "json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define CELL_BYTES 96
#define MIB 1048576.0

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

static size_t column_width(const report_column *column, size_t stride, const report_cell *cells,
                           size_t n)
{
    char buffer[CELL_BYTES];
    size_t width = strlen(column->heading);
    for (size_t i = 0; i < n; i++) {
        const size_t length = strlen(cell_text(column, cells + i * stride, buffer));
        if (length > width)
            width = length;
    }
    return width;
}

static void print_row(const report_column *columns, size_t n_columns, const size_t *widths,
                      const report_cell *cells)
{
    char buffer[CELL_BYTES];
    int blanks = 0; /* blanks owed after the last cell, so that no line ends with blanks */
    for (size_t c = 0; c < n_columns; c++) {
        if (columns[c].heading == NULL)
            continue;
        const char *text =
            cells != NULL ? cell_text(&columns[c], &cells[c], buffer) : columns[c].heading;
        const int padding = (int)(widths[c] - strlen(text));
        const bool left = columns[c].kind == COLUMN_TEXT;
        printf("%*s", blanks + (left ? 0 : padding), "");
        print_plain(stdout, text);
        blanks = 2 + (left ? padding : 0);
    }
    putchar('\n');
}

static void print_table(const report_column *columns, size_t n_columns, const report_cell *cells,
                        size_t n)
{
    size_t widths[REPORT_MAX_COLUMNS] = { 0 };
    for (size_t c = 0; c < n_columns; c++)
        if (columns[c].heading != NULL)
            widths[c] = column_width(&columns[c], n_columns, cells + c, n);
    print_row(columns, n_columns, widths, NULL);
    for (size_t i = 0; i < n; i++)
        print_row(columns, n_columns, widths, cells + i * n_columns);
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
static void print_json(const report_column *columns, size_t n_columns, const report_cell *cells,
                       size_t n)
{
    fputs("[", stdout);
    for (size_t i = 0; i < n; i++) {
        const char *before = i > 0 ? ",\n {" : "\n {";
        for (size_t c = 0; c < n_columns; c++) {
            if (columns[c].key == NULL)
                continue;
            fputs(before, stdout);
            json_string(stdout, columns[c].key);
            fputs(": ", stdout);
            print_json_cell(&columns[c], &cells[i * n_columns + c]);
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

static void print_csv(const report_column *columns, size_t n_columns, const report_cell *cells,
                      size_t n)
{
    for (size_t line = 0; line <= n; line++) {
        const char *comma = "";
        for (size_t c = 0; c < n_columns; c++) {
            if (columns[c].key == NULL)
                continue;
            fputs(comma, stdout);
            comma = ",";
            if (line == 0)
                print_csv_text(columns[c].key);
            else
                print_csv_cell(&columns[c], &cells[(line - 1) * n_columns + c]);
        }
        putchar('\n');
    }
}

bool report_print(const report_column *columns, size_t n_columns, const report_cell *cells,
                  size_t n_rows, report_format format)
{
    if (format == REPORT_JSON)
        print_json(columns, n_columns, cells, n_rows);
    else if (format == REPORT_CSV)
        print_csv(columns, n_columns, cells, n_rows);
    else
        print_table(columns, n_columns, cells, n_rows);
    return finish_output() == EXIT_OK;
}
