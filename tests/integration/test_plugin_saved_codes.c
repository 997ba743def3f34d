/* test_plugin_saved_codes.c - states whose rows are codes (KVANT_STATES=codes): exact restores into
 * any cells, memory, and states that are damaged or belong elsewhere. llama.cpp's functions are
 * left alone, so states have their nominal size; test_plugin_packed.c has packed states, and
 * test_plugin_state.c states of fp16 rows. */
#define _GNU_SOURCE /* mincore, memmem */

#include <unistd.h>

#include "saved_fixture.h"
#include "../../integrations/llama.cpp/state_format.h"

static int start(void **state)
{
    int result;

    setenv("KVANT_STATES", "rows", 1); /* llama.cpp's functions are left alone */
    result = harness_start(state);
    if (result == 0)
        harness_tokens(tokens, MOST);
    setenv("KVANT_STATES", "codes", 1);
    return result;
}

/* Codes of rows with and without matrices, codes of groups of rows, and the default preset with its
 * exact rows. */
static const char *const specs[] = { "trellis-4:transform=first", "turboquant-4",
                                     "int-4:axis=channel,group=32,sink=4,recent=64", "" };

/* The next tokens of the saved context and of the restored one get the same bits. There are enough
 * tokens for a record; shorter states are fp16 rows. */
static void check_restore(const harness_options *from, const harness_options *to, int n,
                          llama_seq_id seq)
{
    struct llama_context *context = prompted(from, n);
    saved s = save(context, 0), again;
    float *original = continue_from(context, n, 0), *restored;

    llama_free(context);
    context = harness_context(to);
    assert_int_equal(restore(context, &s, seq), s.size);
    again = save(context, seq);
    restored = continue_from(context, n, seq);
    if (memcmp(original, restored, logits_bytes()) != 0)
        fail_msg("%s after %d tokens: rms difference %g", from->spec, n,
                 harness_rms_difference(original, restored, N_NEXT * harness_n_vocab()));
    llama_free(context);
    drop(&s);
    drop(&again);
    free(original);
    free(restored);
}

CASE(restored_logits_have_the_same_bits)
{
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        const harness_options one = { .spec = specs[i], .n_ctx = 1024 },
                              larger = { .spec = specs[i], .n_ctx = 1536 };
        if (specs[i][0] != '\0') /* a preset keeps all 160 rows exact: the state is fp16 rows */
            check_restore(&one, &one, 160, 0);
        check_restore(&one, &larger, N_PROMPT, 0);
    }
}

CASE(other_slots_and_streams_restore_alike)
{
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++)
        for (int unified = 0; unified < 2; unified++) {
            const harness_options two = {
                .spec = specs[i], .n_ctx = 2048, .n_seq = 2, .unified = unified
            };
            check_restore(&two, &two, N_PROMPT, 1);
        }
}

/* A sequence is restored next to a second one. The answers of both keep their bits. */
CASE(neighbours_keep_their_bits)
{
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i += 3) {
        const harness_options two = {
            .spec = specs[i], .n_ctx = 2048, .n_seq = 2, .unified = true
        };
        struct llama_context *context = prompted(&two, N_PROMPT);
        saved s = save(context, 0);
        float *first = continue_from(context, N_PROMPT, 0), *second, *other, *undisturbed;

        llama_free(context);
        context = harness_context(&two);
        harness_decode(context, tokens, N_OTHER, 0, 1, false);
        assert_int_equal(restore(context, &s, 0), s.size);
        other = continue_from(context, N_OTHER, 1);
        second = continue_from(context, N_PROMPT, 0);
        llama_free(context);
        context = harness_context(&two);
        harness_decode(context, tokens, N_OTHER, 0, 1, false);
        undisturbed = continue_from(context, N_OTHER, 1);
        assert_memory_equal(first, second, logits_bytes());
        assert_memory_equal(other, undisturbed, logits_bytes());
        llama_free(context);
        drop(&s);
        free(first);
        free(second);
        free(other);
        free(undisturbed);
    }
}

enum { RUN = 25 }; /* cells of a sequence whose cells are cut */

/* The state of the same rows, decoded: KVANT_STATES=rows. */
static saved decoded(const harness_options *options, const saved *codes)
{
    struct llama_context *context;
    saved rows;

    setenv("KVANT_STATES", "rows", 1);
    context = harness_context(options);
    assert_int_equal(restore(context, codes, 0), codes->size);
    rows = save(context, 0);
    llama_free(context);
    setenv("KVANT_STATES", "codes", 1);
    return rows;
}

/* Checks that n rows lost no more between `before` and `after` than one encoding costs. `exact` are
 * the rows before their first encoding. The same codec encodes them again with as many bits, so the
 * second error is about as large as the first one. The bound is twice its mean square, which is the
 * sum of two such errors. A run has thousands of numbers, so chance matters little. A lost row of
 * average size would be 1/25 of its run's square, which is above the bound. In later layers,
 * `exact` also differs by the effect of errors in earlier layers. */
static void check_one_encoding(const saved *exact, const saved *before, const saved *after,
                               size_t n)
{
    const size_t layers = (size_t)llama_model_n_layer(harness_model()),
                 run = RUN * harness_row_bytes();

    for (size_t i = 0; i < 2 * layers * (n / RUN); i++) {
        const size_t layer = i / (n / RUN) % layers, first_row = i % (n / RUN) * RUN;
        const bool values = i >= layers * (n / RUN);
        const size_t at =
            harness_rows_at(before->size, n, values, layer) + first_row * harness_row_bytes();
        const double first = harness_state_difference(before->data + at, exact->data + at, run),
                     second = harness_state_difference(before->data + at, after->data + at, run);
        if (!(second * second < 2 * first * first))
            fail_msg("%s of layer %zu from row %zu on: second error %g, first error %g",
                     values ? "values" : "keys", layer, first_row, second, first);
    }
}

/* Two sequences whose tokens alternate have their cells in short runs. A state of one run is
 * restored into such cells with the same bits. The state of the cut sequence has no records,
 * because they would be longer than the rows. So its bytes are the decoded rows, none changed.
 * Restored into one run, they are encoded once more. The error is measured in the rows, because the
 * difference of logits that it causes may by chance be several times as large. */
CASE(runs_may_be_cut_differently)
{
    const harness_options two = { .spec = "trellis-4:transform=first",
                                  .n_ctx = 2048,
                                  .n_seq = 2,
                                  .unified = true },
                          plain = { .spec = "f16", .n_ctx = 1024 };
    struct llama_context *whole = prompted(&two, 300), *cut = harness_context(&two),
                         *f16 = prompted(&plain, 300);
    saved of_whole = save(whole, 0), of_cut, again, exact = save(f16, 0), before, after;
    float *original = continue_from(whole, 300, 0), *restored;
    size_t at;

    llama_free(f16);
    /* Runs of 25 cells belong to the two sequences in turn. Then sequence 1 leaves its cells. */
    for (int i = 0; i < 300; i += RUN) {
        harness_decode(cut, tokens + i, RUN, i, 1, false);
        harness_decode(cut, tokens + i, RUN, i, 0, false);
    }
    assert_true(llama_memory_seq_rm(llama_get_memory(cut), 1, -1, -1));
    assert_int_equal(restore(cut, &of_whole, 1), of_whole.size);
    restored = continue_from(cut, 300, 1);
    assert_memory_equal(original, restored, logits_bytes());
    assert_true(llama_memory_seq_rm(llama_get_memory(cut), 1, 300, -1));
    of_cut = save(cut, 1);
    llama_free(cut);
    before = decoded(&two, &of_whole);
    assert_int_equal(of_cut.size, before.size);
    at = harness_rows_at(before.size, 300, false, 0);
    assert_memory_equal(of_cut.data + at, before.data + at, before.size - at);
    llama_memory_clear(llama_get_memory(whole), true);
    assert_int_equal(restore(whole, &of_cut, 0), of_cut.size);
    again = save(whole, 0);
    free(restored);
    restored = continue_from(whole, 300, 0); /* NaN where a row was refused */
    assert_true(isfinite(harness_rms(restored, N_NEXT * harness_n_vocab())));
    llama_free(whole);
    after = decoded(&two, &again);
    check_one_encoding(&exact, &before, &after, 300);
    drop(&of_whole);
    drop(&of_cut);
    drop(&again);
    drop(&exact);
    drop(&before);
    drop(&after);
    free(original);
    free(restored);
}

static size_t cache_bytes(void)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), "kvant_kv_memory");
    size_t (*memory)(size_t *);

    memcpy(&memory, &symbol, sizeof(memory));
    return memory(NULL);
}

/* A state takes about as much memory as the cache that it was saved from. Each tensor of the state
 * ends in a partly used page; the cache has one too. */
CASE(states_take_no_more_memory_than_caches)
{
    static const char *const presets[] = { "small", "quality" };

    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++) {
        const harness_options options = { .spec = "", .n_ctx = 2048 };
        struct llama_context *context;
        size_t live, taken;
        saved s;

        setenv("KVANT_PRESET", presets[i], 1);
        context = prompted(&options, 1900);
        live = cache_bytes();
        s = save(context, 0);
        taken = resident(&s);
        print_message("%s: state %zu bytes, in memory %zu, cache %zu\n", presets[i], s.size, taken,
                      live);
        assert_true((double)taken < 1.15 * (double)live);
        assert_true((double)taken < .5 * (double)s.size);
        llama_free(context);
        drop(&s);
    }
    unsetenv("KVANT_PRESET");
}

/* Damages bytes of the records. llama.cpp is not told, so it takes the state; the damaged rows are
 * NaN, and the other sequence keeps its bits. */
CASE(damaged_rows_are_nan)
{
    const harness_options two = { .spec = "", .n_ctx = 2048, .n_seq = 2, .unified = true };
    struct llama_context *context = prompted(&two, N_PROMPT);
    saved s = save(context, 0);
    uint64_t rng = 5;
    float *undisturbed, *got;

    llama_free(context);
    context = harness_context(&two);
    harness_decode(context, tokens, N_OTHER, 0, 1, false);
    undisturbed = continue_from(context, N_OTHER, 1);
    for (int i = 0; i < 10; i++) {
        const size_t row = s.size / N_PROMPT / 64 * 64;
        size_t at = s.size / 20 * (size_t)i * 2 % (s.size - row) + 4000;
        while (s.data[at] == 0) /* the zeros behind a record do not count */
            at = (at + 997 + (size_t)(8 * fabsf(harness_random(&rng)))) % s.size;
        if (at < 16 * N_PROMPT)
            continue; /* llama.cpp's own bytes */
        s.data[at] ^= 0x10;
        assert_int_equal(restore(context, &s, 0), s.size);
        got = continue_from(context, N_PROMPT, 0);
        assert_true(isnan(got[0]));
        free(got);
        s.data[at] ^= 0x10;
        assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
        assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, N_OTHER, -1));
        got = continue_from(context, N_OTHER, 1);
        assert_memory_equal(undisturbed, got, logits_bytes());
        free(got);
    }
    assert_int_equal(restore(context, &s, 0), s.size);
    got = continue_from(context, N_PROMPT, 0);
    assert_true(isfinite(got[0]));
    free(got);
    assert_int_equal(llama_state_seq_set_data(context, s.data, s.size / 2, 0), 0);
    free(undisturbed);
    llama_free(context);
    drop(&s);
}

/* Where the first record of the state begins. */
static uint8_t *first_record(const saved *s)
{
    uint8_t *at = memmem(s->data, s->size, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES);

    assert_non_null(at);
    return at;
}

/* Heads and lists that cannot be, with the right checksum. */
CASE(impossible_lists_are_refused)
{
    enum { N_CASES = 13 };
    const harness_options options = { .spec = "trellis-4", .n_ctx = 1024 };
    struct llama_context *context = prompted(&options, N_PROMPT);
    saved s = save(context, 0);
    uint8_t *at = first_record(&s), *copy = malloc(s.size);

    assert_non_null(copy);
    memcpy(copy, s.data, s.size);
    for (int i = 0; i < N_CASES; i++) {
        kvp_state_header head;
        kvp_state_block block;
        kvp_state_run run;
        uint8_t *lists = at + sizeof(head), *runs;
        float *logits;
        memcpy(s.data, copy, s.size);
        memcpy(&head, at, sizeof(head));
        runs = lists + head.n_blocks * sizeof(block);
        memcpy(&block, lists, sizeof(block));
        memcpy(&run, runs, sizeof(run));
        run.block = i == 0 ? UINT32_MAX : i == 1 ? head.n_blocks : i == 2 ? 1 : 0;
        run.first = i == 3 ? 1 : i == 4 ? 255 : 0;
        run.count = i == 5 ? 0 : i == 6 ? 255 : i == 7 ? 63 : 64;
        block.slots ^= i == 8;
        head.n_runs -= i == 9;
        head.n_blocks -= i == 10;
        head.n_cells -= i == 11;
        if (i == 12) { /* one more block, which has no slot */
            memmove(runs + sizeof(block), runs, head.bytes - (size_t)(runs - at));
            memset(runs, 0, sizeof(block));
            runs += sizeof(block);
            head.bytes += sizeof(block);
            head.n_blocks++;
        }
        memcpy(runs, &run, sizeof(run));
        memcpy(lists, &block, sizeof(block));
        head.check = kvp_state_check(&head, lists);
        memcpy(at, &head, sizeof(head));
        assert_int_equal(restore(context, &s, 0), s.size);
        logits = continue_from(context, N_PROMPT, 0);
        if (!isnan(logits[0]))
            fail_msg("case %d was accepted", i);
        free(logits);
    }
    free(copy);
    llama_free(context);
    drop(&s);
}

/* Another codec, and llama.cpp's own f16 cache, do not take the rows for theirs. */
CASE(foreign_caches_get_nan)
{
    const harness_options options = { .spec = "trellis-4:transform=first", .n_ctx = 1024 },
                          others[] = { { .spec = "turboquant-4", .n_ctx = 1024 },
                                       { .n_ctx = 1024 } };
    struct llama_context *context = prompted(&options, N_PROMPT);
    saved s = save(context, 0);

    llama_free(context);
    for (size_t i = 0; i < 2; i++) {
        float *logits;
        context = harness_context(&others[i]);
        assert_int_equal(restore(context, &s, 0), s.size);
        logits = continue_from(context, N_PROMPT, 0);
        for (size_t j = 0; j < N_NEXT * harness_n_vocab(); j += harness_n_vocab())
            assert_true(isnan(logits[j]));
        free(logits);
        llama_free(context);
    }
    drop(&s);
}

/* States of fp16 rows are restored whatever the setting is, and states of codes, too. */
CASE(restoring_needs_no_setting)
{
    const harness_options options = { .spec = "f16", .n_ctx = 1024 },
                          compressed = { .spec = "trellis-4", .n_ctx = 1024 };
    struct llama_context *context = prompted(&options, N_PROMPT);
    saved plain, codes;
    float *original, *restored;

    plain = save(context, 0);
    original = continue_from(context, N_PROMPT, 0);
    llama_free(context);
    context = harness_context(&options);
    assert_int_equal(restore(context, &plain, 0), plain.size);
    restored = continue_from(context, N_PROMPT, 0);
    assert_memory_equal(original, restored, logits_bytes());
    llama_free(context);
    free(original);
    free(restored);
    context = prompted(&compressed, N_PROMPT);
    codes = save(context, 0);
    original = continue_from(context, N_PROMPT, 0);
    llama_free(context);
    setenv("KVANT_STATES", "rows", 1);
    context = harness_context(&compressed);
    assert_int_equal(restore(context, &codes, 0), codes.size);
    restored = continue_from(context, N_PROMPT, 0);
    assert_memory_equal(original, restored, logits_bytes());
    llama_free(context);
    setenv("KVANT_STATES", "codes", 1);
    drop(&plain);
    drop(&codes);
    free(original);
    free(restored);
}

/* A file has the same bytes as a state in memory. */
CASE(files_hold_codes)
{
    const harness_options options = { .spec = "", .n_ctx = 1024 };
    struct llama_context *context = prompted(&options, N_PROMPT);
    llama_token read[N_PROMPT];
    char path[] = "/tmp/kvant_state_XXXXXX";
    const int file = mkstemp(path);
    float *original, *restored;
    size_t n = 0;

    assert_true(file >= 0);
    close(file);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    original = continue_from(context, N_PROMPT, 0);
    llama_free(context);
    context = harness_context(&options);
    assert_true(llama_state_seq_load_file(context, path, 0, read, N_PROMPT, &n) > 0);
    assert_int_equal(n, N_PROMPT);
    restored = continue_from(context, N_PROMPT, 0);
    assert_memory_equal(original, restored, logits_bytes());
    unlink(path);
    llama_free(context);
    free(original);
    free(restored);
}

RUN_CASES(start, harness_stop)
