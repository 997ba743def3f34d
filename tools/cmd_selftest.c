/* cmd_selftest.c - `kvant selftest`: does every codec work right on the CPUs and GPUs of this
 * machine, and how fast. Goes through problems and devices; what is compared lies in
 * selftest_problem.c. */
#include "args.h"
#include "command.h"
#include "interrupt.h"
#include "progress.h"
#include "selftest.h"

#include <errno.h>
#include <kvant/cuda.h>
#include <math.h>
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
    ARG_TEXT('c', "codec", "SPEC", codec, "check and measure this codec alone"),
    ARG_SWITCH(0, "no-speeds", no_speeds, "check, and measure nothing"),
    ARG_U32(0, "shared-memory", "KIB", 48, 1024, shared_kib,
            "limit the shared memory of a GPU's thread block; GPUs of\n"
            "8.6, 8.9 and 12.0 have 99"),
    ARG_CALL(0, "json", NULL, progress_use_json, json,
             "print what the file holds instead of the table"),
};

static const arg_spec spec = {
    .command = "selftest",
    .usage = "[--report FILE] [--codec SPEC] [--json] [options]",
    .about =
        "Checks kvant on this machine: every codec encodes, decodes and attends on every CPU level "
        "and on\n"
        "every NVIDIA GPU. Encoded bytes must be those of portable C. Decoded rows and attention "
        "must\n"
        "differ from the reference, in double precision, by no more than a derived bound. Then it\n"
        "measures a few codecs next to a plain copy. Takes less than two minutes.",
    ARG_OPTIONS(options),
    .notes = "The file names the CPU and GPU models, the versions of kvant and of the NVIDIA "
             "driver, and what\n"
             "was computed and measured. It has no user name, host name, path, serial number, date "
             "or address.\n"
             "\n"
             "right, wrong    codecs by head_dim; a wrong one has a line with what is wrong and "
             "how far off\n"
             "no kernel       codecs that this GPU does not take; neither right nor wrong\n"
             "error/bound     the largest, of decoded rows and of attention\n"
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

typedef struct run {
    test_report report;
    test_gpu **gpus; /* by device; NULL: a CPU, or a GPU that could not be tried */
    progress progress;
} run;

static bool open_devices(run *r)
{
    test_report *report = &r->report;
    if (!test_add_cpus(report) || !test_add_gpus(report))
        return false;
    r->gpus = calloc(report->n_devices, sizeof *r->gpus);
    for (size_t i = 0; r->gpus != NULL && i < report->n_devices; i++)
        if (report->devices[i].gpu)
            r->gpus[i] = test_gpu_open(&report->devices[i]);
    return r->gpus != NULL;
}

static void close_devices(run *r)
{
    for (size_t i = 0; r->gpus != NULL && i < r->report.n_devices; i++)
        test_gpu_close(r->gpus[i]);
    free(r->gpus);
    free(r->report.devices);
    free(r->report.results);
    free(r->report.speeds);
}

static bool is_tried(const run *r, size_t device)
{
    return r->report.devices[device].missing[0] == 0;
}

static bool check_on(run *r, size_t device, const test_problem *p)
{
    test_report *report = &r->report;
    test_result *all = realloc(report->results, (report->n_results + 1) * sizeof *all);
    if (all == NULL)
        return false;
    report->results = all;
    test_result *result = &all[report->n_results++];
    *result = (test_result){ .device = device, .pair = p->pair };
    if (report->devices[device].gpu)
        test_gpu_check(r->gpus[device], p, result);
    else
        test_cpu_check(&report->devices[device], p, result);
    return true;
}

/* False without memory. A codec that does not exist at this head_dim is left out. */
static bool check_pair(run *r, const test_pair *pair, const kvant_calibration *calibration)
{
    char why[TEST_WHY_BYTES];
    test_problem p;
    const kvant_status status = test_problem_open(&p, pair, calibration, why);
    bool ok = status != KVANT_ERR_MEMORY;
    for (size_t i = 0; ok && status == KVANT_OK && !interrupted() && i < r->report.n_devices; i++)
        ok = !is_tried(r, i) || check_on(r, i, &p);
    if (status != KVANT_OK && status != KVANT_ERR_MEMORY && status != KVANT_ERR_UNSUPPORTED)
        complain("selftest: %s, head_dim %u: %s", pair->k, (unsigned)pair->head_dim, why);
    test_problem_close(&p);
    return ok;
}

static bool check_all(run *r, const test_pair *pairs, size_t n)
{
    kvant_calibration *calibration = NULL;
    uint32_t head_dim = 0;
    bool ok = true;
    for (size_t i = 0; ok && !interrupted() && i < n; i++) {
        if (pairs[i].head_dim != head_dim) {
            kvant_calibration_free(&calibration);
            head_dim = pairs[i].head_dim;
            calibration = test_calibration(head_dim);
        }
        ok = calibration != NULL && check_pair(r, &pairs[i], calibration);
        progress_add(&r->progress, pairs[i].head_dim, pairs[i].k);
    }
    kvant_calibration_free(&calibration);
    return ok;
}

/* Speeds: the best CPU level, and every GPU */

static bool is_measured(const run *r, size_t device)
{
    const test_device *devices = r->report.devices;
    const bool best = device + 1 == r->report.n_devices || devices[device + 1].gpu;
    return is_tried(r, device) && (devices[device].gpu || best);
}

static bool measure_on(run *r, size_t device, const char *codec)
{
    test_report *report = &r->report;
    char why[TEST_WHY_BYTES];
    test_speed s = { .device = device, .pair = { .head_dim = 128 } };
    snprintf(s.pair.k, sizeof s.pair.k, "%s", codec);
    snprintf(s.pair.v, sizeof s.pair.v, "%s", codec);
    const kvant_status status = report->devices[device].gpu
                                    ? test_gpu_speed(r->gpus[device], &s, why)
                                    : test_cpu_speed(&report->devices[device], &s, why);
    if (status == KVANT_OK) {
        test_speed *all = realloc(report->speeds, (report->n_speeds + 1) * sizeof *all);
        report->speeds = all != NULL ? all : report->speeds;
        if (all != NULL)
            all[report->n_speeds++] = s;
        return all != NULL;
    }
    test_result *all = realloc(report->results, (report->n_results + 1) * sizeof *all);
    if (all == NULL)
        return false;
    report->results = all;
    if (status == KVANT_ERR_UNSUPPORTED)
        return true; /* the checks have said so */
    test_result *result = &all[report->n_results++];
    *result = (test_result){ .device = device, .pair = s.pair };
    test_note(result, &result->attention, TEST_FAILED, "speed: %s", why);
    return true;
}

static bool measure_all(run *r, const char *only)
{
    static const char *const codecs[] = { "f16",       "int-8",     "turboquant-6",
                                          "trellis-4", "trellis-3", "trellis-2" };
    bool ok = true;
    for (size_t device = 0; device < r->report.n_devices; device++)
        for (size_t i = 0;
             is_measured(r, device) && i < (only ? 1 : sizeof codecs / sizeof *codecs); i++) {
            ok = ok && !interrupted() && measure_on(r, device, only ? only : codecs[i]);
            progress_add(&r->progress, 128, "speed");
        }
    return ok || interrupted();
}

static bool run_all(run *r, const char *only, bool no_speeds)
{
    size_t n = 0;
    double total = 0;
    test_pair *pairs = test_pairs(only, &n);
    bool ok = pairs != NULL && open_devices(r);
    for (size_t i = 0; ok && i < n; i++)
        total += pairs[i].head_dim;
    for (size_t i = 0; ok && i < r->report.n_devices; i++)
        total += is_measured(r, i) && !no_speeds ? (only ? 1 : 6) * 128 : 0;
    const double start = monotonic_seconds();
    progress_start(&r->progress, total);
    ok = ok && check_all(r, pairs, n);
    ok = ok && (no_speeds || measure_all(r, only));
    progress_end(&r->progress);
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    r->report.seconds = monotonic_seconds() - start;
    r->report.interrupted = interrupted();
    r->report.no_memory = !ok;
    free(pairs);
    return ok;
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
    fprintf(stderr, "kvant: %s can be sent as it is: it has no user name, host name or path\n",
            path);
    return true;
}

static int finish(const run *r, const settings *s)
{
    bool ok = true;
    if (s->json)
        test_write_json(&r->report, stdout);
    else
        ok = test_print(&r->report);
    ok = (s->report == NULL || write_report(&r->report, s->report)) && ok;
    ok = finish_output() == EXIT_OK && ok;
    if (r->report.interrupted)
        return EXIT_INTERRUPTED;
    return ok && test_all_right(&r->report) ? EXIT_OK : EXIT_RUNTIME;
}

int command_selftest(int argc, char **argv)
{
    settings s = { .report = NULL };
    run r = { .gpus = NULL };
    char why[TEST_WHY_BYTES];
    int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    int needed = 0;
    if (s.codec != NULL && kvant_codec_needs_calibration(s.codec, KVANT_ROLE_K, &needed, why,
                                                         sizeof why) != KVANT_OK) {
        complain("--codec %s: %s", s.codec, why);
        return EXIT_USAGE;
    }
    if (s.shared_kib > 0)
        kvant_cuda_limit_shared_memory((size_t)s.shared_kib << 10);
    r.report.shared_kib = s.shared_kib;
    interrupt_catch();
    if (!run_all(&r, s.codec, s.no_speeds))
        complain("selftest: %s", kvant_strerror(KVANT_ERR_MEMORY));
    code = finish(&r, &s);
    close_devices(&r);
    return code;
}
