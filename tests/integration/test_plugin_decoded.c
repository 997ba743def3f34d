/* test_plugin_decoded.c - matrices that GPUs learn from decoded tokens (gpu/first_matrix.c), on the
 * mock of a GPU. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "harness.h"
#include "mock_control.h"

enum { N_STEPS = 40 };

static int start(void **state)
{
    harness_need_gpu();
    return harness_start(state);
}

/* Whether keys of the last attention had a matrix. */
static bool has_matrix(void)
{
    return last_attention()->q_matrix_stride > 0;
}

/* A text of n tokens. The first `prompt` tokens come in one batch, the rest come one by one. After
 * `circle` tokens the text repeats, unless `circle` is 0. With `saves`, the state is read now and
 * then. */
typedef struct text {
    const char *spec, *type, *graphs;
    int prompt, n, circle;
    bool saves;
} text;

enum { N_TEXT = 400 };

/* Returns the logits of the last N_STEPS tokens, and the token at which keys first had a matrix, or
 * -1. */
static int decode_text(text of, float *logits)
{
    static llama_token all[N_TEXT];
    const size_t n = harness_n_vocab();
    struct llama_context *context;
    size_t size;
    int first = -1;

    harness_tokens(all, N_TEXT);
    for (int i = of.circle; of.circle > 0 && i < N_TEXT; i++)
        all[i] = all[i - of.circle];
    setenv("KVANT_GRAPH", of.graphs, 1);
    context = harness_context(&(harness_options){ .spec = of.spec, .type = of.type, .n_ctx = 512 });
    unsetenv("KVANT_GRAPH");
    harness_decode(context, all, of.prompt, 0, 0, false);
    for (int i = of.prompt; i < of.n; i++) {
        harness_decode(context, all + i, 1, i, 0, false);
        first = of.spec != NULL && first < 0 && has_matrix() ? i : first;
        if (of.saves && i % 50 == 0)
            free(harness_save_state(context, &size));
        if (i >= of.n - N_STEPS)
            memcpy(logits + (size_t)(i - of.n + N_STEPS) * n, llama_get_logits_ith(context, -1),
                   n * sizeof(*logits));
    }
    llama_free(context);
    return first;
}

/* The preset's cache of 512 tokens has 4 pages of 64 exact rows. Two are for the first and the
 * tokens, one because the newest begin within a block, and one for a step. The token that
 * takes the last page has the matrix. The preset has more bits than q4_0. */
CASE(matrices_come_from_decoded_tokens)
{
    enum { FULL = 192 };
    const size_t bytes = N_STEPS * harness_n_vocab() * sizeof(float);
    float *stock, *parts, *graphs;
    double with, rival;

    if (!harness_has_mock() || getenv("KVANT_CALIBRATION") != NULL)
        skip();
    harness_need_floats();
    stock = harness_new_logits(N_STEPS), parts = harness_new_logits(N_STEPS),
    graphs = harness_new_logits(N_STEPS);
    setenv("KVANT_PRESET", "small", 1);
    decode_text((text){ NULL, NULL, "1", 8, 300, 0, false }, stock);
    decode_text((text){ NULL, "q4_0", "1", 8, 300, 0, false }, graphs);
    rival = harness_mean_kld(stock, graphs, N_STEPS);
    assert_int_equal(decode_text((text){ "", NULL, "0", 8, 300, 0, false }, parts), FULL);
    assert_int_equal(decode_text((text){ "", NULL, "1", 8, 300, 0, true }, graphs), FULL);
    assert_memory_equal(parts, graphs, bytes);
    with = harness_mean_kld(stock, graphs, N_STEPS);
    print_message("mean KLD, a prompt of 8 tokens: small %.5f, q4_0 %.5f\n", with, rival);
    assert_true(with > 1e-7 && with <= rival);
    assert_int_equal(decode_text((text){ "", NULL, "1", 100, 270, 0, false }, graphs), FULL);
    /* Tokens that are too similar make no matrix. The second GPU lacks the first layer, by which
     * the plug-in compares tokens. */
    assert_int_equal(decode_text((text){ "", NULL, "1", 8, 300, 12, false }, graphs),
                     harness_gpus() == 1 ? -1 : FULL);
    unsetenv("KVANT_PRESET");
    free(stock);
    free(parts);
    free(graphs);
}

/* Decodes tokens until learning ends, then some in batches, after which keys get a further matrix.
 * It is learned from position 2048 on and is for rows from 3072 on. Two sequences alternate. Tokens
 * are taken back now and then, so that rows are written again from which the cache may have
 * learned. Returns the state, which the caller frees. */
static uint8_t *long_decoding(const char *spec, const char *graphs, float *logits, size_t *size)
{
    enum { N_ALONE = 900, FAR = 3240, FIRST = FAR - N_ALONE, N_OTHERS = 150, N_BATCH = 84 };
    llama_token tokens[N_OTHERS + N_BATCH];
    struct llama_context *context;
    llama_pos pos[2] = { FIRST, FIRST };
    uint8_t *saved;

    harness_tokens(tokens, N_OTHERS + N_BATCH);
    setenv("KVANT_GRAPH", graphs, 1);
    context = harness_context(
        &(harness_options){ .spec = spec, .n_ctx = 4096, .n_seq = 2, .unified = true });
    unsetenv("KVANT_GRAPH");
    harness_decode(context, tokens, 40, pos[0], 0, false);
    pos[0] += 40;
    for (int i = 0; pos[0] < FAR; i++) {
        const int s = i / 100 % 2 == 1;
        if (i % 70 == 69)
            assert_true(llama_memory_seq_rm(llama_get_memory(context), s, pos[s] -= 3, -1));
        harness_decode(context, tokens + (i * 7 + i / 30) % N_OTHERS, 1, pos[s]++, s, false);
    }
    for (int i = 0; i < 8; i++, pos[0] += N_BATCH)
        harness_decode(context, tokens + i, N_BATCH, pos[0], 0, false);
    memcpy(logits, llama_get_logits_ith(context, -1), harness_n_vocab() * sizeof(*logits));
    if (harness_has_mock() && spec != NULL)
        assert_int_equal(last_attention()->n_matrices, 2);
    saved = harness_save_state(context, size);
    llama_free(context);
    return saved;
}

/* Decodes some single tokens between two prompts. Returns the state, which the caller frees. */
static uint8_t *decoding_between_prompts(const char *spec, size_t *size)
{
    enum { N_FIRST = 70, N_ALONE = 130, N_SECOND = 300, N_BEHIND = 40 };
    llama_token tokens[N_FIRST + N_ALONE + N_SECOND + N_BEHIND];
    struct llama_context *context =
        harness_context(&(harness_options){ .spec = spec, .n_ctx = 640 });
    uint8_t *saved;
    int at = N_FIRST;

    harness_tokens(tokens, N_FIRST + N_ALONE + N_SECOND + N_BEHIND);
    harness_decode(context, tokens, N_FIRST, 0, 0, false);
    for (; at < N_FIRST + N_ALONE; at++)
        harness_decode(context, tokens + at, 1, at, 0, false);
    harness_decode(context, tokens + at, N_SECOND, at, 0, false);
    for (at += N_SECOND; at < N_FIRST + N_ALONE + N_SECOND + N_BEHIND; at++)
        harness_decode(context, tokens + at, 1, at, 0, false);
    saved = harness_save_state(context, size);
    llama_free(context);
    return saved;
}

CASE(rows_that_were_not_learnt_from_stay_themselves)
{
    size_t size, stock_size;
    uint8_t *stock = decoding_between_prompts(NULL, &stock_size),
            *ours = decoding_between_prompts("int-8:transform=first", &size);

    assert_int_equal(size, stock_size);
    print_message("relative difference %.4f\n", harness_state_difference(stock, ours, size));
    assert_true(harness_state_difference(stock, ours, size) <
                0.1); /* activations of 8 bits cause 0.02, a block of zeros causes 0.25 */
    free(stock);
    free(ours);
}

/* Thousands of tokens need a tiny model, which replaces the present one, so this test comes last.
 * The codec int-8 errs by less than 1 %. */
CASE(learning_from_decoded_tokens_ends)
{
    static const char spec[] = "int-8:transform=first,sink=4";
    size_t size, stock_size;
    float *stock, *parts, *graphs;
    uint8_t *rows, *ours;

    if (getenv("KVANT_CALIBRATION") != NULL)
        skip(); /* the calibration belongs to another model */
    harness_load_tiny("llama");
    stock = harness_new_logits(N_STEPS), parts = harness_new_logits(N_STEPS),
    graphs = harness_new_logits(N_STEPS);
    rows = long_decoding(NULL, "1", stock, &stock_size);
    free(long_decoding(spec, "0", parts, &size));
    ours = long_decoding(spec, "1", graphs, &size);
    assert_int_equal(size, stock_size);
    print_message("relative difference %.4f, KLD %.6f\n",
                  harness_state_difference(rows, ours, size), harness_mean_kld(stock, graphs, 1));
    assert_memory_equal(parts, graphs, harness_n_vocab() * sizeof(*graphs));
    assert_true(harness_state_difference(rows, ours, size) < 0.02);
    free(rows);
    free(ours);
    free(stock);
    free(parts);
    free(graphs);
}

RUN_CASES(start, harness_stop)
