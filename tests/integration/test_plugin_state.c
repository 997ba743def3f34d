/* test_plugin_state.c - llama.cpp's operations on a cache besides attention: save, restore, copy,
 * remove, shift. */
#include "harness.h"

#define N_PROMPT 160
#define N_NEXT 16
#define N_JUNK 24
#define N_DROP 48

static llama_token tokens[N_PROMPT + N_NEXT + N_JUNK];

static int start(void **state)
{
    int result = harness_start(state);

    if (result == 0)
        harness_tokens(tokens, N_PROMPT + N_NEXT + N_JUNK);
    return result;
}

/* Logits of N_NEXT tokens after the tokens that the sequence holds; the caller frees them. */
static float *continue_from(struct llama_context *context, llama_pos pos, llama_seq_id seq)
{
    size_t bytes = N_NEXT * harness_n_vocab() * sizeof(float);
    float *logits = malloc(bytes);

    assert_non_null(logits);
    harness_decode(context, tokens + N_PROMPT, N_NEXT, pos, seq, true);
    memcpy(logits, llama_get_logits(context), bytes);
    return logits;
}

static struct llama_context *prompted(const harness_options *options)
{
    struct llama_context *context = harness_context(options);

    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    return context;
}

static double rms_difference(const float *a, const float *b)
{
    return harness_rms_difference(a, b, N_NEXT * harness_n_vocab());
}

/* State files hold nominal f16 rows, which the f16 codec stores unchanged, so nothing may
 * change. */
static void f16_state_is_exact(void **state)
{
    const harness_options options = { .spec = "f16", .n_ctx = 512 };
    struct llama_context *context = prompted(&options);
    float *original, *restored;
    uint8_t *saved;
    size_t size;

    saved = harness_save_state(context, &size);
    original = continue_from(context, N_PROMPT, 0);
    llama_free(context);
    context = harness_context(&options);
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 0), size);
    restored = continue_from(context, N_PROMPT, 0);
    assert_memory_equal(original, restored, N_NEXT * harness_n_vocab() * sizeof(float));
    llama_free(context);
    free(saved);
    free(original);
    free(restored);
}

/* A lossy codec quantises the decoded rows of a state once more. They lie on the codec's own
 * points, so the codes are the same, and so is the scale with scale=unbiased. Rows with numbers
 * beyond the end of the codebook are an exception, because their scale was fitted to clipped
 * numbers. So restoring must cost less than quantising, whose relative mean square is 0.0095
 * (Lloyd-Max, 4 bits). A 16th of its root adds less than half a percent to it. */
static double restored_difference(const char *spec)
{
    const harness_options options = { .spec = spec, .n_ctx = 512 };
    struct llama_context *context = prompted(&options);
    uint8_t *first, *second;
    size_t size, size_again;
    double difference;

    first = harness_save_state(context, &size);
    llama_free(context);
    context = harness_context(&options);
    assert_int_equal(llama_state_seq_set_data(context, first, size, 0), size);
    second = harness_save_state(context, &size_again);
    assert_int_equal(size, size_again);
    difference = harness_state_difference(first, second, size);
    print_message("%s: relative difference of saved and restored rows: %.2e\n", spec, difference);
    llama_free(context);
    free(first);
    free(second);
    return difference;
}

static void restoring_does_not_quantise_twice(void **state)
{
    assert_true(restored_difference("turboquant-4") < sqrt(0.0095) / 16);
    /* The file has no room for a centre, so the restored cache takes a centre from the restored
     * rows. That costs at most one more quantisation. Rows minus a centre are no larger than the
     * rows. */
    assert_true(restored_difference("turboquant-4:center=first") < sqrt(0.0095));
    /* The same with centre and scale, which the default without a calibration has before it sees
     * queries. The trellis has more levels and a mean squared error of .0050. The scales of the
     * restored rows equal the scales of the first rows, except for noise. */
    assert_true(restored_difference("trellis-4:center=first,norm=first") < sqrt(0.0050));
    assert_true(restored_difference("trellis-4:transform=first") < sqrt(0.0050));
}

/* Each sequence has its own stream. The copy holds the same bytes in the same cells, so the numbers
 * are the same. */
static void check_stream_copy(const char *spec)
{
    const harness_options options = { .spec = spec, .n_ctx = 1024, .n_seq = 2 };
    struct llama_context *context = prompted(&options);
    float *a, *b;

    llama_memory_seq_cp(llama_get_memory(context), 0, 1, -1, -1);
    a = continue_from(context, N_PROMPT, 0);
    b = continue_from(context, N_PROMPT, 1);
    assert_memory_equal(a, b, N_NEXT * harness_n_vocab() * sizeof(float));
    llama_free(context);
    free(a);
    free(b);
}

static void copy_between_streams_is_exact(void **state)
{
    check_stream_copy("turboquant-4");
    check_stream_copy("turboquant-4:center=first,norm=first,recent=40");
    check_stream_copy("int-4:axis=channel,sink=4,recent=64");
}

/* Two streams in one batch: each attends only to its own cells. */
static void streams_in_one_batch_agree(void **state)
{
    const harness_options options = { .spec = "int-8", .n_ctx = 1024, .n_seq = 2 };
    struct llama_context *context = prompted(&options);
    struct llama_batch batch = llama_batch_init(2 * N_NEXT, 0, 1);
    size_t n = harness_n_vocab();

    llama_memory_seq_cp(llama_get_memory(context), 0, 1, -1, -1);
    for (int i = 0; i < 2 * N_NEXT; i++)
        harness_add(&batch, tokens[N_PROMPT + i / 2], N_PROMPT + i / 2, i % 2, true);
    assert_int_equal(harness_decode_batch(context, batch), 0);
    for (int i = 0; i < N_NEXT; i++)
        assert_memory_equal(llama_get_logits_ith(context, 2 * i),
                            llama_get_logits_ith(context, 2 * i + 1), n * sizeof(float));
    llama_free(context);
}

/* Distance between llama.cpp's f16 cache with flash attention and a cache in f32: the cost of
 * rounding alone. */
static double stock_rounding(void (*change)(struct llama_context *), llama_pos pos)
{
    float *logits[2];
    double rms;

    for (int i = 0; i < 2; i++) {
        const harness_options options = { .exact = i == 0, .n_ctx = 512 };
        struct llama_context *context = prompted(&options);
        if (change != NULL)
            change(context);
        logits[i] = continue_from(context, pos, 0);
        llama_free(context);
    }
    rms = rms_difference(logits[0], logits[1]);
    free(logits[0]);
    free(logits[1]);
    return rms;
}

/* One unified cache: the second sequence shares the prompt's cells and continues in cells after the
 * first sequence's. The same terms are summed in another order. */
static void unified_copy_agrees(void **state)
{
    const harness_options options = {
        .spec = "turboquant-4", .n_ctx = 512, .n_seq = 2, .unified = true
    };
    struct llama_context *context = prompted(&options);
    double rounding = stock_rounding(NULL, N_PROMPT), difference;
    float *a, *b;

    llama_memory_seq_cp(llama_get_memory(context), 0, 1, -1, -1);
    a = continue_from(context, N_PROMPT, 0);
    b = continue_from(context, N_PROMPT, 1);
    difference = rms_difference(a, b);
    print_message("rms difference %.5f, stock's rounding %.5f\n", difference, rounding);
    assert_true(difference <= 2 * rounding);
    llama_free(context);
    free(a);
    free(b);
}

/* Removed cells are written again, and no trace of their former rows is left. */
static void check_removal(const char *spec)
{
    const harness_options options = { .spec = spec, .n_ctx = 512 };
    struct llama_context *context = prompted(&options);
    float *clean = continue_from(context, N_PROMPT, 0), *after;

    llama_free(context);
    context = prompted(&options);
    harness_decode(context, tokens + N_PROMPT + N_NEXT, N_JUNK, N_PROMPT, 0, false);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, N_PROMPT, -1));
    after = continue_from(context, N_PROMPT, 0);
    assert_memory_equal(clean, after, N_NEXT * harness_n_vocab() * sizeof(float));
    llama_free(context);
    free(clean);
    free(after);
}

static void removed_tokens_leave_no_trace(void **state)
{
    check_removal("turboquant-4");
    check_removal("turboquant-4:center=first");
    check_removal("trellis-4:center=first,norm=first");
}

static void check_clear(const char *spec)
{
    const harness_options options = { .spec = spec, .n_ctx = 512 };
    struct llama_context *context = prompted(&options);
    float *first = continue_from(context, N_PROMPT, 0), *second;

    llama_memory_clear(llama_get_memory(context), true);
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    second = continue_from(context, N_PROMPT, 0);
    assert_memory_equal(first, second, N_NEXT * harness_n_vocab() * sizeof(float));
    llama_free(context);
    free(first);
    free(second);
}

static void clear_starts_over(void **state)
{
    check_clear("turboquant-4");
    check_clear("int-4:axis=channel,center=first,recent=64");
}

static void drop_start(struct llama_context *context)
{
    llama_memory_t memory = llama_get_memory(context);

    assert_true(llama_memory_can_shift(memory));
    assert_true(llama_memory_seq_rm(memory, 0, 4, 4 + N_DROP));
    llama_memory_seq_add(memory, 0, 4 + N_DROP, N_PROMPT, -N_DROP);
}

/* llama.cpp rotates its f16 keys and rounds them to f16 once more, and so does kvant. As for logits
 * without a shift, both lie within llama.cpp's rounding of a cache in f32 with the same shift.
 * Without the rotation, the positions of keys would be off by N_DROP, which costs far more. */
static void shifted_context_is_stock_within_rounding(void **state)
{
    const harness_options kvant = { .spec = "f16", .n_ctx = 512 }, stock = { .n_ctx = 512 };
    double rounding = stock_rounding(drop_start, N_PROMPT - N_DROP), difference;
    struct llama_context *context;
    float *logits[2];

    for (int i = 0; i < 2; i++) {
        context = prompted(i ? &kvant : &stock);
        drop_start(context);
        logits[i] = continue_from(context, N_PROMPT - N_DROP, 0);
        llama_free(context);
    }
    difference = rms_difference(logits[0], logits[1]);
    print_message("rms difference %.5f, stock's rounding %.5f\n", difference, rounding);
    assert_true(difference <= 2.1 * rounding);
    free(logits[0]);
    free(logits[1]);
}

/* In the memory of a GPU, whose device keeps no recent rows as fp16. */

static void restoring_on_a_gpu_does_not_quantise_twice(void **state)
{
    assert_true(restored_difference("turboquant-4") < sqrt(0.0095) / 16);
    assert_true(restored_difference("trellis-4:center=first,norm=first") < sqrt(0.0050));
    assert_true(restored_difference("trellis-4:transform=first") < sqrt(0.0050));
    /* groups of 32 numbers in 16 levels */
    assert_true(restored_difference("int-4:axis=channel") < sqrt(0.0062));
}

#define EMPTY_STREAM 4 /* bytes that a state of the second sequence has before its rows */

/* Rows of a state have no positions. They fill blocks next to a prompt's blocks, with the prompt's
 * matrix but another centre, also when the blocks are new. */
static void rows_are_restored_beside_a_prompt(void **state)
{
    const harness_options options = { .spec = "trellis-4:transform=first",
                                      .n_ctx = 1024,
                                      .n_seq = 2 };
    struct llama_context *context = prompted(&options);
    uint8_t *first, *again[2];
    size_t size;

    free(continue_from(context, N_PROMPT, 0));
    first = harness_save_state(context, &size);
    for (int i = 0; i < 2; i++) {
        again[i] = malloc(size);
        assert_non_null(again[i]);
        assert_int_equal(llama_state_seq_set_data(context, first, size, 1), size);
        assert_int_equal(llama_state_seq_get_data(context, again[i], size, 1), size);
    }
    assert_memory_equal(again[0], again[1], size);
    assert_true(harness_state_difference(first, again[0] + EMPTY_STREAM, size - EMPTY_STREAM) <
                sqrt(0.0050));
    llama_free(context);
    free(first);
    free(again[0]);
    free(again[1]);
}

static void clear_on_a_gpu_starts_over(void **state)
{
    check_clear("turboquant-4");
    check_clear("trellis-4:center=first,norm=first");
    check_clear("trellis-4:transform=first");
    check_clear("int-4:axis=channel,center=first,norm=first");
}

static void removal_on_a_gpu_leaves_no_trace(void **state)
{
    check_removal("turboquant-4");
    check_removal("trellis-4:center=first,norm=first");
    check_removal("trellis-4:transform=first");
    check_removal("int-4:axis=channel,recent=128");
}

static void copy_on_a_gpu_is_exact(void **state)
{
    check_stream_copy("turboquant-4");
    check_stream_copy("turboquant-4:center=first,norm=first");
    check_stream_copy("turboquant-4:transform=first");
    check_stream_copy("int-4:axis=channel,sink=32");
}

/* Difference between llama.cpp's logits and kvant's, with a shift or without. */
static double difference_to_stock(const char *spec, void (*change)(struct llama_context *),
                                  llama_pos pos)
{
    const harness_options options[] = { { .spec = spec, .n_ctx = 512 }, { .n_ctx = 512 } };
    float *logits[2];
    double difference;

    for (int i = 0; i < 2; i++) {
        struct llama_context *context = prompted(&options[i]);
        if (change != NULL)
            change(context);
        logits[i] = continue_from(context, pos, 0);
        llama_free(context);
    }
    difference = rms_difference(logits[0], logits[1]);
    free(logits[0]);
    free(logits[1]);
    return difference;
}

/* Shifted keys are quantised twice, which at most doubles the error. At wrong positions they would
 * cost far more. */
static void shift_on_a_gpu_costs_one_quantisation(void **state)
{
    double plain = difference_to_stock("int-8", NULL, N_PROMPT);
    double shifted = difference_to_stock("int-8", drop_start, N_PROMPT - N_DROP);

    print_message("rms difference to stock %.5f, shifted %.5f\n", plain, shifted);
    assert_true(shifted <= 2 * plain);
}

/* Logits from a state of one context that another context restored. */
static float *continued(const harness_options *from, const harness_options *to)
{
    struct llama_context *context = prompted(from);
    float *logits;
    uint8_t *saved;
    size_t size;

    saved = harness_save_state(context, &size);
    llama_free(context);
    context = harness_context(to);
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 0), size);
    logits = continue_from(context, N_PROMPT, 0);
    llama_free(context);
    free(saved);
    return logits;
}

/* A state moves both ways between llama.cpp's cache and a GPU's. Quantising once more costs at most
 * as much as the first time. */
static void states_are_exchanged_with_stock(void **state)
{
    const harness_options stock = { .n_ctx = 512 }, ours = { .spec = "int-8", .n_ctx = 512 };
    double plain = difference_to_stock("int-8", NULL, N_PROMPT);
    float *logits[] = { continued(&stock, &stock), continued(&stock, &ours),
                        continued(&ours, &stock) };

    for (int i = 1; i < 3; i++) {
        double difference = rms_difference(logits[0], logits[i]);
        print_message("rms difference to stock %.5f, %s stock's state %.5f\n", plain,
                      i == 1 ? "from" : "to", difference);
        assert_true(difference > 0 && difference <= 2 * plain);
    }
    for (int i = 0; i < 3; i++)
        free(logits[i]);
}

int main(void)
{
    const struct CMUnitTest on_gpu[] = {
        cmocka_unit_test(restoring_on_a_gpu_does_not_quantise_twice),
        cmocka_unit_test(copy_on_a_gpu_is_exact),
        cmocka_unit_test(rows_are_restored_beside_a_prompt),
        cmocka_unit_test(streams_in_one_batch_agree),
        cmocka_unit_test(unified_copy_agrees),
        cmocka_unit_test(removal_on_a_gpu_leaves_no_trace),
        cmocka_unit_test(clear_on_a_gpu_starts_over),
        cmocka_unit_test(shift_on_a_gpu_costs_one_quantisation),
        cmocka_unit_test(states_are_exchanged_with_stock),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f16_state_is_exact),
        cmocka_unit_test(restoring_does_not_quantise_twice),
        cmocka_unit_test(copy_between_streams_is_exact),
        cmocka_unit_test(streams_in_one_batch_agree),
        cmocka_unit_test(unified_copy_agrees),
        cmocka_unit_test(removed_tokens_leave_no_trace),
        cmocka_unit_test(clear_starts_over),
        cmocka_unit_test(shifted_context_is_stock_within_rounding),
    };

    return harness_on_gpu() ? cmocka_run_group_tests(on_gpu, start, harness_stop)
                            : cmocka_run_group_tests(tests, start, harness_stop);
}
