/* test_plugin_logits.c - the model's logits and texts with kvant's cache, against the same
 * llama.cpp with its own cache. */
#include "harness.h"

#define N_PROMPT 192
#define N_GREEDY 72

static float *prompt_logits(const char *spec, bool exact)
{
    return harness_prompt_logits(&(harness_options){ .spec = spec, .exact = exact, .n_ctx = 512 },
                                 N_PROMPT);
}

static float *stock; /* logits with llama.cpp's f16 cache */

static int start(void **state)
{
    if (harness_start(state) != 0)
        return -1;
    stock = prompt_logits(NULL, false);
    return 0;
}

static int stop(void **state)
{
    free(stock);
    return harness_stop(state);
}

/* Means over tokens of the squared distance of ours and of stock to exact logits. */
typedef struct comparison {
    double ours, stock, difference_error; /* the standard error of ours - stock */
} comparison;

static double token_error(const float *x, const float *exact, int token)
{
    size_t n = harness_n_vocab();
    double rms = harness_rms_difference(x + (size_t)token * n, exact + (size_t)token * n, n);

    return rms * rms;
}

static comparison compare(const float *ours, const float *exact)
{
    comparison c = { 0 };
    double squares = 0;

    for (int t = 0; t < N_PROMPT; t++) {
        double a = token_error(ours, exact, t), b = token_error(stock, exact, t);
        c.ours += a / N_PROMPT;
        c.stock += b / N_PROMPT;
        squares += (a - b) * (a - b) / N_PROMPT;
    }
    c.difference_error = sqrt((squares - (c.ours - c.stock) * (c.ours - c.stock)) / (N_PROMPT - 1));
    return c;
}

/* The f16 codec stores the same numbers as llama.cpp's f16 cache and does the rest of attention in
 * f32, as llama.cpp does for a prompt. So compared with attention in f32, kvant should be no
 * further away. Its mean squared error may exceed llama.cpp's by at most 3 standard errors of the
 * difference. Tokens of a text are not independent, but with the whole model and f16 this hardly
 * matters: over 10 texts, the root mean square of the difference is 1.13 standard errors.
 *
 * test_plugin_ops.c checks attention itself up to the rounding of f32. This model multiplies a
 * rounding by several hundred, because its activations are quantised to 8 bits between layers. */
CASE(f16_is_stock_within_f16_rounding)
{
    float *exact = prompt_logits(NULL, true), *ours = prompt_logits("f16", false);
    size_t n = (size_t)N_PROMPT * harness_n_vocab();
    comparison c = compare(ours, exact);

    print_message("logits' rms %.3f; distance to f32 (rms): kvant f16 %.5f, stock f16 %.5f; "
                  "mean squares differ by %.5f +- %.5f\n",
                  harness_rms(exact, n), sqrt(c.ours), sqrt(c.stock), c.ours - c.stock,
                  c.difference_error);
    assert_true(c.stock > 0);
    assert_true(c.ours - c.stock <= 3 * c.difference_error);
    free(exact);
    free(ours);
}

/* Decodes greedily with two contexts until they choose different tokens. Returns how many tokens
 * were equal, and by how much llama.cpp's choice led at the first difference. */
static int equal_greedy_tokens(const char *spec, double *lead)
{
    const harness_options options[2] = { { .spec = NULL, .n_ctx = 512 },
                                         { .spec = spec, .n_ctx = 512 } };
    llama_token prompt[256], chosen[2];
    int n = harness_counting(prompt, 256), same;
    struct llama_context *contexts[2];

    for (int i = 0; i < 2; i++) {
        contexts[i] = harness_context(&options[i]);
        harness_decode(contexts[i], prompt, n, 0, 0, false);
    }
    for (same = 0; same < N_GREEDY; same++) {
        for (int i = 0; i < 2; i++)
            chosen[i] = harness_argmax(llama_get_logits_ith(contexts[i], -1));
        *lead = harness_lead(llama_get_logits_ith(contexts[0], -1));
        if (chosen[0] != chosen[1])
            break;
        for (int i = 0; i < 2; i++)
            harness_decode(contexts[i], &chosen[0], 1, n + same, 0, false);
    }
    llama_free(contexts[0]);
    llama_free(contexts[1]);
    return same;
}

/* 8 bits cost this model a divergence of 0.0036 nats (README, q8_0). So a logit errs by about
 * sqrt(2 x 0.0036) = 0.085. A difference of two logits errs by 0.12. Only a lead below 4 of these,
 * 0.5, may be reversed. */
CASE(int8_writes_the_stock_text)
{
    double lead;
    int same = equal_greedy_tokens("int-8", &lead);

    print_message("%d of %d tokens equal; stock's last choice leads by %.2f\n", same, N_GREEDY,
                  lead);
    assert_true(same == N_GREEDY || lead < 0.5);
}

static double divergence(const harness_options *options)
{
    float *logits = harness_prompt_logits(options, N_PROMPT);
    double kld = harness_mean_kld(stock, logits, N_PROMPT);

    free(logits);
    return kld;
}

/* Divergence goes with the square of the error. For a normal row of variance 1, a 4-bit codebook
 * errs by 0.0095 (Max 1960). The type q4_0 has 16 steps of (largest of 32) / 8 = 2.07 / 8. It errs
 * by a twelfth of their square, 0.0056, which is 1.7 times less.
 *
 * The codec int-8 has 255 steps over the range of 64 numbers, 4.7. Its error is 2.8e-5. The type
 * q8_0 has steps of 2.07 / 127. It errs by 2.2e-5, which is 1.3 times less. Chance makes it 1.6:
 * both errors are near the divergence that llama.cpp's own roundings cause, whose means over 192
 * tokens differ by a tenth. */
CASE(errors_are_those_of_the_bits)
{
    static const struct {
        const char *spec, *type;
        double factor;
    } pairs[] = { { "turboquant-4", "q4_0", 1.7 }, { "int-8", "q8_0", 1.6 } };

    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        double ours = divergence(&(harness_options){ .spec = pairs[i].spec, .n_ctx = 512 });
        double rival = divergence(&(harness_options){ .type = pairs[i].type, .n_ctx = 512 });
        print_message("mean KLD: %s %.4f, %s %.4f\n", pairs[i].spec, ours, pairs[i].type, rival);
        assert_true(ours > 1e-4); /* otherwise the cache was f16 */
        assert_true(ours <= pairs[i].factor * rival);
    }
}

RUN_CASES(start, stop)
