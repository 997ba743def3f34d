#define _POSIX_C_SOURCE 200809L /* setenv */
/* test_plugin_alike.c - a cache on a GPU learns nothing from tokens that are too much alike: no
 * matrix, no scale of values, and nothing from their queries. Otherwise later text would have large
 * errors. */
#define N_TEXT 900
#include "in_place_fixture.h"
#include "mock_control.h"

#define STEP 100 /* tokens in a batch */

#define N_BEFORE 500 /* tokens of sequence 0, more than fit */
#define N_AFTER 400  /* tokens of the text after them */

static bool repeats; /* sequence 0 has one token only */
static int step;     /* of sequence 0; 0: it is restored from a state of llama.cpp's own cache */

static void decode_before(struct llama_context *context, int n_step)
{
    llama_token before[STEP];

    for (int i = 0; i < N_BEFORE; i += n_step) {
        for (int j = 0; j < n_step; j++)
            before[j] = tokens[repeats ? 0 : i + j];
        harness_decode(context, before, n_step, i, 0, false);
    }
}

static void restore_before(struct llama_context *context)
{
    struct llama_context *stock = new_context(NULL, "0", 2);
    size_t size;
    uint8_t *state;

    decode_before(stock, STEP);
    state = harness_save_state(stock, &size);
    assert_int_equal(llama_state_seq_set_data(context, state, size, 0), size);
    free(state);
    llama_free(stock);
}

/* A text in sequence 1, while sequence 0 stays. */
static void a_text_after_another(struct llama_context *context, float *logits)
{
    if (step > 0)
        decode_before(context, step);
    else
        restore_before(context);
    feed(context, N_BEFORE, N_AFTER, STEP, 0, 1, logits);
}

/* The mean KLD of the text after sequence 0, from llama.cpp's own cache. */
static double kld_after(const char *exact, bool of_one_token)
{
    const story of = { a_text_after_another, N_AFTER, 2 };
    float *stock, *ours;
    double kld;

    repeats = of_one_token;
    stock = hear_story(&of, NULL, "0");
    ours = hear_story(&of, "", exact);
    kld = harness_mean_kld(stock, ours, N_AFTER);
    free(stock);
    free(ours);
    return kld;
}

/* Rows of one repeated token span hardly any directions. A matrix or scales that were learned from
 * them would multiply the error of all later rows. The texts differ by chance. */
static void assert_one_token_teaches_nothing(const char *preset, const char *exact,
                                             int tokens_of_step)
{
    double text, token;

    step = tokens_of_step;
    setenv("KVANT_PRESET", preset, 1);
    text = kld_after(exact, false);
    token = kld_after(exact, true);
    print_message("%s, exact=%s, steps of %d: KLD after a text %.6f, after one token %.6f\n",
                  preset, exact, step, text, token);
    unsetenv("KVANT_PRESET");
    assert_true(text > 0 && token <= 2 * text);
}

CASE(one_repeated_token_teaches_nothing)
{
    assert_one_token_teaches_nothing("balanced", "auto", STEP);
    assert_one_token_teaches_nothing("small", "auto", STEP);
    assert_one_token_teaches_nothing("tiny", "auto", STEP);
    assert_one_token_teaches_nothing("tiny", "0", STEP);
    assert_one_token_teaches_nothing("tiny", "0", 20);
}

/* The logits of the text, if values learn or have codecs that cannot learn. */
static float *with_values(const char *values)
{
    const harness_options options = { .spec = "int-8:center=none,norm=none",
                                      .values = values,
                                      .n_ctx = N_CTX,
                                      .n_seq = 2,
                                      .unified = true };
    float *logits = harness_new_logits(N_AFTER);
    struct llama_context *context;

    setenv("KVANT_EXACT", "0", 1);
    context = harness_context(&options);
    a_text_after_another(context, logits);
    llama_free(context);
    return logits;
}

static bool values_learn(int tokens_of_step, bool of_one_token)
{
    float *learning, *other;
    bool same;

    step = tokens_of_step;
    repeats = of_one_token;
    learning = with_values("int-4:center=none,norm=first");
    other = with_values("int-4:center=none,norm=none");
    same = is_same(learning, other, N_AFTER);
    free(learning);
    free(other);
    return !same;
}

/* Rows come in long steps, in short steps, or with a restored state. */
CASE(values_learn_from_a_text_only)
{
    static const int steps[] = { STEP, 20, 0 };

    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        assert_true(values_learn(steps[i], false));
        assert_false(values_learn(steps[i], true));
    }
}

#define QUERIES_OF_A_BATCH 64

/* How many tokens' queries the matrices of a text after sequence 0 are learned from. */
static uint32_t queries_learned_from(const char *exact, bool of_one_token)
{
    const story of = { a_text_after_another, N_AFTER, 2 };

    step = STEP;
    repeats = of_one_token;
    mock_control()->learned_queries = 0;
    free(hear_story(&of, "", exact));
    return mock_control()->learned_queries;
}

/* Matrices come from the first batches of the text, and from their queries. A cache keeps queries
 * of four batches, and queries of one token would outweigh the text's. */
CASE(queries_of_one_token_teach_nothing)
{
    if (!harness_has_mock())
        skip();
    setenv("KVANT_PRESET", "tiny", 1);
    assert_int_equal(queries_learned_from("auto", true), 2 * QUERIES_OF_A_BATCH);
    assert_int_equal(queries_learned_from("0", true), QUERIES_OF_A_BATCH);
    assert_true(queries_learned_from("auto", false) > 2 * QUERIES_OF_A_BATCH);
    unsetenv("KVANT_PRESET");
}

RUN_CASES(start_with_text, harness_stop)
