/* cmd_capture.c - `kvant capture`: runs a model over a text with llama.cpp's f16 cache and keeps
 * the real keys, values and queries of its layers in a safetensors file. */
#include "capture.h"
#include "command.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "spread.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    engine_options engine;
    const char *file, *output;
    uint32_t n_tokens, n_ctx, n_parts, query_step;
    bool some_layers, layers[OBSERVE_MAX_LAYERS];
    bool json;
} settings;
#define AT(member) offsetof(settings, member)

/* "5" or "5-8" */
static bool add_range(void *user, char *word)
{
    settings *s = user;
    uint32_t first, last;
    char *dash = strchr(word, '-');
    if (dash != NULL)
        *dash++ = 0;
    if (!args_u32("--layers", word, 0, OBSERVE_MAX_LAYERS - 1, &first) ||
        !args_u32("--layers", dash != NULL ? dash : word, first, OBSERVE_MAX_LAYERS - 1, &last))
        return false;
    for (uint32_t layer = first; layer <= last; layer++)
        s->layers[layer] = true;
    return s->some_layers = true;
}

static bool read_layers(void *user, const char *list)
{
    return args_list("--layers", list, add_range, user);
}

static const arg_option options[] = {
    ENGINE_OPTION_MODEL(engine),
    ARG_TEXT('f', "file", "FILE", file, "text to read; - reads standard input"),
    ARG_TEXT('o', "output", "FILE", output, "safetensors file to write"),
    ARG_U32('n', "tokens", "N", 16, 1 << 28, n_tokens,
            "tokens of the text to use at most (default 2048)"),
    ARG_U32('c', "ctx", "N", 16, 1 << 24, n_ctx, "tokens of a context (default 2048)"),
    ARG_U32(0, "spread", "N", 1, SPREAD_MAX_PARTS, n_parts,
            "take whole contexts from N equal parts of the text in turn, not from\nits beginning "
            "alone (default 1)"),
    ARG_CALL(0, "layers", "LIST", read_layers, engine, /* the first member: the settings */
             "layers to keep, as in 0,5-8,29 (default: all)"),
    ARG_U32(0, "queries", "N", 1, 1 << 24, query_step,
            "keep the queries of every N-th token (default 1)"),
    ARG_CALL(0, "json", NULL, progress_use_json, json,
             "one JSON array with one flat object; progress as JSON lines on stderr"),
    ENGINE_OPTIONS_RUNTIME(engine),
};

static const arg_spec spec = {
    .command = "capture",
    .usage = "-m MODEL -f TEXT -o FILE.safetensors [-n TOKENS] [-c CTX] [--layers LIST]",
    .about = "Keeps the keys (after RoPE), values and queries that a model's attention sees\n"
             "while it reads a text, as F16 tensors layers.L.k, .v [n_kv_heads, tokens,\n"
             "head_dim] and .q [n_heads, tokens, head_dim]. The model runs with llama.cpp's\n"
             "own f16 cache.",
    ARG_OPTIONS(options),
    .notes = "The file appears when it is complete; Ctrl-C and errors leave FILE "
             "unchanged.\n\nexample:\n"
             "  kvant capture -m model.gguf -f text.txt -o model.safetensors -n 1024 "
             "--queries 8",
};

typedef struct run {
    engine engine;
    const settings *settings;
    reading reading;
    capture_summary summary;
    double started;
} run;

/* A layer that does not exist is a slip, not an empty tensor. */
static bool check_layers(const run *r)
{
    const observer *o = &r->reading.observer;
    for (uint32_t layer = 0; layer < OBSERVE_MAX_LAYERS && r->settings->some_layers; layer++) {
        if (!r->settings->layers[layer] || (layer < o->n_layers && o->shapes[layer].n_kv_heads > 0))
            continue;
        complain("capture: the model has no attention in layer %lu", (unsigned long)layer);
        return hint("its layers are 0 to %lu", (unsigned long)o->n_layers - 1);
    }
    return true;
}

static bool capture_text(run *r)
{
    const settings *s = r->settings;
    const reading_text text = { .file = s->file,
                                .at_most = s->n_tokens,
                                .at_least = s->n_parts > 1 ? (size_t)s->n_parts * s->n_ctx : 16,
                                .n_parts = s->n_parts,
                                .n_ctx = s->n_ctx };
    const capture_plan plan = { .path = s->output,
                                .text = s->file,
                                .layers = s->some_layers ? s->layers : NULL,
                                .query_step = s->query_step };
    return can_write_file("capture", s->output) && engine_open(&r->engine, &s->engine) &&
           reading_open(&r->reading, &r->engine, "capture", &text) && check_layers(r) &&
           capture_write(&r->reading, &plan, &r->summary);
}

static bool print_summary(const run *r)
{
    report_rows row = { .n_rows = 0 };
    report_row(&row);
    report_text(&row, "file", "file", r->settings->output);
    report_number(&row, "layers", "layers", 0, r->summary.n_layers);
    report_number(&row, "tokens", "tokens", 0, (double)r->reading.n_tokens);
    report_number(&row, "ctx", "ctx", 0, r->settings->n_ctx);
    report_number(&row, "queries", "queries", 0, (double)r->summary.n_queries);
    report_number_as(&row, COLUMN_MIB, "bytes", "MiB", 2, (double)r->summary.bytes);
    report_number(&row, "seconds", "seconds", 1, monotonic_seconds() - r->started);
    return report_print(&row, "capture", r->settings->json);
}

static bool check_settings(settings *s)
{
    if (!text_given("capture", s->file))
        return false;
    if (s->output == NULL) {
        complain("capture: no output file given");
        return hint("name one with -o model.safetensors");
    }
    return engine_model_options_finish(&s->engine, "capture");
}

int command_capture(int argc, char **argv)
{
    static settings s = { .n_tokens = 2048, .n_ctx = 2048, .n_parts = 1, .query_step = 1 };
    int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (!check_settings(&s))
        return EXIT_USAGE;
    static run only, *r = &only;
    r->settings = &s;
    r->started = monotonic_seconds();
    interrupt_catch();
    const bool ok = capture_text(r);
    code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if (ok && !print_summary(r))
        code = EXIT_RUNTIME;
    reading_close(&r->reading);
    engine_close(&r->engine);
    return code;
}
