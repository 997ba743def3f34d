/* test_plugin_server.c - a server's work of hours, in short. Slots fill unevenly; idle slots are
 * saved and restored. Messages are removed. Drafts are accepted in part. Windows slide. A callback
 * splits graphs.
 *
 * llama.cpp's own f16 cache gets the same calls (twins.h). Answers are as good as answers to the
 * same text without these operations. The bytes stay below the size that kvant reports, and steps
 * at the same depth take as long at the end as at the start. */
#include "twins.h"

enum { LIVES = 3, ROUNDS = 2, SAMPLE = 8, SAMPLES_ALONE = 8 };

/* Settings of a run, from the environment of the test: KVANT_TEST_EXACT and KVANT_TEST_LIVES. */
static const char *exact(void)
{
    const char *given = getenv("KVANT_TEST_EXACT");

    return given != NULL ? given : "0";
}

static int n_lives(void)
{
    const char *given = getenv("KVANT_TEST_LIVES");

    return given != NULL ? atoi(given) : LIVES;
}

/* Quality of the answers */

/* Scored tokens of a slot. A slot alone has more: few samples say nothing of their own error. */
static int n_scored(int n_slots)
{
    return SAMPLE * (n_slots > 1 ? 2 : SAMPLES_ALONE);
}

/* All slots answer together. Returns a KLD for each token; the caller frees them. */
static double *answer(twins *t)
{
    const int n = n_scored(t->n_slots);
    double *klds = malloc((size_t)(n * t->n_slots) * sizeof(*klds));

    assert_non_null(klds);
    for (int i = 0; i < n; i++)
        twins_step(t, (1u << t->n_slots) - 1, klds + i * t->n_slots);
    return klds;
}

static double mean_of_sample(const double *klds, int n_slots, int slot, int first)
{
    double sum = 0;

    for (int i = first; i < first + SAMPLE; i++)
        sum += klds[i * n_slots + slot];
    return sum / SAMPLE;
}

/* Four sequences that decode alternately may lose 1.3 times as much as one that decodes alone. A
 * plain run has the same slots with the same text, so a factor of 1.3 allows for rows that are
 * exact in one run only. Successive tokens of a slot err alike, so SAMPLE of them are one sample.
 * There are at least 8 samples, so Student's t has 7 degrees of freedom or more. Then the mean of
 * the differences exceeds 0 by 4.5 of its standard errors as seldom as a normal mean by 3. */
static void assert_as_plain(const char *what, const double *klds, const double *plain, int n_slots,
                            double factor)
{
    const int n = n_scored(n_slots) / SAMPLE * n_slots;
    double a = 0, b = 0, squares = 0, mean, error;

    for (int i = 0; i < n; i++) {
        const int slot = i % n_slots, first = i / n_slots * SAMPLE;
        const double x = mean_of_sample(klds, n_slots, slot, first);
        const double y = mean_of_sample(plain, n_slots, slot, first), d = x - factor * y;
        a += x / n;
        b += y / n;
        squares += d * d / n;
    }
    mean = a - factor * b;
    error = sqrt((squares - mean * mean) / (n - 1));
    print_message("%s: KLD %.6f, plain %.6f, error of the difference %.6f\n", what, a, b, error);
    assert_true(b > 0);
    assert_true(n >= 8);
    assert_true(mean <= 4.5 * error);
}

/* Duration of steps */

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(const double *times, int n)
{
    double sorted[TWINS_STEPS];

    memcpy(sorted, times, (size_t)n * sizeof(*times));
    qsort(sorted, (size_t)n, sizeof(*sorted), compare);
    return sorted[n / 2];
}

/* Lives are alike, so the first and the last third of them have the same depths. */
static void assert_no_slow_phase(const char *what, const twins *t, const unsigned long *parts)
{
    const int third = t->n_steps / 3;
    const double first = median(t->times, third);
    const double last = median(t->times + t->n_steps - third, third);

    print_message("%s: a step takes %.2f of f16's time, at the end %.2f; parts %lu, %lu\n", what,
                  first, last, parts[0], parts[1]);
    assert_true(last <= 2 * first);
    assert_true(parts[1] <= 2 * parts[0]);
}

/* Work */

/* A life of a server. After each life except the last, all slots are empty. */
typedef void life(twins *t);

static void check(const char *what, life *live, const harness_options *options, double factor)
{
    twins *t = twins_new(options, exact()), *plain;
    const int n = n_lives() / 3 * 3;
    unsigned long parts[2] = { 0 };
    double *klds, *plain_klds, peak, budget;

    for (int i = 0; i < n; i++) {
        for (int s = 0; s < t->n_slots && i > 0; s++)
            twins_forget(t, s);
        t->parts = 0;
        t->next = i * 37;
        live(t);
        parts[0] += i < n / 3 ? t->parts : 0;
        parts[1] += i >= n - n / 3 ? t->parts : 0;
    }
    twins_check_cells(t);
    peak = t->peak;
    budget = twins_budget(t);
    assert_no_slow_phase(what, t, parts);
    plain = twins_plain(t);
    klds = answer(t);
    plain_klds = answer(plain);
    print_message("%s: at most %.0f bytes of %.0f\n", what, peak, budget);
    assert_true(peak <= budget);
    assert_as_plain(what, klds, plain_klds, t->n_slots, factor);
    twins_free(plain);
    twins_free(t);
    free(klds);
    free(plain_klds);
}

/* Three users at a time. The slot of a user who waits is saved, and is empty meanwhile. */
static void uneven_slots(twins *t)
{
    for (int round = 0; round < ROUNDS; round++) {
        for (int first = 0; first < t->n_slots; first += 3) {
            const int end = first + 3 < t->n_slots ? first + 3 : t->n_slots;
            const unsigned mask = (1u << end) - (1u << first);
            for (int s = first; s < end; s++) {
                if (round > 0)
                    twins_restore(t, s);
                twins_prompt(t, s, 12 + 9 * s);
            }
            for (int i = 0; i < 8; i++)
                twins_step(t, mask, NULL);
            for (int s = first; s < end; s++)
                twins_save(t, s);
        }
    }
    for (int s = 0; s < t->n_slots; s++)
        twins_restore(t, s);
}

CASE(slots_fill_unevenly)
{
    const harness_options options = { .spec = "", .n_ctx = 1024, .n_seq = 8, .unified = true };

    check("unified slots", uneven_slots, &options, 1.3);
}

CASE(all_streams_fill_unevenly)
{
    const harness_options options = { .spec = "", .n_ctx = 4096, .n_seq = 8 };

    check("streams", uneven_slots, &options, 1.3);
}

/* Removes every second message after a system prompt, as a client does that drops history. */
static void removals(twins *t)
{
    enum { SYSTEM = 30, MESSAGES = 8 };
    int starts[MESSAGES + 1];

    twins_prompt(t, 0, SYSTEM);
    for (int turn = 0; turn < 2; turn++) {
        starts[0] = turn == 0 ? SYSTEM : t->slots[0].n;
        for (int i = 0; i < MESSAGES; i++) {
            twins_prompt(t, 0, 17 + i * 37 % 60);
            for (int j = 0; j < 5; j++)
                twins_step(t, 1, NULL);
            starts[i + 1] = t->slots[0].n;
        }
        for (int i = MESSAGES - 1; i > 0; i -= 2)
            twins_drop(t, 0, starts[i], starts[i + 1]);
    }
}

/* Rows that were sealed when messages after them are removed stay sealed, so fewer of the first and
 * newest tokens are exact than in a plain run. On a GPU, keys of a block that do not all move by
 * the same distance are also encoded once more, and most blocks of this test contain the end of a
 * message. The test allows twice the divergence there, as test_plugin_shift.c does. */
CASE(messages_are_removed)
{
    check("removed messages", removals, &(harness_options){ .spec = "", .n_ctx = 1024 },
          harness_on_gpu() ? 2 : 1.3);
}

/* 4 drafted tokens a step, of which 0 to 4 stay, and the token that the target adds. */
static void drafting(twins *t)
{
    twins_prompt(t, 0, 300);
    for (int i = 0; i < 20; i++) {
        twins_draft(t, 0, 5, i * 7 % 5);
        twins_step(t, 1, NULL);
    }
}

CASE(drafts_are_accepted_in_part)
{
    check("drafts", drafting, &(harness_options){ .spec = "", .n_ctx = 1024 }, 1.3);
}

/* Codecs whose groups have several tokens, on a GPU. Keys that move are encoded again there. */
CASE(groups_have_several_tokens)
{
    const harness_options options = { .spec = "int-6:axis=channel,norm=first", .n_ctx = 1024 };

    if (!harness_on_gpu())
        skip();
    check("groups, removed messages", removals, &options, 2);
}

CASE(all_groups_are_stored_whole)
{
    harness_options options = {
        .spec = "int-5:axis=channel,recent=128", .n_ctx = 1024, .n_seq = 8, .unified = true
    };

    if (!harness_on_gpu())
        skip();
    check("groups, unified slots", uneven_slots, &options, 1.3);
    options.spec = "int-6:axis=channel,norm=first";
    options.n_ctx = 4096;
    options.unified = false;
    check("groups, streams", uneven_slots, &options, 1.3);
    options.n_ctx = 1024;
    options.n_seq = 1;
    check("groups, drafts", drafting, &options, 1.3);
}

/* Replaces the model. */
CASE(all_windows_slide)
{
    const harness_options options = {
        .spec = "", .n_ctx = 2048, .n_seq = 8, .unified = true, .window = true
    };

    harness_load_tiny("gemma3");
    check("windows", uneven_slots, &options, 1.3);
}

/* A program that looks at each node (cb_eval) */

static unsigned long n_asked;

static bool look_at_node(struct ggml_tensor *node, bool ask, void *user)
{
    n_asked += ask;
    return true;
}

enum { N_LOOKED = 4 };

static void look_at_steps(twins *t, float *logits, float *f16)
{
    const size_t n = harness_n_vocab(), bytes = n * sizeof(*logits);

    for (int i = 0; i < N_LOOKED; i++) {
        twins_step(t, 1, NULL);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(t->both[1], -1), bytes);
        memcpy(f16 + (size_t)i * n, llama_get_logits_ith(t->both[0], -1), bytes);
    }
}

/* Logits of the last steps, and f16's, in a context that gets a prompt of 200 tokens and one of n,
 * loses a message and is restored. */
static void looked_at(const harness_options *options, int n, float *logits, float *f16)
{
    twins *t = twins_new(options, exact());

    twins_prompt(t, 0, 200);
    twins_prompt(t, 0, n);
    twins_drop(t, 0, 100, 150);
    look_at_steps(t, logits, f16);
    twins_save(t, 0);
    twins_restore(t, 0);
    look_at_steps(t, logits, f16);
    twins_free(t);
}

/* With a callback, llama.cpp makes a graph of each node, so a step has many graphs. On a GPU, a
 * cache of 1024 tokens has 6 fp16 pages. The 500 tokens need 8. The batch of 300 tokens has more
 * rows than the 200 that are in pages, so its graph makes the matrices of its keys. With a
 * callback, the queries that matrices are made from are in another graph. So answers differ, but
 * they are better than q4_0's, which has fewer bits. 200 and 100 tokens fit into the pages. */
CASE(a_callback_changes_no_answer)
{
    static const int second[] = { 100, 300 };
    const bool seals = harness_on_gpu() && strcmp(exact(), "0") == 0;
    const size_t bytes = N_LOOKED * harness_n_vocab() * sizeof(float);
    float *plain = harness_new_logits(N_LOOKED), *split = harness_new_logits(N_LOOKED),
          *f16 = harness_new_logits(N_LOOKED), *q4 = harness_new_logits(N_LOOKED);

    for (int i = 0; i < 2; i++) {
        harness_options options = { .spec = "", .n_ctx = 1024 };
        looked_at(&options, second[i], plain, f16);
        n_asked = 0;
        options.eval = look_at_node;
        looked_at(&options, second[i], split, f16);
        assert_true(n_asked > 100);
        if (i == 0 || !seals)
            assert_memory_equal(plain, split, bytes);
    }
    if (seals) {
        looked_at(&(harness_options){ .type = "q4_0", .n_ctx = 1024 }, second[1], q4, plain);
        const double ours = harness_mean_kld(f16, split, N_LOOKED);
        const double rival = harness_mean_kld(f16, q4, N_LOOKED);
        print_message("with a callback: KLD %.6f, q4_0 %.6f\n", ours, rival);
        assert_true(ours > 0 && ours <= rival);
    }
    free(plain);
    free(split);
    free(f16);
    free(q4);
}

RUN_CASES(harness_start, harness_stop)
