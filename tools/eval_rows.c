/* eval_rows.c - means, errors and percentiles over chosen chunks and positions. */
#include "eval_run.h"

#include "command.h"
#include "stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const report_column columns[] = {
    CONFIG_COLUMNS,
    { "text", "text", COLUMN_TEXT, 0 },
    { "from", "from", COLUMN_NUMBER, 0 },
    { "to", "to", COLUMN_NUMBER, 0 },
    { "bits", "codec bits", COLUMN_NUMBER, 2 },
    { "cache_bits", "bits", COLUMN_NUMBER, 2 },
    { "kv_bytes", "KV MiB", COLUMN_MIB, 2 },
    { "ppl", "ppl", COLUMN_NUMBER, 3 },
    { "kld_mean", "KLD mean", COLUMN_NUMBER, 5 },
    { "kld_se", "+-", COLUMN_NUMBER, 5 },
    { "kld_p50", "50%", COLUMN_NUMBER, 4 },
    { "kld_p90", "90%", COLUMN_NUMBER, 4 },
    { "kld_p99", "99%", COLUMN_NUMBER, 4 },
    { "kld_p999", "99.9%", COLUMN_NUMBER, 3 },
    { "kld_max", "max", COLUMN_NUMBER, 3 },
    { "top1", "top-1 %", COLUMN_PERCENT, 2 },
    { "chunks", "chunks", COLUMN_NUMBER, 0 },
    { "batch", NULL, COLUMN_NUMBER, 0 },
    { "kld_step", NULL, COLUMN_NUMBER, 5 },
    { "kld_step_se", NULL, COLUMN_NUMBER, 5 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns, AT_TEXT = N_CONFIG_COLUMNS, AT_FROM, AT_TO };

/* Chunks of one text or of all texts, and scored positions from .. end - 1, counted from the first
 * scored position. */
typedef struct slice {
    size_t text;
    bool all_texts;
    size_t from, end;
} slice;

typedef struct sample {
    double *x, *y; /* room for all values of a configuration */
    size_t n;
} sample;

static bool in_slice(const eval_run *r, const slice *s, size_t chunk)
{
    return s->all_texts || r->texts.chunks[chunk].text == s->text;
}

static size_t count_chunks(const eval_run *r, const eval_tally *t, const slice *s)
{
    size_t n = 0;
    for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++)
        n += in_slice(r, s, chunk) && t->done[chunk];
    return n;
}

/* x becomes divergences, y -ln p; returns how many had the same most probable token. */
static size_t gather(const eval_run *r, const eval_tally *t, const slice *s, sample *out)
{
    size_t n_same = 0;
    out->n = 0;
    for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++) {
        const score_value *values = in_slice(r, s, chunk) ? eval_values(r, t, chunk) : NULL;
        for (size_t i = s->from; i < s->end && values != NULL; i++) {
            out->x[out->n] = values[i].kld;
            out->y[out->n++] = values[i].nll;
            n_same += values[i].same_top;
        }
    }
    return n_same;
}

/* Both configurations were scored on the same tokens. The error of their difference is computed
 * from the differences of single tokens, so it is smaller than either configuration's error. */
static void gather_steps(const eval_run *r, const eval_tally *t, const eval_tally *before,
                         const slice *s, sample *out)
{
    out->n = 0;
    for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++) {
        const score_value *a = eval_values(r, t, chunk), *b = eval_values(r, before, chunk);
        for (size_t i = s->from; i < s->end && a != NULL && b != NULL && in_slice(r, s, chunk); i++)
            out->x[out->n++] = a[i].kld - b[i].kld;
    }
}

static void fill_row(const eval_run *r, size_t tally, const slice *s, sample *values,
                     report_cell *row)
{
    const eval_tally *t = &r->tallies[tally];
    const uint32_t first = r->options->first;
    double nll, nll_error, kld, kld_error, step = NAN, step_error = NAN;
    if (tally > 0) {
        gather_steps(r, t, t - 1, s, values);
        stats_mean(values->x, values->n, &step, &step_error);
    }
    const size_t n_same = gather(r, t, s, values);
    stats_mean(values->y, values->n, &nll, &nll_error);
    stats_mean(values->x, values->n, &kld, &kld_error);
    const report_cell measured[N_COLUMNS - N_CONFIG_COLUMNS] = {
        CELL_TEXT(s->all_texts && r->texts.n > 1 ? "all" : r->texts.names[s->text]),
        CELL_NUMBER(first + s->from),
        CELL_NUMBER(first + s->end - 1),
        CELL_NUMBER(t->bits),
        CELL_NUMBER(16 * t->kv_bytes / r->tallies[0].kv_bytes), /* f16 has 16 for each number */
        CELL_NUMBER(t->kv_bytes),
        CELL_NUMBER(exp(nll)),
        CELL_NUMBER(kld),
        CELL_NUMBER(kld_error),
        CELL_NUMBER(stats_percentile(values->x, values->n, 0.5)),
        CELL_NUMBER(stats_percentile(values->x, values->n, 0.9)),
        CELL_NUMBER(stats_percentile(values->x, values->n, 0.99)),
        CELL_NUMBER(stats_percentile(values->x, values->n, 0.999)),
        CELL_NUMBER(stats_percentile(values->x, values->n, 1)),
        CELL_NUMBER((double)n_same / (double)values->n),
        CELL_NUMBER(count_chunks(r, t, s)),
        CELL_NUMBER(r->options->n_batch),
        CELL_NUMBER(step),
        CELL_NUMBER(step_error),
    };
    configs_fill_cells(t->config, row);
    memcpy(row + N_CONFIG_COLUMNS, measured, sizeof measured);
}

static size_t fill_rows(const eval_run *r, uint32_t n_bins, sample *values, report_cell *cells)
{
    const size_t n_texts = r->texts.n, n_slices = n_texts > 1 ? n_texts + 1 : n_texts;
    size_t n = 0;
    for (size_t text = 0; text < n_slices; text++)
        for (size_t tally = 0; tally < r->n_tallies; tally++)
            for (size_t bin = 0; bin < n_bins; bin++) {
                const slice s = { .text = text < n_texts ? text : 0,
                                  .all_texts = text == n_texts,
                                  .from = r->n_rows * bin / n_bins,
                                  .end = r->n_rows * (bin + 1) / n_bins };
                if (count_chunks(r, &r->tallies[tally], &s) > 0)
                    fill_row(r, tally, &s, values, &cells[n++ * N_COLUMNS]);
            }
    return n;
}

/* Leaves columns out of the table that would be equal in all of its lines, and columns of a wide
 * table unless the user asked for one. */
static void choose_columns(const eval_run *r, uint32_t n_bins, bool wide, report_column *chosen)
{
    static const char *const of_wide[] = { "kld_p50",  "kld_p90", "kld_p99",
                                           "kld_p999", "kld_max", "chunks" };
    memcpy(chosen, columns, sizeof columns);
    for (size_t c = N_CONFIG_COLUMNS; c < N_COLUMNS; c++)
        for (size_t i = 0; i < sizeof of_wide / sizeof *of_wide && !wide; i++)
            if (strcmp(chosen[c].key, of_wide[i]) == 0)
                chosen[c].heading = NULL;
    if (r->texts.n == 1)
        chosen[AT_TEXT].heading = NULL;
    if (n_bins == 1)
        chosen[AT_FROM].heading = chosen[AT_TO].heading = NULL;
}

bool eval_print_rows(const eval_run *r, uint32_t n_bins, bool wide, report_format format)
{
    report_column chosen[N_COLUMNS];
    const size_t n_values = r->texts.n_chunks * r->n_rows,
                 most = (r->texts.n + 1) * r->n_tallies * n_bins;
    sample values = { .x = calloc(n_values, sizeof(double)),
                      .y = calloc(n_values, sizeof(double)) };
    report_cell *cells = calloc(most * N_COLUMNS, sizeof *cells);
    bool ok = values.x != NULL && values.y != NULL && cells != NULL;
    choose_columns(r, n_bins, wide, chosen);
    if (ok)
        ok = report_print(chosen, N_COLUMNS, cells, fill_rows(r, n_bins, &values, cells), format);
    else
        complain("eval: out of memory");
    free(values.x);
    free(values.y);
    free(cells);
    return ok;
}
