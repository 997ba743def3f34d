/* cmd_bench_model.c - `kvant bench model`: prefill and decode speed with the cache filled to given
 * depths.
 *
 * Tokens are random, as in llama-bench. Every configuration keeps one context, fills it to each
 * depth once and cuts it back to this depth after every measurement. A round measures all
 * configurations before the next round begins, so a change in the machine's speed meets them alike.
 * The result is the median of a configuration's rounds. */
#include "command.h"
#include "engine.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "stats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTHS = 16, MAX_ROUNDS = 100 };

typedef struct settings {
    engine_options engine;
    uint32_t depths[MAX_DEPTHS];
    size_t n_depths;
    uint32_t n_prefill, n_decode, n_rounds;
    bool json;
} settings;
#define AT(member) offsetof(settings, member)

static bool parse_depths(void *user, const char *text)
{
    settings *s = user;
    return args_u32_list("--depth", text, 0, 1 << 24, s->depths, MAX_DEPTHS, &s->n_depths);
}

static const arg_option options[] = {
    ENGINE_OPTIONS(engine),
    ARG_CALL('d', "depth", "N,N", parse_depths, engine, /* the first member: the settings */
             "tokens in the cache before measuring (default 0)"),
    ARG_U32('p', "prefill", "N", 0, 1 << 20, n_prefill,
            "tokens to prefill, 0 to skip (default 512)"),
    ARG_U32('n', "decode", "N", 0, 1 << 20, n_decode,
            "tokens to decode one by one, 0 to skip (default 32)"),
    ARG_U32('r', "rounds", "N", 1, MAX_ROUNDS, n_rounds,
            "rounds, of which the median is given (default 3)"),
    ARG_CALL(0, "json", NULL, progress_use_json, json, "one JSON array of flat objects"),
};

static const arg_spec spec = {
    .command = "bench model",
    .usage = "-m MODEL [-d DEPTHS] [-p N] [-n N] [-r ROUNDS] [--preset NAME]...\n"
             "                         [--config FILE]... [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about = "Measures tokens per second of a whole model: prefill of N tokens and decode of\n"
             "N tokens, both starting with the cache filled to a depth.",
    ARG_OPTIONS(options),
    .notes =
        "Ctrl-C prints all complete results.\n\nexample:\n"
        "  kvant bench model -m model.gguf -d 0,4096 --preset balanced --stock f16 --stock q4_0",
};

typedef struct subject {
    const kv_config *config;
    struct llama_context *ctx;
    uint32_t depth; /* tokens in the cache */
    double prefill_tps[MAX_ROUNDS], decode_tps[MAX_ROUNDS];
    size_t n_rounds; /* complete at the present depth */
} subject;

typedef struct bench {
    engine engine;
    const settings *settings;
    subject subjects[MAX_CONFIGS];
    size_t n_subjects;
    report_rows report;
    uint32_t seed;
    progress progress;
} bench;

/* Numerical Recipes' generator: which tokens are drawn must not depend on the C library. */
static llama_token random_token(bench *b, int32_t n_vocab)
{
    b->seed = b->seed * 1664525u + 1013904223u;
    return (llama_token)((b->seed >> 8) % (uint32_t)n_vocab);
}

/* Decodes n random tokens in batches of at most step; false when it failed or was interrupted. */
static bool feed(bench *b, subject *s, uint32_t n, uint32_t step, const char *what)
{
    llama_token tokens[ENGINE_UBATCH];
    const struct llama_model *model = engine_model(&b->engine, s->config);
    const int32_t n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model));
    for (uint32_t done = 0; done < n;) {
        const uint32_t now = n - done < step ? n - done : step;
        for (uint32_t i = 0; i < now; i++)
            tokens[i] = random_token(b, n_vocab);
        if (!engine_decode(s->ctx, ll.llama_batch_get_one(tokens, (int32_t)now)))
            return false;
        done += now;
        progress_add(&b->progress, now, what);
    }
    ll.llama_synchronize(s->ctx);
    return true;
}

static bool fill_to(bench *b, subject *s, uint32_t depth, const char *what)
{
    const uint32_t from = s->depth;
    s->depth = depth;
    return depth <= from || feed(b, s, depth - from, ENGINE_UBATCH, what);
}

/* Cuts the cache back to the depth. A sliding window has forgotten cells that it would need then,
 * so such a cache is emptied and filled again. */
static bool cut_back(bench *b, subject *s, const char *what)
{
    const llama_memory_t memory = ll.llama_get_memory(s->ctx);
    const bool windowed = ll.llama_model_n_swa(engine_model(&b->engine, s->config)) > 0;
    if (!windowed && ll.llama_memory_seq_rm(memory, 0, (llama_pos)s->depth, -1))
        return true;
    const uint32_t depth = s->depth;
    ll.llama_memory_clear(memory, true);
    s->depth = 0;
    return fill_to(b, s, depth, what);
}

/* Tokens a second of feeding n tokens, or NaN in *tps when n is 0. */
static bool time_feed(bench *b, subject *s, uint32_t n, uint32_t step, const char *what,
                      double *tps)
{
    *tps = NAN;
    if (n == 0)
        return true;
    const double start = monotonic_seconds();
    if (!feed(b, s, n, step, what))
        return false;
    *tps = n / (monotonic_seconds() - start);
    return cut_back(b, s, what);
}

static bool measure(bench *b, subject *s)
{
    const char *label = s->config->label;
    double prefill, decode;
    if (!time_feed(b, s, b->settings->n_prefill, ENGINE_UBATCH, label, &prefill) ||
        !time_feed(b, s, b->settings->n_decode, 1, label, &decode))
        return false;
    s->prefill_tps[s->n_rounds] = prefill;
    s->decode_tps[s->n_rounds++] = decode;
    return true;
}

static void add_row(bench *b, subject *s, uint32_t depth)
{
    double *prefill = s->prefill_tps, *decode = s->decode_tps;
    const size_t n = s->n_rounds;
    report_rows *row = &b->report;
    report_row(row);
    configs_add_cells(s->config, row);
    report_number(row, "depth", "depth", 0, depth);
    report_number(row, "prefill_tps", "prefill t/s", 1, stats_percentile(prefill, n, 0.5));
    report_number(row, "decode_tps", "decode t/s", 1, stats_percentile(decode, n, 0.5));
    report_number(row, "rounds", "rounds", 0, (double)n);
    /* The slowest and the fastest round: a difference inside them is none. */
    report_number(row, "prefill_low", NULL, 0, stats_percentile(prefill, n, 0));
    report_number(row, "prefill_high", NULL, 0, stats_percentile(prefill, n, 1));
    report_number(row, "decode_low", NULL, 0, stats_percentile(decode, n, 0));
    report_number(row, "decode_high", NULL, 0, stats_percentile(decode, n, 1));
}

static bool bench_depth(bench *b, uint32_t depth)
{
    bool ok = true;
    for (size_t i = 0; i < b->n_subjects && ok; i++) {
        subject *s = &b->subjects[i];
        s->n_rounds = 0;
        ok = fill_to(b, s, depth, s->config->label);
    }
    for (uint32_t round = 0; round < b->settings->n_rounds && ok; round++)
        for (size_t i = 0; i < b->n_subjects && ok; i++)
            ok = measure(b, &b->subjects[i]);
    for (size_t i = 0; i < b->n_subjects; i++)
        if (b->subjects[i].n_rounds > 0)
            add_row(b, &b->subjects[i], depth);
    return ok;
}

/* One token through every context first: the first graph of a context pays for allocations. */
static bool warm_up(bench *b, subject *s)
{
    return feed(b, s, 1, 1, "warming up") && cut_back(b, s, "warming up");
}

static bool open_subjects(bench *b)
{
    const settings *s = b->settings;
    const uint32_t longest = s->n_prefill > s->n_decode ? s->n_prefill : s->n_decode;
    const engine_context_options context = { .n_ctx = s->depths[s->n_depths - 1] + longest,
                                             .n_batch = ENGINE_UBATCH,
                                             .n_outputs = 1 };
    for (size_t i = 0; i < s->engine.configs.n; i++) {
        subject *added = &b->subjects[b->n_subjects++];
        added->config = &s->engine.configs.items[i];
        added->ctx = engine_context(&b->engine, added->config, &context);
        if (added->ctx == NULL || !warm_up(b, added))
            return false;
    }
    return true;
}

static double total_tokens(const settings *s)
{
    const double each = (double)s->n_rounds * (s->n_prefill + s->n_decode);
    return (double)s->engine.configs.n *
           ((double)s->n_depths * each + s->depths[s->n_depths - 1] + 1);
}

static bool bench_all(bench *b)
{
    const settings *s = b->settings;
    if (!engine_open(&b->engine, &s->engine))
        return false;
    progress_start(&b->progress, total_tokens(s));
    bool ok = open_subjects(b);
    for (size_t i = 0; i < s->n_depths && ok; i++)
        ok = bench_depth(b, s->depths[i]);
    progress_end(&b->progress);
    return ok;
}

static void release(bench *b)
{
    for (size_t i = 0; i < b->n_subjects; i++)
        if (b->subjects[i].ctx != NULL)
            ll.llama_free(b->subjects[i].ctx);
    report_free(&b->report);
    engine_close(&b->engine);
}

int bench_model(int argc, char **argv)
{
    settings s = { .n_depths = 1, .n_prefill = 512, .n_decode = 32, .n_rounds = 3 };
    int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (s.n_prefill == 0 && s.n_decode == 0) {
        complain("bench model: -p 0 and -n 0 leave nothing to measure");
        return EXIT_USAGE;
    }
    if (!engine_options_finish(&s.engine, "bench model"))
        return EXIT_USAGE;
    static bench only, *b = &only;
    b->settings = &s;
    interrupt_catch();
    const bool ok = bench_all(b);
    code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if ((ok || interrupted()) && !report_print(&b->report, "bench model", s.json))
        code = EXIT_RUNTIME;
    release(b);
    return code;
}
