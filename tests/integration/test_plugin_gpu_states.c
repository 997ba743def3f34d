/* test_plugin_gpu_states.c - saved states of caches in GPU memory, on the mock of a GPU or on a
 * GPU: codes that come back bit for bit, and rows that are decoded. */
#define _GNU_SOURCE

#include "saved_fixture.h"
#include "mock_control.h"
#include "../../integrations/llama.cpp/kv_size.h"

static const char *const specs[] = { "", "trellis-4:transform=first", "turboquant-4",
                                     "trellis-4:center=first" };

enum { N_SPECS = sizeof(specs) / sizeof(specs[0]) };

/* Whether values have a centre that the cache learns. A GPU has one for all values of a layer. */
static bool learns_values(const char *spec)
{
    return strchr(spec, ':') != NULL;
}

/* The bytes of the cache when `share` of its cells are written. On a GPU all exact pages are there.
 * */
static double live_bytes(double share)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), "kvant_kv_size");
    kvp_kv_size size = { .size = sizeof(size) };
    kvp_kv_size_fn *get;

    memcpy(&get, &symbol, sizeof(get));
    assert_true(get(true, &size));
    return (size.bytes - size.exact - size.transforms) * share + size.exact;
}

CASE(states_are_as_small_as_caches)
{
    static const char *const presets[] = { "balanced", "small", "quality" };

    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++) {
        const harness_options options = { .spec = "", .n_ctx = 2048 };
        struct llama_context *context;
        double live;
        saved s;

        setenv("KVANT_PRESET", presets[i], 1);
        context = prompted(&options, 1900);
        live = live_bytes(1900. / 2048);
        s = save(context, 0);
        print_message("%s: state %zu bytes, cache %.0f\n", presets[i], s.size, live);
        assert_true((double)s.size <= 1.15 * live);
        llama_free(context);
        drop(&s);
    }
    unsetenv("KVANT_PRESET");
}

/* Other contexts, of the same shape and larger. The restored sequence is saved with the same
 * bytes. */
CASE(other_contexts_restore_the_same_bits)
{
    static const uint32_t sizes[] = { 2048, 3072 };

    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options from = { .spec = specs[i], .n_ctx = sizes[0] };
        struct llama_context *context = prompted(&from, N_LONG);
        saved s = save(context, 0), again;
        float *original = continue_from(context, N_LONG, 0);

        llama_free(context);
        for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
            const harness_options to = { .spec = specs[i], .n_ctx = sizes[k] };
            context = harness_context(&to);
            assert_int_equal(restore(context, &s, 0), s.size);
            again = save(context, 0);
            assert_int_equal(again.size, s.size);
            assert_continues_after(context, N_LONG, 0, original, specs[i]);
            assert_memory_equal(s.data, again.data, s.size);
            llama_free(context);
            drop(&again);
        }
        drop(&s);
        free(original);
    }
}

/* A slot gets its prompt back, after other prompts took its cells. Other contexts are larger, or
 * have several streams, of which another one gets the state next to the tokens of a neighbour. */
CASE(slots_get_their_prompts_back)
{
    static const int n_other[] = { 1, 130, 1500 };

    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options one = { .spec = specs[i], .n_ctx = 2048 };
        struct llama_context *context = prompted(&one, N_LONG);
        saved s = save(context, 0);
        float *original = continue_from(context, N_LONG, 0);

        for (size_t k = 0; k < sizeof(n_other) / sizeof(n_other[0]); k++) {
            assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
            harness_decode(context, tokens + 500, n_other[k], 0, 0, false);
            assert_int_equal(restore(context, &s, 0), s.size);
            assert_continues_after(context, N_LONG, 0, original, specs[i]);
        }
        llama_free(context);
        drop(&s);
        free(original);
    }
}

/* The neighbour's logits with llama.cpp's own rows. */
static float *exact_neighbour(void)
{
    const harness_options two = { .spec = "f16", .n_ctx = 2 * 2048, .n_seq = 2 };
    struct llama_context *context = harness_context(&two);
    float *logits;

    harness_decode(context, tokens + 300, N_OTHER, 0, 1, false);
    logits = continue_from(context, N_OTHER, 1);
    llama_free(context);
    return logits;
}

/* A context in which sequence 1 has tokens, and the logits of its next tokens. With `prompt`,
 * sequence 0 had the tokens of the prompt before. */
static struct llama_context *with_neighbour(const harness_options *two, bool prompt, float **logits)
{
    struct llama_context *context = harness_context(two);

    if (prompt)
        harness_decode(context, tokens, N_LONG, 0, 0, false);
    harness_decode(context, tokens + 300, N_OTHER, 0, 1, false);
    *logits = continue_from(context, N_OTHER, 1);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, N_OTHER, -1));
    return context;
}

/* A state is restored next to a sequence in another stream. If the cache has the state's transforms
 * already, the neighbour keeps its bits. Otherwise its exact rows, which have no transform yet,
 * take the restored one. That costs them one more rounding to fp16, of which they have had three.
 * Values with another centre are decoded (test_plugin_gpu_unified.c). */
CASE(slots_leave_neighbours_their_rows)
{
    const size_t n = N_NEXT * harness_n_vocab();
    float *exact = exact_neighbour();

    for (size_t i = 0; i < N_SPECS; i++)
        for (int same = 0; same < 2; same++) {
            const harness_options two = { .spec = specs[i], .n_ctx = 2 * 2048, .n_seq = 2 };
            struct llama_context *context = prompted(&two, N_LONG);
            saved s = save(context, 0);
            float *original = continue_from(context, N_LONG, 0), *undisturbed, *after;

            llama_free(context);
            context = with_neighbour(&two, same, &undisturbed);
            assert_int_equal(restore(context, &s, 0), s.size);
            if (same || !learns_values(specs[i]))
                assert_continues_after(context, N_LONG, 0, original, specs[i]);
            after = continue_from(context, N_OTHER, 1);
            print_message("%s: errors %g, %g\n", specs[i],
                          harness_rms_difference(exact, undisturbed, n),
                          harness_rms_difference(exact, after, n));
            if (same)
                assert_memory_equal(after, undisturbed, logits_bytes());
            assert_true(harness_rms_difference(exact, after, n) <=
                        2 * harness_rms_difference(exact, undisturbed, n));
            llama_free(context);
            drop(&s);
            free(original);
            free(undisturbed);
            free(after);
        }
    free(exact);
}

/* Decodes n tokens in batches of 500. */
static void decode_long(struct llama_context *context, const llama_token *of, int n,
                        llama_seq_id seq)
{
    for (int i = 0; i < n; i += 500)
        harness_decode(context, of + i, n - i < 500 ? n - i : 500, i, seq, false);
}

/* Two states with transforms of their own come back to the streams of one context, next to rows
 * that learned a third one. The longest one has transforms of further position buckets, too. Before
 * they are saved, another sequence takes the pages of rows that are neither first nor newest,
 * because there are not enough pages for the exact blocks of all sequences. */
CASE(caches_hold_several_transforms)
{
    enum { N_OF = 2, LENGTH = 3300 };
    const harness_options three = { .spec = "", .n_ctx = 3 * 4608, .n_seq = 3 };
    static const int lengths[N_OF] = { N_LONG, LENGTH };
    static llama_token several[N_OF][LENGTH + N_NEXT];
    struct llama_context *context;
    float *original[N_OF], *logits;
    saved s[N_OF];

    for (int k = 0; k < N_OF; k++) {
        for (int i = 0; i < LENGTH + N_NEXT; i++)
            several[k][i] = tokens[(i * (k == 0 ? 1 : 7) + k * 100) % MOST];
        context = harness_context(&three);
        decode_long(context, several[k], lengths[k], 0);
        decode_long(context, tokens, N_LONG, 2);
        s[k] = save(context, 0);
        original[k] = malloc(logits_bytes());
        assert_non_null(original[k]);
        harness_decode(context, several[k] + lengths[k], N_NEXT, lengths[k], 0, true);
        memcpy(original[k], llama_get_logits(context), logits_bytes());
        llama_free(context);
    }
    context = harness_context(&three);
    decode_long(context, tokens + 400, N_LONG, 2);
    for (int k = 0; k < N_OF; k++)
        assert_int_equal(restore(context, &s[k], k), s[k].size);
    for (int k = 0; k < N_OF; k++) {
        harness_decode(context, several[k] + lengths[k], N_NEXT, lengths[k], k, true);
        logits = llama_get_logits(context);
        if (memcmp(logits, original[k], logits_bytes()) != 0)
            fail_msg("state %d: rms difference %g", k,
                     harness_rms_difference(logits, original[k], N_NEXT * harness_n_vocab()));
        free(original[k]);
        drop(&s[k]);
    }
    llama_free(context);
}

/* Bytes of all parts are damaged, states are cut short, and codecs differ. Another sequence stays,
 * and the server goes on. */
CASE(damaged_and_foreign_states_are_refused)
{
    const harness_options two = { .spec = "", .n_ctx = 4096, .n_seq = 2 },
                          other = { .spec = "turboquant-4", .n_ctx = 4096, .n_seq = 2 };
    struct llama_context *context = prompted(&two, N_LONG);
    saved s = save(context, 0);
    float *undisturbed, *after;

    llama_free(context);
    context = harness_context(&two);
    harness_decode(context, tokens, N_OTHER, 0, 1, false);
    undisturbed = continue_from(context, N_OTHER, 1);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, N_OTHER, -1));
    for (size_t at = 0; at < s.size; at += at < 200 ? 7 : s.size / 23) {
        s.data[at] ^= 0x10;
        assert_int_equal(restore(context, &s, 0), 0);
        s.data[at] ^= 0x10;
        assert_int_equal(llama_state_seq_set_data(context, s.data, at, 0), 0);
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0), -1);
    }
    after = continue_from(context, N_OTHER, 1);
    assert_memory_equal(undisturbed, after, logits_bytes());
    llama_free(context);
    free(after);
    free(undisturbed);
    context = harness_context(&other);
    harness_decode(context, tokens, N_OTHER, 0, 1, false);
    undisturbed = continue_from(context, N_OTHER, 1);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, N_OTHER, -1));
    assert_int_equal(restore(context, &s, 0), 0);
    after = continue_from(context, N_OTHER, 1);
    assert_memory_equal(undisturbed, after, logits_bytes());
    llama_free(context);
    free(after);
    free(undisturbed);
    drop(&s);
}

/* The state of a cache that is f16 in place has llama.cpp's own rows. A state of codes comes back
 * to such a cache as codes. */
CASE(caches_in_place_restore_codes)
{
    const harness_options one = { .spec = "", .n_ctx = 2048 };
    struct llama_context *context = prompted(&one, N_LONG);
    saved s = save(context, 0), rows;
    float *original = continue_from(context, N_LONG, 0), *first, *after;

    llama_free(context);
    setenv("KVANT_EXACT", "auto", 1);
    context = harness_context(&one);
    harness_decode(context, tokens, N_OTHER, 0, 0, false);
    rows = save(context, 0);
    first = continue_from(context, N_OTHER, 0);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    assert_int_equal(restore(context, &s, 0), s.size);
    after = continue_from(context, N_LONG, 0);
    assert_memory_equal(original, after, logits_bytes());
    free(after);
    llama_free(context);
    context = harness_context(&one);
    assert_int_equal(restore(context, &rows, 0), rows.size);
    after = continue_from(context, N_OTHER, 0);
    assert_memory_equal(first, after, logits_bytes());
    llama_free(context);
    setenv("KVANT_EXACT", "0", 1);
    drop(&s);
    drop(&rows);
    free(original);
    free(first);
    free(after);
}

/* Shifted keys are decoded. Their saved shifts are those of the rows that llama.cpp would read. */
CASE(shifted_keys_are_decoded)
{
    const harness_options one = { .spec = "trellis-4:transform=first", .n_ctx = 2048 };
    const int by = -256, n = N_LONG + by;
    struct llama_context *context = prompted(&one, N_LONG);
    llama_memory_t memory = llama_get_memory(context);
    float *original, *after;
    saved s;

    assert_true(llama_memory_seq_rm(memory, 0, 64, 64 - by));
    llama_memory_seq_add(memory, 0, 64 - by, -1, by);
    harness_decode(context, tokens + N_LONG, 1, n, 0, false);
    assert_true(llama_memory_seq_rm(memory, 0, n, -1));
    s = save(context, 0);
    original = continue_from(context, n, 0);
    llama_free(context);
    context = harness_context(&one);
    assert_int_equal(restore(context, &s, 0), s.size);
    after = continue_from(context, n, 0);
    print_message("shifted keys: difference %g of rms %g\n",
                  harness_rms_difference(original, after, N_NEXT * harness_n_vocab()),
                  harness_rms(original, N_NEXT * harness_n_vocab()));
    assert_true(harness_rms_difference(original, after, N_NEXT * harness_n_vocab()) <
                .1 * harness_rms(original, N_NEXT * harness_n_vocab()));
    llama_free(context);
    drop(&s);
    free(original);
    free(after);
}

/* Attention of the last graph transforms queries for keys with a matrix. */
static bool has_matrix(void)
{
    return last_attention()->q_matrix_stride > 0;
}

/* A server restores the slots of its last run, before any graph has shown how RoPE rotates keys.
 * The states hold f16 rows, so the rows of the first slot are written when those of the second one
 * come. Later prompts still learn a matrix. */
CASE(slots_that_come_before_a_graph_leave_learning_to_prompts)
{
    const harness_options two = { .spec = "", .n_ctx = 2 * 2048, .n_seq = 2 };
    struct llama_context *context;
    saved s;

    if (!harness_has_mock())
        skip();
    setenv("KVANT_STATES", "rows", 1);
    context = prompted(&two, N_LONG);
    assert_true(has_matrix());
    s = save(context, 0);
    llama_free(context);
    context = harness_context(&two);
    for (int i = 0; i < 2; i++)
        assert_int_equal(restore(context, &s, i), s.size);
    harness_decode(context, tokens + N_LONG, 1, N_LONG, 0, false);
    assert_false(has_matrix());
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, -1, -1));
    decode_long(context, tokens, N_LONG, 1);
    assert_true(has_matrix());
    llama_free(context);
    setenv("KVANT_STATES", "codes", 1);
    drop(&s);
}

RUN_CASES(start_on_gpu, harness_stop)
