/* cmd_eval.c - `kvant eval`: the quality of KV cache configurations, all compared with one f16 run.
 * This file owns the options: eval_run.c measures, eval_rows.c prints, eval_values.c keeps single
 * values.
 *
 * Texts are cut and scored as llama-perplexity --kl-divergence does. Chunks have the context's
 * length, BOS replaces the first token of each chunk when the model wants one, and the second half
 * is scored. */
#include "command.h"
#include "eval_run.h"
#include "interrupt.h"
#include "spread.h"
#include "text.h"

#include <stdlib.h>
#include <string.h>

typedef struct settings {
    eval_options eval;
    uint32_t n_bins;
    bool wide, json, csv;
    const char *values;
} settings;
#define AT(member) offsetof(settings, member)
#define NO_POSITION UINT32_MAX

static bool add_file(void *eval, const char *file)
{
    eval_options *e = eval;
    for (size_t i = 0; i < e->n_files; i++)
        if (strcmp(e->files[i], file) == 0)
            return complain("eval: -f %s is given twice", file);
    if (e->n_files == EVAL_MAX_TEXTS)
        return complain("eval: more than %d texts are given", EVAL_MAX_TEXTS);
    e->files[e->n_files++] = file;
    return true;
}

static bool read_chunks(void *n, const char *value)
{
    *(uint32_t *)n = EVAL_ALL_CHUNKS;
    return strcmp(value, "all") == 0 || args_u32("--chunks", value, 1, 1 << 24, n);
}

static const arg_option options[] = {
    ENGINE_OPTIONS(eval.engine),
    ARG_CALL('f', "file", "FILE", add_file, eval,
             "text to score; - reads standard input; may be repeated"),
    ARG_U32('c', "ctx", "N", 8, 1 << 24, eval.n_ctx,
            "tokens of a chunk, up to the model's own limit (default 2048)"),
    ARG_U32(0, "from", "N", 0, 1 << 24, eval.first,
            "first position that is scored (default: half of the context)"),
    ARG_CALL(0, "chunks", "N", read_chunks, eval.n_chunks,
             "chunks of every text to score, or all (default 4)"),
    ARG_U32(0, "spread", "N", 1, SPREAD_MAX_PARTS, eval.n_parts,
            "take the chunks from N equal parts of every text in turn, not from\nits beginning "
            "alone (default 1)"),
    ARG_U32(0, "skip", "N", 0, 1 << 24, eval.skip,
            "chunks of every text to leave out first (default 0)"),
    ARG_U32('b', "batch", "N", 1, ENGINE_UBATCH, eval.n_batch,
            "tokens of a step (default 512); with up to 8 the kernels that decode\n"
            "single tokens compute attention, which is slow"),
    ARG_U32(0, "by-position", "N", 1, 4096, n_bins,
            "N lines per configuration, one for each part of the positions"),
    ARG_TEXT(0, "resume", "FILE", eval.resume,
             "keep every complete chunk in FILE, and do not compute the chunks\nin it again"),
    ARG_TEXT(0, "base-cache", "DIR", eval.base_cache,
             "keep the f16 run of every chunk in DIR: 2 bytes per scored token and\nword of the "
             "vocabulary"),
    ARG_TEXT(0, "values", "FILE", values,
             "write the value of every scored token to a safetensors file,\ntensors kld.I and "
             "nll.I [chunks, positions] of the I-th line"),
    ARG_SWITCH(0, "wide", wide, "add percentiles of the divergence to the table"),
    ARG_CALL(0, "json", NULL, progress_use_json, json,
             "one JSON array of flat objects; progress as JSON lines on stderr"),
    ARG_SWITCH(0, "csv", csv, "the same, as CSV"),
};

static const arg_spec spec = {
    .command = "eval",
    .usage = "-m MODEL -f TEXT [-c CTX] [--chunks N] [--preset NAME]... [--config FILE]...\n"
             "                  [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about = "Measures what KV cache configurations cost in quality: perplexity, KL\n"
             "divergence to the f16 cache and agreement on the most probable token, scored\n"
             "as llama-perplexity --kl-divergence does. The f16 cache is always the first\nline.",
    ARG_OPTIONS(options),
    .notes = "Ctrl-C prints all complete results; with --resume the same command "
             "continues.\n\nexample:\n"
             "  kvant eval -m model.gguf -f text.txt --preset balanced --preset small --stock q8_0 "
             "--stock q4_0",
};

/* The first half gives the model something to go by, so it is not scored unless asked for. */
static bool finish(settings *s)
{
    eval_options *e = &s->eval;
    if (s->json && s->csv)
        return complain(
            "eval: --json and --csv are two formats of the same output: give one of them");
    if (!text_given("eval", e->files[0]))
        return false;
    if (e->first == NO_POSITION)
        e->first = e->n_ctx / 2;
    if (e->first + 2 > e->n_ctx)
        return complain("eval: --from %lu leaves nothing of a context of %lu to score",
                        (unsigned long)e->first, (unsigned long)e->n_ctx);
    if (s->n_bins > e->n_ctx - 1 - e->first)
        return complain("eval: --by-position %lu is more than the %lu positions that are scored",
                        (unsigned long)s->n_bins, (unsigned long)(e->n_ctx - 1 - e->first));
    return engine_options_finish(&e->engine, "eval");
}

int command_eval(int argc, char **argv)
{
    settings s = {
        .eval = { .n_ctx = 2048, .n_parts = 1, .n_batch = ENGINE_UBATCH, .first = NO_POSITION },
        .n_bins = 1
    };
    int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (!finish(&s))
        return EXIT_USAGE;
    static eval_run only, *r = &only;
    interrupt_catch();
    const bool prepared = eval_prepare(r, &s.eval);
    const bool complete = prepared && eval_all(r);
    code = complete ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    const eval_form form = { s.n_bins, s.wide,
                             s.json  ? REPORT_JSON
                             : s.csv ? REPORT_CSV
                                     : REPORT_TABLE };
    if ((complete || (prepared && interrupted())) && !eval_print_rows(r, &form))
        code = EXIT_RUNTIME;
    if (complete && s.values != NULL && !eval_values_write(r, s.values))
        code = EXIT_RUNTIME;
    eval_release(r);
    return code;
}
