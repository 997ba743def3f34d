/* test_plugin_gpu_unified.c - saved states that come back next to other sequences of a unified
 * cache in GPU memory, on the mock of a GPU or on a GPU. */
#define _GNU_SOURCE

#include <fcntl.h>
#include <unistd.h>

#include "saved_fixture.h"

/* Without learned values, whose centres would differ. */
static const char *const specs[] = { "", "turboquant-4" };

enum { N_SPECS = sizeof(specs) / sizeof(specs[0]) };

/* A unified cache of three sequences. Sequences 1 and 2 have tokens, and `hole` cells between them
 * are free. The cells behind them are free, too. */
static struct llama_context *with_hole(const harness_options *options, int hole)
{
    struct llama_context *context = harness_context(options);

    harness_decode(context, tokens + 300, N_OTHER, 0, 1, false);
    if (hole > 0) {
        harness_decode(context, tokens + 700, hole, 0, 0, false);
        harness_decode(context, tokens + 200, N_OTHER, 0, 2, false);
        assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    }
    return context;
}

/* The rows of a state as fp16 after it was restored, alone or next to others. The neighbour's rows
 * stay. If they are exact and have no transform yet, they take the state's, which
 * rounds them to fp16 once more. */
static saved rows_after(const harness_options *options, int hole, const saved *s, bool alone)
{
    struct llama_context *context;
    saved rows, before = { 0 }, neighbour;

    setenv("KVANT_STATES", "rows", 1);
    context = alone ? harness_context(options) : with_hole(options, hole);
    if (!alone)
        before = save(context, 1);
    assert_int_equal(restore(context, s, 0), s->size);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0), N_LONG - 1);
    rows = save(context, 0);
    if (!alone) {
        neighbour = save(context, 1);
        assert_int_equal(before.size, neighbour.size);
        assert_true(harness_state_difference(before.data, neighbour.data, before.size) < 1e-3);
        drop(&before);
        drop(&neighbour);
    }
    llama_free(context);
    setenv("KVANT_STATES", "codes", 1);
    return rows;
}

/* The first and newest rows are exact in all caches. Up to 12 blocks are exact in a cache without
 * other sequences. With them, the older ones of these blocks are sealed, for lack of pages. */
static void assert_same_rows(const saved *a, const saved *b, const char *spec)
{
    const size_t row = harness_row_bytes(), newest = 128,
                 sealed = *spec == '\0' ? N_LONG - 12 * BLOCK : N_LONG;

    assert_int_equal(a->size, b->size);
    for (size_t i = 0; i < 2 * (size_t)llama_model_n_layer(harness_model()); i++) {
        const size_t at = harness_rows_at(a->size, N_LONG, i % 2 != 0, i / 2);
        assert_memory_equal(a->data + at, b->data + at, sealed * row);
        assert_memory_equal(a->data + at + (N_LONG - newest) * row,
                            b->data + at + (N_LONG - newest) * row, newest * row);
    }
}

/* In a unified cache with other tokens, llama.cpp's cells begin anywhere in a block, and they may
 * have gaps. Rows keep their codes in cells that the blocks fit. */
CASE(unified_caches_restore_the_same_rows)
{
    static const int holes[] = { 0, 38, 640 };

    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options three = {
            .spec = specs[i], .n_ctx = 3072, .n_seq = 3, .unified = true
        };
        struct llama_context *context = prompted(&three, N_LONG);
        saved s = save(context, 0), alone;

        llama_free(context);
        alone = rows_after(&three, 0, &s, true);
        for (size_t k = 0; k < sizeof(holes) / sizeof(holes[0]); k++) {
            saved next = rows_after(&three, holes[k], &s, false);
            print_message("%s, %d free cells between others\n", specs[i], holes[k]);
            assert_same_rows(&alone, &next, specs[i]);
            drop(&next);
        }
        drop(&s);
        drop(&alone);
    }
}

/* The neighbours' rows are llama.cpp's own f16, and go to pages with the state's transforms. */
CASE(unified_caches_in_place_restore_the_same_rows)
{
    static const int holes[] = { 0, 38, 400 };
    const harness_options three = { .spec = "", .n_ctx = 3072, .n_seq = 3, .unified = true };
    struct llama_context *context = prompted(&three, N_LONG);
    saved s = save(context, 0), alone, next;

    llama_free(context);
    alone = rows_after(&three, 0, &s, true);
    setenv("KVANT_EXACT", "auto", 1);
    for (size_t k = 0; k < sizeof(holes) / sizeof(holes[0]); k++) {
        next = rows_after(&three, holes[k], &s, false);
        assert_same_rows(&alone, &next, "");
        drop(&next);
    }
    setenv("KVANT_EXACT", "0", 1);
    drop(&s);
    drop(&alone);
}

/* A slot that has tokens gets another prompt back while a neighbour has tokens. The slot's former
 * rows are gone, although nobody told the plug-in. most: by how much the next tokens' logits may
 * differ, relative to their size. */
static void busy_slots(const char *spec, double most)
{
    const harness_options two = { .spec = spec, .n_ctx = 3072, .n_seq = 2, .unified = true };
    struct llama_context *context = prompted(&two, N_LONG);
    saved s = save(context, 0), alone = rows_after(&two, 0, &s, true), rows;
    float *original = continue_from(context, N_LONG, 0), *after;
    const size_t n = N_NEXT * harness_n_vocab();

    llama_free(context);
    setenv("KVANT_STATES", "rows", 1);
    context = harness_context(&two);
    setenv("KVANT_STATES", "codes", 1);
    harness_decode(context, tokens + 300, N_OTHER, 0, 1, false);
    harness_decode(context, tokens + 100, 500, 0, 0, false);
    for (int k = 0; k < 2; k++) { /* the second time the slot has the restored prompt */
        assert_int_equal(restore(context, &s, 0), s.size);
        rows = save(context, 0);
        assert_same_rows(&alone, &rows, spec);
        drop(&rows);
        after = continue_from(context, N_LONG, 0);
        print_message("%s: next tokens differ by %g of rms %g\n", spec,
                      harness_rms_difference(original, after, n), harness_rms(original, n));
        assert_true(harness_rms_difference(original, after, n) <= most * harness_rms(original, n));
        free(after);
    }
    llama_free(context);
    drop(&s);
    drop(&alone);
    free(original);
}

/* Without an exact part, logits differ only by the order in which attention adds up blocks. */
CASE(busy_slots_get_the_same_rows_back)
{
    busy_slots("turboquant-4", 1e-5);
}

/* Sequence 0 has a prompt in two parts. The tokens of sequence 1 lie between them, so the second
 * part begins within a block. */
static struct llama_context *with_parts(const harness_options *options)
{
    enum { FIRST = 640 };
    struct llama_context *context = harness_context(options);

    harness_decode(context, tokens, FIRST, 0, 0, false);
    harness_decode(context, tokens + 300, N_OTHER, 0, 1, false);
    harness_decode(context, tokens + FIRST, N_LONG - FIRST, FIRST, 0, false);
    return context;
}

static saved rows_of_file(const harness_options *options, const char *path, int hole, bool next)
{
    struct llama_context *context;
    static llama_token read[N_LONG];
    size_t n = 0;
    saved rows;

    setenv("KVANT_STATES", "rows", 1);
    context = next ? with_hole(options, hole) : harness_context(options);
    setenv("KVANT_STATES", "codes", 1);
    assert_true(llama_state_seq_load_file(context, path, 0, read, N_LONG, &n) > 0);
    assert_int_equal(n, N_LONG);
    assert_memory_equal(read, tokens, sizeof(read));
    rows = save(context, 0);
    llama_free(context);
    return rows;
}

/* The parts come back to cells of their own, from memory and from a file. */
CASE(prompts_in_parts_come_back)
{
    char path[] = "/tmp/kvant_parts_XXXXXX";
    const int file = mkstemp(path);

    assert_true(file >= 0);
    close(file);
    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options three = {
            .spec = specs[i], .n_ctx = 3072, .n_seq = 3, .unified = true
        };
        struct llama_context *context;
        saved s, expected, rows;

        setenv("KVANT_STATES", "rows", 1);
        context = with_parts(&three);
        setenv("KVANT_STATES", "codes", 1);
        expected = save(context, 0);
        llama_free(context);
        context = with_parts(&three);
        s = save(context, 0);
        assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_LONG) > 0);
        llama_free(context);
        for (int way = 0; way < 4; way += *specs[i] == '\0' ? 1 : 3) {
            rows = way < 2 ? rows_after(&three, 38, &s, way == 0)
                           : rows_of_file(&three, path, way == 2 ? 0 : 250, true);
            print_message("%s, way %d\n", specs[i], way);
            assert_same_rows(&expected, &rows, specs[i]);
            drop(&rows);
        }
        drop(&s);
        drop(&expected);
    }
    unlink(path);
}

/* A context in which sequence 1 has `others` tokens. */
static struct llama_context *with_neighbour(const harness_options *options, int others)
{
    struct llama_context *context = harness_context(options);

    if (others > 0)
        harness_decode(context, tokens + 300, others, 0, 1, false);
    return context;
}

/* The logits of the next tokens after the state came back to sequence 0. The neighbour has `others`
 * tokens before that, and `then` more ones afterwards. */
static float *continued_next_to(const harness_options *options, const saved *s, int others,
                                int then)
{
    struct llama_context *context = with_neighbour(options, others);
    float *logits;

    assert_int_equal(restore(context, s, 0), s->size);
    if (then > 0)
        harness_decode(context, tokens + 300 + others, then, others, 1, false);
    logits = continue_from(context, N_LONG, 0);
    llama_free(context);
    return logits;
}

/* The saved prompt lies behind full blocks of a neighbour. The restored prompt lies behind a part
 * of a block. The neighbour then fills this block, so the next tokens follow the restored prompt,
 * as they followed the saved one. Alone, they follow it, too. If the neighbour does not fill its
 * block, llama.cpp puts next tokens there. Exact rows are rounded to fp16 after they are
 * transformed, and that block has another centre. So the next tokens' own rows differ in the last
 * bit. */
CASE(next_tokens_of_the_same_block_have_the_same_logits)
{
    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options two = {
            .spec = specs[i], .n_ctx = 3072, .n_seq = 2, .unified = true
        };
        const int full = (N_OTHER + BLOCK - 1) / BLOCK * BLOCK;
        struct llama_context *context = with_neighbour(&two, full);
        float *original, *filled, *gap, *alone;
        saved s;

        prompt_into(context, N_LONG);
        s = save(context, 0);
        original = continue_from(context, N_LONG, 0);
        llama_free(context);
        filled = continued_next_to(&two, &s, N_OTHER, full - N_OTHER);
        gap = continued_next_to(&two, &s, N_OTHER, 0);
        alone = continued_next_to(&two, &s, 0, 0);
        print_message("%s: next tokens in a neighbour's block differ by %g of rms %g\n", specs[i],
                      harness_rms_difference(original, gap, N_NEXT * harness_n_vocab()),
                      harness_rms(original, N_NEXT * harness_n_vocab()));
        assert_memory_equal(original, filled, logits_bytes());
        if (harness_has_mock()) { /* a GPU adds up blocks in the order of their places */
            assert_memory_equal(original, alone, logits_bytes());
            if (*specs[i] != '\0') /* its rows have no centre */
                assert_memory_equal(original, gap, logits_bytes());
        }
        drop(&s);
        free(original);
        free(filled);
        free(gap);
        free(alone);
    }
}

/* The fillers of one restored slot are the next one's free cells. */
CASE(two_slots_get_their_rows_back)
{
    const harness_options three = { .spec = "", .n_ctx = 4096, .n_seq = 3, .unified = true };
    static const llama_seq_id slots[] = { 2, 0, 2 };
    struct llama_context *context = prompted(&three, N_LONG);
    saved s = save(context, 0), alone, rows;

    llama_free(context);
    alone = rows_after(&three, 0, &s, true);
    setenv("KVANT_STATES", "rows", 1);
    context = with_neighbour(&three, N_OTHER);
    setenv("KVANT_STATES", "codes", 1);
    for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
        assert_int_equal(restore(context, &s, slots[i]), s.size);
        for (llama_seq_id slot = 0; slot < 3; slot += 2) {
            if (llama_memory_seq_pos_max(llama_get_memory(context), slot) < 0)
                continue;
            rows = save(context, slot);
            assert_same_rows(&alone, &rows, "");
            drop(&rows);
        }
    }
    llama_free(context);
    drop(&s);
    drop(&alone);
}

/* Counts the lines that say that rows were decoded, and ends the lines. */
static int count_decoded(const harness_lines *lines)
{
    char line[512];
    int n = 0;

    harness_end_lines(lines);
    while (fgets(line, sizeof(line), lines->file) != NULL)
        n += strstr(line, "decoded and quantised once more") != NULL;
    fclose(lines->file);
    return n;
}

/* A slot gets states with transforms of their own, one after another. Each is a block shorter than
 * the one before, so a part of the former rows stays in the cache. A cache has room for six foreign
 * transforms. The seventh finds room because nobody has those rows any more. */
CASE(former_states_make_room)
{
    enum { N_OF = 7 };
    const harness_options two = { .spec = "", .n_ctx = 3072, .n_seq = 2, .unified = true };
    static llama_token others[N_LONG];
    struct llama_context *context;
    harness_lines lines;
    saved s[N_OF];

    for (int k = 0; k < N_OF; k++) {
        const int n = N_LONG - BLOCK * k;
        for (int i = 0; i < n; i++)
            others[i] = tokens[(i * (2 * k + 1) + k * 100) % MOST];
        context = harness_context(&two);
        harness_decode(context, others, 500, 0, 0, false);
        harness_decode(context, others + 500, 300, 500, 0, false);
        harness_decode(context, others + 800, n - 800, 800, 0, false);
        s[k] = save(context, 0);
        llama_free(context);
    }
    context = with_neighbour(&two, 500);
    harness_decode(context, tokens + 800, 500, 500, 1, false);
    lines = harness_begin_lines();
    for (int k = 0; k < N_OF; k++)
        assert_int_equal(restore(context, &s[k], 0), s[k].size);
    assert_int_equal(count_decoded(&lines), 0);
    llama_free(context);
    for (int k = 0; k < N_OF; k++)
        drop(&s[k]);
}

static void assert_close(const saved *a, const saved *b)
{
    assert_int_equal(a->size, b->size);
    assert_true(harness_state_difference(a->data, b->data, a->size) < .2);
}

/* Restores a state next to a neighbour. The at-th time that the GPU shall give memory meanwhile, it
 * has none. Returns whether it was asked so often. *refused: the program was told that nothing was
 * restored. */
static bool restore_without_memory(const harness_options *two, int at, const saved *s,
                                   const saved *alone, bool *refused)
{
    struct llama_context *context;
    saved before, rows;
    char number[16];
    bool failed;

    snprintf(number, sizeof(number), "%d", at);
    setenv("KVANT_STATES", "rows", 1);
    context = with_neighbour(two, N_OTHER);
    setenv("KVANT_STATES", "codes", 1);
    before = save(context, 1);
    setenv("KVANT_TEST_NO_MEMORY_AT", number, 1);
    *refused = restore(context, s, 0) == 0;
    failed = strcmp(getenv("KVANT_TEST_NO_MEMORY_AT"), "0") == 0;
    unsetenv("KVANT_TEST_NO_MEMORY_AT");
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0),
                     *refused ? -1 : N_LONG - 1);
    rows = save(context, 1);
    assert_close(&before, &rows);
    drop(&rows);
    if (*refused)
        assert_int_equal(restore(context, s, 0), s->size);
    rows = save(context, 0);
    assert_close(alone, &rows);
    drop(&rows);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 1, -1, -1));
    assert_int_equal(restore(context, s, 0), s->size);
    rows = save(context, 0);
    assert_memory_equal(alone->data, rows.data, rows.size);
    drop(&rows);
    drop(&before);
    llama_free(context);
    return failed;
}

/* Then the slot is empty, or it has its rows. If a layer has no place for the state's transforms,
 * rows of the slot and of its neighbour are quantised once more. The error of 4 bits is about a
 * tenth. Without the neighbour, the state's own bits come back. */
CASE(failures_leave_neighbours_their_rows)
{
    const harness_options two = { .spec = "", .n_ctx = 3072, .n_seq = 2, .unified = true };
    struct llama_context *context = prompted(&two, N_LONG);
    saved s = save(context, 0), alone = rows_after(&two, 0, &s, true);
    int at = 1, n_refused = 0;
    bool refused;

    llama_free(context);
    while (harness_has_mock() && restore_without_memory(&two, at, &s, &alone, &refused)) {
        n_refused += refused;
        at++;
    }
    print_message("%d times without memory, %d refused\n", at - 1, n_refused);
    assert_true(!harness_has_mock() || at > 1);
    drop(&s);
    drop(&alone);
}

/* A damaged file is refused before llama.cpp sees it. The neighbour keeps its rows, no filler
 * stays, and no layer keeps the file's transforms. With some layers' transforms, the rows of this
 * model would be decoded. */
CASE(damaged_files_leave_neighbours_their_rows)
{
    const harness_options two = { .spec = "", .n_ctx = 1536, .n_seq = 2, .unified = true };
    char path[] = "/tmp/kvant_damaged_XXXXXX";
    int file = mkstemp(path);
    struct llama_context *context;
    static llama_token read[N_LONG];
    saved alone, before, rows;
    unsigned char byte;
    size_t n, size;

    assert_true(file >= 0);
    close(file);
    harness_load_tiny("llama128");
    harness_tokens(tokens, MOST);
    context = prompted(&two, N_LONG);
    size = llama_state_seq_save_file(context, path, 0, tokens, N_LONG);
    assert_true(size > 0);
    file = open(path, O_RDWR);
    assert_true(file >= 0);
    llama_free(context);
    alone = rows_of_file(&two, path, 0, false);
    setenv("KVANT_STATES", "rows", 1);
    context = with_neighbour(&two, N_OTHER);
    setenv("KVANT_STATES", "codes", 1);
    before = save(context, 1);
    for (size_t at = 5; at < size; at += size / 7) {
        assert_int_equal(pread(file, &byte, 1, (off_t)at), 1);
        byte ^= 0x20;
        assert_int_equal(pwrite(file, &byte, 1, (off_t)at), 1);
        assert_int_equal(llama_state_seq_load_file(context, path, 0, read, N_LONG, &n), 0);
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0), -1);
        byte ^= 0x20;
        assert_int_equal(pwrite(file, &byte, 1, (off_t)at), 1);
    }
    rows = save(context, 1);
    assert_int_equal(rows.size, before.size);
    assert_memory_equal(rows.data, before.data, rows.size);
    drop(&rows);
    assert_true(llama_state_seq_load_file(context, path, 0, read, N_LONG, &n) > 0);
    rows = save(context, 0);
    assert_same_rows(&alone, &rows, "");
    llama_free(context);
    close(file);
    unlink(path);
    drop(&rows);
    drop(&alone);
    drop(&before);
    harness_load_models(getenv("KVANT_TEST_MODEL"));
    harness_tokens(tokens, MOST);
}

/* Bounds that hold for a trained model */

enum { N_SHORT = 600 };

CASE(trained_busy_slots_get_the_same_rows_back)
{
    busy_slots("", .01);
}

/* Restores a state next to `others` tokens, and compares its next tokens. preset: instead of the
 * default one; or NULL. */
static void assert_decoded(const harness_options *from, const harness_options *to,
                           const char *preset, int others, const char *what)
{
    float *exact = exact_logits(N_SHORT), *original, *after;
    struct llama_context *context;
    harness_lines lines;
    saved s;

    if (preset != NULL)
        setenv("KVANT_PRESET", preset, 1);
    context = prompted(from, N_SHORT);
    s = save(context, 0);
    original = continue_from(context, N_SHORT, 0);
    llama_free(context);
    context = with_neighbour(to, others);
    lines = harness_begin_lines();
    assert_int_equal(restore(context, &s, 0), s.size);
    assert_int_equal(count_decoded(&lines), 1);
    after = continue_from(context, N_SHORT, 0);
    assert_quantised_twice(exact, original, after, what);
    llama_free(context);
    unsetenv("KVANT_PRESET");
    drop(&s);
    free(exact);
    free(original);
    free(after);
}

/* Without free cells for fillers: the rows leave 38 cells, and their blocks need 102 fillers. */
CASE(trained_full_unified_caches_decode_rows)
{
    enum { OTHERS = 130 };
    const harness_options two = { .spec = "", .n_ctx = 768, .n_seq = 2, .unified = true },
                          large = { .spec = "", .n_ctx = 2048, .n_seq = 2, .unified = true };

    assert_decoded(&large, &two, NULL, OTHERS, "a full unified cache");
}

/* A GPU has one centre for all values of a layer. */
CASE(trained_values_with_other_centres_are_decoded)
{
    const harness_options two = { .spec = "", .n_ctx = 2048, .n_seq = 2, .unified = true };

    assert_decoded(&two, &two, "quality", N_OTHER, "quality");
}

RUN_CASES(start_on_gpu, harness_stop)
