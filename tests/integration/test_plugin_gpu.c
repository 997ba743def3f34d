/* test_plugin_gpu.c - the devices of a llama.cpp with CUDA, on the stand-in (standin_cuda.c): graphs cut at our nodes, captured, replayed;
 * rows where the codec puts them; results as the bits of the codec allow. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

enum { N_PROMPT = 150, N_STEPS = 40 };

static llama_token tokens[N_PROMPT + N_STEPS];

static int start(void **state)
{
    int status;

    if (!harness_on_gpu()) {
        print_message("skipped: needs KVANT_TEST_STANDIN\n");
        exit(77);
    }
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_PROMPT + N_STEPS);
    return status;
}

static size_t vocab_size(void)
{
    return (size_t)llama_vocab_n_tokens(harness_vocab());
}

/* How many graphs the driver launched so far, and how often a graph took another's place. */
static unsigned long launches(unsigned long *updates)
{
    unsigned long (*count)(unsigned long *);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "host_launches");

    assert_non_null(symbol);
    memcpy(&count, &symbol, sizeof(symbol));
    return count(updates);
}

static unsigned long counter(const char *name)
{
    return *(unsigned long *)ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CUDA"), name);
}

/* Logits of N_STEPS tokens, one at a time, after the prompt. */
static void steps(struct llama_context *context, float *logits)
{
    const size_t n = vocab_size();

    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    for (int i = 0; i < N_STEPS; i++) {
        harness_decode(context, tokens + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
}

static float *new_logits(void)
{
    float *logits = malloc(N_STEPS * vocab_size() * sizeof(*logits));

    assert_non_null(logits);
    return logits;
}

/* Twice, with a clear between: what was captured before must not be replayed on centres of the past. */
static void run_twice(const char *spec, const char *graphs, float *first, float *second)
{
    const harness_options options = { .spec = spec, .n_ctx = 512 };
    struct llama_context *context;

    setenv("KVANT_GRAPH", graphs, 1);
    context = harness_context(&options);
    steps(context, first);
    llama_memory_clear(llama_get_memory(context), true);
    steps(context, second);
    llama_free(context);
    unsetenv("KVANT_GRAPH");
}

/* A replayed graph runs the kernels that were captured, with their arguments of then. Cell numbers and masks are read
 * when it runs, so the bits are those of kernels that were launched one by one. */
static void check_replay(const char *spec)
{
    float *logits[4];
    unsigned long before, captured, updates;

    for (int i = 0; i < 4; i++)
        logits[i] = new_logits();
    before = launches(&updates);
    run_twice(spec, "0", logits[0], logits[1]);
    assert_int_equal(launches(&updates), before);
    captured = counter("standin_recorded");
    run_twice(spec, "1", logits[2], logits[3]);
    print_message("%s: %lu graphs launched, %lu parts recorded\n", spec, launches(&updates) - before,
                  counter("standin_recorded") - captured);
    /* Every token but those that begin a graph: a graph holds up to 256 cells, its first token is computed in parts. */
    assert_true(launches(&updates) - before >= 2 * N_STEPS - 8);
    assert_true(counter("standin_recorded") > captured);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(logits[i], logits[i + 1], N_STEPS * vocab_size() * sizeof(**logits));
    for (int i = 0; i < 4; i++)
        free(logits[i]);
}

static void replayed_graphs_give_the_same_bits(void **state)
{
    (void)state;
    check_replay("turboquant-4");
    check_replay("trellis-4:center=first,norm=first,sink=0");
    check_replay("");
}

static double divergence(const harness_options *options, const float *stock)
{
    struct llama_context *context = harness_context(options);
    float *logits = new_logits();
    double kld;

    steps(context, logits);
    kld = harness_mean_kld(stock, logits, N_STEPS);
    llama_free(context);
    free(logits);
    return kld;
}

/* Bounds as in test_plugin_logits.c, whose comment derives them. */
static void errors_are_those_of_the_bits(void **state)
{
    static const struct {
        const char *spec, *type;
        double factor;
    } pairs[] = { { "turboquant-4", "q4_0", 1.7 }, { "int-8", "q8_0", 1.6 }, { "trellis-4", "q4_0", 1 }, { "", "q4_0", 1 } };
    struct llama_context *context = harness_context(&(harness_options){ .n_ctx = 512 });
    float *stock = new_logits();

    (void)state;
    steps(context, stock);
    llama_free(context);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        double ours = divergence(&(harness_options){ .spec = pairs[i].spec, .n_ctx = 512 }, stock);
        double rival = divergence(&(harness_options){ .type = pairs[i].type, .n_ctx = 512 }, stock);
        print_message("mean KLD: %s %.5f, %s %.5f\n", pairs[i].spec, ours, pairs[i].type, rival);
        assert_true(ours > 1e-7); /* else it was f16 that ran */
        assert_true(ours <= pairs[i].factor * rival);
    }
    free(stock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replayed_graphs_give_the_same_bits),
        cmocka_unit_test(errors_are_those_of_the_bits),
    };

    return cmocka_run_group_tests(tests, start, harness_stop);
}
