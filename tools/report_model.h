/* report_model.h - facts about the model for the report and its plan: its context limit, its name,
 * its speed here, and whether text and configurations suit it. */
#ifndef KVANT_TOOLS_REPORT_MODEL_H
#define KVANT_TOOLS_REPORT_MODEL_H

#include "engine.h"

typedef struct model_facts {
    char name[128], runtime[64];
    uint32_t n_ctx_train;
    size_t n_text_tokens;
    uint64_t text_fingerprint;
    double prefill_tps, decode_tps; /* tokens a second of the f16 cache: seconds of measuring, for estimates only */
} model_facts;

/* Loads the model and lets go of it. False when interrupted or after complaining, also of a
 * configuration that is not for this model: a report that runs for an hour says so at its
 * beginning. */
bool model_facts_get(const engine_options *options, const char *text, model_facts *facts);

#endif /* KVANT_TOOLS_REPORT_MODEL_H */
