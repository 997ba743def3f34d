/* harness.c - see harness.h. */
#define _POSIX_C_SOURCE 200809L /* setenv, dup */

#include "harness.h"

#include <pthread.h>
#include <unistd.h>

#include "ggml-cpu.h"

#define MOST_POOLS 64 /* of contexts between two calls of harness_stop() */

static const char text[] = "The keeper of the lighthouse had counted ships for thirty years. Every "
                           "evening he climbed the ninety steps, "
                           "wiped the salt from the glass, lit the lamp, and wrote into a large "
                           "book which sails he had seen, where they "
                           "came from, and how the wind stood. Nobody had asked him to do it. The "
                           "first keeper had begun the book because "
                           "he could not sleep, and the second had gone on with it because an "
                           "unfinished book troubled him more than an "
                           "empty one. In the winter, when no ships came for weeks, he wrote down "
                           "the birds instead: gulls, cormorants, "
                           "once a swan that had lost its way. On the mainland people said that "
                           "the sea takes what it wants, but the "
                           "numbers in the book said otherwise. The sea took almost nothing. In "
                           "thirty years there were four wrecks, and "
                           "in three of them the crew walked home along the beach, wet, angry, and "
                           "alive. He liked to show that page to "
                           "visitors. \"Look,\" he would say, \"eleven thousand ships, and four of "
                           "them did not arrive. What else do you "
                           "know that goes right so often?\" Then he would make tea, and the "
                           "visitors would look out at the water, which "
                           "was grey in the morning, green at noon, and of no colour at all when "
                           "the lamp began to turn. A scientist came "
                           "one summer to measure the height of the waves. She stayed for nine "
                           "days, filled two notebooks, and found that "
                           "the highest wave had been exactly as high as the keeper had guessed, "
                           "less the width of a hand. ";

static struct llama_model *models[2]; /* with llama.cpp's own cache, with kvant's */
static char models_path[4096];
static ggml_backend_reg_t plugin;
static struct ggml_threadpool *pools[MOST_POOLS];
static size_t n_pools;

static void quiet(enum ggml_log_level level, const char *message, void *data)
{
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(message, stderr);
}

bool harness_offloads(void)
{
    return getenv("KVANT_TEST_OFFLOAD") != NULL;
}

/* Loads a model on one device or two. */
static struct llama_model *load_model(const char *path, ggml_backend_dev_t device,
                                      ggml_backend_dev_t other, bool planned)
{
    struct llama_model_params params = llama_model_default_params();
    ggml_backend_dev_t devices[3] = { device, other, NULL };

    params.devices = devices;
    params.n_gpu_layers = 99;
    params.no_alloc = planned;
    /* A mock of a GPU computes with plain weights. A CPU with AMX would repack the weights of the
     * stock context beside it, and round sums in another order. */
    params.use_extra_bufts = !harness_has_mock();
    if (other != NULL && getenv("KVANT_TEST_SPLIT") != NULL)
        params.split_mode = LLAMA_SPLIT_MODE_TENSOR;
    params.load_mode = planned ? LLAMA_LOAD_MODE_NONE : params.load_mode;
    return llama_model_load_from_file(path, params);
}

bool harness_on_gpu(void)
{
    return getenv("KVANT_TEST_MOCK") != NULL;
}

bool harness_has_mock(void)
{
    return harness_on_gpu() && strcmp(getenv("KVANT_TEST_MOCK"), "none") != 0;
}

void harness_need_gpu(void)
{
    if (harness_on_gpu())
        return;
    print_message("skipped: needs KVANT_TEST_MOCK\n");
    exit(77);
}

bool harness_has_floats(void)
{
    char description[128] = "";

    llama_model_desc(models[0], description, sizeof(description));
    return strstr(description, "F32") != NULL || strstr(description, "F16") != NULL;
}

void harness_need_floats(void)
{
    if (!harness_on_gpu() || harness_has_mock() || harness_has_floats())
        return;
    print_message("skipped: needs float weights\n");
    skip();
}

int harness_gpus(void)
{
    const char *n = getenv("KVANT_TEST_GPUS");

    return !harness_on_gpu() ? 0 : n != NULL ? atoi(n) : 1;
}

/* Most tests are about pages, so no cache is f16 in place unless a test asks for it. */
int harness_load_plugin(void **state)
{
    setenv("KVANT_EXACT", "0", 0);
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(KVANT_TEST_LLAMA_LIB);
    if (harness_has_mock() && ggml_backend_load(getenv("KVANT_TEST_MOCK")) == NULL)
        return -1;
    if (harness_offloads() && ggml_backend_load(getenv("KVANT_TEST_BACKEND")) == NULL)
        return -1;
    plugin = ggml_backend_load(KVANT_TEST_PLUGIN);
    return plugin != NULL ? 0 : -1;
}

static ggml_backend_dev_t first_device(void)
{
    return harness_offloads() ? ggml_backend_dev_by_name(getenv("KVANT_TEST_OFFLOAD"))
                              : ggml_backend_reg_dev_get(plugin, 0);
}

static ggml_backend_dev_t second_gpu(void)
{
    return harness_gpus() > 1 ? ggml_backend_reg_dev_get(plugin, 1) : NULL;
}

int harness_load_models(const char *path)
{
    harness_stop(NULL);
    snprintf(models_path, sizeof(models_path), "%s", path);
    models[0] = load_model(path, NULL, NULL, false);
    models[1] = load_model(path, first_device(), second_gpu(), false);
    return models[0] != NULL && models[1] != NULL ? 0 : -1;
}

void harness_load_tiny(const char *name)
{
    char path[4096];

    snprintf(path, sizeof(path), "%s/%s.gguf", getenv("KVANT_TINY_MODELS"), name);
    assert_int_equal(harness_load_models(path), 0);
}

int harness_start(void **state)
{
    const char *path = getenv("KVANT_TEST_MODEL");

    return harness_load_plugin(state) != 0
               ? -1
               : harness_load_models(path != NULL ? path : KVANT_TEST_MODEL);
}

int harness_stop(void **state)
{
    while (n_pools > 0)
        harness_free_pool(pools[--n_pools]);
    llama_model_free(models[0]);
    llama_model_free(models[1]);
    return 0;
}

ggml_backend_reg_t harness_plugin(void)
{
    return plugin;
}

const struct llama_model *harness_model(void)
{
    return models[0];
}

const struct llama_vocab *harness_vocab(void)
{
    return llama_model_get_vocab(models[0]);
}

size_t harness_n_vocab(void)
{
    return (size_t)llama_vocab_n_tokens(harness_vocab());
}

ggml_backend_dev_t harness_add_accel(void)
{
    ggml_backend_dev_t device = ggml_backend_reg_get_proc_address(plugin, "kvant_accel_device");

    assert_non_null(device);
    ggml_backend_device_register(device);
    return device;
}

static enum ggml_type type_of(const char *name)
{
    for (int i = 0; i < GGML_TYPE_COUNT; i++) /* removed types have no name */
        if (ggml_type_name((enum ggml_type)i) != NULL &&
            strcmp(ggml_type_name((enum ggml_type)i), name) == 0)
            return (enum ggml_type)i;
    fail_msg("no type %s", name);
    return GGML_TYPE_F32;
}

/* ggml's threads wait for one another by spinning, which on a busy machine costs a hundred times
 * the work. So most tests have one thread. test_plugin_ops.c tests threads. */
static int n_threads(void)
{
    const char *n = getenv("KVANT_TEST_THREADS");

    return n != NULL ? atoi(n) : 1;
}

/* Makes a thread pool for this context alone, as programs do. Pools live longer than their
 * contexts. */
static void attach_pool(struct llama_context *context)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct ggml_threadpool *pool = harness_new_pool(n_threads());

    assert_non_null(pool);
    pthread_mutex_lock(&lock);
    assert_true(n_pools < MOST_POOLS);
    pools[n_pools++] = pool;
    pthread_mutex_unlock(&lock);
    llama_attach_threadpool(context, pool, pool);
}

struct llama_context *harness_context(const harness_options *options)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *context;

    params.n_ctx = options->n_ctx;
    params.n_batch = options->n_ctx;
    params.n_ubatch = options->n_ubatch != 0 ? options->n_ubatch : 512;
    params.n_seq_max = options->n_seq ? options->n_seq : 1;
    params.kv_unified = options->unified;
    params.swa_full = !options->window;
    params.offload_kqv = !options->on_cpu;
    params.cb_eval = options->eval;
    params.n_threads = params.n_threads_batch = n_threads();
    params.flash_attn_type =
        options->fa_auto ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (options->spec != NULL && options->spec[0] == '\0') {
        unsetenv("KVANT_K");
        unsetenv("KVANT_V");
    } else if (options->spec != NULL) {
        setenv("KVANT_K", options->spec, 1);
        setenv("KVANT_V", options->values != NULL ? options->values : options->spec, 1);
    } else if (options->exact) {
        /* With flash attention llama.cpp casts an f32 cache to f16 before it uses it. */
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.type_k = params.type_v = GGML_TYPE_F32;
    }
    if (options->type != NULL)
        params.type_k = params.type_v = type_of(options->type);
    setenv("KVANT_ACCEL", options->accel ? "1" : "0", 1);
    context = llama_init_from_model(
        models[options->spec != NULL || (options->accel && harness_on_gpu())], params);
    assert_non_null(context);
    if (n_threads() > 1)
        attach_pool(context);
    return context;
}

void harness_plan(const harness_options *options)
{
    struct llama_model *own = models[1];

    models[1] = load_model(models_path, first_device(), second_gpu(), true);
    assert_non_null(models[1]);
    llama_free(harness_context(options));
    llama_model_free(models[1]);
    models[1] = own;
}

void harness_tokens(llama_token *tokens, int n)
{
    llama_token once[1024];
    int n_once;

    if (llama_vocab_type(harness_vocab()) == LLAMA_VOCAB_TYPE_NONE) {
        for (int i = 0; i < n; i++)
            tokens[i] = (llama_token)((unsigned)i * 2654435761u >> 8) %
                        llama_vocab_n_tokens(harness_vocab());
        return;
    }
    n_once = llama_tokenize(harness_vocab(), text, (int32_t)strlen(text), once, 1024, true, false);

    assert_true(n_once > 200);
    for (int i = 0; i < n; i++)
        tokens[i] = once[i % n_once];
}

int harness_add(struct llama_batch *batch, llama_token token, llama_pos pos, llama_seq_id seq,
                bool output)
{
    const int i = batch->n_tokens++;

    if (batch->token != NULL)
        batch->token[i] = token;
    batch->pos[i] = pos;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = seq;
    batch->logits[i] = output;
    return i;
}

int harness_decode_batch(struct llama_context *context, struct llama_batch batch)
{
    const int status = llama_decode(context, batch);

    llama_batch_free(batch);
    return status;
}

float *harness_new_logits(int n)
{
    float *logits = malloc((size_t)n * harness_n_vocab() * sizeof(*logits));

    assert_non_null(logits);
    return logits;
}

void harness_decode(struct llama_context *context, const llama_token *tokens, int n, llama_pos pos,
                    llama_seq_id seq, bool all_logits)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    for (int i = 0; i < n; i++)
        harness_add(&batch, tokens[i], pos + i, seq, all_logits || i == n - 1);
    assert_int_equal(harness_decode_batch(context, batch), 0);
}

llama_token harness_argmax(const float *logits)
{
    int n = llama_vocab_n_tokens(harness_vocab());
    llama_token best = 0;

    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

double harness_lead(const float *logits)
{
    int n = llama_vocab_n_tokens(harness_vocab());
    llama_token best = harness_argmax(logits);
    float next = -INFINITY;

    for (int i = 0; i < n; i++)
        if (i != best && logits[i] > next)
            next = logits[i];
    return (double)logits[best] - next;
}

double harness_rms_difference(const float *a, const float *b, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum / (double)n);
}

double harness_rms(const float *a, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += (double)a[i] * a[i];
    return sqrt(sum / (double)n);
}

static double log_sum_exp(const float *logits, int n)
{
    double most = logits[harness_argmax(logits)], sum = 0;

    for (int i = 0; i < n; i++)
        sum += exp(logits[i] - most);
    return most + log(sum);
}

double harness_mean_kld(const float *p, const float *q, int rows)
{
    int n = llama_vocab_n_tokens(harness_vocab());
    double sum = 0;

    for (int r = 0; r < rows; r++, p += n, q += n) {
        double p_norm = log_sum_exp(p, n), q_norm = log_sum_exp(q, n);
        for (int i = 0; i < n; i++)
            sum += exp(p[i] - p_norm) * ((p[i] - p_norm) - (q[i] - q_norm));
    }
    return sum / rows;
}

float *harness_prompt_logits(const harness_options *options, int n)
{
    size_t bytes = (size_t)n * harness_n_vocab() * sizeof(float);
    struct llama_context *context = harness_context(options);
    llama_token *tokens = malloc((size_t)n * sizeof *tokens);
    float *logits = malloc(bytes);

    assert_non_null(tokens);
    assert_non_null(logits);
    harness_tokens(tokens, n);
    harness_decode(context, tokens, n, 0, 0, true);
    memcpy(logits, llama_get_logits(context), bytes);
    llama_free(context);
    free(tokens);
    return logits;
}

int harness_counting(llama_token *tokens, int max)
{
    static const char counting[] =
        "<|im_start|>user\nCount from 1 to 60, one number a line.<|im_end|>\n"
        "<|im_start|>assistant\n1\n2\n3\n4\n5\n6\n7\n8\n";
    int n = llama_tokenize(harness_vocab(), counting, (int32_t)strlen(counting), tokens, max, true,
                           true);

    assert_true(n > 0);
    return n;
}

void *harness_cpu_function(const char *name)
{
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void *address = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name);

    assert_non_null(address);
    return address;
}

struct ggml_threadpool *harness_new_pool(int n_threads)
{
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    struct ggml_threadpool *(*create)(struct ggml_threadpool_params *);
    void *address = harness_cpu_function("ggml_threadpool_new");

    memcpy(&create, &address, sizeof(create));
    return create(&params);
}

void harness_free_pool(struct ggml_threadpool *pool)
{
    void (*destroy)(struct ggml_threadpool *);
    void *address = harness_cpu_function("ggml_threadpool_free");

    memcpy(&destroy, &address, sizeof(destroy));
    destroy(pool);
}

uint8_t *harness_save_sequence(struct llama_context *context, llama_seq_id seq, size_t *size)
{
    uint8_t *state;

    *size = llama_state_seq_get_size(context, seq);
    state = malloc(*size);
    assert_non_null(state);
    assert_int_equal(llama_state_seq_get_data(context, state, *size, seq), *size);
    return state;
}

uint8_t *harness_save_state(struct llama_context *context, size_t *size)
{
    return harness_save_sequence(context, 0, size);
}

size_t harness_row_bytes(void)
{
    const struct llama_model *model = harness_model();

    return (size_t)(llama_model_n_embd(model) / llama_model_n_head(model) *
                    llama_model_n_head_kv(model)) *
           sizeof(ggml_fp16_t);
}

size_t harness_rows_at(size_t end, size_t n, bool values, size_t layer)
{
    const size_t n_layers = (size_t)llama_model_n_layer(harness_model());
    const size_t block = HARNESS_ROWS_HEAD + n * harness_row_bytes();

    assert_true(end > 2 * n_layers * block);
    return end - ((values ? 1 : 2) * n_layers - layer) * block + HARNESS_ROWS_HEAD;
}

harness_lines harness_begin_lines(void)
{
    const harness_lines lines = { tmpfile(), dup(STDERR_FILENO) };

    assert_true(lines.file != NULL && lines.former >= 0);
    fflush(stderr);
    dup2(fileno(lines.file), STDERR_FILENO);
    return lines;
}

void harness_end_lines(const harness_lines *lines)
{
    fflush(stderr);
    dup2(lines->former, STDERR_FILENO);
    close(lines->former);
    rewind(lines->file);
}

double harness_state_difference(const uint8_t *a, const uint8_t *b, size_t size)
{
    double difference = 0, norm = 0;

    for (size_t i = 0; i + 1 < size; i += 2) {
        ggml_fp16_t halves[2];
        double x, y;
        memcpy(&halves[0], a + i, 2);
        memcpy(&halves[1], b + i, 2);
        x = ggml_fp16_to_fp32(halves[0]);
        y = ggml_fp16_to_fp32(halves[1]);
        if (!(fabs(x) < 1000) || !(fabs(y) < 1000))
            continue;
        difference += (x - y) * (x - y);
        norm += x * x;
    }
    return sqrt(difference / norm);
}

float harness_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)((z ^ (z >> 31)) >> 11) / 4503599627370496.0 - 1.0);
}
