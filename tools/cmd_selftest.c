/* cmd_selftest.c - `kvant selftest`: whether every codec computes correctly on the CPUs and GPUs of
 * this machine, and how fast. This file runs all problems on all devices. The comparisons are in
 * selftest_problem.c. */
#include "args.h"
#include "command.h"
#include "interrupt.h"
#include "progress.h"
#include "selftest.h"

#include <errno.h>
#include <kvant/cuda_kernels.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    const char *report, *codec;
    uint32_t shared_kib;
    bool json, no_speeds;
} settings;
#define AT(member) offsetof(settings, member)

static const arg_option options[] = {
    ARG_TEXT(0, "report", "FILE", report,
             "write the results to FILE (JSON), to send to kvant's issues"),
    ARG_TEXT('c', "codec", "SPEC", codec, "check and measure only this codec"),
    ARG_SWITCH(0, "no-speeds", no_speeds, "check only, do not measure speed"),
    ARG_U32(0, "shared-memory", "KIB", 48, 1024, shared_kib,
            "limit the shared memory of a GPU's thread block; GPUs of\n"
            "8.6, 8.9 and 12.0 have 99"),
    ARG_CALL(0, "json", NULL, progress_use_json, json,
             "print the file of --report instead of the table"),
};

static const arg_spec spec = {
    .command = "selftest",
    .usage = "[--report FILE] [--codec SPEC] [--json] [options]",
    .about = "Checks kvant on this machine: every codec encodes rows, decodes them and computes "
             "attention on\nevery CPU level and on every NVIDIA GPU. Encoded bytes must equal the "
             "bytes of portable C. Decoded\nrows and attention must differ from the reference, in "
             "double precision, by no more than a derived\nbound. Then it measures the speed of a "
             "few codecs and of a plain copy. Takes less than two minutes.",
    ARG_OPTIONS(options),
    .notes = "The file names the CPU and GPU models, the versions of kvant and of the NVIDIA "
             "driver, and what\n"
             "was computed and measured. It has no user name, host name, path, serial number, date "
             "or address.\n"
             "\n"
             "right, wrong    codecs by head_dim; for a wrong one, a line says which result is "
             "wrong, and\n                by how much\n"
             "no kernel       codecs that this GPU does not take; neither right nor wrong\n"
             "error/bound     the largest ratio, of decoded rows and of attention\n"
             "M rows/s        rows of head_dim 128 that are encoded\n"
             "GB/s attention  bytes of pages read by attention of one new token per sequence, over "
             "8192 tokens\n"
             "                of 8 kv heads; a GPU has 16 sequences\n"
             "GB/s copy       bytes read and written by a copy of as many bytes\n"
             "tokens/s        new tokens per second through the attention of one layer\n"
             "\n"
             "Exit code 0: all is right. 1: something is wrong or could not be tried.",
};

/* One run */

enum { MOST_DEVICES = 64 };

/* Speeds are measured on the best CPU level, and on every GPU. */
static bool has_speed(const test_report *report, const test_device *d)
{
    const bool best = d + 1 == report->devices + report->n_devices || d[1].is_gpu;
    return d->is_gpu || best;
}

static void check_on(test_report *report, const test_device *d, const test_problem *p, bool speeds)
{
    test_result *r = &report->results[report->n_results++];
    *r = (test_result){ .device = d, .pair = p->pair };
    if (d->is_gpu)
        test_gpu_check(d->gpu, p, r);
    else
        test_cpu_check(d, p, r);
    speeds = speeds && p->pair.measured && has_speed(report, d) && !interrupted();
    if (!speeds || test_state_of(r) != TEST_RIGHT)
        return;
    if (d->is_gpu)
        test_gpu_speed(d->gpu, p, r);
    else
        test_cpu_speed(d, p, r);
}

/* False without memory. A codec that does not exist at this head_dim is left out. */
static bool check_pair(test_report *report, const test_pair *pair,
                       const kvant_calibration *calibration, bool speeds)
{
    char why[TEST_WHY_BYTES] = "";
    test_problem p;
    const kvant_status status = test_problem_open(&p, pair, calibration, why);
    for (size_t i = 0; status == KVANT_OK && !interrupted() && i < report->n_devices; i++)
        if (report->devices[i].missing[0] == 0)
            check_on(report, &report->devices[i], &p, speeds);
    if (status != KVANT_OK && status != KVANT_ERR_MEMORY && status != KVANT_ERR_UNSUPPORTED)
        complain("selftest: %s, head_dim %u: %s", pair->k, (unsigned)pair->head_dim, why);
    test_problem_close(&p);
    return status != KVANT_ERR_MEMORY;
}

static bool check_all(test_report *report, const test_pair *pairs, size_t n, const settings *s)
{
    kvant_calibration *calibration = NULL;
    progress shown;
    double total = 0;
    bool ok = true;
    for (size_t i = 0; i < n; i++)
        total += pairs[i].head_dim;
    progress_start(&shown, total);
    for (size_t i = 0; ok && !interrupted() && i < n; i++) {
        if (i == 0 || pairs[i].head_dim != pairs[i - 1].head_dim) {
            kvant_calibration_free(&calibration);
            calibration = test_calibration(pairs[i].head_dim);
        }
        ok = calibration != NULL && check_pair(report, &pairs[i], calibration, !s->no_speeds);
        progress_add(&shown, pairs[i].head_dim, pairs[i].k);
    }
    progress_end(&shown);
    kvant_calibration_free(&calibration);
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    return ok;
}

static void run_all(test_report *report, const settings *s)
{
    size_t n = 0;
    const double start = monotonic_seconds();
    test_pair *pairs = test_pairs(s->codec, &n);
    report->n_devices = test_find_cpus(report->devices, MOST_DEVICES);
    report->n_devices +=
        test_find_gpus(report->devices + report->n_devices, MOST_DEVICES - report->n_devices);
    report->results = calloc(n * report->n_devices + 1, sizeof *report->results);
    const bool ok = pairs != NULL && report->results != NULL && check_all(report, pairs, n, s);
    report->seconds = monotonic_seconds() - start;
    report->interrupted = interrupted();
    report->no_memory = !ok;
    if (!ok)
        complain("selftest: %s", kvant_strerror(KVANT_ERR_MEMORY));
    free(pairs);
}

static bool write_report(const test_report *report, const char *path)
{
    FILE *file = fopen(path, "w");
    if (file == NULL)
        return complain("--report %s: %s", path, strerror(errno));
    test_write_json(report, file);
    const bool failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed)
        return complain("--report %s: cannot be written", path);
    report_line("kvant: ", "%s can be sent unchanged: it has no user name, host name or path",
                path);
    return true;
}

static int finish(const test_report *report, const settings *s)
{
    bool ok = true;
    if (s->json)
        test_write_json(report, stdout);
    else
        ok = test_print(report);
    ok = (s->report == NULL || write_report(report, s->report)) && ok;
    ok = finish_output() == EXIT_OK && ok;
    if (report->interrupted)
        return EXIT_INTERRUPTED;
    return ok && test_all_right(report) ? EXIT_OK : EXIT_RUNTIME;
}

int command_selftest(int argc, char **argv)
{
    settings s = { .report = NULL };
    char why[TEST_WHY_BYTES];
    int code = args_parse_all(&spec, argc, argv, &s), needed = 0;
    if (code >= 0)
        return code;
    if (s.codec != NULL && kvant_codec_needs_calibration(s.codec, KVANT_ROLE_K, &needed, why,
                                                         sizeof why) != KVANT_OK) {
        complain("--codec %s: %s", s.codec, why);
        return EXIT_USAGE;
    }
    if (s.report != NULL && !can_write_file("selftest: --report", s.report))
        return EXIT_RUNTIME;
    test_device devices[MOST_DEVICES];
    test_report report = { .devices = devices, .shared_kib = s.shared_kib };
    if (s.shared_kib > 0)
        kvant_cuda_limit_shared_memory((size_t)s.shared_kib << 10);
    interrupt_catch();
    run_all(&report, &s);
    code = finish(&report, &s);
    for (size_t i = 0; i < report.n_devices; i++)
        test_gpu_close(devices[i].gpu);
    free(report.results);
    return code;
}
