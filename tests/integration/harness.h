/* harness.h - runs the test model in a real llama.cpp, with its own cache or with kvant's, for the
 * integration tests.
 *
 * The runtime, the plug-in and the model come from the build (KVANT_TEST_LLAMA_LIB, KVANT_TEST_PLUGIN,
 * KVANT_TEST_MODEL). The environment variable KVANT_TEST_MODEL names another model. Failures end the running cmocka test.
 */
#ifndef KVANT_TESTS_HARNESS_H
#define KVANT_TESTS_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "llama.h"

typedef struct harness_options {
    const char *
        spec; /* codec of keys and values, "" for the default preset, or NULL for llama.cpp's own cache */
    const char *values; /* codec of values, or NULL: spec is the codec of both */
    const char *type;   /* spec NULL: of llama.cpp's own cache, "q8_0" and the like; NULL: f16 */
    bool accel;         /* spec NULL: attention by KVANT_ACCEL; wants harness_add_accel */
    bool exact; /* spec NULL: cache and attention all in f32, instead of f16 with flash attention */
    bool fa_auto; /* llama.cpp decides whether flash attention is on */
    uint32_t n_ctx;
    uint32_t n_seq;    /* 0 means 1 */
    uint32_t n_ubatch; /* tokens of a graph; 0 means 512 */
    bool unified;
    bool window; /* a sliding window's cache has the window's cells, not the context's */
    bool on_cpu; /* keys and values stay in the computer's memory (--no-kv-offload) */
    ggml_backend_sched_eval_callback
        eval; /* asked for each node of a graph (cb_eval); NULL: none */
} harness_options;

/* cmocka group set-up and tear-down: loads back ends, the plug-in and the model twice (with and without
 * KVANT). */
int harness_start(void **state);
/* The same without the model. */
int harness_load_plugin(void **state);
int harness_stop(void **state);
/* Takes other models' place. */
int harness_load_models(const char *path);
/* One of KVANT_TINY_MODELS. */
void harness_load_tiny(const char *name);

/* Makes llama.cpp know KVANT_ACCEL beside KVANT; returns it. Once a process. */
ggml_backend_dev_t harness_add_accel(void);

/* KVANT_TEST_STANDIN names a stand-in of ggml-cuda (standin_cuda.c): KVANT is KVANT0 then, its cache in that one's memory.
 * "none": the runtime's own ggml-cuda is used. */
bool harness_on_gpu(void);
bool harness_has_standin(void);
/* KVANT_TEST_VULKAN names ggml's back end for Vulkan. Weights are on Vulkan0 then, and kvant's cache
 * is in the computer's memory. The model with llama.cpp's own cache stays on the CPU. */
bool harness_has_vulkan(void);
/* Ends the program as skipped where harness_on_gpu is false. */
void harness_need_gpu(void);
/* Skips a test that compares a GPU's cache with a CPU's where weights are no floats: each rounds activations to 8 bits in its own way then,
 * which moves logits more than q8_0 does. */
void harness_need_floats(void);
/* Whether the model's weights are floats. */
bool harness_has_floats(void);
/* KVANT_TEST_GPUS: how many there are; with 2 the layers are spread over KVANT0 and KVANT1, or with KVANT_TEST_SPLIT their heads. */
int harness_gpus(void);

ggml_backend_reg_t harness_plugin(void);
const struct llama_model *harness_model(void);
const struct llama_vocab *harness_vocab(void);
size_t harness_n_vocab(void);

struct llama_context *harness_context(const harness_options *options);
/* A context in which llama.cpp only plans memory (--fit). */
void harness_plan(const harness_options *options);

/* Tokens of an English text that is long enough for n of them (it repeats after about 400); of a model without a vocabulary, made
 * up. */
void harness_tokens(llama_token *tokens, int n);

/* Decodes n tokens of one sequence from position pos on, in one batch. Logits are kept for the last one, or
 * for all. */
void harness_decode(struct llama_context *context, const llama_token *tokens, int n, llama_pos pos,
                    llama_seq_id seq, bool all_logits);

/* The most probable token after the last decoded one. */
llama_token harness_argmax(const float *logits);

/* By how much its logit leads the next one's. */
double harness_lead(const float *logits);

/* Root mean square of the difference of n numbers, and of the numbers themselves. */
double harness_rms_difference(const float *a, const float *b, size_t n);
double harness_rms(const float *a, size_t n);

/* Mean over rows of KL(softmax(p) || softmax(q)), rows of vocabulary size. */
double harness_mean_kld(const float *p, const float *q, int rows);

/* Logits of the n tokens of harness_tokens, decoded in one batch in a context of its own. The caller frees. */
float *harness_prompt_logits(const harness_options *options, int n);

/* Mean over tokens of the squared distance of two sets of logits to exact ones, and the standard error of the mean of the
 * difference of these distances, taken token by token. */
typedef struct harness_comparison {
    double a, b, difference_error;
} harness_comparison;

harness_comparison harness_compare_logits(const float *a, const float *b, const float *exact,
                                          int n);

/* A prompt whose continuation the model is sure of, at most max tokens; returns how many. Where two words are about equally
 * likely, as in a story, the rounding noise of a cache decides between them in stock as well. */
int harness_counting(llama_token *tokens, int max);

/* A function of ggml's CPU back end that programs look up by name. */
void *harness_cpu_function(const char *name);

/* Threads as llama.cpp's own programs give a context. */
struct ggml_threadpool *harness_new_pool(int n_threads);
void harness_free_pool(struct ggml_threadpool *pool);

/* The state of sequence 0, or of another one; the caller frees. */
uint8_t *harness_save_state(struct llama_context *context, size_t *size);
uint8_t *harness_save_sequence(struct llama_context *context, llama_seq_id seq, size_t *size);

/* Relative root mean square of the difference of two states as fp16 numbers. Their heads are equal and drop
 * out of the difference; what they would add to the norm is left out by looking at differing and plain
 * numbers only. */
double harness_state_difference(const uint8_t *a, const uint8_t *b, size_t size);

/* Uniform in -1 .. 1; splitmix64. */
float harness_random(uint64_t *state);

#endif /* KVANT_TESTS_HARNESS_H */
