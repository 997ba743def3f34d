/* inspect_rows.c - the table and the JSON rows of `kvant inspect`. */
#include "inspect.h"

#include "command.h"

#include <math.h>
#include <stdio.h>

/* Fills of a configuration at the c-th context. */
static const engine_fill *fills_of(const kv_configs *list, const engine_fill *fills, size_t c,
                                   size_t i)
{
    return fills + (c * list->n + i) * INSPECT_FILLS;
}

/* heading: of the codec bits, or NULL. */
static void add_facts(const inspect_facts *f, const kv_config *config, const char *heading,
                      double bits, report_rows *row)
{
    configs_add_cells(config, row);
    report_number(row, "bits", heading, 2, bits);
    report_text(row, "model", NULL, f->name);
    report_text(row, "model_fingerprint", NULL, f->model);
    report_text(row, "kvant", NULL, f->kvant);
    report_text(row, "runtime", NULL, f->runtime);
    report_number(row, "n_ctx_train", NULL, 0, f->n_ctx_train);
    report_number(row, "text_tokens", NULL, 0, f->n_tokens);
    report_text(row, "text_fingerprint", NULL, f->text[0] != 0 ? f->text : NULL);
}

/* n_ctx: as it was asked for, which llama.cpp rounds up. tokens: those that are written. */
static void add_sizes(uint32_t n_ctx, const kv_config *config, double share,
                      const engine_fill *fill, report_rows *row)
{
    const kvp_kv_size *size = &fill->size;
    report_number(row, "ctx", NULL, 0, n_ctx);
    report_number(row, "filled", NULL, 0, 100 * share);
    report_number(row, "tokens", "tokens", 0, size->cells);
    report_number_as(row, COLUMN_MIB, "code_bytes", "codes", 1,
                     size->bytes - size->exact - size->transforms);
    report_number_as(row, COLUMN_MIB, "exact_bytes", "exact rows", 1, size->exact);
    report_number_as(row, COLUMN_MIB, "transform_bytes", "transforms", 1, size->transforms);
    report_number_as(row, COLUMN_MIB, "kv_bytes", "MiB in all", 1, size->bytes);
    report_number(row, "cache_bits", "bits", 2, kvp_kv_size_bits(size));
    report_number_as(row, COLUMN_MIB, "working_bytes", "while learning", 1, size->working);
    report_number(row, "tokens_per_gib", NULL, 0, floor(size->cells * 1073741824 / size->bytes));
    report_number(row, "in_place_tokens", NULL, 0, config->stock ? NAN : fill->in_place);
    report_number_as(row, COLUMN_BOOL, "in_place", "f16 in place", 0,
                     config->stock ? NAN : size->cells <= fill->in_place);
}

/* A row for each configuration, context and share, or, without a context, for each configuration.
 */
static bool add_rows(engine *e, const inspect_facts *f, const inspect_contexts *contexts,
                     const engine_fill *fills, report_rows *out)
{
    const kv_configs *list = &e->options.configs;
    for (size_t i = 0; i < list->n; i++) {
        const kv_config *config = &list->items[i];
        double bits;
        if (!engine_bits(e, config, &bits))
            return false;
        for (size_t r = 0; r < contexts->n * INSPECT_FILLS; r++) {
            const size_t c = r / INSPECT_FILLS, share = r % INSPECT_FILLS;
            report_row(out);
            add_facts(f, config, NULL, bits, out);
            add_sizes(contexts->n_ctx[c], config, inspect_shares[share],
                      &fills_of(list, fills, c, i)[share], out);
        }
        if (contexts->n == 0) {
            report_row(out);
            add_facts(f, config, "codec bits", bits, out);
        }
    }
    return true;
}

/* A line for each configuration with its full cache in several contexts. */
static bool print_contexts(const kv_configs *list, const inspect_contexts *contexts,
                           const engine_fill *fills)
{
    report_rows out = { .n_rows = 0 };
    char headings[INSPECT_MAX_CONTEXTS][24];
    for (size_t c = 0; c < contexts->n; c++)
        snprintf(headings[c], sizeof headings[c], "MiB at %lu", (unsigned long)contexts->n_ctx[c]);
    for (size_t i = 0; i < list->n; i++) {
        report_row(&out);
        report_text(&out, NULL, "cache", list->items[i].label);
        for (size_t c = 0; c < contexts->n; c++) {
            const kvp_kv_size *full = &fills_of(list, fills, c, i)[INSPECT_FILLS - 1].size;
            report_number_as(&out, COLUMN_MIB, NULL, headings[c], 1, full->bytes);
            report_number(&out, NULL, "bits", 2, kvp_kv_size_bits(full));
        }
    }
    return report_print(&out, "inspect", REPORT_TABLE);
}

static void print_head(const inspect_facts *f)
{
    print_plain(stdout, f->name);
    printf(", contexts of up to %.0f tokens\n", f->n_ctx_train);
    if (!isnan(f->n_tokens))
        printf("the text has %.0f tokens\n", f->n_tokens);
}

bool inspect_print(engine *e, const inspect_facts *f, const inspect_contexts *contexts,
                   const engine_fill *fills, bool json)
{
    report_rows out = { .n_rows = 0 };
    const bool ok = add_rows(e, f, contexts, fills, &out);
    if (ok && !json)
        print_head(f);
    if (ok && (json || contexts->n <= 1))
        return report_print(&out, "inspect", json);
    report_free(&out);
    return ok && print_contexts(&e->options.configs, contexts, fills);
}
