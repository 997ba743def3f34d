/* test_steps.c - fp16 pages that tensors share for the rows of a step (kvant_step_pages). A step is
 * exact until another tensor is written. After that each tensor has the same rows as without
 * sharing. */
#include "tensor_fixture.h"

/* A tensor that shares no pages has its own pages for a step. */
static const kvant_exact_part part = {
    .size = sizeof part, .first = 64, .newest = 128, .total = 192, .step = 512
};

enum {
    TENSORS = 3,
    BLOCKS = 40,
    OPEN_BYTES = 64 * WIDTH * 2, /* bytes of a block's fp16 rows */
    OWN = 3 + 1,                 /* blocks of the part, and one more because rows begin anywhere */
    STEP = 8,                    /* blocks of 512 rows */
    GUARD = 4096
};

typedef struct shared {
    kvant_step_pages steps;
    fixture tensors[TENSORS];
} shared;

static void make_shared(shared *s, const char *spec, size_t step_bytes)
{
    s->steps = (kvant_step_pages){ .size = sizeof s->steps, .bytes = step_bytes };
    s->steps.memory = aligned(step_bytes + GUARD);
    memset(s->steps.memory, 0x5a, step_bytes + GUARD);
    for (int i = 0; i < TENSORS; i++) {
        fixture f = make(spec, 1, BLOCKS, 0);
        kvant_tensor_free(&f.tensor);
        free(f.memory);
        free(f.rows);
        f.params.exact = &part;
        f.params.steps = &s->steps;
        make_tensor(&f);
        s->tensors[i] = f;
    }
}

static void drop_shared(shared *s)
{
    const uint8_t *memory = s->steps.memory;
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal(memory[s->steps.bytes + i], 0x5a);
    for (int i = 0; i < TENSORS; i++)
        drop(&s->tensors[i]);
    assert_null(s->steps.owner);
    free(s->steps.memory);
}

/* A tensor that has its own pages for a step. */
static fixture make_alone(const char *spec)
{
    fixture f = make(spec, 1, BLOCKS, 0);
    kvant_tensor_free(&f.tensor);
    free(f.memory);
    free(f.rows);
    f.params.exact = &part;
    make_tensor(&f);
    return f;
}

static uint32_t n_open(const fixture *f)
{
    uint32_t n = 0;
    for (uint32_t block = 0; block < BLOCKS; block++)
        n += is_open(f, block);
    return n;
}

static uint32_t step_of(uint64_t *rng)
{
    static const uint32_t most[] = { 1, 9, 64, 512, 512 };
    return 1 + (uint32_t)(test_random(rng) % most[test_random(rng) % COUNT(most)]);
}

/* Rows n .. n + step - 1 were written last. They are exact, and so are the tokens of the exact
 * part. */
static void check_step(const fixture *f, uint32_t n, uint32_t step, bool owns)
{
    const uint32_t end = n + step;
    for (uint32_t row = 0; row < end; row++)
        if (row < 64 || row + 128 >= (owns ? n : end))
            assert_true(is_open(f, row / 64));
    assert_true(n_open(f) <= (owns ? OWN + STEP : OWN));
}

/* Each step is written to all layers, one after another. */
CASE(a_step_is_exact_until_the_next_tensor_is_written)
{
    static const char *const specs[] = { "int-4", "turboquant-2", "int-2:axis=channel" };
    for (size_t s = 0; s < COUNT(specs); s++)
        for (uint64_t seed = 1; seed < 4; seed++) {
            uint64_t rng = seed;
            shared all;
            make_shared(&all, specs[s], STEP * OPEN_BYTES);
            for (uint32_t n = 0, step; n + 512 < BLOCKS * 64; n += step) {
                step = step_of(&rng);
                for (int i = 0; i < TENSORS; i++) {
                    write_range(&all.tensors[i], n, step, step, 1 + (uint32_t)seed % 2, &rng);
                    check_step(&all.tensors[i], n, step, true);
                    /* A longer step needs shared pages, so all other tensors have left them. */
                    if (i > 0 && step > 4 * 64 + 63)
                        check_step(&all.tensors[i - 1], n, step, false);
                    if (s == 0)
                        check_slots(&all.tensors[i], 0, n + step);
                }
            }
            drop_shared(&all);
        }
}

/* A sealed block has the same bytes in a tensor that shares pages as in a tensor alone. */
CASE(sealed_bytes_are_those_of_a_tensor_alone)
{
    static const char *const specs[] = { "turboquant-4", "trellis-3", "int-2:axis=channel",
                                         "turboquant-3:transform=first", "int-4:center=first" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 7;
        uint32_t n_compared = 0, n = 0;
        shared all;
        fixture alone[TENSORS];
        make_shared(&all, specs[s], STEP * OPEN_BYTES);
        for (int i = 0; i < TENSORS; i++)
            alone[i] = make_alone(specs[s]);
        for (uint32_t step; n + 512 < 1500; n += step) {
            step = step_of(&rng);
            for (int i = 0; i < TENSORS; i++) {
                write_range(&all.tensors[i], n, step, step, 2, &rng);
                write_rows(&alone[i], n, step, all.tensors[i].rows + (size_t)n * WIDTH, step, 1);
            }
        }
        for (int i = 0; i < TENSORS; i++) {
            for (uint32_t block = 0; block < BLOCKS; block++)
                for (uint32_t h = 0; h < N_KV_HEADS; h++) {
                    const kvant_block_info want = block_of(&alone[i], block, h),
                                           got = block_of(&all.tensors[i], block, h);
                    if (is_open(&alone[i], block) || is_open(&all.tensors[i], block))
                        continue;
                    n_compared += want.written != 0;
                    assert_memory_equal(want.page, got.page,
                                        info_of(all.tensors[i].codecs[h]).page_bytes);
                }
            drop(&alone[i]);
        }
        assert_true(n_compared > TENSORS * 10);
        drop_shared(&all);
    }
}

/* A write that is refused, and a write that finds no memory, change the rows of no tensor. */
CASE(a_write_that_fails_loses_no_row)
{
    uint64_t rng = 3;
    shared all;
    float bad[400 * WIDTH] = { 0 };
    make_shared(&all, "int-4", STEP * OPEN_BYTES);
    bad[399 * WIDTH] = NAN;
    for (int i = 0; i < TENSORS; i++)
        write_range(&all.tensors[i], 0, 500, 500, 1, &rng);
    const exported before = export_block(&all.tensors[2], 4);
    assert_int_equal(try_write(&all.tensors[0], 500, 400, bad, 1), KVANT_ERR_NONFINITE);
    const exported after = export_block(&all.tensors[2], 4);
    assert_int_equal(before.bytes, after.bytes);
    assert_memory_equal(before.data, after.data, before.bytes);
    for (int i = 0; i < TENSORS; i++)
        check_slots(&all.tensors[i], 0, 500);
    free(before.data);
    free(after.data);
    drop_shared(&all);
}

/* Blocks move from one tensor to a second tensor, which needs the shared pages that hold them. */
CASE(blocks_are_copied_between_tensors_that_share)
{
    uint64_t rng = 4;
    shared all;
    make_shared(&all, "int-4", STEP * OPEN_BYTES);
    fixture *from = &all.tensors[0];
    fixture to = make_like(from); /* with the same codecs */
    write_range(from, 0, 704, 704, 1, &rng);
    assert_int_equal(kvant_tensor_copy(from->tensor, 0, to.tensor, 0, 11), KVANT_OK);
    memcpy(to.rows, from->rows, 704 * WIDTH * sizeof(float));
    check_slots(from, 0, 704);
    for (uint32_t block = 0; block < 11; block++)
        if (is_open(from, block) || !is_open(&to, block))
            check_slots(&to, 64 * block, 64);
    kvant_tensor_clear(from->tensor);
    check_slots(&to, 0, 64);
    drop(&to);
    drop_shared(&all);
}

/* Own pages that the tensor has used so far: its memory is zeroed at first. */
static size_t touched_pages(const fixture *f, size_t sealed_bytes)
{
    const uint8_t *open = (const uint8_t *)f->memory + sealed_bytes;
    size_t n = 0;
    for (size_t page = 0; page < (f->bytes - sealed_bytes) / OPEN_BYTES; page++)
        for (size_t i = 0; i < OPEN_BYTES; i++)
            if (open[page * OPEN_BYTES + i]) {
                n++;
                break;
            }
    return n;
}

/* Four sequences have a first block and newest rows each, whether their tokens come interleaved or
 * together. A tensor has room for them besides the step, but a single sequence does not use that
 * room. */
CASE(sequences_have_exact_parts_of_their_own)
{
    enum { SEQUENCES = 4, PER = 8, N = 300, MORE = 150, PAGES = 4 * 4 };
    static const kvant_exact_part bounded = {
        .size = sizeof bounded, .first = 64, .newest = 128, .total = 512, .step = 512
    };
    for (int together = 0; together < 2; together++) {
        uint64_t rng = 6;
        kvant_step_pages steps = { .size = sizeof steps,
                                   .memory = aligned(STEP * OPEN_BYTES),
                                   .bytes = STEP * OPEN_BYTES };
        fixture t[2];
        for (int i = 0; i < 2; i++) {
            t[i] = make("int-4", SEQUENCES, PER, 0);
            kvant_tensor_free(&t[i].tensor);
            free(t[i].memory);
            free(t[i].rows);
            t[i].params.exact = &bounded;
            t[i].params.steps = &steps;
            make_tensor(&t[i]);
        }
        const size_t sealed = SEQUENCES * PER * N_KV_HEADS * info_of(t[0].codecs[0]).page_bytes;
        assert_int_equal(t[0].bytes, sealed + PAGES * OPEN_BYTES);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            for (int i = 0; i < 2; i++)
                write_range(&t[i], s * PER * 64, N, N, 1, &rng);
            assert_true(touched_pages(&t[0], sealed) <= 4 * (s + 1));
        }
        for (uint32_t n = N; n < N + MORE; n++) {
            for (uint32_t s = 0; s < SEQUENCES; s++)
                for (int i = 0; i < 2 && !together; i++)
                    write_range(&t[i], s * PER * 64 + n, 1, 1, 1, &rng);
            for (int i = 0; i < 2 && together; i++) {
                float rows[SEQUENCES * WIDTH];
                int64_t slots[SEQUENCES];
                for (size_t j = 0; j < COUNT(rows); j++)
                    rows[j] = half_number(&rng);
                for (uint32_t s = 0; s < SEQUENCES; s++) {
                    slots[s] = s * PER * 64 + n;
                    memcpy(t[i].rows + (size_t)slots[s] * WIDTH, rows + s * WIDTH,
                           WIDTH * sizeof *rows);
                }
                assert_ok(kvant_tensor_write(t[i].tensor, slots, SEQUENCES, rows, WIDTH, 1));
            }
            for (uint32_t s = 0; s < SEQUENCES; s++)
                for (uint32_t row = 0; row <= n; row++)
                    if (row < 64 || row + 128 > n)
                        assert_true(is_open(&t[0], s * PER + row / 64));
        }
        for (int i = 0; i < 2; i++) {
            for (uint32_t s = 0; s < SEQUENCES; s++)
                check_slots(&t[i], s * PER * 64, N + MORE);
            drop(&t[i]);
        }
        free(steps.memory);
    }
}

/* Sizes: a tensor reserves no memory for a step. Shared memory of less than a block is not used. */
CASE(sizes_and_what_is_refused)
{
    uint64_t rng = 5;
    shared all, none;
    kvant_tensor *tensor;
    const float row[WIDTH] = { 0 };
    const int64_t slot = 0;
    make_shared(&all, "int-4", STEP * OPEN_BYTES);
    make_shared(&none, "int-4", OPEN_BYTES - 64);
    fixture *f = &all.tensors[0];
    const size_t sealed = BLOCKS * N_KV_HEADS * info_of(f->codecs[0]).page_bytes;
    assert_int_equal(f->bytes, sealed + OWN * OPEN_BYTES);
    assert_int_equal(none.tensors[0].bytes, f->bytes);
    write_range(&none.tensors[0], 0, 700, 700, 1, &rng);
    check_slots(&none.tensors[0], 0, 700);
    assert_true(n_open(&none.tensors[0]) <= OWN);
    /* Both tensors would need the pages at once. */
    assert_int_equal(kvant_tensor_write_layer(f->tensor, all.tensors[1].tensor, &slot, 1, row,
                                              WIDTH, row, WIDTH, 1),
                     KVANT_ERR_ARGUMENT);
    kvant_tensor_params params = params_of(f);
    kvant_step_pages bad[] = { all.steps, all.steps, all.steps };
    bad[0].size = 0;
    bad[1].memory = NULL;
    bad[2].memory = (uint8_t *)all.steps.memory + 4;
    for (size_t i = 0; i < COUNT(bad); i++) {
        params.steps = &bad[i];
        assert_int_equal(kvant_tensor_create(&params, f->memory, &tensor), KVANT_ERR_ARGUMENT);
    }
    drop_shared(&all);
    drop_shared(&none);
}

RUN_CASES(NULL, NULL)
