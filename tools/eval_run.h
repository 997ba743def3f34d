/* eval_run.h - an evaluation: every chunk of the texts through every configuration, scored against
 * the f16 run of the chunk.
 *
 * Chunks are the outer loop and configurations the inner loop, so only the reference of one chunk
 * is held. Contexts are created anew each time, which costs far less than a chunk. One chunk is one
 * sequence: graphs of 512 tokens already use the machine fully (docs/report.md), so several chunks
 * side by side would gain nothing.
 */
#ifndef KVANT_TOOLS_EVAL_RUN_H
#define KVANT_TOOLS_EVAL_RUN_H

#include "engine.h"
#include "eval_state.h"
#include "progress.h"

enum { EVAL_MAX_TEXTS = 16 };

/* One context of tokens through one configuration, scored against the f16 run of the same tokens. */
typedef struct scored_pass {
    engine *engine;           /* open */
    struct llama_batch batch; /* with room for n_batch tokens */
    const base_key *key;      /* says n_ctx, n_batch and which rows are scored; its tokens are not read */
    const kv_config *config;
    const llama_token *tokens; /* n_ctx */
    score_reference *reference;
    bool define;        /* this is the f16 run that makes the reference */
    const char *label;  /* for progress and errors */
    progress *progress; /* counts tokens */
} scored_pass;

/* values: n_rows. False when interrupted, or after complaining. */
bool scored_pass_run(scored_pass *p, score_value *values, double *kv_bytes);

/* The key of scored runs of a model: positions from first on of n_ctx tokens. The tokens are left out. */
base_key scored_key(const engine *e, const struct llama_model *model, uint32_t n_ctx, uint32_t n_batch, uint32_t first);

typedef struct eval_options {
    engine_options engine;
    const char *files[EVAL_MAX_TEXTS];
    size_t n_files;
    uint32_t n_ctx, n_chunks, n_batch; /* n_chunks: of every text at most; 0: all */
    uint32_t first;                    /* scored from this position on */
    const char *resume;                /* or NULL */
    const char *base_cache;            /* or NULL */
} eval_options;

/* Texts are cut into chunks of the context's length as llama-perplexity cuts them. */
typedef struct eval_chunk {
    size_t text;
    const llama_token *tokens; /* n_ctx */
    uint64_t key;              /* fingerprint of the tokens */
} eval_chunk;

typedef struct eval_tally {
    const kv_config *config;
    uint64_t key; /* fingerprint of all that its values depend on */
    double bits;
    double kv_bytes;     /* after the last complete chunk; NaN before */
    score_value *values; /* n_rows of every chunk */
    bool *done;          /* which chunks have them */
} eval_tally;

typedef struct eval_run {
    engine engine;
    const eval_options *options;
    llama_token *tokens[EVAL_MAX_TEXTS];
    size_t n_texts;
    eval_chunk *chunks; /* of the first text, of the second, ... */
    size_t n_chunks;
    size_t n_rows; /* scored positions of a chunk */
    kv_config f16;
    eval_tally tallies[MAX_CONFIGS + 1]; /* f16 is the first */
    size_t n_tallies;
    base_key key; /* but for the tokens */
    eval_state state;
    struct llama_batch batch;
    progress progress;
} eval_run;

/* Loads, checks and takes over what --resume's file has. False after complaining; eval_release is
 * needed in any case. */
bool eval_prepare(eval_run *r, const eval_options *options);

/* False when interrupted, or after complaining. What is complete stays. */
bool eval_all(eval_run *r);

void eval_release(eval_run *r);

/* What a complete chunk has; NULL before. */
static inline const score_value *eval_values(const eval_run *r, const eval_tally *t, size_t chunk)
{
    return t->done[chunk] ? t->values + chunk * r->n_rows : NULL;
}

/* One row a text (and one of all of them, when there are several), configuration and bin of
 * positions; without a complete chunk none. False after complaining. */
bool eval_print_rows(const eval_run *r, uint32_t n_bins, report_format format);

#endif /* KVANT_TOOLS_EVAL_RUN_H */
