/* test_failed_writes.c - a write that fails stores no row, changes no state and teaches nothing,
 * and the tensor goes on working. Everything stays equal to a second tensor that never saw the
 * failed writes. */
#include "tensor_fixture.h"

enum { BLOCKS = 6, SLOTS = 2 * BLOCKS * 64, MOST = 150 };

/* Direct codecs, groups of tokens, windows, sinks, pending rows, a pool of one page. */
static const struct {
    const char *spec;
    uint32_t n_open;
} cases[] = { { "turboquant-4", 0 },
              { "turboquant-4:center=first,norm=first", 0 },
              { "int-4:axis=channel,group=32", 0 },
              { "int-4:axis=channel,group=32,center=first", 1 },
              { "int-4:recent=64,sink=4", 0 },
              { "trellis-3:center=first,norm=first,recent=96", 0 },
              { "int-2:axis=channel,group=32,recent=32", 1 } };

typedef struct batch {
    int64_t slots[MOST];
    float rows[MOST * WIDTH];
    size_t n;
} batch;

/* A range of a sequence, or scattered slots, some of them more than once. */
static void fill_batch(batch *b, uint64_t *rng)
{
    b->n = test_random(rng) % 3 == 0 ? 1 + test_random(rng) % MOST : 1 + test_random(rng) % 8;
    uint64_t start = test_random(rng) % (SLOTS - MOST), scattered = test_random(rng) % 3;
    /* scale of the rows: rows of another kind need another transform */
    float kind = test_random(rng) % 4 == 0 ? 20 : 0;
    for (size_t i = 0; i < b->n; i++)
        b->slots[i] = (int64_t)(scattered == 0 ? test_random(rng) % SLOTS : start + i);
    for (size_t j = 0; j < b->n * WIDTH; j++)
        b->rows[j] = test_normal(rng) + kind * (float)(j % 3);
}

/* Every way to fail, in a batch that is right otherwise. */
static void write_badly(fixture *f, batch *b, uint64_t *rng)
{
    static const float numbers[] = { NAN, INFINITY, -INFINITY, 3e38f, -3e38f };
    size_t at = test_random(rng) % b->n * WIDTH + test_random(rng) % WIDTH,
           kind = test_random(rng) % 9;
    kvant_status want = kind < 3   ? KVANT_ERR_NONFINITE
                        : kind < 5 ? KVANT_ERR_RANGE
                                   : KVANT_ERR_ARGUMENT;
    size_t stride = WIDTH;
    uint32_t n_threads = 1 + (uint32_t)(test_random(rng) % 3);
    if (kind < 5)
        b->rows[at] = numbers[kind];
    else if (kind < 7)
        b->slots[at / WIDTH] = kind == 5 ? SLOTS : -1 - (int64_t)(test_random(rng) % 1000);
    else if (kind == 7 && b->n > 1)
        stride = WIDTH - 1;
    else
        n_threads = 0;
    assert_int_equal(kvant_tensor_write(f->tensor, b->slots, b->n, b->rows, stride, n_threads),
                     want);
}

CASE(failed_writes_change_nothing)
{
    static batch good, bad;
    for (size_t c = 0; c < COUNT(cases); c++)
        for (uint64_t seed = 1; seed <= 3; seed++) {
            uint64_t rng = 60 + seed, errors = 90 + seed;
            fixture f = make(cases[c].spec, 2, BLOCKS, cases[c].n_open), g = make_like(&f);
            for (int i = 0; i < 60; i++) {
                for (int k = 0; k < 3; k++) {
                    fill_batch(&bad, &errors);
                    write_badly(&f, &bad, &errors);
                }
                assert_memory_equal(f.memory, g.memory, f.bytes);
                fill_batch(&good, &rng);
                for (fixture *t = &f; t; t = t == &f ? &g : NULL)
                    assert_ok(
                        kvant_tensor_write(t->tensor, good.slots, good.n, good.rows, WIDTH, 2));
                assert_memory_equal(f.memory, g.memory, f.bytes);
                if (i % 6 == 0)
                    assert_alike(&f, &g);
            }
            assert_alike(&f, &g);
            drop(&g);
            drop(&f);
        }
}

/* Writing keys and values together gives the result of two writes. If one of the two is refused,
 * neither is stored and neither teaches anything. */
CASE(a_layer_is_written_whole_or_not)
{
    static batch b;
    static float values[MOST * WIDTH];
    for (size_t c = 0; c < COUNT(cases); c++) {
        uint64_t rng = 80 + c;
        fixture k = make(cases[c].spec, 2, BLOCKS, cases[c].n_open), k_alone = make_like(&k),
                v = make_heads("turboquant-4:center=first", "turboquant-4:center=first",
                               KVANT_ROLE_V, 2, BLOCKS, 0),
                v_alone = make_like(&v);
        for (int i = 0; i < 60; i++) {
            fill_batch(&b, &rng);
            for (size_t j = 0; j < b.n * WIDTH; j++)
                values[j] = test_normal(&rng);
            float *bad = (i % 2 ? values : b.rows) + test_random(&rng) % (b.n * WIDTH), good = *bad;
            *bad = NAN;
            assert_int_equal(kvant_tensor_write_layer(k.tensor, v.tensor, b.slots, b.n, b.rows,
                                                      WIDTH, values, WIDTH, 3),
                             KVANT_ERR_NONFINITE);
            assert_memory_equal(k.memory, k_alone.memory, k.bytes);
            *bad = good;
            assert_ok(kvant_tensor_write_layer(k.tensor, v.tensor, b.slots, b.n, b.rows, WIDTH,
                                               values, WIDTH, 3));
            assert_ok(kvant_tensor_write(k_alone.tensor, b.slots, b.n, b.rows, WIDTH, 1));
            assert_ok(kvant_tensor_write(v_alone.tensor, b.slots, b.n, values, WIDTH, 1));
            assert_memory_equal(k.memory, k_alone.memory, k.bytes);
            assert_memory_equal(v.memory, v_alone.memory, v.bytes);
        }
        assert_alike(&k, &k_alone);
        assert_alike(&v, &v_alone);
        assert_int_equal(kvant_tensor_write_layer(k.tensor, k.tensor, b.slots, b.n, b.rows, WIDTH,
                                                  values, WIDTH, 1),
                         KVANT_ERR_ARGUMENT);
        drop(&k_alone);
        drop(&v_alone);
        drop(&k);
        drop(&v);
    }
}

/* A NaN among the values of a long batch: the keys had learned from queries before, and still know
 * it. */
CASE(refused_values_do_not_make_keys_forget)
{
    static float rows[MOST * WIDTH], bad[MOST * WIDTH];
    int64_t slots[MOST];
    uint64_t rng = 8;
    fill_normal(rows, COUNT(rows), &rng);
    memcpy(bad, rows, sizeof bad);
    bad[COUNT(bad) - 1] = NAN;
    for (int i = 0; i < MOST; i++)
        slots[i] = i;
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = rows,
                                    .token_stride = WIDTH,
                                    .head_stride = HEAD_DIM,
                                    .n_tokens = MOST,
                                    .n_heads = N_KV_HEADS };
    const char *spec = "trellis-2:transform=first";
    fixture k[2], v[2];
    for (int refused = 0; refused < 2; refused++) {
        k[refused] = make(spec, 1, BLOCKS, 0);
        v[refused] = make_heads(spec, spec, KVANT_ROLE_V, 1, BLOCKS, 0);
        kvant_tensor *keys = k[refused].tensor, *values = v[refused].tensor;
        assert_int_equal(kvant_tensor_note_queries(keys, &queries, 1), KVANT_OK);
        if (refused)
            assert_int_equal(
                kvant_tensor_write_layer(keys, values, slots, MOST, rows, WIDTH, bad, WIDTH, 1),
                KVANT_ERR_NONFINITE);
        assert_ok(kvant_tensor_write_layer(keys, values, slots, MOST, rows, WIDTH, rows, WIDTH, 1));
    }
    assert_true(tensor_info_of(&k[0]).learned_bytes > 0);
    for (uint32_t block = 0; block * 64 < MOST; block++) {
        exported one = export_block(&k[0], block), two = export_block(&k[1], block);
        assert_int_equal(one.bytes, two.bytes);
        assert_memory_equal(one.data, two.data, one.bytes);
        free(one.data);
        free(two.data);
    }
    for (int i = 0; i < 2; i++) {
        drop(&k[i]);
        drop(&v[i]);
    }
}

/* A row that a sealed page would accept may be too large for an exact page. Rows that would be
 * pending in an exact page are refused by the range of fp16. */
CASE(rows_must_fit_the_page_they_go_to)
{
    uint64_t rng = 70;
    fixture sealed = make("turboquant-4:rotate=none", 1, BLOCKS, 0),
            open = make("turboquant-4:rotate=none,recent=64", 1, BLOCKS, 0),
            sink = make("turboquant-4:rotate=none,sink=64", 1, BLOCKS, 0),
            waiting = make("turboquant-4:rotate=none,norm=first", 1, BLOCKS, 0);
    float row[WIDTH], got[WIDTH], want[WIDTH];
    fill_normal(row, WIDTH, &rng);
    row[5] = 70000;
    assert_int_equal(try_write(&open, 0, 1, row, 1), KVANT_ERR_RANGE);
    assert_int_equal(try_write(&waiting, 0, 1, row, 1), KVANT_ERR_RANGE);
    assert_int_equal(try_write(&sink, 0, 1, row, 1), KVANT_ERR_RANGE);
    assert_int_equal(try_write(&sink, 64, 1, row, 1), KVANT_OK);
    assert_int_equal(try_write(&sealed, 0, 1, row, 1), KVANT_OK);
    read_slot(&sealed, 0, got);
    through_codec(&sealed, row, want);
    assert_memory_equal(got, want, sizeof got);
    for (fixture *f = &open; f; f = f == &open ? &sink : f == &sink ? &waiting : NULL)
        assert_int_equal(block_of(f, 0, 0).state, KVANT_BLOCK_EMPTY);
    drop(&sealed);
    drop(&open);
    drop(&sink);
    drop(&waiting);
}

/* The largest number of fp16 stays finite when it is sealed, although scales round up, and when its
 * block becomes exact again. */
CASE(largest_numbers_stay_finite)
{
    static const char *const specs[] = { "int-4:recent=64", "int-4:axis=channel", "int-2:recent=64",
                                         "int-7:recent=64" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 71;
        fixture f = make(specs[s], 1, BLOCKS, 0);
        float row[WIDTH], got[WIDTH];
        fill_normal(row, WIDTH, &rng);
        for (uint32_t i = 0; i < 256; i++) {
            row[5] = 65504;
            row[6] = -65504 + 32 * (float)(i % 64);
            write_rows(&f, i, 1, row, 1, 1);
        }
        for (int lap = 0; lap < 2; lap++) {
            assert_int_equal(is_open(&f, 0), lap);
            for (uint32_t i = 0; i < 64; i++) {
                read_slot(&f, i, got);
                for (uint32_t j = 0; j < WIDTH; j++)
                    /* 65504 and one step of a 2-bit code */
                    assert_true(fabsf(got[j]) <= 65504 * 1.34f);
            }
            write_rows(&f, 3, 1, row, 1, 1); /* makes the block exact again */
        }
        drop(&f);
    }
}

RUN_CASES(NULL, NULL)
