/* test_centers.c - blocks with centres of their own (kvant_rope.block_centers): their numbers, how
 * much they lower errors, attention on them, and blocks that move to another tensor. */
#include "attend.h"
#include "rotated_text.h"

#include "../../src/base/fnv.h"
#include "../../src/cache/center.h"
#include "../cpu_levels.h"

static fixture make_centered(const layout *l)
{
    fixture f = make(spec, 1, BLOCKS, 0);
    kvant_rope rope = rope_of(l, MOST, 0);
    rope.block_centers = 1;
    assert_int_equal(kvant_tensor_set_rope(f.tensor, &rope), KVANT_OK);
    return f;
}

static void center_of(const fixture *f, uint32_t block, float *center)
{
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        float room[KVANT_MAX_HEAD_DIM];
        const uint32_t transform_id = f->tensor->blocks[block].transform_id;
        const float *of = kvant_block_affine(f->tensor, block, transform_id, h, room).center;
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            center[h * HEAD_DIM + j] = of ? of[j] : 0;
    }
}

static double distance(const float *a, const double *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t j = 0; j < n; j++)
        sum += (a[j] - b[j]) * (a[j] - b[j]);
    return sqrt(sum);
}

static double length(const float *a, uint32_t n)
{
    static const double zero[WIDTH];
    return distance(a, zero, n);
}

/* The expected centre of a block: the mean of the tokens before `end`, each rotated by RoPE to each
 * position of the block. */
static void expect_center(const layout *l, const text *t, uint32_t end, uint32_t block,
                          double *center)
{
    memset(center, 0, WIDTH * sizeof *center);
    for (uint32_t token = 0; token < end; token += 16)
        for (uint32_t slot = 0; slot < 64; slot++)
            for (uint32_t h = 0; h < N_KV_HEADS; h++) {
                double x[HEAD_DIM];
                for (uint32_t j = 0; j < HEAD_DIM; j++)
                    x[j] = t->rows[(size_t)token * WIDTH + h * HEAD_DIM + j];
                rotate_by_rope(l, (double)block * 64 + slot - token, x);
                for (uint32_t j = 0; j < HEAD_DIM; j++)
                    center[h * HEAD_DIM + j] += x[j] / (64.0 * end / 16);
            }
}

/* The tensor learns from 1024 tokens. The expected centre uses 64 of them and the tensor another
 * part. A mean of 64 keys misses the mean of all keys by an eighth of the keys' deviation. */
CASE(centers_are_means_at_the_blocks_positions)
{
    for (uint32_t i = 0; i < 4; i++) {
        const layout *l = &layouts()[i];
        text *t = make_text(l, 21);
        fixture f = make_centered(l);
        put_all(&f, t, 0, MOST, BATCH, 0);
        for (uint32_t block = 16; block < BLOCKS; block += 37) {
            float got[WIDTH], other[WIDTH];
            double want[WIDTH], keys = 0;
            center_of(&f, block, got);
            center_of(&f, block / 2, other);
            expect_center(l, t, 1024, block, want);
            for (uint32_t slot = 0; slot < 64; slot++)
                keys += distance(t->rows + ((size_t)block * 64 + slot) * WIDTH, want, WIDTH) / 64;
            assert_true(distance(got, want, WIDTH) < 0.25 * keys);
            assert_true(distance(other, want, WIDTH) >
                        2 * distance(got, want, WIDTH)); /* otherwise the test shows nothing */
        }
        drop(&f);
        free(t);
    }
}

/* RoPE rotates the mean key, so its mean over the positions of a bucket is small. At each position
 * the mean key has at least a third of these keys' squared length, which a block's own centre
 * removes. */
CASE(errors_are_smaller)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 3);
    fixture f = make_centered(&l), plain = make_rotated(&l, MOST, 0);
    put_all(&f, t, 0, MOST, BATCH, 0);
    put_all(&plain, t, 0, MOST, BATCH, 0);
    for (uint32_t first = 1024; first < MOST; first *= 2)
        assert_true(error_near(&f, t, first, 2 * first, 0) <
                    0.9 * error_near(&plain, t, first, 2 * first, 0));
    assert_true(tensor_info_of(&f).n_transforms <= 9);
    assert_true(tensor_info_of(&f).learned_bytes > tensor_info_of(&plain).learned_bytes);
    drop(&f);
    drop(&plain);
    free(t);
}

enum { PAGES = 46 };

/* Attention multiplies up to 16 pages together when their blocks follow each other. The tables have
 * blocks that do, with hidden ones between them, and blocks that do not. */
static void make_tables(int32_t tables[3][PAGES])
{
    for (int32_t i = 0; i < PAGES; i++) {
        tables[0][i] = i % 5 == 0 ? -1 : i;
        tables[1][i] = i < 20 ? PAGES - 1 - i : i - 20;
        tables[2][i] = i == 17 ? 30 : i == 30 ? 17 : i;
    }
}

CASE(attention_is_on_what_is_read)
{
    static const uint32_t n_queries[] = { 1, 8, 40 };
    int32_t tables[3][PAGES];
    const int32_t *const all[] = { NULL, tables[0], tables[1], tables[2] };
    const layout l = make_layout(12, 1);
    text *t = make_text(&l, 22);
    fixture k = make_centered(&l), v = make_heads("f32", "f32", KVANT_ROLE_V, 1, BLOCKS, 0);
    float *q = malloc(MAX_QUERIES * N_HEADS * HEAD_DIM * sizeof *q);
    attended *got = malloc(sizeof *got);
    uint64_t rng = 23;
    make_tables(tables);
    put_all(&k, t, 0, 3000, BATCH, 0);
    write_range(&v, 0, 3000, BATCH, 1, &rng);
    for (size_t i = 0; i < (size_t)MAX_QUERIES * N_HEADS * HEAD_DIM; i++)
        q[i] = test_normal(&rng);
    for (size_t level = 0; level < COUNT(cpu_levels); level++)
        for (size_t i = 0; i < 2 * COUNT(all) * COUNT(n_queries) && use_level(cpu_levels[level]);
             i++) {
            const int32_t *table = all[i / 2 % COUNT(all)];
            kvant_attention_problem p = { .n_queries = n_queries[i / 2 / COUNT(all)],
                                          .n_tokens = table ? 64 * PAGES : 3000,
                                          .block_table = table,
                                          .scale = 0.05f,
                                          .causal = 1,
                                          .exact = 1,
                                          .logit_softcap = i % 2 ? 20 : 0 };
            assert_int_equal(attend(&k, &v, &p, q, got), KVANT_OK);
            check_attended(&k, &v, &p, got, 1e-4);
        }
    assert_int_equal(kvant_set_cpu_level(KVANT_CPU_AUTO), KVANT_OK);
    drop(&k);
    drop(&v);
    free(q);
    free(got);
    free(t);
}

static void assert_same_rows(const fixture *f, const fixture *g, uint32_t slot)
{
    float x[WIDTH], y[WIDTH];
    read_slot(f, slot, x);
    read_slot(g, slot, y);
    assert_memory_equal(x, y, sizeof x);
}

/* Moves blocks to tensors that know no RoPE. The first block is an exact one. */
CASE(blocks_take_their_centers_along)
{
    const layout l = make_layout(12, 1);
    text *t = make_text(&l, 24);
    fixture f = make_centered(&l), copy = make_like(&f), import = make(spec, 1, BLOCKS, 0);
    put_all(&f, t, 0, 2100, BATCH, 0);
    assert_int_equal(kvant_tensor_copy(f.tensor, 0, copy.tensor, 0, 40), KVANT_OK);
    for (uint32_t block = 0; block < 40; block++) {
        exported e = export_block(&f, block);
        assert_int_equal(kvant_tensor_import(import.tensor, block, e.data, e.bytes), KVANT_OK);
        free(e.data);
        assert_same_block(&f, block, &copy, block);
        assert_same_block(&f, block, &import, block);
        for (uint32_t slot = 64 * block; slot < 64 * block + 64 && slot < 2100; slot += 9) {
            assert_same_rows(&f, &copy, slot);
            assert_same_rows(&f, &import, slot);
        }
    }
    drop(&f);
    drop(&copy);
    drop(&import);
    free(t);
}

/* Damages fields of the header and some frequencies and numbers, with a checksum that is right. */
CASE(damaged_centers_are_refused)
{
    const layout l = make_layout(12, 1);
    const size_t at = 40 + 2 * WIDTH * sizeof(float) +
                      N_KV_HEADS * kvant_triangle_size(HEAD_DIM) * sizeof(uint16_t);
    const struct {
        size_t place;
        uint32_t number;
    } bad[] = {
        { 0, 0 },          { 0, 13 },         { 0, HEAD_DIM + 2 },
        { 0, UINT32_MAX }, { 4, 2 },          { 8, 0x7fc00000 },
        { 8, 0x7f800000 }, { 8, 0x44fa0000 }, { 8 + HEAD_DIM / 2 * sizeof(float) + 8, 0x7fc00000 }
    };
    text *t = make_text(&l, 25);
    fixture f = make_centered(&l), g = make(spec, 1, BLOCKS, 0);
    put_all(&f, t, 0, 1024, BATCH, 0);
    for (size_t i = 0; i <= COUNT(bad); i++) {
        exported e = export_block(&f, 12);
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
    drop(&f);
    drop(&g);
    free(t);
}

/* Rows of several sequences in one block, or rows of unknown positions: the block uses the centre
 * of its transform, as a tensor without block centres does. */
CASE(blocks_of_mixed_positions_share_a_center)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 26);
    fixture f = make_centered(&l);
    int64_t slots[64];
    int32_t mixed[64];
    float a[WIDTH], b[WIDTH], known[WIDTH];
    put_all(&f, t, 0, 1024, BATCH, 0);
    for (uint32_t block = 16; block < 18; block++) {
        for (uint32_t i = 0; i < 64; i++) {
            slots[i] = block * 64 + i;
            mixed[i] = (int32_t)(i % 2 ? 700 + i / 2 : 100 + i / 2);
        }
        put(&f, t, slots, mixed, 64, true);
    }
    center_of(&f, 15, known);
    center_of(&f, 16, a);
    center_of(&f, 17, b);
    assert_int_equal(block_of(&f, 16, 0).transform_id, block_of(&f, 17, 0).transform_id);
    assert_memory_equal(a, b, sizeof a);
    assert_true(length(a, WIDTH) < length(known, WIDTH));
    /* rows read back as they were written, within the codec's error */
    for (uint32_t i = 0; i < 64; i += 7) {
        double want[WIDTH];
        float got[WIDTH];
        for (uint32_t j = 0; j < WIDTH; j++)
            want[j] = f.rows[(16 * 64 + i) * WIDTH + j];
        read_slot(&f, 16 * 64 + i, got);
        assert_true(distance(got, want, WIDTH) <
                    0.5 * length(f.rows + (16 * 64 + i) * WIDTH, WIDTH));
    }
    drop(&f);
    free(t);
}

/* llama.cpp writes keys again at other positions when it shifts a context. A few rewritten rows of
 * a block do not move its other rows. */
CASE(rewritten_blocks_have_other_positions)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 27);
    fixture f = make_centered(&l);
    float before[WIDTH], some[WIDTH], all[WIDTH], there[WIDTH];
    put_all(&f, t, 0, 1024, BATCH, 0);
    center_of(&f, 10, before);
    center_of(&f, 3, there);
    put_all(&f, t, 640 - 448, 640 - 448 + 10, BATCH, 448);
    center_of(&f, 10, some);
    assert_memory_equal(before, some, sizeof some);
    put_all(&f, t, 640 - 448, 704 - 448, BATCH, 448);
    center_of(&f, 10, all);
    assert_true(memcmp(before, all, sizeof all) != 0);
    assert_memory_equal(there, all, sizeof all);
    assert_int_equal(kvant_tensor_clear_blocks(f.tensor, 10, 1), KVANT_OK);
    put_all(&f, t, 640, 704, BATCH, 0);
    center_of(&f, 10, some);
    assert_memory_equal(before, some, sizeof some);
    drop(&f);
    free(t);
}

/* Token by token, in batches, at every level. */
CASE(levels_and_batches_do_not_change_bytes)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 28);
    fixture f = make_centered(&l);
    put_all(&f, t, 0, 2048, BATCH, 0);
    for (size_t level = 0; level < COUNT(cpu_levels); level++) {
        if (!use_level(cpu_levels[level]))
            continue;
        fixture g = make_centered(&l);
        put_all(&g, t, 0, 2048, BATCH, 0);
        for (uint32_t block = 0; block < 32; block++)
            assert_same_block(&f, block, &g, block);
        drop(&g);
    }
    assert_int_equal(kvant_set_cpu_level(KVANT_CPU_AUTO), KVANT_OK);
    drop(&f);
    free(t);
}

/* kvant's RoPE phases for any layout and any position. An angle of 2^31 is known within 2^31
 * 2^-53. */
CASE(phases_rotate_vectors)
{
    static const int32_t positions[] = { 0, 1, 63, 8191, -40, INT32_MAX };
    uint64_t rng = 29;
    for (size_t i = 0; i < 4 * COUNT(positions); i++) {
        const layout *l = &layouts()[i % 4];
        const kvant_rope rope = rope_of(l, 0, 0);
        float phase[HEAD_DIM], x[HEAD_DIM];
        uint16_t pairs[HEAD_DIM];
        double want[HEAD_DIM];
        assert_ok(kvant_rope_phase(&rope, HEAD_DIM, positions[i / 4], phase, pairs));
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            want[j] = x[j] = test_normal(&rng);
        rotate_by_rope(l, positions[i / 4], want);
        for (uint32_t j = 0; j < PAIRS; j++) {
            const float a = x[pairs[2 * j]], b = x[pairs[2 * j + 1]], cosine = phase[j],
                        sine = phase[PAIRS + j];
            x[pairs[2 * j]] = a * cosine - b * sine;
            x[pairs[2 * j + 1]] = b * cosine + a * sine;
        }
        assert_true(distance(x, want, HEAD_DIM) < 1e-4);
    }
}

CASE(arguments_are_checked)
{
    const layout l = make_layout(HEAD_DIM, 0);
    fixture f = make_centered(&l);
    float center[N_KV_HEADS * HEAD_DIM];
    center_of(&f, 0, center);
    assert_true(length(center, N_KV_HEADS * HEAD_DIM) == 0);
    const kvant_rope rope = rope_of(&l, 0, 0), none = { .n_dims = 2 };
    float phase[KVANT_MAX_HEAD_DIM];
    assert_int_equal(kvant_rope_phase(&rope, HEAD_DIM, 7, phase, NULL), KVANT_OK);
    assert_int_equal(kvant_rope_phase(&rope, HEAD_DIM, 7, NULL, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_rope_phase(&rope, HEAD_DIM + 1, 7, phase, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_rope_phase(&rope, HEAD_DIM - 2, 7, phase, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_rope_phase(&rope, 2 * KVANT_MAX_HEAD_DIM, 7, phase, NULL),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_rope_phase(&none, HEAD_DIM, 7, phase, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_rope_phase(NULL, HEAD_DIM, 7, phase, NULL), KVANT_ERR_ARGUMENT);
    drop(&f);
}

RUN_CASES(NULL, NULL)
