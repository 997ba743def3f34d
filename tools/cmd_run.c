/* cmd_run.c - `kvant run`: generates text with a compressed cache and writes it to stdout token by
 * token.
 *
 * A prompt is put into the model's chat template when the model has one that llama.cpp knows; --raw
 * leaves the prompt unchanged. Statistics go to stderr, also after Ctrl-C. */
#include "command.h"
#include "engine.h"
#include "interrupt.h"
#include "os.h"
#include "progress.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    engine_options engine;
    const char *prompt, *file;
    uint32_t n_predict, n_ctx, top_k, seed;
    double temp, top_p;
    bool raw;
} settings;
#define AT(member) offsetof(settings, member)

static const arg_option options[] = {
    ENGINE_OPTIONS(engine),
    ARG_TEXT('p', "prompt", "TEXT", prompt, "prompt; follows the text of -f when both are given"),
    ARG_TEXT('f', "file", "FILE", file, "read the prompt from a file; - reads standard input"),
    ARG_U32('n', "predict", "N", 1, 1 << 24, n_predict, "tokens to generate at most (default 256)"),
    ARG_U32('c', "ctx", "N", 8, 1 << 24, n_ctx,
            "context (default: as long as prompt and answer need)"),
    ARG_DOUBLE(0, "temp", "T", 0, 100, temp,
               "temperature; 0 takes the most probable token (default 0)"),
    ARG_U32(0, "top-k", "N", 0, 1 << 24, top_k,
            "with a temperature: the N most probable, 0 all (default 40)"),
    ARG_DOUBLE(0, "top-p", "P", 0, 1, top_p,
               "with a temperature: their probability mass (default 0.95)"),
    ARG_U32(0, "seed", "N", 0, UINT32_MAX, seed, "with a temperature: seed (default 1)"),
    ARG_SWITCH(0, "raw", raw, "no chat template"),
};

static const arg_spec spec = {
    .command = "run",
    .usage = "-m MODEL (-p PROMPT | -f FILE) [--preset NAME | --config FILE | -k SPEC [-v SPEC]]\n"
             "                 [-n N] [-c CTX]",
    .about = "Generates text with the KV cache compressed. Text goes to standard output, "
             "statistics to standard\n"
             "error.",
    ARG_OPTIONS(options),
    .notes = "Ctrl-C stops the answer and prints the statistics.\n\nexample:\n"
             "  kvant run -m model.gguf --preset balanced -p 'What is a key-value cache?'",
};

typedef struct generation {
    engine engine;
    const settings *settings;
    const kv_config *config;
    const struct llama_vocab *vocab;
    struct llama_context *ctx;
    struct llama_sampler *sampler;
    llama_token *tokens;
    size_t n_prompt, n_ctx, n_generated;
    double prompt_seconds, answer_seconds;
    kv_meter meter;
} generation;

/* The text of -f, a line end, the text of -p; to be freed. */
static char *join_prompt(const settings *s, size_t *bytes)
{
    const char *prompt = s->prompt != NULL ? s->prompt : "";
    char *text = NULL;
    size_t n = 0;
    os_stream out;
    if (!text_check("-p", prompt, strlen(prompt)) ||
        (s->file != NULL && (text = read_text(s->file, &n)) == NULL))
        return NULL;
    if (os_stream_open(&out)) {
        if (n > 0)
            fwrite(text, 1, n, out.file);
        fprintf(out.file, "%s%s", n > 0 && prompt[0] != 0 && text[n - 1] != '\n' ? "\n" : "",
                prompt);
    }
    free(text);
    char *joined = os_stream_text(&out, bytes);
    if (joined == NULL)
        complain("run: out of memory");
    return joined;
}

/* The prompt as a user's message in the model's chat template; to be freed. NULL when the model has
 * no template that llama.cpp knows. */
static char *apply_template(const struct llama_model *model, const char *prompt, size_t *bytes)
{
    const char *template = ll.llama_model_chat_template(model, NULL);
    if (template == NULL)
        return NULL;
    const struct llama_chat_message message = { .role = "user", .content = prompt };
    const int32_t n = ll.llama_chat_apply_template(template, &message, 1, true, NULL, 0);
    char *text = n > 0 ? malloc((size_t)n + 1) : NULL;
    if (text == NULL)
        return NULL;
    *bytes = (size_t)ll.llama_chat_apply_template(template, &message, 1, true, text, n + 1);
    return text;
}

static bool load_prompt(generation *g, const struct llama_model *model)
{
    size_t bytes = 0;
    char *text = join_prompt(g->settings, &bytes);
    if (text == NULL)
        return false;
    char *chat = g->settings->raw ? NULL : apply_template(model, text, &bytes);
    g->tokens = engine_tokenize(&g->engine, chat != NULL ? chat : text, bytes,
                                chat != NULL ? TOKENS_CHAT : TOKENS_TEXT, &g->n_prompt);
    free(chat);
    free(text);
    return g->tokens != NULL;
}

static bool choose_context(generation *g, const struct llama_model *model)
{
    const size_t trained = (size_t)ll.llama_model_n_ctx_train(model);
    const size_t needed = g->n_prompt + g->settings->n_predict;
    g->n_ctx = g->settings->n_ctx != 0 ? g->settings->n_ctx : needed < trained ? needed : trained;
    if (g->n_prompt < g->n_ctx)
        return true;
    complain("run: the prompt has %zu tokens, but the context has only %zu", g->n_prompt, g->n_ctx);
    if (g->settings->n_ctx == 0)
        hint("the model was trained for %zu tokens; -c forces more", trained);
    else
        hint("choose a larger -c");
    return false;
}

static bool make_sampler(generation *g)
{
    const settings *s = g->settings;
    g->sampler = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params());
    if (g->sampler == NULL)
        return false;
    if (s->temp > 0) {
        ll.llama_sampler_chain_add(g->sampler, ll.llama_sampler_init_top_k((int32_t)s->top_k));
        ll.llama_sampler_chain_add(g->sampler, ll.llama_sampler_init_top_p((float)s->top_p, 1));
        ll.llama_sampler_chain_add(g->sampler, ll.llama_sampler_init_temp((float)s->temp));
        ll.llama_sampler_chain_add(g->sampler, ll.llama_sampler_init_dist(s->seed));
    } else {
        ll.llama_sampler_chain_add(g->sampler, ll.llama_sampler_init_greedy());
    }
    return true;
}

static bool prepare(generation *g)
{
    if (!engine_open(&g->engine, &g->settings->engine))
        return false;
    const struct llama_model *model = engine_model(&g->engine, g->config);
    if (model == NULL || !load_prompt(g, model) || !choose_context(g, model) || !make_sampler(g))
        return false;
    g->vocab = ll.llama_model_get_vocab(model);
    const engine_context_options context = {
        .n_ctx = (uint32_t)g->n_ctx, .n_batch = ENGINE_UBATCH, .n_outputs = 1, .meter = &g->meter
    };
    g->ctx = engine_context(&g->engine, g->config, &context);
    return g->ctx != NULL;
}

static bool read_prompt(generation *g)
{
    const double start = monotonic_seconds();
    progress p;
    progress_start(&p, (double)g->n_prompt);
    const bool ok = engine_read(g->ctx, g->tokens, g->n_prompt, &p, "reading the prompt");
    progress_end(&p);
    ll.llama_synchronize(g->ctx);
    g->prompt_seconds = monotonic_seconds() - start;
    return ok;
}

/* Flushed token by token: a reader follows the text, and a closed pipe ends the work. */
static bool print_token(const generation *g, llama_token token)
{
    char piece[512];
    const int32_t n = ll.llama_token_to_piece(g->vocab, token, piece, sizeof piece, 0, false);
    return n < 0 || (fwrite(piece, 1, (size_t)n, stdout) == (size_t)n && fflush(stdout) == 0);
}

static bool answer(generation *g)
{
    const double start = monotonic_seconds();
    bool ok = true;
    while (ok && !interrupted()) {
        llama_token token = ll.llama_sampler_sample(g->sampler, g->ctx, -1);
        if (ll.llama_vocab_is_eog(g->vocab, token))
            break;
        g->n_generated++;
        if (!print_token(g, token))
            break;
        if (g->n_generated == g->settings->n_predict)
            break;
        if (g->n_prompt + g->n_generated >= g->n_ctx) {
            complain("run: the context of %zu tokens is full", g->n_ctx);
            break;
        }
        ok = engine_decode(g->ctx, ll.llama_batch_get_one(&token, 1));
    }
    g->answer_seconds = monotonic_seconds() - start;
    putchar('\n');
    return ok;
}

/* Prints the memory of the cache now, with the working memory of learning, and of the cache when
 * its context is full. */
static void print_cache(const generation *g)
{
    const double mib = 1048576;
    kvp_kv_size full;
    if (!engine_kv_size(&g->engine, g->config, &g->meter, &full))
        return;
    fprintf(
        stderr,
        "; KV cache %.2f MiB, with a full context %.2f MiB: %.2f bits per number (f16: %.2f MiB)",
        engine_kv_bytes(&g->engine, g->config, &g->meter) / mib, full.bytes / mib,
        kvp_kv_size_bits(&full), 2 * (full.numbers[0] + full.numbers[1]) / mib);
}

static void print_statistics(const generation *g)
{
    fprintf(stderr, "\n%s: prompt %zu tokens, %.1f tokens/s; answer %zu tokens, %.1f tokens/s",
            g->config->label, g->n_prompt, (double)g->n_prompt / g->prompt_seconds, g->n_generated,
            (double)g->n_generated / g->answer_seconds);
    print_cache(g);
    fputc('\n', stderr);
}

static void release(generation *g)
{
    if (g->ctx != NULL)
        ll.llama_free(g->ctx);
    if (g->sampler != NULL)
        ll.llama_sampler_free(g->sampler);
    free(g->tokens);
    engine_close(&g->engine);
}

static int generate(const settings *s)
{
    generation g = { .settings = s, .config = &s->engine.configs.items[0] };
    bool ok = prepare(&g) && read_prompt(&g);
    int code = EXIT_RUNTIME;
    if (ok) {
        ok = answer(&g);
        code = finish_output();
        print_statistics(&g);
    }
    if (interrupted())
        code = EXIT_INTERRUPTED;
    else if (!ok)
        code = EXIT_RUNTIME;
    release(&g);
    return code;
}

int command_run(int argc, char **argv)
{
    settings s = { .n_predict = 256, .top_k = 40, .top_p = 0.95, .seed = 1 };
    const int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (s.prompt == NULL && s.file == NULL) {
        complain("run: no prompt given");
        hint("give -p TEXT, or -f FILE (- for standard input)");
        return EXIT_USAGE;
    }
    if (!engine_options_finish(&s.engine, "run"))
        return EXIT_USAGE;
    if (s.engine.configs.n > 1) {
        complain("run: %zu cache configurations are given, but run uses one", s.engine.configs.n);
        return EXIT_USAGE;
    }
    interrupt_catch();
    return generate(&s);
}
