/* positions.c - divergence of a cache from llama.cpp's own, token by token: where in a context it
 * errs.
 *
 *     positions LIBRARIES PLUGIN MODEL TEXT SKIP CONTEXT LOGITS [OUT [PROMPT]]
 *
 * It decodes tokens SKIP .. SKIP + CONTEXT - 193 of a text in batches of 512. All but the first
 * batch count, up to 4000 tokens. Without OUT, llama.cpp alone (PLUGIN "none") writes their logits
 * to LOGITS. With OUT, each token gets a line in OUT: its divergence from those logits. With
 * PROMPT, a batch has this many tokens, and all later tokens are decoded singly. A model with
 * floating-point weights shows only the cache's errors: activations rounded to 8 bits differ by
 * more. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "plugin_model.h"

enum { BATCH = 512, FROM = 1, MOST = 4000, LEFT = 192 };

static int vocabulary, step;

static void check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "positions: %s failed\n", what);
    exit(1);
}

static llama_token *read_tokens(const struct llama_vocab *vocab, const char *path, int skip, int n)
{
    FILE *file = fopen(path, "rb");
    long bytes;
    char *text;
    llama_token *tokens;

    check(file != NULL && fseek(file, 0, SEEK_END) == 0 && (bytes = ftell(file)) > 0,
          "reading the text");
    rewind(file);
    text = malloc((size_t)bytes);
    tokens = malloc((size_t)bytes * sizeof(*tokens));
    check(text != NULL && tokens != NULL && fread(text, 1, (size_t)bytes, file) == (size_t)bytes,
          "reading the text");
    fclose(file);
    check(llama_tokenize(vocab, text, (int32_t)bytes, tokens, (int32_t)bytes, true, false) >=
              skip + n,
          "finding so many tokens");
    free(text);
    tokens[skip] = llama_vocab_bos(vocab);
    return tokens + skip;
}

static void to_logarithms(const float *logits, double *out)
{
    double most = logits[0], sum = 0;

    for (int i = 0; i < vocabulary; i++)
        most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < vocabulary; i++)
        sum += exp(logits[i] - most);
    for (int i = 0; i < vocabulary; i++)
        out[i] = logits[i] - most - log(sum);
}

static double divergence(const float *logits, const float *from)
{
    double *p = malloc(2 * (size_t)vocabulary * sizeof(*p)), *q = p + vocabulary, sum = 0;

    check(p != NULL, "memory");
    to_logarithms(from, p);
    to_logarithms(logits, q);
    for (int i = 0; i < vocabulary; i++)
        sum += exp(p[i]) * (p[i] - q[i]);
    free(p);
    return sum;
}

static bool counts(int position)
{
    return position >= FROM && (position - FROM) % step == 0;
}

static int batch_at(int at, int n, int prompt)
{
    const int most = prompt == 0 ? BATCH : at == 0 ? prompt : 1;

    return n - at < most ? n - at : most;
}

/* out: NULL, or a file that gets a line for each token that counts. prompt: 0, or the number of
 * tokens that are not decoded singly. */
static void run(struct llama_context *context, llama_token *tokens, int n, int prompt, FILE *file,
                FILE *out)
{
    struct llama_batch batch = llama_batch_init(BATCH, 0, 1);
    float *from = malloc((size_t)vocabulary * sizeof(*from));

    for (int at = 0; at < n; at += batch.n_tokens) {
        batch.n_tokens = batch_at(at, n, prompt);
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = tokens[at + i];
            batch.pos[i] = at + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = counts(at + i);
        }
        check(llama_decode(context, batch) == 0, "decoding");
        for (int i = 0; i < batch.n_tokens; i++) {
            const float *logits = batch.logits[i] ? llama_get_logits_ith(context, i) : NULL;
            if (logits == NULL)
                continue;
            if (out == NULL)
                check(fwrite(logits, sizeof(*logits), (size_t)vocabulary, file) ==
                          (size_t)vocabulary,
                      "writing logits");
            else {
                check(fread(from, sizeof(*from), (size_t)vocabulary, file) == (size_t)vocabulary,
                      "reading logits");
                fprintf(out, "%d %.8g\n", at + i, divergence(logits, from));
            }
        }
    }
    free(from);
    llama_batch_free(batch);
}

int main(int argc, char **argv)
{
    struct llama_context_params context_params = llama_context_default_params();
    FILE *file, *out = NULL;

    const int prompt = argc > 9 ? atoi(argv[9]) : 0;

    if (argc < 8 || atoi(argv[6]) <= LEFT || prompt < 0 || prompt > BATCH)
        return 2;
    struct llama_model *model = load_model(argv[1], argv[2], argv[3]);
    context_params.n_ctx = (uint32_t)atoi(argv[6]);
    context_params.n_batch = context_params.n_ubatch = BATCH;
    context_params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct llama_context *context = llama_init_from_model(model, context_params);
    check(context != NULL, "making a context");
    step = 1 + atoi(argv[6]) / MOST;
    vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    file = fopen(argv[7], argc > 8 ? "rb" : "wb");
    if (argc > 8)
        out = fopen(argv[8], "w");
    check(file != NULL && (argc == 8 || out != NULL), "opening files");
    run(context,
        read_tokens(llama_model_get_vocab(model), argv[4], atoi(argv[5]), atoi(argv[6]) - LEFT),
        atoi(argv[6]) - LEFT, prompt, file, out);
    check(fclose(file) == 0 && (out == NULL || fclose(out) == 0), "writing");
    llama_free(context);
    llama_model_free(model);
    return 0;
}
