/* test_plugin_gpu_contexts.c - contexts that share a GPU, on the mock of ggml-cuda
 * (mock_cuda.c). Each context waits only for its own work and finds its own inputs, whatever
 * names these have. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "harness.h"

enum { N_PROMPT = 96, N_ROUNDS = 6 };

static llama_token tokens[N_PROMPT];

static int start(void **state)
{
    harness_need_gpu();
    if (!harness_has_mock() || harness_start(state) != 0)
        return -1;
    harness_tokens(tokens, N_PROMPT);
    return 0;
}

static unsigned long synchronized(void)
{
    return *(unsigned long *)ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CUDA"),
                                                               "mock_synchronized");
}

static unsigned long synchronized_by_saving(struct llama_context *context)
{
    const unsigned long before = synchronized();
    size_t size;

    free(harness_save_state(context, &size));
    return synchronized() - before;
}

/* A context must not wait for other contexts: ggml-cuda may be capturing a graph of another context
 * in another thread. */
CASE(a_context_waits_for_its_own_work)
{
    const harness_options ours = { .spec = "turboquant-4", .n_ctx = 256 };
    const harness_options other = { .spec = "", .n_ctx = 256 };
    harness_options on_cpu = other;
    struct llama_context *context = harness_context(&ours), *others[2];
    unsigned long alone;

    on_cpu.on_cpu = true;
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    alone = synchronized_by_saving(context);
    others[0] = harness_context(&on_cpu);
    others[1] = harness_context(&other);
    for (int i = 0; i < 2; i++)
        harness_decode(others[i], tokens, N_PROMPT, 0, 0, false);
    assert_int_equal(synchronized_by_saving(context), alone);
    for (int i = 0; i < 2; i++)
        llama_free(others[i]);
    llama_free(context);
}

/* Logits of a prompt at a position, and of a second prompt after it. */
static void prompt_at(struct llama_context *context, int pos, float *logits)
{
    const size_t bytes = harness_n_vocab() * sizeof(*logits);

    llama_memory_clear(llama_get_memory(context), true);
    harness_decode(context, tokens, N_PROMPT, pos, 0, false);
    memcpy(logits, llama_get_logits_ith(context, -1), bytes);
}

/* With this codec the first tokens of a sequence are fp16. Their positions show which tokens these
 * are. */
static const harness_options sinks = { .spec = "int-4:sink=64", .n_ctx = 256 };

CASE(inputs_are_found_under_any_name)
{
    const size_t bytes = harness_n_vocab() * sizeof(float);
    float *named = harness_new_logits(1), *renamed = harness_new_logits(1),
          *late = harness_new_logits(1);
    struct llama_context *context = harness_context(&sinks);

    prompt_at(context, 0, named);
    prompt_at(context, 100, late);
    llama_free(context);
    assert_memory_not_equal(named, late, bytes);
    setenv("KVANT_TEST_RENAME", "1", 1);
    context = harness_context(&sinks);
    prompt_at(context, 0, renamed);
    llama_free(context);
    unsetenv("KVANT_TEST_RENAME");
    assert_memory_equal(named, renamed, bytes);
    free(named);
    free(renamed);
    free(late);
}

typedef struct client {
    struct llama_context *context;
    int pos; /* position of its first prompt */
    float *expected, *logits;
    int n_wrong;
} client;

static void *ask(void *user)
{
    client *c = user;

    for (int i = 0; i < N_ROUNDS; i++) {
        prompt_at(c->context, c->pos, c->logits);
        c->n_wrong += memcmp(c->logits, c->expected, harness_n_vocab() * sizeof(float)) != 0;
    }
    return NULL;
}

/* Two threads have one context each, whose prompts have different positions. */
CASE(contexts_have_positions_of_their_own)
{
    client clients[2] = { { .pos = 0 }, { .pos = 100 } };
    pthread_t threads[2];

    for (int i = 0; i < 2; i++) {
        client *c = &clients[i];
        c->expected = harness_new_logits(1);
        c->logits = harness_new_logits(1);
        c->context = harness_context(&sinks);
        prompt_at(c->context, c->pos, c->expected);
    }
    setenv("KVANT_TEST_SLOW_INPUTS", "1", 1);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask, &clients[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    unsetenv("KVANT_TEST_SLOW_INPUTS");
    for (int i = 0; i < 2; i++) {
        client *c = &clients[i];
        llama_free(c->context);
        free(c->expected);
        free(c->logits);
        assert_int_equal(c->n_wrong, 0);
    }
}

/* Bytes on the GPU, as the mock driver counts them. */
static size_t gpu_bytes(void)
{
    size_t (*count)(void);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "host_bytes");

    assert_non_null(symbol);
    memcpy(&count, &symbol, sizeof(symbol));
    return count();
}

/* Bytes that the second context adds, besides its cache, after prompts of growing length: `step`
 * tokens, twice as many, up to N_PROMPT. */
static size_t bytes_after(int step)
{
    struct llama_context *context;
    const size_t before = gpu_bytes();
    float *logits = harness_new_logits(1);
    size_t bytes;

    context = harness_context(&(harness_options){ .spec = "", .n_ctx = 256 });
    for (int n = step; n <= N_PROMPT; n += step) {
        llama_memory_clear(llama_get_memory(context), true);
        harness_decode(context, tokens, n, 0, 0, false);
        memcpy(logits, llama_get_logits_ith(context, -1), sizeof(*logits));
    }
    llama_synchronize(context);
    bytes = gpu_bytes() - before;
    llama_free(context);
    assert_int_equal(gpu_bytes(), before);
    free(logits);
    return bytes;
}

/* Prompts of growing length take no more memory than the longest prompt alone, except for half of
 * the growth. A factor of 1.5 covers that. */
CASE(former_sizes_are_given_back)
{
    size_t once, often;

    bytes_after(N_PROMPT); /* the GPU has now allocated everything that it keeps for any context */
    once = bytes_after(N_PROMPT);
    often = bytes_after(8);
    print_message("%d tokens: %zu bytes; after shorter prompts %zu\n", N_PROMPT, once, often);
    assert_true(often <= once + once / 2);
}

/* Both contexts learn from the same prompts, one after the other. When the second one's lesson is
 * under way, the first one needs no memory for learning any more. The mock's driver ends the
 * program if memory is freed that a lesson still uses. */
CASE(a_lesson_keeps_its_memory)
{
    enum { N_BATCH = 64, N_ALL = 448 };
    const size_t bytes = harness_n_vocab() * sizeof(float);
    struct llama_context *contexts[2];
    llama_token text[N_ALL];
    float *first = harness_new_logits(1);

    harness_tokens(text, N_ALL);
    setenv("KVANT_EXACT", "0", 1);
    for (int i = 0; i < 2; i++) {
        contexts[i] = harness_context(&(harness_options){ .spec = "", .n_ctx = 512 });
        for (int at = 0; at < N_ALL; at += N_BATCH)
            harness_decode(contexts[i], text + at, N_BATCH, at, 0, false);
        if (i == 0)
            memcpy(first, llama_get_logits_ith(contexts[0], -1), bytes);
    }
    unsetenv("KVANT_EXACT");
    assert_memory_equal(first, llama_get_logits_ith(contexts[1], -1), bytes);
    for (int i = 0; i < 2; i++)
        llama_free(contexts[i]);
    free(first);
}

/* A sequence whose keys and values are NaN. */
static void decode_nan(struct llama_context *context, llama_seq_id seq)
{
    const int width = llama_model_n_embd(harness_model());
    struct llama_batch batch = llama_batch_init(1, width, 1);

    for (int i = 0; i < width; i++)
        batch.embd[i] = NAN;
    harness_add(&batch, 0, 0, seq, false);
    assert_int_equal(harness_decode_batch(context, batch), 0);
}

enum { N_PLACE = 256, N_LAYERS = 4, N_FULL = N_PLACE - N_LAYERS - 1, N_SHIFTED = 700 };

/* The next token does not leave room for as many single tokens as there are layers in f16, so a
 * layer goes to pages. The row of the second sequence is NaN. */
static void fill(struct llama_context *context, const llama_token *text)
{
    harness_decode(context, text, 200, 0, 0, false);
    decode_nan(context, 1);
    for (int i = 200; i < N_FULL; i++)
        harness_decode(context, text + i, 1, i, 0, false);
    llama_synchronize(context);
}

/* The next graph moves keys, some of which it stores again. */
static void fill_and_shift(struct llama_context *context, const llama_token *text, int n)
{
    const llama_memory_t memory = llama_get_memory(context);

    harness_decode(context, text, n, 0, 0, false);
    llama_memory_seq_rm(memory, 0, 40, 50);
    llama_memory_seq_add(memory, 0, 50, -1, -10);
    llama_synchronize(context);
}

/* The context whose next token comes in the midst of a graph of another context. */
static struct llama_context *full;
static llama_token next;

static bool interrupt(struct ggml_tensor *node, bool ask, void *user)
{
    struct llama_context *context = full;
    struct llama_batch batch;

    full = NULL;
    if (context == NULL)
        return false;
    batch = llama_batch_init(1, 0, 1);
    harness_add(&batch, next, N_FULL, 0, false);
    assert_int_equal(harness_decode_batch(context, batch), 0);
    return false;
}

static struct llama_context *new_context(const char *spec, const char *exact,
                                         ggml_backend_sched_eval_callback eval)
{
    const harness_options options = {
        .spec = spec, .n_ctx = 1024, .n_seq = 2, .unified = true, .eval = eval
    };

    setenv("KVANT_EXACT", exact, 1); /* the mock reads it, too */
    return harness_context(&options);
}

/* A row of NaNs is refused in a graph of one context, while another context stores keys. That is no
 * reason to refuse these keys, and the first context says why its tokens get NaN. */
CASE(a_refusal_belongs_to_its_context)
{
    struct llama_context *shifted = new_context("", "0", interrupt),
                         *refused = new_context("turboquant-4", "256", NULL);
    llama_token text[N_SHIFTED];
    harness_lines lines;
    char line[512];
    int n_lines = 0;

    harness_tokens(text, N_SHIFTED);
    fill(refused, text);
    fill_and_shift(shifted, text, N_SHIFTED);
    full = refused;
    next = text[N_FULL];
    lines = harness_begin_lines();
    harness_decode(shifted, text, 1, N_SHIFTED - 10, 0, false);
    llama_synchronize(shifted);
    llama_synchronize(refused);
    harness_end_lines(&lines);
    while (fgets(line, sizeof(line), lines.file) != NULL) {
        fputs(line, stderr);
        n_lines += strstr(line, "cannot store 1 rows") != NULL;
    }
    fclose(lines.file);
    assert_null(full);
    assert_int_equal(n_lines, 1);
    llama_free(refused);
    llama_free(shifted);
    unsetenv("KVANT_EXACT");
}

RUN_CASES(start, harness_stop)
