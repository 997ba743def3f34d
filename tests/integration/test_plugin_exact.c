/* test_plugin_exact.c - the tokens that a cache on a GPU keeps as fp16 (gpu/step.c), on the mock of
 * ggml-cuda. The first 64 and the newest 128 tokens of each sequence stay exact, and a step's
 * tokens stay exact until the next step. The plan decides which tokens these are
 * (src/store/plan.h), and has its own tests. This test checks that the plan learns of everything
 * that llama.cpp does. */
#include "harness.h"

#define FIRST 64
#define NEWEST 128
#define STEP 512
#define N_TEXT 2700

static llama_token tokens[N_TEXT];

static int start(void **state)
{
    int status;

    harness_need_gpu();
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_TEXT);
    return status;
}

/* States */

static size_t row_numbers(void)
{
    return harness_row_bytes() / sizeof(uint16_t);
}

/* Values of the first layer, n tokens. They depend on no other token. A state has the keys of all
 * layers, then the values of all layers, then the number of tokens (0) of each later stream. */
static const uint8_t *first_values(const uint8_t *saved, size_t size, size_t n, int n_after)
{
    const size_t after = (size_t)n_after * sizeof(uint32_t);

    assert_true(size > after);
    return saved + harness_rows_at(size - after, n, true, 0);
}

static float number_at(const uint8_t *rows, size_t i)
{
    uint16_t half;

    memcpy(&half, rows + i * sizeof(half), sizeof(half));
    return ggml_fp16_to_fp32(half);
}

/* Root of the squared error over the squared norm of a row. */
static double error_of_row(const uint8_t *ours, const uint8_t *stock, size_t row)
{
    const size_t width = row_numbers();
    double error = 0, norm = 0;

    for (size_t i = row * width; i < (row + 1) * width; i++) {
        const double x = number_at(ours, i), y = number_at(stock, i);
        error += (x - y) * (x - y);
        norm += y * y;
    }
    return error / norm;
}

/* Whether a row is exact. Rounding to fp16 errs by at most 2^-11 of each number, so by at most
 * 2^-11 of the row's norm. It happens three times: in llama.cpp's cache, to the rotated row in
 * kvant's cache, and in the state. A 4-bit code errs by about .07 of the norm. */
static bool is_exact(const uint8_t *ours, const uint8_t *stock, size_t row)
{
    const double most = 3.0 / 2048;

    return error_of_row(ours, stock, row) <= most * most;
}

/* Sequences */

static const harness_options exact_options = { .spec = "", .n_ctx = 4096 };
static const harness_options stock_options = { .n_ctx = 4096 };

static void prompt(struct llama_context *context, int from, int to, llama_seq_id seq)
{
    for (int i = from, n; i < to; i += n) {
        n = to - i < STEP ? to - i : STEP;
        harness_decode(context, tokens + i, n, i, seq, false);
    }
}

static void decode(struct llama_context *context, int from, int to, llama_seq_id seq)
{
    for (int i = from; i < to; i++)
        harness_decode(context, tokens + i, 1, i, seq, false);
}

/* Checks that the first and newest of a sequence's n tokens are exact, and that at most `most`
 * tokens are. Returns how many are. */
static size_t check(struct llama_context *ours, struct llama_context *stock, llama_seq_id seq,
                    size_t n, size_t newest, size_t most)
{
    size_t size, other, n_exact = 0;
    uint8_t *a = harness_save_sequence(ours, seq, &size);
    uint8_t *b = harness_save_sequence(stock, seq, &other);
    const int n_after = (int)llama_n_seq_max(stock) - 1 - seq;
    const uint8_t *x = first_values(a, size, n, n_after), *y = first_values(b, other, n, n_after);

    assert_int_equal(size, other);
    for (size_t i = 0; i < n; i++) {
        const bool exact = is_exact(x, y, i);
        n_exact += exact;
        if (!exact && (i < FIRST || i + newest >= n))
            fail_msg("row %zu of %zu of sequence %d errs by %g", i, n, seq, error_of_row(x, y, i));
    }
    print_message("sequence %d: %zu of %zu rows are exact\n", seq, n_exact, n);
    assert_true(n_exact <= most);
    free(a);
    free(b);
    return n_exact;
}

/* Pages of 64 rows: the first, three that the newest rows may be in, and eight for a step. */
#define PAGES(n_sequences) (((n_sequences) * 4 + STEP / 64) * 64)

CASE(first_and_newest_tokens_are_exact)
{
    struct llama_context *ours = harness_context(&exact_options);
    struct llama_context *stock = harness_context(&stock_options), *both[] = { ours, stock };

    for (int i = 0; i < 2; i++)
        prompt(both[i], 0, 2560, 0);
    /* the last step is over, and no step came after it */
    check(ours, stock, 0, 2560, STEP, PAGES(1));
    for (int i = 0; i < 2; i++)
        decode(both[i], 2560, 2630, 0);
    check(ours, stock, 0, 2630, NEWEST, PAGES(1));
    for (int i = 0; i < 2; i++) { /* an answer is made again */
        assert_true(llama_memory_seq_rm(llama_get_memory(both[i]), 0, 2590, -1));
        decode(both[i], 2590, 2605, 0);
        prompt(both[i], 2605, 2640, 0);
        decode(both[i], 2640, 2642, 0);
    }
    check(ours, stock, 0, 2642, NEWEST, PAGES(1));
    llama_free(ours);
    llama_free(stock);
}

/* Sequence 0 is idle while sequence 1 gets 1000 tokens. Both are in one stream, so only
 * masks tell whose tokens are newest. */
CASE(first_and_newest_tokens_of_an_idle_sequence_are_exact)
{
    harness_options options = exact_options;
    struct llama_context *ours, *stock = harness_context(&stock_options);

    options.n_seq = 2;
    options.unified = true;
    ours = harness_context(&options);
    prompt(ours, 0, 2100, 0);
    prompt(stock, 0, 2100, 0);
    for (int i = 0; i < 1000; i += 20)
        harness_decode(ours, tokens + i, 20, i, 1, false);
    check(ours, stock, 0, 2100, NEWEST, PAGES(2));
    llama_free(ours);
    llama_free(stock);
}

/* 20 sequences have 64 first tokens each, more than there are pages, and are removed. Their cells
 * are then beyond n_kv, so they keep no page from a new sequence. */
CASE(first_tokens_that_were_removed_give_way)
{
    enum { N = 20 };
    harness_options options = exact_options;
    struct llama_context *ours, *stock = harness_context(&stock_options);

    options.n_seq = N;
    options.unified = true;
    ours = harness_context(&options);
    for (int s = 0; s < N; s++)
        harness_decode(ours, tokens, 64, 0, s, false);
    assert_true(llama_memory_seq_rm(llama_get_memory(ours), -1, -1, -1));
    for (int i = 0; i < 248; i += 8) {
        harness_decode(ours, tokens + i, 8, i, 0, false);
        harness_decode(stock, tokens + i, 8, i, 0, false);
    }
    check(ours, stock, 0, 248, NEWEST, PAGES(1));
    llama_free(ours);
    llama_free(stock);
}

/* Each sequence keeps its exact part, whichever sequence is at work. */
CASE(streams_have_exact_tokens_of_their_own)
{
    enum { N = 4 };
    harness_options options[] = { exact_options, stock_options };
    struct llama_context *both[2];
    size_t n_exact = 0;

    for (int i = 0; i < 2; i++) {
        options[i].n_seq = N;
        options[i].n_ctx = N * 3072;
        both[i] = harness_context(&options[i]);
        for (int s = 0; s < N; s++)
            prompt(both[i], 0, 600, s);
        decode(both[i], 600, 900, 2);
    }
    for (int s = 0; s < N; s++)
        n_exact += check(both[0], both[1], s, s == 2 ? 900 : 600, NEWEST, PAGES(N));
    assert_true(n_exact <= PAGES(N));
    llama_free(both[0]);
    llama_free(both[1]);
}

/* A restored sequence has the same exact tokens as the saved one, in a context with other exact
 * tokens. */
CASE(restored_tokens_are_exact)
{
    harness_options options = exact_options;
    struct llama_context *ours, *stock = harness_context(&stock_options), *other;
    size_t size;
    uint8_t *saved;

    options.n_seq = 2;
    options.unified = true;
    ours = harness_context(&exact_options);
    other = harness_context(&options);
    prompt(ours, 0, 1100, 0);
    prompt(stock, 0, 1100, 0);
    saved = harness_save_sequence(ours, 0, &size);
    decode(other, 0, 70, 1);
    assert_int_equal(llama_state_seq_set_data(other, saved, size, 0), size);
    check(other, stock, 0, 1100, NEWEST, PAGES(1));
    decode(other, 1100, 1170, 0);
    decode(stock, 1100, 1170, 0);
    check(other, stock, 0, 1170, NEWEST, PAGES(1));
    free(saved);
    llama_free(ours);
    llama_free(other);
    llama_free(stock);
}

/* A copy of a stream is as exact as the stream. */
CASE(copies_are_exact)
{
    harness_options options[] = { exact_options, stock_options };
    struct llama_context *both[2];

    for (int i = 0; i < 2; i++) {
        options[i].n_seq = 2;
        options[i].n_ctx = 2 * 3072;
        both[i] = harness_context(&options[i]);
        prompt(both[i], 0, 900, 0);
        llama_memory_seq_cp(llama_get_memory(both[i]), 0, 1, -1, -1);
        decode(both[i], 900, 910, 1);
    }
    check(both[0], both[1], 0, 900, NEWEST, PAGES(2));
    check(both[0], both[1], 1, 910, NEWEST, PAGES(2));
    llama_free(both[0]);
    llama_free(both[1]);
}

/* The first rows of a longer step are encoded at once. Its newest 512 rows are exact. */
CASE(long_steps_keep_their_newest_tokens)
{
    harness_options options[] = { exact_options, stock_options };
    struct llama_context *both[2];

    for (int i = 0; i < 2; i++) {
        options[i].n_ubatch = 2048;
        both[i] = harness_context(&options[i]);
        harness_decode(both[i], tokens, 64, 0, 0, false);
        harness_decode(both[i], tokens + 64, 2048, 64, 0, false);
    }
    check(both[0], both[1], 0, 2112, STEP, PAGES(1));
    llama_free(both[0]);
    llama_free(both[1]);
}

RUN_CASES(start, harness_stop)
