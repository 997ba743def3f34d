/* plugin_probe.c - a small llama.cpp program for test_plugin_settings and tests/doors: loads the
 * plug-in, makes one context and decodes tokens. The settings come from the environment, as for any
 * program.
 *
 *     plugin_probe f16|q8_0|f32[/f16|q8_0|f32] on|off [LAYERS [TOKENS]]
 *
 * The first argument is the cache type of keys and values, or the types of both. The second is
 * flash attention. LAYERS is how many layers the device gets, all by default. If LAYERS is
 * negative, a second device, the CPU, gets as many of the last layers. TOKENS, 2 by default, are
 * decoded in two batches, the second of one token. PROBE_MODEL names a model, and PROBE_STREAMS is
 * the number of streams.
 *
 * Exit status: 0 when all worked, 3 when the plug-in did not load. It is 4 without a context, 5
 * when decoding failed, or when a logit of the last token is not finite. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

static void quiet(enum ggml_log_level level, const char *message, void *data)
{
}

static enum ggml_type cache_type(const char *name)
{
    return strcmp(name, "q8_0") == 0  ? GGML_TYPE_Q8_0
           : strcmp(name, "f32") == 0 ? GGML_TYPE_F32
                                      : GGML_TYPE_F16;
}

#define MOST_TOKENS 255 /* a context has 256 cells */

static int decode(struct llama_context *context, int n_tokens)
{
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    llama_token tokens[MOST_TOKENS];
    const float *logits;

    for (int i = 0; i < n_tokens; i++)
        tokens[i] = 1 + i % 200;
    if (llama_decode(context, llama_batch_get_one(tokens, n_tokens - 1)) != 0 ||
        llama_decode(context, llama_batch_get_one(tokens + n_tokens - 1, 1)) != 0)
        return 5;
    logits = llama_get_logits_ith(context, -1);
    for (int i = 0; i < n_vocab; i++)
        if (!isfinite(logits[i]))
            return 5;
    return 0;
}

static int run(ggml_backend_reg_t plugin, char *types, bool flash_attention, int n_layers,
               int n_tokens)
{
    char *slash = strchr(types, '/');
    struct llama_model_params model_params = llama_model_default_params();
    struct llama_context_params params = llama_context_default_params();
    ggml_backend_dev_t devices[3] = { ggml_backend_reg_dev_get(plugin, 0), NULL, NULL };
    const char *path = getenv("PROBE_MODEL"), *streams = getenv("PROBE_STREAMS");
    float split[128] = { 0 };
    struct llama_context *context;
    struct llama_model *model;
    int result = 4;

    model_params.devices = devices;
    model_params.n_gpu_layers = n_layers < 0 ? 99 : n_layers;
    if (n_layers < 0) {
        devices[1] = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        split[0] = 29.5f + (float)n_layers; /* of 30 layers, and the output */
        split[1] = 1.5f - (float)n_layers;
        model_params.tensor_split = split;
    }
    if (slash != NULL)
        *slash = '\0';
    model = llama_model_load_from_file(path != NULL ? path : KVANT_TEST_MODEL, model_params);
    params.n_seq_max = streams != NULL ? (uint32_t)atoi(streams) : 1;
    params.n_ctx = 256 * params.n_seq_max;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = cache_type(types);
    params.type_v = cache_type(slash != NULL ? slash + 1 : types);
    params.flash_attn_type =
        flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    context = model ? llama_init_from_model(model, params) : NULL;
    if (context != NULL)
        result = decode(context, n_tokens);
    llama_free(context);
    llama_model_free(model);
    return result;
}

int main(int argc, char **argv)
{
    const int n_tokens = argc > 4 ? atoi(argv[4]) : 2;
    ggml_backend_reg_t plugin;

    if (argc < 3 || n_tokens < 2 || n_tokens > MOST_TOKENS)
        return 2;
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(KVANT_TEST_LLAMA_LIB);
    if (getenv("KVANT_TEST_MOCK") != NULL && ggml_backend_load(getenv("KVANT_TEST_MOCK")) == NULL)
        return 2;
    plugin = ggml_backend_load(KVANT_TEST_PLUGIN);
    return plugin == NULL ? 3
                          : run(plugin, argv[1], strcmp(argv[2], "on") == 0,
                                argc > 3 ? atoi(argv[3]) : 99, n_tokens);
}
