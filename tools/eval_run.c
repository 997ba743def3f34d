/* eval_run.c - plan, decode, score, keep. */
#define _POSIX_C_SOURCE 200809L
#include "eval_run.h"

#include "command.h"
#include "interrupt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool out_of_memory(void)
{
    return complain("eval: out of memory");
}

/* A pass: a chunk through a configuration, scored against the chunk's base */

typedef struct pass {
    eval_run *run;
    const llama_token *tokens; /* n_ctx */
    base *base;
    bool define;         /* this is the f16 run that makes the base */
    score_value *values; /* n_rows */
    const char *label;   /* for progress and errors */
} pass;

/* Decodes n tokens from start on and scores the rows among them that count. */
static bool run_batch(const pass *p, struct llama_context *ctx, size_t start, size_t n)
{
    eval_run *r = p->run;
    const size_t first = r->options->first, last = first + r->n_rows;
    const size_t from = start > first ? start : first, end = start + n < last ? start + n : last;
    engine_fill_batch(&r->engine, &r->batch, p->tokens + start, start, n);
    for (size_t i = from; i < end; i++)
        r->batch.logits[i - start] = 1;
    const int32_t status = ll.llama_decode(ctx, r->batch);
    if (interrupted())
        return false;
    const float *logits = status == 0 && from < end ? ll.llama_get_logits(ctx) : NULL;
    const bool scored =
        logits != NULL &&
        score_rows(&p->base->reference, from - first, p->define, logits, p->tokens + from + 1,
                   end - from, r->engine.options.n_threads, p->values + (from - first));
    if (scored || (status == 0 && from >= end))
        return true;
    return complain("eval: %s: llama.cpp could not decode the batch (status %d)", p->label,
                    (int)status);
}

/* A batch is one graph (at most ENGINE_UBATCH tokens). llama.cpp would cut a larger batch at the
 * same tokens, and with small batches only one graph's logits are held. */
static bool run_batches(const pass *p, struct llama_context *ctx)
{
    const size_t step = p->run->options->n_batch, n_ctx = p->run->options->n_ctx;
    for (size_t start = 0; start < n_ctx; start += step) {
        const size_t n = n_ctx - start < step ? n_ctx - start : step;
        if (!run_batch(p, ctx, start, n))
            return false;
        progress_add(&p->run->progress, (double)n, p->label);
    }
    return true;
}

static bool run_pass(eval_run *r, const eval_tally *t, size_t chunk, base *b, bool define,
                     double *kv_bytes)
{
    kv_meter meter = { .n = 0 };
    pass p = { .run = r,
               .tokens = r->texts.chunks[chunk].tokens,
               .base = b,
               .define = define,
               .label = t->config->label,
               .values = t->values + chunk * r->n_rows };
    const engine_context_options options = { .n_ctx = r->options->n_ctx,
                                             .n_batch = r->options->n_batch,
                                             .meter = &meter };
    struct llama_context *ctx = engine_context(&r->engine, t->config, &options);
    if (ctx == NULL)
        return false;
    const bool ok = run_batches(&p, ctx);
    if (ok)
        *kv_bytes = engine_kv_bytes(&r->engine, t->config, &meter);
    ll.llama_free(ctx);
    return ok;
}

/* Chunks */

static bool keep_values(eval_run *r, eval_tally *t, size_t chunk, double kv_bytes)
{
    t->done[chunk] = true;
    t->kv_bytes = kv_bytes;
    return eval_state_add(&r->state, t->key, r->texts.chunks[chunk].key, kv_bytes,
                          t->values + chunk * r->n_rows);
}

static base_key key_of_chunk(const eval_run *r, size_t chunk)
{
    base_key key = r->key;
    key.tokens = r->texts.chunks[chunk].key;
    return key;
}

static bool make_base(eval_run *r, size_t chunk, const base_key *key, base *b)
{
    eval_tally *f16 = &r->tallies[0];
    if (!base_create(b, r->options->base_cache, key) ||
        !run_pass(r, f16, chunk, b, true, &b->kv_bytes))
        return false;
    memcpy(b->values, f16->values + chunk * r->n_rows, r->n_rows * sizeof *b->values);
    return base_publish(b);
}

/* Keeps the values that the base has, which are f16's own: the first line of the report. */
static bool keep_f16(eval_run *r, size_t chunk, const base *b)
{
    eval_tally *f16 = &r->tallies[0];
    if (f16->done[chunk])
        return true;
    memcpy(f16->values + chunk * r->n_rows, b->values, r->n_rows * sizeof *b->values);
    return keep_values(r, f16, chunk, b->kv_bytes);
}

static size_t missing(const eval_run *r, size_t chunk)
{
    size_t n = 0;
    for (size_t i = 0; i < r->n_tallies; i++)
        n += !r->tallies[i].done[chunk];
    return n;
}

static bool eval_chunk_all(eval_run *r, size_t chunk)
{
    base b = { .map = NULL };
    double kv_bytes;
    const base_key key = key_of_chunk(r, chunk);
    if (missing(r, chunk) == 0)
        return true;
    bool ok = (base_load(&b, r->options->base_cache, &key) || make_base(r, chunk, &key, &b)) &&
              keep_f16(r, chunk, &b);
    for (size_t i = 1; i < r->n_tallies && ok; i++)
        if (!r->tallies[i].done[chunk])
            ok = run_pass(r, &r->tallies[i], chunk, &b, false, &kv_bytes) &&
                 keep_values(r, &r->tallies[i], chunk, kv_bytes);
    base_close(&b);
    return ok;
}

bool eval_all(eval_run *r)
{
    size_t passes = 0, bases = 0;
    bool ok = true;
    for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++) {
        const base_key key = key_of_chunk(r, chunk);
        const size_t n = missing(r, chunk);
        const bool makes_base = n > 0 && !base_cache_has(r->options->base_cache, &key);
        /* Making the base is f16's own pass. */
        passes += n - !r->tallies[0].done[chunk] + makes_base;
        bases += makes_base;
    }
    if (r->options->base_cache != NULL &&
        !base_cache_prepare(r->options->base_cache, &r->key, bases))
        return false;
    progress_start(&r->progress, (double)passes * r->options->n_ctx);
    for (size_t chunk = 0; chunk < r->texts.n_chunks && ok; chunk++)
        ok = eval_chunk_all(r, chunk);
    progress_end(&r->progress);
    return ok;
}

/* Preparation */

static bool prepare_tallies(eval_run *r)
{
    const kv_config *configs[MAX_CONFIGS + 1];
    r->n_tallies = configs_after_f16(&r->options->engine.configs, &r->f16, configs);
    for (size_t i = 0; i < r->n_tallies; i++) {
        eval_tally *t = &r->tallies[i];
        t->config = configs[i];
        if (!engine_bits(&r->engine, t->config, &t->bits))
            return false;
        t->kv_bytes = NAN;
        t->key = config_key(t->config);
        t->values = calloc(r->texts.n_chunks * r->n_rows, sizeof *t->values);
        t->done = calloc(r->texts.n_chunks, sizeof *t->done);
        if (t->values == NULL || t->done == NULL)
            return out_of_memory();
    }
    return true;
}

/* Takes results over from the file of --resume. It says so when there are any, because the run is
 * then shorter than usual. */
static void take_over_results(eval_run *r)
{
    size_t found = 0;
    for (size_t i = 0; i < r->n_tallies; i++) {
        eval_tally *t = &r->tallies[i];
        for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++)
            found += t->done[chunk] = eval_state_find(&r->state, t->key, r->texts.chunks[chunk].key,
                                                      &t->kv_bytes, t->values + chunk * r->n_rows);
    }
    if (found > 0)
        report_line(
            "kvant: ", "eval: continues from %s: %zu of %zu chunks and configurations are done",
            r->options->resume, found, r->n_tallies * r->texts.n_chunks);
}

static bool check_context(const eval_run *r, const struct llama_model *model)
{
    const uint32_t limit = (uint32_t)ll.llama_model_n_ctx_train(model);
    if (r->options->n_ctx <= limit)
        return true;
    return complain("eval: a context of %lu tokens is longer than the model's limit of %lu",
                    (unsigned long)r->options->n_ctx, (unsigned long)limit);
}

bool eval_prepare(eval_run *r, const eval_options *options)
{
    *r = (eval_run){ .options = options, .f16 = configs_f16(), .state = { .file = -1 } };
    r->n_rows = options->n_ctx - 1 - options->first;
    if (!engine_open(&r->engine, &options->engine))
        return false;
    const struct llama_model *model = engine_model(&r->engine, &r->f16);
    const eval_cut cut = { options->n_ctx, options->n_parts, options->skip, options->n_chunks };
    if (model == NULL || !check_context(r, model) ||
        !eval_texts_load(&r->texts, &r->engine, options->files, options->n_files, &cut) ||
        !prepare_tallies(r))
        return false;
    r->key =
        (base_key){ .model = kvant_model_fingerprint(options->engine.model),
                    .runtime = engine_runtime_fingerprint(&r->engine),
                    .n_ctx = options->n_ctx,
                    .n_batch = options->n_batch,
                    .first = options->first,
                    .n_rows = r->n_rows,
                    .n_vocab = (uint64_t)ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model)) };
    r->batch = ll.llama_batch_init((int32_t)ENGINE_UBATCH, 0, 1);
    if (r->batch.token == NULL)
        return out_of_memory();
    if (!eval_state_open(&r->state, options->resume, &r->key))
        return false;
    take_over_results(r);
    return true;
}

void eval_release(eval_run *r)
{
    for (size_t i = 0; i < r->n_tallies; i++) {
        free(r->tallies[i].values);
        free(r->tallies[i].done);
    }
    if (r->batch.token != NULL)
        ll.llama_batch_free(r->batch);
    eval_state_close(&r->state);
    eval_texts_free(&r->texts);
    engine_close(&r->engine);
}
