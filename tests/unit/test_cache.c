/* test_cache.c - sequences of a whole model: which tokens they attend to, forks, truncation,
 * dropped blocks, stores, errors. */
#include "testing.h"

#include <kvant/cache.h>

#include "../../src/cache/device.h"
#include "../../src/math/triangle.h"
#include "../attention_reference.h"

enum {
    LAYERS = 3,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 32,
    WIDTH = KV_HEADS * DIM,
    Q_WIDTH = HEADS * DIM,
    MOST = 512
};

/* A cache, and plain copies of the rows that each sequence holds. */
typedef struct model {
    kvant_cache *cache;
    float *k[8][LAYERS], *v[8][LAYERS];
    uint64_t rng;
} model;

static kvant_cache_params params_of(const char *k, const char *v)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS,
    params.head_dim = DIM;
    params.max_tokens = MOST, params.max_sequences = 8, params.n_threads = 2;
    params.k = k, params.v = v;
    return params;
}

static model make(const char *k, const char *v)
{
    model m = { .rng = 1234 };
    kvant_cache_params params = params_of(k, v);
    if (kvant_cache_create(&params, &m.cache) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    for (int s = 0; s < 8; s++)
        for (int layer = 0; layer < LAYERS; layer++) {
            m.k[s][layer] = calloc(MOST * WIDTH, sizeof(float));
            m.v[s][layer] = calloc(MOST * WIDTH, sizeof(float));
        }
    return m;
}

static void drop(model *m)
{
    kvant_cache_free(&m->cache);
    assert_null(m->cache);
    for (int s = 0; s < 8; s++)
        for (int layer = 0; layer < LAYERS; layer++) {
            free(m->k[s][layer]);
            free(m->v[s][layer]);
        }
}

static void append(model *m, int32_t s, uint32_t n)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint32_t at = kvant_sequence_length(m->cache, s, layer);
        float *k = m->k[s][layer] + (size_t)at * WIDTH, *v = m->v[s][layer] + (size_t)at * WIDTH;
        fill_normal(k, (size_t)n * WIDTH, &m->rng);
        fill_normal(v, (size_t)n * WIDTH, &m->rng);
        if (kvant_cache_append(m->cache, layer, s, k, v, n) != KVANT_OK)
            fail_msg("%s", kvant_error_message());
        assert_int_equal(kvant_sequence_length(m->cache, s, layer), at + n);
    }
}

static void copy_rows(model *m, int32_t from, int32_t to)
{
    for (int layer = 0; layer < LAYERS; layer++) {
        memcpy(m->k[to][layer], m->k[from][layer], MOST * WIDTH * sizeof(float));
        memcpy(m->v[to][layer], m->v[from][layer], MOST * WIDTH * sizeof(float));
    }
}

/* Root mean square error of attention of the newest n tokens, against the rows that were appended.
 * Tokens before `first` are hidden. */
static double error_of(model *m, int32_t s, uint32_t n, uint32_t first)
{
    float q[8 * Q_WIDTH], out[8 * Q_WIDTH];
    double weights[MOST], want[DIM], error = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint32_t length = kvant_sequence_length(m->cache, s, layer);
        fill_normal(q, COUNT(q), &m->rng);
        assert_int_equal(kvant_cache_attend(m->cache, layer, s, q, out, n), KVANT_OK);
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t h = 0; h < HEADS; h++) {
                size_t head = (size_t)(h / (HEADS / KV_HEADS)) * DIM;
                reference_row row = { .q = q + t * Q_WIDTH + h * DIM,
                                      .keys = m->k[s][layer] + (size_t)first * WIDTH + head,
                                      .values = m->v[s][layer] + (size_t)first * WIDTH + head,
                                      .key_stride = WIDTH,
                                      .value_stride = WIDTH,
                                      .n_cells = length - n + t + 1 - first,
                                      .k_dim = DIM,
                                      .v_dim = DIM,
                                      .scale = 1 / sqrt(DIM) };
                reference_attention(&row, weights, want);
                for (uint32_t i = 0; i < DIM; i++)
                    error += pow(out[t * Q_WIDTH + h * DIM + i] - want[i], 2) /
                             (LAYERS * n * HEADS * DIM);
            }
    }
    return sqrt(error);
}

/* Attention in binary32 over at most 512 tokens with values of order 1 errs by far less than
 * 1e-5. */
#define EXACT 1e-5

CASE(attends_to_what_was_appended)
{
    model m = make("f32", NULL);
    int32_t s = kvant_sequence_create(m.cache);
    assert_int_equal(s, 0);
    for (uint32_t n = 1; n <= 8; n++) {
        append(&m, s, n == 8 ? 200 : n);
        assert_true(error_of(&m, s, n, 0) < EXACT);
    }
    drop(&m);
}

CASE(presets_work_without_a_word)
{
    model m = make(NULL, NULL);
    kvant_cache_info empty = { .size = sizeof empty };
    assert_int_equal(kvant_cache_get_info(m.cache, &empty), KVANT_OK);
    int32_t s = kvant_sequence_create(m.cache);
    for (int i = 0; i < 5; i++) {
        append(&m, s, 67);
        append(&m, s, 1);
    }
    double error = error_of(&m, s, 8, 0);
    kvant_cache_info info = { .size = sizeof info };
    assert_int_equal(kvant_cache_get_info(m.cache, &info), KVANT_OK);
    /* An output averages some hundred values of variance 1. A trellis of 4 bits errs by 0.0051 of a
     * value's variance, and changes scores by as much. So an output's error stays below a tenth of
     * a value's standard deviation. */
    assert_true(error > 1e-4 && error < 0.1);
    assert_string_equal(info.v, "trellis-4");
    assert_true(info.bytes < info.f16_bytes);
    assert_true(info.true_bits > 4 && info.true_bits < 4.6);
    /* Keys are chosen from a sample of 64 rows in fp32, which the cache keeps until then. */
    assert_true(empty.working_bytes > 0);
    assert_true(info.working_bytes >= empty.working_bytes + LAYERS * 64 * WIDTH * sizeof(float));
    drop(&m);
}

CASE(forks_share_until_they_differ)
{
    static const char *const specs[] = { "f32", "int-8", "int-8:recent=70",
                                         "trellis-4:center=first,norm=first" };
    for (size_t i = 0; i < COUNT(specs); i++) {
        model m = make(specs[i], NULL), alone = make(specs[i], NULL);
        kvant_cache_info before = { .size = sizeof before }, after = before;
        int32_t a = kvant_sequence_create(m.cache);
        append(&m, a, 150);
        kvant_cache_get_info(m.cache, &before);
        int32_t b = kvant_sequence_fork(m.cache, a);
        assert_int_equal(b, 1);
        copy_rows(&m, a, b);
        kvant_cache_get_info(m.cache, &after);
        assert_int_equal(after.n_free_blocks, before.n_free_blocks); /* nothing was copied */
        append(&m, b, 10);
        kvant_cache_get_info(m.cache, &after);
        assert_int_equal(after.n_free_blocks,
                         before.n_free_blocks - 1); /* the block that b wrote to was copied */
        append(&m, a, 70);
        double most = i ? 0.1 : EXACT;
        assert_true(error_of(&m, a, 8, 0) < most && error_of(&m, b, 8, 0) < most);
        kvant_sequence_free(m.cache, a);
        assert_true(error_of(&m, b, 8, 0) < most);
        kvant_sequence_free(m.cache, b);
        kvant_cache_get_info(m.cache, &after);
        assert_int_equal(after.n_free_blocks, after.n_blocks);
        assert_int_equal(after.bytes, 0);
        drop(&m);
        drop(&alone);
    }
}

CASE(truncated_tokens_are_gone)
{
    model m = make("f32", NULL);
    int32_t s = kvant_sequence_create(m.cache);
    append(&m, s, 200);
    assert_int_equal(kvant_sequence_truncate(m.cache, s, 130), KVANT_OK);
    append(&m, s, 3);
    assert_int_equal(kvant_sequence_length(m.cache, s, 2), 133);
    assert_true(error_of(&m, s, 8, 0) < EXACT);
    assert_int_equal(kvant_sequence_drop(m.cache, s, 127), KVANT_OK); /* one whole block */
    assert_true(error_of(&m, s, 2, 64) < EXACT);
    assert_int_equal(kvant_sequence_truncate(m.cache, s, 0), KVANT_OK);
    append(&m, s, 5);
    assert_true(error_of(&m, s, 4, 0) < EXACT);
    assert_int_equal(kvant_sequence_truncate(m.cache, 7, 0), KVANT_ERR_ARGUMENT);
    drop(&m);
}

CASE(blocks_pass_through_a_store)
{
    static const char *const specs[] = { "f32", "turboquant-4:center=first,norm=first",
                                         "int-4:axis=channel" };
    for (size_t i = 0; i < COUNT(specs); i++) {
        model m = make(specs[i], NULL), other = make(specs[i], NULL);
        int32_t a = kvant_sequence_create(m.cache), b = kvant_sequence_create(other.cache);
        append(&m, a, 150);
        for (int layer = 0; layer < LAYERS; layer++) {
            memcpy(other.k[b][layer], m.k[a][layer], MOST * WIDTH * sizeof(float));
            memcpy(other.v[b][layer], m.v[a][layer], MOST * WIDTH * sizeof(float));
        }
        size_t used;
        for (uint32_t block = 0; block < 3; block++) {
            assert_int_equal(kvant_sequence_export_size(m.cache, a, block, 1, &used), KVANT_OK);
            uint8_t *data = malloc(used + 1);
            assert_int_equal(kvant_sequence_export(m.cache, a, block, 1, data, used + 1),
                             KVANT_ERR_ARGUMENT);
            assert_int_equal(kvant_sequence_export(m.cache, a, block, 1, data, used), KVANT_OK);
            for (size_t cut = 0; cut < used; cut += used / 7 + 1)
                assert_int_equal(kvant_sequence_import(other.cache, b, data, cut),
                                 KVANT_ERR_FORMAT);
            data[used / 2] ^= 4;
            assert_int_equal(kvant_sequence_import(other.cache, b, data, used), KVANT_ERR_FORMAT);
            data[used / 2] ^= 4;
            assert_int_equal(kvant_sequence_length(other.cache, b, 0), block * 64);
            assert_int_equal(kvant_sequence_import(other.cache, b, data, used), KVANT_OK);
            free(data);
        }
        assert_int_equal(kvant_sequence_length(other.cache, b, 1), 150);
        assert_int_equal(kvant_sequence_export_size(m.cache, a, 3, 1, &used), KVANT_ERR_ARGUMENT);
        /* The same queries give the same numbers. */
        other.rng = m.rng;
        float q[Q_WIDTH], one[Q_WIDTH], two[Q_WIDTH];
        fill_normal(q, Q_WIDTH, &m.rng);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            assert_int_equal(kvant_cache_attend(m.cache, layer, a, q, one, 1), KVANT_OK);
            assert_int_equal(kvant_cache_attend(other.cache, layer, b, q, two, 1), KVANT_OK);
            assert_memory_equal(one, two, sizeof one);
        }
        append(&other, b, 9);
        assert_true(error_of(&other, b, 8, 0) < (i ? 0.2 : EXACT));
        drop(&m);
        drop(&other);
    }
}

CASE(errors_leave_a_working_cache)
{
    model m = make("turboquant-4:center=first,norm=first", NULL);
    int32_t s = kvant_sequence_create(m.cache);
    float bad[3 * WIDTH] = { 0 }, good[3 * WIDTH], q[Q_WIDTH] = { 0 }, out[Q_WIDTH];
    append(&m, s, 100);
    fill_normal(good, COUNT(good), &m.rng);
    bad[2 * WIDTH + 3] = NAN;
    assert_int_equal(kvant_cache_append(m.cache, 0, s, bad, good, 3), KVANT_ERR_NONFINITE);
    assert_int_equal(kvant_cache_append(m.cache, 0, s, good, bad, 3), KVANT_ERR_NONFINITE);
    assert_non_null(strstr(kvant_error_message(), "layer 0"));
    assert_int_equal(kvant_sequence_length(m.cache, s, 0), 100);
    append(&m, s, 20);
    assert_true(error_of(&m, s, 8, 0) < 0.2);
    assert_int_equal(kvant_cache_append(m.cache, LAYERS, s, good, good, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_append(m.cache, 0, 5, good, good, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_append(m.cache, 0, s, NULL, good, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_append(m.cache, 0, s, good, good, MOST), KVANT_ERR_FULL);
    assert_int_equal(kvant_cache_attend(m.cache, 0, s, q, out, 121),
                     KVANT_ERR_ARGUMENT); /* more queries than tokens */
    assert_non_null(strstr(kvant_error_message(), "causal"));
    for (int i = 1; i < 8; i++)
        assert_int_equal(kvant_sequence_create(m.cache), i);
    assert_int_equal(kvant_sequence_create(m.cache), -1);
    assert_int_equal(kvant_sequence_fork(m.cache, 0), -1);
    drop(&m);
}

static uint32_t free_blocks(const model *m)
{
    kvant_cache_info info = { .size = sizeof info };
    assert_int_equal(kvant_cache_get_info(m->cache, &info), KVANT_OK);
    return info.n_free_blocks;
}

/* An append that fails needs no block afterwards: another sequence may take them all. */
CASE(failed_appends_give_their_blocks_back)
{
    model m = make("f32", NULL);
    const int32_t both[2] = { kvant_sequence_create(m.cache), kvant_sequence_create(m.cache) };
    float *rows = calloc(2 * MOST * WIDTH, sizeof *rows);
    append(&m, both[0], 100);
    append(&m, both[1], 10);
    const uint32_t before = free_blocks(&m);
    assert_int_equal(before, 12);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kvant_cache_append(m.cache, layer, both[0], rows, rows, MOST),
                         KVANT_ERR_FULL);
        assert_int_equal(free_blocks(&m), before);
    }
    const int32_t third = kvant_sequence_create(m.cache);
    append(&m, third, 100);
    /* The first sequence takes 6 of the 10 free blocks, and the second needs 6 more. */
    assert_int_equal(kvant_cache_append_batch(m.cache, 1, both, 2, rows, rows, 400),
                     KVANT_ERR_FULL);
    assert_non_null(strstr(kvant_error_message(), "all 15 blocks"));
    assert_int_equal(free_blocks(&m), before - 2);
    /* Rows of the second half are written after the first half was. */
    rows[(600 + 1) * WIDTH] = NAN;
    assert_int_equal(kvant_cache_append_batch(m.cache, 1, both, 2, rows, rows, 320),
                     KVANT_ERR_NONFINITE);
    assert_int_equal(free_blocks(&m), before - 2);
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvant_sequence_length(m.cache, both[i], 1), i ? 10 : 100);
    /* Layers that are ahead keep their tokens. */
    assert_int_equal(kvant_cache_append(m.cache, 0, third, rows, rows, 60), KVANT_OK);
    assert_int_equal(kvant_cache_append(m.cache, 1, third, rows, rows, MOST), KVANT_ERR_FULL);
    assert_int_equal(free_blocks(&m), before - 3);
    assert_int_equal(kvant_sequence_length(m.cache, third, 0), 160);
    append(&m, both[1], 400);
    assert_true(error_of(&m, both[1], 8, 0) < EXACT);
    assert_true(error_of(&m, both[0], 8, 0) < EXACT);
    free(rows);
    drop(&m);
}

/* Shapes that libkvant knows a GPU not to support are refused before a GPU is looked for. */
CASE(shapes_are_refused_on_cuda)
{
    kvant_cache *cache;
    kvant_cache_params params = params_of("int-4", "int-4");
    params.device = "cuda";
    params.v_head_dim = 2 * params.head_dim;
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_UNSUPPORTED);
    assert_null(cache);
    if (!strstr(kvant_error_message(), "v_head_dim"))
        fail_msg("'%s'", kvant_error_message());
}

CASE(parameters_are_checked)
{
    kvant_cache *cache;
    kvant_cache_params params = params_of("f32", NULL);
    params.device = "abacus";
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_UNSUPPORTED);
    assert_null(cache);
    assert_non_null(strstr(kvant_error_message(), "abacus"));
    params = params_of("no-such-codec", NULL);
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_SPEC);
    params = params_of("f32", NULL);
    params.preset = "small";
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_ARGUMENT);
    params = params_of("f32", NULL);
    params.n_heads = 3;
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_ARGUMENT);
    params = params_of("turboquant-4:center=file", NULL);
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_UNSUPPORTED);
    params.calibration = "/nowhere/at.all";
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_IO);
    params = params_of("f32", NULL);
    params.max_sequences = UINT32_MAX;
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_ARGUMENT);
    params = params_of("f32", NULL);
    params.n_layers = UINT32_C(1) << 31;
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_ARGUMENT);
    params.size = 8;
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_ARGUMENT);
    assert_null(cache);
}

/* Tables of blocks take memory for the blocks that sequences have, not for all blocks of the cache
 * in every sequence. */
CASE(tables_grow_with_their_sequences)
{
    enum { SEQUENCES = 20000 };
    model m = { .rng = 5 };
    kvant_cache_params params = params_of("int-4", "int-4");
    params.max_sequences = SEQUENCES;
    assert_int_equal(kvant_cache_create(&params, &m.cache), KVANT_OK);
    float *rows = calloc(MOST * WIDTH, sizeof *rows);
    uint64_t n_entries = 0;
    for (uint32_t i = 0; i < SEQUENCES; i++)
        assert_int_equal(kvant_sequence_create(m.cache), i);
    for (uint32_t n = 1; n < MOST; n += 100)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_int_equal(kvant_cache_append(m.cache, layer, (int32_t)n, rows, rows, n),
                             KVANT_OK);
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        n_entries += m.cache->sequences[i].room;
        assert_true(m.cache->sequences[i].room >= m.cache->sequences[i].n_blocks);
    }
    assert_in_range(n_entries, 1, 6 * 16);
    free(rows);
    kvant_cache_free(&m.cache);
}

/* 0 is the default of a scale and of a softcap. Numbers that are none must not become it. */
CASE(factors_are_checked)
{
    const float wrong[] = { -1, NAN, INFINITY };
    float q[Q_WIDTH] = { 0 }, out[Q_WIDTH];
    model m = make("f32", NULL);
    const int32_t s = kvant_sequence_create(m.cache);
    append(&m, s, 1);
    for (size_t i = 0; i < COUNT(wrong); i++) {
        for (int softcap = 0; softcap < 2; softcap++) {
            kvant_cache *cache;
            kvant_cache_params params = params_of("f32", NULL);
            kvant_attention_problem problem = {
                .size = sizeof problem, .n_queries = 1, .q = q, .out = out
            };
            *(softcap ? &params.logit_softcap : &params.scale) = wrong[i];
            *(softcap ? &problem.logit_softcap : &problem.scale) = wrong[i];
            assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_ARGUMENT);
            assert_int_equal(kvant_cache_attention(m.cache, 0, s, &problem), KVANT_ERR_ARGUMENT);
            assert_non_null(strstr(kvant_error_message(), "not finite"));
        }
    }
    drop(&m);
}

/* Rows read back as they were written, from shared and copied blocks, and as zeros from dropped
 * blocks. */
CASE(rows_are_read_back)
{
    model m = make("f32", "f32");
    int32_t a = kvant_sequence_create(m.cache);
    append(&m, a, 150);
    int32_t b = kvant_sequence_fork(m.cache, a);
    float *k = calloc(MOST * WIDTH, sizeof *k), *v = calloc(MOST * WIDTH, sizeof *v);
    for (int dropped = 0; dropped < 2; dropped++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            if (dropped) {
                memset(m.k[a][layer], 0, 64 * WIDTH * sizeof(float));
                memset(m.v[a][layer], 0, 64 * WIDTH * sizeof(float));
            }
            assert_ok(kvant_cache_read(m.cache, layer, dropped ? b : a, 30, 110, k, v));
            assert_memory_equal(k, m.k[a][layer] + 30 * WIDTH, 110 * WIDTH * sizeof *k);
            assert_memory_equal(v, m.v[a][layer] + 30 * WIDTH, 110 * WIDTH * sizeof *v);
        }
        assert_int_equal(kvant_sequence_drop(m.cache, b, 64), KVANT_OK);
    }
    assert_int_equal(kvant_cache_read(m.cache, 0, a, 150, 0, k, v), KVANT_OK);
    assert_int_equal(kvant_cache_read(m.cache, 0, a, 150, 1, k, v), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_read(m.cache, 0, a, UINT32_MAX, 2, k, v), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_read(m.cache, LAYERS, a, 0, 1, k, v), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_read(m.cache, 0, 7, 0, 1, k, v), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_read(m.cache, 0, a, 0, 1, NULL, v), KVANT_ERR_ARGUMENT);
    free(k);
    free(v);
    drop(&m);
}

/* Queries that are added before the keys of their tokens make a matrix for these keys, whose fp16
 * numbers are in the exported block. Queries that attention sees count only for later keys. */
CASE(queries_may_come_before_their_keys)
{
    enum { N = 448 };
    const size_t matrices = (size_t)LAYERS * KV_HEADS * kvant_triangle_size(DIM) * sizeof(uint16_t);
    model m[] = { make("trellis-4:transform=first", "f16"),
                  make("trellis-4:transform=first", "f16"), make("trellis-4", "f16") };
    float *q = calloc((size_t)N * Q_WIDTH, sizeof *q),
          *out = calloc((size_t)N * Q_WIDTH, sizeof *out);
    size_t used[2][2];
    fill_normal(q, (size_t)N * Q_WIDTH, &m[0].rng);
    m[0].rng = m[1].rng;
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = q,
                                    .token_stride = Q_WIDTH,
                                    .head_stride = DIM,
                                    .n_tokens = N,
                                    .n_heads = HEADS };
    for (int i = 0; i < 2; i++) {
        int32_t s = kvant_sequence_create(m[i].cache);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            assert_true(kvant_cache_wants_queries(m[i].cache, layer, 1));
            assert_ok(i ? KVANT_OK : kvant_cache_note_queries(m[i].cache, layer, &queries));
        }
        append(&m[i], s, N);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_int_equal(kvant_cache_attend(m[i].cache, layer, s, q, out, N), KVANT_OK);
        assert_int_equal(kvant_sequence_export_size(m[i].cache, s, 2, 1, &used[i][0]), KVANT_OK);
        kvant_sequence_truncate(m[i].cache, s, 0);
        append(&m[i], s, 128);
        assert_int_equal(kvant_sequence_export_size(m[i].cache, s, 1, 1, &used[i][1]), KVANT_OK);
    }
    assert_int_equal(used[0][0], used[1][0] + matrices);
    assert_int_equal(used[0][1], used[1][1]);
    assert_int_equal(used[0][1], used[0][0]);
    const float slow[DIM / 2] = { 1 };
    const kvant_rope rope = { .size = sizeof rope, .n_dims = DIM, .frequencies = slow };
    assert_int_equal(kvant_cache_set_rope(m[0].cache, 0, &rope), KVANT_OK);
    assert_int_equal(kvant_cache_set_rope(m[0].cache, 0, NULL), KVANT_OK);
    assert_int_equal(kvant_cache_set_rope(m[2].cache, 0, &rope), KVANT_OK);
    assert_int_equal(kvant_cache_set_rope(m[0].cache, LAYERS, &rope), KVANT_ERR_ARGUMENT);
    assert_int_equal(
        kvant_cache_set_rope(
            m[0].cache, 0, &(kvant_rope){ .size = sizeof rope, .n_dims = 1, .frequencies = slow }),
        KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_set_rope(NULL, 0, &rope), KVANT_ERR_ARGUMENT);
    assert_false(kvant_cache_wants_queries(m[2].cache, 0, N));
    assert_false(kvant_cache_wants_queries(m[0].cache, LAYERS, N));
    assert_false(kvant_cache_wants_queries(NULL, 0, N));
    assert_int_equal(kvant_cache_note_queries(m[2].cache, 0, &queries), KVANT_OK);
    assert_int_equal(kvant_cache_note_queries(m[0].cache, LAYERS, &queries), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cache_note_queries(m[0].cache, 0, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(
        kvant_cache_note_queries(
            m[0].cache, 0, &(kvant_queries){ .size = sizeof queries, .n_tokens = 1, .n_heads = 1 }),
        KVANT_ERR_ARGUMENT);
    for (int i = 0; i < 3; i++)
        drop(&m[i]);
    free(q);
    free(out);
}

RUN_CASES(NULL, NULL)
