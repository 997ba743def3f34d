#define _POSIX_C_SOURCE 200809L /* setenv */
/* test_plugin_in_place.c - caches that are f16 in place while they fit (gpu/in_place.h,
 * cpu_in_place.h). Answers are equal to answers with llama.cpp's own cache, bit by bit, and rows
 * that no longer fit are compressed. */
#define N_TEXT 900
#include "in_place_fixture.h"

#define STEP 100 /* tokens in a batch */

static void assert_finite(const float *logits, size_t n)
{
    for (size_t i = 0; i < n; i++)
        assert_true(isfinite(logits[i]));
}

/* Answers equal llama.cpp's own in every bit. Without f16 in place they would differ. */
static void assert_exact(const story *of, const char *spec)
{
    float *stock = hear_story(of, NULL, "0"), *ours = hear_story(of, spec, "auto");
    float *compressed = hear_story(of, spec, "0");

    assert_same(stock, ours, of->n);
    assert_false(is_same(stock, compressed, of->n));
    free(stock);
    free(ours);
    free(compressed);
}

static void a_short_text(struct llama_context *context, float *logits)
{
    feed(context, 0, 200, STEP, 0, 0, logits);
    for (int i = 200; i < 220; i++)
        feed(context, i, 1, STEP, i, 0, logits + (size_t)i * harness_n_vocab());
}

CASE(answers_are_f16s_while_rows_fit)
{
    const story of = { a_short_text, 220, 1 };

    assert_exact(&of, "int-8");
    assert_exact(&of, "turboquant-4");
    assert_exact(&of, "");
}

static void a_long_text(struct llama_context *context, float *logits)
{
    feed(context, 0, N_TEXT, STEP, 0, 0, logits);
}

/* int-8 has room for 512 of 1024 cells. */
CASE(rows_that_no_longer_fit_are_compressed)
{
    const story of = { a_long_text, N_TEXT, 1 };
    float *stock = hear_story(&of, NULL, "0"), *ours = hear_story(&of, "int-8", "auto");
    float *compressed = hear_story(&of, "int-8", "0");
    const size_t behind = 600 * harness_n_vocab();
    const double a = harness_mean_kld(stock + behind, ours + behind, N_TEXT - 600),
                 b = harness_mean_kld(stock + behind, compressed + behind, N_TEXT - 600);

    assert_same(stock, ours, 500);
    print_message("int-8 behind what fits: KLD %.6f, compressed from the start %.6f\n", a, b);
    assert_true(a > 0 && a <= 1.6 * b);
    free(stock);
    free(ours);
    free(compressed);
}

static void a_second_text(struct llama_context *context, float *logits)
{
    feed(context, 0, 700, STEP, 0, 0, NULL);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    feed(context, 300, 100, STEP, 0, 0, logits);
    feed(context, 400, 100, STEP, 100, 0, logits + 100 * harness_n_vocab());
}

/* Its third batch reads cells that the first did not read. Most of them are hidden. */
static void a_longer_second_text(struct llama_context *context, float *logits)
{
    a_second_text(context, logits);
    feed(context, 500, 100, STEP, 200, 0, logits + 200 * harness_n_vocab());
}

/* llama-server empties its slots only in this way. int-8 has room for 512 cells. */
CASE(a_new_conversation_is_exact_again)
{
    const story of = { a_second_text, 200, 1 }, longer = { a_longer_second_text, 300, 1 };

    setenv("KVANT_TEST_HIDDEN", "1", 1);
    assert_exact(&longer, "int-8");
    assert_exact(&of, "turboquant-4");
    unsetenv("KVANT_TEST_HIDDEN");
}

/* Programs such as llama-server lend a context the threads of a pool, on which kvant moves rows. */
static struct ggml_threadpool *pool;

static void lend_pool(struct llama_context *context)
{
    llama_set_n_threads(context, 2, 2);
    llama_attach_threadpool(context, pool, pool);
}

static void a_long_text_with_a_pool(struct llama_context *context, float *logits)
{
    lend_pool(context);
    a_long_text(context, logits);
}

static void a_second_text_with_a_pool(struct llama_context *context, float *logits)
{
    lend_pool(context);
    a_second_text(context, logits);
}

static void assert_pool_changes_nothing(const story *alone, const story *lent)
{
    float *a = hear_story(alone, "int-8", "auto"), *b = hear_story(lent, "int-8", "auto");

    assert_same(a, b, alone->n);
    free(a);
    free(b);
}

/* Rows leave, and rows come back. */
CASE(threads_of_a_pool_change_nothing)
{
    pool = harness_new_pool(2);
    assert_pool_changes_nothing(&(story){ a_long_text, N_TEXT, 1 },
                                &(story){ a_long_text_with_a_pool, N_TEXT, 1 });
    assert_pool_changes_nothing(&(story){ a_second_text, 200, 1 },
                                &(story){ a_second_text_with_a_pool, 200, 1 });
    harness_free_pool(pool);
}

/* Sequence 1 has the cells before and after the cells of sequence 0, and begins again when its rows
 * were compressed. */
static void a_neighbour(struct llama_context *context, float *logits)
{
    feed(context, 0, 150, STEP, 0, 1, NULL);
    feed(context, 300, 60, STEP, 0, 0, NULL);
    feed(context, 150, 450, STEP, 150, 1, NULL);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, -1, -1));
    feed(context, 500, 100, STEP, 0, 1, NULL);
    feed(context, 360, 50, STEP, 60, 0, logits);
}

/* Allowed factor over the mean KLD of a cache with this codec from the start. Rows of other
 * sequences are compressed at most once more. */
CASE(rows_of_others_are_not_lost)
{
    const story of = { a_neighbour, 50, 2 };
    float *stock = hear_story(&of, NULL, "0");

    for (int i = 0; i < 2; i++) {
        const char *spec = i == 0 ? "int-8" : "turboquant-4";
        float *ours = hear_story(&of, spec, "auto"), *compressed = hear_story(&of, spec, "0");
        const double a = harness_mean_kld(stock, ours, of.n);
        const double b = harness_mean_kld(stock, compressed, of.n);
        print_message("%s beside a new conversation: KLD %.6f, compressed from the start %.6f\n",
                      spec, a, b);
        assert_true(a <= 2 * b);
        free(ours);
        free(compressed);
    }
    free(stock);
}

static void a_shift(struct llama_context *context, float *logits)
{
    llama_memory_t memory = llama_get_memory(context);

    feed(context, 0, 200, STEP, 0, 0, NULL);
    assert_true(llama_memory_seq_rm(memory, 0, 20, 80));
    llama_memory_seq_add(memory, 0, 80, -1, -60);
    feed(context, 200, 40, STEP, 140, 0, logits);
}

CASE(shifts_are_f16s)
{
    const story of = { a_shift, 40, 1 };

    assert_exact(&of, "int-8");
    assert_exact(&of, "turboquant-4");
}

static uint8_t *saved;
static size_t saved_size;

static void a_saved_text(struct llama_context *context, float *logits)
{
    feed(context, 0, 200, STEP, 0, 0, NULL);
    free(saved);
    saved = harness_save_state(context, &saved_size);
    feed(context, 200, 40, STEP, 200, 0, logits);
}

static void a_restored_text(struct llama_context *context, float *logits)
{
    assert_int_equal(llama_state_seq_set_data(context, saved, saved_size, 0), saved_size);
    feed(context, 200, 40, STEP, 200, 0, logits);
}

CASE(states_are_f16s)
{
    const story save = { a_saved_text, 40, 1 }, restore = { a_restored_text, 40, 1 };
    float *stock, *logits;

    assert_exact(&save, "int-8");
    logits = hear_story(&save, "int-8", "auto");
    stock = hear_story(&restore, NULL, "0");
    assert_same(stock, logits, save.n);
    assert_exact(&restore, "int-8");
    free(stock);
    free(logits);
    free(saved);
    saved = NULL;
}

/* Restored rows that do not fit, and a state of compressed rows. */
CASE(longer_states_are_compressed)
{
    struct llama_context *context = new_context("int-8", "auto", 1);
    float *stock = harness_new_logits(40), *ours = harness_new_logits(40);
    double kld;

    feed(context, 0, 700, STEP, 0, 0, NULL);
    saved = harness_save_state(context, &saved_size);
    llama_free(context);
    context = new_context("int-8", "auto", 1);
    assert_int_equal(llama_state_seq_set_data(context, saved, saved_size, 0), saved_size);
    feed(context, 700, 40, STEP, 700, 0, ours);
    llama_free(context);
    context = new_context(NULL, "0", 1);
    feed(context, 0, 700, STEP, 0, 0, NULL);
    feed(context, 700, 40, STEP, 700, 0, stock);
    kld = harness_mean_kld(stock, ours, 40);
    print_message("700 tokens restored: KLD %.6f\n", kld);
    assert_true(kld > 0 && kld < 0.01);
    llama_free(context);
    free(saved);
    saved = NULL;
    free(stock);
    free(ours);
}

/* Decodes rows of a sequence that are all NaN. */
static void feed_nans(struct llama_context *context, int n, llama_seq_id seq)
{
    const int width = llama_model_n_embd(harness_model());
    struct llama_batch batch = llama_batch_init(n, width, 1);

    for (int i = 0; i < n * width; i++)
        batch.embd[i] = NAN;
    for (int i = 0; i < n; i++)
        harness_add(&batch, 0, i, seq, false);
    assert_int_equal(harness_decode_batch(context, batch), 0);
}

/* No centre can be learned from the first rows, because some of them belong to a sequence of
 * NaNs. */
CASE(rows_are_kept_where_nothing_can_be_learnt)
{
    struct llama_context *context;

    setenv("KVANT_PRESET", "quality", 1);
    context = new_context("", "auto", 2);
    unsetenv("KVANT_PRESET");
    feed(context, 0, 300, STEP, 0, 0, NULL);
    feed_nans(context, 64, 1);
    for (int pos = 300; pos < 900; pos += 500) {
        const int n = pos == 300 ? 500 : 100;
        harness_decode(context, tokens + pos, n, pos, 0, true);
        assert_finite(llama_get_logits(context), (size_t)n * harness_n_vocab());
    }
    llama_free(context);
}

static int try_to_decode(struct llama_context *context, int first, int n)
{
    struct llama_batch batch = llama_batch_get_one(tokens + first, n);

    return llama_decode(context, batch);
}

/* Without memory, rows stay in place, and a second try compresses them. */
CASE(rows_are_kept_without_memory)
{
    struct llama_context *context;
    float *stock, *ours;
    double kld;

    if (!harness_has_mock())
        skip();
    stock = harness_new_logits(100);
    ours = harness_new_logits(100);
    context = new_context(NULL, "0", 1);
    feed(context, 0, 800, STEP, 0, 0, NULL);
    feed(context, 800, 100, STEP, 800, 0, stock);
    llama_free(context);
    context = new_context("int-8", "auto", 1);
    feed(context, 0, 500, STEP, 0, 0, NULL);
    setenv("KVANT_TEST_NO_MEMORY", "1", 1);
    assert_int_not_equal(try_to_decode(context, 500, 300), 0);
    unsetenv("KVANT_TEST_NO_MEMORY");
    assert_int_equal(try_to_decode(context, 500, 300), 0);
    feed(context, 800, 100, STEP, 800, 0, ours);
    kld = harness_mean_kld(stock, ours, 100);
    print_message("int-8 after a try without memory: KLD %.6f\n", kld);
    assert_true(kld > 0 && kld < 0.01);
    llama_free(context);
    free(stock);
    free(ours);
}

/* KVANT_EXACT: 256 tokens are in place, and no more. */
CASE(as_many_as_the_user_allows)
{
    float *stock = harness_new_logits(400), *ours = harness_new_logits(400);
    struct llama_context *contexts[2] = { new_context(NULL, "0", 1),
                                          new_context("int-8", "300", 1) };

    for (int i = 0; i < 2; i++) {
        feed(contexts[i], 0, 400, STEP, 0, 0, i == 0 ? stock : ours);
        llama_free(contexts[i]);
    }
    assert_same(stock, ours, 200);
    assert_false(is_same(stock + 300 * harness_n_vocab(), ours + 300 * harness_n_vocab(), 100));
    free(stock);
    free(ours);
}

#define BATCH 512
#define N_BATCHES 5
#define N_ROUNDS 2

/* Logits of the first and the last batch of each round. The memory is cleared between rounds, as
 * llama-perplexity does. In a cache that is compressed from the start, the keys of 2048 tokens may
 * be pending as fp16 until their matrix exists. So only the last batch sees compressed keys. */
static float *read_in_rounds(const char *preset, const char *exact, int n_rounds)
{
    const harness_options options = { .spec = preset != NULL ? "" : NULL,
                                      .n_ctx = BATCH * N_BATCHES };
    const size_t batch = BATCH * harness_n_vocab();
    float *logits = harness_new_logits(2 * n_rounds * BATCH);
    struct llama_context *context;
    llama_token text[BATCH * N_BATCHES];

    harness_tokens(text, BATCH * N_BATCHES);
    setenv("KVANT_EXACT", exact, 1);
    if (preset != NULL)
        setenv("KVANT_PRESET", preset, 1);
    context = harness_context(&options);
    unsetenv("KVANT_PRESET");
    for (int i = 0; i < n_rounds * N_BATCHES; i++) {
        const int number = i % N_BATCHES, pos = number * BATCH;
        if (number == 0)
            llama_memory_clear(llama_get_memory(context), true);
        harness_decode(context, text + pos, BATCH, pos, 0, true);
        if (number == 0 || number + 1 == N_BATCHES)
            memcpy(logits + (size_t)(i / N_BATCHES * 2 + (number > 0)) * batch,
                   llama_get_logits(context), batch * sizeof(*logits));
    }
    llama_free(context);
    return logits;
}

/* Both caches store rows by the same codec, with centres and matrices of the same text. The
 * matrices of the first cache come from fewer queries, for which the factor of the int-8 case
 * allows. 1e-4 is for KLDs that are about as small. */
static void assert_as_good(const char *preset, const float *stock, const float *ours,
                           const float *compressed)
{
    const size_t batch = BATCH * harness_n_vocab();

    assert_finite(ours, 2 * N_ROUNDS * batch);
    for (size_t round = 0; round < N_ROUNDS; round++) {
        const size_t first = 2 * round * batch, last = first + batch;
        const double a = harness_mean_kld(stock + batch, ours + last, BATCH),
                     b = harness_mean_kld(stock + batch, compressed + batch, BATCH);
        print_message("%s, round %zu: KLD %.6f, compressed from the start %.6f\n", preset, round, a,
                      b);
        /* a CPU stores a prompt that fills the room in pages at once */
        if (harness_on_gpu())
            assert_same(stock, ours + first, BATCH);
        assert_true(a > 0 && a <= 1.6 * b + 1e-4);
    }
}

CASE(presets_compress_what_no_longer_fits)
{
    static const char *const presets[] = { "quality", "balanced" };
    float *stock = read_in_rounds(NULL, "0", 1);

    for (size_t i = 0; i < sizeof(presets) / sizeof(*presets); i++) {
        float *ours = read_in_rounds(presets[i], "auto", N_ROUNDS),
              *compressed = read_in_rounds(presets[i], "0", 1);
        assert_as_good(presets[i], stock, ours, compressed);
        free(ours);
        free(compressed);
    }
    free(stock);
}

/* The number of SET_ROWS that a graph computes before the program stops it; -1: all. */
static int rows_before_stop = -1;

static bool stop_behind_rows(struct ggml_tensor *node, bool ask, void *user)
{
    const bool stores = node->op == GGML_OP_SET_ROWS;

    return ask ? stores : rows_before_stop < 0 || rows_before_stop-- != 0;
}

/* The program removes the tokens of the stopped graph. Then a second sequence ends f16 in place. */
static float *after_a_stopped_graph(const char *spec, int n_rows)
{
    const harness_options options = {
        .spec = spec, .n_ctx = N_CTX, .n_seq = 2, .unified = true, .eval = stop_behind_rows
    };
    struct llama_context *context;
    float *logits = harness_new_logits(50);

    setenv("KVANT_EXACT", "auto", 1);
    context = harness_context(&options);
    feed(context, 0, 100, STEP, 0, 0, NULL);
    rows_before_stop = n_rows;
    feed(context, 600, 30, STEP, 100, 0, NULL);
    rows_before_stop = -1;
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, 100, -1));
    feed(context, 300, 1, STEP, 0, 1, NULL);
    feed(context, 100, 50, STEP, 100, 0, logits);
    llama_free(context);
    return logits;
}

CASE(a_stopped_graph_costs_no_other_rows)
{
    for (int n_rows = 0; n_rows < 3; n_rows++) {
        float *stock = after_a_stopped_graph(NULL, n_rows);
        float *ours = after_a_stopped_graph("int-8", n_rows);
        assert_finite(ours, 50 * harness_n_vocab());
        assert_true(harness_mean_kld(stock, ours, 50) < 0.01);
        free(stock);
        free(ours);
    }
}

RUN_CASES(start_with_text, harness_stop)
