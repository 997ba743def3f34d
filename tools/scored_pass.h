/* scored_pass.h - one context of tokens through one configuration, scored against the f16 run of
 * the same tokens. `kvant eval` and `kvant tune` measure with it. */
#ifndef KVANT_TOOLS_SCORED_PASS_H
#define KVANT_TOOLS_SCORED_PASS_H

#include "base_cache.h"
#include "engine.h"
#include "progress.h"

typedef struct scored_pass {
    engine *engine;           /* open */
    struct llama_batch batch; /* with room for n_batch tokens */
    const base_key *key;      /* says n_ctx, n_batch and which rows are scored; its tokens are not read */
    const kv_config *config;
    const llama_token *tokens; /* n_ctx */
    score_reference *reference;
    bool define;        /* this is the f16 run that makes the reference */
    const char *label;  /* for progress and errors */
    const char *prefix; /* of errors: "eval: ", or "" */
    progress *progress; /* counts tokens */
} scored_pass;

/* values: n_rows. False when interrupted, or after complaining. */
bool scored_pass_run(scored_pass *p, score_value *values, double *kv_bytes);

#endif /* KVANT_TOOLS_SCORED_PASS_H */
