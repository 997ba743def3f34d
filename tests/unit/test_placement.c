/* test_placement.c - the plug-in's placement of llama.cpp's cells. Each sequence has its own
 * blocks, in the order of its tokens, whatever its neighbours do. Cells that cannot have that still
 * have one slot each. */
#include "../cases.h"
#include "../../integrations/llama.cpp/placement.h"

enum { N_CELLS = 512, MAX_SEQUENCES = 8, HIDDEN = 0xfc00 };

/* llama.cpp's side: which sequence and position each cell has. */
typedef struct cache {
    int sequence[N_CELLS], position[N_CELLS];
    int length[MAX_SEQUENCES], cell_of[MAX_SEQUENCES][N_CELLS];
} cache;

static void start(cache *c)
{
    memset(c, 0, sizeof(*c));
    for (int i = 0; i < N_CELLS; i++)
        c->sequence[i] = -1;
}

static int free_cell(const cache *c, int from)
{
    for (int i = 0; i < N_CELLS; i++)
        if (c->sequence[(from + i) % N_CELLS] < 0)
            return (from + i) % N_CELLS;
    fail_msg("no cell is free");
    return -1;
}

static void remove_from(cache *c, int sequence, int position)
{
    for (int i = position; i < c->length[sequence]; i++)
        c->sequence[c->cell_of[sequence][i]] = -1;
    c->length[sequence] = position;
}

/* Writes one token for each of the n listed sequences; a sequence that repeats gets consecutive
 * tokens. Places them twice, as two tensors do. */
static void write_tokens(cache *c, kvp_placement *p, const int *sequences, int n)
{
    static uint16_t rows[64 * N_CELLS];
    int64_t cells[64], slots[64], again[64];
    kvp_mask mask = { rows, N_CELLS, N_CELLS, 64 };

    for (int i = 0; i < n; i++) {
        int s = sequences[i], cell = free_cell(c, 0);
        c->sequence[cell] = s;
        c->position[cell] = c->length[s];
        c->cell_of[s][c->length[s]++] = cell;
        cells[i] = cell;
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < N_CELLS; j++)
            rows[i * N_CELLS + j] =
                c->sequence[j] == sequences[i] && c->position[j] <= c->position[cells[i]] ? 0
                                                                                          : HIDDEN;
    assert_true(kvp_placement_write(p, cells, (size_t)n, &mask, slots));
    assert_true(kvp_placement_write(p, cells, (size_t)n, &mask, again));
    assert_memory_equal(slots, again, (size_t)n * sizeof(*slots));
}

static void write_run(cache *c, kvp_placement *p, int sequence, int n)
{
    int sequences[64];

    for (int i = 0; i < 64; i++)
        sequences[i] = sequence;
    for (; n > 0; n -= 64)
        write_tokens(c, p, sequences, n < 64 ? n : 64);
}

/* Every live cell has a slot that no other live cell has. */
static void check_slots(const cache *c, const kvp_placement *p)
{
    bool used[2 * N_CELLS + 8 * 64] = { false };

    for (uint32_t i = 0; i < N_CELLS; i++) {
        int64_t slot = kvp_placement_slot(p, i);
        if (c->sequence[i] < 0)
            continue;
        assert_true(slot >= 0 && slot < (int64_t)kvp_placement_blocks(N_CELLS) * 64);
        assert_false(used[slot]);
        used[slot] = true;
    }
}

/* Token t of the sequence is in slot t % 64 of block t / 64, and these blocks belong to no other
 * sequence. */
static void check_sequence(const cache *c, const kvp_placement *p, int sequence)
{
    int64_t owner = -1;

    for (int t = 0; t < c->length[sequence]; t++) {
        int64_t slot = kvp_placement_slot(p, (uint32_t)c->cell_of[sequence][t]);
        kvp_block block = kvp_placement_block(p, (uint32_t)(slot / 64));
        assert_int_equal(slot % 64, t % 64);
        assert_int_equal(block.index, t / 64);
        owner = t == 0 ? block.sequence : owner;
        assert_int_equal(block.sequence, owner);
    }
    check_slots(c, p);
}

static void check_table(const cache *c, const kvp_placement *p, int sequence)
{
    uint16_t row[N_CELLS], gathered[N_CELLS * 2 + 8 * 64];
    int32_t table[2 * N_CELLS / 64 + 8];
    kvp_mask mask = { row, N_CELLS, N_CELLS, 1 };
    uint32_t n, length = (uint32_t)c->length[sequence];

    for (int j = 0; j < N_CELLS; j++)
        row[j] = c->sequence[j] == sequence ? (uint16_t)(c->position[j] + 1) : HIDDEN;
    n = kvp_placement_table(p, &mask, 0, 1, table);
    assert_int_equal(n, (length + 63) / 64);
    kvp_placement_gather(p, &mask, 0, table, n, gathered);
    for (uint32_t t = 0; t < n * 64; t++)
        assert_int_equal(gathered[t], t < length ? t + 1 : HIDDEN);
}

CASE(neighbours_do_not_matter)
{
    kvp_placement *p = kvp_placement_create(N_CELLS);
    cache c;

    start(&c);
    write_run(&c, p, 0, 37);
    write_run(&c, p, 1, 70);
    write_run(&c, p, 2, 5);
    for (int i = 0; i < 90; i++)
        write_tokens(&c, p, (const int[]){ 2, 0, 1, 1 }, 4);
    for (int s = 0; s < 3; s++) {
        check_sequence(&c, p, s);
        check_table(&c, p, s);
    }
    kvp_placement_free(p);
}

/* The cells of removed tokens are used again, by the same sequence (prompts that share a beginning)
 * and by another. */
CASE(cells_are_used_again)
{
    kvp_placement *p = kvp_placement_create(N_CELLS);
    cache c;

    start(&c);
    write_run(&c, p, 0, 150);
    remove_from(&c, 0, 100);
    write_run(&c, p, 0, 60);
    check_sequence(&c, p, 0);
    write_run(&c, p, 1, 64);
    remove_from(&c, 0, 0);
    write_run(&c, p, 2, 130);
    check_sequence(&c, p, 1);
    check_sequence(&c, p, 2);
    check_table(&c, p, 2);
    remove_from(&c, 2, 0);
    write_run(&c, p, 2, 1);
    write_run(&c, p, 2, 80);
    check_sequence(&c, p, 2);
    kvp_placement_free(p);
}

/* Two sequences that continue one prompt share its last block. After it each has its own blocks. */
CASE(shared_beginnings)
{
    kvp_placement *p = kvp_placement_create(N_CELLS);
    uint16_t row[N_CELLS];
    kvp_mask mask = { row, N_CELLS, N_CELLS, 1 };
    int32_t table[32];
    int64_t slot;
    uint32_t n;
    cache c;

    start(&c);
    write_run(&c, p, 0, 100);
    for (int j = 0; j < N_CELLS; j++)
        row[j] = c.sequence[j] == 0 && c.position[j] < 80 ? 0 : HIDDEN;
    for (int64_t cell = 300, i = 0; i < 60; cell++, i++) {
        row[cell] = 0;
        assert_true(kvp_placement_write(p, &cell, 1, &mask, &slot));
        n = kvp_placement_table(p, &mask, 0, 1, table);
        assert_int_equal(n, i < 28 ? 2 : 3); /* block 1 has room for 64 - 36 */
        assert_int_equal(table[n - 1], slot / 64);
        assert_int_equal(slot % 64, (36 + i) % 64);
        assert_int_equal(kvp_placement_block(p, (uint32_t)(slot / 64)).index, n - 1);
    }
    write_run(&c, p, 0, 30); /* must find its own continuation, too */
    check_slots(&c, p);
    for (int j = 0; j < N_CELLS; j++)
        row[j] = c.sequence[j] == 0 ? 0 : HIDDEN;
    assert_int_equal(kvp_placement_table(p, &mask, 0, 1, table), 3);
    for (int t = 100; t < 130; t++)
        assert_int_equal(kvp_placement_slot(p, (uint32_t)c.cell_of[0][t]), table[2] * 64 + t - 100);
    kvp_placement_free(p);
}

CASE(restored_rows_are_one_sequence)
{
    kvp_placement *p = kvp_placement_create(N_CELLS);
    int64_t cells[50], slots[50];

    for (int part = 0; part < 3; part++) { /* one tensor, which is written in parts */
        for (int i = 0; i < 50; i++)
            cells[i] = 10 + 50 * part + i;
        assert_true(kvp_placement_write(p, cells, 50, NULL, slots));
        for (int i = 0; i < 50; i++) {
            assert_int_equal(slots[i] % 64, (50 * part + i) % 64);
            assert_int_equal(kvp_placement_block(p, (uint32_t)(slots[i] / 64)).index,
                             (50 * part + i) / 64);
        }
    }
    for (int i = 0; i < 50; i++) /* the next tensor */
        cells[i] = 10 + i;
    assert_true(kvp_placement_write(p, cells, 50, NULL, slots));
    for (int i = 0; i < 50; i++)
        assert_int_equal(slots[i], kvp_placement_slot(p, 10) + i);
    cells[0] = N_CELLS;
    assert_false(kvp_placement_write(p, cells, 1, NULL, slots));
    kvp_placement_clear(p);
    assert_int_equal(kvp_placement_slot(p, 10), -1);
    kvp_placement_free(p);
}

/* n rows in the slots from `first` on of a saved block. */
static size_t add_rows(kvp_restored *rows, size_t at, uint32_t block, uint32_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        rows[at + i] = (kvp_restored){ 300 + (int64_t)(at + i), block, first + i };
    return at + n;
}

static void check_restored(const kvp_placement *p, const kvp_restored *rows, size_t n,
                           const uint32_t *at)
{
    for (size_t i = 0; i < n; i++)
        assert_int_equal(kvp_placement_slot(p, (uint32_t)rows[i].cell),
                         at[rows[i].block] * 64 + rows[i].slot);
}

/* Saved rows get slots like those that they had, in blocks without rows of others. All tensors of a
 * cache find the same blocks. While they are restored, no row moves. */
CASE(restored_blocks_keep_their_form)
{
    static const uint32_t index[] = { 0, 2, 3 };
    kvp_placement *p = kvp_placement_create(N_CELLS);
    kvp_restored rows[200];
    uint32_t at[3], again[3];
    size_t n = 0;
    cache c;

    start(&c);
    write_run(&c, p, 0, 150);
    write_run(&c, p, 1, 100);
    n = add_rows(rows, n, 0, 0, 64);
    n = add_rows(rows, n, 1, 5, 40);
    n = add_rows(rows, n, 2, 63, 1);
    assert_true(kvp_placement_restore(p, rows, n, index, 3, at));
    check_restored(p, rows, n, at);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvp_placement_block(p, at[i]).index, index[i]);
        assert_int_equal(kvp_placement_block(p, at[i]).sequence,
                         kvp_placement_block(p, at[0]).sequence);
    }
    check_sequence(&c, p, 0);
    check_sequence(&c, p, 1);
    assert_true(kvp_placement_restore(p, rows, n, index, 3, again));
    assert_memory_equal(at, again, sizeof(at));
    rows[n - 1].slot = 62;
    assert_false(kvp_placement_restore(p, rows, n, index, 3, again));
    rows[n - 1].slot = 63;
    check_restored(p, rows, n, at);
    write_run(&c, p, 1, 3); /* a graph, and then another state */
    rows[n - 1].slot = 62;
    assert_true(kvp_placement_restore(p, rows, n, index, 3, again));
    check_restored(p, rows, n, again);
    check_sequence(&c, p, 1);
    rows[0].cell = N_CELLS;
    assert_false(kvp_placement_restore(p, rows, n, index, 3, again));
    rows[0].cell = -1;
    assert_false(kvp_placement_restore(p, rows, n, index, 3, again));
    kvp_placement_free(p);
}

/* A token follows the last restored row, also when the rows had their slots already and another
 * prompt has used one of the cells since. */
CASE(tokens_follow_restored_rows)
{
    static const uint32_t index[] = { 0, 1 };
    kvp_placement *p = kvp_placement_create(N_CELLS);
    kvp_restored rows[100];
    uint32_t at[2];
    int64_t cell, slot;
    cache c;

    start(&c);
    write_run(&c, p, 0, 100);
    for (uint32_t t = 0; t < 100; t++)
        rows[t] = (kvp_restored){ c.cell_of[0][t], t / 64, t % 64 };
    cell = c.cell_of[0][0];
    assert_true(kvp_placement_write(p, &cell, 1, NULL, &slot));
    assert_true(kvp_placement_restore(p, rows, 100, index, 2, at));
    write_run(&c, p, 0, 5);
    for (uint32_t t = 100; t < 105; t++)
        assert_int_equal(kvp_placement_slot(p, (uint32_t)c.cell_of[0][t]), at[1] * 64 + t % 64);
    kvp_placement_free(p);
}

/* More blocks than are free: the cells have no slots, and get some like any rows. */
CASE(too_many_restored_blocks_are_refused)
{
    kvp_placement *p = kvp_placement_create(N_CELLS);
    const uint32_t most = kvp_placement_blocks(N_CELLS);
    kvp_restored rows[64];
    uint32_t index[64] = { 0 }, at[64];
    int64_t cells[64], slots[64];
    cache c;

    start(&c);
    write_run(&c, p, 0, 150); /* 3 blocks */
    for (uint32_t i = 0; i < most; i++) {
        rows[i] = (kvp_restored){ 200 + i, i, 0 };
        cells[i] = 200 + i;
    }
    assert_true(most <= 64);
    assert_true(kvp_placement_restore(p, rows, most - 3, index, most - 3, at));
    write_run(&c, p, 0, 1);
    assert_false(kvp_placement_restore(p, rows, most, index, most, at));
    assert_int_equal(kvp_placement_slot(p, 200), -1);
    assert_true(kvp_placement_write(p, cells, most, NULL, slots));
    check_sequence(&c, p, 0);
    kvp_placement_free(p);
}

/* Far more short sequences than blocks: sequences share pages then, and every cell still has a
 * slot. */
CASE(every_cell_always_has_a_slot)
{
    kvp_placement *p = kvp_placement_create(N_CELLS);
    uint32_t random = 1;
    int total;
    cache c;

    start(&c);
    for (int round = 0; round < 3000; round++) {
        int s = (int)((random = random * 1664525u + 1013904223u) >> 16) % MAX_SEQUENCES;
        int n = (int)((random = random * 1664525u + 1013904223u) >> 16) % 60 + 1;
        total = 0;
        for (int i = 0; i < MAX_SEQUENCES; i++)
            total += c.length[i];
        if (total + n > N_CELLS || n % 7 == 0)
            remove_from(&c, s, n % 2 ? 0 : c.length[s] / 2);
        else
            write_run(&c, p, s, n);
        check_slots(&c, p);
    }
    kvp_placement_free(p);
}

RUN_CASES(NULL, NULL)
