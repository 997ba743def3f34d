/* tune_tokens.c - see tune_tokens.h. */
#include "tune_tokens.h"

#include "command.h"
#include "text.h"

#include <stdlib.h>
#include <string.h>

/* A text's tokens, at least as many as needed. NULL after complaining. */
static llama_token *load(const engine *e, const char *file, size_t needed, size_t *n)
{
    size_t bytes = 0;
    char *text = read_text(file, &bytes);
    llama_token *tokens = text != NULL ? engine_tokenize(e, text, bytes, TOKENS_TEXT, n) : NULL;
    free(text);
    if (tokens == NULL || *n >= needed)
        return tokens;
    complain("tune: %s gives %zu tokens, %zu are needed", file, *n, needed);
    hint("use a longer text, a smaller --probe-ctx, or fewer --probe-chunks and --chunks");
    free(tokens);
    return NULL;
}

static void copy_context(const tune_texts *texts, llama_token *to, size_t context, const llama_token *from)
{
    memcpy(to + context * texts->n_ctx, from, texts->n_ctx * sizeof *from);
}

/* Contexts of a part: the measured one, and those that the check takes from the part that gives most. */
static size_t contexts_of_a_part(const tune_texts *texts)
{
    const size_t parts = texts->n * texts->n_parts;
    return 1 + (texts->report == NULL ? (texts->n_checks + parts - 1) / parts : 0);
}

static bool load_text(tune_tokens *t, const engine *e, const tune_texts *texts, size_t text)
{
    const size_t parts = texts->n * texts->n_parts, needed = contexts_of_a_part(texts) * texts->n_ctx;
    size_t n = 0;
    llama_token *tokens = load(e, texts->files[text], needed * texts->n_parts, &n);
    for (size_t i = 0; tokens != NULL && i < texts->n_parts; i++) {
        const size_t part = text * texts->n_parts + i;
        const llama_token *first = tokens + n / texts->n_parts * i;
        copy_context(texts, t->measured, part, first);
        for (size_t check = part; texts->report == NULL && check < texts->n_checks; check += parts)
            copy_context(texts, t->check, check, first + (1 + check / parts) * texts->n_ctx);
    }
    free(tokens);
    return tokens != NULL;
}

static bool load_report(tune_tokens *t, const engine *e, const tune_texts *texts)
{
    size_t n = 0;
    llama_token *tokens = load(e, texts->report, (size_t)texts->n_checks * texts->n_ctx, &n);
    for (size_t i = 0; tokens != NULL && i < texts->n_checks; i++)
        copy_context(texts, t->check, i, tokens + i * texts->n_ctx);
    free(tokens);
    return tokens != NULL;
}

bool tune_tokens_load(tune_tokens *t, const engine *e, const tune_texts *texts)
{
    *t = (tune_tokens){ .n_measured = texts->n * texts->n_parts, .n_checks = texts->n_checks };
    t->measured = calloc(t->n_measured, texts->n_ctx * sizeof *t->measured);
    t->check = calloc(t->n_checks, texts->n_ctx * sizeof *t->check);
    if (t->measured == NULL || t->check == NULL) {
        complain("tune: out of memory");
        return false;
    }
    for (size_t text = 0; text < texts->n; text++)
        if (!load_text(t, e, texts, text))
            return false;
    return texts->report == NULL || load_report(t, e, texts);
}

void tune_tokens_free(tune_tokens *t)
{
    free(t->measured);
    free(t->check);
    *t = (tune_tokens){ .measured = NULL };
}
