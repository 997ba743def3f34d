/* cmd_inspect.c - `kvant inspect`: describes a model, the tokens that a text has for it, and the
 * memory of caches.
 *
 * Scripts call it before they measure for an hour, because it refuses texts and configurations that
 * do not suit the model. For sizes (-c) it makes a context. llama.cpp then says which layers have
 * keys and values in how many cells, and the plug-in says how much memory they take (kv_fill.h).
 * Nothing is computed, and no cell is touched. inspect_rows.c prints. */
#include "command.h"
#include "engine.h"
#include "fingerprint.h"
#include "inspect.h"
#include "interrupt.h"
#include "os.h"
#include "text.h"

#include <kvant/kvant.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    engine_options engine;
    const char *text;
    bool gpu, exact, json;
    inspect_contexts contexts;
} settings;
#define AT(member) offsetof(settings, member)

/* -c may be given several times, and each time with several numbers. */
static bool add_contexts(void *contexts, const char *value)
{
    inspect_contexts *c = contexts;
    uint32_t more[INSPECT_MAX_CONTEXTS];
    size_t n = 0;
    if (!args_u32_list("--ctx", value, 8, 1 << 24, more, INSPECT_MAX_CONTEXTS, &n))
        return false;
    for (size_t i = 0; i < n; i++) {
        if (c->n == INSPECT_MAX_CONTEXTS)
            return complain("inspect: more than %d contexts are given", INSPECT_MAX_CONTEXTS);
        c->n_ctx[c->n++] = more[i];
    }
    return true;
}

/* The plug-in reads the variable when a context is made. */
static bool set_exact(void *given, const char *value)
{
    const bool whole = value[0] != 0 && value[strspn(value, "0123456789")] == 0;
    *(bool *)given = true;
    if (!whole && strcmp(value, "auto") != 0)
        return complain("--exact %s: it must be auto or a whole number of tokens", value);
    return os_set_variable("KVANT_EXACT", value);
}

static const arg_option options[] = {
    ENGINE_OPTION_MODEL(engine),
    ARG_CALL('c', "ctx", "N,N", add_contexts, contexts,
             "contexts to show the memory of caches for, in tokens; may be repeated"),
    ARG_SWITCH(0, "gpu", gpu, "show the sizes in the memory of a GPU, which differ (-c)"),
    ARG_CALL(0, "exact", "N", set_exact, exact,
             "the number of tokens up to which the cache is f16 in place, or\nauto (default: the "
             "value of KVANT_EXACT)"),
    ENGINE_OPTION_PRESET(engine, "without -c: " KVANT_PRESET_DEFAULT),
    ENGINE_OPTIONS_CACHES(engine),
    ENGINE_OPTIONS_CODECS(engine),
    ENGINE_OPTIONS_LIBRARIES(engine),
    ARG_TEXT('f', "file", "FILE", text,
             "count the tokens of this text, too; - reads standard input"),
    ARG_SWITCH(0, "json", json, "one JSON array of flat objects"),
};

static const arg_spec spec = {
    .command = "inspect",
    .usage = "-m MODEL [-c CTX,CTX [--gpu] [--exact N]] [-f TEXT] [--preset NAME]...\n"
             "                     [--config FILE]... [-k SPEC [-v SPEC]]... [--stock TYPE]...",
    .about = "Shows the memory of a model's KV caches when a quarter, a half and all of a context "
             "of -c\ntokens is written. MiB count everything: codes of sealed blocks, exact rows "
             "(fp16: the\nfirst and newest tokens, and room for the tokens of a step) and "
             "transforms. Memory that\nkvant takes only while it learns has a separate column. "
             "bits: all of this memory for each\nnumber of these tokens. A GPU's memory, and the "
             "memory of llama.cpp's own cache, is taken\nas a whole at the start. If no cache is "
             "named: f16, q8_0, q4_0 and all presets. With\nseveral contexts: only full caches. "
             "Without -c: the model's name and context, and the\ncodec bits of caches. Measures "
             "nothing, and needs no memory for the cache.",
    ARG_OPTIONS(options),
    .notes =
        "examples:\n  kvant inspect -m model.gguf -c 131072\n"
        "  kvant inspect -m model.gguf -c 8192,32768 --gpu --preset small -k kivi-2 --stock q4_0",
};

static void write_fingerprint(char text[20], uint64_t fingerprint)
{
    snprintf(text, 20, "%016llx", (unsigned long long)fingerprint);
}

static bool look_at_model(engine *e, inspect_facts *f)
{
    const kv_config f16 = configs_f16();
    const struct llama_model *model = engine_model(e, &f16);
    if (model == NULL)
        return false;
    engine_model_name(e, model, f->name, sizeof f->name);
    snprintf(f->kvant, sizeof f->kvant, "%s, CPU level %s", kvant_version(),
             kvant_cpu_level_name(kvant_get_cpu_level()));
    snprintf(f->runtime, sizeof f->runtime, "llama.cpp %s, ggml %s", ll.llama_version(),
             ll.ggml_version());
    write_fingerprint(f->model, kvant_model_fingerprint(e->options.model));
    f->n_ctx_train = ll.llama_model_n_ctx_train(model);
    return true;
}

static bool look_at_text(const engine *e, const char *file, inspect_facts *f)
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

const double inspect_shares[INSPECT_FILLS] = { 0.25, 0.5, 1 };

/* One cache at one context. llama.cpp's own caches have as many numbers in as many cells as kvant's
 * f16 has, which is asked instead: they are allocated as a whole. */
static bool size_cache(engine *e, const kv_config *config, const kv_config *f16, uint32_t n_ctx,
                       bool on_gpu, engine_fill *fills)
{
    const engine_context_options context = { .n_ctx = n_ctx,
                                             .n_batch = ENGINE_UBATCH,
                                             .n_outputs = 1 };
    if (!engine_planned_fills(e, config->stock ? f16 : config, &context, on_gpu, inspect_shares,
                              INSPECT_FILLS, fills))
        return false;
    for (size_t i = 0; i < INSPECT_FILLS && config->stock; i++)
        engine_stock_fill(config, inspect_shares[i], &fills[i]);
    if (fills[0].size.numbers[0] + fills[0].size.numbers[1] == 0)
        return complain("inspect: %s has no cache of keys and values that kvant compresses",
                        e->options.model);
    return true;
}

static bool look_at_sizes(engine *e, const inspect_contexts *contexts, bool on_gpu,
                          engine_fill *fills)
{
    static kv_configs f16;
    const kv_configs *list = &e->options.configs;
    bool ok = configs_add_k(&f16, "f16") && configs_finish(&f16, e->options.model);
    for (size_t c = 0; c < contexts->n && ok; c++)
        for (size_t i = 0; i < list->n && ok; i++, fills += INSPECT_FILLS)
            ok = !interrupted() &&
                 size_cache(e, &list->items[i], &f16.items[0], contexts->n_ctx[c], on_gpu, fills);
    configs_free(&f16);
    return ok;
}

static bool look_and_print(engine *e, const settings *s)
{
    const size_t n = e->options.configs.n, n_sizes = n * (s->contexts.n > 0 ? s->contexts.n : 1);
    inspect_facts f = { .text = "" };
    engine_fill *fills = calloc(n_sizes * INSPECT_FILLS, sizeof *fills);
    if (fills == NULL)
        return complain("inspect: out of memory");
    const bool ok = look_at_model(e, &f) && look_at_text(e, s->text, &f) &&
                    look_at_sizes(e, &s->contexts, s->gpu, fills) &&
                    inspect_print(e, &f, &s->contexts, fills, s->json);
    free(fills);
    return ok;
}

/* With -c and no configuration, adds the caches that people usually compare. */
static bool add_usual_caches(kv_configs *list)
{
    static const char *const stock[] = { "f16", "q8_0", "q4_0" };
    static const char *const presets[] = { "quality", "balanced", "small", "tiny" };
    bool ok = true;
    for (size_t i = 0; i < sizeof stock / sizeof *stock; i++)
        ok = ok && configs_add_stock(list, stock[i]);
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        ok = ok && configs_add_preset(list, presets[i]);
    return ok;
}

static bool finish(settings *s)
{
    if (s->gpu && s->contexts.n == 0)
        return complain("inspect: --gpu shows sizes of caches, which need a context: give -c");
    if (s->exact && s->contexts.n == 0)
        return complain("inspect: --exact is for sizes of caches, which need a context: give -c");
    if (s->contexts.n > 0 && s->engine.configs.n == 0 && !add_usual_caches(&s->engine.configs))
        return false;
    return engine_options_finish(&s->engine, "inspect");
}

int command_inspect(int argc, char **argv)
{
    static settings s;
    static engine e;
    const int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (!finish(&s))
        return EXIT_USAGE;
    interrupt_catch();
    if (s.engine.n_threads == 0)
        s.engine.n_threads = 1; /* nothing is computed */
    /* The plug-in's device of the computer's memory: sizes on a GPU need none. */
    const bool ok =
        os_set_variable("KVANT_GPU", "0") && engine_open(&e, &s.engine) && look_and_print(&e, &s);
    engine_close(&e);
    return ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
}
