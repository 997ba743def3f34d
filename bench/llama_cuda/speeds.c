/* speeds.c - the times of prompts, and of each token after a prompt, with one loading of the model.
 *
 *     speeds LIBRARIES PLUGIN MODEL WORK...
 *
 * PLUGIN "none": llama.cpp's own device and cache.
 *
 * WORK "t,PROMPT,ALONE,ROUNDS,CONTEXT" prints a line for each new context: milliseconds of the
 * prompt, in batches of 512, then of each token. The first context also loads kernels.
 *
 * WORK "p,REPEATS,DEPTH,SIZE[,CONTEXT]" prints tokens per second of prompts of SIZE tokens behind
 * DEPTH tokens. It does as llama-bench: the first prompt does not count, and the cache is emptied
 * before each prompt. Without CONTEXT a context has DEPTH + SIZE tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "plugin_model.h"

enum { MOST = 65536, KINDS = 30000, BATCH = 512, PROMPT_BATCH = 2048, BEHIND = 20000 };

static llama_token tokens[MOST];

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* Milliseconds of n tokens from the first-th on. */
static double decode(struct llama_context *context, int first, int n, int batch)
{
    const double begin = now();

    for (int i = 0, some; i < n; i += some) {
        some = n - i < batch ? n - i : batch;
        if (llama_decode(context, llama_batch_get_one(tokens + first + i, some)) != 0)
            exit(1);
    }
    llama_synchronize(context);
    return now() - begin;
}

static struct llama_context *new_context(struct llama_model *model, int n_ctx)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *context;

    params.n_ctx = (uint32_t)n_ctx;
    params.n_batch = PROMPT_BATCH;
    params.n_ubatch = BATCH;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(model, params);
    if (context == NULL)
        exit(1);
    return context;
}

static void single_tokens(struct llama_model *model, int prompt, int alone, int n_ctx)
{
    struct llama_context *context = new_context(model, n_ctx);

    sleep(1);
    printf("tg@%d prompt %.1f:", prompt, decode(context, 0, prompt, BATCH));
    for (int i = 0; i < alone; i++)
        printf(" %.3f", decode(context, prompt + i, 1, BATCH));
    printf("\n");
    fflush(stdout);
    llama_free(context);
}

static void prompts(struct llama_model *model, int repeats, int depth, int n, int n_ctx)
{
    struct llama_context *context = new_context(model, n_ctx);

    decode(context, 0, n, PROMPT_BATCH);
    printf("pp%d@%d of %d:", n, depth, n_ctx);
    for (int i = 0; i < repeats; i++) {
        llama_memory_clear(llama_get_memory(context), false);
        if (depth > 0)
            decode(context, BEHIND, depth, PROMPT_BATCH);
        printf(" %.0f", 1e3 * n / decode(context, 0, n, PROMPT_BATCH));
    }
    printf("\n");
    fflush(stdout);
    llama_free(context);
}

int main(int argc, char **argv)
{
    struct llama_model *model;

    if (argc < 5)
        return 2;
    model = load_model(argv[1], argv[2], argv[3]);
    for (int i = 0; i < MOST; i++)
        tokens[i] = (llama_token)(((unsigned)i * 2654435761u >> 8) % KINDS);
    for (int i = 4; i < argc; i++) {
        int x[4] = { 0 };
        const int n = sscanf(argv[i] + 1, ",%d,%d,%d,%d", x, x + 1, x + 2, x + 3);
        if (argv[i][0] == 't' && n == 4 && x[0] + x[1] <= MOST)
            for (int round = 0; round < x[2]; round++)
                single_tokens(model, x[0], x[1], x[3]);
        else if (argv[i][0] == 'p' && n >= 3 && x[1] <= MOST - BEHIND && x[2] <= MOST)
            prompts(model, x[0], x[1], x[2], n == 4 ? x[3] : x[1] + x[2]);
        else
            return 2;
    }
    llama_model_free(model);
    return 0;
}
