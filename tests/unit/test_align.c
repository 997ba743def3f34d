/* test_align.c - fillers for the cells of a restored state: where they stand, llama.cpp's form of
 * the state with them, and states of any other form, which stay unchanged. */
#include "../cases.h"
#include "../../integrations/llama.cpp/align.h"
#include "../../integrations/llama.cpp/host.h"

enum { BLOCK = 64, ROW = 48, N_LAYERS = 2, HEAD = 8, CELL = 12, TENSOR = 12 };

/* Rows whose slots follow each other from `slot` on, in the cells from `cell` on. */
static void note(kvp_alignment *a, int64_t cell, uint32_t slot, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = (uint32_t)(slot + i) % BLOCK;
        const kvp_align_place place = { cell + (int64_t)i, at, a->n == 0 || at == 0 };
        assert_true(kvp_align_note(a, &place, 1));
    }
}

/* The cells that llama.cpp gives to the state with fillers, if those behind the last one follow. */
static int64_t cell_at(const kvp_alignment *a, size_t i)
{
    return i < a->n ? a->places[i].cell : a->places[a->n - 1].cell + 1 + (int64_t)(i - a->n);
}

/* Each row is in its slot, and no block of 64 cells has rows of two blocks, or a cell that is not
 * the state's. */
static void assert_fits(const kvp_alignment *a)
{
    size_t row = 0;
    int64_t block = -1;

    for (size_t i = 0; i < a->n_all; i++) {
        const int64_t cell = cell_at(a, i);
        if (a->is_filler[i])
            continue;
        assert_true(row < a->n);
        assert_int_equal(cell % BLOCK, a->places[row].slot);
        assert_true(a->places[row].begins ? cell / BLOCK > block : cell / BLOCK == block);
        if (a->places[row].begins) {
            block = cell / BLOCK;
            assert_true(i >= (size_t)(cell % BLOCK) && i - (size_t)(cell % BLOCK) + 63 < a->n_all);
            for (size_t k = 0; k < BLOCK; k++)
                assert_true(cell_at(a, i - (size_t)(cell % BLOCK) + k) ==
                            block * BLOCK + (int64_t)k);
        }
        row++;
    }
    assert_int_equal(row, a->n);
}

CASE(fillers_lead_to_blocks)
{
    static const struct {
        int64_t first;  /* cell */
        size_t n_first; /* cells before a gap */
        int64_t second; /* the next cell */
        uint32_t slot;  /* of the first row */
        size_t n, n_fillers;
    } cases[] = {
        { 0, 1000, 0, 0, 128, 0 },       { 90, 1000, 0, 0, 128, 38 },
        { 64, 1000, 0, 0, 100, 28 },     { 64, 1000, 0, 40, 88, 40 },
        { 1, 1000, 0, 0, 64, 63 },       { 90, 40, 300, 0, 128, 40 + 20 },
        { 128, 64, 193, 0, 128, 63 },    { 128, 100, 300, 0, 200, 36 + 20 + 56 },
        { 10, 1000, 0, 63, 1, 54 + 63 },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const size_t before = cases[i].n < cases[i].n_first ? cases[i].n : cases[i].n_first;
        kvp_alignment a = { 0 };
        note(&a, cases[i].first, cases[i].slot, before);
        note(&a, cases[i].second, cases[i].slot + (uint32_t)before, cases[i].n - before);
        assert_true(kvp_align_plan(&a));
        assert_int_equal(a.n_all - a.n, cases[i].n_fillers);
        assert_fits(&a);
        kvp_align_free(&a);
    }
}

CASE(other_orders_have_no_plan)
{
    const kvp_align_place backwards[] = { { 0, 1, true }, { 1, 0, false } },
                          twice[] = { { 0, 3, true }, { 1, 3, false } };
    kvp_alignment a = { 0 };

    assert_false(kvp_align_plan(&a)); /* no row */
    assert_true(kvp_align_note(&a, backwards, 2));
    assert_false(kvp_align_plan(&a));
    kvp_align_free(&a);
    assert_true(kvp_align_note(&a, twice, 2));
    assert_false(kvp_align_plan(&a));
    kvp_align_free(&a);
    for (uint32_t i = 0; i < 100; i++) { /* blocks of one row take 64 cells each */
        const kvp_align_place place = { i, 0, true };
        assert_true(kvp_align_note(&a, &place, 1));
    }
    assert_false(kvp_align_plan(&a));
    kvp_align_free(&a);
}

/* llama.cpp's state of one sequence with n cells. `words`: bytes between the cells and the first
 * tensor. The runs of a tensor have n_first rows, and the rest. */
static kvp_plain make_state(uint32_t n, uint32_t n_first, size_t words)
{
    const size_t bytes = HEAD + 8 + n * CELL + words + 2 * N_LAYERS * (TENSOR + (size_t)n * ROW);
    const uint32_t heads[] = { 0xaf143cd8, 0, 1, n }, behind[] = { 0, N_LAYERS, 0, 128 };
    kvp_plain plain;
    size_t at = sizeof(heads);

    assert_true(kvp_plain_create(&plain, bytes));
    memcpy(plain.bytes, heads, sizeof(heads));
    for (uint32_t i = 0; i < n; i++, at += CELL)
        memcpy(plain.bytes + at, (uint32_t[]){ 3 * i, 1, 5 }, CELL);
    memcpy(plain.bytes + at, behind, words);
    at += words;
    for (int i = 0; i < 2 * N_LAYERS; i++) {
        memcpy(plain.bytes + at, (uint32_t[]){ 1, ROW, 0 }, TENSOR);
        at += TENSOR;
        assert_true(kvp_plain_add(&plain, at, 48 + 8, n_first * (size_t)ROW));
        assert_true(n == n_first || kvp_plain_add(&plain, at + n_first * (size_t)ROW, 48 + 8,
                                                  (n - n_first) * (size_t)ROW));
        at += n * (size_t)ROW;
    }
    assert_int_equal(at, bytes);
    return plain;
}

/* Rows of slots from 20 on in cells from 90 on. */
static kvp_alignment plan_for(size_t n)
{
    kvp_alignment a = { 0 };

    note(&a, 90, 20, n);
    assert_true(kvp_align_plan(&a));
    assert_true(a.n_all > n);
    return a;
}

static void check_fillers(size_t words)
{
    const uint32_t n = 100, n_first = 44; /* the first run ends with a block */
    kvp_plain plain = make_state(n, n_first, words);
    kvp_alignment a = plan_for(n);
    const uint32_t n_all = (uint32_t)a.n_all;
    uint32_t word, row = 0, filler = 0;
    size_t at = HEAD + 8, bytes;

    assert_true(kvp_align_state(&a, &plain));
    bytes = HEAD + 8 + n_all * CELL + words + 2 * N_LAYERS * (TENSOR + (size_t)n_all * ROW);
    assert_int_equal(plain.n, bytes);
    assert_int_equal(a.position, 3 * (n - 1) + 1);
    memcpy(&word, plain.bytes + HEAD + 4, 4);
    assert_int_equal(word, n_all);
    for (uint32_t i = 0; i < n_all; i++, at += CELL) {
        const uint32_t position = a.is_filler[i] ? 3 * (n - 1) + 1 + filler++ : 3 * row++;
        assert_memory_equal(plain.bytes + at, ((uint32_t[]){ position, 1, 5 }), CELL);
    }
    assert_memory_equal(plain.bytes + at, ((uint32_t[]){ 0, N_LAYERS, 0, 128 }), words);
    at += words;
    for (uint32_t i = 0; i < 2 * N_LAYERS; i++) {
        const kvp_pack_run *first = &plain.runs[2 * i], *second = first + 1;
        size_t cells;
        assert_memory_equal(plain.bytes + at, ((uint32_t[]){ 1, ROW, 0 }), TENSOR);
        at += TENSOR;
        assert_int_equal(first->at, at);
        assert_int_equal(second->at, at + first->room);
        assert_int_equal(first->room + second->room, (size_t)n_all * ROW);
        assert_ptr_equal(kvp_align_fillers(&a, &plain, plain.bytes + first->at, &cells),
                         a.is_filler);
        assert_int_equal(cells, first->room / ROW);
        assert_ptr_equal(kvp_align_fillers(&a, &plain, plain.bytes + second->at, &cells),
                         a.is_filler + first->room / ROW);
        assert_int_equal(cells, second->room / ROW);
        assert_false(a.is_filler[first->room / ROW]); /* a run begins with a row */
        assert_null(kvp_align_fillers(&a, &plain, plain.bytes + first->at + 1, &cells));
        at += (size_t)n_all * ROW;
    }
    kvp_align_free(&a);
    kvp_plain_free(&plain);
}

/* An older and a newer llama.cpp write them. */
CASE(states_get_fillers)
{
    check_fillers(8);
    check_fillers(16);
}

/* Every byte that says something is changed. The state is then refused, or it has the same cells
 * and rows as before. */
CASE(other_forms_stay_unchanged)
{
    static const uint8_t changes[] = { 1, 2, 0x80, 0xff };
    const uint32_t n = 100;
    const kvp_plain right = make_state(n, n, 8);
    const size_t first = HEAD, end = (size_t)right.runs[0].at;
    size_t n_refused = 0;

    for (size_t i = first; i < end + 2 * TENSOR; i++)
        for (size_t c = 0; c < sizeof(changes); c++) {
            const size_t at =
                i < end ? i
                        : (size_t)right.runs[1 + (i - end) / TENSOR].at - 1 - (i - end) % TENSOR;
            kvp_plain plain = make_state(n, n, 8), copy;
            kvp_alignment a = plan_for(n);
            plain.bytes[at] ^= changes[c];
            assert_true(kvp_plain_create(&copy, plain.n));
            memcpy(copy.bytes, plain.bytes, plain.n);
            if (kvp_align_state(&a, &plain)) {
                assert_true(plain.n > copy.n); /* positions and sequences may be any */
                assert_true(i >= HEAD + 8 && i < HEAD + 8 + n * CELL);
            } else {
                n_refused++;
                assert_int_equal(plain.n, copy.n);
                assert_memory_equal(plain.bytes, copy.bytes, copy.n);
            }
            kvp_align_free(&a);
            kvp_plain_free(&plain);
            kvp_plain_free(&copy);
        }
    print_message("%zu of %zu states refused\n", n_refused,
                  (end - first + 2 * TENSOR) * sizeof(changes));
    assert_true(n_refused > (end - first) * sizeof(changes) / 4);
    kvp_plain_free((kvp_plain *)(uintptr_t)&right);
}

/* Rows that are no runs, and bytes behind the last tensor. */
CASE(states_with_other_rows_stay_unchanged)
{
    const uint32_t n = 100;

    for (int way = 0; way < 4; way++) {
        kvp_plain plain = make_state(n, n, 8);
        kvp_alignment a = plan_for(way == 3 ? n - 1 : n);
        if (way == 0)
            plain.n_runs--;
        else if (way == 1)
            plain.runs[2].room -= ROW;
        else if (way == 2)
            plain.runs[2].room -= 1;
        assert_false(kvp_align_state(&a, &plain));
        kvp_align_free(&a);
        kvp_plain_free(&plain);
    }
}

RUN_CASES(NULL, NULL)
