/* test_plugin_unified.c - several sequences in one unified cache: a sequence that has pages of 64 cells of its own computes the same bits
 * wherever these pages lie. (One that shares a page with others does not: sums over a page are rounded by what lies beside each other.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

enum { PAGE = 64, N_PROMPT = 70, N_STEPS = 2, N_TOKENS = 400 };

static llama_token tokens[N_TOKENS];

static size_t logits_bytes(void)
{
    return (size_t)llama_vocab_n_tokens(harness_vocab()) * sizeof(float);
}

/* Logits of the prompt's last token and of each token after it, of sequence 0, which is then removed. */
static float *answer(struct llama_context *context)
{
    size_t bytes = logits_bytes();
    char *logits = malloc((N_STEPS + 1) * bytes);

    assert_non_null(logits);
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    for (int i = 0;; i++) {
        memcpy(logits + (size_t)i * bytes, llama_get_logits_ith(context, -1), bytes);
        if (i == N_STEPS)
            break;
        harness_decode(context, tokens + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
    }
    llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
    return (float *)(void *)logits;
}

static void check(const harness_options *usual)
{
    harness_options options = *usual;
    struct llama_context *context;
    float *alone, *beside;

    options.n_ctx = 512;
    options.n_seq = 3;
    options.unified = true;
    context = harness_context(&options);
    harness_decode(context, tokens + 200, PAGE, 0, 2, false); /* centre and factors of the first rows are no subject here */
    llama_memory_seq_rm(llama_get_memory(context), 2, -1, -1);
    alone = answer(context);
    for (int pages = 1; pages <= 2; pages++) {
        harness_decode(context, tokens + 150, pages * PAGE, 0, 1, false);
        beside = answer(context);
        assert_memory_equal(alone, beside, (N_STEPS + 1) * logits_bytes());
        free(beside);
        llama_memory_seq_rm(llama_get_memory(context), 1, -1, -1);
    }
    free(alone);
    llama_free(context);
}

static void compressed_cache(void **state)
{
    (void)state;
    check(&(harness_options){ .spec = "turboquant-4" });
    check(&(harness_options){ .spec = "trellis-4:center=first,norm=first,sink=0" });
}

static void accelerated_cache(void **state)
{
    (void)state;
    harness_add_accel();
    check(&(harness_options){ .type = "q8_0", .accel = true });
}

static int start(void **state)
{
    int status = harness_start(state);

    if (status == 0)
        harness_tokens(tokens, N_TOKENS);
    return status;
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(compressed_cache), cmocka_unit_test(accelerated_cache) };

    return cmocka_run_group_tests(tests, start, harness_stop);
}
