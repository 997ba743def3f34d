/* cmd_bench_cuda.c - `kvant bench cuda`: the time of decode attention on an NVIDIA GPU, beside a copy in the same run. */
#include "args.h"
#include "attention_cuda.h"
#include "command.h"
#include "interrupt.h"

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
    OPT_ROUNDS,
    OPT_DEVICE,
    OPT_LIBRARY,
    OPT_JSON
};
enum { MAX_LIST = 16, MAX_BATCH = 4096 };

static const arg_option options[] = {
    { OPT_K, 'k', "codec-k", "SPEC", "codec of keys, may be repeated (default: a list of common ones)" },
    { OPT_V, 'v', "codec-v", "SPEC", "codec of values (default: the one of the -k before it)" },
    { OPT_BATCH, 'b', "batch", "N", "sequences (default 1)" },
    { OPT_HEADS, 0, "heads", "N", "query heads (default 32)" },
    { OPT_KV_HEADS, 0, "kv-heads", "N", "kv heads (default 8)" },
    { OPT_DIM, 'd', "head-dim", "N", "numbers of a row: 64, 96, 128 or 256 (default 128)" },
    { OPT_TOKENS, 'n', "tokens", "N,N", "tokens of each sequence (default 32768,131072)" },
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
    .about = "Measures decode attention on an NVIDIA GPU: one query token a sequence over compressed\n"
             "pages in random order, bf16 queries and outputs, rotation included.",
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
    uint32_t batch, heads, kv_heads, dim, tokens[MAX_LIST], rounds, device;
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
    case OPT_ROUNDS: return args_u32("--rounds", value, 1, ATTENTION_MAX_ROUNDS, &s->rounds);
    case OPT_DEVICE: return args_u32("--device", value, 0, 1023, &s->device);
    case OPT_LIBRARY: s->library = value; return true;
    default: return s->json = progress_use_json();
    }
}

static bool check(const settings *s)
{
    if (s->heads % s->kv_heads == 0 && s->heads / s->kv_heads <= 64)
        return true;
    return complain("--heads %u must be a multiple of --kv-heads %u, at most 64 times as many", (unsigned)s->heads,
             (unsigned)s->kv_heads);
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
    { "rounds", NULL, COLUMN_NUMBER, 0 },
    { "bytes", NULL, COLUMN_NUMBER, 0 },
    { "microseconds", "us", COLUMN_NUMBER, 1 },
    { "gbytes_per_second", "GB/s", COLUMN_NUMBER, 0 },
    { "share_of_copy", "of copy", COLUMN_PERCENT, 0 },
    { "copy_gbytes_per_second", NULL, COLUMN_NUMBER, 0 },
    { "error", "error", COLUMN_NUMBER, 4 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static gpu device; /* that of the command */

static void fill_row(const attention_bench *b, const attention_entry *e, const attention_shape *s, report_cell *row)
{
    const double speed = e->subject.bytes / e->median;
    const report_cell cells[N_COLUMNS] = { CELL_TEXT(device.device),
                                           CELL_NUMBER(device.version / 10 / 100.0),
                                           CELL_TEXT(e->k),
                                           CELL_TEXT(e->v),
                                           CELL_NUMBER(s->batch),
                                           CELL_NUMBER(s->n_heads),
                                           CELL_NUMBER(s->n_kv_heads),
                                           CELL_NUMBER(s->head_dim),
                                           CELL_NUMBER(s->n_tokens),
                                           CELL_NUMBER(b->rounds),
                                           CELL_NUMBER(e->subject.bytes),
                                           CELL_NUMBER(1e6 * e->median),
                                           CELL_NUMBER(speed / 1e9),
                                           CELL_NUMBER(speed / b->bandwidth),
                                           CELL_NUMBER(b->bandwidth / 1e9),
                                           CELL_NUMBER(e->subject.error) };
    memcpy(row, cells, sizeof cells);
}

static bool create(attention_entry *e, const attention_inputs *in)
{
    return attention_cuda(&e->subject, in, &device, e->k, e->v);
}

static attention_shape shape_of(const settings *s, uint32_t n_tokens)
{
    return (attention_shape){ .head_dim = s->dim,
                              .n_heads = s->heads,
                              .n_kv_heads = s->kv_heads,
                              .n_tokens = n_tokens,
                              .n_queries = 1,
                              .batch = s->batch };
}

/* One cache after the other: two of them may not fit into the device's memory. */
static bool bench_all(attention_bench *b, const settings *s)
{
    double work = 0;
    if (!gpu_open(&device, s->library, s->device) || !((b->bandwidth = gpu_copy_bandwidth(&device, s->rounds)) > 0))
        return false;
    fprintf(stderr, "%s, a copy reads and writes %.2f TB/s\n", device.device, b->bandwidth / 1e12);
    for (size_t i = 0; i < s->n_tokens; i++) {
        const attention_shape shape = shape_of(s, s->tokens[i]);
        work += (double)b->n_entries * attention_work(b, &shape);
    }
    progress_start(&b->progress, work);
    bool ok = true;
    for (size_t i = 0; i < s->n_tokens * b->n_entries && ok; i++) {
        const attention_shape shape = shape_of(s, s->tokens[i / b->n_entries]);
        ok = attention_measure(b, &shape, &b->entries[i % b->n_entries], 1);
    }
    progress_end(&b->progress);
    return ok;
}

int bench_cuda(int argc, char **argv)
{
    static settings s = {
        .batch = 1, .heads = 32, .kv_heads = 8, .dim = 128, .tokens = { 32768, 131072 }, .n_tokens = 2, .rounds = 31
    };
    const int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (!check(&s))
        return EXIT_USAGE;
    codec_pairs_default(&s.pairs, usual, sizeof usual / sizeof *usual);
    attention_bench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return EXIT_RUNTIME;
    *b = (attention_bench){ .columns = columns,
                            .n_columns = N_COLUMNS,
                            .rounds = s.rounds,
                            .create = create,
                            .fill_row = fill_row,
                            .n_entries = s.pairs.n };
    for (size_t i = 0; i < s.pairs.n; i++)
        b->entries[i] = (attention_entry){ .library = "kvant", .k = s.pairs.items[i].k, .v = s.pairs.items[i].v };
    interrupt_catch();
    return attention_finish(b, bench_all(b, &s), s.json);
}
