/* test_shift.c - shifted keys (kvant_tensor_shift): the rows that are read, attention on them, new
 * rows next to them, and blocks that move. Also a tensor that has too many shifts. */
#include "attend.h"
#include "rotated_text.h"

#include "../../src/base/fnv.h"
#include "../../src/cache/shift.h"
#include "../cpu_levels.h"

enum { TOKENS = 1500, SLOTS = 24 * 64 };

static const char *const specs[] = { "turboquant-4:transform=first", "trellis-4:transform=first",
                                     "trellis-4:center=first,norm=first",
                                     "int-4:axis=channel,group=32,recent=100,sink=4", "f16" };

/* Keys of a text, in blocks with centres of their own if the codec has matrices. */
static fixture make_keys(const char *of, const layout *l, const text *t, uint32_t n)
{
    fixture f = make(of, 1, BLOCKS, 0);
    kvant_rope rope = rope_of(l, MOST, 0);
    rope.block_centers = 1;
    assert_int_equal(kvant_tensor_set_rope(f.tensor, &rope), KVANT_OK);
    put_all(&f, t, 0, n, BATCH, 0);
    return f;
}

/* The rows of the slots when they were looked at, and how far each has moved since. */
typedef struct record {
    float rows[SLOTS * WIDTH];
    int32_t moved[SLOTS];
} record;

static record *look(const fixture *f)
{
    record *r = calloc(1, sizeof *r);
    assert_non_null(r);
    assert_int_equal(kvant_tensor_read(f->tensor, 0, SLOTS, r->rows, WIDTH), KVANT_OK);
    return r;
}

static kvant_status shift(fixture *f, const layout *l, const int32_t *by, size_t n)
{
    const kvant_rope rope = rope_of(l, 0, 0);
    return kvant_tensor_shift(f->tensor, &rope, by, n, 2);
}

/* Moves slots first .. end - 1. */
static void move(fixture *f, const layout *l, record *r, uint32_t first, uint32_t end, int32_t by)
{
    int32_t all[SLOTS] = { 0 };
    for (uint32_t slot = first; slot < end; slot++) {
        all[slot] = by;
        r->moved[slot] += by;
    }
    assert_int_equal(shift(f, l, all, SLOTS), KVANT_OK);
}

static double distance(const float *got, const double *want)
{
    double sum = 0;
    for (uint32_t j = 0; j < HEAD_DIM; j++)
        sum += (got[j] - want[j]) * (got[j] - want[j]);
    return sqrt(sum);
}

/* A pair (a, b) of length r is rotated in binary32. Cosine and sine err by 2^-25, and two products
 * and a sum err by 2^-24 of their size each. So a channel errs by less than (|a| + |b|) 2.5 x
 * 2^-24. This is at most 3.6 x 2^-24 r. Both channels err by 5.1 2^-24 r. */
#define ROTATION (6 / 16777216.0)

/* Slots hold their former rows, rotated in double precision by the sum of their shifts. */
static void check_moved(const fixture *f, const layout *l, const record *r)
{
    for (uint32_t slot = 0; slot < TOKENS; slot++) {
        float got[WIDTH];
        read_slot(f, slot, got);
        for (uint32_t h = 0; h < N_KV_HEADS; h++) {
            static const double none[HEAD_DIM];
            double want[HEAD_DIM];
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                want[j] = r->rows[(size_t)slot * WIDTH + h * HEAD_DIM + j];
            rotate_by_rope(l, r->moved[slot], want);
            const double length = distance(r->rows + (size_t)slot * WIDTH + h * HEAD_DIM, none);
            if (!(distance(got + h * HEAD_DIM, want) <= ROTATION * length))
                fail_msg("slot %u head %u moved by %d: off by %g of %g", slot, h, r->moved[slot],
                         distance(got + h * HEAD_DIM, want), length);
        }
    }
}

static void check_attention(const fixture *k, const fixture *v, const float *q, attended *got)
{
    static const uint32_t n_queries[] = { 1, 8, 40 };
    for (size_t i = 0; i < 2 * COUNT(n_queries); i++) {
        kvant_attention_problem p = { .n_queries = n_queries[i / 2],
                                      .n_tokens = TOKENS,
                                      .scale = 0.05f,
                                      .causal = 1,
                                      .exact = 1,
                                      .logit_softcap = i % 2 ? 20 : 0,
                                      .window = i / 2 == 1 ? 700 : 0 };
        assert_int_equal(attend(k, v, &p, q, got), KVANT_OK);
        check_attended(k, v, &p, got, 1e-4); /* the bound of blocks with centres (test_centers) */
        p.exact = 0; /* queries become integers: coarser, but on the same keys */
        assert_int_equal(attend(k, v, &p, q, got), KVANT_OK);
        check_attended(k, v, &p, got, 0.05);
    }
}

/* Every kind of page and of RoPE pairs: blocks that move as a whole, and blocks of which a part
 * moves, again and again. */
CASE(shifted_keys_are_rotated_ones)
{
    fixture v = make_heads("f32", "f32", KVANT_ROLE_V, 1, BLOCKS, 0);
    float *q = malloc(MAX_QUERIES * N_HEADS * HEAD_DIM * sizeof *q);
    attended *got = malloc(sizeof *got);
    uint64_t rng = 31;
    write_range(&v, 0, TOKENS, BATCH, 1, &rng);
    fill_normal(q, (size_t)MAX_QUERIES * N_HEADS * HEAD_DIM, &rng);
    for (size_t i = 0; i < COUNT(specs) + 3; i++) {
        const layout *l = &layouts()[i % 4];
        text *t = make_text(l, 40 + i);
        fixture f = make_keys(specs[i % COUNT(specs)], l, t, TOKENS);
        record *r = look(&f);
        move(&f, l, r, 0, SLOTS, 700);
        check_moved(&f, l, r);
        move(&f, l, r, 4, TOKENS, -100);
        move(&f, l, r, 300, 1100, -7);
        check_moved(&f, l, r);
        check_attention(&f, &v, q, got);
        move(&f, l, r, 0, SLOTS, 3);
        move(&f, l, r, 310, 320, 1 << 20);
        check_moved(&f, l, r);
        check_attention(&f, &v, q, got);
        assert_int_equal(f.tensor->shifts->n_encoded, 0);
        free(r);
        drop(&f);
        free(t);
    }
    drop(&v);
    free(q);
    free(got);
}

/* A context that drops one token at a time after the first 4: errors do not add up. */
CASE(many_shifts_cost_nothing)
{
    const layout *l = &layouts()[0];
    text *t = make_text(l, 50);
    fixture f = make_keys(specs[1], l, t, TOKENS);
    record *r = look(&f);
    for (int32_t i = 0; i < 200; i++) {
        int32_t by[TOKENS];
        for (int32_t slot = 0; slot < TOKENS; slot++)
            by[slot] = slot < 4 ? 0 : slot <= 4 + i ? KVANT_ANY_SHIFT : -1;
        assert_int_equal(shift(&f, l, by, TOKENS), KVANT_OK);
        for (uint32_t slot = 4; slot < TOKENS; slot++)
            r->moved[slot]--;
    }
    for (uint32_t slot = 4; slot < 204; slot++) { /* any position */
        r->moved[slot] = 0;
        read_slot(&f, slot, r->rows + (size_t)slot * WIDTH);
    }
    check_moved(&f, l, r);
    assert_int_equal(f.tensor->shifts->n_encoded, 0);
    free(r);
    drop(&f);
    free(t);
}

/* Root mean square error of slots, relative to the rows that they should hold: `rows`, each
 * moved. */
static double error_of_slots(const fixture *f, const layout *l, const float *rows,
                             const int32_t *moved, uint32_t first, uint32_t end)
{
    double error = 0, size = 0;
    for (uint32_t slot = first; slot < end; slot++) {
        float got[WIDTH];
        read_slot(f, slot, got);
        for (uint32_t h = 0; h < N_KV_HEADS; h++) {
            double want[HEAD_DIM];
            for (uint32_t j = 0; j < HEAD_DIM; j++) {
                want[j] = rows[(size_t)slot * WIDTH + h * HEAD_DIM + j];
                size += want[j] * want[j];
            }
            rotate_by_rope(l, moved[slot], want);
            error += pow(distance(got + h * HEAD_DIM, want), 2);
        }
    }
    return sqrt(error / size);
}

/* More different shifts than a tensor can have: keys are encoded again and are at the right
 * positions. Quantising a second time adds an error of the size of the first, so the error is at
 * most twice as large. A key that is off by one position errs by more than half its length in the
 * fastest pairs. */
CASE(too_many_shifts_are_encoded)
{
    const layout *l = &layouts()[1];
    text *t = make_text(l, 51);
    fixture f = make_keys("int-8", l, t, TOKENS);
    record *r = look(&f);
    int32_t by[SLOTS];
    const double before = error_of_slots(&f, l, f.rows, r->moved, 0, TOKENS);
    for (int32_t slot = 0; slot < SLOTS; slot++)
        by[slot] = slot; /* all in one call */
    assert_int_equal(shift(&f, l, by, SLOTS), KVANT_ERR_FULL);
    check_moved(&f, l, r);
    for (uint32_t i = 0; i < 40; i++)
        move(&f, l, r, 20 * i, 20 * i + 20, 5 * (int32_t)i + 1);
    assert_true(f.tensor->shifts->n_encoded > 0);
    const double after = error_of_slots(&f, l, f.rows, r->moved, 0, TOKENS);
    print_message("relative error %.5f, encoded again %.5f\n", before, after);
    assert_true(after <= 2 * before);
    /* another RoPE: keys that were shifted by the former RoPE stay shifted */
    const layout other = make_layout(12, 0);
    float *rows = malloc(sizeof r->rows);
    assert_int_equal(kvant_tensor_read(f.tensor, 0, SLOTS, rows, WIDTH), KVANT_OK);
    memset(by, 0, sizeof by);
    for (uint32_t slot = 100; slot < TOKENS; slot++)
        by[slot] = 9;
    assert_int_equal(shift(&f, &other, by, SLOTS), KVANT_OK);
    assert_true(error_of_slots(&f, &other, rows, by, 0, TOKENS) <= 2 * before);
    free(rows);
    free(r);
    drop(&f);
    free(t);
}

/* When keys are encoded again, the first 64 tokens and the newest 128 stay fp16. A row is rounded
 * when it is written and each time that it is encoded again, by at most 2^-11 of its length.
 * Rotations in binary32 add less than a hundredth of that. */
CASE(encoded_again_exact_rows_are_exact)
{
    static const kvant_exact_part part = {
        .size = sizeof part, .first = 64, .newest = 128, .total = 192, .step = 64
    };
    static const char *const of[] = { "turboquant-4", "trellis-2", "int-2:axis=channel,group=32",
                                      "int-4:recent=128,sink=64" };
    for (size_t i = 0; i < COUNT(of); i++) {
        const layout *l = &layouts()[1];
        const layout other = make_layout(12, 0);
        text *t = make_text(l, 61);
        fixture f = make(of[i], 1, BLOCKS, 0);
        if (i + 1 < COUNT(of)) {
            fixture exact = f;
            exact.params.exact = &part;
            kvant_tensor_free(&f.tensor);
            free(f.memory);
            free(f.rows);
            make_tensor(&exact);
            f = exact;
        }
        put_all(&f, t, 0, TOKENS, 50, 0);
        record *r = look(&f);
        int32_t by[SLOTS] = { 0 };
        move(&f, l, r, 0, SLOTS, 700);
        assert_int_equal(f.tensor->shifts->n_encoded, 0);
        by[0] = 1; /* with another RoPE: keys are encoded with the shifts of the former RoPE */
        assert_int_equal(shift(&f, &other, by, SLOTS), KVANT_OK);
        assert_int_equal(kvant_slot_shift(f.tensor, 1, 0), 0);
        for (uint32_t j = 0; j < 191; j++) {
            const uint32_t slot = j < 63 ? j + 1 : TOKENS - 191 + j;
            const double error = error_of_slots(&f, l, f.rows, r->moved, slot, slot + 1);
            if (!(error <= 2 * 1.01 / 2048))
                fail_msg("%s: row %u is off by %g", of[i], slot, error);
        }
        free(r);
        drop(&f);
        free(t);
    }
}

/* The row of a token of the text at a position. */
static void row_at(const layout *l, const text *t, uint32_t token, int32_t position, float *row)
{
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        double x[HEAD_DIM];
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            x[j] = t->rows[(size_t)token * WIDTH + h * HEAD_DIM + j];
        rotate_by_rope(l, position - (int32_t)token, x);
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            row[h * HEAD_DIM + j] = (float)x[j];
    }
}

static void put_row(fixture *f, record *r, int64_t slot, int32_t position, const float *row)
{
    memcpy(r->rows + slot * WIDTH, row, WIDTH * sizeof *row);
    r->moved[slot] = 0;
    assert_int_equal(kvant_tensor_next_positions(f->tensor, &position, 1), KVANT_OK);
    assert_int_equal(kvant_tensor_write(f->tensor, &slot, 1, row, WIDTH, 1), KVANT_OK);
}

/* Rows are written next to shifted rows, in their place and in a new block. They read as they were
 * written, after a rotation back and one forward; f32 adds no further rounding. They move with
 * later shifts. */
CASE(rows_are_written_beside_shifted_ones)
{
    const layout *l = &layouts()[3];
    text *t = make_text(l, 52);
    fixture f = make_keys("f32", l, t, 1400);
    record *r = look(&f);
    float row[WIDTH];
    memset(r->rows + 1400 * WIDTH, 0, (SLOTS - 1400) * WIDTH * sizeof(float));
    move(&f, l, r, 70, 1400, -33);
    for (uint32_t i = 0; i < 100; i++) {
        row_at(l, t, 2000 + i, 1367 + (int32_t)i, row);
        put_row(&f, r, i % 3 ? 1400 + i : 50 + 5 * i, 1367 + (int32_t)i, row);
    }
    for (uint32_t slot = 0; slot < TOKENS; slot++) {
        float got[WIDTH];
        read_slot(&f, slot, got);
        memcpy(r->rows + slot * WIDTH,
               r->moved[slot] == 0 && f.tensor->blocks[slot / 64].written >> slot % 64 & 1
                   ? r->rows + slot * WIDTH
                   : got,
               sizeof got);
        for (uint32_t h = 0; h < N_KV_HEADS && r->moved[slot] == 0; h++) {
            static const double none[HEAD_DIM];
            double want[HEAD_DIM];
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                want[j] = r->rows[slot * WIDTH + h * HEAD_DIM + j];
            assert_true(distance(got + h * HEAD_DIM, want) <=
                        2 * ROTATION * distance(r->rows + slot * WIDTH + h * HEAD_DIM, none));
        }
        memcpy(r->rows + slot * WIDTH, got, sizeof got);
        r->moved[slot] = 0;
    }
    assert_int_equal(f.tensor->shifts->n_encoded, 0);
    free(r);
    drop(&f);
    free(t);
}

/* A conversation in the cells of its first rounds. Each round drops the oldest 40 tokens after the
 * first 20, and 40 new tokens get their slots. Keys are as exact as keys of a text that never
 * moved, and attention needs few views. */
static void rolling_conversation(const char *of)
{
    enum { KEPT = 20, EACH = 40, WINDOW = 500, TURNS = 60 };
    const layout *l = &layouts()[0];
    text *t = make_text(l, 53);
    fixture f = make_keys(of, l, t, WINDOW);
    record *r = look(&f);
    int32_t position[SLOTS];
    uint32_t next = WINDOW;
    float row[WIDTH];
    memcpy(r->rows, f.rows, sizeof r->rows);
    const double before = error_of_slots(&f, l, r->rows, r->moved, 0, WINDOW);
    for (int32_t slot = 0; slot < SLOTS; slot++)
        position[slot] = slot;
    for (uint32_t turn_at = 0; turn_at < TURNS; turn_at++) {
        int32_t by[SLOTS] = { 0 };
        int64_t gone[EACH];
        uint32_t n = 0;
        for (int32_t slot = 0; slot < WINDOW; slot++) {
            if (position[slot] >= KEPT && position[slot] < KEPT + EACH)
                gone[n++] = slot;
            else if (position[slot] >= KEPT)
                by[slot] = -EACH;
            position[slot] += by[slot];
            r->moved[slot] += by[slot];
        }
        assert_int_equal(n, EACH);
        assert_int_equal(shift(&f, l, by, SLOTS), KVANT_OK);
        for (uint32_t i = 0; i < EACH; i++, next++) {
            position[gone[i]] = WINDOW - EACH + (int32_t)i;
            row_at(l, t, next, position[gone[i]], row);
            put_row(&f, r, gone[i], position[gone[i]], row);
        }
        uint32_t n_used = 0;
        for (uint32_t used = kvant_shifts_used(f.tensor); used; used &= used - 1)
            n_used++;
        assert_true(n_used <= 8);
    }
    const double after = error_of_slots(&f, l, r->rows, r->moved, 0, WINDOW);
    print_message("%s: relative error %.4f, after %u turns %.4f\n", of, before, TURNS, after);
    assert_true(after <= 1.1 * before);
    assert_int_equal(f.tensor->shifts->n_encoded, 0);
    free(r);
    drop(&f);
    free(t);
}

CASE(conversations_may_roll)
{
    rolling_conversation("int-8");
    rolling_conversation("turboquant-4");
    rolling_conversation(specs[0]);
    rolling_conversation(specs[1]);
}

static void assert_same_slots(const fixture *f, uint32_t block, const fixture *g, uint32_t other)
{
    for (uint32_t slot = 0; slot < 64; slot++) {
        float a[WIDTH], b[WIDTH];
        read_slot(f, block * 64 + slot, a);
        read_slot(g, other * 64 + slot, b);
        assert_memory_equal(a, b, sizeof a);
    }
}

/* Sealed, exact and mixed blocks keep their shifts when they move. Target tensors have another
 * RoPE, too many shifts, or no RoPE. */
CASE(blocks_take_their_shifts_along)
{
    static const uint32_t blocks[] = { 0, 1, 6, 22, 23 };
    const layout *l = &layouts()[2], other = make_layout(HEAD_DIM, 1);
    text *t = make_text(l, 54);
    for (size_t i = 0; i < COUNT(specs); i++) {
        fixture f = make_keys(specs[i], l, t, TOKENS), g = make_like(&f), h = make_like(&f);
        const kvant_rope rope = rope_of(&other, MOST, 0);
        assert_int_equal(kvant_tensor_set_rope(h.tensor, &rope), KVANT_OK);
        put_all(&h, t, 0, TOKENS, BATCH, 0);
        record *r = look(&f), *s = look(&h);
        move(&f, l, r, 10, TOKENS, -77);
        move(&f, l, r, 400, 420, 30);
        move(&h, &other, s, 0, TOKENS, 5);
        for (size_t b = 0; b < COUNT(blocks); b++) {
            exported e = export_block(&f, blocks[b]), again;
            assert_int_equal(kvant_tensor_import(g.tensor, blocks[b], e.data, e.bytes), KVANT_OK);
            assert_same_slots(&f, blocks[b], &g, blocks[b]);
            again = export_block(&g, blocks[b]);
            assert_int_equal(e.bytes, again.bytes);
            assert_memory_equal(e.data, again.data, e.bytes);
            assert_int_equal(kvant_tensor_import(h.tensor, blocks[b], e.data, e.bytes),
                             KVANT_ERR_FULL);
            free(e.data);
            free(again.data);
            assert_ok(kvant_tensor_copy(f.tensor, blocks[b], g.tensor, 40 + blocks[b], 1));
            assert_same_slots(&f, blocks[b], &g, 40 + blocks[b]);
            assert_int_equal(kvant_tensor_copy(f.tensor, blocks[b], h.tensor, 40 + blocks[b], 1),
                             KVANT_ERR_FULL);
            assert_ok(kvant_tensor_copy(f.tensor, blocks[b], f.tensor, 40 + blocks[b], 1));
            assert_same_slots(&f, blocks[b], &f, 40 + blocks[b]);
        }
        check_moved(&h, &other, s);
        assert_int_equal(kvant_tensor_clear_blocks(f.tensor, 6, 1), KVANT_OK);
        assert_false(kvant_shifts_any(f.tensor, 6, UINT64_MAX));
        kvant_tensor_clear(f.tensor);
        put_all(&f, t, 0, 200, BATCH, 0);
        assert_null(f.tensor->shifts);
        free(r);
        free(s);
        drop(&g);
        drop(&h);
        drop(&f);
    }
    free(t);
}

/* Damages the fields of an exported block's shifts, with a checksum that is right. */
CASE(damaged_shifts_are_refused)
{
    const layout l = make_layout(12, 1);
    const size_t at = 72, by = 8 + HEAD_DIM / 2 * sizeof(float);
    const struct {
        size_t place;
        uint32_t number;
    } bad[] = { { 0, 0 },           { 0, 13 },          { 0, HEAD_DIM + 2 },
                { 4, 2 },           { 8, 0x7fc00000 },  { 8, 0x44fa0000 },
                { by, 0x40000001 }, { by, 0x80000000 }, { by + 252, 1 } };
    text *t = make_text(&l, 55);
    fixture f = make_keys("int-8", &l, t, TOKENS), g = make("int-8", 1, BLOCKS, 0),
            v = make_heads("int-8", "int-8", KVANT_ROLE_V, 1, BLOCKS, 0);
    record *r = look(&f);
    move(&f, &l, r, 0, TOKENS, -1);
    for (size_t i = 0; i <= COUNT(bad); i++) {
        exported e = export_block(&f, 23); /* the block is not full */
        const size_t body = e.bytes - sizeof(uint64_t);
        if (i < COUNT(bad))
            memcpy((uint8_t *)e.data + at + bad[i].place, &bad[i].number, sizeof bad[i].number);
        const uint64_t checksum = kvant_checksum_of(e.data, body);
        memcpy((uint8_t *)e.data + body, &checksum, sizeof checksum);
        assert_int_equal(kvant_tensor_import(g.tensor, 12, e.data, e.bytes),
                         i < COUNT(bad) ? KVANT_ERR_FORMAT : KVANT_OK);
        assert_true((block_of(&g, 12, 0).written != 0) == (i == COUNT(bad)));
        free(e.data);
    }
    free(r);
    drop(&f);
    drop(&g);
    drop(&v);
    free(t);
}

CASE(arguments_are_checked)
{
    const layout *l = &layouts()[0];
    fixture f = make("int-8", 1, 2, 0), v = make_heads("int-8", "int-8", KVANT_ROLE_V, 1, 2, 0);
    kvant_rope rope = rope_of(l, 0, 0);
    int32_t by[129] = { 1 };
    uint64_t rng = 3;
    write_range(&f, 0, 100, 100, 1, &rng);
    assert_int_equal(kvant_tensor_shift(NULL, &rope, by, 1, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_shift(v.tensor, &rope, by, 1, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_shift(f.tensor, NULL, by, 1, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, NULL, 1, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 129, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 1, 0), KVANT_ERR_ARGUMENT);
    rope.n_dims = 3;
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 1, 1), KVANT_ERR_ARGUMENT);
    rope.n_dims = l->n_dims;
    by[0] = (1 << 30) + 1;
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 1, 1), KVANT_ERR_ARGUMENT);
    by[0] = 1 << 30;
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 1, 1), KVANT_OK);
    by[0] = 1;
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 1, 1),
                     KVANT_ERR_ARGUMENT); /* the sum of the shifts */
    by[0] = -(1 << 30);
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, by, 1, 1), KVANT_OK);
    assert_int_equal(kvant_tensor_shift(f.tensor, &rope, NULL, 0, 1), KVANT_OK);
    assert_false(kvant_shifts_any(f.tensor, 0, UINT64_MAX));
    drop(&f);
    drop(&v);
}

RUN_CASES(NULL, NULL)
