/* cmd_distortion.c - `kvant bench distortion`: the papers' synthetic tables, measured, beside the papers'
 * figures.
 *
 * First the probes that the chosen cells need are collected, then they run, then the cells are read off
 * them, so that an interrupted run still prints every cell whose probe is complete.
 */
#include "args.h"
#include "command.h"
#include "distortion.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "stats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_SPEC, OPT_TABLE, OPT_QUICK, OPT_JSON };
enum { MAX_TABLES = 16, MAX_SPECS = 64 };

static const arg_option options[] = {
    { OPT_SPEC, 'k', "codec", "SPEC",
      "instead of the papers' tables the errors of this codec; repeat for several" },
    { OPT_TABLE, 't', "table", "NAME",
      "octopus-1, octopus-4, octopus-5, needle, turboquant, derived,\ntrellis, size or covering; repeat for "
      "several (default all)" },
    { OPT_QUICK, 0, "quick", NULL, "fewer and smaller draws: seconds instead of minutes, wider errors" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects" },
};

static const arg_spec spec = {
    .command = "bench distortion",
    .usage = "[--table NAME]... [-k SPEC]... [--quick] [--json]",
    .about = "Repeats the synthetic experiments of the papers with this build's codecs: the same\n"
             "head_dim, rows, queries and seeds. Needs no model.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "A cell is within when it differs from the paper's figure by at most 2 %, three standard\n"
             "errors of the measurement or half a unit of the last printed digit, whichever is largest.\n"
             "A codec that this build lacks is never within. A footnote marks cells whose figure\n"
             "cannot be met, and that are within of the figure that docs/distortion.md derives instead.\n\n"
             "With -k: D is the relative squared error, 'D, best scale' what is left of it when rows are made\n"
             "longer or shorter, slope what inner products shrink to, 'ip error' the squared error of one,\n"
             "times head_dim. 1024 rows and 16 queries of 64 seeds; +- is the standard error.\n\n"
             "Exit status: 0 when every cell without a footnote is within, 1 otherwise.\n"
             "Ctrl-C prints what is complete.",
};

typedef struct settings {
    const char *tables[MAX_TABLES]; /* all when none is named */
    size_t n_tables;
    const char *specs[MAX_SPECS];
    size_t n_specs;
    bool quick, json;
} settings;

static bool table_exists(const char *name, const char **names, size_t *n)
{
    *n = 0;
    for (size_t i = 0; i < n_paper_cells; i++) {
        if (*n == 0 || strcmp(names[*n - 1], paper_cells[i].table) != 0)
            names[(*n)++] = paper_cells[i].table;
        if (strcmp(paper_cells[i].table, name) == 0)
            return true;
    }
    return false;
}

static bool add_table(settings *s, const char *name)
{
    const char *names[MAX_TABLES];
    size_t n;
    if (table_exists(name, names, &n) && s->n_tables < MAX_TABLES) {
        s->tables[s->n_tables++] = name;
        return true;
    }
    complain("bench distortion: no table '%s'", name);
    const char *closest = args_closest(name, names, n);
    if (closest != NULL)
        hint("did you mean '%s'?", closest);
    return false;
}

static bool add_spec(settings *s, const char *codec)
{
    if (s->n_specs == MAX_SPECS) {
        complain("bench distortion: more than %d codecs", MAX_SPECS);
        return false;
    }
    s->specs[s->n_specs++] = codec;
    return true;
}

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    switch (id) {
    case OPT_SPEC: return add_spec(s, value);
    case OPT_TABLE: return add_table(s, value);
    case OPT_QUICK: return s->quick = true;
    default: return s->json = progress_use_json();
    }
}

static bool wanted(const settings *s, const paper_cell *cell)
{
    for (size_t i = 0; i < s->n_tables; i++)
        if (strcmp(s->tables[i], cell->table) == 0)
            return true;
    return s->n_tables == 0;
}

/* Every measurement once. Room for two a cell. */
typedef struct plan {
    probe *probes;
    size_t n;
} plan;

static probe *find_probe(plan *plan, const char *codec, setup_id setup)
{
    for (size_t i = 0; i < plan->n; i++)
        if (plan->probes[i].setup == setup && strcmp(plan->probes[i].spec, codec) == 0)
            return &plan->probes[i];
    return NULL;
}

static double need_probe(plan *plan, const settings *s, const char *codec, setup_id setup)
{
    if (codec == NULL || find_probe(plan, codec, setup) != NULL)
        return 0;
    probe *p = &plan->probes[plan->n++];
    *p = (probe){ .spec = codec, .setup = setup, .quick = s->quick };
    return probe_work(p);
}

static bool measure(plan *plan, const settings *s)
{
    double work = 0;
    for (size_t i = 0; i < n_paper_cells; i++)
        if (wanted(s, &paper_cells[i])) {
            work += need_probe(plan, s, paper_cells[i].spec, paper_cells[i].setup);
            work += need_probe(plan, s, paper_cells[i].reference, paper_cells[i].setup);
        }
    progress progress;
    progress_start(&progress, work);
    bool ok = true;
    for (size_t i = 0; i < plan->n && ok; i++)
        ok = probe_run(&plan->probes[i], &progress);
    progress_end(&progress);
    return ok;
}

typedef struct outcome {
    double paper, measured, error, difference;
    bool within, explained; /* by the paper's figure; if not, by the figure expected instead */
    char mark[24];
    const char *problem;
} outcome;

/* What the metric makes of one seed of the series. */
static double of_seed(const paper_cell *cell, const probe *p, const probe *reference, uint32_t seed)
{
    const double x = p->series[cell->series][seed];
    if (reference == NULL)
        return cell->metric == METRIC_ONE_MINUS ? 1 - x : x;
    const double y = reference->series[cell->series][seed];
    if (cell->metric == METRIC_EXPONENT)
        return log(x / y) / log(p->series[SERIES_CODEWORDS][seed] / reference->series[SERIES_CODEWORDS][seed]);
    if (cell->metric == METRIC_DIFFERENCE)
        return x - y;
    return cell->metric == METRIC_CHANGE_OF_GAP ? 100 * ((1 - x) / (1 - y) - 1) : 100 * (x / y - 1);
}

static double gigabytes(double layers, double tokens, double bits)
{
    return layers * 8 * 128 * 2 * tokens * bits / 8 / 1e9;
}

static double of_size(const paper_cell *cell, const probe *p)
{
    switch (cell->metric) {
    case METRIC_TRUE_BITS: return p->true_bits;
    case METRIC_TIMES_SMALLER: return 16 / p->nominal_bits;
    case METRIC_GIGABYTES_70B: return gigabytes(80, 131072, p->nominal_bits);
    case METRIC_GIGABYTES_7B: return gigabytes(32, 32768, p->nominal_bits);
    default: return p->nominal_bits;
    }
}

static void evaluate(const paper_cell *cell, const probe *p, const probe *reference, outcome *o)
{
    double values[DISTORTION_MAX_SEEDS];
    if (cell->setup == SETUP_INFO) {
        o->measured = of_size(cell, p);
        o->error = 0;
        return;
    }
    for (uint32_t i = 0; i < p->n_seeds; i++)
        values[i] = of_seed(cell, p, reference, i);
    stats_mean(values, p->n_seeds, &o->measured, &o->error);
    if (cell->metric == METRIC_ROOT) {
        o->measured = sqrt(o->measured);
        o->error /= 2 * o->measured;
    }
}

/* Half a unit of the last digit: all that a printed figure promises. */
static double printed_precision(const char *figure)
{
    const char *point = strchr(figure, '.');
    return 0.5 * pow(10, point == NULL ? 0 : -(double)strlen(point + 1));
}

static bool agrees(const char *figure, const outcome *o)
{
    const double value = strtod(figure, NULL);
    const double allowed = fmax(fmax(0.02 * fabs(value), 3 * o->error), printed_precision(figure));
    return fabs(o->measured - value) <= allowed * (1 + 1e-9); /* the edge is a decimal fraction */
}

static void judge(const paper_cell *cell, outcome *o)
{
    o->difference = 100 * (o->measured / o->paper - 1);
    if (cell->at_least)
        o->within = o->measured >= o->paper - 3 * o->error;
    else if (cell->at_most)
        o->within = o->measured <= o->paper + 3 * o->error;
    else
        o->within = agrees(cell->paper, o);
    o->explained = !o->within && cell->expected != NULL && agrees(cell->expected, o);
}

/* False when the cell's probes did not get to run. */
static bool read_cell(plan *plan, const paper_cell *cell, outcome *o)
{
    const probe *p = find_probe(plan, cell->spec, cell->setup);
    const probe *reference = cell->reference != NULL ? find_probe(plan, cell->reference, cell->setup) : NULL;
    *o = (outcome){ .paper = strtod(cell->paper, NULL), .measured = NAN, .error = NAN, .difference = NAN };
    o->problem = p->problem[0] != 0                                ? p->problem
                 : reference != NULL && reference->problem[0] != 0 ? reference->problem
                                                                   : NULL;
    if (o->problem != NULL)
        return true;
    if (!p->done || (reference != NULL && !reference->done))
        return false;
    evaluate(cell, p, reference, o);
    judge(cell, o);
    return true;
}

static const report_column columns[] = {
    { "table", "table", COLUMN_TEXT, 0 },
    { "row", "row", COLUMN_TEXT, 0 },
    { "column", "column", COLUMN_TEXT, 0 },
    { "spec", NULL, COLUMN_TEXT, 0 },
    { NULL, "paper", COLUMN_TEXT, 0 },
    { "paper", NULL, COLUMN_NUMBER, 0 },
    { "measured", "measured", COLUMN_NUMBER, 5 },
    { "difference", "diff %", COLUMN_NUMBER, 2 },
    { "error", "std err", COLUMN_NUMBER, 5 },
    { NULL, "within", COLUMN_TEXT, 0 },
    { "within", NULL, COLUMN_BOOL, 0 },
    { "expected", NULL, COLUMN_NUMBER, 0 },
    { "note", NULL, COLUMN_TEXT, 0 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

/* What is said below the table, each text once. */
typedef struct footnotes {
    const char *text[64];
    size_t n;
} footnotes;

static size_t footnote(footnotes *notes, const char *text)
{
    for (size_t i = 0; i < notes->n; i++)
        if (strcmp(notes->text[i], text) == 0)
            return i + 1;
    if (notes->n < sizeof notes->text / sizeof *notes->text)
        notes->text[notes->n++] = text;
    return notes->n;
}

static void mark(const paper_cell *cell, outcome *o, footnotes *notes)
{
    const char *note = o->problem != NULL ? o->problem : o->explained ? cell->note : NULL;
    const char *word = o->problem != NULL ? "missing" : o->within ? "yes" : "no";
    if (note != NULL)
        snprintf(o->mark, sizeof o->mark, "%s (%zu)", word, footnote(notes, note));
    else
        snprintf(o->mark, sizeof o->mark, "%s", word);
}

static void fill_row(const paper_cell *cell, const outcome *o, report_cell *row)
{
    const report_cell cells[N_COLUMNS] = {
        CELL_TEXT(cell->table),
        CELL_TEXT(cell->row),
        CELL_TEXT(cell->column),
        CELL_TEXT(cell->spec),
        CELL_TEXT(cell->paper),
        CELL_NUMBER(o->paper),
        CELL_NUMBER(o->measured),
        CELL_NUMBER(o->difference),
        CELL_NUMBER(o->error),
        CELL_TEXT(o->mark),
        CELL_NUMBER(o->within),
        CELL_NUMBER(o->explained ? strtod(cell->expected, NULL) : NAN),
        CELL_TEXT(o->problem != NULL ? o->problem
                  : o->explained     ? cell->note
                                     : NULL),
    };
    memcpy(row, cells, sizeof cells);
}

typedef struct totals {
    size_t shown, outside, explained, missing;
} totals;

static void count(const outcome *o, totals *t)
{
    t->shown++;
    if (o->problem != NULL)
        t->missing++;
    else if (!o->within)
        *(o->explained ? &t->explained : &t->outside) += 1;
}

static bool print_results(plan *plan, const settings *s, outcome *outcomes, report_cell *cells, totals *t)
{
    footnotes notes = { .n = 0 };
    for (size_t i = 0; i < n_paper_cells; i++) {
        outcome *o = &outcomes[t->shown];
        if (!wanted(s, &paper_cells[i]) || !read_cell(plan, &paper_cells[i], o))
            continue;
        mark(&paper_cells[i], o, &notes);
        fill_row(&paper_cells[i], o, cells + t->shown * N_COLUMNS);
        count(o, t);
    }
    if (!report_print(columns, N_COLUMNS, cells, t->shown, s->json))
        return false;
    if (s->json)
        return true;
    putchar('\n');
    for (size_t i = 0; i < notes.n; i++)
        printf("(%zu) %s\n", i + 1, notes.text[i]);
    printf("%zu cells: %zu within, %zu outside, %zu outside with a footnote, %zu missing\n", t->shown,
           t->shown - t->outside - t->explained - t->missing, t->outside, t->explained, t->missing);
    return true;
}

static int run(plan *plan, const settings *s, outcome *outcomes, report_cell *cells)
{
    totals t = { 0 };
    interrupt_catch();
    const bool complete = measure(plan, s);
    if (!print_results(plan, s, outcomes, cells, &t) || finish_output() != EXIT_OK)
        return EXIT_RUNTIME;
    if (!complete)
        return EXIT_INTERRUPTED;
    return t.outside + t.missing > 0 ? EXIT_RUNTIME : EXIT_OK;
}

int bench_distortion(int argc, char **argv)
{
    settings s = { .n_tables = 0 };
    int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (s.n_specs > 0 && s.n_tables > 0) {
        complain("bench distortion: --table and -k at once");
        hint("the tables are the papers', -k measures any codec");
        return EXIT_USAGE;
    }
    if (s.n_specs > 0) {
        interrupt_catch();
        return distortion_of_specs(s.specs, s.n_specs, s.quick, s.json);
    }
    plan plan = { .probes = calloc(2 * n_paper_cells, sizeof *plan.probes) };
    outcome *outcomes = calloc(n_paper_cells, sizeof *outcomes);
    report_cell *cells = calloc(n_paper_cells * N_COLUMNS, sizeof *cells);
    if (plan.probes != NULL && outcomes != NULL && cells != NULL) {
        code = run(&plan, &s, outcomes, cells);
    } else {
        complain("out of memory");
        code = EXIT_RUNTIME;
    }
    free(plan.probes);
    free(outcomes);
    free(cells);
    return code;
}
