/* engine.h - llama.cpp as the commands use it: one model file, and contexts with one KV cache
 * configuration each.
 *
 * The model is loaded once for llama.cpp's own cache types (on the CPU only) and once for kvant's,
 * with the plug-in's device. This device holds the cache and leaves the weights on the CPU. Both
 * map the same file, so the weights are in memory once. All contexts share one thread pool, as in
 * llama.cpp's own programs. */
#pragma once

#include "../integrations/llama.cpp/kv_fill.h" /* what the plug-in tells this command */
#include "args.h"
#include "configs.h"
#include "llama_api.h"
#include "progress.h"

#define ENGINE_UBATCH 512u /* llama.cpp's default: tokens of one graph */

/* Options of all commands that load a model; e is the engine_options in the command's settings.
 * clang-format off */
#define ENGINE_OPTION_MODEL(e) ARG_TEXT('m', "model", "FILE", e.model, "model, a .gguf file")
#define ENGINE_OPTION_THREADS(e)                                                                   \
    ARG_U32('t', "threads", "N", 1, 512, e.n_threads,                                              \
            "threads (default: idle CPUs that this process may use)")
#define ENGINE_OPTIONS_LIBRARIES(e)                                                                \
    ARG_TEXT(0, "runtime", "DIR", e.runtime,                                                       \
             "folder of llama.cpp's libraries (default: KVANT_RUNTIME,\n"                          \
             "else the one this build was configured with)"),                                      \
        ARG_SWITCH(0, "verbose", e.verbose, "print everything that llama.cpp logs")
#define ENGINE_OPTIONS_RUNTIME(e) ENGINE_OPTION_THREADS(e), ENGINE_OPTIONS_LIBRARIES(e)
#define ENGINE_OPTION_PRESET(e, default)                                                           \
    ARG_CALL(0, "preset", "NAME", configs_add_preset, e.configs,                                   \
             "quality, balanced, small or tiny: about 5, 4, 3 and 2 bits\n(default " default ")")
#define ENGINE_OPTIONS_CACHES(e)                                                                   \
    ARG_CALL(0, "config", "FILE", configs_add_file, e.configs,                                     \
             "a codec for each layer, from a settings file; kvant tune makes it"),                 \
        ARG_CALL('k', "codec-k", "SPEC", configs_add_k, e.configs,                                 \
                 "codec of keys; see kvant codecs"),                                               \
        ARG_CALL('v', "codec-v", "SPEC", configs_add_v, e.configs,                                 \
                 "codec of values (default: the one of the -k before it)"),                        \
        ARG_CALL(0, "stock", "TYPE", configs_add_stock, e.configs,                                 \
                 "llama.cpp's own cache instead: f16, q8_0, q5_1, q4_0,\n"                         \
                 "... or two as K/V: q8_0/q4_0")
#define ENGINE_OPTIONS_ATTENTION(e)                                                                \
    ARG_CALL(0, "accel", NULL, configs_set_accel, e.configs,                                       \
             "kvant computes attention on llama.cpp's own cache: on\n"                             \
             "the --stock before it"),                                                             \
        ARG_CALL(0, "fp32", NULL, configs_set_fp32, e.configs,                                     \
                 "fp32 attention for the -k before it: slow, shows the error\n"                    \
                 "of the fast kernels' integer products")
#define ENGINE_OPTIONS_CODECS(e)                                                                   \
    ARG_CALL(0, "protect", "N", configs_set_protect, e.configs,                                    \
             "the first N and the last N layers use another codec: of the -k\n"                    \
             "or --preset before it, of all when it comes first (default 0)"),                     \
        ARG_CALL(0, "protect-codec", "SPEC", configs_set_protect_codec, e.configs,                 \
                 "codec of these layers, keys and values (default " PLUGIN_PROTECT_CODEC ")"),     \
        ARG_TEXT(0, "calibration", "FILE", e.configs.calibration,                                  \
                 "calibration, for all presets and some codecs (default:\n"                        \
                 "model.kvcal next to model.gguf); kvant calibrate makes it")
#define ENGINE_OPTIONS(e)                                                                          \
    ENGINE_OPTION_MODEL(e),                                                                        \
        ENGINE_OPTION_PRESET(e, KVANT_PRESET_DEFAULT ", if no cache is named"),                    \
        ENGINE_OPTIONS_CACHES(e), ENGINE_OPTIONS_ATTENTION(e), ENGINE_OPTIONS_CODECS(e),           \
        ENGINE_OPTIONS_RUNTIME(e)
/* clang-format on */

typedef struct engine_options {
    const char *model;
    const char *runtime;
    uint32_t n_threads;
    bool verbose;
    kv_configs configs;
} engine_options;

/* Fills in defaults: the default configuration is used when none was given. Complains when a
 * command could not start: no model, or a spec that is not valid. engine_model_options_finish() is
 * for commands without configurations. */
bool engine_options_finish(engine_options *options, const char *command);
bool engine_model_options_finish(engine_options *options, const char *command);

typedef struct engine {
    engine_options options;
    struct llama_model *cpu_model, *kvant_model; /* loaded when first needed */
    ggml_backend_reg_t plugin;                   /* NULL before it is loaded */
    bool accel; /* the plug-in's device KVANT_ACCEL is registered */
    struct ggml_threadpool *threadpool;
    void (*threadpool_free)(struct ggml_threadpool *);
    size_t (*kv_memory)(size_t *reserved); /* the plug-in's; NULL before it is loaded */
    kvp_kv_size_fn *kv_size;               /* likewise */
    kvp_kv_size_at_fn *kv_size_at;         /* likewise */
} engine;

/* Loads the runtime. False after complaining; engine_close is needed in any case. */
bool engine_open(engine *e, const engine_options *options);
void engine_close(engine *e);

/* The model for a configuration, or NULL after complaining. */
struct llama_model *engine_model(engine *e, const kv_config *config);

/* The name that the model's file states, otherwise the file's own name. */
void engine_model_name(const engine *e, const struct llama_model *model, char *name, size_t bytes);

typedef struct engine_context_options {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_outputs;     /* the largest number of tokens of a batch that give logits */
    struct kv_meter *meter; /* or NULL */
    /* Called for every node of a graph, or NULL. Excludes a meter. */
    ggml_backend_sched_eval_callback on_node;
    void *on_node_user;
    bool flash_attention; /* also for llama.cpp's own cache, which otherwise chooses */
} engine_context_options;

/* A context whose cache has the configuration; Ctrl-C makes its llama_decode return 2. The caller
 * frees it with ll.llama_free. NULL after complaining. */
struct llama_context *engine_context(engine *e, const kv_config *config,
                                     const engine_context_options *options);

/* Adds up the cache tensors that graphs write to: their nominal size, as llama.cpp allocates
 * them. */
typedef struct kv_meter {
    const struct ggml_tensor *seen[1024];
    size_t n;
    size_t bytes;
    double numbers; /* in these bytes */
} kv_meter;

/* Bytes that the cache of the one living context takes: what the plug-in measures for kvant, the
 * size of the tensors for llama.cpp's own, which allocates and touches them whole. */
double engine_kv_bytes(const engine *e, const kv_config *config, const kv_meter *meter);

/* Sets *size to the memory of the one living context's cache when it is full. The plug-in knows it
 * for kvant's cache; for llama.cpp's own cache it is the size of the tensors, which the meter has
 * added up. False after complaining. */
bool engine_kv_size(const engine *e, const kv_config *config, const kv_meter *meter,
                    kvp_kv_size *size);

/* The memory of a cache when a share of its cells is written. */
typedef struct engine_fill {
    kvp_kv_size size;
    double in_place; /* tokens up to which the cache is llama.cpp's own f16 */
} engine_fill;

/* Makes a context, never decodes with it, and sets *fills to the memory of its cache for each of n
 * shares (0 to 1) of written cells. `on_gpu`: the memory of a GPU. Only for kvant's configurations.
 * False after complaining. */
bool engine_planned_fills(engine *e, const kv_config *config, const engine_context_options *options,
                          bool on_gpu, const double *shares, size_t n, engine_fill *fills);

/* Changes *fill to the size of llama.cpp's own cache with the same numbers. llama.cpp takes the
 * memory of all cells at the start, whatever share of them is written. */
void engine_stock_fill(const kv_config *config, double share, engine_fill *fill);

/* A fingerprint of those llama.cpp libraries that compute here. The CPU back end that llama.cpp
 * chose for this machine is one of them, because each rounds differently. 0 when they cannot be
 * read. */
uint64_t engine_runtime_fingerprint(const engine *e);

/* Codec bits per number, averaged over keys and values by their head dimensions. Counts pages
 * without transforms and fp16 pages. False after complaining, when a codec does not exist for the
 * model's head_dim or a settings file is for another model. engine_context() calls it, too. Call it
 * before long work, so that such an error comes at once. */
bool engine_bits(engine *e, const kv_config *config, double *bits);

typedef enum token_kind {
    TOKENS_TEXT, /* begins as the model wants texts to begin, with BOS or without */
    TOKENS_CHAT, /* the same, and names of special tokens are these tokens */
    TOKENS_PART  /* of something longer */
} token_kind;

/* n tokens from a position of sequence 0 on, none of which gives logits; at position 0 stands the
 * model's BOS, where it wants one. */
void engine_fill_batch(const engine *e, struct llama_batch *batch, const llama_token *tokens,
                       size_t position, size_t n);

/* One graph. False when interrupted, or after complaining. */
bool engine_decode(struct llama_context *ctx, struct llama_batch batch);

/* Decodes n tokens after the tokens that the context already holds, in graphs of ENGINE_UBATCH
 * tokens. After each graph it adds the tokens of that graph to the progress, under `label`. False
 * when interrupted, or after complaining. */
bool engine_read(struct llama_context *ctx, llama_token *tokens, size_t n, progress *p,
                 const char *label);

/* Tokens of a text, to be freed; NULL after complaining. */
llama_token *engine_tokenize(const engine *e, const char *text, size_t bytes, token_kind kind,
                             size_t *n);
