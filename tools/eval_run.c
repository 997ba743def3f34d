/* eval_run.c - plan, decode, score, keep. */
#define _POSIX_C_SOURCE 200809L
#include "eval_run.h"

#include "command.h"
#include "fingerprint.h"
#include "scored_pass.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What one run of a chunk needs and gives. */
typedef struct pass {
    const eval_chunk *chunk;
    const eval_tally *tally;
    base *base;
    bool define;         /* this is the f16 run that makes the base */
    score_value *values; /* n_rows */
} pass;

static bool run_pass(eval_run *r, const pass *p, double *kv_bytes)
{
    char label[128];
    scored_pass scored = { .engine = &r->engine,
                           .batch = r->batch,
                           .key = &r->key,
                           .config = p->tally->config,
                           .tokens = p->chunk->tokens,
                           .reference = &p->base->reference,
                           .define = p->define,
                           .label = configs_label(p->tally->config, label, sizeof label),
                           .prefix = "eval: ",
                           .progress = &r->progress };
    return scored_pass_run(&scored, p->values, kv_bytes);
}

static score_value *new_values(const eval_run *r)
{
    score_value *values = calloc(r->n_rows, sizeof *values);
    if (values == NULL)
        complain("eval: out of memory");
    return values;
}

/* Takes over the values. */
static bool keep(eval_run *r, eval_tally *t, size_t chunk, double kv_bytes, score_value *values)
{
    t->chunks[chunk] = values;
    t->kv_bytes = kv_bytes;
    return eval_state_add(&r->state, t->key, r->texts.chunks[chunk].key, kv_bytes, values);
}

static bool eval_tally_chunk(eval_run *r, eval_tally *t, size_t chunk, base *b)
{
    double kv_bytes = 0;
    pass p = { .chunk = &r->texts.chunks[chunk], .tally = t, .base = b, .values = new_values(r) };
    if (p.values != NULL && run_pass(r, &p, &kv_bytes))
        return keep(r, t, chunk, kv_bytes, p.values);
    free(p.values);
    return false;
}

static bool make_base(eval_run *r, size_t chunk, const base_key *key, base *b)
{
    pass p = { .chunk = &r->texts.chunks[chunk], .tally = r->tallies, .base = b, .define = true };
    if (!base_create(b, r->options->base_cache, key) || (p.values = new_values(r)) == NULL)
        return false;
    bool ok = run_pass(r, &p, &b->kv_bytes);
    if (ok) {
        score_values_pack(p.values, r->n_rows, b->values);
        ok = base_publish(b);
    }
    free(p.values);
    return ok;
}

static base_key key_of_chunk(const eval_run *r, size_t chunk)
{
    base_key key = r->key;
    key.tokens = r->texts.chunks[chunk].key;
    return key;
}

/* The base's own values are those of the first row. */
static bool keep_f16(eval_run *r, size_t chunk, const base *b)
{
    if (r->tallies[0].chunks[chunk] != NULL)
        return true;
    score_value *values = new_values(r);
    if (values == NULL)
        return false;
    score_values_unpack(b->values, r->n_rows, values);
    return keep(r, &r->tallies[0], chunk, b->kv_bytes, values);
}

static size_t missing(const eval_run *r, size_t chunk)
{
    size_t n = 0;
    for (size_t i = 0; i < r->n_tallies; i++)
        n += r->tallies[i].chunks[chunk] == NULL;
    return n;
}

static bool eval_chunk_all(eval_run *r, size_t chunk)
{
    base b = { .map = NULL };
    const base_key key = key_of_chunk(r, chunk);
    if (missing(r, chunk) == 0)
        return true;
    bool ok = base_load(&b, r->options->base_cache, &key) || make_base(r, chunk, &key, &b);
    ok = ok && keep_f16(r, chunk, &b);
    for (size_t i = 1; i < r->n_tallies && ok; i++)
        if (r->tallies[i].chunks[chunk] == NULL)
            ok = eval_tally_chunk(r, &r->tallies[i], chunk, &b);
    base_close(&b);
    return ok;
}

/* Runs of a chunk that are ahead: those that are missing, and f16's when its base is to be made. */
static size_t passes_of(const eval_run *r, size_t chunk, bool *makes_base)
{
    const base_key key = key_of_chunk(r, chunk);
    const size_t n = missing(r, chunk), f16 = r->tallies[0].chunks[chunk] == NULL;
    *makes_base = n > 0 && !base_cache_has(r->options->base_cache, &key);
    return n - f16 + *makes_base;
}

bool eval_all(eval_run *r)
{
    size_t passes = 0, bases = 0;
    bool makes_base, ok = true;
    for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++) {
        passes += passes_of(r, chunk, &makes_base);
        bases += makes_base;
    }
    if (r->options->base_cache != NULL && !base_cache_prepare(r->options->base_cache, &r->key, bases))
        return false;
    progress_start(&r->progress, (double)passes * r->options->n_ctx);
    for (size_t chunk = 0; chunk < r->texts.n_chunks && ok; chunk++)
        ok = eval_chunk_all(r, chunk);
    progress_end(&r->progress);
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
        t->chunks = calloc(r->texts.n_chunks, sizeof(score_value *));
        if (t->chunks == NULL) {
            complain("eval: out of memory");
            return false;
        }
    }
    return true;
}

/* Takes what the file has; said when it is something, because the run is shorter than it would be. */
static bool take_over(eval_run *r)
{
    size_t found = 0;
    const size_t all = r->n_tallies * r->texts.n_chunks;
    for (size_t i = 0; i < all; i++) {
        eval_tally *t = &r->tallies[i % r->n_tallies];
        const size_t chunk = i / r->n_tallies;
        score_value *values = new_values(r);
        if (values == NULL)
            return false;
        if (eval_state_find(&r->state, t->key, r->texts.chunks[chunk].key, &t->kv_bytes, values)) {
            t->chunks[chunk] = values;
            found++;
        } else {
            free(values);
        }
    }
    if (found > 0)
        fprintf(stderr, "kvant: eval: going on from %s: %zu of %zu chunks and configurations are done\n",
                r->options->resume, found, all);
    return true;
}

static bool check_context(const eval_run *r, const struct llama_model *model)
{
    const uint32_t limit = (uint32_t)ll.llama_model_n_ctx_train(model);
    if (r->options->n_ctx <= limit)
        return true;
    complain("eval: a context of %lu tokens is beyond the model's %lu", (unsigned long)r->options->n_ctx,
             (unsigned long)limit);
    return false;
}

bool eval_prepare(eval_run *r, const eval_options *options)
{
    *r = (eval_run){ .options = options, .f16 = configs_f16(), .state = { .file = -1 } };
    r->n_rows = options->n_ctx - 1 - options->first;
    if (!engine_open(&r->engine, &options->engine))
        return false;
    const struct llama_model *model = engine_model(&r->engine, &r->f16);
    if (model == NULL || !check_context(r, model) ||
        !eval_texts_load(&r->texts, &r->engine, options->files, options->n_files, options->n_ctx,
                         options->n_chunks) ||
        !prepare_tallies(r))
        return false;
    r->key = (base_key){ .model = kvant_model_fingerprint(options->engine.model),
                         .runtime = engine_runtime_fingerprint(&r->engine),
                         .n_ctx = options->n_ctx,
                         .n_batch = options->n_batch,
                         .first = options->first,
                         .n_rows = r->n_rows,
                         .n_vocab = (uint64_t)ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model)) };
    r->batch = ll.llama_batch_init((int32_t)ENGINE_UBATCH, 0, 1);
    if (r->batch.token == NULL) {
        complain("eval: out of memory");
        return false;
    }
    return eval_state_open(&r->state, options->resume, &r->key) && take_over(r);
}

void eval_release(eval_run *r)
{
    for (size_t i = 0; i < r->n_tallies; i++) {
        for (size_t chunk = 0; chunk < r->texts.n_chunks && r->tallies[i].chunks != NULL; chunk++)
            free(r->tallies[i].chunks[chunk]);
        free(r->tallies[i].chunks);
    }
    if (r->batch.token != NULL)
        ll.llama_batch_free(r->batch);
    eval_state_close(&r->state);
    eval_texts_free(&r->texts);
    engine_close(&r->engine);
}
