/* test_plugin_gpu_unified.c - saved states that come back next to other sequences of a unified
 * cache in GPU memory, on the mock of a GPU or on a GPU. */
#define _GNU_SOURCE

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../choose.h"
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
static void unified_caches_restore_the_same_rows(void **state)
{
    static const int holes[] = { 0, 38, 640 };

    (void)state;
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
static void unified_caches_in_place_restore_the_same_rows(void **state)
{
    static const int holes[] = { 0, 38, 400 };
    const harness_options three = { .spec = "", .n_ctx = 3072, .n_seq = 3, .unified = true };
    struct llama_context *context = prompted(&three, N_LONG);
    saved s = save(context, 0), alone, next;

    (void)state;
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
 * rows are gone, although nobody told the plug-in. Without an exact part, the next tokens' logits
 * differ only by the order in which attention adds up blocks. */
static void busy_slots_get_the_same_rows_back(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options two = {
            .spec = specs[i], .n_ctx = 3072, .n_seq = 2, .unified = true
        };
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
            assert_same_rows(&alone, &rows, specs[i]);
            drop(&rows);
            after = continue_from(context, N_LONG, 0);
            print_message("%s: next tokens differ by %g of rms %g\n", specs[i],
                          harness_rms_difference(original, after, n), harness_rms(original, n));
            assert_true(harness_rms_difference(original, after, n) <
                        (*specs[i] == '\0' ? .01 : 1e-5) * harness_rms(original, n));
            free(after);
        }
        llama_free(context);
        drop(&s);
        drop(&alone);
        free(original);
    }
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

static saved rows_of_file(const harness_options *options, const char *path, int hole)
{
    struct llama_context *context;
    static llama_token read[N_LONG];
    size_t n = 0;
    saved rows;

    setenv("KVANT_STATES", "rows", 1);
    context = with_hole(options, hole);
    setenv("KVANT_STATES", "codes", 1);
    assert_true(llama_state_seq_load_file(context, path, 0, read, N_LONG, &n) > 0);
    assert_int_equal(n, N_LONG);
    assert_memory_equal(read, tokens, sizeof(read));
    rows = save(context, 0);
    llama_free(context);
    return rows;
}

/* The parts come back to cells of their own, from memory and from a file. */
static void prompts_in_parts_come_back(void **state)
{
    char path[] = "/tmp/kvant_parts_XXXXXX";
    const int file = mkstemp(path);

    (void)state;
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
        for (int way = 0; way < 4; way++) {
            rows = way < 2 ? rows_after(&three, 38, &s, way == 0)
                           : rows_of_file(&three, path, way == 2 ? 0 : 250);
            print_message("%s, way %d\n", specs[i], way);
            assert_same_rows(&expected, &rows, specs[i]);
            drop(&rows);
        }
        drop(&s);
        drop(&expected);
    }
    unlink(path);
}

/* Without free cells for fillers, rows are decoded and quantised once more. */
static void full_unified_caches_decode_rows(void **state)
{
    const harness_options two = { .spec = "", .n_ctx = 1408, .n_seq = 2, .unified = true },
                          large = { .spec = "", .n_ctx = 3072, .n_seq = 2, .unified = true };
    struct llama_context *context = prompted(&large, N_LONG);
    saved s = save(context, 0);
    float *exact = exact_logits(N_LONG), *original = continue_from(context, N_LONG, 0), *after;

    (void)state;
    llama_free(context);
    context = with_hole(&two, 0);
    assert_int_equal(restore(context, &s, 0), s.size);
    after = continue_from(context, N_LONG, 0);
    assert_quantised_twice(exact, original, after, "a full unified cache");
    llama_free(context);
    drop(&s);
    free(exact);
    free(original);
    free(after);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unified_caches_restore_the_same_rows),
        cmocka_unit_test(unified_caches_in_place_restore_the_same_rows),
        cmocka_unit_test(busy_slots_get_the_same_rows_back),
        cmocka_unit_test(prompts_in_parts_come_back),
        cmocka_unit_test(full_unified_caches_decode_rows),
    };

    choose_cases(argc, argv);
    return cmocka_run_group_tests(tests, start_on_gpu, harness_stop);
}
