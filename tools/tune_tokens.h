/* tune_tokens.h - the tokens that `kvant tune` reads: contexts for measuring, and other contexts
 * for the final check.
 *
 * Every text is cut into equal parts. The first context of each part is measured, so a text counts
 * from beginning to end. The check takes the next contexts of the parts, in turn, or contexts of a
 * text of its own.
 */
#ifndef KVANT_TOOLS_TUNE_TOKENS_H
#define KVANT_TOOLS_TUNE_TOKENS_H

#include "engine.h"

enum { TUNE_MAX_TEXTS = 16 };

typedef struct tune_texts {
    const char *files[TUNE_MAX_TEXTS]; /* "-" is stdin */
    size_t n;
    const char *report; /* or NULL */
    uint32_t n_ctx;
    uint32_t n_parts;  /* of each text */
    uint32_t n_checks; /* contexts of the check */
} tune_texts;

typedef struct tune_tokens {
    llama_token *measured; /* n_measured contexts behind each other, text by text */
    llama_token *check;    /* n_checks contexts */
    size_t n_measured, n_checks;
} tune_tokens;

/* False after complaining, such as of texts that are too short; tune_tokens_free in any case. */
bool tune_tokens_load(tune_tokens *t, const engine *e, const tune_texts *texts);
void tune_tokens_free(tune_tokens *t);

#endif /* KVANT_TOOLS_TUNE_TOKENS_H */
