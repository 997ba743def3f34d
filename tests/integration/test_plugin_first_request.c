/* test_plugin_first_request.c - what a server's first request does to the answers of later ones, with the default preset and no
 * calibration. The preset learns the centre and scale of keys from rows: a monotonous first request once set them for good, and made the
 * divergence of all later answers up to fifteen times as large. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

enum { N_TEXT = 400, N_REQUEST = 200, MOST_REQUEST = 1200, N_PROMPT = 120, N_LAST = 80, N_STEPS = 40, N_ANSWERS = 2,
       N_LOGITS = N_ANSWERS * (N_LAST + N_STEPS) };

static llama_token text[N_TEXT];

/* Logits of the end of each prompt and of the answer to it, which a cache gives after a first request of n tokens. */
static float *answers(const char *spec, const llama_token *request, int n)
{
    const harness_options options = { .spec = spec, .n_ctx = 2048 };
    struct llama_context *context = harness_context(&options);
    llama_memory_t memory = llama_get_memory(context);
    size_t vocab = harness_n_vocab();
    float *logits = malloc(N_LOGITS * vocab * sizeof(float)), *next = logits;

    assert_non_null(logits);
    if (n > 0)
        harness_decode(context, request, n, 0, 0, false);
    for (int a = 0; a < N_ANSWERS; a++) {
        const llama_token *prompt = text + a * (N_TEXT / 2);
        llama_memory_seq_rm(memory, 0, -1, -1);
        harness_decode(context, prompt, N_PROMPT, 0, 0, true);
        memcpy(next, llama_get_logits_ith(context, N_PROMPT - N_LAST), N_LAST * vocab * sizeof(float));
        next += N_LAST * vocab;
        for (int i = 0; i < N_STEPS; i++, next += vocab) {
            harness_decode(context, prompt + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
            memcpy(next, llama_get_logits_ith(context, -1), vocab * sizeof(float));
        }
    }
    llama_free(context);
    return logits;
}

/* The largest so far. */
static double worst;

static double divergence(const float *stock, const llama_token *request, int n)
{
    float *ours = answers("", request, n);
    double kld = harness_mean_kld(stock, ours, N_LOGITS);

    free(ours);
    worst = kld > worst ? kld : worst;
    return kld;
}

static void fill(llama_token *request, const char *word)
{
    llama_token tokens[8];
    int n = llama_tokenize(harness_vocab(), word, (int32_t)strlen(word), tokens, 8, false, false);

    assert_true(n > 0);
    for (int i = 0; i < MOST_REQUEST; i++)
        request[i] = tokens[i % n];
}

static void no_first_request_spoils_later_ones(void **state)
{
    static const struct {
        const char *word;
        int n;
    } requests[] = { { " the", 200 }, { "\n", 80 }, { "Hello", 40 }, { "0, ", 200 }, { "ping\n", 70 }, { " the", 1200 } };
    llama_token request[MOST_REQUEST];
    float *stock;
    double none, kld;
    /* Times the divergence after a token. Quantised weights make activations 8 bits: as large a difference by chance. */
    const double most = harness_has_floats() ? 1.2 : 1.5;

    (void)state;
    harness_tokens(text, N_TEXT);
    stock = answers(NULL, NULL, 0);
    none = divergence(stock, text, 1); /* too short to be learnt from; a GPU sees all keys of a first prompt as fp16 */
    print_message("mean KLD of a first request %.4f, after a token %.4f", divergence(stock, NULL, 0), none);
    kld = divergence(stock, text + 100, N_REQUEST);
    print_message(", after ordinary text %.4f\n", kld);
    assert_true(none > 1e-4 && none < 0.1);
    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        fill(request, requests[i].word);
        kld = divergence(stock, request, requests[i].n);
        print_message("after %d tokens of \"%s\": %.4f\n", requests[i].n, requests[i].word, kld);
    }
    for (int i = 0; i < N_REQUEST; i++)
        request[i] = (i * 7919 + 13) % 40000 + 100;
    kld = divergence(stock, request, N_REQUEST);
    print_message("after %d tokens in no order: %.4f\n", N_REQUEST, kld);
    assert_true(worst <= most * none);
    free(stock);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(no_first_request_spoils_later_ones) };

    return cmocka_run_group_tests(tests, harness_start, harness_stop);
}
