/* eval_texts.c - files to tokens to chunks. */
#include "eval_texts.h"

#include "command.h"
#include "fingerprint.h"
#include "os.h"
#include "spread.h"
#include "text.h"

#include <stdlib.h>

static llama_token *tokenize_file(const engine *e, const char *file, size_t *n)
{
    size_t bytes = 0;
    char *text = read_text(file, &bytes);
    if (text == NULL)
        return NULL;
    if (bytes > 0 && text[bytes - 1] == '\n')
        bytes--; /* as llama.cpp's -f does */
    llama_token *tokens = engine_tokenize(e, text, bytes, TOKENS_TEXT, n);
    free(text);
    return tokens;
}

static bool add_chunks(eval_texts *t, size_t text, size_t n_tokens, size_t n_chunks,
                       const eval_cut *cut)
{
    eval_chunk *grown = realloc(t->chunks, (t->n_chunks + n_chunks) * sizeof *grown);
    if (grown == NULL)
        return complain("eval: out of memory");
    t->chunks = grown;
    for (size_t i = 0; i < n_chunks; i++) {
        const llama_token *tokens =
            t->tokens[text] + spread_at(n_tokens, cut->n_parts, cut->n_ctx, cut->skip + i);
        t->chunks[t->n_chunks++] =
            (eval_chunk){ text, tokens,
                          kvant_fnv1a(FINGERPRINT_START, tokens, cut->n_ctx * sizeof *tokens) };
    }
    return true;
}

/* How many chunks of a text there are to score. False after complaining. */
static bool count_chunks(const char *file, size_t n_tokens, const eval_cut *cut, size_t *n)
{
    const size_t available = spread_count(n_tokens, cut->n_parts, cut->n_ctx),
                 least = cut->n_parts > 1 ? 1 : 2;
    if (available < least || available <= cut->skip) {
        const size_t needed = cut->skip + 1 > least ? cut->skip + 1 : least;
        complain("eval: %s has %zu tokens, but a context of %zu needs at least %zu", file, n_tokens,
                 cut->n_ctx,
                 (needed + cut->n_parts - 1) / cut->n_parts * cut->n_parts * cut->n_ctx);
        return hint("choose a smaller -c or a longer text");
    }
    *n = available - cut->skip;
    const size_t at_most = cut->at_most > 0 ? cut->at_most : EVAL_USUAL_CHUNKS;
    if (cut->at_most > *n && cut->at_most != EVAL_ALL_CHUNKS)
        complain("eval: %s has only %zu chunks of %zu tokens, fewer than the %zu of --chunks", file,
                 *n, cut->n_ctx, cut->at_most);
    if (cut->at_most == 0 && *n > at_most)
        complain(
            "eval: %zu of the %zu chunks of %s are scored; --chunks N or --chunks all scores more",
            at_most, *n, file);
    if (at_most < *n)
        *n = at_most;
    return true;
}

static bool add_text(eval_texts *t, const engine *e, const char *file, const eval_cut *cut)
{
    size_t n_tokens = 0, n_chunks = 0;
    const size_t text = t->n;
    t->names[text] = kvant_os_file_name(file);
    t->tokens[text] = tokenize_file(e, file, &n_tokens);
    if (t->tokens[text] == NULL)
        return false;
    t->n++;
    return count_chunks(file, n_tokens, cut, &n_chunks) &&
           add_chunks(t, text, n_tokens, n_chunks, cut);
}

bool eval_texts_load(eval_texts *t, const engine *e, const char *const *files, size_t n,
                     const eval_cut *cut)
{
    *t = (eval_texts){ .n = 0 };
    for (size_t i = 0; i < n; i++)
        if (!add_text(t, e, files[i], cut))
            return false;
    return true;
}

void eval_texts_free(eval_texts *t)
{
    for (size_t i = 0; i < t->n; i++)
        free(t->tokens[i]);
    free(t->chunks);
    *t = (eval_texts){ .n = 0 };
}
