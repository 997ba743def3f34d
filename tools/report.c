/* report.c - tables, JSON and CSV from the same cells. */
#include "report.h"

#include "command.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
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
    const double scale = column->kind == COLUMN_MIB ? 1 / MIB : column->kind == COLUMN_PERCENT ? 100.0 : 1.0;
    const double shown = cell->number * scale;
    const bool zero = fabs(shown) < 0.5 * pow(10, -column->precision); /* no "-0.00" */
    snprintf(buffer, CELL_BYTES, "%.*f", column->precision, zero ? 0 : shown);
    return buffer;
}

static size_t column_width(const report_column *column, size_t stride, const report_cell *cells, size_t n)
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
    bool first = true;
    for (size_t c = 0; c < n_columns; c++) {
        if (columns[c].heading == NULL)
            continue;
        const char *text = cells != NULL ? cell_text(&columns[c], &cells[c], buffer) : columns[c].heading;
        const bool left = columns[c].kind == COLUMN_TEXT;
        printf("%s%*s", first ? "" : "  ", (left ? -1 : 1) * (int)widths[c], text);
        first = false;
    }
    putchar('\n');
}

static bool print_table(const report_column *columns, size_t n_columns, const report_cell *cells, size_t n)
{
    size_t widths[32] = { 0 };
    if (n_columns > sizeof widths / sizeof *widths)
        return false;
    for (size_t c = 0; c < n_columns; c++)
        if (columns[c].heading != NULL)
            widths[c] = column_width(&columns[c], n_columns, cells + c, n);
    print_row(columns, n_columns, widths, NULL);
    for (size_t i = 0; i < n; i++)
        print_row(columns, n_columns, widths, cells + i * n_columns);
    return true;
}

static bool add_cell(cJSON *object, const report_column *column, const report_cell *cell)
{
    if (column->key == NULL)
        return true;
    if (column->kind == COLUMN_BOOL && isfinite(cell->number))
        return cJSON_AddBoolToObject(object, column->key, cell->number != 0) != NULL;
    if (column->kind == COLUMN_TEXT && cell->text != NULL)
        return cJSON_AddStringToObject(object, column->key, cell->text) != NULL;
    if (column->kind == COLUMN_TEXT || !isfinite(cell->number))
        return cJSON_AddNullToObject(object, column->key) != NULL;
    return cJSON_AddNumberToObject(object, column->key, cell->number) != NULL;
}

static bool fill_array(cJSON *array, const report_column *columns, size_t n_columns, const report_cell *cells,
                       size_t n)
{
    for (size_t i = 0; i < n; i++) {
        cJSON *object = cJSON_CreateObject();
        if (object == NULL || !cJSON_AddItemToArray(array, object))
            return false;
        for (size_t c = 0; c < n_columns; c++)
            if (!add_cell(object, &columns[c], &cells[i * n_columns + c]))
                return false;
    }
    return true;
}

static bool print_json(const report_column *columns, size_t n_columns, const report_cell *cells, size_t n)
{
    cJSON *array = cJSON_CreateArray();
    char *text = NULL;
    if (array != NULL && fill_array(array, columns, n_columns, cells, n))
        text = cJSON_Print(array);
    if (text != NULL)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(array);
    return text != NULL;
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

/* As few digits as give the same number back, which is what cJSON prints, too. */
static void print_csv_cell(const report_column *column, const report_cell *cell)
{
    char buffer[CELL_BYTES];
    if (column->kind == COLUMN_TEXT) {
        if (cell->text != NULL)
            print_csv_text(cell->text);
    } else if (isfinite(cell->number)) {
        snprintf(buffer, sizeof buffer, "%.15g", cell->number);
        if (strtod(buffer, NULL) != cell->number)
            snprintf(buffer, sizeof buffer, "%.17g", cell->number);
        fputs(buffer, stdout);
    }
}

static bool print_csv(const report_column *columns, size_t n_columns, const report_cell *cells, size_t n)
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
    return true;
}

bool report_print(const report_column *columns, size_t n_columns, const report_cell *cells, size_t n_rows,
                  report_format format)
{
    const bool ok = format == REPORT_JSON  ? print_json(columns, n_columns, cells, n_rows)
                    : format == REPORT_CSV ? print_csv(columns, n_columns, cells, n_rows)
                                           : print_table(columns, n_columns, cells, n_rows);
    if (!ok)
        complain("out of memory while printing the results");
    return ok;
}
