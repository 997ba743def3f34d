/* cmd_eval.c - `kvant eval`: the quality of KV cache configurations, all against one f16 run.
 *
 * Options only: eval_run.c measures, eval_rows.c prints, eval_values.c keeps single values. Texts are cut and scored as llama-perplexity --kl-divergence does: chunks of
 * the context's length, the first token of each replaced by BOS when the model wants one, the second half scored.
 */
#include "command.h"
#include "eval_run.h"
#include "interrupt.h"
#include "spread.h"

#include <stdlib.h>
#include <string.h>

enum {
    OPT_FILE,
    OPT_CTX,
    OPT_FROM,
    OPT_CHUNKS,
    OPT_SPREAD,
    OPT_SKIP,
    OPT_BATCH,
    OPT_BY_POSITION,
    OPT_RESUME,
    OPT_BASE_CACHE,
    OPT_VALUES,
    OPT_WIDE,
    OPT_JSON,
    OPT_CSV
};

static const arg_option options[] = {
    ENGINE_OPTIONS,
    { OPT_FILE, 'f', "file", "FILE", "text to score; - reads standard input; may be repeated" },
    { OPT_CTX, 'c', "ctx", "N", "tokens of a chunk, up to the model's own limit (default 2048)" },
    { OPT_FROM, 0, "from", "N", "first position that is scored (default: half of the context)" },
    { OPT_CHUNKS, 0, "chunks", "N", "chunks of every text to score, or all (default 4)" },
    { OPT_SPREAD, 0, "spread", "N",
      "take the chunks from N equal parts of every text in turn, not from\nits beginning alone (default 1)" },
    { OPT_SKIP, 0, "skip", "N", "chunks of every text to leave out first (default 0)" },
    { OPT_BATCH, 'b', "batch", "N", "tokens of a graph (default 512; up to 8: the kernels of decoding, slow)" },
    { OPT_BY_POSITION, 0, "by-position", "N", "N rows a configuration, each of a part of the positions" },
    { OPT_RESUME, 0, "resume", "FILE",
      "keep every complete chunk there, and do not compute again what\nthe file has" },
    { OPT_BASE_CACHE, 0, "base-cache", "DIR",
      "keep the f16 run of every chunk there: 2 bytes a scored token and\n"
      "word of the vocabulary" },
    { OPT_VALUES, 0, "values", "FILE",
      "keep the value of every scored token there: a safetensors file,\n"
      "tensors kld.I and nll.I [chunks, positions] of the I-th row" },
    { OPT_WIDE, 0, "wide", NULL, "a table with percentiles of the divergence, too" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects; progress as JSON lines on stderr" },
    { OPT_CSV, 0, "csv", NULL, "the same as CSV" },
};

static const arg_spec spec = {
    .command = "eval",
    .usage = "-m MODEL -f TEXT [-c CTX] [--chunks N] [--preset NAME]... [--config FILE]...\n"
             "                  [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about = "Measures what KV cache configurations cost in quality: perplexity, KL\n"
             "divergence to the f16 cache and agreement on the most probable token, scored\n"
             "as llama-perplexity --kl-divergence does. The f16 cache is always the first\n"
             "row.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "Ctrl-C prints what is complete; with --resume the same command goes on.\n\nexample:\n"
             "  kvant eval -m model.gguf -f text.txt --preset balanced --preset small --stock q8_0 --stock q4_0",
};

typedef struct settings {
    eval_options eval;
    uint32_t n_bins;
    bool has_from;
    bool wide;
    const char *values;
    report_format format;
} settings;

static bool add_file(eval_options *e, const char *file)
{
    for (size_t i = 0; i < e->n_files; i++)
        if (strcmp(e->files[i], file) == 0)
            return complain("eval: -f %s is given twice", file);
    if (e->n_files == EVAL_MAX_TEXTS)
        return complain("eval: more than %d texts", EVAL_MAX_TEXTS);
    e->files[e->n_files++] = file;
    return true;
}

static bool read_chunks(eval_options *e, const char *value)
{
    e->n_chunks = EVAL_ALL_CHUNKS;
    return strcmp(value, "all") == 0 || args_u32("--chunks", value, 1, 1 << 24, &e->n_chunks);
}

static bool choose_format(settings *s, report_format format)
{
    if (s->format != REPORT_TABLE && s->format != format)
        return complain("eval: --json and --csv are two formats of the same output: give one of them");
    s->format = format;
    return true;
}

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    eval_options *e = &s->eval;
    bool known = false;
    switch (id) {
    case OPT_FILE: return add_file(e, value);
    case OPT_CTX: return args_u32("--ctx", value, 8, 1 << 24, &e->n_ctx);
    case OPT_FROM: s->has_from = true; return args_u32("--from", value, 0, 1 << 24, &e->first);
    case OPT_CHUNKS: return read_chunks(e, value);
    case OPT_SPREAD: return args_u32("--spread", value, 1, SPREAD_MAX_PARTS, &e->n_parts);
    case OPT_SKIP: return args_u32("--skip", value, 0, 1 << 24, &e->skip);
    case OPT_BATCH: return args_u32("--batch", value, 1, ENGINE_UBATCH, &e->n_batch);
    case OPT_BY_POSITION: return args_u32("--by-position", value, 1, 4096, &s->n_bins);
    case OPT_RESUME: e->resume = value; return true;
    case OPT_BASE_CACHE: e->base_cache = value; return true;
    case OPT_VALUES: s->values = value; return true;
    case OPT_WIDE: return s->wide = true;
    case OPT_JSON: return progress_use_json() && choose_format(s, REPORT_JSON);
    case OPT_CSV: return choose_format(s, REPORT_CSV);
    default: return engine_option(&e->engine, id, value, &known);
    }
}

/* The first half gives the model something to go by, so it is not scored unless asked for. */
static bool finish(settings *s)
{
    eval_options *e = &s->eval;
    if (e->n_files == 0) {
        complain("eval: no text given");
        return hint("-f text.txt; scripts/fetch.py text makes one");
    }
    if (!s->has_from)
        e->first = e->n_ctx / 2;
    if (e->first + 2 > e->n_ctx)
        return complain("eval: --from %lu leaves nothing of a context of %lu to score", (unsigned long)e->first,
                 (unsigned long)e->n_ctx);
    if (s->n_bins > e->n_ctx - 1 - e->first)
        return complain("eval: --by-position %lu is more than the %lu positions that are scored", (unsigned long)s->n_bins,
                 (unsigned long)(e->n_ctx - 1 - e->first));
    return engine_options_finish(&e->engine, "eval");
}

int command_eval(int argc, char **argv)
{
    settings s = { .eval = { .n_ctx = 2048, .n_parts = 1, .n_batch = ENGINE_UBATCH }, .n_bins = 1 };
    int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (!finish(&s))
        return EXIT_USAGE;
    eval_run *r = calloc(1, sizeof *r);
    if (r == NULL)
        return EXIT_RUNTIME;
    interrupt_catch();
    const bool prepared = eval_prepare(r, &s.eval);
    const bool complete = prepared && eval_all(r);
    code = complete ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if ((complete || (prepared && interrupted())) &&
        (!eval_print_rows(r, s.n_bins, s.wide, s.format) || finish_output() != EXIT_OK))
        code = EXIT_RUNTIME;
    if (complete && s.values != NULL && !eval_values_write(r, s.values))
        code = EXIT_RUNTIME;
    eval_release(r);
    free(r);
    return code;
}
