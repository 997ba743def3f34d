/* test_plugin_refused.c - rows that a codec refuses. A state with bad rows takes the cells of a
 * client that left, and one client's embeddings are NaN in a batch of two. Answers must be NaN
 * where answers with llama.cpp's own f16 cache are NaN, and numbers elsewhere. */
#include "harness.h"

#define N_TEXT 100
#define N_TOKENS (2 * N_TEXT + 8)
#define BAD_ROW 37

static llama_token tokens[N_TOKENS];

static int start(void **state)
{
    int result = harness_start(state);

    if (result == 0)
        harness_tokens(tokens, N_TOKENS);
    if (result == 0 && !harness_on_gpu())
        harness_add_accel();
    return result;
}

/* The client whose rows are removed has tokens[0 ..]; the restored client has tokens[N_TEXT ..]. */
static const llama_token *const first_text = tokens, *const second_text = tokens + N_TEXT;

/* Decodes one token and returns its logits, or NULL if llama_decode fails. */
static const float *next_logits(struct llama_context *context, llama_token token, llama_pos pos,
                                llama_seq_id seq)
{
    struct llama_batch batch = llama_batch_init(1, 0, 1);

    harness_add(&batch, token, pos, seq, true);
    return harness_decode_batch(context, batch) == 0 ? llama_get_logits_ith(context, 0) : NULL;
}

static bool all_nan(const float *logits)
{
    bool all = true;

    for (size_t i = 0; i < harness_n_vocab(); i++)
        all = all && isnan(logits[i]);
    return all;
}

static bool all_finite(const float *logits)
{
    bool all = true;

    for (size_t i = 0; i < harness_n_vocab(); i++)
        all = all && isfinite(logits[i]);
    return all;
}

/* The fault in a row of a state. */
enum fault { A_NAN, AN_INFINITY, ALL_NAN, TOO_LARGE, N_FAULTS };

static const uint16_t fault_numbers[] = { 0x7e00, 0xfc00, 0x7e00, 0x7bff };

struct damage {
    bool values, last_layer;
    enum fault fault;
};

static uint8_t *row_in_state(const struct llama_model *model, uint8_t *saved, size_t size,
                             const struct damage *damage)
{
    const size_t layer = damage->last_layer ? (size_t)llama_model_n_layer(model) - 1 : 0;

    return saved + harness_rows_at(size, N_TEXT, damage->values, layer) +
           BAD_ROW * harness_row_bytes();
}

/* A state of the second text in llama.cpp's own cache, of the last of n_seq sequences, with one
 * damaged row; the caller frees it. */
static uint8_t *damaged_state(const struct damage *damage, const harness_options *options,
                              size_t *size)
{
    const harness_options stock = { .n_ctx = options->n_ctx,
                                    .n_seq = options->n_seq,
                                    .unified = options->unified };
    const llama_seq_id seq = options->n_seq > 1 ? 1 : 0;
    struct llama_context *context = harness_context(&stock);
    const struct llama_model *model = llama_get_model(context);
    const size_t n = harness_row_bytes() / 2;
    uint16_t *row;
    uint8_t *saved;

    harness_decode(context, second_text, N_TEXT, 0, seq, false);
    saved = harness_save_sequence(context, seq, size);
    row = (uint16_t *)(void *)row_in_state(model, saved, *size, damage);
    for (size_t i = 0; i < (damage->fault == ALL_NAN || damage->fault == TOO_LARGE ? n : 1); i++)
        row[i] = fault_numbers[damage->fault];
    llama_free(context);
    return saved;
}

static bool is_nan_row(const uint16_t *row, size_t n)
{
    bool all = true;

    for (size_t i = 0; i < n; i++)
        all = all && (row[i] & 0x7fff) > 0x7c00;
    return all;
}

/* Saves the state again from the sequence that got the damaged state. The row is NaN, and a cache
 * into which this state is restored answers NaN. */
static void check_saved_again(struct llama_context *context, const harness_options *options,
                              const struct damage *damage, size_t size)
{
    const struct llama_model *model = llama_get_model(context);
    struct llama_context *other;
    size_t size_again;
    uint8_t *again = harness_save_sequence(context, 1, &size_again);

    assert_int_equal(size, size_again);
    assert_true(is_nan_row((uint16_t *)(void *)row_in_state(model, again, size, damage),
                           harness_row_bytes() / 2));
    other = harness_context(options);
    assert_int_equal(llama_state_seq_set_data(other, again, size, 1), size);
    assert_true(all_nan(next_logits(other, second_text[0], N_TEXT, 1)));
    llama_free(other);
    free(again);
}

/* Sequence 1 had the first text and gets the damaged state. Sequence 0 is another client. */
static void check_restored(const char *spec, bool unified, const struct damage *damage,
                           bool same_bits)
{
    const harness_options options = {
        .spec = spec, .n_ctx = unified ? 512 : 1024, .n_seq = 2, .unified = unified
    };
    struct llama_context *context = harness_context(&options);
    llama_memory_t memory = llama_get_memory(context);
    const size_t bytes = harness_n_vocab() * sizeof(float);
    float *before = malloc(bytes);
    const float *logits;
    size_t size;
    uint8_t *saved = damaged_state(damage, &options, &size);

    harness_decode(context, first_text, N_TEXT, 0, 0, false);
    harness_decode(context, first_text, N_TEXT, 0, 1, false);
    memcpy(before, llama_get_logits_ith(context, -1), bytes);
    llama_memory_seq_rm(memory, 1, -1, -1);
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 1), size);
    check_saved_again(context, &options, damage, size);
    logits = next_logits(context, second_text[0], N_TEXT, 1);
    assert_non_null(logits);
    assert_true(all_nan(logits));
    logits = next_logits(context, second_text[0], N_TEXT, 0); /* the client of sequence 0 */
    assert_non_null(logits);
    assert_true(all_finite(logits));
    llama_memory_seq_rm(memory, 1, -1, -1);
    harness_decode(context, first_text, N_TEXT, 0, 1, false); /* the cells are used once more */
    logits = llama_get_logits_ith(context, -1);
    assert_true(same_bits ? memcmp(logits, before, bytes) == 0 : all_finite(logits));
    llama_free(context);
    free(before);
    free(saved);
}

CASE(restored_bad_rows_are_nan)
{
    static const char *const learning[] = { "", "trellis-4:center=first,norm=first",
                                            "trellis-4:transform=first" };

    for (int i = 0; i < 4 * N_FAULTS; i++) {
        const struct damage damage = { i & 1, i >> 1 & 1, (enum fault)(i >> 2) };
        check_restored("turboquant-4", i % 3 != 0, &damage, true);
    }
    for (int i = 0; i < 12; i++) {
        const struct damage damage = { i & 1, i >> 1 & 1, A_NAN };
        check_restored(learning[i % 3], i & 4, &damage, false);
    }
}

/* Counts the lines that the plug-in prints meanwhile about rows that it cannot store. */
static int count_lines(void (*act)(struct llama_context *, uint8_t *, size_t),
                       struct llama_context *context, uint8_t *saved, size_t size)
{
    const harness_lines lines = harness_begin_lines();
    char line[1024];
    int n = 0;

    act(context, saved, size);
    harness_end_lines(&lines);
    while (fgets(line, sizeof(line), lines.file) != NULL)
        n += strstr(line, "cannot store") != NULL;
    fclose(lines.file);
    return n;
}

static void restore(struct llama_context *context, uint8_t *saved, size_t size)
{
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 0), size);
}

static void attend_again(struct llama_context *context, uint8_t *saved, size_t size)
{
    for (int i = 0; i < 3; i++)
        assert_true(all_nan(next_logits(context, second_text[0], N_TEXT + i, 0)));
}

/* Keys and values of all layers have a bad row. A second restore is a second event. */
CASE(refusals_are_said_in_a_line)
{
    const harness_options options = { .spec = "turboquant-4", .n_ctx = 512 };
    struct llama_context *context = harness_context(&options);
    const struct llama_model *model = llama_get_model(context);
    struct damage damage = { .fault = A_NAN };
    size_t size;
    uint8_t *saved = damaged_state(&damage, &options, &size),
            *first = row_in_state(model, saved, size, &damage);

    for (int i = 1; i < 2 * llama_model_n_layer(model); i++)
        memset(first + (size_t)i * (HARNESS_ROWS_HEAD + N_TEXT * harness_row_bytes()), 0xff, 2);
    harness_decode(context, first_text, N_TEXT, 0, 0, false);
    for (int i = 0; i < 2; i++) {
        llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
        assert_int_equal(count_lines(restore, context, saved, size), 1);
        assert_true(count_lines(attend_again, context, saved, size) <= 1);
    }
    llama_free(context);
    free(saved);
}

/* Embeddings */

#define N_EACH 24 /* rows of each of two sequences */
#define N_AFTER 3

/* The kind of client that sequence 1 is. LEAVES has no rows from the bad row on. */
enum client { FINE, BAD, LEAVES };

/* Decodes a batch of n rows of each of two sequences, alternating. From row N_EACH / 2 on, `client`
 * decides about sequence 1: its row there begins with x. Returns how many rows sequence 1 has. */
static int decode_rows(struct llama_context *context, enum client client, float x, llama_pos pos,
                       int n)
{
    const int width = llama_model_n_embd(llama_get_model(context));
    struct llama_batch batch = llama_batch_init(2 * n, width, 1);
    uint64_t random = (uint64_t)pos + 1;
    int of_second = 0;

    for (int i = 0; i < 2 * n; i++) {
        float *row = batch.embd + (size_t)batch.n_tokens * (size_t)width;
        const llama_pos at = pos + i / 2;
        for (int j = 0; j < width; j++)
            row[j] = harness_random(&random);
        if (i % 2 != 0 && at == N_EACH / 2 && client == BAD)
            row[0] = x;
        if (i % 2 != 0 && at >= N_EACH / 2 && client == LEAVES)
            continue;
        of_second += i % 2;
        harness_add(&batch, 0, at, i % 2, true);
    }
    assert_int_equal(harness_decode_batch(context, batch), 0);
    return of_second;
}

#define N_ROWS (2 * (N_EACH + N_AFTER))

/* Logits of both sequences, alternating, as far as sequence 1 has rows: of a batch, then of N_AFTER
 * tokens of each sequence. */
static float *logits_of_both(const harness_options *options, enum client client, float x)
{
    const size_t n = harness_n_vocab();
    struct llama_context *context = harness_context(options);
    float *logits = calloc(N_ROWS * n, sizeof(float));
    size_t at = 0;

    assert_non_null(logits);
    for (int step = 0; step <= N_AFTER; step++) {
        const int n_rows = step == 0 ? N_EACH : 1;
        const int of_second =
            decode_rows(context, client, x, step == 0 ? 0 : N_EACH + step - 1, n_rows);
        for (int i = 0, from = 0; i < 2 * n_rows; i++, at++)
            if (i % 2 == 0 || i / 2 < of_second)
                memcpy(logits + at * n, llama_get_logits_ith(context, from++), n * sizeof(float));
    }
    llama_free(context);
    return logits;
}

/* Sum of the differences over the rows of sequence 0. */
static double difference_of_first(const float *a, const float *b)
{
    const size_t n = harness_n_vocab();
    double sum = 0;

    for (size_t i = 0; i < N_ROWS; i += 2)
        sum += harness_rms_difference(a + i * n, b + i * n, n);
    return sum;
}

/* Counts NaN rows, which must be the same rows as llama.cpp's. */
static int count_nan(const float *ours, const float *stock)
{
    const size_t n = harness_n_vocab();
    int n_nan = 0;

    for (size_t i = 0; i < N_ROWS; i++) {
        assert_int_equal(all_nan(stock + i * n), !all_finite(stock + i * n));
        assert_int_equal(all_nan(ours + i * n), all_nan(stock + i * n));
        assert_int_equal(all_finite(ours + i * n), all_finite(stock + i * n));
        n_nan += all_nan(ours + i * n);
    }
    return n_nan;
}

/* If the codec learns nothing from rows, sequence 0 has the same bits next to bad rows as next to
 * good rows. A codec that learns is closer to llama.cpp than the same codec without learning
 * (`plain`). If it learned from a bad row, its centre or matrix would be NaN. */
static void check_batch(const char *spec, const char *plain, bool unified, float x)
{
    const harness_options options = {
        .spec = spec, .n_ctx = unified ? 512 : 1024, .n_seq = 2, .unified = unified
    };
    const harness_options stock = { .n_ctx = options.n_ctx, .n_seq = 2, .unified = unified };
    harness_options other = options;
    float *ours = logits_of_both(&options, BAD, x), *of_stock = logits_of_both(&stock, BAD, x);
    float *exact = logits_of_both(&stock, FINE, 0), *fine;
    const int n_nan = count_nan(ours, of_stock);
    double difference = difference_of_first(ours, exact), error;

    other.spec = plain;
    fine = logits_of_both(&other, FINE, 0);
    error = difference_of_first(fine, exact);
    print_message("%s beside bad rows %.4f from stock, %s %.4f\n", spec, difference, plain, error);
    assert_true(n_nan == N_EACH / 2 + N_AFTER || !isnan(x));
    assert_true(spec == plain ? difference_of_first(ours, fine) == 0 : difference < error);
    free(of_stock);
    free(exact);
    free(ours);
    free(fine);
}

CASE(a_bad_row_is_its_own_sequences)
{
    static const char plain[] = "trellis-4";

    check_batch(plain, plain, true, NAN);
    check_batch(plain, plain, false, NAN);
    check_batch(plain, plain, true, INFINITY);
    check_batch("trellis-4:center=first,norm=first", plain, true, NAN);
    check_batch("trellis-4:transform=first", plain, true, NAN);
    check_batch("", plain, true, NAN);
    check_batch("", plain, false, INFINITY);
}

#define N_FEW 4

/* Decodes n rows of sequence 1 from position 0 on in one batch. Row 1 begins with a NaN. */
static void decode_few(struct llama_context *context)
{
    const int width = llama_model_n_embd(llama_get_model(context));
    struct llama_batch batch = llama_batch_init(N_FEW, width, 1);
    uint64_t random = 1;

    for (int i = 0; i < N_FEW * width; i++)
        batch.embd[i] = i == width ? NAN : harness_random(&random);
    for (int i = 0; i < N_FEW; i++)
        harness_add(&batch, 0, i, 1, true);
    assert_int_equal(harness_decode_batch(context, batch), 0);
}

/* Tokens that saw the bad row in their own batch have rows of later layers that depend on its cell,
 * where another client's rows lie. They stay NaN when the bad row itself is removed. */
static void check_few(const harness_options *options)
{
    struct llama_context *context = harness_context(options);
    llama_memory_t memory = llama_get_memory(context);

    harness_decode(context, first_text, N_TEXT, 0, 0, false);
    harness_decode(context, first_text, N_TEXT, 0, 1, false);
    llama_memory_seq_rm(memory, 1, -1, -1);
    decode_few(context);
    for (int i = 0; i < N_FEW; i++)
        assert_true(i == 0 ? all_finite(llama_get_logits_ith(context, i))
                           : all_nan(llama_get_logits_ith(context, i)));
    assert_true(llama_memory_seq_rm(memory, 1, 1, 2));
    assert_true(all_nan(next_logits(context, second_text[0], N_FEW, 1)));
    assert_true(all_finite(next_logits(context, second_text[0], N_TEXT, 0)));
    llama_memory_seq_rm(memory, 1, 2, -1);
    assert_true(all_finite(next_logits(context, second_text[0], 1, 1)));
    llama_free(context);
}

static void check_few_everywhere(void)
{
    static const char *const specs[] = { NULL, "trellis-4", "" };

    for (int i = 0; i < 6; i++)
        check_few(&(harness_options){
            .spec = specs[i / 2], .n_ctx = i % 2 ? 512 : 1024, .n_seq = 2, .unified = i % 2 != 0 });
}

/* The second model has two caches, one of them with a window. */
CASE(whoever_saw_a_bad_row_stays_nan)
{
    check_few_everywhere();
    if (getenv("KVANT_TINY_MODELS") == NULL)
        return;
    harness_load_tiny("gemma3");
    harness_tokens(tokens, N_TOKENS);
    check_few_everywhere();
}

/* Batches with KVANT_ACCEL and llama.cpp's own cache, whose cells hold the bad rows. The types q4_0
 * and iq4_nl encode a NaN as some number, so only the answer of the bad token itself is NaN. */
static void check_accel_batch(const char *type, bool unified, float x)
{
    const harness_options stock = {
        .type = type, .n_ctx = unified ? 512 : 1024, .n_seq = 2, .unified = unified
    };
    harness_options accel = stock;
    float *of_stock = logits_of_both(&stock, BAD, x), *ours, *fine;
    int n_nan;

    accel.accel = true;
    ours = logits_of_both(&accel, BAD, x);
    fine = logits_of_both(&accel, FINE, 0);
    n_nan = count_nan(ours, of_stock);
    print_message("%s with KVANT_ACCEL: %d rows are NaN\n", type, n_nan);
    assert_true(n_nan > 0 || !isnan(x));
    assert_true(difference_of_first(ours, fine) == 0);
    free(of_stock);
    free(ours);
    free(fine);
}

CASE(a_bad_row_is_its_own_sequences_with_accel)
{
    static const char *const types[] = { "f32", "f16", "bf16", "q8_0", "q4_0", "iq4_nl" };

    if (harness_on_gpu()) /* test_plugin_gpu_accel.c tests that */
        skip();
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        for (int kind = 0; kind < 3; kind++)
            check_accel_batch(types[i], kind != 1, kind == 2 ? INFINITY : NAN);
}

RUN_CASES(start, harness_stop)
