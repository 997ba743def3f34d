/* cmd_bench_attention.c - `kvant bench attention`: the time of attention alone, beside ggml's flash attention and the
 * machine's memory bandwidth, all measured in one run. */
#include "args.h"
#include "attention_bench.h"
#include "command.h"
#include "interrupt.h"
#include "machine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_K, OPT_V, OPT_STOCK, OPT_LEVELS, OPT_DIMS, OPT_GROUPS, OPT_TOKENS, OPT_QUERIES, OPT_KV_HEADS };
enum { OPT_THREADS = 50, OPT_ROUNDS, OPT_RUNTIME, OPT_JSON };
enum { MAX_LIST = 16, MAX_ROUNDS = 101 };

static const arg_option options[] = {
    { OPT_K, 'k', "codec-k", "SPEC", "codec of keys, may be repeated (default: a list of common ones)" },
    { OPT_V, 'v', "codec-v", "SPEC", "codec of values (default: the one of the -k before it)" },
    { OPT_STOCK, 0, "stock", "TYPE",
      "ggml's flash attention on f16, q8_0, q4_0, ..., may be repeated\n"
      "(default: these three). f16 is always there; none leaves all out" },
    { OPT_LEVELS, 0, "levels", "A,B", "CPU levels of kvant (default: the one in use); ggml chooses its own" },
    { OPT_DIMS, 'd', "head-dim", "N,N", "numbers of a row (default 128)" },
    { OPT_GROUPS, 'g', "gqa", "N,N", "query heads of a kv head (default 4)" },
    { OPT_TOKENS, 'n', "tokens", "N,N", "tokens in the cache (default 4096,32768)" },
    { OPT_QUERIES, 'q', "queries", "N,N",
      "query tokens, the last ones of the cache (default 1,512). More than 8\n"
      "are measured on the shortest cache only, but with --tokens given" },
    { OPT_KV_HEADS, 0, "kv-heads", "N", "kv heads (default 2)" },
    { OPT_THREADS, 't', "threads", "N", "threads (default: CPUs this process may use)" },
    { OPT_ROUNDS, 'r', "rounds", "N", "rounds, of which the median is given (default 5)" },
    { OPT_RUNTIME, 0, "runtime", "DIR", "folder of llama.cpp's libraries, which ggml is one of" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects" },
};

static const arg_spec spec = {
    .command = "bench attention",
    .usage = "[-k SPEC [-v SPEC]]... [--stock TYPE]... [-d DIMS] [-g GROUPS] [-n TOKENS] [-q QUERIES]",
    .about = "Measures attention alone: one query token (decode) and many (prefill, causal) on long\n"
             "caches, for codecs and for ggml's flash attention, beside the bandwidth of memory.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "Each line is the time of one layer. Decode goes around enough layers to exceed the level 2\n"
             "caches 16 times; a level 3 cache may still hold them. GB/s are bytes of keys and values as they\n"
             "are stored; 'of memory' is their share of what plain reading reaches, over a buffer of four\n"
             "level 3 caches where 2 GiB suffice. 'x f16' says how many times faster than ggml's f16 it is.\n"
             "Rows are normally distributed. Ctrl-C prints what is complete.\n\nexample:\n"
             "  kvant bench attention -k turboquant-4 -k int-4 -n 32768 -q 1 --levels avx2,avx512vnni",
};

static const char *const usual[] = { "int-4", "bdr-4", "turboquant-4", "octopus-4", "hqmq-s96r4" };
static const char *const usual_stock[] = { "f16", "q8_0", "q4_0" };

typedef struct settings {
    codec_pairs pairs;
    const char *stock[ATTENTION_MAX_STOCK];
    size_t n_stock;
    bool no_stock, json, tokens_given, queries_given;
    kvant_cpu_level levels[ATTENTION_MAX_LEVELS];
    size_t n_levels;
    uint32_t dims[MAX_LIST], groups[MAX_LIST], tokens[MAX_LIST], queries[MAX_LIST];
    size_t n_dims, n_groups, n_tokens, n_queries;
    uint32_t kv_heads, threads, rounds;
    const char *runtime;
} settings;

static bool add_stock(settings *s, const char *value)
{
    if (strcmp(value, "none") == 0)
        return s->no_stock = true;
    if (s->n_stock == 0)
        s->stock[s->n_stock++] = "f16"; /* first: what the others are compared with */
    if (strcmp(value, "f16") == 0)
        return true;
    if (s->n_stock == ATTENTION_MAX_STOCK)
        return complain("more than %d types of --stock", ATTENTION_MAX_STOCK);
    s->stock[s->n_stock++] = value;
    return true;
}

static bool set_levels(settings *s, const char *text)
{
    char word[32];
    s->n_levels = 0;
    for (const char *p = text;; p++) {
        const size_t n = strcspn(p, ",");
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        kvant_cpu_level *level = &s->levels[s->n_levels];
        if (s->n_levels++ == ATTENTION_MAX_LEVELS || kvant_cpu_level_from_name(word, level) != KVANT_OK)
            return complain("--levels: '%s' is not a list of CPU levels: c, avx2, avx512, ...", text);
        if (kvant_set_cpu_level(*level) != KVANT_OK)
            return complain("--levels: this machine has no %s; kvant --version names its best level", word);
        *level = kvant_get_cpu_level(); /* auto has a name, too */
        p += n;
        if (*p == 0)
            return true;
    }
}

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    switch (id) {
    case OPT_K: return codec_pairs_add_k(&s->pairs, value);
    case OPT_V: return codec_pairs_add_v(&s->pairs, value);
    case OPT_STOCK: return add_stock(s, value);
    case OPT_LEVELS: return set_levels(s, value);
    case OPT_DIMS: return args_u32_list("--head-dim", value, 1, KVANT_MAX_HEAD_DIM, s->dims, MAX_LIST, &s->n_dims);
    case OPT_GROUPS: return args_u32_list("--gqa", value, 1, 64, s->groups, MAX_LIST, &s->n_groups);
    case OPT_TOKENS:
        s->tokens_given = true;
        return args_u32_list("--tokens", value, 64, 1 << 22, s->tokens, MAX_LIST, &s->n_tokens);
    case OPT_QUERIES:
        s->queries_given = true;
        return args_u32_list("--queries", value, 1, 4096, s->queries, MAX_LIST, &s->n_queries);
    case OPT_KV_HEADS: return args_u32("--kv-heads", value, 1, 128, &s->kv_heads);
    case OPT_THREADS: return args_u32("--threads", value, 1, 512, &s->threads);
    case OPT_ROUNDS: return args_u32("--rounds", value, 1, MAX_ROUNDS, &s->rounds);
    case OPT_RUNTIME: s->runtime = value; return true;
    default: return s->json = progress_use_json();
    }
}

static const report_column columns[] = {
    { "library", "library", COLUMN_TEXT, 0 },
    { "k", "K", COLUMN_TEXT, 0 },
    { "v", "V", COLUMN_TEXT, 0 },
    { "level", "level", COLUMN_TEXT, 0 },
    { "head_dim", "head_dim", COLUMN_NUMBER, 0 },
    { "gqa", "gqa", COLUMN_NUMBER, 0 },
    { "kv_heads", NULL, COLUMN_NUMBER, 0 },
    { "tokens", "tokens", COLUMN_NUMBER, 0 },
    { "queries", "queries", COLUMN_NUMBER, 0 },
    { "threads", NULL, COLUMN_NUMBER, 0 },
    { "layers", NULL, COLUMN_NUMBER, 0 },
    { "bytes", NULL, COLUMN_NUMBER, 0 },
    { "microseconds", "us", COLUMN_NUMBER, 0 },
    { "gbytes_per_second", "GB/s", COLUMN_NUMBER, 2 },
    { "times_f16", "x f16", COLUMN_NUMBER, 2 },
    { "share_of_bandwidth", "of memory", COLUMN_PERCENT, 0 },
    { "read_gbytes_per_second", NULL, COLUMN_NUMBER, 0 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

/* f16 of ggml, where it is measured, is the first entry. */
static void fill_row(const attention_bench *b, const attention_entry *e, const attention_shape *shape,
                     report_cell *row)
{
    const bool stock = e->level == KVANT_CPU_AUTO;
    const double f16 = b->entries[0].level == KVANT_CPU_AUTO ? b->entries[0].median : NAN;
    const double speed = e->subject.bytes / e->median;
    const report_cell cells[N_COLUMNS] = { CELL_TEXT(e->library),
                                           CELL_TEXT(e->k),
                                           CELL_TEXT(e->v),
                                           CELL_TEXT(stock ? NULL : kvant_cpu_level_name(e->level)),
                                           CELL_NUMBER(shape->head_dim),
                                           CELL_NUMBER(shape->n_heads / shape->n_kv_heads),
                                           CELL_NUMBER(shape->n_kv_heads),
                                           CELL_NUMBER(shape->n_tokens),
                                           CELL_NUMBER(shape->n_queries),
                                           CELL_NUMBER(shape->n_threads),
                                           CELL_NUMBER(e->subject.n_layers),
                                           CELL_NUMBER(e->subject.bytes),
                                           CELL_NUMBER(1e6 * e->median),
                                           CELL_NUMBER(speed / 1e9),
                                           CELL_NUMBER(f16 / e->median),
                                           CELL_NUMBER(speed / b->bandwidth),
                                           CELL_NUMBER(b->bandwidth / 1e9) };
    memcpy(row, cells, sizeof cells);
}

#ifndef KVANT_HAVE_LLAMA
bool attention_ggml_knows(const char *type)
{
    return type != NULL;
}

bool attention_ggml_open(const char *runtime, uint32_t n_threads)
{
    (void)runtime, (void)n_threads;
    complain("bench attention: this build has no llama.cpp binding, so there is no ggml to compare with");
    return hint("--stock none measures kvant alone; or configure with -DKVANT_LLAMA_SRC=DIR");
}

bool attention_ggml(attention_subject *subject, const attention_inputs *inputs, const char *type)
{
    return subject != NULL && inputs != NULL && attention_ggml_knows(type);
}

void attention_ggml_close(void)
{
}
#endif

static bool create(attention_entry *e, const attention_inputs *in)
{
    return e->level == KVANT_CPU_AUTO ? attention_ggml(&e->subject, in, e->k)
                                      : attention_kvant(&e->subject, in, e->k, e->v, e->level);
}

static void list_entries(attention_bench *b, const settings *s)
{
    for (size_t i = 0; i < s->n_stock; i++)
        b->entries[b->n_entries++] = (attention_entry){ .library = "ggml", .k = s->stock[i], .v = s->stock[i] };
    for (size_t i = 0; i < s->pairs.n; i++)
        for (size_t l = 0; l < s->n_levels; l++)
            b->entries[b->n_entries++] = (attention_entry){
                .library = "kvant", .k = s->pairs.items[i].k, .v = s->pairs.items[i].v, .level = s->levels[l]
            };
}

/* Shapes one after another; false when there is none left. */
static bool next_shape(const settings *s, size_t *i, attention_shape *shape)
{
    const size_t n = s->n_dims * s->n_groups * s->n_queries * s->n_tokens;
    while (*i < n) {
        const size_t at = (*i)++, rest = at / s->n_tokens;
        *shape = (attention_shape){ .n_tokens = s->tokens[at % s->n_tokens],
                                    .n_queries = s->queries[rest % s->n_queries],
                                    .n_heads = s->groups[rest / s->n_queries % s->n_groups] * s->kv_heads,
                                    .head_dim = s->dims[rest / s->n_queries / s->n_groups],
                                    .n_kv_heads = s->kv_heads,
                                    .batch = 1,
                                    .n_threads = s->threads };
        const bool asked = shape->n_queries <= 8 || s->tokens_given || at % s->n_tokens == 0;
        if (asked && shape->n_queries <= shape->n_tokens)
            return true;
    }
    return false;
}

static bool bench_all(attention_bench *b, const settings *s)
{
    attention_shape shape;
    double work = 0;
    size_t buffer;
    if (s->n_stock > 0 && !attention_ggml_open(s->runtime, s->threads))
        return false;
    b->bandwidth = machine_read_bandwidth(s->threads, &buffer);
    if (!(b->bandwidth > 0))
        return complain("no memory to measure the bandwidth of memory");
    fprintf(stderr, "%u threads read %zu MiB at %.1f GB/s; the last cache has %zu MiB\n", (unsigned)s->threads,
            buffer >> 20, b->bandwidth / 1e9, machine_last_cache() >> 20);
    for (size_t i = 0; next_shape(s, &i, &shape);)
        work += (double)b->n_entries * attention_work(b, &shape);
    progress_start(&b->progress, work);
    bool ok = true;
    for (size_t i = 0; ok && next_shape(s, &i, &shape);)
        ok = attention_measure(b, &shape, b->entries, b->n_entries);
    progress_end(&b->progress);
    return ok;
}

static void fill_defaults(settings *s)
{
    codec_pairs_default(&s->pairs, usual, sizeof usual / sizeof *usual);
    if (s->n_stock == 0 && !s->no_stock)
        for (; s->n_stock < sizeof usual_stock / sizeof *usual_stock; s->n_stock++)
            s->stock[s->n_stock] = usual_stock[s->n_stock];
    if (s->n_levels == 0)
        s->levels[s->n_levels++] = kvant_get_cpu_level();
    if (s->threads == 0)
        s->threads = machine_cpus();
}

static bool check(const settings *s)
{
    if (s->no_stock && s->n_stock > 0)
        return complain("--stock none beside --stock %s", s->stock[0]);
    for (size_t i = 0; i < s->n_stock; i++)
        if (!attention_ggml_knows(s->stock[i]))
            return false;
    for (size_t i = 0; s->queries_given && i < s->n_tokens; i++)
        for (size_t j = 0; j < s->n_queries; j++)
            if (s->queries[j] > s->tokens[i]) {
                complain("--queries %u are more than --tokens %u", (unsigned)s->queries[j], (unsigned)s->tokens[i]);
                return hint("queries are the last tokens of the cache");
            }
    return true;
}

int bench_attention(int argc, char **argv)
{
    static settings s = { .dims = { 128 },
                          .groups = { 4 },
                          .tokens = { 4096, 32768 },
                          .queries = { 1, 512 },
                          .n_dims = 1,
                          .n_groups = 1,
                          .n_tokens = 2,
                          .n_queries = 2,
                          .kv_heads = 2,
                          .rounds = 5 };
    const int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (!check(&s))
        return EXIT_USAGE;
    fill_defaults(&s);
    attention_bench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return EXIT_RUNTIME;
    *b = (attention_bench){
        .columns = columns, .n_columns = N_COLUMNS, .rounds = s.rounds, .create = create, .fill_row = fill_row
    };
    interrupt_catch();
    list_entries(b, &s);
    const bool ok = bench_all(b, &s);
    attention_ggml_close();
    return attention_finish(b, ok, s.json);
}
