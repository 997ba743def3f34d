/* selftest_report.c - results of `kvant selftest`: the table, what is wrong, the verdict, and the
 * file that owners of GPUs send. The file has no name of a user or a machine, no path and no time.
 * */
#include "selftest.h"

#include "command.h"
#include "json.h"
#include "report.h"

#include <inttypes.h>
#include <kvant/kvant.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

/* Readers of the file (scripts/pages/tables/cards.py) take this version alone. */
#define FILE_VERSION 1
#define MOST_LINES 20

static test_state state_of(const test_result *r)
{
    const test_state worst = r->encode > r->decode ? r->encode : r->decode;
    if (r->attention > worst)
        return r->attention;
    const bool all =
        r->encode == TEST_RIGHT && r->decode == TEST_RIGHT && r->attention == TEST_RIGHT;
    return worst == TEST_RIGHT && !all ? TEST_NOT_DONE : worst;
}

static const char *const words[] = { "not done", "right", "wrong", "no kernel on GPUs", "failed" };

static size_t count(const test_report *report, size_t device, test_state state)
{
    size_t n = 0;
    for (size_t i = 0; i < report->n_results; i++)
        n += report->results[i].device == device && state_of(&report->results[i]) == state;
    return n;
}

static size_t results_of(const test_report *report, size_t device)
{
    size_t n = 0;
    for (size_t i = 0; i < report->n_results; i++)
        n += report->results[i].device == device;
    return n;
}

static size_t missing_devices(const test_report *report)
{
    size_t n = 0;
    for (size_t i = 0; i < report->n_devices; i++)
        n += report->devices[i].missing[0] != 0;
    return n;
}

/* Results that are neither right nor without a kernel. */
static size_t wrong_results(const test_report *report)
{
    size_t n = 0;
    for (size_t i = 0; i < report->n_results; i++) {
        const test_state state = state_of(&report->results[i]);
        n += state != TEST_RIGHT && state != TEST_NO_KERNEL;
    }
    return n;
}

bool test_all_right(const test_report *report)
{
    return !report->interrupted && !report->no_memory && report->n_results > 0 &&
           missing_devices(report) == 0 && wrong_results(report) == 0;
}

/* The table: a line for each device, then lines with speeds */

static const report_column columns[] = {
    { NULL, "device", COLUMN_TEXT, 0 },
    { NULL, "codecs", COLUMN_TEXT, 0 },
    { NULL, "right", COLUMN_NUMBER, 0 },
    { NULL, "wrong", COLUMN_NUMBER, 0 },
    { NULL, "no kernel", COLUMN_NUMBER, 0 },
    { NULL, "error/bound", COLUMN_NUMBER, 2 },
    { NULL, "M rows/s encoded", COLUMN_NUMBER, 2 },
    { NULL, "GB/s attention", COLUMN_NUMBER, 1 },
    { NULL, "GB/s copy", COLUMN_NUMBER, 1 },
    { NULL, "tokens/s", COLUMN_NUMBER, 0 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static double worst_share(const test_report *report, size_t device)
{
    double worst = NAN;
    for (size_t i = 0; i < report->n_results; i++)
        if (report->results[i].device == device)
            worst = fmax(worst,
                         fmax(report->results[i].decode_share, report->results[i].attention_share));
    return worst;
}

static void fill_device(const test_report *report, size_t device, report_cell *row)
{
    const test_device *d = &report->devices[device];
    const size_t n = results_of(report, device), right = count(report, device, TEST_RIGHT);
    const size_t without = count(report, device, TEST_NO_KERNEL);
    for (size_t i = 0; i < N_COLUMNS; i++)
        row[i] = CELL_NUMBER(NAN);
    row[0] = CELL_TEXT(d->label);
    row[1] = CELL_TEXT(d->missing[0] != 0 ? "not tried" : "checked");
    if (d->missing[0] != 0)
        return;
    row[2] = CELL_NUMBER(right);
    row[3] = CELL_NUMBER(n - right - without);
    row[4] = d->gpu ? CELL_NUMBER(without) : CELL_NUMBER(NAN);
    row[5] = CELL_NUMBER(worst_share(report, device));
}

/* Bytes that attention reads, and that a copy reads and writes. */
static void fill_speed(const test_report *report, const test_speed *s, report_cell *row)
{
    for (size_t i = 0; i < N_COLUMNS; i++)
        row[i] = CELL_NUMBER(NAN);
    row[0] = CELL_TEXT(report->devices[s->device].label);
    row[1] = CELL_TEXT(s->pair.k);
    row[6] = CELL_NUMBER(s->encode_rows / 1e6);
    row[7] = CELL_NUMBER(s->bytes / s->attention / 1e9);
    row[8] = CELL_NUMBER(2 * s->bytes / s->copy / 1e9);
    row[9] = CELL_NUMBER(s->sequences / s->attention);
}

static bool print_table(const test_report *report)
{
    const size_t n = report->n_devices + report->n_speeds;
    report_cell *cells = calloc(n * N_COLUMNS, sizeof *cells);
    if (cells == NULL)
        return complain("out of memory");
    for (size_t i = 0; i < report->n_devices; i++)
        fill_device(report, i, cells + i * N_COLUMNS);
    for (size_t i = 0; i < report->n_speeds; i++)
        fill_speed(report, &report->speeds[i], cells + (report->n_devices + i) * N_COLUMNS);
    const bool ok = report_print(columns, N_COLUMNS, cells, n, REPORT_TABLE);
    free(cells);
    return ok;
}

static void print_pair(const test_pair *pair)
{
    printf("%s%s%s, head_dim %" PRIu32, pair->k, strcmp(pair->k, pair->v) != 0 ? " / " : "",
           strcmp(pair->k, pair->v) != 0 ? pair->v : "", pair->head_dim);
}

/* Results that are wrong or failed, at most MOST_LINES. */
static void print_wrong(const test_report *report)
{
    size_t n = 0;
    for (size_t i = 0; i < report->n_results; i++) {
        const test_result *r = &report->results[i];
        const test_state state = state_of(r);
        if (state == TEST_RIGHT || state == TEST_NO_KERNEL || n++ >= MOST_LINES)
            continue;
        printf("%s: %s: ", words[state], report->devices[r->device].label);
        print_pair(&r->pair);
        printf(": %s\n", r->why);
    }
    if (n > MOST_LINES)
        printf("and %zu more, which --report lists\n", n - MOST_LINES);
}

/* Codecs of one head_dim that a GPU does not take, in a line. Reasons are in the file. */
static void print_without_kernel(const test_report *report, size_t device, uint32_t head_dim)
{
    const char *between = "";
    for (size_t i = 0; i < report->n_results; i++) {
        const test_result *r = &report->results[i];
        if (r->device != device || r->pair.head_dim != head_dim || state_of(r) != TEST_NO_KERNEL)
            continue;
        if (between[0] == 0)
            printf("no kernel: %s, head_dim %" PRIu32 ": ", report->devices[device].label,
                   head_dim);
        printf("%s%s", between, r->pair.k);
        between = ", ";
    }
    if (between[0] != 0)
        putchar('\n');
}

static const char *verdict_of(const test_report *report)
{
    return wrong_results(report) > 0 ? "wrong"
           : report->interrupted     ? "interrupted"
           : !test_all_right(report) ? "not complete"
                                     : "right";
}

static void print_verdict(const test_report *report)
{
    size_t levels = 0, gpus = 0;
    for (size_t i = 0; i < report->n_devices; i++)
        *(report->devices[i].gpu ? &gpus : &levels) += report->devices[i].missing[0] == 0;
    printf("\nverdict: %s: %zu CPU levels, %zu GPUs, %zu results, %zu wrong, in %.0f seconds\n",
           verdict_of(report), levels, gpus, report->n_results, wrong_results(report),
           report->seconds);
}

bool test_print(const test_report *report)
{
    if (!print_table(report))
        return false;
    putchar('\n');
    for (size_t i = 0; i < report->n_devices; i++)
        if (report->devices[i].missing[0] != 0)
            printf("not tried: %s: %s\n", report->devices[i].label, report->devices[i].missing);
    for (size_t i = 0; i < report->n_devices; i++)
        for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 32)
            print_without_kernel(report, i, head_dim);
    print_wrong(report);
    print_verdict(report);
    return finish_output() == EXIT_OK;
}

/* The file */

static void write_why(FILE *out, const char *why)
{
    json_member(out, ", ", "why", why[0] != 0 ? why : NULL);
}

static void member(FILE *out, const char *key, double number)
{
    fprintf(out, ", \"%s\": ", key);
    json_number(out, number);
}

static double known(double number)
{
    return number > 0 ? number : NAN;
}

static void write_device(FILE *out, const test_device *d)
{
    json_member(out, "    {", "kind", d->gpu ? "gpu" : "cpu");
    json_member(out, ", ", "name", d->name);
    if (!d->gpu)
        json_member(out, ", ", "level", kvant_cpu_level_name(d->level));
    if (d->gpu) {
        fprintf(out, ", \"compute_capability\": \"%d.%d\"", d->major, d->minor);
        member(out, "multiprocessors", known(d->multiprocessors));
        member(out, "shared_bytes_per_block", known(d->shared_bytes));
        member(out, "l2_bytes", known(d->l2_bytes));
        member(out, "memory_bytes", known(d->memory_bytes));
        member(out, "driver_cuda_version", known(d->driver_cuda));
    }
    /* a message about a library that cannot be loaded has its path */
    write_why(out, strchr(d->missing, '/') != NULL
                       ? "not tried (the message has a path and is left out)"
                       : d->missing);
    putc('}', out);
}

static void write_pair(FILE *out, size_t device, const test_pair *pair)
{
    fprintf(out, "    {\"device\": %zu", device);
    json_member(out, ", ", "k", pair->k);
    json_member(out, ", ", "v", pair->v);
    fprintf(out, ", \"head_dim\": %" PRIu32, pair->head_dim);
}

static void write_result(FILE *out, const test_result *r)
{
    write_pair(out, r->device, &r->pair);
    json_member(out, ", ", "encode", words[r->encode]);
    json_member(out, ", ", "decode", words[r->decode]);
    json_member(out, ", ", "attention", words[r->attention]);
    member(out, "decode_error_share_of_bound", r->decode_share);
    member(out, "attention_error_share_of_bound", r->attention_share);
    write_why(out, r->why);
    putc('}', out);
}

static void write_speed(FILE *out, const test_speed *s)
{
    write_pair(out, s->device, &s->pair);
    fprintf(out,
            ", \"sequences\": %" PRIu32 ", \"tokens_per_sequence\": %" PRIu32
            ", \"heads\": %" PRIu32 ", \"kv_heads\": %" PRIu32,
            s->sequences, s->tokens, s->heads, s->kv_heads);
    member(out, "threads", known(s->threads));
    member(out, "encoded_rows_per_second", s->encode_rows);
    member(out, "attention_bytes_read", s->bytes);
    member(out, "attention_seconds", s->attention);
    member(out, "attention_gbytes_read_per_second", s->bytes / s->attention / 1e9);
    member(out, "attention_tokens_per_second_of_one_layer", s->sequences / s->attention);
    member(out, "copy_gbytes_read_and_written_per_second", 2 * s->bytes / s->copy / 1e9);
    putc('}', out);
}

void test_write_json(const test_report *report, FILE *out)
{
    struct utsname system;
    if (uname(&system) != 0)
        memset(&system, 0, sizeof system);
    fprintf(out, "{\n  \"kvant_selftest\": %d,\n", FILE_VERSION);
    json_member(out, "  ", "kvant_version", kvant_version());
    json_member(out, ",\n  ", "system", system.sysname);
    json_member(out, ",\n  ", "machine", system.machine);
    json_member(out, ",\n  ", "verdict", verdict_of(report));
    fprintf(out, ",\n  \"shared_memory_limit_kib\": %" PRIu32, report->shared_kib);
    fprintf(out, ",\n  \"seconds\": %.1f,\n  \"devices\": [\n", report->seconds);
    for (size_t i = 0; i < report->n_devices; i++) {
        write_device(out, &report->devices[i]);
        fputs(i + 1 < report->n_devices ? ",\n" : "\n", out);
    }
    fputs("  ],\n  \"results\": [\n", out);
    for (size_t i = 0; i < report->n_results; i++) {
        write_result(out, &report->results[i]);
        fputs(i + 1 < report->n_results ? ",\n" : "\n", out);
    }
    fputs("  ],\n  \"speeds\": [\n", out);
    for (size_t i = 0; i < report->n_speeds; i++) {
        write_speed(out, &report->speeds[i]);
        fputs(i + 1 < report->n_speeds ? ",\n" : "\n", out);
    }
    fputs("  ]\n}\n", out);
}
