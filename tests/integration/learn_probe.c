/* learn_probe.c - a llama.cpp program for test_learn.py: reads a prompt in batches of 512, decodes
 * one token, and ends.
 *
 *     learn_probe MODEL TOKENS KIND [none]
 *
 * KIND is a number (the seed of random tokens) or the path of a text. "none": the model's file is
 * read, not mapped. LEARN_PROBE_STATE names a file for the state of the sequence before the last
 * token. LEARN_PROBE_CTX is the size of the context. LEARN_PROBE_ALONE is the number of last tokens
 * that come one by one. */
#define _POSIX_C_SOURCE 200809L

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

enum { BATCH = 512, MOST = 8192 };

static llama_token tokens[MOST];

static void quiet(enum ggml_log_level level, const char *message, void *data)
{
}

static int read_text(const struct llama_vocab *vocab, const char *path, int n)
{
    static char text[16 * MOST];
    FILE *file = fopen(path, "rb");
    const size_t bytes = file != NULL ? fread(text, 1, sizeof(text) / 2, file) : 0;

    if (file != NULL)
        fclose(file);
    static llama_token all[16 * MOST];
    return llama_tokenize(vocab, text, (int32_t)bytes, all, 16 * MOST, true, false) >= n
               ? (memcpy(tokens, all, (size_t)n * sizeof(*all)), 0)
               : -1;
}

static int make_tokens(const struct llama_vocab *vocab, const char *kind, int n)
{
    const unsigned n_vocab = (unsigned)llama_vocab_n_tokens(vocab);

    if (kind[0] == '/')
        return read_text(vocab, kind, n);
    for (int i = 0; i < n; i++)
        tokens[i] =
            (llama_token)(((unsigned)i + 1000003u * (unsigned)atoi(kind)) * 2654435761u >> 8) %
            (llama_token)n_vocab;
    return 0;
}

static int save_state(struct llama_context *context)
{
    const char *path = getenv("LEARN_PROBE_STATE");
    const size_t size = path != NULL ? llama_state_seq_get_size(context, 0) : 0;
    uint8_t *state = malloc(size + 1);
    FILE *file = path != NULL ? fopen(path, "wb") : NULL;
    bool ok = path == NULL || (state != NULL && file != NULL &&
                               llama_state_seq_get_data(context, state, size, 0) == size);

    ok = ok && (file == NULL || fwrite(state, 1, size, file) == size);
    if (file != NULL)
        fclose(file);
    free(state);
    return ok ? 0 : 7;
}

static int decode(struct llama_context *context, int n)
{
    const char *last = getenv("LEARN_PROBE_ALONE");
    const int together = last != NULL ? n - atoi(last) : n;

    for (int at = 0, now; at < n; at += now) {
        now = at >= together ? 1 : together - at < BATCH ? together - at : BATCH;
        if (llama_decode(context, llama_batch_get_one(tokens + at, now)) != 0)
            return 5;
    }
    const int saved = save_state(context);
    return llama_decode(context, llama_batch_get_one(tokens, 1)) == 0 ? saved : 5;
}

int main(int argc, char **argv)
{
    struct llama_model_params model_params = llama_model_default_params();
    struct llama_context_params params = llama_context_default_params();
    const int n = argc > 3 ? atoi(argv[2]) : 0;
    ggml_backend_reg_t plugin;
    int result = 4;

    if (argc < 4 || n > MOST)
        return 2;
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(KVANT_TEST_LLAMA_LIB);
    if (getenv("KVANT_TEST_MOCK") != NULL)
        ggml_backend_load(getenv("KVANT_TEST_MOCK"));
    plugin = ggml_backend_load(KVANT_TEST_PLUGIN);
    if (plugin == NULL)
        return 3;
    ggml_backend_dev_t devices[2] = { ggml_backend_reg_dev_get(plugin, 0), NULL };
    model_params.devices = devices;
    model_params.n_gpu_layers = 99;
    model_params.load_mode = argc > 4 ? LLAMA_LOAD_MODE_NONE : model_params.load_mode;
    params.n_ctx =
        getenv("LEARN_PROBE_CTX") != NULL ? (uint32_t)atoi(getenv("LEARN_PROBE_CTX")) : MOST + 256;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct llama_model *model = llama_model_load_from_file(argv[1], model_params);
    struct llama_context *context = model != NULL ? llama_init_from_model(model, params) : NULL;
    if (context != NULL)
        result =
            make_tokens(llama_model_get_vocab(model), argv[3], n) == 0 ? decode(context, n) : 6;
    llama_free(context);
    llama_model_free(model);
    return result;
}
