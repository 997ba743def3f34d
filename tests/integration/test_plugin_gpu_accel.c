/* test_plugin_gpu_accel.c - KVANT_ACCEL with CUDA, on the mock of ggml-cuda: llama.cpp's own
 * quantised cache, where kvant computes the attention of short steps. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "harness.h"
#include "mock_control.h"

enum { N_PROMPT = 150, N_STEPS = 40 };

static llama_token tokens[N_PROMPT + N_STEPS];

static int start(void **state)
{
    int status;

    harness_need_gpu();
    setenv("KVANT_ACCEL", "1", 1);
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_PROMPT + N_STEPS);
    return status;
}

/* Logits of tokens after the prompt, one at a time and three at a time. */
static float *steps(const harness_options *options)
{
    struct llama_context *context = harness_context(options);
    const size_t n = harness_n_vocab();
    float *logits = calloc(N_STEPS * n, sizeof(*logits));

    assert_non_null(logits);
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    for (int i = 0; i + 3 < N_STEPS; i += i % 4 ? 1 : 3) {
        harness_decode(context, tokens + N_PROMPT + i, i % 4 ? 1 : 3, N_PROMPT + i, 0, false);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
    llama_free(context);
    return logits;
}

/* On a CPU, llama.cpp rounds queries to 8 bits and sums to 16. With the same rows it is no nearer
 * to an f16 cache, except by chance, for which the factor of test_plugin_gpu.c allows. */
CASE(attention_is_no_worse_than_stocks)
{
    static const char *const types[] = { "q8_0", "q4_0" };
    float *f16 = steps(&(harness_options){ .n_ctx = 512 });

    for (size_t i = 0; i < 2; i++) {
        float *stock = steps(&(harness_options){ .type = types[i], .n_ctx = 512 }), *ours;
        double ours_error, error;
        if (harness_has_mock())
            mock_control()->function = NULL;
        ours = steps(&(harness_options){ .type = types[i], .accel = true, .n_ctx = 512 });
        if (harness_has_mock())
            assert_string_equal(mock_control()->function, "host_block_attention");
        ours_error = harness_mean_kld(f16, ours, N_STEPS);
        error = harness_mean_kld(f16, stock, N_STEPS);
        print_message("%s: mean KLD to f16 %.2e, of stock %.2e\n", types[i], ours_error, error);
        assert_true(ours_error > 0 && ours_error <= 1.6 * error);
        free(stock);
        free(ours);
    }
    free(f16);
}

RUN_CASES(start, harness_stop)
