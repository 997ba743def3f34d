/* llama_api.h - the functions of llama.cpp that kvant calls, bound at run time.
 *
 * The libraries are opened with dlopen from a folder that the user may choose, so the command
 * itself links nothing of llama.cpp. The lists below state each prototype once, and the compiler
 * checks the first list against llama.cpp's own headers in llama_api.c. The command accepts every
 * version of llama.cpp that has these functions and lays tensors out like the headers. Parameters
 * are another struct in each version: llama_params.h finds their members. */
#pragma once

#include <ggml-alloc.h>
#include <llama.h>
#include <stdbool.h>

#include "llama_params.h"

/* X(result, name, parameters) */
#define LLAMA_FUNCTIONS(X)                                                                         \
    X(const char *, ggml_version, (void))                                                          \
    X(void, ggml_backend_load_all_from_path, (const char *))                                       \
    X(ggml_backend_reg_t, ggml_backend_load, (const char *))                                       \
    X(ggml_backend_dev_t, ggml_backend_dev_by_name, (const char *))                                \
    X(void, ggml_backend_device_register, (ggml_backend_dev_t))                                    \
    X(ggml_backend_dev_t, ggml_backend_dev_by_type, (enum ggml_backend_dev_type))                  \
    X(ggml_backend_reg_t, ggml_backend_dev_backend_reg, (ggml_backend_dev_t))                      \
    X(void *, ggml_backend_reg_get_proc_address, (ggml_backend_reg_t, const char *))               \
    X(struct ggml_threadpool_params, ggml_threadpool_params_default, (int))                        \
    X(bool, ggml_backend_buffer_is_host, (ggml_backend_buffer_t))                                  \
    X(const char *, ggml_op_name, (enum ggml_op))                                                  \
    X(void, ggml_fp16_to_fp32_row, (const ggml_fp16_t *, float *, int64_t))                        \
    X(void, ggml_fp32_to_fp16_row, (const float *, ggml_fp16_t *, int64_t))                        \
    X(size_t, ggml_tensor_overhead, (void))                                                        \
    X(size_t, ggml_nbytes, (const struct ggml_tensor *))                                           \
    X(size_t, ggml_row_size, (enum ggml_type, int64_t))                                            \
    X(int64_t, ggml_blck_size, (enum ggml_type))                                                   \
    X(void, llama_backend_init, (void))                                                            \
    X(void, llama_log_set, (ggml_log_callback, void *))                                            \
    X(void, llama_model_free, (struct llama_model *))                                              \
    X(void, llama_free, (struct llama_context *))                                                  \
    X(void, llama_attach_threadpool,                                                               \
      (struct llama_context *, ggml_threadpool_t, ggml_threadpool_t))                              \
    X(void, llama_set_abort_callback, (struct llama_context *, ggml_abort_callback, void *))       \
    X(void, llama_synchronize, (struct llama_context *))                                           \
    X(llama_memory_t, llama_get_memory, (const struct llama_context *))                            \
    X(void, llama_memory_clear, (llama_memory_t, bool))                                            \
    X(bool, llama_memory_seq_rm, (llama_memory_t, llama_seq_id, llama_pos, llama_pos))             \
    X(const struct llama_vocab *, llama_model_get_vocab, (const struct llama_model *))             \
    X(int32_t, llama_model_n_ctx_train, (const struct llama_model *))                              \
    X(int32_t, llama_model_n_embd, (const struct llama_model *))                                   \
    X(int32_t, llama_model_n_head, (const struct llama_model *))                                   \
    X(int32_t, llama_model_n_layer, (const struct llama_model *))                                  \
    X(int32_t, llama_model_n_head_kv, (const struct llama_model *))                                \
    X(int32_t, llama_model_n_swa, (const struct llama_model *))                                    \
    X(int32_t, llama_model_meta_val_str,                                                           \
      (const struct llama_model *, const char *, char *, size_t))                                  \
    X(const char *, llama_model_chat_template, (const struct llama_model *, const char *))         \
    X(int32_t, llama_chat_apply_template,                                                          \
      (const char *, const struct llama_chat_message *, size_t, bool, char *, int32_t))            \
    X(int32_t, llama_vocab_n_tokens, (const struct llama_vocab *))                                 \
    X(llama_token, llama_vocab_bos, (const struct llama_vocab *))                                  \
    X(bool, llama_vocab_get_add_bos, (const struct llama_vocab *))                                 \
    X(bool, llama_vocab_is_eog, (const struct llama_vocab *, llama_token))                         \
    X(int32_t, llama_tokenize,                                                                     \
      (const struct llama_vocab *, const char *, int32_t, llama_token *, int32_t, bool, bool))     \
    X(int32_t, llama_token_to_piece,                                                               \
      (const struct llama_vocab *, llama_token, char *, int32_t, int32_t, bool))                   \
    X(struct llama_batch, llama_batch_init, (int32_t, int32_t, int32_t))                           \
    X(void, llama_batch_free, (struct llama_batch))                                                \
    X(struct llama_batch, llama_batch_get_one, (llama_token *, int32_t))                           \
    X(int32_t, llama_decode, (struct llama_context *, struct llama_batch))                         \
    X(float *, llama_get_logits, (struct llama_context *))                                         \
    X(struct llama_sampler_chain_params, llama_sampler_chain_default_params, (void))               \
    X(struct llama_sampler *, llama_sampler_chain_init, (struct llama_sampler_chain_params))       \
    X(void, llama_sampler_chain_add, (struct llama_sampler *, struct llama_sampler *))             \
    X(struct llama_sampler *, llama_sampler_init_greedy, (void))                                   \
    X(struct llama_sampler *, llama_sampler_init_dist, (uint32_t))                                 \
    X(struct llama_sampler *, llama_sampler_init_top_k, (int32_t))                                 \
    X(struct llama_sampler *, llama_sampler_init_top_p, (float, size_t))                           \
    X(struct llama_sampler *, llama_sampler_init_temp, (float))                                    \
    X(llama_token, llama_sampler_sample,                                                           \
      (struct llama_sampler *, struct llama_context *, int32_t))                                   \
    X(void, llama_sampler_free, (struct llama_sampler *))

/* With parameters of the loaded version's own shape. */
#define LLAMA_SHAPED_FUNCTIONS(X)                                                                  \
    X(llama_params, llama_model_default_params, (void))                                            \
    X(llama_params, llama_context_default_params, (void))                                          \
    X(struct llama_model *, llama_model_load_from_file, (const char *, llama_params))              \
    X(struct llama_context *, llama_init_from_model, (struct llama_model *, llama_params))

#define LLAMA_MEMBER(result, name, parameters) result(*name) parameters;

typedef struct llama_api {
    LLAMA_FUNCTIONS(LLAMA_MEMBER)
    LLAMA_SHAPED_FUNCTIONS(LLAMA_MEMBER)
    const char *(*llama_version)(void); /* a function of ours where the runtime has none */
} llama_api;

#undef LLAMA_MEMBER

/* The bound functions; usable after llama_api_load has succeeded. */
extern llama_api ll;

/* Opens libllama and the libraries that it needs from the folder, binds the functions and checks
 * the layout of tensors. Call it once per process. False after complaining. */
bool llama_api_load(const char *folder);
