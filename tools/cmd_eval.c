/* cmd_eval.c - `kvant eval`: the quality of KV cache configurations, all against one f16 run.
 *
 * Texts are cut and scored as llama-perplexity --kl-divergence does: chunks of the context's length, the
 * first token of each replaced by BOS when the model wants one, the second half scored. Chunks are the outer
 * loop and configurations the inner one, so the reference of one chunk is all that is held; contexts are made
 * anew each time, which costs far less than a chunk.
 */
#include "command.h"
#include "engine.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "score.h"
#include "stats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_FILE, OPT_CTX, OPT_CHUNKS, OPT_BATCH, OPT_JSON };

static const arg_option options[] = {
    ENGINE_OPTIONS,
    { OPT_FILE, 'f', "file", "FILE", "text to score; - reads standard input" },
    { OPT_CTX, 'c', "ctx", "N", "tokens of a chunk (default 2048)" },
    { OPT_CHUNKS, 0, "chunks", "N", "chunks to score (default: all of the text)" },
    { OPT_BATCH, 'b', "batch", "N", "tokens of a graph (default 512; up to 8: the kernels of decoding, slow)" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects" },
};

static const arg_spec spec = {
    .command = "eval",
    .usage = "-m MODEL -f TEXT [-c CTX] [--chunks N] [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about = "Measures what KV cache configurations cost in quality: perplexity, KL\n"
             "divergence to the f16 cache and agreement on the most probable token, scored\n"
             "as llama-perplexity --kl-divergence does. The f16 cache is always the first\n"
             "row.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "Ctrl-C prints what is complete.\n\nexample:\n"
             "  kvant eval -m model.gguf -f text.txt -c 2048 --chunks 4 \\\n"
             "    -k turboquant-4 -k turboquant-4 -v turboquant-3 --stock q8_0 --stock q4_0",
};

typedef struct settings {
    engine_options engine;
    const char *file;
    uint32_t n_ctx, n_chunks, n_batch;
    bool json;
} settings;

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    bool known = false;
    switch (id) {
    case OPT_FILE: s->file = value; return true;
    case OPT_CTX: return args_u32("--ctx", value, 8, 1 << 24, &s->n_ctx);
    case OPT_CHUNKS: return args_u32("--chunks", value, 1, 1 << 24, &s->n_chunks);
    case OPT_BATCH: return args_u32("--batch", value, 1, ENGINE_UBATCH, &s->n_batch);
    case OPT_JSON: return s->json = true;
    default: return engine_option(&s->engine, id, value, &known);
    }
}

typedef struct tally {
    const kv_config *config;
    double bits;
    double kv_bytes;
    double *nll, *kld; /* n_rows a chunk */
    size_t n_values, n_same, n_chunks;
    double step, step_error; /* of the mean KLD from the row before, token by token */
} tally;

typedef struct run {
    engine engine;
    const settings *settings;
    llama_token *tokens;
    size_t n_tokens, n_chunks;
    size_t n_ctx, first, n_rows; /* positions first .. first + n_rows - 1 of a chunk are scored */
    kv_config f16;
    tally tallies[MAX_CONFIGS + 1];
    size_t n_tallies;
    score_reference reference;
    score_value *values;
    struct llama_batch batch;
    kv_meter meter;
    progress progress;
} run;

static void fill_batch(run *r, size_t chunk, size_t start, size_t n)
{
    const llama_token *tokens = r->tokens + chunk * r->n_ctx;
    struct llama_batch *b = &r->batch;
    b->n_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        const size_t position = start + i;
        b->token[i] = tokens[position];
        b->pos[i] = (llama_pos)position;
        b->n_seq_id[i] = 1;
        b->seq_id[i][0] = 0;
        b->logits[i] = position >= r->first && position < r->first + r->n_rows;
    }
    const struct llama_vocab *vocab = ll.llama_model_get_vocab(r->engine.cpu_model);
    if (start == 0 && ll.llama_vocab_get_add_bos(vocab))
        b->token[0] = ll.llama_vocab_bos(vocab);
}

/* Scores the rows of the batch that was just decoded. */
static bool score_batch(run *r, struct llama_context *ctx, size_t chunk, size_t start, size_t n, bool define)
{
    const size_t from = start > r->first ? start : r->first;
    const size_t end = start + n < r->first + r->n_rows ? start + n : r->first + r->n_rows;
    if (from >= end)
        return true;
    const float *logits = ll.llama_get_logits(ctx);
    const llama_token *targets = r->tokens + chunk * r->n_ctx + from + 1;
    return logits != NULL && score_rows(&r->reference, from - r->first, define, logits, targets, end - from,
                                        r->engine.options.n_threads, r->values + (from - r->first));
}

static void add_values(run *r, tally *t)
{
    for (size_t i = 0; i < r->n_rows; i++) {
        t->nll[t->n_values] = r->values[i].nll;
        t->kld[t->n_values++] = r->values[i].kld;
        t->n_same += r->values[i].same_top;
    }
    t->n_chunks++;
}

/* A batch is one graph (at most ENGINE_UBATCH tokens): llama.cpp would cut a larger one at the same places, and this
 * way only the logits of one are held. */
static bool decode_chunk(run *r, tally *t, struct llama_context *ctx, size_t chunk)
{
    char label[128];
    configs_label(t->config, label, sizeof label);
    const size_t step = r->settings->n_batch;
    for (size_t start = 0; start < r->n_ctx; start += step) {
        const size_t n = r->n_ctx - start < step ? r->n_ctx - start : step;
        fill_batch(r, chunk, start, n);
        const int32_t status = ll.llama_decode(ctx, r->batch);
        if (interrupted())
            return false;
        if (status != 0 || !score_batch(r, ctx, chunk, start, n, t == r->tallies)) {
            complain("eval: %s: llama.cpp could not decode the batch (status %d)", label, (int)status);
            return false;
        }
        progress_add(&r->progress, (double)n, label);
    }
    return true;
}

static bool eval_chunk(run *r, tally *t, size_t chunk)
{
    const engine_context_options options = { .n_ctx = (uint32_t)r->n_ctx,
                                             .n_batch = r->settings->n_batch,
                                             .meter = &r->meter };
    struct llama_context *ctx = engine_context(&r->engine, t->config, &options);
    if (ctx == NULL)
        return false;
    const bool ok = decode_chunk(r, t, ctx, chunk);
    if (ok) {
        t->kv_bytes = engine_kv_bytes(&r->engine, t->config, &r->meter);
        add_values(r, t);
    }
    ll.llama_free(ctx);
    return ok;
}

static bool eval_all(run *r)
{
    progress_start(&r->progress, (double)(r->n_chunks * r->n_tallies * r->n_ctx));
    bool ok = true;
    for (size_t chunk = 0; chunk < r->n_chunks && ok; chunk++)
        for (size_t i = 0; i < r->n_tallies && ok; i++)
            ok = eval_chunk(r, &r->tallies[i], chunk);
    progress_end(&r->progress);
    return ok;
}

static bool load_tokens(run *r)
{
    size_t bytes = 0;
    char *text = read_text(r->settings->file, &bytes);
    if (text == NULL)
        return false;
    if (bytes > 0 && text[bytes - 1] == '\n')
        bytes--; /* as llama.cpp's -f does */
    r->tokens = engine_tokenize(&r->engine, text, bytes, TOKENS_TEXT, &r->n_tokens);
    free(text);
    if (r->tokens == NULL)
        return false;
    if (r->n_tokens < 2 * r->n_ctx) {
        complain("eval: %s has %zu tokens, a context of %zu needs at least %zu", r->settings->file, r->n_tokens,
                 r->n_ctx, 2 * r->n_ctx);
        hint("choose a smaller -c or a longer text");
        return false;
    }
    const size_t available = r->n_tokens / r->n_ctx, asked = r->settings->n_chunks;
    r->n_chunks = asked == 0 || asked > available ? available : asked;
    if (asked > available)
        complain("eval: %s has %zu chunks of %zu tokens, fewer than the %zu asked for", r->settings->file,
                 available, r->n_ctx, asked);
    return true;
}

static bool prepare_tallies(run *r)
{
    const kv_config *configs[MAX_CONFIGS + 1];
    r->n_tallies = configs_after_f16(&r->settings->engine.configs, &r->f16, configs);
    for (size_t i = 0; i < r->n_tallies; i++) {
        tally *t = &r->tallies[i];
        t->config = configs[i];
        if (!engine_bits(&r->engine, t->config, &t->bits))
            return false;
        t->nll = calloc(r->n_chunks * r->n_rows, sizeof *t->nll);
        t->kld = calloc(r->n_chunks * r->n_rows, sizeof *t->kld);
        if (t->nll == NULL || t->kld == NULL) {
            complain("eval: out of memory");
            return false;
        }
    }
    return true;
}

static bool prepare(run *r)
{
    r->n_ctx = r->settings->n_ctx;
    r->first = r->n_ctx / 2;
    r->n_rows = r->n_ctx - 1 - r->first;
    if (!engine_open(&r->engine, &r->settings->engine))
        return false;
    r->f16 = configs_f16();
    const struct llama_model *model = engine_model(&r->engine, &r->f16);
    if (model == NULL || !load_tokens(r) || !prepare_tallies(r))
        return false;
    const size_t n_vocab = (size_t)ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model));
    r->batch = ll.llama_batch_init((int32_t)ENGINE_UBATCH, 0, 1);
    r->values = calloc(r->n_rows, sizeof *r->values);
    if (r->values != NULL && r->batch.token != NULL && score_reference_create(&r->reference, r->n_rows, n_vocab))
        return true;
    complain("eval: out of memory for the reference of %zu rows x %zu tokens", r->n_rows, n_vocab);
    return false;
}

static void release(run *r)
{
    for (size_t i = 0; i < r->n_tallies; i++) {
        free(r->tallies[i].nll);
        free(r->tallies[i].kld);
    }
    if (r->batch.token != NULL)
        ll.llama_batch_free(r->batch);
    score_reference_free(&r->reference);
    free(r->values);
    free(r->tokens);
    engine_close(&r->engine);
}

static const report_column columns[] = {
    CONFIG_COLUMNS,
    { "bits", "bits", COLUMN_NUMBER, 2 },
    { "kv_bytes", "KV MiB", COLUMN_MIB, 2 },
    { "ppl", "ppl", COLUMN_NUMBER, 3 },
    { "kld_mean", "KLD mean", COLUMN_NUMBER, 5 },
    { "kld_se", "+-", COLUMN_NUMBER, 5 },
    { "kld_p99", "KLD 99%", COLUMN_NUMBER, 4 },
    { "top1", "top-1 %", COLUMN_PERCENT, 2 },
    { "chunks", "chunks", COLUMN_NUMBER, 0 },
    { "batch", NULL, COLUMN_NUMBER, 0 },
    { "kld_step", NULL, COLUMN_NUMBER, 5 },
    { "kld_step_se", NULL, COLUMN_NUMBER, 5 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

/* Both were scored on the same tokens, so their difference is known better than either: its error is that of the differences.
 * Before anything sorts the values. */
static bool compare_with_row_before(run *r)
{
    double *steps = malloc(r->n_chunks * r->n_rows * sizeof *steps);
    for (size_t i = 0; i < r->n_tallies && steps != NULL; i++) {
        tally *t = &r->tallies[i];
        const tally *before = i > 0 ? t - 1 : t;
        const size_t n = i > 0 ? t->n_values : 0; /* never more than the row before has */
        for (size_t j = 0; j < n; j++)
            steps[j] = t->kld[j] - before->kld[j];
        stats_mean(steps, n, &t->step, &t->step_error);
    }
    if (steps == NULL)
        complain("eval: out of memory");
    free(steps);
    return steps != NULL;
}

static void fill_row(const run *r, const tally *t, report_cell *row)
{
    double nll, nll_error, kld, kld_error;
    stats_mean(t->nll, t->n_values, &nll, &nll_error);
    stats_mean(t->kld, t->n_values, &kld, &kld_error);
    const report_cell measured[N_COLUMNS - N_CONFIG_COLUMNS] = {
        CELL_NUMBER(t->bits),
        CELL_NUMBER(t->kv_bytes),
        CELL_NUMBER(exp(nll)),
        CELL_NUMBER(kld),
        CELL_NUMBER(kld_error),
        CELL_NUMBER(stats_percentile(t->kld, t->n_values, 0.99)),
        CELL_NUMBER((double)t->n_same / (double)t->n_values),
        CELL_NUMBER(t->n_chunks),
        CELL_NUMBER(r->settings->n_batch),
        CELL_NUMBER(t->step),
        CELL_NUMBER(t->step_error),
    };
    configs_fill_cells(&r->settings->engine.configs, t->config, row);
    memcpy(row + N_CONFIG_COLUMNS, measured, sizeof measured);
}

/* Rows of configurations that completed no chunk say nothing and are left out. */
static bool print_results(run *r)
{
    report_cell cells[(MAX_CONFIGS + 1) * N_COLUMNS];
    size_t n = 0;
    if (!compare_with_row_before(r))
        return false;
    for (size_t i = 0; i < r->n_tallies; i++)
        if (r->tallies[i].n_chunks > 0)
            fill_row(r, &r->tallies[i], &cells[n++ * N_COLUMNS]);
    return report_print(columns, N_COLUMNS, cells, n, r->settings->json);
}

int command_eval(int argc, char **argv)
{
    settings s = { .n_ctx = 2048, .n_batch = ENGINE_UBATCH };
    int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (s.file == NULL) {
        complain("eval: no text given");
        hint("-f text.txt; scripts/fetch.py text makes one");
        return EXIT_USAGE;
    }
    if (!engine_options_finish(&s.engine, "eval"))
        return EXIT_USAGE;
    run *r = calloc(1, sizeof *r);
    if (r == NULL)
        return EXIT_RUNTIME;
    r->settings = &s;
    interrupt_catch();
    const bool prepared = prepare(r);
    const bool complete = prepared && eval_all(r);
    code = complete ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if ((complete || (prepared && interrupted())) && (!print_results(r) || finish_output() != EXIT_OK))
        code = EXIT_RUNTIME;
    release(r);
    free(r);
    return code;
}
