/* divergence.h - mean KL divergence of configurations from the f16 cache, measured one after the
 * other on contexts of a text. `kvant tune` uses it many times, with settings that it makes on the
 * way.
 *
 * The second half of a context is scored, as in `kvant eval`. A file keeps the results, so an
 * interrupted run can continue. The f16 run of a context is made when the first measurement on the
 * context needs it.
 */
#ifndef KVANT_TOOLS_DIVERGENCE_H
#define KVANT_TOOLS_DIVERGENCE_H

#include "eval_state.h"
#include "engine.h"
#include "progress.h"

typedef struct divergence {
    engine *engine; /* open */
    base_key key;
    eval_state state;
    kv_config f16;
    struct llama_batch batch;
    base base; /* of the context tokens, when has_base */
    bool has_base;
    const llama_token *tokens;
    progress *progress; /* counts tokens */
    size_t n_rows;
} divergence;

/* state: the file, or NULL. False after complaining; divergence_close in any case. */
bool divergence_open(divergence *d, engine *e, uint32_t n_ctx, const char *state, progress *p);
void divergence_close(divergence *d);

/* Whether the file has the measurement: 0 runs, else 1 besides that of f16. */
unsigned divergence_runs(const divergence *d, uint64_t key, const llama_token *tokens);

/* What was measured: divergences of n_rows tokens. key: a fingerprint of all that the configuration
 * consists of; label is for progress. False after complaining or when interrupted. */
bool divergence_measure(divergence *d, const kv_config *config, uint64_t key, const char *label,
                        const llama_token *tokens, double *kld, double *kv_bytes);

#endif /* KVANT_TOOLS_DIVERGENCE_H */
