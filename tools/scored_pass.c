/* scored_pass.c - see scored_pass.h. */
#include "scored_pass.h"

#include "command.h"
#include "interrupt.h"

static void fill_batch(scored_pass *p, size_t start, size_t n)
{
    const size_t first = p->key->first, last = first + p->key->n_rows;
    engine_fill_batch(p->engine, &p->batch, p->tokens + start, start, n);
    for (size_t i = 0; i < n; i++)
        p->batch.logits[i] = start + i >= first && start + i < last;
}

/* Scores the rows of the batch that was just decoded. */
static bool score_batch(const scored_pass *p, struct llama_context *ctx, size_t start, size_t n,
                        score_value *values)
{
    const size_t first = p->key->first, last = first + p->key->n_rows;
    const size_t from = start > first ? start : first, end = start + n < last ? start + n : last;
    if (from >= end)
        return true;
    const float *logits = ll.llama_get_logits(ctx);
    return logits != NULL && score_rows(p->reference, from - first, p->define, logits, p->tokens + from + 1,
                                        end - from, p->engine->options.n_threads, values + (from - first));
}

/* A batch is one graph (at most ENGINE_UBATCH tokens): llama.cpp would cut a larger one at the same places, and this
 * way only the logits of one are held. */
static bool decode(scored_pass *p, struct llama_context *ctx, score_value *values)
{
    const size_t step = p->key->n_batch, n_ctx = p->key->n_ctx;
    for (size_t start = 0; start < n_ctx; start += step) {
        const size_t n = n_ctx - start < step ? n_ctx - start : step;
        fill_batch(p, start, n);
        const int32_t status = ll.llama_decode(ctx, p->batch);
        if (interrupted())
            return false;
        if (status != 0 || !score_batch(p, ctx, start, n, values)) {
            complain("%s%s: llama.cpp could not decode the batch (status %d)", p->prefix, p->label, (int)status);
            return false;
        }
        progress_add(p->progress, (double)n, p->label);
    }
    return true;
}

bool scored_pass_run(scored_pass *p, score_value *values, double *kv_bytes)
{
    kv_meter meter = { .n = 0 };
    const engine_context_options options = { .n_ctx = (uint32_t)p->key->n_ctx,
                                             .n_batch = (uint32_t)p->key->n_batch,
                                             .meter = &meter };
    struct llama_context *ctx = engine_context(p->engine, p->config, &options);
    if (ctx == NULL)
        return false;
    const bool ok = decode(p, ctx, values);
    if (ok)
        *kv_bytes = engine_kv_bytes(p->engine, p->config, &meter);
    ll.llama_free(ctx);
    return ok;
}
