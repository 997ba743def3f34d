/* test_position_buckets.c - transform=first with RoPE: second moments over positions, and
 * transforms for positions that no row has had yet. */
#include "rotated_text.h"

#include "../cpu_levels.h"

CASE(vectors_are_rotated_back)
{
    static const int64_t positions[] = { 0,    1, 2,    3,  700, 1400,      2100,
                                         2099, 0, 8191, -5, -12, 2147483646 };
    uint64_t rng = 1;
    for (uint32_t i = 0; i < 4; i++) {
        fixture f = make_rotated(&layouts()[i], 0, 0);
        kvant_rope_rotation rotation;
        kvant_rope_rotation_begin(&rotation, f.tensor->learning->rope, 0);
        for (size_t p = 0; p < COUNT(positions); p++) {
            double x[HEAD_DIM];
            float y[HEAD_DIM];
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                x[j] = y[j] = test_normal(&rng);
            rotate_by_rope(&layouts()[i], -(double)positions[p], x);
            kvant_rope_rotate_back(&rotation, positions[p], y);
            for (uint32_t j = 0; j < HEAD_DIM;
                 j++) /* binary32; kvant knows a large angle (2^31) within 2^31 2^-53 */
                assert_true(fabs(y[j] - x[j]) < 1e-5);
        }
        drop(&f);
    }
}

/* Second moments of some vectors, each rotated by RoPE to every position of a range of position
 * buckets. Every bucket counts the same. */
CASE(moments_are_means_over_positions)
{
    static const struct {
        uint32_t first, end; /* of the 3 position buckets of 3000 positions */
    } spans[] = { { 0, 1 }, { 1, 2 }, { 2, 3 }, { 1, 3 }, { 0, 3 } };
    static const double edges[] = { 0, 1024, 2048, 3000 };
    enum { VECTORS = 5 };
    uint64_t rng = 2;
    for (size_t r = 0; r < COUNT(spans) * 4; r++) {
        const layout *l = &layouts()[r % 4];
        const uint32_t first = spans[r / 4].first, end = spans[r / 4].end;
        double x[VECTORS][HEAD_DIM], mean[HEAD_DIM] = { 0 }, moments[HEAD_DIM * HEAD_DIM] = { 0 };
        double alone[HEAD_DIM], want_mean[HEAD_DIM] = { 0 }, want[HEAD_DIM * HEAD_DIM] = { 0 },
                                length = 0;
        fixture f = make_rotated(l, 3000, 0);
        assert_int_equal(f.tensor->learning->rope->n_buckets, 3);
        for (uint32_t v = 0; v < VECTORS; v++)
            for (uint32_t j = 0; j < HEAD_DIM; j++) {
                x[v][j] = test_normal(&rng) + 3;
                mean[j] += x[v][j] / VECTORS;
                length += x[v][j] * x[v][j] / VECTORS;
            }
        for (uint32_t v = 0; v < VECTORS; v++)
            for (uint32_t i = 0; i < HEAD_DIM * HEAD_DIM; i++)
                moments[i] += x[v][i / HEAD_DIM] * x[v][i % HEAD_DIM] / VECTORS;
        for (uint32_t bucket = first; bucket < end; bucket++)
            for (double p = edges[bucket]; p < edges[bucket + 1]; p++) {
                const double weight =
                    1 / ((edges[bucket + 1] - edges[bucket]) * (end - first) * VECTORS);
                for (uint32_t v = 0; v < VECTORS; v++) {
                    double y[HEAD_DIM];
                    memcpy(y, x[v], sizeof y);
                    rotate_by_rope(l, p, y);
                    for (uint32_t j = 0; j < HEAD_DIM; j++)
                        want_mean[j] += weight * y[j];
                    for (uint32_t i = 0; i < HEAD_DIM * HEAD_DIM; i++)
                        want[i] += weight * y[i / HEAD_DIM] * y[i % HEAD_DIM];
                }
            }
        const kvant_bucket_span span = { (uint8_t)first, (uint8_t)end };
        kvant_rope_means *means;
        memcpy(alone, mean, sizeof alone);
        assert_ok(kvant_rope_mean(f.tensor->learning->rope, 0, (int32_t)edges[first],
                                  (int32_t)edges[first + 1] - 1, alone));
        assert_ok(kvant_rope_means_new(f.tensor->learning->rope, 0, span, 1, &means));
        kvant_rope_means_apply(means, mean, moments);
        kvant_rope_means_free(means);
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            assert_true(fabs(mean[j] - want_mean[j]) < 1e-9 * sqrt(length) &&
                        (end > first + 1 || alone[j] == mean[j]));
        for (uint32_t i = 0; i < HEAD_DIM * HEAD_DIM; i++)
            assert_true(fabs(moments[i] - want[i]) < 1e-9 * length);
        drop(&f);
    }
}

CASE(bad_ropes_are_refused)
{
    const layout whole = make_layout(HEAD_DIM, 0);
    const kvant_rope good = rope_of(&whole, 0, 0);
    float numbers[PAIRS] = { NAN }, large[PAIRS] = { 1e6f };
    kvant_rope bad[6] = { good, good, good, good, good, good };
    fixture f = make(spec, 1, BLOCKS, 0), g = make("turboquant-4", 1, 2, 0);
    bad[0].size = 8;
    bad[1].n_dims = 0;
    bad[2].n_dims = 7;
    bad[3].n_dims = HEAD_DIM + 2;
    bad[4].frequencies = NULL;
    bad[5].frequencies = large;
    for (size_t i = 0; i < COUNT(bad); i++)
        assert_int_equal(kvant_tensor_set_rope(f.tensor, &bad[i]), KVANT_ERR_ARGUMENT);
    bad[0] = good;
    bad[0].frequencies = numbers;
    assert_int_equal(kvant_tensor_set_rope(f.tensor, &bad[0]), KVANT_ERR_NONFINITE);
    assert_int_equal(kvant_tensor_set_rope(NULL, &good), KVANT_ERR_ARGUMENT);
    assert_null(f.tensor->learning->rope);
    assert_int_equal(kvant_tensor_set_rope(g.tensor, &good), KVANT_OK); /* nothing to learn */
    assert_int_equal(kvant_tensor_next_positions(f.tensor, NULL, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_next_positions(g.tensor, (const int32_t[]){ 0 }, 1), KVANT_OK);
    drop(&f);
    drop(&g);
}

/* The score error of a tensor without RoPE that learned from this bucket's own rows, in any order.
 * Its second moments are the moments over the bucket, which a tensor with RoPE computes from early
 * rows. So both errors are equal, except that moments of n vectors with d channels err by parts d /
 * n of the squares. Here d = 32 and n is at least 512 queries. */
static double error_of_own(const text *t, uint32_t first, uint32_t end, uint64_t *rng)
{
    fixture f = make(spec, 1, BLOCKS, 0);
    int64_t slots[MOST];
    int32_t tokens[MOST];
    const uint32_t n = end - first;
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = (int32_t)(first + i);
    for (uint32_t i = n - 1; i > 0; i--) {
        const uint32_t other = (uint32_t)(test_random(rng) % (i + 1));
        const int32_t swap = tokens[i];
        tokens[i] = tokens[other];
        tokens[other] = swap;
    }
    for (uint32_t i = 0; i < n; i++)
        slots[i] = tokens[i];
    for (uint32_t i = 0; i < n; i += BATCH)
        put(&f, t, slots + i, tokens + i, n - i < BATCH ? n - i : BATCH, false);
    for (uint32_t i = 0; i < n; i += BATCH) /* writes the rows again, with the learned transform */
        put(&f, t, slots + i, tokens + i, n - i < BATCH ? n - i : BATCH, false);
    const double error = error_near(&f, t, first, end, 0);
    drop(&f);
    return error;
}

CASE(later_positions_are_as_good_as_early_ones)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 3);
    fixture f = make_rotated(&l, MOST, 0), plain = make(spec, 1, BLOCKS, 0);
    uint64_t rng = 4;
    put_all(&f, t, 0, MOST, BATCH, 0);
    put_all(&plain, t, 0, MOST, BATCH, 0);
    for (uint32_t first = 1024; first < MOST; first *= 2) {
        const double own = error_of_own(t, first, 2 * first, &rng),
                     rotated = error_near(&f, t, first, 2 * first, 0);
        assert_true(rotated < 1.06 * own);
        assert_true(first < 2048 || error_near(&plain, t, first, 2 * first, 0) >
                                        1.3 * own); /* otherwise the test shows nothing */
    }
    assert_true(tensor_info_of(&f).n_transforms <= 9);
    drop(&plain);
    /* blocks may move before the tensor knows the RoPE of its keys */
    plain = make(spec, 1, BLOCKS, 0);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        exported e = export_block(&f, block);
        assert_int_equal(kvant_tensor_import(plain.tensor, block, e.data, e.bytes), KVANT_OK);
        free(e.data);
        assert_same_block(&f, block, &plain, block);
    }
    assert_true(tensor_info_of(&plain).n_transforms >= 5);
    drop(&f);
    drop(&plain);
    free(t);
}

CASE(short_tails_belong_to_the_bucket_before)
{
    static const uint32_t n[][3] = { { 1, 1, 1 },
                                     { 1040, 1, 1040 },
                                     { 1400, 2, 1400 },
                                     { 2048, 2, 2048 },
                                     { 5000, 3, 5000 },
                                     { 8192, 4, 8192 },
                                     { 0x7fffffff, 22, 0x7fffffff } };
    const layout l = make_layout(HEAD_DIM, 0);
    for (size_t i = 0; i < COUNT(n); i++) {
        fixture f = make_rotated(&l, n[i][0], 0);
        int32_t edges[2];
        assert_int_equal(f.tensor->learning->rope->n_buckets, n[i][1]);
        kvant_rope_bucket_edges(f.tensor->learning->rope, n[i][1] - 1, edges);
        assert_int_equal(edges[1], n[i][2]);
        assert_int_equal(kvant_rope_bucket(f.tensor->learning->rope, INT32_MAX), n[i][1] - 1);
        drop(&f);
    }
}

/* Positions count, not slots: the sequence begins elsewhere in its slots, so the slots of its first
 * tokens are different. */
CASE(positions_may_be_given)
{
    const layout l = make_layout(HEAD_DIM, 0);
    const int64_t moved = 64 - 2048;
    text *t = make_text(&l, 5);
    fixture f = make_rotated(&l, MOST, 0), g = make_rotated(&l, MOST, 0);
    put_all(&f, t, 2048, 5120, BATCH, 0);
    put_all(&g, t, 2048, 5120, BATCH, moved);
    for (uint32_t block = 32; block < 80; block++)
        assert_same_block(&f, block, &g, (uint32_t)(block + moved / 64));
    drop(&f);
    drop(&g);
    free(t);
}

/* Nothing is learned from rows of unknown positions. They are stored with centre and scale. */
CASE(unknown_positions_are_rows_all_the_same)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 6);
    fixture f = make_rotated(&l, MOST, 0),
            g = make("turboquant-4:center=first,norm=first", 1, BLOCKS, 0);
    int32_t unknown[BATCH];
    memset(unknown, -1, sizeof unknown);
    for (uint32_t first = 0; first < 2048; first += BATCH) {
        assert_int_equal(kvant_tensor_next_positions(f.tensor, unknown, BATCH), KVANT_OK);
        write_rows(&f, first, BATCH, t->rows + (size_t)first * WIDTH, BATCH, 1);
        write_rows(&g, first, BATCH, t->rows + (size_t)first * WIDTH, BATCH, 1);
    }
    assert_same_pages(&f, &g, 32);
    drop(&f);
    drop(&g);
    free(t);
}

/* n_position_transforms = 1: every transform is for all positions. Tokens after the first 512 err
 * less than without RoPE. */
CASE(one_transform_serves_all_positions)
{
    const layout l = make_layout(HEAD_DIM, 1);
    text *t = make_text(&l, 7);
    fixture f = make_rotated(&l, MOST, 1), plain = make(spec, 1, BLOCKS, 0);
    put_all(&f, t, 0, MOST, BATCH, 0);
    put_all(&plain, t, 0, MOST, BATCH, 0);
    for (uint32_t bucket = 0; bucket < 4; bucket++) {
        assert_int_equal(f.tensor->learning->schedule.spans[bucket].first, 0);
        assert_int_equal(f.tensor->learning->schedule.spans[bucket].end, 4);
    }
    assert_true(error_near(&f, t, 4096, MOST, 0) < 0.9 * error_near(&plain, t, 4096, MOST, 0));
    drop(&f);
    drop(&plain);
    free(t);
}

/* Text after a prompt of one repeated token is stored as well as it is alone. */
CASE(hostile_prompts_do_not_spoil)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 8), *hostile = make_text(&l, 9);
    fixture f = make_rotated(&l, MOST, 0), alone = make_rotated(&l, MOST, 0);
    for (size_t i = N_KV_HEADS; i < (size_t)MOST * N_KV_HEADS; i++) {
        double x[HEAD_DIM];
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            x[j] = hostile->rows[i % N_KV_HEADS * HEAD_DIM + j];
        rotate_by_rope(&l, (double)(i / N_KV_HEADS), x);
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            hostile->rows[i * HEAD_DIM + j] = (float)x[j];
    }
    put_all(&f, hostile, 0, 2048, BATCH, 0);
    put_all(&f, t, 2048, 4096, BATCH, 0);
    put_all(&alone, t, 2048, 4096, BATCH, 0);
    assert_true(error_near(&f, t, 2048, 4096, 0) <= 1.2 * error_near(&alone, t, 2048, 4096, 0));
    drop(&f);
    drop(&alone);
    free(t);
    free(hostile);
}

/* Single tokens after the learned positions: the tensor makes a transform for their positions from
 * the second moments that it has. */
CASE(single_tokens_are_rotated_too)
{
    const layout l = make_layout(HEAD_DIM, 0);
    text *t = make_text(&l, 10);
    fixture f = make_rotated(&l, MOST, 0), batches = make_rotated(&l, MOST, 0);
    put_all(&f, t, 0, 1024, BATCH, 0);
    put_all(&f, t, 1024, 2048, 1, 0);
    assert_int_not_equal(block_of(&f, 15, 0).transform_id, block_of(&f, 20, 0).transform_id);
    assert_int_not_equal(block_of(&f, 15, 0).transform_id, block_of(&f, 31, 0).transform_id);
    put_all(&f, t, 2048, 3072, 1, 0);
    put_all(&batches, t, 0, 3072, BATCH, 0);
    assert_int_not_equal(block_of(&f, 31, 0).transform_id, block_of(&f, 40, 0).transform_id);
    assert_true(error_near(&f, t, 2176, 3072, 0) <= 1.06 * error_near(&batches, t, 2176, 3072, 0));
    drop(&f);
    drop(&batches);
    free(t);
}

CASE(levels_and_calls_do_not_change_bytes)
{
    const layout l = make_layout(12, 1);
    const kvant_rope rope = rope_of(&l, MOST, 0);
    text *t = make_text(&l, 11);
    fixture f = make_rotated(&l, MOST, 0);
    put_all(&f, t, 0, 3072, BATCH, 0);
    for (size_t level = 0; level < COUNT(cpu_levels); level++) {
        if (!use_level(cpu_levels[level]))
            continue;
        fixture g = make_rotated(&l, MOST, 0);
        put_all(&g, t, 0, 1024, BATCH, 0);
        /* the same RoPE again */
        assert_int_equal(kvant_tensor_set_rope(g.tensor, &rope), KVANT_OK);
        put_all(&g, t, 1024, 3072, BATCH, 0);
        for (uint32_t block = 0; block < 48; block++)
            assert_same_block(&f, block, &g, block);
        drop(&g);
    }
    assert_int_equal(kvant_set_cpu_level(KVANT_CPU_AUTO), KVANT_OK);
    drop(&f);
    free(t);
}

RUN_CASES(NULL, NULL)
