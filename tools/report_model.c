/* report_model.c - a look at the model, and a few hundred tokens through it. */
#include "report_model.h"

#include "command.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "progress.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PREFILL = 256, DECODE = 8 };

/* Token 1, again and again: which one it is does not change the time. */
static bool feed(struct llama_context *ctx, int32_t n)
{
    llama_token tokens[PREFILL];
    for (int32_t i = 0; i < n; i++)
        tokens[i] = 1;
    if (ll.llama_decode(ctx, ll.llama_batch_get_one(tokens, n)) == 0) {
        ll.llama_synchronize(ctx);
        return true;
    }
    if (!interrupted())
        complain("report: llama.cpp could not decode");
    return false;
}

static bool measure(struct llama_context *ctx, model_facts *f)
{
    if (!feed(ctx, 1)) /* the first graph pays for allocations */
        return false;
    const double start = monotonic_seconds();
    if (!feed(ctx, PREFILL))
        return false;
    const double middle = monotonic_seconds();
    for (int i = 0; i < DECODE; i++)
        if (!feed(ctx, 1))
            return false;
    f->prefill_tps = PREFILL / (middle - start);
    f->decode_tps = DECODE / (monotonic_seconds() - middle);
    return true;
}

static bool check_configs(engine *e)
{
    double bits;
    for (size_t i = 0; i < e->options.configs.n; i++)
        if (!engine_bits(e, &e->options.configs.items[i], &bits))
            return false;
    return true;
}

static bool read_facts_of_text(const engine *e, const char *file, model_facts *f)
{
    size_t bytes = 0;
    char *text = read_text(file, &bytes);
    llama_token *tokens = text != NULL ? engine_tokenize(e, text, bytes, TOKENS_TEXT, &f->n_text_tokens) : NULL;
    const bool ok = tokens != NULL;
    if (ok)
        f->text_fingerprint = fingerprint_words(FINGERPRINT_START, text, bytes);
    free(text);
    free(tokens);
    return ok;
}

static bool look(engine *e, model_facts *f)
{
    const kv_config f16 = configs_f16();
    const engine_context_options options = { .n_ctx = 512, .n_batch = ENGINE_UBATCH, .n_outputs = 1 };
    const struct llama_model *model = engine_model(e, &f16);
    if (model == NULL)
        return false;
    if (ll.llama_model_meta_val_str(model, "general.name", f->name, sizeof f->name) <= 0)
        f->name[0] = 0;
    snprintf(f->runtime, sizeof f->runtime, "llama.cpp %s, ggml %s", ll.llama_version(), ll.ggml_version());
    f->n_ctx_train = (uint32_t)ll.llama_model_n_ctx_train(model);
    struct llama_context *ctx = engine_context(e, &f16, &options);
    const bool ok = ctx != NULL && measure(ctx, f);
    if (ctx != NULL)
        ll.llama_free(ctx);
    return ok;
}

bool model_facts_get(const engine_options *options, const char *text, model_facts *facts)
{
    engine e;
    *facts = (model_facts){ .n_ctx_train = 0 };
    const bool ok =
        engine_open(&e, options) && check_configs(&e) && read_facts_of_text(&e, text, facts) && look(&e, facts);
    engine_close(&e);
    return ok;
}
