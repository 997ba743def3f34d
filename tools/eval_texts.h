/* eval_texts.h - the texts of an evaluation, cut into chunks of the context's length as
 * llama-perplexity cuts them, unless they are spread over the text. */
#pragma once

#include "engine.h"

enum { EVAL_MAX_TEXTS = 16, EVAL_USUAL_CHUNKS = 4 };
#define EVAL_ALL_CHUNKS UINT32_MAX

typedef struct eval_chunk {
    size_t text;
    const llama_token *tokens; /* n_ctx */
    uint64_t key;              /* fingerprint of the tokens */
} eval_chunk;

typedef struct eval_texts {
    size_t n;
    const char *names[EVAL_MAX_TEXTS]; /* of files, without their folders */
    llama_token *tokens[EVAL_MAX_TEXTS];
    eval_chunk *chunks; /* of the first text, of the second, ... */
    size_t n_chunks;
} eval_texts;

/* Which chunks of every file (spread.h). */
typedef struct eval_cut {
    size_t n_ctx;
    uint32_t n_parts; /* at least 1 */
    size_t skip;      /* chunks left out */
    size_t
        at_most; /* chunks behind them; 0: EVAL_USUAL_CHUNKS, and it is said when there are more */
} eval_cut;

/* False after complaining; free it in any case. */
bool eval_texts_load(eval_texts *t, const engine *e, const char *const *files, size_t n,
                     const eval_cut *cut);
void eval_texts_free(eval_texts *t);
