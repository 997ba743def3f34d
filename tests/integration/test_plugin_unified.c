/* test_plugin_unified.c - several sequences in one unified cache. In a compressed cache each
 * computes the same bits as alone, whatever cells its neighbours have between its own. On
 * llama.cpp's own cache, whose rows stay where they are, this holds for whole pages of 64 cells. */
#include "harness.h"

enum { PAGE = 64, N_PROMPT = 70, N_STEPS = 4, N_TOKENS = 400 };

static llama_token tokens[N_TOKENS];

static size_t logits_bytes(void)
{
    return (size_t)llama_vocab_n_tokens(harness_vocab()) * sizeof(float);
}

/* Logits of the prompt's last token and of each later token of sequence 0, which is then
 * removed. The neighbours, sequences 1 and 2, continue from position n_beside[i] by one token in
 * each batch. */
static float *answer(struct llama_context *context, const int *n_beside, int n_neighbours)
{
    struct llama_batch batch = llama_batch_init(3, 0, 1);
    size_t bytes = logits_bytes();
    char *logits = malloc((N_STEPS + 1) * bytes);

    assert_non_null(logits);
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    memcpy(logits, llama_get_logits_ith(context, -1), bytes);
    for (int i = 0; i < N_STEPS; i++) {
        int32_t own;
        batch.n_tokens = 0;
        for (int s = 1; s <= n_neighbours; s += 2)
            harness_add(&batch, tokens[s + i], n_beside[s - 1] + i, s, false);
        own = harness_add(&batch, tokens[N_PROMPT + i], N_PROMPT + i, 0, true);
        for (int s = 2; s <= n_neighbours; s += 2)
            harness_add(&batch, tokens[s + i], n_beside[s - 1] + i, s, false);
        assert_int_equal(llama_decode(context, batch), 0);
        memcpy(logits + (size_t)(i + 1) * bytes, llama_get_logits_ith(context, own), bytes);
    }
    llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
    llama_batch_free(batch);
    return (float *)(void *)logits;
}

/* Compares the answer alone with the same answer again, and with answers next to neighbours with
 * n_beside[i][0 and 1] tokens (0: none). */
static void check(const harness_options *usual, const int n_beside[][2], int n_cases)
{
    harness_options options = *usual;
    struct llama_context *context;
    float *alone, *beside;

    options.n_ctx = 512;
    options.n_seq = 3;
    options.unified = true;
    context = harness_context(&options);
    harness_decode(context, tokens + 200, PAGE, 0, 2,
                   false); /* this test is not about centres and scales of first rows */
    llama_memory_seq_rm(llama_get_memory(context), 2, -1, -1);
    alone = answer(context, NULL, 0);
    for (int i = 0; i < n_cases; i++) {
        int n = 0;
        for (int s = 1; s <= 2 && n_beside[i][s - 1] > 0; s++, n++)
            harness_decode(context, tokens + 100 * s, n_beside[i][s - 1], 0, s, false);
        beside = answer(context, n_beside[i], n_beside[i][0] % PAGE ? n : 0);
        assert_memory_equal(alone, beside, (N_STEPS + 1) * logits_bytes());
        free(beside);
        for (int s = 1; s <= 2; s++)
            llama_memory_seq_rm(llama_get_memory(context), s, -1, -1);
    }
    free(alone);
    llama_free(context);
}

CASE(compressed_cache)
{
    static const int beside[][2] = { { 0, 0 }, { 37, 11 }, { 64, 0 } };

    check(&(harness_options){ .spec = "turboquant-4" }, beside, 3);
    check(&(harness_options){ .spec = "trellis-4:center=first,norm=first" }, beside, 3);
}

CASE(accelerated_cache)
{
    static const int beside[][2] = { { 64, 0 }, { 128, 0 } };

    harness_add_accel();
    check(&(harness_options){ .type = "q8_0", .accel = true }, beside, 2);
}

static int start(void **state)
{
    int status = harness_start(state);

    if (status == 0)
        harness_tokens(tokens, N_TOKENS);
    return status;
}

RUN_CASES(start, harness_stop)
