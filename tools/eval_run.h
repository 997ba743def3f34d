/* eval_run.h - an evaluation: every chunk of the texts through every configuration, scored against
 * the f16 run of the chunk.
 *
 * Chunks are the outer loop and configurations the inner loop, so only the reference of one chunk
 * is held. Contexts are created again for each chunk, which costs far less than the chunk. One
 * chunk is one sequence: graphs of 512 tokens already use the whole machine, so decoding several
 * chunks together would gain nothing. */
#pragma once

#include "eval_state.h"
#include "eval_texts.h"
#include "progress.h"

typedef struct eval_options {
    engine_options engine;
    const char *files[EVAL_MAX_TEXTS];
    size_t n_files;
    uint32_t n_ctx, n_batch;
    uint32_t n_parts, skip, n_chunks; /* as in eval_cut */
    uint32_t first;                   /* scored from this position on */
    const char *resume;               /* or NULL */
    const char *base_cache;           /* or NULL */
} eval_options;

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
    eval_texts texts;
    size_t n_rows; /* scored positions of a chunk */
    kv_config f16;
    eval_tally tallies[MAX_CONFIGS + 1]; /* f16 is the first */
    size_t n_tallies;
    base_key key; /* without the tokens */
    eval_state state;
    struct llama_batch batch;
    progress progress;
} eval_run;

/* Loads, checks and takes over what --resume's file has. False after complaining; eval_release is
 * needed in any case. */
bool eval_prepare(eval_run *r, const eval_options *options);

/* Runs all chunks. False when interrupted, or after complaining; values of complete chunks stay. */
bool eval_all(eval_run *r);

void eval_release(eval_run *r);

/* The values of a complete chunk, n_rows of them; NULL when the chunk is not complete. */
static inline const score_value *eval_values(const eval_run *r, const eval_tally *t, size_t chunk)
{
    return t->done[chunk] ? t->values + chunk * r->n_rows : NULL;
}

typedef struct eval_form {
    uint32_t n_bins; /* of positions */
    bool wide;       /* tables have percentiles, too */
    report_format format;
} eval_form;

/* A row per text (and one of all of them, when there are several), configuration and bin of
 * positions; without a complete chunk none. False after complaining. */
bool eval_print_rows(const eval_run *r, const eval_form *form);

/* Writes the value of every scored token of a complete evaluation to a safetensors file, for
 * statistics that reports do not have. Configuration I is the I-th line of the report; 0 is the f16
 * cache. Tensors "kld.I" and "nll.I" [chunks, positions] are F64: the KL divergence from the f16
 * cache, and -ln p of the token that follows. The metadata "configuration.I" is the configuration's
 * label. False after complaining; the file at `path` is then as before. */
bool eval_values_write(const eval_run *r, const char *path);
