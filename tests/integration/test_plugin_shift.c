/* test_plugin_shift.c - repeated context shifts: a window that drops one token at a time, and a
 * conversation that drops its oldest message each round, as llama-server's --cache-reuse does. */
#include "harness.h"

#define N_CTX 512
#define KEPT 4
#define WINDOW 256
#define SHIFTS 200
#define SCORED 200 /* the last tokens */
#define SYSTEM 30
#define TURNS 40
#define MOST_MESSAGES 6
#define N_ALL 2304 /* tokens of all rounds, and some more */
#define N_LONG 2304
#define LONG_SHIFTS 20

/* The codecs of the preset "balanced". A preset keeps the first and the newest tokens as fp16,
 * which are most tokens of these contexts. Codecs that are named quantise all tokens. */
#define KEYS "trellis-4:transform=first"
#define VALUES "trellis-4"

static llama_token tokens[N_ALL];

static int start(void **state)
{
    int result = harness_start(state);

    if (result == 0)
        harness_tokens(tokens, N_ALL);
    return result;
}

/* Logits of the last SCORED tokens. */
typedef struct scores {
    float *logits;
    int n; /* tokens that were decoded */
} scores;

static scores new_scores(void)
{
    scores s = { malloc(SCORED * harness_n_vocab() * sizeof(float)), 0 };

    assert_non_null(s.logits);
    return s;
}

/* Decodes tokens first .. first + n - 1 of the text. s: NULL for tokens that are not among the last
 * SCORED. Their logits would take twice as long as all layers. */
static void feed(struct llama_context *context, int first, int n, llama_pos pos, scores *s)
{
    harness_decode(context, tokens + first, n, pos, 0, s != NULL);
    for (int i = 0; i < n && s != NULL; i++, s->n++)
        memcpy(s->logits + (size_t)(s->n % SCORED) * harness_n_vocab(),
               llama_get_logits_ith(context, i), harness_n_vocab() * sizeof(float));
}

static void drop(struct llama_context *context, llama_pos first, llama_pos end)
{
    llama_memory_t memory = llama_get_memory(context);

    assert_true(llama_memory_can_shift(memory));
    assert_true(llama_memory_seq_rm(memory, 0, first, end));
    llama_memory_seq_add(memory, 0, end, -1, first - end);
}

/* Decodes a text with its shifts, or only the tokens that are left at the end. */
typedef float *run_text(const harness_options *options, bool shifts);

static float *one_at_a_time(const harness_options *options, bool shifts)
{
    struct llama_context *context = harness_context(options);
    scores s = new_scores();

    feed(context, 0, shifts ? WINDOW : KEPT, 0, NULL);
    for (int i = 0; i < SHIFTS && shifts; i++) {
        drop(context, KEPT, KEPT + 1);
        feed(context, WINDOW + i, 1, WINDOW - 1, &s);
    }
    if (!shifts)
        feed(context, KEPT + SHIFTS, WINDOW - KEPT, KEPT, &s);
    llama_free(context);
    return s.logits;
}

/* Messages of 17 to 76 tokens. The first tokens of a new message come together, the last 5 alone,
 * as answers do. */
static float *conversation(const harness_options *options, bool shifts)
{
    struct llama_context *context = harness_context(options);
    scores s = new_scores();
    int lengths[MOST_MESSAGES + TURNS], next = SYSTEM, pos = SYSTEM;

    feed(context, 0, SYSTEM, 0, NULL);
    for (int turn = 0; turn < MOST_MESSAGES + TURNS; turn++) {
        lengths[turn] = 17 + turn * 37 % 60;
        next += lengths[turn];
        if (turn < TURNS && !shifts)
            continue;
        if (turn >= MOST_MESSAGES && shifts) {
            drop(context, SYSTEM, SYSTEM + lengths[turn - MOST_MESSAGES]);
            pos -= lengths[turn - MOST_MESSAGES];
        }
        pos += lengths[turn];
        scores *last = turn < TURNS ? NULL : &s;
        feed(context, next - lengths[turn], lengths[turn] - 5, pos - lengths[turn], last);
        for (int i = 5; i > 0; i--)
            feed(context, next - i, 1, pos - i, last);
    }
    assert_true(next <= N_ALL && s.n >= SCORED);
    llama_free(context);
    return s.logits;
}

/* A long prompt, shifts with a token each, and then a batch, whose tokens see keys of sealed blocks
 * that moved. dropped: tokens of each shift. */
static float *after_prompt(const harness_options *options, bool shifts, int n, int dropped)
{
    harness_options longer = *options;
    struct llama_context *context;
    scores s = new_scores();
    size_t size;
    int pos = n;

    longer.n_ctx = options->n_ctx / N_CTX * N_LONG;
    context = harness_context(&longer);
    feed(context, 0, n, 0, NULL);
    /* A GPU keeps the rows of first batches in fp16 until they are read. */
    free(harness_save_state(context, &size));
    for (int i = 0; i < LONG_SHIFTS; i++, pos++) {
        if (shifts)
            drop(context, KEPT, KEPT + dropped);
        pos -= shifts ? dropped : 0;
        feed(context, n + i, 1, pos, NULL);
    }
    feed(context, n + LONG_SHIFTS, SCORED, pos, &s);
    llama_free(context);
    return s.logits;
}

static float *long_prompt(const harness_options *options, bool shifts)
{
    return after_prompt(options, shifts, 1200, 20);
}

/* Each shift empties a block, which keeps its shift. A GPU has no room for all of them. */
static float *empty_blocks(const harness_options *options, bool shifts)
{
    return after_prompt(options, shifts, 1900, 64);
}

/* Logits with a cache in f32, whose rounding is negligible next to quantisation. */
static float *exact_logits(run_text *run, bool shifts)
{
    const harness_options exact = { .exact = true, .n_ctx = N_CTX };

    return run(&exact, shifts);
}

static double divergence(run_text *run, harness_options options, bool shifts, const float *exact)
{
    float *logits;
    double mean;

    options.n_seq = 2;
    options.n_ctx = options.unified ? N_CTX : 2 * N_CTX; /* tokens of both sequences */
    logits = run(&options, shifts);
    mean = harness_mean_kld(exact, logits, SCORED);
    free(logits);
    return mean;
}

/* Keys are quantised once, so the divergence stays the same as in a context that never moved, with
 * any number of shifts. Chance over SCORED tokens is covered by a factor of 2. With keys that are
 * quantised in each shift the factor is 20. */
static void check_against_unshifted(run_text *run, const char *what)
{
    float *exact[] = { exact_logits(run, false), exact_logits(run, true) };

    for (int unified = 0; unified < 2; unified++) {
        const harness_options options = { .spec = KEYS, .values = VALUES, .unified = unified };
        double with = divergence(run, options, true, exact[1]);
        double without = divergence(run, options, false, exact[0]);
        print_message("%s, %s: KLD %.5f, without shifts %.5f\n", what,
                      unified ? "unified" : "streams", with, without);
        assert_true(with <= 2 * without);
    }
    free(exact[0]);
    free(exact[1]);
}

CASE(two_hundred_shifts_cost_nothing)
{
    check_against_unshifted(one_at_a_time, "a token at a time");
}

CASE(conversations_may_roll)
{
    check_against_unshifted(conversation, "a message at a time");
}

CASE(sealed_blocks_move)
{
    check_against_unshifted(long_prompt, "sealed blocks");
}

/* Then a GPU encodes keys once more. A tensor on the CPU has room for these shifts. */
CASE(different_shifts_run_out)
{
    if (!harness_on_gpu())
        skip();
    check_against_unshifted(empty_blocks, "empty blocks");
}

/* Compares 8 bits with llama.cpp's 8 bits, which are quantised again with each shift. On a GPU,
 * keys of int-8 are quantised again, too, because they have no matrix. So there the default preset
 * is compared, which has fewer bits. */
CASE(shifts_cost_no_more_than_those_of_q8_0)
{
    float *exact = exact_logits(one_at_a_time, true);
    double stock = divergence(one_at_a_time, (harness_options){ .type = "q8_0" }, true, exact);
    const harness_options options = { .spec = harness_on_gpu() ? "" : "int-8" };
    double ours = divergence(one_at_a_time, options, true, exact);

    print_message("KLD %.5f, q8_0 %.5f\n", ours, stock);
    assert_true(ours <= stock);
    free(exact);
}

static double difference_of_states(struct llama_context *const context[2])
{
    size_t size[2];
    uint8_t *saved[] = { harness_save_state(context[0], &size[0]),
                         harness_save_state(context[1], &size[1]) };
    double difference;

    assert_int_equal(size[0], size[1]);
    difference = harness_state_difference(saved[0], saved[1], size[0]);
    free(saved[0]);
    free(saved[1]);
    return difference;
}

/* More tokens than a GPU has fp16 pages for, so that rows are quantised. With a preset, a cache of
 * 512 tokens has 4 pages of 64. With a spec, a cache of 1024 tokens has 8. */
enum { PRESET_WINDOW = 320, SPEC_WINDOW = 576 };

static void fill_window(struct llama_context *context, int window)
{
    harness_decode(context, tokens, window, 0, 0, false);
}

static void shift_window(struct llama_context *context, int window)
{
    for (int i = 0; i < 9; i++) {
        drop(context, KEPT, KEPT + 7);
        harness_decode(context, tokens + WINDOW + 7 * i, 7, window - 7, 0, false);
    }
}

/* The largest relative difference of a row of the first layer, keys or values, among the n tokens
 * that the contexts hold. A state ends with the keys of all layers and the values of all layers. */
static double worst_row(struct llama_context *const context[2], size_t n)
{
    const size_t width = harness_row_bytes();
    size_t size[2];
    uint8_t *saved[] = { harness_save_state(context[0], &size[0]),
                         harness_save_state(context[1], &size[1]) };
    double worst = 0;

    assert_int_equal(size[0], size[1]);
    for (int role = 0; role < 2; role++)
        for (size_t i = 0; i < n; i++) {
            const size_t at = harness_rows_at(size[0], n, role == 1, 0) + i * width;
            const double d = harness_state_difference(saved[0] + at, saved[1] + at, width);
            worst = d > worst ? d : worst;
        }
    free(saved[0]);
    free(saved[1]);
    return worst;
}

/* A state of a shifted context holds the shifted keys. They differ from llama.cpp's own keys by one
 * quantisation, as before the shifts. With a quantisation in each of 9 shifts, the square of their
 * difference would be 10 times as large. Together with the values' difference, that would be a
 * factor of 2.3. */
CASE(states_hold_shifted_keys)
{
    const harness_options options[] = { { .n_ctx = 2 * N_CTX },
                                        { .spec = KEYS, .values = VALUES, .n_ctx = 2 * N_CTX } };
    struct llama_context *context[] = { harness_context(&options[0]),
                                        harness_context(&options[1]) };
    double before, after;

    for (int c = 0; c < 2; c++)
        fill_window(context[c], SPEC_WINDOW);
    before = difference_of_states(context);
    for (int c = 0; c < 2; c++)
        shift_window(context[c], SPEC_WINDOW);
    after = difference_of_states(context);
    print_message("relative difference of rows %.4f, after 9 shifts %.4f\n", before, after);
    assert_true(after <= 1.5 * before);
    for (int c = 0; c < 2; c++)
        llama_free(context[c]);
}

/* With a preset, the system prompt and the newest 64 tokens are fp16, and stay fp16 where they
 * move. In the first layer, keys and values depend only on a token and its position. A row is
 * rounded to fp16, by at most 2^-11 of its length. In llama.cpp that happens when it writes the row
 * and with each of at most 9 shifts. In kvant it happens when kvant writes the row and when it
 * makes a state. A quantised row errs by 4 % of its length. */
CASE(shifted_exact_tokens_are_exact)
{
    const harness_options options[] = { { .n_ctx = N_CTX }, { .spec = "", .n_ctx = N_CTX } };
    struct llama_context *context[2];
    double all, ends;

    for (int c = 0; c < 2; c++) {
        context[c] = harness_context(&options[c]);
        fill_window(context[c], PRESET_WINDOW);
        shift_window(context[c], PRESET_WINDOW);
    }
    all = worst_row(context, PRESET_WINDOW);
    for (int c = 0; c < 2; c++)
        llama_memory_seq_rm(llama_get_memory(context[c]), 0, KEPT, PRESET_WINDOW - 64);
    ends = worst_row(context, KEPT + 64);
    print_message("largest relative difference of an exact row %.5f, of all rows %.5f\n", ends,
                  all);
    assert_true(ends <= 12.0 / 2048);
    assert_true(all > 12.0 / 2048); /* rows between them are quantised */
    for (int c = 0; c < 2; c++)
        llama_free(context[c]);
}

RUN_CASES(start, harness_stop)
