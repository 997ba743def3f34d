/* compare.c - the answers of a model on a device of llama.cpp, for comparison with another device:
 * the most probable tokens after invented ones, and all logits in a file.
 *
 *     compare LIBRARIES MODEL DEVICE OUT [CACHE_TYPE]      DEVICE "CPU": no device
 *
 * The program decodes a prompt of 700 tokens and then 100 single tokens. It saves and restores the
 * state, decodes 20 tokens, shifts the context, and decodes 20 tokens again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ggml-backend.h"
#include "llama.h"

#include "cache_type.h"

enum { N_PROMPT = 700, N_STEPS = 100, N_AFTER = 20, N_DROP = 64 };

static struct llama_context *context;
static FILE *out;
static int vocabulary;
static llama_pos position;

static llama_token step(llama_token *tokens, int n)
{
    const float *logits;
    int best = 0;

    if (llama_decode(context, llama_batch_get_one(tokens, n)) != 0)
        exit(1);
    position += n;
    logits = llama_get_logits_ith(context, -1);
    fwrite(logits, sizeof(*logits), (size_t)vocabulary, out);
    for (int i = 1; i < vocabulary; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static llama_token made_up(int i)
{
    return (llama_token)((unsigned)i * 2654435761u % (unsigned)vocabulary);
}

/* Decodes tokens that do not depend on answers, so that two devices read the same ones, and prints
 * the most probable next tokens. */
static void steps(const char *what, int n)
{
    printf("%s:", what);
    for (int i = 0; i < n; i++) {
        llama_token token = made_up(10000 + i);
        printf(" %d", step(&token, 1));
    }
    printf("\n");
}

static void restore(void)
{
    size_t bytes = llama_state_seq_get_size(context, 0), used;
    unsigned char *state = malloc(bytes);

    used = llama_state_seq_get_data(context, state, bytes, 0);
    llama_memory_clear(llama_get_memory(context), true);
    if (llama_state_seq_set_data(context, state, used, 0) != used)
        exit(1);
    free(state);
}

static int start(char **argv, const char *type)
{
    ggml_backend_dev_t devices[2] = { NULL, NULL };
    struct llama_model_params model = llama_model_default_params();
    struct llama_context_params params = llama_context_default_params();
    struct llama_model *loaded;

    ggml_backend_load_all_from_path(argv[1]);
    if (strcmp(argv[3], "CPU") != 0 && (devices[0] = ggml_backend_dev_by_name(argv[3])) == NULL) {
        fprintf(stderr, "no device %s\n", argv[3]);
        return 0;
    }
    model.devices = devices;
    model.n_gpu_layers = 99;
    loaded = llama_model_load_from_file(argv[2], model);
    params.n_ctx = 2048;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = (int)sysconf(_SC_NPROCESSORS_ONLN);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = type_of(type);
    context = loaded != NULL ? llama_init_from_model(loaded, params) : NULL;
    if (context != NULL)
        vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(loaded));
    return context != NULL;
}

int main(int argc, char **argv)
{
    llama_token tokens[N_PROMPT];

    if (argc < 5 || !start(argv, argc > 5 ? argv[5] : "f16") ||
        (out = fopen(argv[4], "wb")) == NULL)
        return 1;
    for (int i = 0; i < N_PROMPT; i++)
        tokens[i] = made_up(i);
    step(tokens, 500);
    step(tokens + 500, N_PROMPT - 500);
    steps("steps", N_STEPS);
    restore();
    steps("restored", N_AFTER);
    if (!llama_memory_seq_rm(llama_get_memory(context), 0, 4, 4 + N_DROP))
        return 1;
    llama_memory_seq_add(llama_get_memory(context), 0, 4 + N_DROP, -1, -N_DROP);
    steps("shifted", N_AFTER);
    fclose(out);
    llama_free(context);
    return 0;
}
