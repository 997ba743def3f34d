/* inspect.h - what cmd_inspect.c finds out and inspect_rows.c prints. */
#pragma once

#include "engine.h"

/* Sizes are told for a quarter, a half and all of a context's cells. */
enum { INSPECT_MAX_CONTEXTS = 6, INSPECT_FILLS = 3 };
extern const double inspect_shares[INSPECT_FILLS];

typedef struct inspect_contexts {
    uint32_t n_ctx[INSPECT_MAX_CONTEXTS];
    size_t n;
} inspect_contexts;

typedef struct inspect_facts {
    char kvant[64], name[128], runtime[64];
    char model[20], text[20];     /* fingerprints */
    double n_ctx_train, n_tokens; /* NaN: no text */
} inspect_facts;

/* Prints a table or JSON. With one context the table has a line for each configuration and share of
 * its cells, with several a line for each configuration when the cache is full. JSON has an object
 * for each configuration, context and share. fills: by context, then by configuration, then by
 * share; not read without contexts. False after complaining. */
bool inspect_print(engine *e, const inspect_facts *f, const inspect_contexts *contexts,
                   const engine_fill *fills, bool json);
