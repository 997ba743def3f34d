/* eval_rows.c - means, errors and percentiles over chosen chunks and positions. */
#include "eval_run.h"

#include "command.h"
#include "stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* Leaves columns out of the table that would be equal in all of its lines, and columns of a wide
 * table unless the user asked for one. */
static void add_row(const eval_run *r, size_t tally, const slice *s, const eval_form *form,
                    sample *values, report_rows *row)
{
    const eval_tally *t = &r->tallies[tally];
    const uint32_t first = r->options->first;
    const bool wide = form->wide, bins = form->n_bins > 1, texts = r->texts.n > 1;
    double nll, nll_error, kld, kld_error, step = NAN, step_error = NAN;
    if (tally > 0) {
        gather_steps(r, t, t - 1, s, values);
        stats_mean(values->x, values->n, &step, &step_error);
    }
    const double n_same = (double)gather(r, t, s, values);
    double *x = values->x;
    const size_t n = values->n;
    stats_mean(values->y, n, &nll, &nll_error);
    stats_mean(x, n, &kld, &kld_error);
    report_row(row);
    configs_add_cells(t->config, row);
    report_text(row, "text", texts ? "text" : NULL,
                s->all_texts && texts ? "all" : r->texts.names[s->text]);
    report_number(row, "from", bins ? "from" : NULL, 0, (double)(first + s->from));
    report_number(row, "to", bins ? "to" : NULL, 0, (double)(first + s->end - 1));
    report_number(row, "bits", "codec bits", 2, t->bits);
    /* f16 has 16 for each number */
    report_number(row, "cache_bits", "bits", 2, 16 * t->kv_bytes / r->tallies[0].kv_bytes);
    report_number_as(row, COLUMN_MIB, "kv_bytes", "KV MiB", 2, t->kv_bytes);
    report_number(row, "ppl", "ppl", 3, exp(nll));
    report_number(row, "kld_mean", "KLD mean", 5, kld);
    report_number(row, "kld_se", "+-", 5, kld_error);
    report_number(row, "kld_p50", wide ? "50%" : NULL, 4, stats_percentile(x, n, 0.5));
    report_number(row, "kld_p90", wide ? "90%" : NULL, 4, stats_percentile(x, n, 0.9));
    report_number(row, "kld_p99", wide ? "99%" : NULL, 4, stats_percentile(x, n, 0.99));
    report_number(row, "kld_p999", wide ? "99.9%" : NULL, 3, stats_percentile(x, n, 0.999));
    report_number(row, "kld_max", wide ? "max" : NULL, 3, stats_percentile(x, n, 1));
    report_number_as(row, COLUMN_PERCENT, "top1", "top-1 %", 2, n_same / (double)n);
    report_number(row, "chunks", wide ? "chunks" : NULL, 0, (double)count_chunks(r, t, s));
    report_number(row, "batch", NULL, 0, r->options->n_batch);
    report_number(row, "kld_step", NULL, 5, step);
    report_number(row, "kld_step_se", NULL, 5, step_error);
}

static void add_rows(const eval_run *r, const eval_form *form, sample *values, report_rows *out)
{
    const size_t n_texts = r->texts.n, n_slices = n_texts > 1 ? n_texts + 1 : n_texts;
    for (size_t text = 0; text < n_slices; text++)
        for (size_t tally = 0; tally < r->n_tallies; tally++)
            for (size_t bin = 0; bin < form->n_bins; bin++) {
                const slice s = { .text = text < n_texts ? text : 0,
                                  .all_texts = text == n_texts,
                                  .from = r->n_rows * bin / form->n_bins,
                                  .end = r->n_rows * (bin + 1) / form->n_bins };
                if (count_chunks(r, &r->tallies[tally], &s) > 0)
                    add_row(r, tally, &s, form, values, out);
            }
}

bool eval_print_rows(const eval_run *r, const eval_form *form)
{
    const size_t n_values = r->texts.n_chunks * r->n_rows;
    sample values = { .x = calloc(n_values, sizeof(double)),
                      .y = calloc(n_values, sizeof(double)) };
    report_rows out = { .n_rows = 0 };
    out.no_memory = values.x == NULL || values.y == NULL;
    if (!out.no_memory)
        add_rows(r, form, &values, &out);
    free(values.x);
    free(values.y);
    return report_print(&out, "eval", form->format);
}
