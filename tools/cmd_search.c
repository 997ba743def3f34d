/* cmd_search.c - `kvant search`: its command line.
 *
 * The actions are search_index.c's (build, info), search_query.c's and search_eval.c's. */
#include "args.h"
#include "command.h"
#include "interrupt.h"
#include "progress.h"
#include "search.h"

#include <string.h>

enum { MAX_FILES = 3, BATCH = 100, MOST_QUERIES = 100000 };

#define AT(member) offsetof(search_settings, member)

static bool take_spec(void *part, const char *value)
{
    search_settings *s = part;
    if (s->n_specs == SEARCH_MAX_SPECS)
        return complain("search: more than %d codecs are given", SEARCH_MAX_SPECS);
    s->specs[s->n_specs++] = value;
    return true;
}

static const arg_option options[] = {
    ARG_CALL('c', "codec", "SPEC", take_spec, metric /* the first member: the search_settings */,
             "turboquant-B with 1 to 8 bits per dimension (default turboquant-4),\n"
             "trellis-B with 2 to 4 bits (smaller errors, longer to build), int-B or\n"
             "rabitq-B. NAME:dims=N keeps the N principal dimensions, lists=N makes\n"
             "N inverted lists, rows=int8 adds 8 bits per dimension for --rerank.\n"
             "Repeat it for eval"),
    ARG_TEXT('m', "metric", "NAME", metric,
             "build, eval: ip (inner product, default), cosine or l2"),
    ARG_TEXT(0, "device", "NAME", device,
             "query, eval: cpu (default) or cuda, an NVIDIA GPU: the same results"),
    ARG_TEXT(0, "allow", "FILE", allow,
             "query: find only vectors whose ids FILE has, one per line; - is stdin"),
    ARG_U32('k', "neighbors", "K", 1, 10000, k, "query, eval: neighbours per query (default 10)"),
    ARG_U32(0, "probe", "N", 1, 65536, probe,
            "query, eval: inverted lists per query, at most all (default 8)"),
    ARG_TEXT(0, "centroids", "FILE", centroids,
             "build, eval: centroids of lists= (default: k-means)"),
    ARG_U32(0, "rerank", "N", 1, 1000000, rerank,
            "query, eval: rank the N best again by rows=int8, or, in eval without\n"
            "rows=int8, by the original vectors"),
    ARG_U32(0, "train", "N", 1, 10000000, train,
            "build, eval: learn the centre, and the tables of dims= and lists=, from\n"
            "the first N vectors (default 10000 with dims= or lists=, else none)"),
    ARG_U32(0, "batch", "N", 1, MOST_QUERIES, batch, "eval: queries per search (default 100)"),
    ARG_U32('n', "queries", "N", 1, MOST_QUERIES, queries,
            "query, eval: at most N queries (default 1000)"),
    ARG_U32('t', "threads", "N", 1, 256, threads, "threads (default: every CPU; eval: 1)"),
    ARG_SWITCH(0, "verify", verify,
               "query, info: read the whole file first and compare its checksum; query\n"
               "does so by itself with files of up to 256 MiB"),
    ARG_CALL(0, "json", NULL, progress_use_json, json, "one JSON array of flat objects"),
};

static const arg_spec spec = {
    .command = "search",
    .usage = "build VECTORS INDEX [options]\n       kvant search query INDEX QUERIES [options]\n   "
             "    kvant search info INDEX [options]\n"
             "       kvant search eval VECTORS QUERIES [options]",
    .about =
        "Nearest-neighbour search on compressed vectors. `build` writes an index, `query` prints "
        "the\n"
        "neighbours of each query, `eval` measures recall against an exact search, bytes and time "
        "per\nvector, `info` describes an index.",
    ARG_OPTIONS(options),
    .notes = "VECTORS and QUERIES are .npy (float32 or uint8), .fvecs, .bvecs, .fbin or .u8bin "
             "files. A\n"
             "vector's id is its place in the file.\n\n"
             "examples:\n  kvant search build base.npy base.kvidx\n  kvant search query base.kvidx "
             "queries.npy -k 10\n"
             "  kvant search eval base.npy queries.npy -c turboquant-4 -c turboquant-3:dims=256",
};

static const struct action {
    const char *name;
    int n_files;
    bool (*run)(const search_settings *s, const char *const *files);
} actions[] = { { "build", 2, search_build },
                { "query", 2, search_query },
                { "info", 1, search_info },
                { "eval", 2, search_eval } };
enum { N_ACTIONS = sizeof actions / sizeof *actions };

static const struct action *find_action(const char *word)
{
    for (size_t i = 0; i < N_ACTIONS; i++)
        if (strcmp(word, actions[i].name) == 0)
            return &actions[i];
    return NULL;
}

static int unknown_action(const char *word)
{
    const char *names[N_ACTIONS];
    for (size_t i = 0; i < N_ACTIONS; i++)
        names[i] = actions[i].name;
    return args_unknown_word("action", word, names, N_ACTIONS, "kvant search --help lists them");
}

/* Which actions take an option; zeros in its member: it was not given. */
static const struct {
    const char *name;
    size_t at, size;
    const char *actions;
} uses[] = {
#define USE(name, member, actions)                                                                 \
    { name, AT(member), sizeof((search_settings *)NULL)->member, actions }
    USE("--codec", n_specs, "build, eval"),
    USE("--metric", metric, "build, eval"),
    USE("--train", train, "build, eval"),
    USE("--device", device, "query, eval"),
    USE("--neighbors", k, "query, eval"),
    USE("--probe", probe, "query, eval"),
    USE("--rerank", rerank, "query, eval"),
    USE("--queries", queries, "query, eval"),
    USE("--batch", batch, "eval"),
    USE("--allow", allow, "query"),
    USE("--centroids", centroids, "build, eval"),
    USE("--threads", threads, "build, query, eval"),
    USE("--verify", verify, "query, info"),
#undef USE
};

static bool takes_options(const char *action, const search_settings *s)
{
    static const char zeros[sizeof(void *)];
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++)
        if (memcmp((const char *)s + uses[i].at, zeros, uses[i].size) != 0 &&
            strstr(uses[i].actions, action) == NULL)
            return complain("search %s takes no %s, which is for %s", action, uses[i].name,
                            uses[i].actions);
    return true;
}

static void set_defaults(search_settings *s, bool measures)
{
    s->device = s->device != NULL ? s->device : "cpu";
    s->k = s->k != 0 ? s->k : 10;
    s->batch = s->batch != 0 ? s->batch : BATCH;
    s->queries = s->queries != 0 ? s->queries : 1000;
    s->threads = s->threads != 0 ? s->threads : measures ? 1 : kvant_available_cpus();
}

/* Options stand before, between or behind the words. argv[0] is a word each time. */
static int read_words(int argc, char **argv, search_settings *s, const char **words, int *n)
{
    while (argc > 0) {
        int rest = 0;
        const int code = args_parse(&spec, argc, argv, s, &rest);
        if (code >= 0)
            return code;
        argc -= rest;
        argv += rest;
        if (argc > 0 && *n == MAX_FILES) {
            complain("search: '%s' is one word too many", argv[0]);
            return EXIT_USAGE;
        }
        if (argc > 0)
            words[(*n)++] = argv[0];
    }
    return -1;
}

int command_search(int argc, char **argv)
{
    static search_settings s;
    const char *words[MAX_FILES];
    int n = 0;
    const int code = read_words(argc, argv, &s, words, &n);
    if (code >= 0)
        return code;
    if (n == 0) {
        complain("search: the first word must be build, query, info or eval");
        hint("kvant search --help describes them");
        return EXIT_USAGE;
    }
    const struct action *action = find_action(words[0]);
    if (action == NULL)
        return unknown_action(words[0]);
    if (n != 1 + action->n_files) {
        complain("search %s takes %d file%s, not %d", action->name, action->n_files,
                 action->n_files > 1 ? "s" : "", n - 1);
        hint("kvant search --help shows which");
        return EXIT_USAGE;
    }
    if (!takes_options(action->name, &s))
        return EXIT_USAGE;
    set_defaults(&s, action->run == search_eval);
    if (strcmp(s.device, "cpu") != 0 && !search_on_gpu(&s)) {
        complain("search: --device must be cpu or cuda, not '%s'", s.device);
        return EXIT_USAGE;
    }
    interrupt_catch();
    const bool ok = action->run(&s, words + 1);
    return ok ? finish_output() : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
}
