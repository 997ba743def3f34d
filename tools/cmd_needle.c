/* cmd_needle.c - `kvant needle`: whether the model still finds a fact in a long context, by
 * length of the context, depth of the fact and cache.
 *
 * Every configuration reads a text with several hidden sentences once. Then it is asked for one
 * sentence after another; each question is removed from the cache before the next one. The right
 * answer is scored token by token: it is exact when each of its tokens is the most probable, and
 * its log-probability is the sum over all tokens. A codec is compared only on facts that f16
 * finds. */
#include "command.h"
#include "engine.h"
#include "eval_state.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "os.h"
#include "plugin.h"
#include "needle_text.h"
#include "progress.h"
#include "report.h"
#include "text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LENGTHS = 16, MAX_TRIALS = 1000, MIN_CTX = 256, DEFAULT_LONGEST = 8192 };

typedef struct settings {
    engine_options engine;
    const char *file, *resume;
    uint32_t lengths[MAX_LENGTHS];
    size_t n_lengths;
    uint32_t n_needles, n_trials, seed;
    bool json;
} settings;
#define AT(member) offsetof(settings, member)

static bool read_lengths(void *user, const char *list)
{
    settings *s = user;
    return args_u32_list("--ctx", list, MIN_CTX, 1 << 24, s->lengths, MAX_LENGTHS, &s->n_lengths);
}

static const arg_option options[] = {
    ENGINE_OPTIONS(engine),
    ARG_TEXT('f', "file", "FILE", file,
             "text around the needles; - reads standard input (default: made here)"),
    ARG_CALL('c', "ctx", "N,N", read_lengths, engine, /* the first member: the settings */
             "context lengths (default: 512, 1024 ... the model's own limit, at\nmost 8192)"),
    ARG_U32('n', "needles", "N", 1, NEEDLE_MAX, n_needles,
            "hidden sentences per text, at as many depths (default 8, at most 24)"),
    ARG_U32('r', "trials", "N", 1, MAX_TRIALS, n_trials, "texts of every length (default 2)"),
    ARG_U32(0, "seed", "N", 0, UINT32_MAX / 2, seed, "seed of the first text (default 1)"),
    ARG_TEXT(0, "resume", "FILE", resume,
             "keep every complete result in FILE, and do not measure the results\nin it again"),
    ARG_CALL(0, "json", NULL, progress_use_json, json,
             "one JSON array of flat objects, one per length and depth"),
};

static const arg_spec spec = {
    .command = "needle",
    .usage = "-m MODEL [-c CTX,CTX...] [-n NEEDLES] [-r TRIALS] [--preset NAME]...\n"
             "                    [--config FILE]... [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about =
        "Hides numbers at several depths of texts of several lengths and asks for them at\n"
        "the end. The f16 cache is always the first line. 'of f16's %' leaves out the questions\n"
        "that the f16 cache misses.",
    ARG_OPTIONS(options),
    .notes =
        "The map has a character for each depth, from the beginning of the text on: the share of "
        "facts\nthat were found, 0 to 9 in tenths, # for all.\n\nCtrl-C prints all complete "
        "results; with --resume the same command continues.\n\nexample:\n"
        "  kvant needle -m model.gguf -c 1024,4096 --preset balanced --preset small --stock q4_0",
};

/* The score of an answer: nll is -ln p of all its tokens, and same_top says whether each token was
 * the most probable one. */
typedef score_value answer;

typedef struct run {
    engine engine;
    const settings *settings;
    char *haystack;
    kv_config f16;
    const kv_config *configs[MAX_CONFIGS + 1];
    double bits[MAX_CONFIGS + 1];
    size_t n_configs;
    uint32_t lengths[MAX_LENGTHS];
    size_t n_lengths;
    answer *answers;  /* [length][config][trial][needle] */
    uint32_t *trials; /* [length][config]: trials 0 to this number - 1 are complete */
    double *kv_bytes; /* [length][config], of the cache with the whole text in it */
    uint64_t keys[MAX_CONFIGS + 1];
    eval_state state;
    struct llama_batch batch;
    progress progress;
} run;

static answer *answers_of(const run *r, size_t length, size_t config, size_t trial)
{
    const settings *s = r->settings;
    return r->answers + ((length * r->n_configs + config) * s->n_trials + trial) * s->n_needles;
}

static uint32_t *trials_of(const run *r, size_t length, size_t config)
{
    return &r->trials[length * r->n_configs + config];
}

/* Adds one token's share of the answer. */
static void score(answer *a, const float *logits, size_t n_vocab, llama_token wanted)
{
    double sum = 0;
    size_t top = 0;
    for (size_t i = 1; i < n_vocab; i++)
        if (logits[i] > logits[top])
            top = i;
    for (size_t i = 0; i < n_vocab; i++)
        sum += exp(logits[i] - (double)logits[top]);
    a->same_top = a->same_top && top == (size_t)wanted;
    a->nll += log(sum) - (logits[wanted] - (double)logits[top]);
}

/* The question and all of the answer but its last token, which nothing follows. */
static bool ask(run *r, struct llama_context *ctx, const needle *asked, size_t position, answer *a)
{
    const size_t n = asked->n_question + asked->n_answer - 1;
    const size_t n_vocab = (size_t)ll.llama_vocab_n_tokens(
        ll.llama_model_get_vocab(engine_model(&r->engine, &r->f16)));
    struct llama_batch *b = &r->batch;
    engine_fill_batch(&r->engine, b, asked->question, position, n);
    for (size_t i = asked->n_question - 1; i < n; i++)
        b->logits[i] = 1;
    if (!engine_decode(ctx, *b))
        return false;
    const float *logits = ll.llama_get_logits(ctx);
    *a = (answer){ .same_top = true };
    for (size_t i = 0; i < asked->n_answer; i++)
        score(a, logits + i * n_vocab, n_vocab, asked->question[asked->n_question + i]);
    if (ll.llama_memory_seq_rm(ll.llama_get_memory(ctx), 0, (llama_pos)position, -1))
        return true;
    return complain("needle: a question cannot be removed from this model's cache, because the "
                    "model is recurrent or has a sliding window");
}

static bool try_text(run *r, needle_text *text, const kv_config *config, uint32_t n_ctx,
                     answer *answers, double *kv_bytes)
{
    kv_meter meter;
    const engine_context_options context = {
        .n_ctx = n_ctx, .n_batch = ENGINE_UBATCH, .n_outputs = NEEDLE_TOKENS, .meter = &meter
    };
    struct llama_context *ctx = engine_context(&r->engine, config, &context);
    if (ctx == NULL)
        return false;
    bool ok = engine_read(ctx, text->tokens, text->n_tokens, &r->progress, config->label);
    *kv_bytes = engine_kv_bytes(&r->engine, config, &meter);
    for (size_t i = 0; i < text->n_needles && ok; i++)
        ok = ask(r, ctx, &text->needles[i], text->n_tokens, &answers[i]);
    ll.llama_free(ctx);
    return ok;
}

/* A fingerprint of the text and of all questions, for which a result holds. The caller adds the
 * context's length. */
static uint64_t key_of_text(const needle_text *text)
{
    uint64_t key =
        kvant_fnv1a(FINGERPRINT_START, text->tokens, text->n_tokens * sizeof *text->tokens);
    for (size_t i = 0; i < text->n_needles; i++) {
        const needle *n = &text->needles[i];
        key = kvant_fnv1a(key, n->question, (n->n_question + n->n_answer) * sizeof *n->question);
    }
    return key;
}

/* All configurations read one text before the next is made. */
static bool try_length(run *r, size_t length, size_t trial)
{
    const settings *s = r->settings;
    needle_text text;
    /* The seed depends on this length only, so one file serves command lines with other lengths. */
    const uint32_t n_ctx = r->lengths[length],
                   seed = s->seed + (uint32_t)trial + MAX_TRIALS * n_ctx;
    bool ok = needle_text_make(&text, &r->engine, r->haystack, n_ctx, s->n_needles, seed);
    const uint64_t key = ok ? key_of_text(&text) : 0;
    for (size_t c = 0; c < r->n_configs && ok; c++) {
        answer *answers = answers_of(r, length, c, trial);
        double *kv_bytes = &r->kv_bytes[length * r->n_configs + c];
        if (eval_state_find(&r->state, r->keys[c], key, kv_bytes, answers))
            progress_add(&r->progress, (double)text.n_tokens, "what was kept");
        else
            ok = try_text(r, &text, r->configs[c], n_ctx, answers, kv_bytes) &&
                 eval_state_add(&r->state, r->keys[c], key, *kv_bytes, answers);
        *trials_of(r, length, c) += ok;
    }
    needle_text_free(&text);
    return ok;
}

static bool try_all(run *r)
{
    double total = 0;
    bool ok = true;
    for (size_t l = 0; l < r->n_lengths; l++)
        total += (double)r->lengths[l] * (double)r->n_configs * r->settings->n_trials;
    progress_start(&r->progress, total);
    for (size_t trial = 0; trial < r->settings->n_trials; trial++)
        for (size_t l = 0; l < r->n_lengths && ok; l++)
            ok = try_length(r, l, trial);
    progress_end(&r->progress);
    return ok;
}

static bool choose_lengths(run *r, const struct llama_model *model)
{
    const uint32_t limit = (uint32_t)ll.llama_model_n_ctx_train(model);
    r->n_lengths = r->settings->n_lengths;
    memcpy(r->lengths, r->settings->lengths, sizeof r->lengths);
    for (size_t i = 0; i < r->n_lengths; i++)
        if (r->lengths[i] > limit)
            return complain("needle: a context of %u tokens is longer than the model's limit of %u",
                            (unsigned)r->lengths[i], (unsigned)limit);
    for (uint32_t n = 512; r->settings->n_lengths == 0 && n <= limit && n <= DEFAULT_LONGEST;
         n *= 2)
        r->lengths[r->n_lengths++] = n;
    if (r->n_lengths == 0)
        complain("needle: the model's context of %u tokens is too short: the shortest text has 512",
                 (unsigned)limit);
    return r->n_lengths > 0;
}

static bool choose_configs(run *r)
{
    r->n_configs = configs_after_f16(&r->settings->engine.configs, &r->f16, r->configs);
    for (size_t c = 0; c < r->n_configs; c++)
        if (!engine_bits(&r->engine, r->configs[c], &r->bits[c]))
            return false;
    return true;
}

/* One file serves all lengths: a text's own key tells them apart. */
static bool open_state(run *r, const struct llama_model *model)
{
    if (r->settings->resume == NULL)
        return true;
    for (size_t c = 0; c < r->n_configs; c++)
        r->keys[c] = config_key(r->configs[c]);
    const base_key key = { .model = kvant_model_fingerprint(r->settings->engine.model),
                           .runtime = engine_runtime_fingerprint(&r->engine),
                           .n_batch = ENGINE_UBATCH,
                           .n_rows = r->settings->n_needles,
                           .n_vocab =
                               (uint64_t)ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model)) };
    return eval_state_open(&r->state, r->settings->resume, &key);
}

static bool prepare(run *r)
{
    const settings *s = r->settings;
    size_t bytes = 0;
    r->f16 = configs_f16();
    r->state.file = -1;
    if (s->file != NULL && (r->haystack = read_text(s->file, &bytes)) == NULL)
        return false;
    /* A cache whose first tokens are f16 itself would show less of its codec. */
    if (!os_set_default(PLUGIN_ENV_EXACT, "0") || !engine_open(&r->engine, &s->engine))
        return false;
    const struct llama_model *model = engine_model(&r->engine, &r->f16);
    if (model == NULL || !choose_lengths(r, model) || !choose_configs(r) || !open_state(r, model))
        return false;
    const size_t cells = r->n_lengths * r->n_configs;
    r->answers = calloc(cells * s->n_trials * s->n_needles, sizeof *r->answers);
    r->trials = calloc(cells, sizeof *r->trials);
    r->kv_bytes = calloc(cells, sizeof *r->kv_bytes);
    r->batch = ll.llama_batch_init(NEEDLE_TOKENS, 0, 1);
    if (r->answers != NULL && r->trials != NULL && r->kv_bytes != NULL && r->batch.token != NULL)
        return true;
    return complain("needle: out of memory");
}

/* Over complete trials and depths first .. end - 1. */
typedef struct summary {
    double exact, log_probability;
    double of_f16; /* share of what f16 found; NaN when it found nothing */
} summary;

static summary summarise(const run *r, size_t length, size_t config, size_t first, size_t end)
{
    const uint32_t n_trials = *trials_of(r, length, config);
    size_t found = 0, both = 0, known = 0;
    double sum = 0;
    for (size_t t = 0; t < n_trials; t++)
        for (size_t i = first; i < end; i++) {
            const answer *a = answers_of(r, length, config, t) + i,
                         *f16 = answers_of(r, length, 0, t) + i;
            found += a->same_top;
            known += f16->same_top;
            both += a->same_top && f16->same_top;
            sum -= a->nll;
        }
    const double n = (double)n_trials * (double)(end - first);
    return (summary){ (double)found / n, sum / n, known > 0 ? (double)both / (double)known : NAN };
}

typedef struct map {
    char text[NEEDLE_MAX + 1];
} map;

static map draw_map(const run *r, size_t length, size_t config)
{
    map m = { "" };
    for (size_t i = 0; i < r->settings->n_needles; i++) {
        const double exact = summarise(r, length, config, i, i + 1).exact;
        m.text[i] = exact == 1 ? '#' : (char)('0' + (int)(10 * exact));
    }
    return m;
}

static void add_row(const run *r, size_t length, size_t config, size_t first, size_t end,
                    const char *drawn, report_rows *row)
{
    const summary s = summarise(r, length, config, first, end);
    const double *kv_bytes = r->kv_bytes + length * r->n_configs; /* f16 is the first */
    report_row(row);
    configs_add_cells(r->configs[config], row);
    report_number(row, "bits", "codec bits", 2, r->bits[config]);
    report_number(row, "cache_bits", "bits", 2, 16 * kv_bytes[config] / kv_bytes[0]);
    report_number(row, "ctx", "ctx", 0, r->lengths[length]);
    report_number_as(row, COLUMN_MIB, "kv_bytes", NULL, 2, kv_bytes[config]);
    report_number(row, "depth", NULL, 3, (double)(first + end) / 2 / r->settings->n_needles);
    report_number(row, "trials", "texts", 0, *trials_of(r, length, config));
    report_number_as(row, COLUMN_PERCENT, "exact", "found %", 1, s.exact);
    report_number_as(row, COLUMN_PERCENT, "of_f16", "of f16's %", 1, s.of_f16);
    report_number(row, "log_probability", "ln p", 3, s.log_probability);
    report_text(row, NULL, "map", drawn);
}

/* The table has a line for each length and configuration; JSON also has an object for each depth.
 * Both leave out configurations without a complete trial. */
static bool print_results(const run *r)
{
    const size_t n_needles = r->settings->n_needles, step = r->settings->json ? 1 : n_needles;
    map *maps = calloc(r->n_lengths * r->n_configs, sizeof *maps), *drawn = maps;
    report_rows out = { .n_rows = 0 };
    if (maps == NULL)
        return complain("needle: out of memory");
    for (size_t l = 0; l < r->n_lengths; l++)
        for (size_t c = 0; c < r->n_configs; c++, drawn++) {
            if (*trials_of(r, l, c) == 0)
                continue;
            *drawn = draw_map(r, l, c);
            for (size_t i = 0; i < n_needles; i += step)
                add_row(r, l, c, i, i + step, drawn->text, &out);
        }
    const bool ok = report_print(&out, "needle", r->settings->json);
    free(maps);
    return ok;
}

static void release(run *r)
{
    if (r->batch.token != NULL)
        ll.llama_batch_free(r->batch);
    free(r->answers);
    free(r->trials);
    free(r->kv_bytes);
    free(r->haystack);
    eval_state_close(&r->state);
    engine_close(&r->engine);
}

int command_needle(int argc, char **argv)
{
    settings s = { .n_needles = 8, .n_trials = 2, .seed = 1 };
    int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (!engine_options_finish(&s.engine, "needle"))
        return EXIT_USAGE;
    static run only, *r = &only;
    r->settings = &s;
    interrupt_catch();
    const bool prepared = prepare(r);
    const bool complete = prepared && try_all(r);
    code = complete ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if ((complete || (prepared && interrupted())) && !print_results(r))
        code = EXIT_RUNTIME;
    release(r);
    return code;
}
