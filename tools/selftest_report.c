/* selftest_report.c - prints the results of `kvant selftest`: the table, each wrong result, the
 * verdict, and the file that owners of GPUs send. The file has no name of a user or a machine, no
 * path and no time. */
#include "os.h"
#include "selftest.h"

#include "command.h"
#include "json.h"
#include "report.h"

#include <inttypes.h>
#include <kvant/kvant.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Readers of the file (scripts/pages/tables/cards.py) take this version alone. */
#define FILE_VERSION 1
#define MOST_LINES 20

static const char *const words[] = { "not done", "right", "wrong", "no kernel on GPUs", "failed" };

static bool is_measured(const test_result *r)
{
    return r->speed.attention > 0;
}

typedef struct counts {
    size_t all, right, wrong, without; /* kernel */
    double share;                      /* the largest */
} counts;

/* Results of a device; NULL: of all. */
static counts count(const test_report *report, const test_device *device)
{
    counts c = { 0 };
    for (size_t i = 0; i < report->n_results; i++) {
        const test_result *r = &report->results[i];
        const test_state state = test_state_of(r);
        if (device != NULL && r->device != device)
            continue;
        c.all++;
        c.right += state == TEST_RIGHT;
        c.without += state == TEST_NO_KERNEL;
        for (int step = 0; step < TEST_STEPS; step++)
            c.share = fmax(c.share, r->share[step]);
    }
    c.wrong = c.all - c.right - c.without;
    return c;
}

bool test_all_right(const test_report *report)
{
    bool tried = !report->interrupted && !report->no_memory && report->n_results > 0;
    for (size_t i = 0; i < report->n_devices; i++)
        tried = tried && report->devices[i].missing[0] == 0;
    return tried && count(report, NULL).wrong == 0;
}

static const char *verdict_of(const test_report *report)
{
    return count(report, NULL).wrong > 0 ? "wrong"
           : report->interrupted         ? "interrupted"
           : !test_all_right(report)     ? "not complete"
                                         : "right";
}

/* The table: a line for each device, then lines with speeds */

/* c, s: NULL for a line without them. */
static void add_line(report_rows *out, const test_device *d, const char *codecs, const counts *c,
                     const test_speed *s)
{
    report_row(out);
    report_text(out, NULL, "device", d->label);
    report_text(out, NULL, "codecs", codecs);
    report_number(out, NULL, "right", 0, c != NULL ? (double)c->right : NAN);
    report_number(out, NULL, "wrong", 0, c != NULL ? (double)c->wrong : NAN);
    report_number(out, NULL, "no kernel", 0, c != NULL && d->is_gpu ? (double)c->without : NAN);
    report_number(out, NULL, "error/bound", 2, c != NULL ? c->share : NAN);
    report_number(out, NULL, "M rows/s encoded", 2, s != NULL ? s->encode_rows / 1e6 : NAN);
    /* read */
    report_number(out, NULL, "GB/s attention", 1, s != NULL ? s->bytes / s->attention / 1e9 : NAN);
    /* read and written */
    report_number(out, NULL, "GB/s copy", 1, s != NULL ? 2 * s->bytes / s->copy / 1e9 : NAN);
    report_number(out, NULL, "tokens/s", 0, s != NULL ? s->sequences / s->attention : NAN);
}

static bool print_table(const test_report *report)
{
    report_rows out = { .n_rows = 0 };
    for (size_t i = 0; i < report->n_devices; i++) {
        const test_device *d = &report->devices[i];
        const counts c = count(report, d);
        if (d->missing[0] != 0)
            add_line(&out, d, "not tried", NULL, NULL);
        else
            add_line(&out, d, "checked", &c, NULL);
    }
    for (size_t i = 0; i < report->n_devices * report->n_results; i++) {
        const test_result *r = &report->results[i % report->n_results];
        if (r->device == &report->devices[i / report->n_results] && is_measured(r))
            add_line(&out, r->device, r->pair.k, NULL, &r->speed);
    }
    return report_print(&out, "selftest", REPORT_TABLE);
}

/* Results that are wrong or failed, at most MOST_LINES. */
static void print_wrong(const test_report *report)
{
    size_t n = 0;
    for (size_t i = 0; i < report->n_results; i++) {
        const test_result *r = &report->results[i];
        const test_state state = test_state_of(r);
        if (state == TEST_RIGHT || state == TEST_NO_KERNEL || n++ >= MOST_LINES)
            continue;
        const bool same = strcmp(r->pair.k, r->pair.v) == 0;
        printf("%s: %s: %s%s%s, head_dim %" PRIu32 ": %s\n", words[state], r->device->label,
               r->pair.k, same ? "" : " / ", same ? "" : r->pair.v, r->pair.head_dim, r->why);
    }
    if (n > MOST_LINES)
        printf("and %zu more, which --report lists\n", n - MOST_LINES);
}

/* Codecs of one head_dim that a GPU does not take, in a line. Reasons are in the file. */
static void print_without_kernel(const test_report *report, const test_device *d, uint32_t head_dim)
{
    const char *between = "";
    for (size_t i = 0; i < report->n_results; i++) {
        const test_result *r = &report->results[i];
        if (r->device != d || r->pair.head_dim != head_dim || test_state_of(r) != TEST_NO_KERNEL)
            continue;
        if (between[0] == 0)
            printf("no kernel: %s, head_dim %" PRIu32 ": ", d->label, head_dim);
        printf("%s%s", between, r->pair.k);
        between = ", ";
    }
    if (between[0] != 0)
        putchar('\n');
}

bool test_print(const test_report *report)
{
    const counts c = count(report, NULL);
    size_t levels = 0, gpus = 0;
    if (!print_table(report))
        return false;
    putchar('\n');
    for (size_t i = 0; i < report->n_devices; i++) {
        const test_device *d = &report->devices[i];
        if (d->missing[0] != 0)
            printf("not tried: %s: %s\n", d->label, d->missing);
        *(d->is_gpu ? &gpus : &levels) += d->missing[0] == 0;
        for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 32)
            print_without_kernel(report, d, head_dim);
    }
    print_wrong(report);
    printf("\nverdict: %s: %zu CPU levels, %zu GPUs, %zu results, %zu wrong, in %.0f seconds\n",
           verdict_of(report), levels, gpus, c.all, c.wrong, report->seconds);
    return finish_output() == EXIT_OK;
}

/* The file: members of an object, NaN and NULL are null */

static void text(FILE *out, const char *key, const char *value)
{
    json_member(out, ", ", key, value);
}

static void number(FILE *out, const char *key, double value)
{
    fprintf(out, ", \"%s\": ", key);
    json_number(out, value);
}

static void known(FILE *out, const char *key, double value)
{
    number(out, key, value > 0 ? value : NAN);
}

static void write_why(FILE *out, const char *why)
{
    text(out, "why", why[0] != 0 ? why : NULL);
    putc('}', out);
}

static void write_device(FILE *out, const test_device *d)
{
    json_member(out, "    {", "kind", d->is_gpu ? "gpu" : "cpu");
    text(out, "name", d->name);
    if (!d->is_gpu)
        text(out, "level", kvant_cpu_level_name(d->level));
    if (d->is_gpu) {
        fprintf(out, ", \"compute_capability\": \"%d.%d\"", d->major, d->minor);
        known(out, "multiprocessors", d->multiprocessors);
        known(out, "shared_bytes_per_block", d->shared_bytes);
        known(out, "l2_bytes", d->l2_bytes);
        known(out, "memory_bytes", d->memory_bytes);
        known(out, "driver_cuda_version", d->driver_cuda);
    }
    /* a message about a library that cannot be loaded has its path */
    write_why(out, strchr(d->missing, '/') == NULL
                       ? d->missing
                       : "not tried (the message has a path and is left out)");
}

static void write_pair(const test_report *report, FILE *out, const test_result *r)
{
    fprintf(out, "    {\"device\": %zu", (size_t)(r->device - report->devices));
    text(out, "k", r->pair.k);
    text(out, "v", r->pair.v);
    number(out, "head_dim", r->pair.head_dim);
}

static void write_result(const test_report *report, FILE *out, const test_result *r)
{
    write_pair(report, out, r);
    text(out, "encode", words[r->state[TEST_ENCODE]]);
    text(out, "decode", words[r->state[TEST_DECODE]]);
    text(out, "attention", words[r->state[TEST_ATTENTION]]);
    number(out, "decode_error_share_of_bound", r->share[TEST_DECODE]);
    number(out, "attention_error_share_of_bound", r->share[TEST_ATTENTION]);
    write_why(out, r->why);
}

static void write_speed(const test_report *report, FILE *out, const test_result *r)
{
    const test_speed *s = &r->speed;
    write_pair(report, out, r);
    number(out, "sequences", s->sequences);
    number(out, "tokens_per_sequence", SPEED_TOKENS);
    number(out, "heads", SPEED_HEADS);
    number(out, "kv_heads", SPEED_KV_HEADS);
    known(out, "threads", s->threads);
    number(out, "encoded_rows_per_second", s->encode_rows);
    number(out, "attention_bytes_read", s->bytes);
    number(out, "attention_seconds", s->attention);
    number(out, "attention_gbytes_read_per_second", s->bytes / s->attention / 1e9);
    number(out, "attention_tokens_per_second_of_one_layer", s->sequences / s->attention);
    number(out, "copy_gbytes_read_and_written_per_second", 2 * s->bytes / s->copy / 1e9);
    putc('}', out);
}

void test_write_json(const test_report *report, FILE *out)
{
    char system[64], machine[64];
    os_names(system, machine, sizeof system);
    fprintf(out, "{\n  \"kvant_selftest\": %d", FILE_VERSION);
    json_member(out, ",\n  ", "kvant_version", kvant_version());
    json_member(out, ",\n  ", "system", system);
    json_member(out, ",\n  ", "machine", machine);
    json_member(out, ",\n  ", "verdict", verdict_of(report));
    fprintf(out, ",\n  \"shared_memory_limit_kib\": %" PRIu32, report->shared_kib);
    fprintf(out, ",\n  \"seconds\": %.1f,\n  \"devices\": [", report->seconds);
    for (size_t i = 0; i < report->n_devices; i++) {
        fputs(i > 0 ? ",\n" : "\n", out);
        write_device(out, &report->devices[i]);
    }
    fputs("\n  ],\n  \"results\": [", out);
    for (size_t i = 0; i < report->n_results; i++) {
        fputs(i > 0 ? ",\n" : "\n", out);
        write_result(report, out, &report->results[i]);
    }
    fputs("\n  ],\n  \"speeds\": [", out);
    const char *between = "\n";
    for (size_t i = 0; i < report->n_results; i++)
        if (is_measured(&report->results[i])) {
            fputs(between, out);
            write_speed(report, out, &report->results[i]);
            between = ",\n";
        }
    fputs("\n  ]\n}\n", out);
}
