/* test_windows.c - what stays fp16 and for how long: sinks, recent windows, rewritten cells, streams. */
#include "cells_fixture.h"

static void sinks_are_never_sealed(void **state)
{
    (void)state;
    uint64_t rng = 31;
    fixture f = make("int-4:sink=65", 2, 320, 0);
    for (uint32_t stream = 0; stream < 2; stream++)
        write_range(&f, stream * 320, 320, 50, 2, &rng);
    for (uint32_t stream = 0; stream < 2; stream++) {
        for (uint32_t page = 0; page < 5; page++)
            assert_int_equal(is_open(&f, stream, page), page < 2); /* whole pages: 65 tokens are two */
        check_cells(&f, stream, 320);
    }
    write_range(&f, 0, 320, 64, 1, &rng); /* all cells again */
    check_cells(&f, 0, 320);
    check_cells(&f, 1, 320);
    drop(&f);
}

/* Whatever the batches: the newest tokens lie in open pages, and a page that left the window is sealed. */
static void recent_tokens_are_fp16(void **state)
{
    static const uint32_t windows[] = { 1, 2, 64, 65, 96, 200 };
    (void)state;
    for (size_t w = 0; w < COUNT(windows); w++) {
        char spec[32];
        snprintf(spec, sizeof spec, "int-4:recent=%u", (unsigned)windows[w]);
        for (uint32_t batch = 1; batch <= 130; batch += 43) {
            uint64_t rng = 32;
            fixture f = make(spec, 1, 1000, 0);
            for (uint32_t n = 0; n < 1000;) {
                uint32_t now = 1000 - n < batch ? 1000 - n : batch;
                write_range(&f, n, now, now, 2, &rng);
                n += now;
                for (uint32_t page = 0; page < (n + 63) / 64; page++) {
                    uint32_t last = 64 * page + 63;
                    assert_int_equal(is_open(&f, 0, page), last >= n || n - 1 - last < windows[w]);
                }
            }
            check_cells(&f, 0, 1000);
            drop(&f);
        }
    }
}

static void batches_and_threads_do_not_change_bytes(void **state)
{
    static const char *const specs[] = { "turboquant-4:sink=4,recent=96", "int-2:axis=channel,recent=40" };
    static const uint32_t batches[] = { 1, 7, 64, 512 };
    (void)state;
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint8_t *first = NULL;
        for (size_t b = 0; b < COUNT(batches); b++) {
            uint64_t rng = 33;
            fixture f = make(specs[s], 1, 700, 0);
            write_range(&f, 0, 700, batches[b], b + 1, &rng);
            size_t bytes = kvant_cells_bytes(&f.config), page = 2 * info_of(f.codec).page_bytes;
            if (!first) {
                first = malloc(bytes);
                memcpy(first, f.memory, bytes);
            }
            for (uint32_t p = 0; p < 11; p++)
                if (!is_open(&f, 0, p))
                    assert_memory_equal(first + p * page, (uint8_t *)f.memory + p * page, page);
            drop(&f);
        }
        free(first);
    }
}

/* A cell of a sealed page is written again: no other cell changes, whichever way the cache takes. */
static void rewriting_a_sealed_cell_loses_nothing(void **state)
{
    static const struct {
        const char *spec;
        bool reopens;
        uint32_t first, n; /* cells that may change with cell 74: its block */
    } cases[] = { { "int-4:sink=4", false, 74, 1 },
                  { "int-4:recent=64", true, 74, 1 },
                  { "int-4:axis=channel,group=32", true, 64, 32 },
                  { "int-3:axis=channel,group=16,recent=80", true, 64, 16 } };
    (void)state;
    for (size_t c = 0; c < COUNT(cases); c++) {
        uint64_t rng = 34;
        fixture f = make(cases[c].spec, 1, 1024, 0);
        float before[512 * 64], got[64];
        write_range(&f, 0, 512, 512, 2, &rng);
        assert_int_equal(kvant_cells_read(f.cells, 0, 512, before, 64), KVANT_OK);
        assert_false(is_open(&f, 0, 1));
        write_range(&f, 74, 1, 1, 1, &rng);
        assert_int_equal(is_open(&f, 0, 1), cases[c].reopens);
        read_cell(&f, 74, got);
        if (cases[c].reopens)
            assert_memory_equal(got, f.rows + 74 * 64, sizeof got);
        for (uint32_t i = 64; i < 128 && cases[c].reopens; i++) {
            read_cell(&f, i, got);
            for (uint32_t j = 0; i != 74 && j < 64; j++) /* decoded numbers rounded to fp16: half a unit in 2^-10 */
                assert_true(fabsf(got[j] - before[i * 64 + j]) <= fabsf(before[i * 64 + j]) / 2048 + 6e-8f);
        }
        /* Other pages need the slot: scattered rewrites, one to a page. */
        for (uint32_t page = 2; page < 8; page++)
            write_range(&f, page * 64 + 5, 1, 1, 1, &rng);
        assert_false(is_open(&f, 0, 1));
        for (uint32_t i = 64; i < 128; i++) {
            read_cell(&f, i, got);
            if (i - cases[c].first >= cases[c].n)
                assert_memory_equal(got, before + i * 64, sizeof got);
        }
        drop(&f);
    }
}

/* A ring that wraps around, as caches with a sliding window do: the newest tokens are fp16 in old pages
 * too. */
static void reused_cells_are_recent_again(void **state)
{
    (void)state;
    uint64_t rng = 35;
    fixture f = make("int-4:recent=64", 1, 512, 0);
    for (uint32_t n = 0; n < 1500; n++) {
        write_range(&f, n % 512, 1, 1, 1, &rng);
        for (uint32_t i = 0; i < 64 && i <= n; i++)
            assert_true(is_open(&f, 0, (n - i) % 512 / 64));
    }
    /* 1500 = 2 x 512 + 476: page 7 was opened again, and its last cells are what was sealed on the lap
     * before, as fp16. */
    check_cells(&f, 0, 476);
    for (uint32_t i = 476; i < 512; i++) {
        float got[64], want[64];
        read_cell(&f, i, got);
        through_codec(&f, f.rows + (size_t)i * 64, want);
        for (uint32_t j = 0; j < 64; j++)
            assert_true(fabsf(got[j] - want[j]) <= fabsf(want[j]) / 2048 + 6e-8f);
    }
    drop(&f);
}

/* A context shift: all cells are read, changed and written again, in batches that know nothing of pages. */
static void all_cells_are_rewritten(void **state)
{
    static const char *const specs[] = { "int-8:axis=channel", "int-8:recent=64,sink=4", "int-8:center=first",
                                         "int-8:axis=channel,group=16,recent=100,norm=first" };
    (void)state;
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 44;
        fixture f = make(specs[s], 1, 600, 0);
        float rows[24 * 64], got[64];
        write_range(&f, 0, 600, 512, 2, &rng);
        for (uint32_t first = 0; first < 600; first += 24) {
            int64_t index[24];
            assert_int_equal(kvant_cells_read(f.cells, first, 24, rows, 64), KVANT_OK);
            for (uint32_t i = 0; i < 24; i++)
                index[i] = first + i;
            for (uint32_t j = 0; j < 24 * 64; j++)
                rows[j] = -rows[j];
            assert_int_equal(kvant_cells_write(f.cells, index, 24, rows, 64, 2), KVANT_OK);
        }
        /* Numbers within +-4, so a range of 8 and, less the centre, no more; 8 bits and an fp16 scale and
         * zero point are off by at most half a step and 2^-11 of 8. Quantised twice, in blocks whose cells
         * were rewritten at two times once more; with factors up to 2 and at least 1 here, twice that. */
        double bound = 3 * 2 * (8 / 255.0 / 2 + 2 * 8 / 2048.0);
        for (uint32_t i = 0; i < 600; i++) {
            read_cell(&f, i, got);
            for (uint32_t j = 0; j < 64; j++)
                assert_true(fabs(got[j] + f.rows[i * 64 + j]) <= bound);
        }
        drop(&f);
    }
}

static void streams_have_windows_of_their_own(void **state)
{
    (void)state;
    uint64_t rng = 36;
    fixture f = make("int-4:sink=4,recent=96", 3, 640, 0);
    write_range(&f, 0, 400, 400, 1, &rng);
    for (uint32_t i = 0; i < 640; i += 32) { /* the other streams interleaved */
        write_range(&f, 640 + i, 32, 32, 2, &rng);
        write_range(&f, 1280 + i, 32, 32, 2, &rng);
    }
    for (uint32_t stream = 0; stream < 3; stream++) {
        uint32_t n = stream ? 640 : 400;
        for (uint32_t page = 0; page < (n + 63) / 64; page++)
            assert_int_equal(is_open(&f, stream, page),
                             page == 0 || 64 * page + 63 >= n || n - 64 * page - 64 < 96);
        check_cells(&f, stream, n);
    }
    drop(&f);
}

static void copied_streams_are_alike(void **state)
{
    static const char *const specs[] = { "int-4:sink=4,recent=96", "int-4:axis=channel,recent=40",
                                         "int-4:center=first", "turboquant-4:center=first,norm=first,recent=10" };
    (void)state;
    for (size_t s = 0; s < COUNT(specs); s++)
        for (uint32_t n = 30; n <= 390; n += 360) /* before and after centre and factors are known */
            for (uint32_t n_open = 0; n_open < 2; n_open++) {
                uint64_t rng = 37;
                fixture f = make(specs[s], 3, 500, n_open), g = make(specs[s], 3, 500, n_open);
                float *a = malloc(500 * 64 * sizeof *a), *b = malloc(500 * 64 * sizeof *b);
                kvant_cells_free(&g.cells); /* equal configuration means the same codec */
                assert_int_equal(kvant_cells_create(&f.config, g.memory, &g.cells), KVANT_OK);
                write_range(&f, 500, n, 30, 1, &rng);
                assert_int_equal(kvant_cells_read(f.cells, 500, 500, a, 64), KVANT_OK);
                assert_int_equal(kvant_cells_copy_stream(f.cells, 1, g.cells, 2), KVANT_OK);
                assert_int_equal(kvant_cells_read(g.cells, 1000, 500, b, 64), KVANT_OK);
                assert_memory_equal(a, b, 500 * 64 * sizeof *a);
                assert_int_equal(kvant_cells_copy_stream(f.cells, 1, f.cells, 0), KVANT_OK);
                assert_int_equal(kvant_cells_read(f.cells, 0, 500, b, 64), KVANT_OK);
                assert_int_equal(kvant_cells_read(f.cells, 500, 500, a, 64), KVANT_OK);
                /* With one slot for two streams a half-filled page may have been sealed in between. */
                if (n_open == 0)
                    assert_memory_equal(a, b, 500 * 64 * sizeof *a);
                for (size_t j = 0; j < (size_t)n * 64; j++) /* no row lost: 4 bits over a range of at most 8 */
                    assert_true(fabsf(b[j] - f.rows[500 * 64 + j]) < 8);
                free(a);
                free(b);
                drop(&g);
                drop(&f);
            }
}

static void refusals(void **state)
{
    (void)state;
    fixture f = make("turboquant-4:center=first", 1, 100, 0);
    float row[64] = { 1 };
    int64_t index = 0;
    row[7] = NAN;
    assert_int_equal(kvant_cells_write(f.cells, &index, 1, row, 64, 1), KVANT_ERR_NONFINITE);
    row[7] = 1e30f; /* beyond fp16, where rows wait */
    assert_int_equal(kvant_cells_write(f.cells, &index, 1, row, 64, 1), KVANT_ERR_RANGE);
    kvant_cells_config config = f.config;
    const kvant_codec *missing[2] = { f.codec, NULL };
    config.codecs = missing;
    assert_int_equal(kvant_cells_bytes(&config), 0);
    drop(&f);
}

/* Bytes: the pool has room for every stream's window, and sinks are counted. */
static void memory(void **state)
{
    static const struct {
        const char *spec;
        uint32_t groups;
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
    (void)state;
    for (size_t i = 0; i < COUNT(rows); i++) {
        fixture f = make(rows[i].spec, 3, 300, 0);
        size_t sealed = 3 * 5 * 2 * info_of(f.codec).page_bytes, group = 2 * 64 * 32 * 2;
        assert_int_equal(kvant_cells_bytes(&f.config), sealed + rows[i].groups * group);
        drop(&f);
    }
}

/* A long write leaves the spare groups of the pool alone, so that their memory is never touched. */
static void long_writes_stay_in_their_window(void **state)
{
    (void)state;
    uint64_t rng = 43;
    fixture f = make("int-4:sink=4,recent=96", 2, 640, 0);
    write_range(&f, 640, 640, 640, 2, &rng);
    size_t sealed = 2 * 10 * 2 * info_of(f.codec).page_bytes, group = 2 * 64 * 32 * 2;
    const uint8_t *open = (const uint8_t *)f.memory + sealed;
    for (size_t slot = 0; slot < 2 + 2 * 3 + 2; slot++) {
        size_t used = 0;
        for (size_t i = 0; i < group; i++)
            used += open[slot * group + i] != 0;
        /* sinks of two streams, then the pool, of which 96 tokens of one stream need 3 */
        assert_int_equal(used > 0, slot == 1 || (slot >= 2 && slot < 5));
    }
    drop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sinks_are_never_sealed),
        cmocka_unit_test(recent_tokens_are_fp16),
        cmocka_unit_test(batches_and_threads_do_not_change_bytes),
        cmocka_unit_test(rewriting_a_sealed_cell_loses_nothing),
        cmocka_unit_test(reused_cells_are_recent_again),
        cmocka_unit_test(all_cells_are_rewritten),
        cmocka_unit_test(streams_have_windows_of_their_own),
        cmocka_unit_test(copied_streams_are_alike),
        cmocka_unit_test(refusals),
        cmocka_unit_test(memory),
        cmocka_unit_test(long_writes_stay_in_their_window),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
