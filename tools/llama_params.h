/* llama_params.h - the parameters with which llama.cpp loads a model and creates a context, for any
 * version of llama.cpp.
 *
 * Each version may put new members among the old ones, so kvant finds the members that it sets by
 * the default values that the loaded llama.cpp returns. The structs are passed by value. A caller
 * passes a struct in memory that is larger than any version's, and llama.cpp reads as much as it
 * knows. */
#pragma once

#include <llama.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct llama_params {
    _Alignas(16) unsigned char bytes[512];
} llama_params;

/* The parameters that kvant sets. */
typedef struct model_settings {
    ggml_backend_dev_t *devices;
    int32_t n_gpu_layers;
    llama_progress_callback progress;
} model_settings;

typedef struct context_settings {
    uint32_t n_ctx, n_batch, n_ubatch;
    uint32_t n_outputs; /* not set where llama.cpp has no such limit */
    int32_t n_threads;
    enum llama_flash_attn_type flash_attention;
    ggml_backend_sched_eval_callback on_node;
    void *on_node_user;
    enum ggml_type type_k, type_v;
} context_settings;

/* Start from the defaults of the loaded llama.cpp and set these members. False when the parameters
 * are not laid out like any version that kvant knows. */
bool model_params(llama_params *params, const model_settings *settings);
bool context_params(llama_params *params, const context_settings *settings);
