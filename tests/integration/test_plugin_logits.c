/* test_plugin_logits.c - what the model says with kvant's cache, against the same llama.cpp with its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define N_PROMPT 192
#define N_GREEDY 72

static float *prompt_logits(const char *spec, bool exact)
{
    const harness_options options = {.spec = spec, .exact = exact, .n_ctx = 512};
    size_t bytes = (size_t) N_PROMPT * (size_t) llama_vocab_n_tokens(harness_vocab()) * sizeof(float);
    struct llama_context *context = harness_context(&options);
    llama_token tokens[N_PROMPT];
    float *logits = malloc(bytes);

    assert_non_null(logits);
    harness_tokens(tokens, N_PROMPT);
    harness_decode(context, tokens, N_PROMPT, 0, 0, true);
    memcpy(logits, llama_get_logits(context), bytes);
    llama_free(context);
    return logits;
}

/* The f16 codec stores the very numbers that stock's f16 cache stores, and does the rest of attention in f32, where
 * stock also rounds queries and accumulators to f16. Its roundings are a subset of stock's, so against attention in f32,
 * which rounds nothing, it can be no further away than stock f16 is; and by the triangle inequality no further than
 * twice that from stock f16. Roundings are independent of one another, so the root mean square over all logits of
 * all tokens is the measure; 1.1 allows for the sample. */
static void f16_is_stock_within_f16_rounding(void **state)
{
    size_t n = (size_t) N_PROMPT * (size_t) llama_vocab_n_tokens(harness_vocab());
    float *exact = prompt_logits(NULL, true);
    float *stock = prompt_logits(NULL, false);
    float *ours = prompt_logits("f16", false);
    double stock_error = harness_rms_difference(stock, exact, n);
    double our_error = harness_rms_difference(ours, exact, n);
    double difference = harness_rms_difference(ours, stock, n);

    (void) state;
    print_message("rms of logits %.3f; from f32: stock f16 %.5f, kvant f16 %.5f; kvant from stock %.5f\n",
                  harness_rms(exact, n), stock_error, our_error, difference);
    assert_true(stock_error > 0);
    assert_true(our_error <= 1.1 * stock_error);
    assert_true(difference <= 2.1 * stock_error);
    free(exact);
    free(stock);
    free(ours);
}

static void greedy(const char *spec, llama_token *out)
{
    const harness_options options = {.spec = spec, .n_ctx = 512};
    struct llama_context *context = harness_context(&options);
    llama_token prompt[N_PROMPT];

    harness_tokens(prompt, N_PROMPT);
    harness_decode(context, prompt, N_PROMPT, 0, 0, false);
    for (int i = 0; i < N_GREEDY; i++) {
        out[i] = harness_argmax(llama_get_logits_ith(context, -1));
        harness_decode(context, &out[i], 1, N_PROMPT + i, 0, false);
    }
    llama_free(context);
}

static void int8_writes_the_stock_text(void **state)
{
    llama_token stock[N_GREEDY], ours[N_GREEDY];
    int same = 0;

    (void) state;
    greedy(NULL, stock);
    greedy("int-8", ours);
    while (same < N_GREEDY && stock[same] == ours[same])
        same++;
    print_message("%d of %d tokens equal\n", same, N_GREEDY);
    assert_true(same >= 64);
}

/* 4.25 bits must not be worse than llama.cpp's own 4.5 bits without rotation, 0.130 on SmolLM2 (docs/quality.md),
 * and must differ from f16: otherwise something else than turboquant ran. */
static void turboquant_4_is_close(void **state)
{
    float *stock = prompt_logits(NULL, false);
    float *ours = prompt_logits("turboquant-4", false);
    double kld = harness_mean_kld(stock, ours, N_PROMPT);

    (void) state;
    print_message("mean KLD %.4f\n", kld);
    assert_true(kld > 1e-4 && kld < 0.130);
    free(stock);
    free(ours);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f16_is_stock_within_f16_rounding),
        cmocka_unit_test(int8_writes_the_stock_text),
        cmocka_unit_test(turboquant_4_is_close),
    };

    return cmocka_run_group_tests(tests, harness_start, harness_stop);
}
