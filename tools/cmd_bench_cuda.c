/* cmd_bench_cuda.c - `kvant bench cuda`: the time of attention on an NVIDIA GPU, beside a copy in the same run.
 *
 * A figure is the median of replays of a CUDA graph that holds the one call; before each, memory of four times the
 * second-level cache is overwritten, so that no page is still there, as in a model whose weights pass through. */
#include "args.h"
#include "codec_pairs.h"
#include "command.h"
#include "gpu_attention.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "stats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPT_K,
    OPT_V,
    OPT_BATCH,
    OPT_HEADS,
    OPT_KV_HEADS,
    OPT_DIM,
    OPT_TOKENS,
    OPT_QUERY_TOKENS,
    OPT_ROUNDS,
    OPT_DEVICE,
    OPT_LIBRARY,
    OPT_JSON
};
enum { MAX_LIST = 16, MAX_ROUNDS = 1001, MAX_BATCH = 4096 };
enum { CAPTURE_MODE_THREAD = 1 };

static const arg_option options[] = {
    { OPT_K, 'k', "codec-k", "SPEC", "codec of keys, may be repeated (default: a list of common ones)" },
    { OPT_V, 'v', "codec-v", "SPEC", "codec of values (default: the one of the -k before it)" },
    { OPT_BATCH, 'b', "batch", "N", "sequences (default 1)" },
    { OPT_HEADS, 0, "heads", "N", "query heads (default 32)" },
    { OPT_KV_HEADS, 0, "kv-heads", "N", "kv heads (default 8)" },
    { OPT_DIM, 'd', "head-dim", "N", "numbers of a row: 64, 96, 128 or 256 (default 128)" },
    { OPT_TOKENS, 'n', "tokens", "N,N", "tokens of each sequence (default 32768,131072)" },
    { OPT_QUERY_TOKENS, 0, "query-tokens", "N", "query tokens of each sequence, its last ones, causal (default 1)" },
    { OPT_ROUNDS, 'r', "rounds", "N", "replays, of which the median is given (default 31)" },
    { OPT_DEVICE, 0, "device", "N", "number of the GPU (default 0)" },
    { OPT_LIBRARY, 0, "library", "FILE",
      "libkvant_cuda.so (default: $KVANT_CUDA_LIBRARY, beside the command,\n"
      "then where the system looks)" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects" },
};

static const arg_spec spec = {
    .command = "bench cuda",
    .usage = "[-k SPEC [-v SPEC]]... [-b BATCH] [--heads N] [--kv-heads N] [-d DIM] [-n TOKENS]",
    .about = "Measures attention on an NVIDIA GPU over compressed pages in random order: bf16 queries and\n"
             "outputs, rotation included.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "GB/s are bytes of keys and values as they are stored; 'of copy' is their share of what a copy\n"
             "in the same run reads and writes. 'error' is that of one head, against double precision over\n"
             "the decoded pages. bench/cuda/ has the comparison with PyTorch's flash and cuDNN attention.\n"
             "Needs libkvant_cuda (`make cuda`) and a driver. Ctrl-C prints what is complete.\n\nexample:\n"
             "  kvant bench cuda -k turboquant-4 -k int-4 -b 8 -n 32768",
};

static const char *const usual[] = { "int-4",     "bdr-4",     "turboquant-4", "turboquant-3", "turboquant-2",
                                     "int-2",     "kivi-2",    "innerq-small", "octopus-4",    "hqmq-s96r4",
                                     "trellis-4", "trellis-3", "trellis-2" };

typedef struct settings {
    codec_pairs pairs;
    uint32_t batch, heads, kv_heads, dim, tokens[MAX_LIST], query_tokens, rounds, device;
    size_t n_tokens;
    const char *library;
    bool json;
} settings;

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    switch (id) {
    case OPT_K: return codec_pairs_add_k(&s->pairs, value);
    case OPT_V: return codec_pairs_add_v(&s->pairs, value);
    case OPT_BATCH: return args_u32("--batch", value, 1, MAX_BATCH, &s->batch);
    case OPT_HEADS: return args_u32("--heads", value, 1, 1024, &s->heads);
    case OPT_KV_HEADS: return args_u32("--kv-heads", value, 1, 128, &s->kv_heads);
    case OPT_DIM: return args_u32("--head-dim", value, 1, KVANT_MAX_HEAD_DIM, &s->dim);
    case OPT_TOKENS: return args_u32_list("--tokens", value, 1, 1 << 22, s->tokens, MAX_LIST, &s->n_tokens);
    case OPT_QUERY_TOKENS: return args_u32("--query-tokens", value, 1, 1 << 16, &s->query_tokens);
    case OPT_ROUNDS: return args_u32("--rounds", value, 1, MAX_ROUNDS, &s->rounds);
    case OPT_DEVICE: return args_u32("--device", value, 0, 1023, &s->device);
    case OPT_LIBRARY: s->library = value; return true;
    default: return s->json = progress_use_json();
    }
}

static bool check(const settings *s)
{
    if (s->heads % s->kv_heads == 0 && s->heads / s->kv_heads <= 64)
        return true;
    complain("--heads %u must be a multiple of --kv-heads %u, at most 64 times as many", (unsigned)s->heads,
             (unsigned)s->kv_heads);
    return false;
}

typedef struct bench {
    const settings *settings;
    gpu gpu;
    gpu_address flush;
    size_t flush_bytes;
    gpu_event begin, end;
    double copy; /* bytes per second, read and written */
    double milliseconds[MAX_ROUNDS];
    progress progress;
    report_cell *cells;
    size_t n_rows;
} bench;

/* Median seconds of what enqueue puts on the stream. */
static bool time_work(bench *b, bool (*enqueue)(bench *b, void *work), void *work, bool cold, double *seconds)
{
    const gpu_driver *d = &b->gpu.driver;
    const uint32_t rounds = b->settings->rounds;
    for (uint32_t i = 0; i < rounds; i++) {
        float elapsed;
        if (interrupted() ||
            (cold && !gpu_ok(&b->gpu, d->fill(b->flush, (unsigned char)i, b->flush_bytes, b->gpu.stream),
                             "emptying the cache")) ||
            !gpu_ok(&b->gpu, d->event_record(b->begin, b->gpu.stream), "timing") || !enqueue(b, work) ||
            !gpu_ok(&b->gpu, d->event_record(b->end, b->gpu.stream), "timing") ||
            !gpu_ok(&b->gpu, d->event_wait(b->end), "timing") ||
            !gpu_ok(&b->gpu, d->event_elapsed(&elapsed, b->begin, b->end), "timing"))
            return false;
        b->milliseconds[i] = elapsed;
    }
    *seconds = stats_percentile(b->milliseconds, rounds, 0.5) / 1e3;
    return true;
}

typedef struct copy_work {
    gpu_address from, to;
    size_t bytes;
} copy_work;

static bool enqueue_copy(bench *b, void *work)
{
    const copy_work *w = work;
    return gpu_ok(&b->gpu, b->gpu.driver.copy(w->to, w->from, w->bytes, b->gpu.stream), "copy");
}

/* Of 1 GiB, or of what there is. */
static bool measure_copy(bench *b)
{
    size_t available, total;
    double seconds;
    if (!gpu_ok(&b->gpu, b->gpu.driver.memory_info(&available, &total), "asking for free memory"))
        return false;
    copy_work w = { .bytes = available / 4 < (size_t)1 << 30 ? available / 4 / 512 * 512 : (size_t)1 << 30 };
    const bool ok = (w.from = gpu_new(&b->gpu, w.bytes)) != 0 && (w.to = gpu_new(&b->gpu, w.bytes)) != 0 &&
                    gpu_ok(&b->gpu, b->gpu.driver.fill(w.from, 0x5a, w.bytes, b->gpu.stream), "copy") &&
                    time_work(b, enqueue_copy, &w, false, &seconds);
    if (w.from != 0)
        b->gpu.driver.release(w.from);
    if (w.to != 0)
        b->gpu.driver.release(w.to);
    if (ok)
        b->copy = 2 * (double)w.bytes / seconds;
    return ok;
}

static bool enqueue_graph(bench *b, void *work)
{
    return gpu_ok(&b->gpu, b->gpu.driver.graph_launch(*(gpu_graph_exec *)work, b->gpu.stream),
                  "replaying the graph");
}

/* The first call is outside the graph: it loads the kernel, and its output is what is compared. */
static bool time_attention(bench *b, const gpu_attention *a, double *seconds, double *error)
{
    const gpu_driver *d = &b->gpu.driver;
    gpu_graph graph = NULL;
    gpu_graph_exec exec = NULL;
    if (!gpu_attention_run(a) || isnan(*error = gpu_attention_error(a)) ||
        !gpu_ok(&b->gpu, d->capture_begin(b->gpu.stream, CAPTURE_MODE_THREAD), "recording a graph"))
        return false;
    const bool called = gpu_attention_run(a);
    bool ok = gpu_ok(&b->gpu, d->capture_end(b->gpu.stream, &graph), "recording a graph") && called &&
              gpu_ok(&b->gpu, d->graph_instantiate(&exec, graph, 0), "making a graph") &&
              time_work(b, enqueue_graph, &exec, true, seconds);
    if (exec != NULL)
        d->graph_exec_destroy(exec);
    if (graph != NULL)
        d->graph_destroy(graph);
    return ok;
}

static const report_column columns[] = {
    { "device", NULL, COLUMN_TEXT, 0 },
    { "driver_cuda", NULL, COLUMN_NUMBER, 1 },
    { "k", "K", COLUMN_TEXT, 0 },
    { "v", "V", COLUMN_TEXT, 0 },
    { "batch", "batch", COLUMN_NUMBER, 0 },
    { "heads", "heads", COLUMN_NUMBER, 0 },
    { "kv_heads", "kv_heads", COLUMN_NUMBER, 0 },
    { "head_dim", "head_dim", COLUMN_NUMBER, 0 },
    { "tokens", "tokens", COLUMN_NUMBER, 0 },
    { "query_tokens", "query", COLUMN_NUMBER, 0 },
    { "rounds", NULL, COLUMN_NUMBER, 0 },
    { "bytes", NULL, COLUMN_NUMBER, 0 },
    { "microseconds", "us", COLUMN_NUMBER, 1 },
    { "gbytes_per_second", "GB/s", COLUMN_NUMBER, 0 },
    { "share_of_copy", "of copy", COLUMN_PERCENT, 0 },
    { "copy_gbytes_per_second", NULL, COLUMN_NUMBER, 0 },
    { "error", "error", COLUMN_NUMBER, 4 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static void add_row(bench *b, size_t codec, const gpu_attention *a, double seconds, double error)
{
    const gpu_shape *s = &a->shape;
    const report_cell row[N_COLUMNS] = { CELL_TEXT(b->gpu.name),
                                         CELL_NUMBER(b->gpu.driver_version / 10 / 100.0),
                                         CELL_TEXT(b->settings->pairs.items[codec].k),
                                         CELL_TEXT(b->settings->pairs.items[codec].v),
                                         CELL_NUMBER(s->batch),
                                         CELL_NUMBER(s->n_heads),
                                         CELL_NUMBER(s->n_kv_heads),
                                         CELL_NUMBER(s->head_dim),
                                         CELL_NUMBER(s->n_tokens),
                                         CELL_NUMBER(s->query_tokens),
                                         CELL_NUMBER(b->settings->rounds),
                                         CELL_NUMBER(a->bytes),
                                         CELL_NUMBER(1e6 * seconds),
                                         CELL_NUMBER(a->bytes / seconds / 1e9),
                                         CELL_NUMBER(a->bytes / seconds / b->copy),
                                         CELL_NUMBER(b->copy / 1e9),
                                         CELL_NUMBER(error) };
    memcpy(b->cells + b->n_rows++ * N_COLUMNS, row, sizeof row);
}

static bool bench_one(bench *b, size_t codec, uint32_t tokens)
{
    const settings *s = b->settings;
    const gpu_shape shape = { s->batch, s->heads, s->kv_heads, s->dim, tokens, s->query_tokens };
    gpu_attention a = { 0 };
    double seconds, error;
    const bool ok = !interrupted() &&
                    gpu_attention_create(&a, &b->gpu, &shape, s->pairs.items[codec].k, s->pairs.items[codec].v) &&
                    time_attention(b, &a, &seconds, &error);
    if (ok) {
        char what[160];
        add_row(b, codec, &a, seconds, error);
        snprintf(what, sizeof what, "%s, %u tokens", s->pairs.items[codec].k, (unsigned)tokens);
        progress_add(&b->progress, tokens, what);
    }
    gpu_attention_free(&a);
    return ok;
}

static bool prepare(bench *b)
{
    const settings *s = b->settings;
    b->flush_bytes = 4 * b->gpu.l2_bytes > (size_t)256 << 20 ? 4 * b->gpu.l2_bytes : (size_t)256 << 20;
    if ((b->cells = calloc(s->pairs.n * s->n_tokens * N_COLUMNS, sizeof *b->cells)) == NULL) {
        complain("no memory for the results");
        return false;
    }
    return (b->flush = gpu_new(&b->gpu, b->flush_bytes)) != 0 &&
           gpu_ok(&b->gpu, b->gpu.driver.event_create(&b->begin, 0), "making an event") &&
           gpu_ok(&b->gpu, b->gpu.driver.event_create(&b->end, 0), "making an event") && measure_copy(b);
}

static bool bench_all(bench *b)
{
    const settings *s = b->settings;
    double work = 0;
    if (!gpu_open(&b->gpu, s->library, s->device) || !prepare(b))
        return false;
    fprintf(stderr, "%s, a copy reads and writes %.2f TB/s\n", b->gpu.name, b->copy / 1e12);
    for (size_t i = 0; i < s->n_tokens; i++)
        work += (double)s->pairs.n * s->tokens[i];
    progress_start(&b->progress, work);
    bool ok = true;
    for (size_t i = 0; i < s->n_tokens; i++)
        for (size_t c = 0; c < s->pairs.n && ok; c++)
            ok = bench_one(b, c, s->tokens[i]);
    progress_end(&b->progress);
    return ok;
}

static void close_bench(bench *b)
{
    if (b->begin != NULL)
        b->gpu.driver.event_destroy(b->begin);
    if (b->end != NULL)
        b->gpu.driver.event_destroy(b->end);
    if (b->flush != 0)
        b->gpu.driver.release(b->flush);
    gpu_close(&b->gpu);
    free(b->cells);
    free(b);
}

int bench_cuda(int argc, char **argv)
{
    static settings s = {
        .batch = 1, .heads = 32, .kv_heads = 8, .dim = 128, .tokens = { 32768, 131072 }, .n_tokens = 2, .query_tokens = 1,
        .rounds = 31
    };
    int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (!check(&s))
        return EXIT_USAGE;
    codec_pairs_default(&s.pairs, usual, sizeof usual / sizeof *usual);
    bench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return EXIT_RUNTIME;
    b->settings = &s;
    interrupt_catch();
    const bool ok = bench_all(b);
    code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if (b->n_rows > 0 &&
        (!report_print(columns, N_COLUMNS, b->cells, b->n_rows, s.json) || finish_output() != EXIT_OK))
        code = EXIT_RUNTIME;
    close_bench(b);
    return code;
}
