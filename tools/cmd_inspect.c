/* cmd_inspect.c - `kvant inspect`: what a model is, what a text is to it, and the true bits of caches for it; computes nothing.
 *
 * Scripts call it before they measure for an hour: it refuses texts and configurations that are not for the model.
 */
#include "command.h"
#include "engine.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "text.h"

#include <kvant/kvant.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct settings {
    engine_options engine;
    const char *text;
    bool json;
} settings;
#define AT(member) offsetof(settings, member)

static const arg_option options[] = {
    ENGINE_OPTIONS(engine),
    ARG_TEXT('f', "file", "FILE", text, "count the tokens of this text, too; - reads standard input"),
    ARG_SWITCH(0, "json", json, "one JSON array of flat objects"),
};

static const arg_spec spec = {
    .command = "inspect",
    .usage = "-m MODEL [-f TEXT] [--preset NAME]... [--config FILE]... [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about = "Tells a model's name and context, and how many bits caches take per number with\n"
             "this model. Measures nothing.",
    ARG_OPTIONS(options),
    .notes = "example:\n  kvant inspect -m model.gguf --preset small -k kivi-2 --stock q4_0",
};

typedef struct facts {
    char kvant[64], name[128], runtime[64];
    char model[20], text[20];     /* fingerprints */
    double n_ctx_train, n_tokens; /* NaN: no text */
} facts;

static void write_fingerprint(char text[20], uint64_t fingerprint)
{
    snprintf(text, 20, "%016llx", (unsigned long long)fingerprint);
}

static bool look_at_model(engine *e, facts *f)
{
    const kv_config f16 = configs_f16();
    const struct llama_model *model = engine_model(e, &f16);
    if (model == NULL)
        return false;
    if (ll.llama_model_meta_val_str(model, "general.name", f->name, sizeof f->name) <= 0 || f->name[0] == 0)
        snprintf(f->name, sizeof f->name, "%s", file_name(e->options.model));
    snprintf(f->kvant, sizeof f->kvant, "%s, CPU level %s", kvant_version(),
             kvant_cpu_level_name(kvant_get_cpu_level()));
    snprintf(f->runtime, sizeof f->runtime, "llama.cpp %s, ggml %s", ll.llama_version(), ll.ggml_version());
    write_fingerprint(f->model, kvant_model_fingerprint(e->options.model));
    f->n_ctx_train = ll.llama_model_n_ctx_train(model);
    return true;
}

static bool look_at_text(const engine *e, const char *file, facts *f)
{
    size_t bytes = 0, n_tokens = 0;
    f->n_tokens = NAN;
    char *text = file != NULL ? read_text(file, &bytes) : NULL;
    if (text == NULL)
        return file == NULL;
    llama_token *tokens = engine_tokenize(e, text, bytes, TOKENS_TEXT, &n_tokens);
    const bool ok = tokens != NULL;
    f->n_tokens = (double)n_tokens;
    write_fingerprint(f->text, fingerprint_words(FINGERPRINT_START, text, bytes));
    free(text);
    free(tokens);
    return ok;
}

static const report_column columns[] = {
    CONFIG_COLUMNS,
    { "bits", "true bits", COLUMN_NUMBER, 2 },
    { "model", NULL, COLUMN_TEXT, 0 },
    { "model_fingerprint", NULL, COLUMN_TEXT, 0 },
    { "kvant", NULL, COLUMN_TEXT, 0 },
    { "runtime", NULL, COLUMN_TEXT, 0 },
    { "n_ctx_train", NULL, COLUMN_NUMBER, 0 },
    { "text_tokens", NULL, COLUMN_NUMBER, 0 },
    { "text_fingerprint", NULL, COLUMN_TEXT, 0 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static bool fill_row(engine *e, const kv_config *config, const facts *f, report_cell *cells)
{
    double bits;
    if (!engine_bits(e, config, &bits))
        return false;
    configs_fill_cells(config, cells);
    cells += N_CONFIG_COLUMNS;
    *cells++ = CELL_NUMBER(bits);
    *cells++ = CELL_TEXT(f->name);
    *cells++ = CELL_TEXT(f->model);
    *cells++ = CELL_TEXT(f->kvant);
    *cells++ = CELL_TEXT(f->runtime);
    *cells++ = CELL_NUMBER(f->n_ctx_train);
    *cells++ = CELL_NUMBER(f->n_tokens);
    *cells++ = CELL_TEXT(f->text[0] != 0 ? f->text : NULL);
    return true;
}

static bool print(engine *e, const facts *f, report_cell *cells, bool json)
{
    const kv_configs *list = &e->options.configs;
    for (size_t i = 0; i < list->n; i++)
        if (!fill_row(e, &list->items[i], f, cells + i * N_COLUMNS))
            return false;
    if (!json)
        printf("%s, contexts of up to %.0f tokens\n", f->name, f->n_ctx_train);
    if (!json && !isnan(f->n_tokens))
        printf("the text has %.0f tokens\n", f->n_tokens);
    return report_print(columns, N_COLUMNS, cells, list->n, json);
}

int command_inspect(int argc, char **argv)
{
    static settings s;
    static engine e;
    static report_cell cells[MAX_CONFIGS * N_COLUMNS];
    facts f = { .text = "" };
    const int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (!engine_options_finish(&s.engine, "inspect"))
        return EXIT_USAGE;
    interrupt_catch();
    const bool ok = engine_open(&e, &s.engine) && look_at_model(&e, &f) && look_at_text(&e, s.text, &f) &&
                    print(&e, &f, cells, s.json);
    engine_close(&e);
    return ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
}
