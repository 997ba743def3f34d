/* test_windows.c - which rows stay fp16 and for how long: sinks, recent windows, rewritten slots,
 * sequences. */
#include "tensor_fixture.h"

CASE(sinks_are_never_sealed)
{
    uint64_t rng = 31;
    fixture f = make("int-4:sink=65", 2, 5, 0);
    for (uint32_t sequence = 0; sequence < 2; sequence++)
        write_range(&f, sequence * 320, 320, 50, 2, &rng);
    for (uint32_t sequence = 0; sequence < 2; sequence++) {
        for (uint32_t page = 0; page < 5; page++)
            assert_int_equal(is_open(&f, sequence * 5 + page),
                             page < 2); /* whole pages: 65 tokens are two */
        check_slots(&f, sequence * 320, 320);
    }
    write_range(&f, 0, 320, 64, 1, &rng); /* all slots again */
    check_slots(&f, 0, 320);
    check_slots(&f, 320, 320);
    drop(&f);
}

/* With any batches, the newest tokens lie in exact pages, and a page that left the window is
 * sealed. */
CASE(recent_tokens_are_fp16)
{
    static const uint32_t windows[] = { 1, 2, 64, 65, 96, 200 };
    for (size_t w = 0; w < COUNT(windows); w++) {
        char spec[32];
        snprintf(spec, sizeof spec, "int-4:recent=%u", (unsigned)windows[w]);
        for (uint32_t batch = 1; batch <= 130; batch += 43) {
            uint64_t rng = 32;
            fixture f = make(spec, 1, 16, 0);
            for (uint32_t n = 0; n < 1000;) {
                uint32_t now = 1000 - n < batch ? 1000 - n : batch;
                write_range(&f, n, now, now, 2, &rng);
                n += now;
                for (uint32_t page = 0; page < (n + 63) / 64; page++) {
                    uint32_t last = 64 * page + 63;
                    assert_int_equal(is_open(&f, page), last >= n || n - 1 - last < windows[w]);
                }
            }
            check_slots(&f, 0, 1000);
            drop(&f);
        }
    }
}

CASE(batches_and_threads_do_not_change_bytes)
{
    static const char *const specs[] = { "turboquant-4:sink=4,recent=96",
                                         "int-2:axis=channel,recent=40" };
    static const uint32_t batches[] = { 1, 7, 64, 512 };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint8_t *first = NULL;
        for (size_t b = 0; b < COUNT(batches); b++) {
            uint64_t rng = 33;
            fixture f = make(specs[s], 1, 11, 0);
            write_range(&f, 0, 700, batches[b], (uint32_t)b + 1, &rng);
            size_t bytes = f.bytes, page = 2 * info_of(f.codecs[0]).page_bytes;
            if (!first) {
                first = malloc(bytes);
                memcpy(first, f.memory, bytes);
            }
            for (uint32_t p = 0; p < 11; p++)
                if (!is_open(&f, p))
                    assert_memory_equal(first + p * page, (uint8_t *)f.memory + p * page, page);
            drop(&f);
        }
        free(first);
    }
}

/* Writing a slot of a sealed block again changes no other slot, whichever way the tensor does
 * it. */
CASE(rewriting_a_sealed_slot_loses_nothing)
{
    static const struct {
        const char *spec;
        bool reopens;
        uint32_t first, n; /* slots that may change together with slot 74: its group */
    } cases[] = { { "int-4:sink=4", false, 74, 1 },
                  { "int-4:recent=64", true, 74, 1 },
                  { "int-4:axis=channel,group=32", true, 64, 32 },
                  { "int-3:axis=channel,group=16,recent=80", true, 64, 16 } };
    for (size_t c = 0; c < COUNT(cases); c++) {
        uint64_t rng = 34;
        fixture f = make(cases[c].spec, 1, 16, 0);
        float before[512 * 64], got[64];
        write_range(&f, 0, 512, 512, 2, &rng);
        assert_int_equal(kvant_tensor_read(f.tensor, 0, 512, before, 64), KVANT_OK);
        assert_false(is_open(&f, 1));
        write_range(&f, 74, 1, 1, 1, &rng);
        assert_int_equal(is_open(&f, 1), cases[c].reopens);
        read_slot(&f, 74, got);
        if (cases[c].reopens)
            assert_memory_equal(got, f.rows + 74 * 64, sizeof got);
        for (uint32_t i = 64; i < 128 && cases[c].reopens; i++) {
            read_slot(&f, i, got);
            for (uint32_t j = 0; i != 74 && j < 64;
                 j++) /* decoded numbers rounded to fp16: half a unit in 2^-10 */
                assert_true(fabsf(got[j] - before[i * 64 + j]) <=
                            fabsf(before[i * 64 + j]) / 2048 + 6e-8f);
        }
        /* Other blocks need the page: scattered rewrites, one to a page. */
        for (uint32_t page = 2; page < 8; page++)
            write_range(&f, page * 64 + 5, 1, 1, 1, &rng);
        assert_false(is_open(&f, 1));
        for (uint32_t i = 64; i < 128; i++) {
            read_slot(&f, i, got);
            if (i - cases[c].first >= cases[c].n)
                assert_memory_equal(got, before + i * 64, sizeof got);
        }
        drop(&f);
    }
}

/* Slots are used as a ring, as caches with a sliding window do. The newest tokens are fp16, in old
 * pages too. */
CASE(reused_slots_are_recent_again)
{
    uint64_t rng = 35;
    fixture f = make("int-4:recent=64", 1, 8, 0);
    for (uint32_t n = 0; n < 1500; n++) {
        write_range(&f, n % 512, 1, 1, 1, &rng);
        for (uint32_t i = 0; i < 64 && i <= n; i++)
            assert_true(is_open(&f, (n - i) % 512 / 64));
    }
    /* After 1500 rows the second lap ends at slot 476, so page 7 became exact again. Its last slots
     * hold the decoded rows of the previous lap as fp16. */
    check_slots(&f, 0, 476);
    for (uint32_t i = 476; i < 512; i++) {
        float got[64], want[64];
        read_slot(&f, i, got);
        through_codec(&f, f.rows + (size_t)i * 64, want);
        for (uint32_t j = 0; j < 64; j++)
            assert_true(fabsf(got[j] - want[j]) <= fabsf(want[j]) / 2048 + 6e-8f);
    }
    drop(&f);
}

/* A context shift reads all slots, changes them and writes them again, in batches that ignore page
 * borders. */
CASE(all_slots_are_rewritten)
{
    static const char *const specs[] = { "int-8:axis=channel", "int-8:recent=64,sink=4",
                                         "int-8:center=first",
                                         "int-8:axis=channel,group=16,recent=100,norm=first" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 44;
        fixture f = make(specs[s], 1, 10, 0);
        float rows[24 * 64], got[64];
        write_range(&f, 0, 600, 512, 2, &rng);
        for (uint32_t first = 0; first < 600; first += 24) {
            int64_t slots[24];
            assert_int_equal(kvant_tensor_read(f.tensor, first, 24, rows, 64), KVANT_OK);
            for (uint32_t i = 0; i < 24; i++)
                slots[i] = first + i;
            for (uint32_t j = 0; j < 24 * 64; j++)
                rows[j] = -rows[j];
            assert_int_equal(kvant_tensor_write(f.tensor, slots, 24, rows, 64, 2), KVANT_OK);
        }
        /* Numbers lie within +-4, so their range is 8, and not larger without the centre. With 8
         * bits, and scale and zero point in fp16, they err by at most half a step and 2^-11 of 8.
         * Rows are quantised twice, and a third time in groups whose slots were rewritten at two
         * times. With scales between 1 and 2 the error doubles. */
        double bound = 3 * 2 * (8 / 255.0 / 2 + 2 * 8 / 2048.0);
        for (uint32_t i = 0; i < 600; i++) {
            read_slot(&f, i, got);
            for (uint32_t j = 0; j < 64; j++)
                assert_true(fabs(got[j] + f.rows[i * 64 + j]) <= bound);
        }
        drop(&f);
    }
}

CASE(sequences_have_windows_of_their_own)
{
    uint64_t rng = 36;
    fixture f = make("int-4:sink=4,recent=96", 3, 10, 0);
    write_range(&f, 0, 400, 400, 1, &rng);
    for (uint32_t i = 0; i < 640; i += 32) { /* interleaved with the remaining sequences */
        write_range(&f, 640 + i, 32, 32, 2, &rng);
        write_range(&f, 1280 + i, 32, 32, 2, &rng);
    }
    for (uint32_t sequence = 0; sequence < 3; sequence++) {
        uint32_t n = sequence ? 640 : 400;
        for (uint32_t page = 0; page < (n + 63) / 64; page++)
            assert_int_equal(is_open(&f, sequence * 10 + page),
                             page == 0 || 64 * page + 63 >= n || n - 64 * page - 64 < 96);
        check_slots(&f, sequence * 640, n);
    }
    drop(&f);
}

CASE(refusals)
{
    fixture f = make("turboquant-4:center=first", 1, 2, 0);
    float row[WIDTH] = { 1 };
    row[7] = NAN;
    assert_int_equal(try_write(&f, 0, 1, row, 1), KVANT_ERR_NONFINITE);
    row[7] = 1e30f; /* too large for fp16, in which rows are pending */
    assert_int_equal(try_write(&f, 0, 1, row, 1), KVANT_ERR_RANGE);
    drop(&f);
}

/* Bytes: the pool has room for every sequence's window, and sinks are counted. */
CASE(memory)
{
    static const struct {
        const char *spec;
        uint32_t blocks;
    } rows[] = { { "int-4", 0 },
                 { "int-4:sink=4", 3 },
                 { "int-4:sink=65", 6 },
                 { "int-4:recent=1", 3 + 2 },
                 { "int-4:recent=65", 6 + 2 },
                 { "int-4:recent=66", 9 + 2 },
                 { "int-4:axis=channel", 3 + 2 },
                 { "int-4:center=first", 3 + 2 },
                 { "int-4:norm=first", 2 },
                 { "int-4:sink=1000", 3 * 5 } };
    for (size_t i = 0; i < COUNT(rows); i++) {
        fixture f = make(rows[i].spec, 3, 5, 0);
        size_t sealed = 3 * 5 * 2 * info_of(f.codecs[0]).page_bytes, block = 2 * 64 * 32 * 2;
        assert_int_equal(f.bytes, sealed + rows[i].blocks * block);
        drop(&f);
    }
}

/* A long write does not use the spare blocks of the pool, so their memory is never touched. One
 * page has the sink, and 96 tokens of one sequence need 3. */
CASE(long_writes_stay_in_their_window)
{
    uint64_t rng = 43;
    fixture f = make("int-4:sink=4,recent=96", 2, 10, 0);
    write_range(&f, 640, 640, 640, 2, &rng);
    size_t sealed = 2 * 10 * 2 * info_of(f.codecs[0]).page_bytes, block = 2 * 64 * 32 * 2;
    const uint8_t *open = (const uint8_t *)f.memory + sealed;
    uint32_t n_touched = 0;
    for (size_t page = 0; page < 2 + 2 * 3 + 2; page++) {
        size_t used = 0;
        for (size_t i = 0; i < block; i++)
            used += open[page * block + i] != 0;
        n_touched += used > 0;
    }
    assert_int_equal(n_touched, 1 + 3);
    drop(&f);
}

RUN_CASES(NULL, NULL)
