#define _POSIX_C_SOURCE 200809L /* setenv */
/* test_plugin_in_place_memory.c - resources that layers on their way from f16 in place to
 * compressed pages share (gpu/hand_over.c): the GPU's memory, its graphs, and other contexts. */

#include <dlfcn.h>

#include "in_place_layers.h"

/* Contexts */

/* Steps of two contexts alternate: one has layers in both forms, the second begins. */
CASE(contexts_have_forms_of_their_own)
{
    struct llama_context *stock = new_context(NULL, "0", 1), *first, *second;
    float *of_first = harness_new_logits(60), *of_second = harness_new_logits(60),
          *expected = harness_new_logits(60);
    float *compressed = hear(a_prompt, 60, "int-8", "0", 1);

    first = new_context("int-8", EXACT, 1);
    second = new_context("int-8", EXACT, 1);
    feed_half(first);
    for (size_t i = 0; i < 60; i++) {
        feed(first, HALF + (int)i, 1, 1, HALF + (int)i, 0, of_first + i * harness_n_vocab());
        feed(second, (int)i, 1, 1, (int)i, 0, of_second + i * harness_n_vocab());
    }
    feed(stock, 0, 60, 1, 0, 0, expected);
    assert_same(expected, of_second, 60);
    feed(stock, 60, HALF - 60, 100, 60, 0, NULL);
    feed(stock, HALF, 60, 1, HALF, 0, expected);
    assert_as_good("beside another context", expected, of_first, compressed, 60);
    llama_free(first);
    llama_free(second);
    llama_free(stock);
    free(of_first);
    free(of_second);
    free(expected);
    free(compressed);
}

/* A counter of the mock. "mock_direct" counts parts of graphs that were computed outside of a
 * captured graph; "mock_synchronized" counts waits. */
static unsigned long counter(const char *name)
{
    const unsigned long *n =
        ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CUDA"), name);

    assert_non_null(n);
    return *n;
}

/* llama.cpp does not wait for the graph before it clears a cache. */
CASE(graphs_are_waited_for)
{
    struct llama_context *context;
    unsigned long before;

    if (!harness_has_mock())
        skip();
    context = new_context("int-8", EXACT, 1);
    feed(context, 0, 100, 100, 0, 0, NULL);
    before = counter("mock_synchronized");
    llama_memory_clear(llama_get_memory(context), true);
    assert_true(counter("mock_synchronized") > before);
    llama_free(context);
}

/* The first step with pages may make other contexts capture their graphs once more, which takes two
 * steps, because only then does the GPU have memory for slots. The layers that go do not affect
 * other contexts' graphs. */
CASE(other_contexts_keep_their_graphs)
{
    struct llama_context *first, *other;
    const int n = ROOM + 4 - PROMPT;
    int n_again = 0;

    if (!harness_has_mock())
        skip();
    first = new_context("int-8", EXACT, 1);
    other = new_context("int-8", "0", 1);
    /* the mock reads the variable to know whether a cache may be in place */
    setenv("KVANT_EXACT", EXACT, 1);
    feed(first, 0, PROMPT, 100, 0, 0, NULL);
    feed(other, 0, 4, 1, 0, 0, NULL);
    for (int i = 0; i < n; i++) {
        const unsigned long before = counter("mock_direct");
        feed(other, 4 + i, 1, 1, 4 + i, 0, NULL);
        n_again += counter("mock_direct") > before;
        feed(first, PROMPT + i, 1, 1, PROMPT + i, 0, NULL);
    }
    print_message("steps that were not replayed again: %d\n", n_again);
    assert_true(n_again <= 2);
    llama_free(first);
    llama_free(other);
}

/* Memory */

static bool try_token(struct llama_context *context, int pos, float *logits)
{
    struct llama_batch batch = llama_batch_get_one(tokens + pos, 1);

    if (llama_decode(context, batch) != 0)
        return false;
    memcpy(logits, llama_get_logits_ith(context, -1), harness_n_vocab() * sizeof(*logits));
    return true;
}

static size_t bytes_on_gpus(void)
{
    size_t (*bytes)(void);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "host_bytes");

    assert_non_null(symbol);
    memcpy(&bytes, &symbol, sizeof(symbol));
    return bytes();
}

/* A hand-over stores a tensor's rows from a copy, 512 rows at a time as fp32. */
CASE(memory_is_given_back)
{
    const size_t least = 512 * 128 * sizeof(float);

    if (!harness_has_mock())
        skip();
    for (int clear = 0; clear < 2; clear++) {
        struct llama_context *context = new_context("int-8", EXACT, 1);
        size_t half;
        feed_half(context);
        half = bytes_on_gpus();
        if (clear)
            llama_memory_clear(llama_get_memory(context), true);
        feed(context, HALF, 6, 1, clear ? 0 : HALF, 0, NULL);
        assert_true(bytes_on_gpus() + least <= half);
        llama_free(context);
    }
}

/* Queries of prompts are kept in GPU memory until the first key transforms are learned. A cleared
 * cache learns again. */
CASE(queries_are_given_back)
{
    struct llama_context *context;

    if (!harness_has_mock())
        skip();
    context = new_context("", "0", 1);
    for (int clear = 0; clear < 2; clear++) {
        size_t most = 0, least = SIZE_MAX;
        for (int i = 0; i < 4; i++) {
            size_t now;
            feed(context, 100 * i, 100, 100, 100 * i, 0, NULL);
            now = bytes_on_gpus();
            most = now > most ? now : most;
            least = i > 0 && now < least ? now : least;
        }
        print_message("GPU memory: %zu to %zu bytes\n", least, most);
        assert_true(least + 4 * 64 * 128 * sizeof(float) <= most);
        llama_memory_clear(llama_get_memory(context), true);
    }
    llama_free(context);
}

/* While rows fit, the memory is not needed. The first token that does not fit is refused, and one
 * more try with memory is enough. */
CASE(layers_wait_for_memory)
{
    struct llama_context *context;
    const int full = ROOM - PROMPT;
    const size_t behind = (size_t)full * harness_n_vocab();
    float *stock, *ours, *compressed;

    if (!harness_has_mock())
        skip();
    stock = hear(a_text, 100, NULL, "0", 1);
    ours = harness_new_logits(100);
    compressed = hear(a_text, 100, "int-8", "0", 1);
    context = new_context("int-8", EXACT, 1);
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    setenv("KVANT_TEST_NO_MEMORY", "1", 1);
    for (int i = 0; i < full; i++)
        assert_true(try_token(context, PROMPT + i, ours + (size_t)i * harness_n_vocab()));
    assert_same(stock, ours, full);
    assert_false(try_token(context, ROOM, ours + behind));
    unsetenv("KVANT_TEST_NO_MEMORY");
    for (int i = full; i < 100; i++)
        assert_true(try_token(context, PROMPT + i, ours + (size_t)i * harness_n_vocab()));
    assert_as_good("after a try without memory", stock + behind, ours + behind, compressed + behind,
                   100 - full);
    llama_free(context);
    free(stock);
    free(ours);
    free(compressed);
}

/* One allocation fails, counted from the token before the first layer goes. A refused token is
 * decoded again. */
static bool fail_at(int allocation, const float *stock, const float *compressed)
{
    struct llama_context *context = new_context("", EXACT, 1);
    float *ours = harness_new_logits(40);
    const int from = ROOM - 6;
    char number[16];
    bool failed;

    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, PROMPT, from - PROMPT, 1, PROMPT, 0, NULL);
    snprintf(number, sizeof(number), "%d", allocation);
    setenv("KVANT_TEST_NO_MEMORY_AT", number, 1);
    for (int i = 0; i < 40; i++) {
        float *logits = ours + (size_t)i * harness_n_vocab();
        assert_true(try_token(context, from + i, logits) || try_token(context, from + i, logits));
    }
    failed = strcmp(getenv("KVANT_TEST_NO_MEMORY_AT"), "0") == 0;
    unsetenv("KVANT_TEST_NO_MEMORY_AT");
    assert_as_good("one allocation fails", stock, ours, compressed, 40);
    llama_free(context);
    free(ours);
    return failed;
}

CASE(all_allocations_may_fail)
{
    const size_t first = (size_t)(ROOM - 6 - PROMPT) * harness_n_vocab();
    float *stock, *compressed;
    int n = 0;

    if (!harness_has_mock())
        skip();
    stock = hear(a_text, 100, NULL, "0", 1);
    compressed = hear(a_text, 100, "trellis-4", "0", 1);
    while (fail_at(n + 1, stock + first, compressed + first))
        n++;
    print_message("%d allocations\n", n);
    assert_true(n > 0);
    free(stock);
    free(compressed);
}

/* A batch that does not fit, whose graph takes the layers to pages */

enum { N_BEFORE = 200, N_BATCH = 100 };

static void a_batch(struct llama_context *context, float *logits)
{
    feed(context, 0, N_BEFORE, 100, 0, 0, NULL);
    feed(context, N_BEFORE, N_BATCH, N_BATCH, N_BEFORE, 0, logits);
}

static bool try_batch(struct llama_context *context, float *logits)
{
    struct llama_batch batch = llama_batch_init(N_BATCH, 0, 1);
    bool ok;

    for (int i = 0; i < N_BATCH; i++)
        harness_add(&batch, tokens[N_BEFORE + i], N_BEFORE + i, 0, true);
    ok = harness_decode_batch(context, batch) == 0;
    if (ok)
        memcpy(logits, llama_get_logits(context),
               (size_t)N_BATCH * harness_n_vocab() * sizeof(*logits));
    return ok;
}

/* A refused batch is decoded again. All 300 rows have exact pages, which are 320 rows of fp16, so
 * answers differ from f16's by rounding alone (assert_same). */
static bool fail_in_batch(int allocation, const float *stock)
{
    struct llama_context *context = new_context("", EXACT, 1);
    float *ours = harness_new_logits(N_BATCH);
    char number[16];
    bool failed;

    feed(context, 0, N_BEFORE, 100, 0, 0, NULL);
    snprintf(number, sizeof(number), "%d", allocation);
    setenv("KVANT_TEST_NO_MEMORY_AT", number, 1);
    assert_true(try_batch(context, ours) || try_batch(context, ours));
    failed = strcmp(getenv("KVANT_TEST_NO_MEMORY_AT"), "0") == 0;
    unsetenv("KVANT_TEST_NO_MEMORY_AT");
    assert_true(harness_mean_kld(stock, ours, N_BATCH) < 1e-5);
    llama_free(context);
    free(ours);
    return failed;
}

CASE(all_allocations_of_a_batch_may_fail)
{
    float *stock;
    int n = 0;

    if (!harness_has_mock())
        skip();
    stock = hear(a_batch, N_BATCH, NULL, "0", 1);
    while (fail_in_batch(n + 1, stock))
        n++;
    print_message("%d allocations\n", n);
    assert_true(n > 0);
    free(stock);
}

RUN_CASES(start, harness_stop)
