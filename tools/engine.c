/* engine.c - runtime, models, contexts. */
#include "engine.h"

#include "command.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "os.h"
#include "plugin.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void default_runtime(engine_options *options)
{
    if (options->runtime == NULL) {
        const char *env = getenv("KVANT_RUNTIME");
        options->runtime = env != NULL && env[0] != 0 ? env : KVANT_DEFAULT_RUNTIME;
    }
}

/* llama.cpp's threads wait for one another some hundred times a token. A thread that shares its CPU
 * with another program comes late by a time slice each time. Two threads on two CPUs, one of them
 * busy, were measured to make 0.6 tokens/s. One thread makes 25 tokens/s. */
static uint32_t threads_by_default(void)
{
    const uint32_t cpus = kvant_available_cpus();
    const double idle = cpus > 1 ? os_idle_cpus() : HUGE_VAL;
    if (idle + 0.5 >= cpus)
        return cpus;
    const uint32_t n = idle < 1 ? 1 : (uint32_t)(idle + 0.5);
    complain("%lu thread%s instead of %lu, because other programs keep CPUs busy (-t sets it)",
             (unsigned long)n, n == 1 ? "" : "s", (unsigned long)cpus);
    return n;
}

static void limit_threads(engine_options *options, const char *command)
{
    const uint32_t cpus = kvant_available_cpus();
    if (options->n_threads > cpus)
        complain("%s: %lu threads asked for, %lu used: this process may use %lu of the machine's "
                 "CPUs",
                 command, (unsigned long)options->n_threads, (unsigned long)cpus,
                 (unsigned long)cpus);
    if (options->n_threads > cpus)
        options->n_threads = cpus;
}

bool engine_model_options_finish(engine_options *options, const char *command)
{
    if (options->model == NULL) {
        complain("%s: no model given", command);
        return hint("give -m model.gguf; scripts/fetch.py model fetches a small one");
    }
    default_runtime(options);
    limit_threads(options, command);
    return true;
}

bool engine_options_finish(engine_options *options, const char *command)
{
    return engine_model_options_finish(options, command) &&
           configs_finish(&options->configs, options->model);
}

/* Shows llama.cpp's errors and, with --verbose, everything that it logs. A line may come in parts;
 * all parts but the first have the level CONT. */
static void on_log(enum ggml_log_level level, const char *text, void *user)
{
    static bool showing;
    const engine *e = user;
    if (level != GGML_LOG_LEVEL_CONT)
        showing = e->options.verbose || level == GGML_LOG_LEVEL_ERROR;
    if (showing)
        fputs(text, stderr);
}

static bool start_threadpool(engine *e)
{
    if (e->options.n_threads == 0)
        e->options.n_threads = threads_by_default();
    const ggml_backend_dev_t cpu = ll.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == NULL)
        return complain("%s: there is no CPU back end for this machine; choose another --runtime",
                        e->options.runtime);
    const ggml_backend_reg_t reg = ll.ggml_backend_dev_backend_reg(cpu);
    struct ggml_threadpool *(*create)(struct ggml_threadpool_params *) = NULL;
    void *symbols[2] = { ll.ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new"),
                         ll.ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free") };
    if (symbols[0] != NULL && symbols[1] != NULL) {
        memcpy(&create, &symbols[0], sizeof create);
        memcpy(&e->threadpool_free, &symbols[1], sizeof e->threadpool_free);
        struct ggml_threadpool_params params =
            ll.ggml_threadpool_params_default((int)e->options.n_threads);
        e->threadpool = create(&params);
    }
    if (e->threadpool == NULL)
        complain("cannot start llama.cpp's thread pool: choose fewer threads with -t");
    return e->threadpool != NULL;
}

bool engine_open(engine *e, const engine_options *options)
{
    *e = (engine){ .options = *options };
    int file;
    if (!kvant_os_open(options->model, &file))
        return complain("model %s: %s", options->model, strerror(errno));
    kvant_os_close(file);
    if (!plugin_limit_spinning() || !llama_api_load(e->options.runtime))
        return false;
    ll.llama_log_set(on_log, e);
    ll.llama_backend_init();
    /* The plug-in is loaded when a configuration needs it, so that commands without one do not
     * depend on it. */
    os_set_variable("GGML_BACKEND_PATH", NULL);
    ll.ggml_backend_load_all_from_path(e->options.runtime);
    /* Distributions keep the back ends in a separate folder, which their ggml knows. */
    if (ll.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == NULL)
        ll.ggml_backend_load_all_from_path(NULL);
    return start_threadpool(e);
}

void engine_close(engine *e)
{
    if (e->cpu_model != NULL)
        ll.llama_model_free(e->cpu_model);
    if (e->kvant_model != NULL)
        ll.llama_model_free(e->kvant_model);
    if (e->threadpool != NULL)
        e->threadpool_free(e->threadpool);
    configs_free(&e->options.configs);
    *e = (engine){ .threadpool = NULL };
}

/* The plug-in's registry holds the device KVANT. KVANT_ACCEL is registered when a configuration
 * requests it. */
static bool load_plugin(engine *e)
{
    char path[OS_MAX_PATH];
    if (e->plugin != NULL)
        return true;
    if (!plugin_path(path, sizeof path) || !os_set_variable(PLUGIN_ACCEL, "0") ||
        !os_set_default(PLUGIN_ENV_QUIET,
                        e->options.verbose ? "0" : "1")) /* a command makes many contexts */
        return false;
    e->plugin = ll.ggml_backend_load(path);
    if (e->plugin == NULL) {
        complain("llama.cpp did not load the plug-in %s", path);
        hint("--verbose shows why; the plug-in refuses a ggml whose layout it does not know");
    }
    return e->plugin != NULL;
}

static bool wrong_plugin(const char *lacks)
{
    complain("the plug-in is of another version than this command: it has no %s", lacks);
    return hint("build both again with 'make'; if KVANT_PLUGIN is set, unset it");
}

static bool register_accel(engine *e)
{
    if (e->accel)
        return true;
    if (!load_plugin(e))
        return false;
    ggml_backend_dev_t device =
        ll.ggml_backend_reg_get_proc_address(e->plugin, "kvant_accel_device");
    if (device == NULL)
        return wrong_plugin("device " PLUGIN_ACCEL);
    ll.ggml_backend_device_register(device);
    return e->accel = true;
}

static ggml_backend_dev_t kvant_device(engine *e)
{
    if (!load_plugin(e))
        return NULL;
    void *symbol = ll.ggml_backend_reg_get_proc_address(e->plugin, "kvant_kv_memory");
    memcpy(&e->kv_memory, &symbol, sizeof symbol);
    symbol = ll.ggml_backend_reg_get_proc_address(e->plugin, "kvant_kv_size");
    memcpy(&e->kv_size, &symbol, sizeof symbol);
    symbol = ll.ggml_backend_reg_get_proc_address(e->plugin, "kvant_kv_size_at");
    memcpy(&e->kv_size_at, &symbol, sizeof symbol);
    const ggml_backend_dev_t device = ll.ggml_backend_dev_by_name(PLUGIN_DEVICE);
    const bool reports = e->kv_memory != NULL && e->kv_size != NULL && e->kv_size_at != NULL;
    if (device == NULL || !reports)
        wrong_plugin("device " PLUGIN_DEVICE " or no memory report");
    return reports ? device : NULL;
}

static bool keep_loading(float share, void *user)
{
    (void)share;
    (void)user;
    return !interrupted();
}

/* Checked here because llama.cpp needs three lines to say that a file is not a model. */
static bool is_gguf(const char *path)
{
    char magic[4] = "";
    FILE *file = fopen(path, "rb");
    const bool ok = file != NULL && fread(magic, 1, sizeof magic, file) == sizeof magic &&
                    memcmp(magic, "GGUF", 4) == 0;
    if (file != NULL)
        fclose(file);
    return ok;
}

static void other_parameters(const engine *e, const char *whose)
{
    complain("%s is llama.cpp %s with ggml %s, and kvant does not know its layout of %s parameters",
             e->options.runtime, ll.llama_version(), ll.ggml_version(), whose);
    hint("use a runtime with ggml 0.10 to 0.27");
}

static struct llama_model *load_model(engine *e, ggml_backend_dev_t *devices, int32_t n_gpu_layers)
{
    if (!is_gguf(e->options.model)) {
        complain("model %s: this is not a .gguf file", e->options.model);
        hint("scripts/fetch.py model fetches a small one");
        return NULL;
    }
    llama_params params = ll.llama_model_default_params();
    const model_settings settings = { devices, n_gpu_layers, keep_loading };
    if (!model_params(&params, &settings)) {
        other_parameters(e, "a model's");
        return NULL;
    }
    struct llama_model *model = ll.llama_model_load_from_file(e->options.model, params);
    if (model == NULL && !interrupted()) /* llama.cpp has said why */
        complain("cannot load the model %s", e->options.model);
    return model;
}

struct llama_model *engine_model(engine *e, const kv_config *config)
{
    if (config->stock) {
        ggml_backend_dev_t none[] = { NULL };
        if (config->accel && !register_accel(e))
            return NULL;
        if (e->cpu_model == NULL)
            e->cpu_model = load_model(e, none, 0);
        return e->cpu_model;
    }
    if (e->kvant_model == NULL) {
        ggml_backend_dev_t devices[] = { kvant_device(e), NULL };
        if (devices[0] != NULL)
            e->kvant_model = load_model(e, devices, 99);
    }
    return e->kvant_model;
}

void engine_model_name(const engine *e, const struct llama_model *model, char *name, size_t bytes)
{
    if (ll.llama_model_meta_val_str(model, "general.name", name, bytes) <= 0)
        snprintf(name, bytes, "%s", kvant_os_file_name(e->options.model));
}

static bool stop_computing(void *user)
{
    (void)user;
    return interrupted();
}

/* Called for every node before it is computed. Asks for no results, so graphs run as without it. */
static bool meter_node(struct ggml_tensor *node, bool ask, void *user)
{
    kv_meter *meter = user;
    if (!ask || strcmp(ll.ggml_op_name(node->op), "SET_ROWS") != 0)
        return !ask;
    const struct ggml_tensor *cache = node;
    while (cache->view_src != NULL)
        cache = cache->view_src;
    if (strncmp(cache->name, "cache_", 6) != 0)
        return false;
    for (size_t i = 0; i < meter->n; i++)
        if (meter->seen[i] == cache)
            return false;
    if (meter->n < sizeof meter->seen / sizeof *meter->seen) {
        meter->seen[meter->n++] = cache;
        const int64_t block = ll.ggml_blck_size(cache->type);
        meter->bytes += ll.ggml_nbytes(cache);
        meter->numbers += (double)ll.ggml_nbytes(cache) * (double)block /
                          (double)ll.ggml_row_size(cache->type, block);
    }
    return false;
}

struct llama_context *engine_context(engine *e, const kv_config *config,
                                     const engine_context_options *options)
{
    struct llama_model *model = engine_model(e, config);
    double bits;
    if (model == NULL || !engine_bits(e, config, &bits) ||
        (!config->stock && !configs_set_plugin(&e->options.configs, config)) ||
        !os_set_variable(PLUGIN_ACCEL, config->accel ? "1" : "0"))
        return NULL;
    llama_params params = ll.llama_context_default_params();
    context_settings settings = {
        .n_ctx = options->n_ctx,
        .n_batch = options->n_batch,
        .n_ubatch = options->n_batch < ENGINE_UBATCH ? options->n_batch : ENGINE_UBATCH,
        .n_outputs = options->n_outputs,
        .n_threads = (int32_t)e->options.n_threads,
        .flash_attention = config->stock && !config->accel && !options->flash_attention
                               ? LLAMA_FLASH_ATTN_TYPE_AUTO
                               : LLAMA_FLASH_ATTN_TYPE_ENABLED,
        .on_node = options->on_node,
        .on_node_user = options->on_node_user,
        .type_k = config->type_k,
        .type_v = config->type_v,
    };
    if (options->meter != NULL) {
        *options->meter = (kv_meter){ .n = 0 };
        settings.on_node = meter_node;
        settings.on_node_user = options->meter;
    }
    if (!context_params(&params, &settings)) {
        other_parameters(e, "a context's");
        return NULL;
    }
    struct llama_context *ctx = ll.llama_init_from_model(model, params);
    if (ctx == NULL) {
        complain("cannot create a context of %lu tokens with the cache %s",
                 (unsigned long)options->n_ctx, config->label);
        (void)(e->options.verbose || hint("--verbose shows what llama.cpp says"));
        return NULL;
    }
    ll.llama_attach_threadpool(ctx, e->threadpool, NULL);
    ll.llama_set_abort_callback(ctx, stop_computing, NULL);
    return ctx;
}

double engine_kv_bytes(const engine *e, const kv_config *config, const kv_meter *meter)
{
    return (double)(config->stock ? meter->bytes : e->kv_memory(NULL));
}

bool engine_kv_size(const engine *e, const kv_config *config, const kv_meter *meter,
                    kvp_kv_size *size)
{
    *size = (kvp_kv_size){ .size = sizeof *size };
    if (!config->stock) /* in the computer's memory, else on a GPU */
        return e->kv_size(false, size) || e->kv_size(true, size) ||
               complain("%s: the plug-in does not report the size of this cache", config->label);
    size->bytes = (double)meter->bytes;
    size->numbers[0] = meter->numbers;
    return true;
}

bool engine_planned_fills(engine *e, const kv_config *config, const engine_context_options *options,
                          bool on_gpu, const double *shares, size_t n, engine_fill *fills)
{
    struct llama_context *ctx = engine_context(e, config, options);
    kvp_kv_size full = { .size = sizeof full };
    if (ctx == NULL)
        return on_gpu && hint("a cache that only a GPU serves has no size here; the plug-in prints "
                              "it at the start");
    bool ok = e->kv_size(on_gpu, &full);
    for (size_t i = 0; i < n && ok; i++) {
        fills[i].size = full;
        ok = e->kv_size_at(on_gpu, shares[i] * full.cells, &fills[i].size, &fills[i].in_place);
    }
    ll.llama_free(ctx);
    return ok || complain("%s: the plug-in does not report the size of this cache", config->label);
}

uint64_t engine_runtime_fingerprint(const engine *e)
{
    uint64_t hash = FINGERPRINT_START;
    void *symbols[3] = { NULL };
    memcpy(&symbols[0], &ll.llama_decode, sizeof(void *));
    memcpy(&symbols[1], &ll.ggml_nbytes, sizeof(void *));
    memcpy(&symbols[2], &e->threadpool_free, sizeof(void *)); /* of the CPU back end */
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        char path[OS_MAX_PATH];
        const uint64_t file =
            os_library_of(symbols[i], path, sizeof path) ? fingerprint_whole_file(path) : 0;
        if (file == 0)
            return 0;
        hash = fingerprint_words(hash, &file, sizeof file);
    }
    return hash;
}

void engine_fill_batch(const engine *e, struct llama_batch *batch, const llama_token *tokens,
                       size_t position, size_t n)
{
    const struct llama_model *model = e->cpu_model != NULL ? e->cpu_model : e->kvant_model;
    const struct llama_vocab *vocab = ll.llama_model_get_vocab(model);
    batch->n_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        batch->token[i] = tokens[i];
        batch->pos[i] = (llama_pos)(position + i);
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = 0;
        batch->logits[i] = 0;
    }
    if (position == 0 && ll.llama_vocab_get_add_bos(vocab))
        batch->token[0] = ll.llama_vocab_bos(vocab);
}

bool engine_decode(struct llama_context *ctx, struct llama_batch batch)
{
    const int32_t status = ll.llama_decode(ctx, batch);
    if (interrupted())
        return false;
    return status == 0 || complain("llama.cpp could not decode (status %d)", (int)status);
}

bool engine_read(struct llama_context *ctx, llama_token *tokens, size_t n, progress *p,
                 const char *label)
{
    for (size_t start = 0; start < n; start += ENGINE_UBATCH) {
        const size_t now = n - start < ENGINE_UBATCH ? n - start : ENGINE_UBATCH;
        if (!engine_decode(ctx, ll.llama_batch_get_one(tokens + start, (int32_t)now)))
            return false;
        progress_add(p, (double)now, label);
    }
    return true;
}
