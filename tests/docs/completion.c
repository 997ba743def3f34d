/* completion.c - stands on PATH as llama-completion if the runtime of the tests has libraries but
 * no programs. It treats the options from a page and from `kvant exec` as llama.cpp's own program
 * does, on the same unmodified libllama. It reads a prompt and prints the most probable tokens. */
#define _POSIX_C_SOURCE 200809L

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

enum { MOST_TOKENS = 512 };

typedef struct options {
    const char *model, *prompt, *device;
    int n_ctx, n_predict, n_gpu_layers;
    bool flash_attention;
} options;

static void quiet(enum ggml_log_level level, const char *message, void *data)
{
    (void)data;
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR)
        fputs(message, stderr);
}

static bool read_options(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (strcmp(name, "-no-cnv") == 0)
            continue;
        if (value == NULL)
            return false;
        if (strcmp(name, "-m") == 0)
            o->model = value;
        else if (strcmp(name, "-p") == 0)
            o->prompt = value;
        else if (strcmp(name, "--device") == 0)
            o->device = value;
        else if (strcmp(name, "-c") == 0)
            o->n_ctx = atoi(value);
        else if (strcmp(name, "-n") == 0)
            o->n_predict = atoi(value);
        else if (strcmp(name, "-ngl") == 0)
            o->n_gpu_layers = atoi(value);
        else if (strcmp(name, "-fa") == 0)
            o->flash_attention = strcmp(value, "on") == 0;
        else
            return false;
        i++;
    }
    return o->model != NULL && o->prompt != NULL;
}

static int answer(struct llama_context *context, const struct llama_vocab *vocab, const options *o)
{
    const int n_vocab = llama_vocab_n_tokens(vocab);
    llama_token tokens[MOST_TOKENS], token;
    int n =
        llama_tokenize(vocab, o->prompt, (int)strlen(o->prompt), tokens, MOST_TOKENS, true, false);

    if (n <= 0 || llama_decode(context, llama_batch_get_one(tokens, n)) != 0)
        return 5;
    for (int i = 0; i < o->n_predict; i++) {
        const float *logits = llama_get_logits_ith(context, -1);
        char piece[64];

        token = 0;
        for (llama_token t = 1; t < n_vocab; t++)
            if (logits[t] > logits[token])
                token = t;
        n = llama_token_to_piece(vocab, token, piece, sizeof(piece), 0, false);
        printf("%.*s", n > 0 ? n : 0, piece);
        if (llama_vocab_is_eog(vocab, token))
            break;
        if (llama_decode(context, llama_batch_get_one(&token, 1)) != 0)
            return 5;
    }
    printf("\n");
    return 0;
}

int main(int argc, char **argv)
{
    options o = { .n_ctx = 512, .n_predict = 16 };
    struct llama_model_params model_params = llama_model_default_params();
    struct llama_context_params params = llama_context_default_params();
    ggml_backend_dev_t devices[2] = { NULL, NULL };
    int result = 4;

    if (!read_options(argc, argv, &o)) {
        fprintf(stderr, "llama-completion: an option that tests/docs/completion.c does not know\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    /* also loads the back end of GGML_BACKEND_PATH */
    ggml_backend_load_all_from_path(KVANT_TEST_LLAMA_LIB);
    if (o.device != NULL && (devices[0] = ggml_backend_dev_by_name(o.device)) == NULL) {
        fprintf(stderr, "invalid device: %s\n", o.device);
        return 3;
    }
    model_params.devices = o.device != NULL ? devices : NULL;
    model_params.n_gpu_layers = o.n_gpu_layers;
    params.n_ctx = (uint32_t)o.n_ctx;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type =
        o.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_model *model = llama_model_load_from_file(o.model, model_params);
    struct llama_context *context = model != NULL ? llama_init_from_model(model, params) : NULL;
    if (context != NULL)
        result = answer(context, llama_model_get_vocab(model), &o);
    llama_free(context);
    llama_model_free(model);
    return result;
}
