/* inspect_rows.c - the table and the JSON rows of `kvant inspect`. */
#include "inspect.h"

#include "command.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const report_column facts_columns[] = {
    CONFIG_COLUMNS,
    { "bits", "codec bits", COLUMN_NUMBER, 2 },
    { "model", NULL, COLUMN_TEXT, 0 },
    { "model_fingerprint", NULL, COLUMN_TEXT, 0 },
    { "kvant", NULL, COLUMN_TEXT, 0 },
    { "runtime", NULL, COLUMN_TEXT, 0 },
    { "n_ctx_train", NULL, COLUMN_NUMBER, 0 },
    { "text_tokens", NULL, COLUMN_NUMBER, 0 },
    { "text_fingerprint", NULL, COLUMN_TEXT, 0 },
};
enum { N_FACTS = sizeof facts_columns / sizeof *facts_columns };

/* ctx: as it was asked for, which llama.cpp rounds up. tokens: those that are written. */
static const report_column size_columns[] = {
    { "ctx", NULL, COLUMN_NUMBER, 0 },
    { "filled", NULL, COLUMN_NUMBER, 0 },
    { "tokens", "tokens", COLUMN_NUMBER, 0 },
    { "code_bytes", "codes", COLUMN_MIB, 1 },
    { "exact_bytes", "exact rows", COLUMN_MIB, 1 },
    { "transform_bytes", "transforms", COLUMN_MIB, 1 },
    { "kv_bytes", "MiB in all", COLUMN_MIB, 1 },
    { "cache_bits", "bits", COLUMN_NUMBER, 2 },
    { "working_bytes", "while learning", COLUMN_MIB, 1 },
    { "tokens_per_gib", NULL, COLUMN_NUMBER, 0 },
    { "in_place_tokens", NULL, COLUMN_NUMBER, 0 },
    { "in_place", "f16 in place", COLUMN_BOOL, 0 },
};
enum { N_SIZES = sizeof size_columns / sizeof *size_columns, AT_BYTES = 6, N_SHORT = 2, FULL = 2 };

static void fill_facts(const inspect_facts *f, const kv_config *config, double bits,
                       report_cell *cells)
{
    const report_cell facts[N_FACTS - N_CONFIG_COLUMNS] = {
        CELL_NUMBER(bits),        CELL_TEXT(f->name),
        CELL_TEXT(f->model),      CELL_TEXT(f->kvant),
        CELL_TEXT(f->runtime),    CELL_NUMBER(f->n_ctx_train),
        CELL_NUMBER(f->n_tokens), CELL_TEXT(f->text[0] != 0 ? f->text : NULL),
    };
    configs_fill_cells(config, cells);
    memcpy(cells + N_CONFIG_COLUMNS, facts, sizeof facts);
}

static void fill_sizes(uint32_t n_ctx, const kv_config *config, size_t share,
                       const engine_fill *fill, bool on_gpu, report_cell *cells)
{
    const kvp_kv_size *size = &fill->size;
    const bool has_forms = on_gpu && !config->stock;
    const report_cell sizes[N_SIZES] = {
        CELL_NUMBER(n_ctx),
        CELL_NUMBER(100 * inspect_shares[share]),
        CELL_NUMBER(size->cells),
        CELL_NUMBER(size->bytes - size->exact - size->transforms),
        CELL_NUMBER(size->exact),
        CELL_NUMBER(size->transforms),
        CELL_NUMBER(size->bytes),
        CELL_NUMBER(kvp_kv_size_bits(size)),
        CELL_NUMBER(size->working),
        CELL_NUMBER(floor(size->cells * 1073741824 / size->bytes)),
        CELL_NUMBER(has_forms ? fill->in_place : NAN),
        CELL_NUMBER(has_forms ? size->cells <= fill->in_place : NAN),
    };
    memcpy(cells, sizes, sizeof sizes);
}

/* Fills of a configuration at the c-th context. */
static const engine_fill *fills_of(const kv_configs *list, const engine_fill *fills, size_t c,
                                   size_t i)
{
    return fills + (c * list->n + i) * INSPECT_FILLS;
}

/* A row for each configuration, context and share. */
static bool print_json(engine *e, const inspect_facts *f, const inspect_contexts *contexts,
                       const engine_fill *fills, bool on_gpu, const double *bits)
{
    const kv_configs *list = &e->options.configs;
    const size_t n_rows = contexts->n > 0 ? contexts->n * INSPECT_FILLS : 1,
                 width = N_FACTS + (contexts->n > 0 ? N_SIZES : 0);
    report_column columns[N_FACTS + N_SIZES];
    report_cell *cells = calloc(list->n * n_rows * width, sizeof *cells), *row = cells;
    memcpy(columns, facts_columns, sizeof facts_columns);
    memcpy(columns + N_FACTS, size_columns, sizeof size_columns);
    if (cells == NULL)
        return complain("inspect: out of memory");
    for (size_t i = 0; i < list->n; i++)
        for (size_t r = 0; r < n_rows; r++, row += width) {
            const size_t c = r / INSPECT_FILLS, share = r % INSPECT_FILLS;
            fill_facts(f, &list->items[i], bits[i], row);
            if (contexts->n > 0)
                fill_sizes(contexts->n_ctx[c], &list->items[i], share,
                           &fills_of(list, fills, c, i)[share], on_gpu, row + N_FACTS);
        }
    const bool ok = report_print(columns, width, cells, list->n * n_rows, REPORT_JSON);
    free(cells);
    return ok;
}

/* A line for each share of one context. */
static bool print_fills(const kv_configs *list, uint32_t n_ctx, const engine_fill *fills,
                        bool on_gpu)
{
    report_column columns[1 + N_SIZES] = { { NULL, "cache", COLUMN_TEXT, 0 } };
    const size_t width = 1 + N_SIZES, n_rows = list->n * INSPECT_FILLS;
    report_cell *cells = calloc(n_rows * width, sizeof *cells), *row = cells;
    if (cells == NULL)
        return complain("inspect: out of memory");
    memcpy(columns + 1, size_columns, sizeof size_columns);
    if (!on_gpu)
        columns[N_SIZES].heading = NULL;
    for (size_t i = 0; i < n_rows; i++, row += width) {
        const kv_config *config = &list->items[i / INSPECT_FILLS];
        row[0] = CELL_TEXT(config->label);
        fill_sizes(n_ctx, config, i % INSPECT_FILLS, &fills[i], on_gpu, row + 1);
    }
    const bool ok = report_print(columns, width, cells, n_rows, REPORT_TABLE);
    free(cells);
    return ok;
}

/* "MiB at 8192" and the bits of every context. */
static size_t table_columns(const inspect_contexts *contexts, char headings[][24],
                            report_column *columns)
{
    size_t n = 0;
    columns[n++] = (report_column){ NULL, "cache", COLUMN_TEXT, 0 };
    for (size_t c = 0; c < contexts->n; c++) {
        memcpy(columns + n, size_columns + AT_BYTES, N_SHORT * sizeof *columns);
        snprintf(headings[c], sizeof headings[c], "MiB at %lu", (unsigned long)contexts->n_ctx[c]);
        columns[n].heading = headings[c];
        n += N_SHORT;
    }
    return n;
}

/* Full caches of several contexts. */
static bool print_contexts(const kv_configs *list, const inspect_contexts *contexts,
                           const engine_fill *fills)
{
    char headings[INSPECT_MAX_CONTEXTS][24];
    report_column columns[1 + INSPECT_MAX_CONTEXTS * N_SHORT];
    const size_t width = table_columns(contexts, headings, columns);
    report_cell *cells = calloc(list->n * width, sizeof *cells), *row = cells;
    if (cells == NULL)
        return complain("inspect: out of memory");
    for (size_t i = 0; i < list->n; i++, row += width) {
        row[0] = CELL_TEXT(list->items[i].label);
        for (size_t c = 0; c < contexts->n; c++) {
            report_cell all[N_SIZES];
            fill_sizes(contexts->n_ctx[c], &list->items[i], FULL,
                       &fills_of(list, fills, c, i)[FULL], false, all);
            memcpy(row + 1 + c * N_SHORT, all + AT_BYTES, N_SHORT * sizeof *all);
        }
    }
    const bool ok = report_print(columns, width, cells, list->n, REPORT_TABLE);
    free(cells);
    return ok;
}

static bool print_bits(const kv_configs *list, const double *bits)
{
    static const report_column columns[] = { { NULL, "cache", COLUMN_TEXT, 0 },
                                             { NULL, "codec bits", COLUMN_NUMBER, 2 } };
    report_cell *cells = calloc(list->n * 2, sizeof *cells);
    if (cells == NULL)
        return complain("inspect: out of memory");
    for (size_t i = 0; i < list->n; i++) {
        cells[2 * i] = CELL_TEXT(list->items[i].label);
        cells[2 * i + 1] = CELL_NUMBER(bits[i]);
    }
    const bool ok = report_print(columns, 2, cells, list->n, REPORT_TABLE);
    free(cells);
    return ok;
}

static bool print_table(const kv_configs *list, const inspect_facts *f,
                        const inspect_contexts *contexts, const engine_fill *fills, bool on_gpu,
                        const double *bits)
{
    print_plain(stdout, f->name);
    printf(", contexts of up to %.0f tokens\n", f->n_ctx_train);
    if (!isnan(f->n_tokens))
        printf("the text has %.0f tokens\n", f->n_tokens);
    if (contexts->n == 1)
        return print_fills(list, contexts->n_ctx[0], fills, on_gpu);
    return contexts->n > 0 ? print_contexts(list, contexts, fills) : print_bits(list, bits);
}

bool inspect_print(engine *e, const inspect_facts *f, const inspect_contexts *contexts,
                   const engine_fill *fills, bool on_gpu, bool json)
{
    const kv_configs *list = &e->options.configs;
    double *bits = calloc(list->n, sizeof *bits);
    bool ok = bits != NULL || complain("inspect: out of memory");
    for (size_t i = 0; i < list->n && ok; i++)
        ok = engine_bits(e, &list->items[i], &bits[i]);
    ok = ok && (json ? print_json(e, f, contexts, fills, on_gpu, bits)
                     : print_table(list, f, contexts, fills, on_gpu, bits));
    free(bits);
    return ok;
}
