/* eval_texts.c - files to tokens to chunks. */
#include "eval_texts.h"

#include "command.h"
#include "fingerprint.h"
#include "text.h"

#include <stdlib.h>
#include <string.h>

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

static bool add_chunks(eval_texts *t, size_t text, size_t n_chunks, size_t n_ctx)
{
    eval_chunk *grown = realloc(t->chunks, (t->n_chunks + n_chunks) * sizeof *grown);
    if (grown == NULL) {
        complain("eval: out of memory");
        return false;
    }
    t->chunks = grown;
    for (size_t i = 0; i < n_chunks; i++) {
        const llama_token *tokens = t->tokens[text] + i * n_ctx;
        t->chunks[t->n_chunks++] =
            (eval_chunk){ text, tokens, fingerprint_bytes(FINGERPRINT_START, tokens, n_ctx * sizeof *tokens) };
    }
    return true;
}

static bool add_text(eval_texts *t, const engine *e, const char *file, size_t n_ctx, size_t max_chunks)
{
    size_t n_tokens = 0;
    const size_t text = t->n;
    t->names[text] = file_name(file);
    t->tokens[text] = tokenize_file(e, file, &n_tokens);
    if (t->tokens[text] == NULL)
        return false;
    t->n++;
    const size_t available = n_tokens / n_ctx;
    if (available < 2) {
        complain("eval: %s has %zu tokens, a context of %zu needs at least %zu", file, n_tokens, n_ctx, 2 * n_ctx);
        hint("choose a smaller -c or a longer text");
        return false;
    }
    if (max_chunks > available)
        complain("eval: %s has %zu chunks of %zu tokens, fewer than the %zu asked for", file, available, n_ctx,
                 max_chunks);
    return add_chunks(t, text, max_chunks > 0 && max_chunks < available ? max_chunks : available, n_ctx);
}

bool eval_texts_load(eval_texts *t, const engine *e, const char *const *files, size_t n, size_t n_ctx,
                     size_t max_chunks)
{
    *t = (eval_texts){ .n = 0 };
    for (size_t i = 0; i < n; i++)
        if (!add_text(t, e, files[i], n_ctx, max_chunks))
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
