/* divergence.c - see divergence.h. */
#define _POSIX_C_SOURCE 200809L
#include "divergence.h"

#include "command.h"
#include "fingerprint.h"
#include "eval_run.h"

#include <stdlib.h>

bool divergence_open(divergence *d, engine *e, uint32_t n_ctx, const char *state, progress *p)
{
    *d = (divergence){ .engine = e, .f16 = configs_f16(), .state = { .file = -1 }, .progress = p };
    const struct llama_model *model = engine_model(e, &d->f16);
    if (model == NULL)
        return false;
    d->n_rows = n_ctx - 1 - n_ctx / 2;
    d->key = scored_key(e, model, n_ctx, ENGINE_UBATCH, n_ctx / 2);
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

static bool run(divergence *d, const kv_config *config, const char *label, bool define, score_value *values,
                double *kv_bytes)
{
    scored_pass pass = { .engine = d->engine,
                         .batch = d->batch,
                         .key = &d->key,
                         .config = config,
                         .tokens = d->tokens,
                         .reference = &d->base.reference,
                         .define = define,
                         .label = label,
                         .progress = d->progress };
    return scored_pass_run(&pass, values, kv_bytes);
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
