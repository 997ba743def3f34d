/* test_plugin_logits.c - what the model says with kvant's cache, against the same llama.cpp with its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>

#include "harness.h"

#define N_PROMPT 192
#define N_GREEDY 72

static float *prompt_logits(const char *spec, bool exact)
{
    return harness_prompt_logits(&(harness_options){ .spec = spec, .exact = exact, .n_ctx = 512 }, N_PROMPT);
}

/* The f16 codec stores the very numbers that stock's f16 cache stores and does the rest of attention in
 * f32, where stock also rounds queries and accumulators to f16. Its roundings are a subset of stock's, so
 * against attention in f32 throughout it is expected to be no further away than stock f16 is: the mean
 * squared error may exceed stock's by no more than 3 standard errors of the difference. (test_plugin_ops.c
 * checks attention itself, to f32's own rounding; this model multiplies a rounding by several hundred,
 * because its activations are quantised to 8 bits between layers.) */
static void f16_is_stock_within_f16_rounding(void **state)
{
    float *exact = prompt_logits(NULL, true), *stock = prompt_logits(NULL, false),
          *ours = prompt_logits("f16", false);
    size_t n = (size_t)N_PROMPT * (size_t)llama_vocab_n_tokens(harness_vocab());
    harness_comparison c = harness_compare_logits(ours, stock, exact, N_PROMPT);

    (void)state;
    print_message("logits' rms %.3f; distance to f32 (rms): kvant f16 %.5f, stock f16 %.5f; "
                  "mean squares differ by %.5f +- %.5f\n",
                  harness_rms(exact, n), sqrt(c.a), sqrt(c.b), c.a - c.b, c.difference_error);
    assert_true(c.b > 0);
    assert_true(c.a - c.b <= 3 * c.difference_error);
    free(exact);
    free(stock);
    free(ours);
}

/* Decodes greedily with two contexts side by side; returns how many tokens both choose alike from the
 * start. */
static int equal_greedy_tokens(const char *spec, double *least_lead)
{
    const harness_options options[2] = { { .spec = NULL, .n_ctx = 512 }, { .spec = spec, .n_ctx = 512 } };
    llama_token prompt[256], chosen[2];
    int n = harness_counting(prompt, 256), same;
    struct llama_context *contexts[2];

    for (int i = 0; i < 2; i++) {
        contexts[i] = harness_context(&options[i]);
        harness_decode(contexts[i], prompt, n, 0, 0, false);
    }
    *least_lead = INFINITY;
    for (same = 0; same < N_GREEDY; same++) {
        for (int i = 0; i < 2; i++)
            chosen[i] = harness_argmax(llama_get_logits_ith(contexts[i], -1));
        *least_lead = fmin(*least_lead, harness_lead(llama_get_logits_ith(contexts[0], -1)));
        if (chosen[0] != chosen[1])
            break;
        for (int i = 0; i < 2; i++)
            harness_decode(contexts[i], &chosen[0], 1, n + same, 0, false);
    }
    llama_free(contexts[0]);
    llama_free(contexts[1]);
    return same;
}

static void int8_writes_the_stock_text(void **state)
{
    double least_lead;
    int same = equal_greedy_tokens("int-8", &least_lead);

    (void)state;
    print_message("%d of %d tokens equal; the closest choice of stock leads by %.2f\n", same, N_GREEDY, least_lead);
    assert_true(same >= 64);
}

/* 4.25 bits must not be worse than llama.cpp's own 4.5 bits without rotation, 0.130 on SmolLM2
 * (docs/quality.md), and must differ from f16: otherwise something else than turboquant ran. */
static void turboquant_4_is_close(void **state)
{
    float *stock = prompt_logits(NULL, false);
    float *ours = prompt_logits("turboquant-4", false);
    double kld = harness_mean_kld(stock, ours, N_PROMPT);

    (void)state;
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
