/* token_times.c - the time of a prompt and of each token after it in new contexts, which ggml's own
 * benches do not show.
 *
 *     token_times LIBRARIES PLUGIN MODEL PROMPT ALONE ROUNDS [CONTEXT [LOGITS]]
 *
 * PLUGIN "none": llama.cpp's own device and cache. CONTEXT: n_ctx; by default as long as the tokens
 * need. LOGITS: a file for each token's logits.
 *
 * Prints a line for each context: milliseconds of the prompt, in batches of 512, then of each
 * token. The first context also loads kernels. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "plugin_model.h"

enum { BATCH = 512, MOST = 65536, KINDS = 30000 };

static llama_token tokens[MOST];
static FILE *logits;

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* Milliseconds of n tokens from the first-th on. */
static double decode(struct llama_context *context, int first, int n)
{
    const double begin = now();

    for (int i = 0, some; i < n; i += some) {
        some = n - i < BATCH ? n - i : BATCH;
        if (llama_decode(context, llama_batch_get_one(tokens + first + i, some)) != 0)
            exit(1);
    }
    llama_synchronize(context);
    const double took = now() - begin;
    if (logits != NULL)
        fwrite(llama_get_logits_ith(context, -1), sizeof(float),
               (size_t)llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context))),
               logits);
    return took;
}

static void round_of(struct llama_model *model, int prompt, int alone, int n_ctx)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *context;

    params.n_ctx = (uint32_t)(n_ctx > 0 ? n_ctx : (prompt + alone + 511) / 256 * 256);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(model, params);
    if (context == NULL)
        exit(1);
    sleep(1);
    printf("%.1f:", decode(context, 0, prompt));
    for (int i = 0; i < alone; i++)
        printf(" %.3f", decode(context, prompt + i, 1));
    printf("\n");
    fflush(stdout);
    llama_free(context);
}

int main(int argc, char **argv)
{
    struct llama_model *model;

    if (argc < 7 || atoi(argv[4]) + atoi(argv[5]) > MOST)
        return 2;
    model = load_model(argv[1], argv[2], argv[3]);
    for (int i = 0; i < MOST; i++)
        tokens[i] = (llama_token)(((unsigned)i * 2654435761u >> 8) % KINDS);
    if (argc > 8 && (logits = fopen(argv[8], "wb")) == NULL)
        return 1;
    for (int i = 0; i < atoi(argv[6]); i++)
        round_of(model, atoi(argv[4]), atoi(argv[5]), argc > 7 ? atoi(argv[7]) : 0);
    llama_model_free(model);
    return logits != NULL && fclose(logits) != 0;
}
