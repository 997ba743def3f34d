/* divergence.c - see divergence.h. */
#define _POSIX_C_SOURCE 200809L
#include "divergence.h"

#include "command.h"
#include "fingerprint.h"
#include "interrupt.h"

#include <stdlib.h>

bool divergence_open(divergence *d, engine *e, uint32_t n_ctx, const char *state, progress *p)
{
    *d = (divergence){ .engine = e, .f16 = configs_f16(), .state = { .file = -1 }, .progress = p };
    const struct llama_model *model = engine_model(e, &d->f16);
    if (model == NULL)
        return false;
    d->n_rows = n_ctx - 1 - n_ctx / 2;
    d->key = (base_key){ .model = fingerprint_file(e->options.model),
                         .runtime = engine_runtime_fingerprint(e),
                         .n_ctx = n_ctx,
                         .n_batch = ENGINE_UBATCH,
                         .first = n_ctx / 2,
                         .n_rows = d->n_rows,
                         .n_vocab = (uint64_t)ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model)) };
    d->batch = ll.llama_batch_init((int32_t)ENGINE_UBATCH, 0, 1);
    if (d->batch.token != NULL)
        return eval_state_open(&d->state, state, &d->key);
    complain("out of memory");
    return false;
}

static void forget_base(divergence *d)
{
    if (d->has_base)
        base_close(&d->base);
    d->has_base = false;
}

void divergence_close(divergence *d)
{
    forget_base(d);
    eval_state_close(&d->state);
    if (d->batch.token != NULL)
        ll.llama_batch_free(d->batch);
    d->batch.token = NULL;
}

static uint64_t tokens_key(const divergence *d, const llama_token *tokens)
{
    return fingerprint_bytes(FINGERPRINT_START, tokens, d->key.n_ctx * sizeof *tokens);
}

static void fill_batch(divergence *d, size_t start, size_t n)
{
    struct llama_batch *b = &d->batch;
    b->n_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        b->token[i] = d->tokens[start + i];
        b->pos[i] = (llama_pos)(start + i);
        b->n_seq_id[i] = 1;
        b->seq_id[i][0] = 0;
        b->logits[i] = start + i >= d->key.first && start + i < d->key.first + d->n_rows;
    }
    const struct llama_vocab *vocab = ll.llama_model_get_vocab(d->engine->cpu_model);
    if (start == 0 && ll.llama_vocab_get_add_bos(vocab))
        b->token[0] = ll.llama_vocab_bos(vocab);
}

static bool score_batch(divergence *d, struct llama_context *ctx, size_t start, size_t n, bool define,
                        score_value *values)
{
    const size_t first = d->key.first, last = first + d->n_rows;
    const size_t from = start > first ? start : first, end = start + n < last ? start + n : last;
    if (from >= end)
        return true;
    const float *logits = ll.llama_get_logits(ctx);
    return logits != NULL && score_rows(&d->base.reference, from - first, define, logits, d->tokens + from + 1,
                                        end - from, d->engine->options.n_threads, values + (from - first));
}

static bool decode(divergence *d, struct llama_context *ctx, const char *label, bool define, score_value *values)
{
    for (size_t start = 0; start < d->key.n_ctx; start += ENGINE_UBATCH) {
        const size_t n = d->key.n_ctx - start < ENGINE_UBATCH ? d->key.n_ctx - start : ENGINE_UBATCH;
        fill_batch(d, start, n);
        const int32_t status = ll.llama_decode(ctx, d->batch);
        if (interrupted())
            return false;
        if (status != 0 || !score_batch(d, ctx, start, n, define, values)) {
            complain("%s: llama.cpp could not decode the batch (status %d)", label, (int)status);
            return false;
        }
        progress_add(d->progress, (double)n, label);
    }
    return true;
}

static bool run(divergence *d, const kv_config *config, const char *label, bool define, score_value *values,
                double *kv_bytes)
{
    kv_meter meter;
    const engine_context_options options = { .n_ctx = (uint32_t)d->key.n_ctx,
                                             .n_batch = ENGINE_UBATCH,
                                             .meter = &meter };
    struct llama_context *ctx = engine_context(d->engine, config, &options);
    if (ctx == NULL)
        return false;
    const bool ok = decode(d, ctx, label, define, values);
    if (ok)
        *kv_bytes = engine_kv_bytes(d->engine, config, &meter);
    ll.llama_free(ctx);
    return ok;
}

static bool prepare_base(divergence *d, const llama_token *tokens, score_value *values)
{
    base_key key = d->key;
    if (d->has_base && d->tokens == tokens)
        return true;
    forget_base(d);
    d->tokens = tokens;
    key.tokens = tokens_key(d, tokens);
    if (!base_create(&d->base, NULL, &key))
        return false;
    d->has_base = run(d, &d->f16, "the f16 cache", true, values, &d->base.kv_bytes);
    if (!d->has_base)
        base_close(&d->base);
    return d->has_base;
}

static bool measure(divergence *d, const kv_config *config, uint64_t key, const char *label,
                    const llama_token *tokens, score_value *values, double *kv_bytes)
{
    const uint64_t chunk = tokens_key(d, tokens);
    if (eval_state_find(&d->state, key, chunk, kv_bytes, values))
        return true;
    return prepare_base(d, tokens, values) && run(d, config, label, false, values, kv_bytes) &&
           eval_state_add(&d->state, key, chunk, *kv_bytes, values);
}

bool divergence_measure(divergence *d, const kv_config *config, uint64_t key, const char *label,
                        const llama_token *tokens, double *kld, double *kv_bytes)
{
    score_value *values = calloc(d->n_rows, sizeof *values);
    const bool ok = values != NULL && measure(d, config, key, label, tokens, values, kv_bytes);
    if (values == NULL)
        complain("out of memory");
    for (size_t i = 0; i < d->n_rows && ok; i++)
        kld[i] = values[i].kld;
    free(values);
    return ok;
}

unsigned divergence_runs(const divergence *d, uint64_t key, const llama_token *tokens)
{
    double kv_bytes;
    score_value *values = calloc(d->n_rows, sizeof *values);
    const bool known = values != NULL && eval_state_find(&d->state, key, tokens_key(d, tokens), &kv_bytes, values);
    free(values);
    return known ? 0 : 1;
}
