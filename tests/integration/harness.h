/* harness.h - runs the test model in a real llama.cpp, with its own cache or with kvant's, for the
 * integration tests.
 *
 * The runtime, the plug-in and the model come from the build (KVANT_TEST_LLAMA_LIB,
 * KVANT_TEST_PLUGIN, KVANT_TEST_MODEL). The environment variable KVANT_TEST_MODEL names another
 * model. A failure ends the running cmocka test. */
#ifndef KVANT_TESTS_HARNESS_H
#define KVANT_TESTS_HARNESS_H

#include "../cases.h"
#include "ggml-backend.h"
#include "llama.h"

typedef struct harness_options {
    /* codec of keys and values, "" for the default preset, NULL for llama.cpp's own cache */
    const char *spec;
    const char *values; /* codec of values; NULL: spec is the codec of keys and values */
    /* with spec NULL: type of llama.cpp's own cache, "q8_0" and the like; NULL: f16 */
    const char *type;
    bool accel; /* with spec NULL: attention by KVANT_ACCEL; needs harness_add_accel() */
    /* with spec NULL: cache and attention all in f32, instead of f16 with flash attention */
    bool exact;
    bool fa_auto; /* llama.cpp decides whether flash attention is on */
    uint32_t n_ctx;
    uint32_t n_seq;    /* 0 means 1 */
    uint32_t n_ubatch; /* largest number of tokens in a graph; 0 means 512 */
    bool unified;
    bool window; /* a sliding window's cache has only the window's cells */
    bool on_cpu; /* keys and values stay in the computer's memory (--no-kv-offload) */
    ggml_backend_sched_eval_callback
        eval; /* callback for each node of a graph (cb_eval); NULL: none */
} harness_options;

/* cmocka group set-up and tear-down: loads back ends, the plug-in and the model twice, with KVANT
 * and without. */
int harness_start(void **state);
/* Loads back ends and the plug-in, without a model. */
int harness_load_plugin(void **state);
int harness_stop(void **state);
/* Loads other models in place of the present ones. */
int harness_load_models(const char *path);
/* Loads a model of the folder KVANT_TINY_MODELS. */
void harness_load_tiny(const char *name);

/* Registers KVANT_ACCEL with llama.cpp, besides KVANT, and returns it. A process may call it
 * once. */
ggml_backend_dev_t harness_add_accel(void);

/* KVANT_TEST_MOCK names a mock of ggml-cuda (mock_cuda.c). KVANT is then KVANT0, whose cache
 * lies in the mock's memory. "none": the runtime's own ggml-cuda is used. */
bool harness_on_gpu(void);
bool harness_has_mock(void);
/* KVANT_TEST_OFFLOAD names a GPU's device, and KVANT_TEST_BACKEND the file of its back end. Weights
 * are then on this device, and kvant's cache is in the computer's memory. The model with
 * llama.cpp's own cache stays on the CPU. */
bool harness_offloads(void);
/* Ends the program as skipped if harness_on_gpu() is false. */
void harness_need_gpu(void);
/* Skips a test that compares a GPU's cache with a CPU's if the model's weights are not floats. CPU
 * and GPU then round activations to 8 bits in different ways, which moves logits more than q8_0
 * does. */
void harness_need_floats(void);
/* Whether the model's weights are floats. */
bool harness_has_floats(void);
/* KVANT_TEST_GPUS: the number of GPUs. With 2 GPUs, the layers are spread over KVANT0 and KVANT1,
 * or the heads are with KVANT_TEST_SPLIT. */
int harness_gpus(void);

ggml_backend_reg_t harness_plugin(void);
const struct llama_model *harness_model(void);
const struct llama_vocab *harness_vocab(void);
size_t harness_n_vocab(void);

/* KVANT_TEST_THREADS: the number of threads, in a pool of the context; 1 by default. */
struct llama_context *harness_context(const harness_options *options);
/* Makes a context in which llama.cpp only plans memory (--fit). */
void harness_plan(const harness_options *options);

/* n tokens of an English text, which repeats after about 400. For a model without a vocabulary the
 * tokens are made up. */
void harness_tokens(llama_token *tokens, int n);

/* Decodes n tokens of one sequence from position pos on, in one batch. Keeps logits of the last
 * token, or of all. */
void harness_decode(struct llama_context *context, const llama_token *tokens, int n, llama_pos pos,
                    llama_seq_id seq, bool all_logits);
/* Adds a token to a batch and returns its place. A batch of numbers, in place of tokens, has its
 * rows from the caller. */
int harness_add(struct llama_batch *batch, llama_token token, llama_pos pos, llama_seq_id seq,
                bool output);
/* Returns what llama_decode returns, and frees the batch. */
int harness_decode_batch(struct llama_context *context, struct llama_batch batch);
/* Room for the logits of n tokens. */
float *harness_new_logits(int n);

/* The most probable token after the last decoded one. */
llama_token harness_argmax(const float *logits);

/* By how much the largest logit leads the second largest. */
double harness_lead(const float *logits);

/* Root mean square of the difference of n numbers, and of the numbers themselves. */
double harness_rms_difference(const float *a, const float *b, size_t n);
double harness_rms(const float *a, size_t n);

/* Mean over rows of KL(softmax(p) || softmax(q)); a row has the size of the vocabulary. */
double harness_mean_kld(const float *p, const float *q, int rows);

/* Logits of the n tokens of harness_tokens(), decoded in one batch in a new context. The caller
 * frees them. */
float *harness_prompt_logits(const harness_options *options, int n);

/* A prompt whose continuation the model is sure of, at most max tokens; returns their number. In
 * other texts, such as a story, two words may be about equally likely. Then the rounding noise of a
 * cache decides between them, with llama.cpp's own cache, too. */
int harness_counting(llama_token *tokens, int max);

/* A function of ggml's CPU back end that programs look up by name. */
void *harness_cpu_function(const char *name);

/* A thread pool, as llama.cpp's own programs give a context. */
struct ggml_threadpool *harness_new_pool(int n_threads);
void harness_free_pool(struct ggml_threadpool *pool);

/* The state of a sequence; the caller frees it. */
uint8_t *harness_save_state(struct llama_context *context, size_t *size);
uint8_t *harness_save_sequence(struct llama_context *context, llama_seq_id seq, size_t *size);

/* Bytes of a token's keys or values in a layer, as fp16. */
size_t harness_row_bytes(void);

/* Where a layer's rows of n tokens begin in a state. The rows of all layers end at `end`: first
 * keys, then values. HARNESS_ROWS_HEAD bytes before a layer's rows have their type and size. */
enum { HARNESS_ROWS_HEAD = 12 };
size_t harness_rows_at(size_t end, size_t n, bool values, size_t layer);

/* Root mean square of the difference of two states as fp16 numbers, relative to their size. The
 * heads of two states are equal and do not add to the difference. Only differing and finite numbers
 * count, so the heads do not add to the size either. */
double harness_state_difference(const uint8_t *a, const uint8_t *b, size_t size);

/* Between the calls stderr goes to a file, which the second call rewinds and the caller closes. */
typedef struct harness_lines {
    FILE *file;
    int former;
} harness_lines;
harness_lines harness_begin_lines(void);
void harness_end_lines(const harness_lines *lines);

/* Uniform in -1 .. 1; splitmix64. */
float harness_random(uint64_t *state);

#endif /* KVANT_TESTS_HARNESS_H */
