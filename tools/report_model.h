/* report_model.h - what the report says of the model and plans with: its limit and name, and how fast it is here. */
#ifndef KVANT_TOOLS_REPORT_MODEL_H
#define KVANT_TOOLS_REPORT_MODEL_H

#include "engine.h"

typedef struct model_facts {
    char name[128], runtime[64];
    uint32_t n_ctx_train;
    double prefill_tps, decode_tps; /* tokens a second of the f16 cache: seconds of measuring, for estimates only */
} model_facts;

/* Loads the model and lets go of it. False when interrupted or after complaining. */
bool model_facts_get(const engine_options *options, model_facts *facts);

#endif /* KVANT_TOOLS_REPORT_MODEL_H */
