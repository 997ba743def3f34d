/* inspect.h - what cmd_inspect.c finds out and inspect_rows.c prints. */
#ifndef KVANT_TOOLS_INSPECT_H
#define KVANT_TOOLS_INSPECT_H

#include "engine.h"

enum { INSPECT_MAX_CONTEXTS = 6 };

typedef struct inspect_contexts {
    uint32_t n_ctx[INSPECT_MAX_CONTEXTS];
    size_t n;
} inspect_contexts;

typedef struct inspect_facts {
    char kvant[64], name[128], runtime[64];
    char model[20], text[20];     /* fingerprints */
    double n_ctx_train, n_tokens; /* NaN: no text */
} inspect_facts;

/* A table of a line for each configuration, or a JSON object for each configuration and context.
 * sizes: by context, then by configuration; not read without contexts. False after complaining. */
bool inspect_print(engine *e, const inspect_facts *f, const inspect_contexts *contexts,
                   const kvp_kv_size *sizes, bool json);

#endif /* KVANT_TOOLS_INSPECT_H */
