/* eval_run.c - plan, decode, score, keep. */
#define _POSIX_C_SOURCE 200809L
#include "eval_run.h"

#include "choices.h"
#include "command.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool out_of_memory(void)
{
    return complain("eval: out of memory");
}

/* A pass */

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
        if (status != 0 || !score_batch(p, ctx, start, n, values))
            return complain("%s: llama.cpp could not decode the batch (status %d)", p->label, (int)status);
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

base_key scored_key(const engine *e, const struct llama_model *model, uint32_t n_ctx, uint32_t n_batch, uint32_t first)
{
    return (base_key){ .model = kvant_model_fingerprint(e->options.model),
                       .runtime = engine_runtime_fingerprint(e),
                       .n_ctx = n_ctx,
                       .n_batch = n_batch,
                       .first = first,
                       .n_rows = n_ctx - 1 - first,
                       .n_vocab = (uint64_t)ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model)) };
}

/* Chunks */

static bool run_pass(eval_run *r, const eval_tally *t, size_t chunk, base *b, bool define, double *kv_bytes)
{
    char label[128];
    scored_pass pass = { .engine = &r->engine,
                         .batch = r->batch,
                         .key = &r->key,
                         .config = t->config,
                         .tokens = r->chunks[chunk].tokens,
                         .reference = &b->reference,
                         .define = define,
                         .label = configs_label(t->config, label, sizeof label),
                         .progress = &r->progress };
    return scored_pass_run(&pass, t->values + chunk * r->n_rows, kv_bytes);
}

static bool keep(eval_run *r, eval_tally *t, size_t chunk, double kv_bytes)
{
    t->done[chunk] = true;
    t->kv_bytes = kv_bytes;
    return eval_state_add(&r->state, t->key, r->chunks[chunk].key, kv_bytes, t->values + chunk * r->n_rows);
}

static base_key key_of_chunk(const eval_run *r, size_t chunk)
{
    base_key key = r->key;
    key.tokens = r->chunks[chunk].key;
    return key;
}

static bool make_base(eval_run *r, size_t chunk, const base_key *key, base *b)
{
    eval_tally *f16 = &r->tallies[0];
    if (!base_create(b, r->options->base_cache, key) || !run_pass(r, f16, chunk, b, true, &b->kv_bytes))
        return false;
    memcpy(b->values, f16->values + chunk * r->n_rows, r->n_rows * sizeof *b->values);
    return base_publish(b);
}

/* The base's own values are those of the first row. */
static bool keep_f16(eval_run *r, size_t chunk, const base *b)
{
    eval_tally *f16 = &r->tallies[0];
    if (f16->done[chunk])
        return true;
    memcpy(f16->values + chunk * r->n_rows, b->values, r->n_rows * sizeof *b->values);
    return keep(r, f16, chunk, b->kv_bytes);
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
    bool ok = (base_load(&b, r->options->base_cache, &key) || make_base(r, chunk, &key, &b)) && keep_f16(r, chunk, &b);
    for (size_t i = 1; i < r->n_tallies && ok; i++)
        if (!r->tallies[i].done[chunk])
            ok = run_pass(r, &r->tallies[i], chunk, &b, false, &kv_bytes) && keep(r, &r->tallies[i], chunk, kv_bytes);
    base_close(&b);
    return ok;
}

bool eval_all(eval_run *r)
{
    size_t passes = 0, bases = 0;
    bool ok = true;
    for (size_t chunk = 0; chunk < r->n_chunks; chunk++) {
        const base_key key = key_of_chunk(r, chunk);
        const size_t n = missing(r, chunk);
        const bool makes_base = n > 0 && !base_cache_has(r->options->base_cache, &key);
        passes += n - !r->tallies[0].done[chunk] + makes_base; /* f16's is that of its base */
        bases += makes_base;
    }
    if (r->options->base_cache != NULL && !base_cache_prepare(r->options->base_cache, &r->key, bases))
        return false;
    progress_start(&r->progress, (double)passes * r->options->n_ctx);
    for (size_t chunk = 0; chunk < r->n_chunks && ok; chunk++)
        ok = eval_chunk_all(r, chunk);
    progress_end(&r->progress);
    return ok;
}

/* Preparation */

static llama_token *tokenize_file(const engine *e, const char *file, size_t *n)
{
    size_t bytes = 0;
    char *text = read_text(file, &bytes);
    if (text == NULL)
        return NULL;
    if (bytes > 0 && text[bytes - 1] == '\n')
        bytes--; /* as llama.cpp's -f does */
    llama_token *tokens = engine_tokenize(e, text, bytes, TOKENS_TEXT, n);
    free(text);
    return tokens;
}

static bool add_text(eval_run *r, const char *file)
{
    size_t n_tokens = 0;
    const size_t n_ctx = r->options->n_ctx, wanted = r->options->n_chunks, text = r->n_texts;
    if ((r->tokens[text] = tokenize_file(&r->engine, file, &n_tokens)) == NULL)
        return false;
    r->n_texts++;
    const size_t available = n_tokens / n_ctx, n = wanted > 0 && wanted < available ? wanted : available;
    if (available < 2) {
        complain("eval: %s has %zu tokens, a context of %zu needs at least %zu", file_name(file), n_tokens, n_ctx,
                 2 * n_ctx);
        return hint("choose a smaller -c or a longer text");
    }
    if (wanted > available)
        complain("eval: %s has %zu chunks of %zu tokens, fewer than the %zu asked for", file_name(file), available,
                 n_ctx, wanted);
    eval_chunk *grown = realloc(r->chunks, (r->n_chunks + n) * sizeof *grown);
    if (grown == NULL)
        return out_of_memory();
    r->chunks = grown;
    for (size_t i = 0; i < n; i++) {
        const llama_token *tokens = r->tokens[text] + i * n_ctx;
        r->chunks[r->n_chunks++] =
            (eval_chunk){ text, tokens, fingerprint_bytes(FINGERPRINT_START, tokens, n_ctx * sizeof *tokens) };
    }
    return true;
}

static bool load_texts(eval_run *r)
{
    bool ok = true;
    for (size_t i = 0; i < r->options->n_files && ok; i++)
        ok = add_text(r, r->options->files[i]);
    return ok;
}

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
        t->values = calloc(r->n_chunks * r->n_rows, sizeof *t->values);
        t->done = calloc(r->n_chunks, sizeof *t->done);
        if (t->values == NULL || t->done == NULL)
            return out_of_memory();
    }
    return true;
}

/* Takes what the file has; said when it is something, because the run is shorter than it would be. */
static void take_over(eval_run *r)
{
    size_t found = 0;
    for (size_t i = 0; i < r->n_tallies; i++) {
        eval_tally *t = &r->tallies[i];
        for (size_t chunk = 0; chunk < r->n_chunks; chunk++)
            found += t->done[chunk] = eval_state_find(&r->state, t->key, r->chunks[chunk].key, &t->kv_bytes,
                                                      t->values + chunk * r->n_rows);
    }
    if (found > 0)
        fprintf(stderr, "kvant: eval: going on from %s: %zu of %zu chunks and configurations are done\n",
                r->options->resume, found, r->n_tallies * r->n_chunks);
}

static bool check_context(const eval_run *r, const struct llama_model *model)
{
    const uint32_t limit = (uint32_t)ll.llama_model_n_ctx_train(model);
    if (r->options->n_ctx <= limit)
        return true;
    return complain("eval: a context of %lu tokens is beyond the model's %lu", (unsigned long)r->options->n_ctx,
             (unsigned long)limit);
}

bool eval_prepare(eval_run *r, const eval_options *options)
{
    *r = (eval_run){ .options = options, .f16 = configs_f16(), .state = { .file = -1 } };
    r->n_rows = options->n_ctx - 1 - options->first;
    if (!engine_open(&r->engine, &options->engine))
        return false;
    const struct llama_model *model = engine_model(&r->engine, &r->f16);
    if (model == NULL || !check_context(r, model) || !load_texts(r) || !prepare_tallies(r))
        return false;
    r->key = scored_key(&r->engine, model, options->n_ctx, options->n_batch, options->first);
    r->batch = ll.llama_batch_init((int32_t)ENGINE_UBATCH, 0, 1);
    if (r->batch.token == NULL)
        return out_of_memory();
    if (!eval_state_open(&r->state, options->resume, &r->key))
        return false;
    take_over(r);
    return true;
}

void eval_release(eval_run *r)
{
    for (size_t i = 0; i < r->n_tallies; i++) {
        free(r->tallies[i].values);
        free(r->tallies[i].done);
    }
    for (size_t i = 0; i < r->n_texts; i++)
        free(r->tokens[i]);
    free(r->chunks);
    if (r->batch.token != NULL)
        ll.llama_batch_free(r->batch);
    eval_state_close(&r->state);
    engine_close(&r->engine);
}
