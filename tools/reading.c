/* reading.c - see reading.h. */
#include "reading.h"

#include "command.h"
#include "interrupt.h"
#include "os.h"
#include "spread.h"
#include "text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Keeps whole contexts from all parts of the text. False without memory. */
static bool spread_tokens(reading *r, const reading_text *t)
{
    const size_t wanted = t->at_most / t->n_ctx,
                 available = spread_count(r->n_tokens, t->n_parts, t->n_ctx);
    const size_t n = wanted < available ? wanted : available;
    llama_token *tokens = malloc(n * t->n_ctx * sizeof *tokens + 1);
    for (size_t i = 0; i < n && tokens != NULL; i++)
        memcpy(tokens + i * t->n_ctx, r->tokens + spread_at(r->n_tokens, t->n_parts, t->n_ctx, i),
               t->n_ctx * sizeof *tokens);
    free(r->tokens);
    r->tokens = tokens;
    r->n_tokens = n * t->n_ctx;
    if (tokens == NULL)
        complain("%s: out of memory", r->command);
    return tokens != NULL;
}

static bool load_tokens(reading *r, const reading_text *t)
{
    size_t bytes = 0;
    char *text = read_text(t->file, &bytes);
    if (text == NULL)
        return false;
    r->tokens = engine_tokenize(r->engine, text, bytes, TOKENS_TEXT, &r->n_tokens);
    free(text);
    if (r->tokens == NULL)
        return false;
    r->text_tokens = r->n_tokens;
    if (t->n_parts > 1 && !spread_tokens(r, t))
        return false;
    if (r->n_tokens > t->at_most)
        r->n_tokens = t->at_most;
    if (r->n_tokens >= t->at_least)
        return true;
    complain("%s: %s has %zu usable tokens, but %zu are needed", r->command, t->file,
             r->text_tokens, t->at_least);
    return hint(t->at_most < t->at_least ? "give more --tokens"
                                         : "use a longer text or a shorter context");
}

static bool check_context(const reading *r, const struct llama_model *model)
{
    const int32_t limit = ll.llama_model_n_ctx_train(model);
    if (limit <= 0 || r->n_ctx <= (uint32_t)limit)
        return true;
    complain("%s: a context of %lu tokens is longer than the model's limit of %ld", r->command,
             (unsigned long)r->n_ctx, (long)limit);
    return hint("choose a smaller -c");
}

static void forget_tokens(reading *r)
{
    ll.llama_memory_clear(ll.llama_get_memory(r->ctx), true);
}

/* The first position of the context that begins at token `chunk`. RoPE rotates some channels so
 * slowly that a short context shows few of their angles. Contexts therefore begin at positions
 * spread over those that a cache will hold. */
static size_t first_position(const reading *r, size_t chunk)
{
    const size_t n = (r->n_tokens + r->n_ctx - 1) / r->n_ctx;
    if (r->n_positions <= r->n_ctx || n < 2)
        return 0;
    return (r->n_positions - r->n_ctx) * (chunk / r->n_ctx) / (n - 1);
}

/* n tokens of the context that begins at token chunk, from its token start on. */
static bool decode(reading *r, size_t chunk, size_t start, size_t n)
{
    engine_fill_batch(r->engine, &r->batch, r->tokens + chunk + start, start, n);
    for (size_t i = 0; i < n; i++)
        r->batch.pos[i] += (llama_pos)first_position(r, chunk);
    r->batch.logits[n - 1] =
        1; /* nobody reads them; a graph without any output is a rare case best avoided */
    const int32_t status = ll.llama_decode(r->ctx, r->batch);
    if (r->observer.error[0] != 0)
        return complain("%s: cannot read this model's cache: %s", r->command, r->observer.error);
    if (status != 0)
        complain("%s: llama.cpp could not decode the batch (status %d)", r->command, (int)status);
    return status == 0;
}

bool reading_all(reading *r, size_t from, progress *p,
                 void (*on_batch)(void *user, size_t chunk, size_t start, size_t n), void *user)
{
    for (size_t chunk = from; chunk < r->n_tokens; chunk += r->n_ctx) {
        const size_t left = r->n_tokens - chunk, length = left < r->n_ctx ? left : r->n_ctx;
        forget_tokens(r);
        for (size_t start = 0; start < length; start += ENGINE_UBATCH) {
            const size_t n = length - start < ENGINE_UBATCH ? length - start : ENGINE_UBATCH;
            on_batch(user, chunk, start, n);
            if (!decode(r, chunk, start, n))
                return false;
            r->done = chunk + start + n;
            progress_add(p, (double)n, "reading the text");
            if (interrupted())
                return false;
        }
    }
    return true;
}

/* One token tells the shapes of all layers, before their rows can be told apart into heads. */
static bool learn_shapes(reading *r)
{
    if (!decode(r, 0, 0, 1))
        return false;
    forget_tokens(r);
    if (r->observer.n_layers > 0)
        return true;
    complain("%s: this model's graph has no flash attention on a KV cache", r->command);
    return hint(
        "recurrent models and models without flash attention in llama.cpp are not supported here");
}

bool reading_open(reading *r, engine *e, const char *command, const reading_text *text)
{
    *r = (reading){ .command = command, .engine = e, .n_ctx = text->n_ctx, .f16 = configs_f16() };
    const struct llama_model *model = engine_model(e, &r->f16);
    if (model == NULL || !check_context(r, model) || !load_tokens(r, text))
        return false;
    r->batch = ll.llama_batch_init((int32_t)ENGINE_UBATCH, 0, 1);
    const engine_context_options context = { .n_ctx = r->n_ctx,
                                             .n_batch = ENGINE_UBATCH,
                                             .n_outputs = 1,
                                             .on_node = observe_node,
                                             .on_node_user = &r->observer,
                                             .flash_attention = true };
    r->ctx = engine_context(e, &r->f16, &context);
    if (r->ctx == NULL)
        return false;
    ll.llama_set_abort_callback(r->ctx, NULL, NULL); /* a batch counts for all layers or for none */
    return learn_shapes(r);
}

void reading_close(reading *r)
{
    if (r->ctx != NULL)
        ll.llama_free(r->ctx);
    if (r->batch.token != NULL)
        ll.llama_batch_free(r->batch);
    free(r->tokens);
    r->ctx = NULL;
    r->batch = (struct llama_batch){ .n_tokens = 0 };
    r->tokens = NULL;
}
