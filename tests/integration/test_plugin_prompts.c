/* test_plugin_prompts.c - first matrices that a GPU's cache makes from prompts
 * (gpu/first_matrix.c), on the mock of ggml-cuda. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "harness.h"
#include "mock_control.h"

/* A preset's cache of 512 tokens has 4 pages of 64 exact rows. The first batch fills 3 of these,
 * and more than two thirds of the pages make threads learn. The second batch needs two pages, so
 * blocks of the first one are sealed. */
enum { N_FIRST = 192, N_SECOND = 128, N_ALONE = 40, N_ALL = N_FIRST + 2 * N_SECOND };

static llama_token tokens[N_ALL];

static int start(void **state)
{
    int status;

    harness_need_gpu();
    status = harness_start(state);
    setenv("KVANT_PRESET", "small", 1);
    return status;
}

/* circle: 0, or after how many tokens the text begins again. */
static struct llama_context *begin(const char *spec, const char *type, int circle)
{
    harness_tokens(tokens, N_ALL);
    for (int i = circle; circle > 0 && i < N_ALL; i++)
        tokens[i] = tokens[i - circle];
    return harness_context(&(harness_options){ .spec = spec, .type = type, .n_ctx = 512 });
}

/* Single tokens from a position on; logits of each. */
static void decode_alone(struct llama_context *context, int first, int n, float *logits)
{
    for (int i = 0; i < n; i++) {
        harness_decode(context, tokens + first + i, 1, first + i, 0, false);
        memcpy(logits + (size_t)i * harness_n_vocab(), llama_get_logits_ith(context, -1),
               harness_n_vocab() * sizeof(*logits));
    }
}

static void decode_all(const char *spec, const char *type, int circle, float *logits)
{
    struct llama_context *context = begin(spec, type, circle);

    harness_decode(context, tokens, N_FIRST, 0, 0, false);
    harness_decode(context, tokens + N_FIRST, N_SECOND, N_FIRST, 0, false);
    decode_alone(context, N_FIRST + N_SECOND, N_ALONE, logits);
    llama_free(context);
}

/* Whether keys of the last attention had a matrix. */
static bool has_matrix(void)
{
    return last_attention()->q_matrix_stride > 0;
}

/* How often this thread waits for the GPU in the n tokens from the first-th on. */
static unsigned long waits_of(struct llama_context *context, int first, int n)
{
    const unsigned long before = standin_waits();

    harness_decode(context, tokens + first, n, first, 0, false);
    return standin_waits() - before;
}

/* A wait for each layer would leave the GPU idle between two layers. The first batch waits four
 * times for the whole cache when threads begin to learn. That is one wait a layer here. A cache
 * that learns nothing waits, too, so the test allows fewer than two waits a layer more. In the
 * second batch, whose graph puts the matrices in force, each GPU waits twice for its part of the
 * cache, and llama.cpp waits between two GPUs. With a wait a layer there would be as many waits as
 * layers more. */
CASE(no_layer_of_a_prompt_waits)
{
    const unsigned long n_layers = (unsigned long)llama_model_n_layer(harness_model()),
                        n_gpus = (unsigned long)harness_gpus();
    struct llama_context *context;
    unsigned long first, second, others;

    if (!harness_has_mock())
        skip();
    unsetenv("KVANT_PRESET");
    context = begin("trellis-3", NULL, 0);
    others = waits_of(context, 0, N_FIRST);
    llama_free(context);
    setenv("KVANT_PRESET", "small", 1);
    context = begin("", NULL, 0);
    first = waits_of(context, 0, N_FIRST);
    assert_false(has_matrix());
    second = waits_of(context, N_FIRST, N_SECOND);
    assert_true(has_matrix());
    llama_free(context);
    print_message("%lu waits and %lu without learning, then %lu; %lu layers\n", first, others,
                  second, n_layers);
    assert_true(first < others + 2 * n_layers && second < n_layers * n_gpus);
}

/* The second batch needs two pages, and one page is free. So a block of the first batch gives its
 * page up. All rows of the block are dirty, so each layer seals the page in one launch. */
CASE(whole_pages_are_sealed)
{
    const unsigned long n_layers = (unsigned long)llama_model_n_layer(harness_model());
    struct llama_context *context;
    unsigned long before;

    if (!harness_has_mock())
        skip();
    context = begin("", NULL, 0);
    harness_decode(context, tokens, N_FIRST, 0, 0, false);
    before = standin_sealed();
    harness_decode(context, tokens + N_FIRST, N_SECOND, N_FIRST, 0, false);
    assert_int_equal(standin_sealed() - before, n_layers);
    llama_free(context);
}

/* Blocks that are sealed when CUDA gets each part of a batch's graph. Returns the number of
 * parts. */
static int sealed_at_parts(struct llama_context *context, int first, int n, unsigned long *sealed,
                           int most)
{
    const harness_lines lines = harness_begin_lines();
    char line[512];
    int n_parts = 0;

    setenv("KVANT_TEST_PARTS", "1", 1);
    harness_decode(context, tokens + first, n, first, 0, false);
    unsetenv("KVANT_TEST_PARTS");
    harness_end_lines(&lines);
    while (fgets(line, sizeof(line), lines.file) != NULL && n_parts < most) {
        const char *at = strstr(line, " nodes, ");
        if (at != NULL && sscanf(at, " nodes, %lu blocks", &sealed[n_parts]) == 1)
            n_parts++;
    }
    fclose(lines.file);
    return n_parts;
}

/* A third batch needs two pages, so two blocks of the batch before give their pages up. If all
 * layers sealed these before the graph, CUDA would be idle. So layer i seals its pages after CUDA
 * got the part of the graph before the layer's attention, which is part i. */
CASE(layers_seal_while_cuda_computes)
{
    const int n_layers = llama_model_n_layer(harness_model());
    struct llama_context *context;
    unsigned long before, sealed[64];
    int n_parts, n_same = 0;

    if (!harness_has_mock())
        skip();
    context = begin("", NULL, 0);
    harness_decode(context, tokens, N_FIRST, 0, 0, false);
    harness_decode(context, tokens + N_FIRST, N_SECOND, N_FIRST, 0, false);
    before = standin_sealed();
    assert_true(n_layers < 64);
    n_parts = sealed_at_parts(context, N_FIRST + N_SECOND, N_SECOND, sealed, 64);
    assert_int_equal(n_parts, n_layers + harness_gpus());
    assert_int_equal(sealed[0], before);
    /* Where a layer is the first of another GPU, two parts come between two attentions. */
    for (int i = 1; i < n_parts; i++) {
        assert_true(sealed[i] - sealed[i - 1] == 2 || sealed[i] == sealed[i - 1]);
        n_same += sealed[i] == sealed[i - 1];
    }
    assert_int_equal(n_same, harness_gpus() - 1);
    assert_int_equal(sealed[n_parts - 1] - before, 2 * (unsigned long)n_layers);
    llama_free(context);
}

/* small has fewer bits than q4_0 and is better nevertheless. Threads that take another time change
 * nothing. */
CASE(matrices_come_from_prompts)
{
    const size_t bytes = N_ALONE * harness_n_vocab() * sizeof(float);
    float *stock = harness_new_logits(N_ALONE), *ours = harness_new_logits(N_ALONE),
          *again = harness_new_logits(N_ALONE);
    double with, rival;

    harness_need_floats();
    decode_all(NULL, NULL, 0, stock);
    decode_all(NULL, "q4_0", 0, ours);
    rival = harness_mean_kld(stock, ours, N_ALONE);
    decode_all("", NULL, 0, ours);
    decode_all("", NULL, 0, again);
    assert_memory_equal(ours, again, bytes);
    with = harness_mean_kld(stock, ours, N_ALONE);
    print_message("mean KLD: small %.5f, q4_0 %.5f\n", with, rival);
    assert_true(with > 1e-7 && with <= rival);
    free(stock);
    free(ours);
    free(again);
}

/* A context that computes nothing has captured launches of all functions that pages need. CUDA
 * loads the kernels of these. */
CASE(kernels_are_loaded_without_a_token)
{
    const unsigned long before = harness_has_mock() ? standin_unlaunched() : 0;

    if (!harness_has_mock())
        skip();
    llama_free(begin("", NULL, 0));
    assert_true(standin_unlaunched() > before);
}

RUN_CASES(start, harness_stop)
