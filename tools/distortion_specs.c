/* distortion_specs.c - `kvant bench distortion -k SPEC`: what any codec does to normally distributed rows of head_dim 128, in the setup of
 * OCTOPUS's Table 1. Owns the table; probes measure. */
#include "command.h"
#include "distortion.h"
#include "report.h"
#include "stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const report_column columns[] = {
    { "spec", "spec", COLUMN_TEXT, 0 },
    { "head_dim", NULL, COLUMN_NUMBER, 0 },
    { "bits", "bits", COLUMN_NUMBER, 3 },
    { "relative", "D", COLUMN_NUMBER, 5 },
    { "relative_se", "+-", COLUMN_NUMBER, 5 },
    { "rescaled", "D, best scale", COLUMN_NUMBER, 5 },
    { "cos", "cos", COLUMN_NUMBER, 5 },
    { "slope", "slope", COLUMN_NUMBER, 4 },
    { "ip_square", "ip error", COLUMN_NUMBER, 4 },
    { "note", "note", COLUMN_TEXT, 0 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static double mean_of(const probe *p, series_id series, double *error)
{
    double mean = NAN;
    *error = NAN;
    if (p->done && p->problem[0] == 0)
        stats_mean(p->series[series], p->n_seeds, &mean, error);
    return mean;
}

static void fill_row(const probe *p, report_cell *row)
{
    double error, unused;
    const double relative = mean_of(p, SERIES_RELATIVE, &error), cosine = mean_of(p, SERIES_COS, &unused);
    const report_cell cells[N_COLUMNS] = {
        CELL_TEXT(p->spec),
        CELL_NUMBER(DISTORTION_HEAD_DIM),
        CELL_NUMBER(p->problem[0] == 0 ? p->true_bits : NAN),
        CELL_NUMBER(relative),
        CELL_NUMBER(error),
        CELL_NUMBER(1 - cosine * cosine),
        CELL_NUMBER(cosine),
        CELL_NUMBER(mean_of(p, SERIES_SLOPE, &unused)),
        CELL_NUMBER(mean_of(p, SERIES_IP_SQUARE, &unused)),
        CELL_TEXT(p->problem[0] != 0 ? p->problem : NULL),
    };
    memcpy(row, cells, sizeof cells);
}

/* Those that were measured before Ctrl-C. */
static bool print_probes(const probe *probes, size_t n, bool json, bool *failed)
{
    report_cell *cells = calloc(n * N_COLUMNS, sizeof *cells);
    size_t shown = 0;
    if (cells == NULL) {
        complain("out of memory");
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        *failed |= probes[i].problem[0] != 0;
        if (probes[i].done || probes[i].problem[0] != 0)
            fill_row(&probes[i], cells + shown++ * N_COLUMNS);
    }
    const bool ok = report_print(columns, N_COLUMNS, cells, shown, json);
    free(cells);
    return ok;
}

int distortion_of_specs(const char *const *specs, size_t n, bool quick, bool json)
{
    double work = 0;
    bool complete = true, failed = false;
    probe *probes = calloc(n, sizeof *probes);
    if (probes == NULL) {
        complain("out of memory");
        return EXIT_RUNTIME;
    }
    for (size_t i = 0; i < n; i++) {
        probes[i] = (probe){ .spec = specs[i], .setup = SETUP_FIDELITY, .quick = quick };
        work += probe_work(&probes[i]);
    }
    progress progress;
    progress_start(&progress, work);
    for (size_t i = 0; i < n && complete; i++)
        complete = probe_run(&probes[i], &progress);
    progress_end(&progress);
    const bool printed = print_probes(probes, n, json, &failed) && finish_output() == EXIT_OK;
    free(probes);
    return printed && complete && !failed ? EXIT_OK : printed && !complete ? EXIT_INTERRUPTED : EXIT_RUNTIME;
}
