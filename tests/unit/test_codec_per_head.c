/* test_codec_per_head.c - kv heads with codecs of their own: each must be what it is in a cache that has this head alone, whatever
 * lies beside it: the same bytes, the same numbers. */
#include "testing.h"

#include <kvant/attention.h>

#include "calibrated.h"

enum { DIM = 32, N_HEADS = 2, N_STREAMS = 2, N_CELLS = 200, MAX_TOKENS = 33, GROUP = 3, LAYER = 1 };

/* The cells of one role: those of all kv heads, and of each alone. */
typedef struct side {
    kvant_codec *codecs[N_HEADS];
    void *memory, *alone_memory[N_HEADS];
    kvant_cells *cells, *alone[N_HEADS];
    size_t bytes, alone_bytes[N_HEADS];
} side;

static kvant_cells *make_cells(const kvant_codec *const *codecs, uint32_t n, void **memory, size_t *bytes)
{
    const kvant_cells_config config = {
        .size = sizeof config, .codecs = codecs, .n_kv_heads = n, .n_streams = N_STREAMS, .n_cells = N_CELLS
    };
    kvant_cells *cells;
    *bytes = kvant_cells_bytes(&config);
    assert_true(*bytes > 0);
    *memory = aligned(*bytes);
    assert_int_equal(kvant_cells_create(&config, *memory, &cells), KVANT_OK);
    return cells;
}

static side make_side(const char *const specs[N_HEADS], kvant_role role, const kvant_calibration *calibration)
{
    side s;
    const kvant_codec *codecs[N_HEADS];
    char err[256] = "";
    for (uint32_t h = 0; h < N_HEADS; h++) {
        if (kvant_codec_create_calibrated(specs[h], DIM, role, TEST_SEED, calibration, LAYER, h, &s.codecs[h], err,
                                          sizeof err) != KVANT_OK)
            fail_msg("%s: %s", specs[h], err);
        codecs[h] = s.codecs[h];
        s.alone[h] = make_cells(&codecs[h], 1, &s.alone_memory[h], &s.alone_bytes[h]);
    }
    s.cells = make_cells(codecs, N_HEADS, &s.memory, &s.bytes);
    return s;
}

static void drop_side(side *s)
{
    kvant_cells_free(&s->cells);
    free(s->memory);
    for (uint32_t h = 0; h < N_HEADS; h++) {
        kvant_cells_free(&s->alone[h]);
        kvant_codec_free(&s->codecs[h]);
        free(s->alone_memory[h]);
    }
}

static void write_cells(side *s, uint32_t first, uint32_t n, uint32_t n_threads, uint64_t *rng)
{
    static float rows[N_STREAMS * N_CELLS * N_HEADS * DIM];
    static int64_t index[N_STREAMS * N_CELLS];
    for (uint32_t i = 0; i < n; i++)
        index[i] = first + i;
    fill_normal(rows, (size_t)n * N_HEADS * DIM, rng);
    for (size_t i = 0; i < (size_t)n * N_HEADS * DIM; i++)
        rows[i] += (float)(i % 7); /* channels with a mean of their own, which centres find */
    assert_int_equal(kvant_cells_write(s->cells, index, n, rows, N_HEADS * DIM, n_threads), KVANT_OK);
    for (uint32_t h = 0; h < N_HEADS; h++)
        assert_int_equal(kvant_cells_write(s->alone[h], index, n, rows + h * DIM, N_HEADS * DIM, 1), KVANT_OK);
}

/* A prompt, single tokens behind it, a rewritten range, a copied stream. */
static void use_cells(side *s, uint64_t *rng)
{
    write_cells(s, 0, 130, 2, rng);
    for (uint32_t i = 130; i < 150; i++)
        write_cells(s, i, 1, 1, rng);
    write_cells(s, 60, 10, 2, rng);
    assert_int_equal(kvant_cells_copy_stream(s->cells, 0, s->cells, 1), KVANT_OK);
    for (uint32_t h = 0; h < N_HEADS; h++)
        assert_int_equal(kvant_cells_copy_stream(s->alone[h], 0, s->alone[h], 1), KVANT_OK);
    write_cells(s, N_CELLS + 150, 20, 2, rng);
}

static void check_pages(const side *s)
{
    size_t sum = 0;
    for (uint32_t h = 0; h < N_HEADS; h++)
        sum += s->alone_bytes[h];
    assert_int_equal(s->bytes, sum);
    for (uint32_t stream = 0; stream < N_STREAMS; stream++)
        for (uint32_t page = 0; page * KVANT_PAGE_TOKENS < N_CELLS; page++)
            for (uint32_t h = 0; h < N_HEADS; h++) {
                kvant_page_ref got = kvant_cells_page(s->cells, stream, page, h),
                               want = kvant_cells_page(s->alone[h], stream, page, 0);
                assert_string_equal(info_of(got.codec).spec, info_of(want.codec).spec);
                assert_memory_equal(got.page, want.page, info_of(want.codec).page_bytes);
            }
}

/* Numbers, not bits: a head that has no centre beside one that has gets one of zeros, and -0 - 0 is 0. */
static void assert_equal_numbers(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        assert_true(a[i] == b[i]);
}

static void check_reading(const side *s)
{
    float all[N_HEADS * DIM], one[DIM];
    for (uint32_t cell = 0; cell < N_STREAMS * N_CELLS; cell++)
        for (uint32_t h = 0; h < N_HEADS; h++) {
            assert_int_equal(kvant_cells_read(s->cells, cell, 1, all, 0), KVANT_OK);
            assert_int_equal(kvant_cells_read(s->alone[h], cell, 1, one, 0), KVANT_OK);
            assert_equal_numbers(all + h * DIM, one, DIM);
        }
}

static void attend(const kvant_cells *k, const kvant_cells *v, const float *q, uint32_t n_heads, uint32_t n_tokens,
                   uint32_t n_threads, float *out)
{
    const kvant_attention_args args = { .size = sizeof args,
                                        .k = k,
                                        .v = v,
                                        .stream = 1,
                                        .n_cells = 170,
                                        .n_tokens = n_tokens,
                                        .n_heads = n_heads,
                                        .q = q,
                                        .q_token_stride = N_HEADS * GROUP * DIM,
                                        .q_head_stride = DIM,
                                        .scale = 0.2f,
                                        .logit_softcap = 20, /* the centre's part counts then */
                                        .out = out,
                                        .out_token_stride = N_HEADS * GROUP * DIM,
                                        .out_head_stride = DIM,
                                        .n_threads = n_threads };
    const size_t bytes = kvant_attention_workspace(&args);
    void *workspace = aligned(bytes);
    memset(workspace, 0xff, bytes); /* NaNs: reading what was not written shows */
    assert_true(bytes > 0);
    assert_int_equal(kvant_attention(&args, workspace, bytes), KVANT_OK);
    free(workspace);
}

static void check_attention(const side *k, const side *v, uint32_t n_tokens, uint64_t *rng)
{
    static float q[MAX_TOKENS * N_HEADS * GROUP * DIM], all[MAX_TOKENS * N_HEADS * GROUP * DIM],
        one[MAX_TOKENS * N_HEADS * GROUP * DIM];
    fill_normal(q, COUNT(q), rng);
    attend(k->cells, v->cells, q, N_HEADS * GROUP, n_tokens, 2, all);
    for (uint32_t h = 0; h < N_HEADS; h++)
        attend(k->alone[h], v->alone[h], q + h * GROUP * DIM, GROUP, n_tokens, 1, one + h * GROUP * DIM);
    assert_equal_numbers(all, one, (size_t)n_tokens * N_HEADS * GROUP * DIM);
}

/* Of other sizes, other ways through attention (codes by row, by column, trellis words, tiles), other centres. */
static void a_head_is_what_it_is_alone(void **state)
{
    static const struct {
        const char *k[N_HEADS], *v[N_HEADS];
    } mixes[] = {
        { { "turboquant-4", "turboquant-2" }, { "trellis-3", "turboquant-8" } },
        { { "trellis-4:transform=file", "turboquant-2:transform=file,feedback" },
          { "trellis-2:center=file", "turboquant-5:center=file" } },
        { { "f16", "trellis-2:transform=file,sink=0" }, { "trellis-4:center=file,norm=file,sink=0", "f16" } },
        { { "int-4:transform=diagonal,sink=0", "octopus-3" }, { "polar-4", "int-3" } },
        { { "turboquant-3:center=first,norm=first", "trellis-4:center=first,norm=first" },
          { "trellis-3:center=first", "int-8:center=first" } },
        { { "kivi-2:recent=32", "kivi-4:recent=32" }, { "turboquant-4:recent=70", "bdr-4:recent=70" } },
    };
    (void)state;
    uint64_t rng = 5;
    kvant_calibration *calibration = calibrate_fixed(DIM);
    assert_non_null(calibration);
    for (size_t i = 0; i < COUNT(mixes); i++) {
        side k = make_side(mixes[i].k, KVANT_ROLE_K, calibration),
             v = make_side(mixes[i].v, KVANT_ROLE_V, calibration);
        use_cells(&k, &rng);
        use_cells(&v, &rng);
        check_pages(&k);
        check_pages(&v);
        check_reading(&k);
        check_reading(&v);
        check_attention(&k, &v, 1, &rng);
        check_attention(&k, &v, 11, &rng);
        check_attention(&k, &v, MAX_TOKENS, &rng);
        drop_side(&k);
        drop_side(&v);
    }
    kvant_calibration_free(&calibration);
}

/* A group is open or sealed for all kv heads, so codecs that disagree on it do not fit together. */
static void heads_that_do_not_fit_together(void **state)
{
    static const struct {
        const char *a, *b;
        uint32_t dim;
        kvant_role role;
    } cases[] = {
        { "turboquant-4:sink=4", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4:recent=32", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4", "kivi-4:recent=0", DIM, KVANT_ROLE_K },
        { "turboquant-4:center=first,sink=0", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4:norm=first,sink=0", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4", "turboquant-4", 2 * DIM, KVANT_ROLE_K },
        { "turboquant-4", "turboquant-4", DIM, KVANT_ROLE_V },
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        kvant_codec *a = make_codec(cases[i].a, DIM, KVANT_ROLE_K),
                    *b = make_codec(cases[i].b, cases[i].dim, cases[i].role);
        const kvant_codec *codecs[] = { a, b };
        kvant_cells_config config = {
            .size = sizeof config, .codecs = codecs, .n_kv_heads = 2, .n_streams = 1, .n_cells = 64
        };
        kvant_cells *cells = NULL;
        void *memory = aligned(1 << 16);
        assert_int_equal(kvant_cells_bytes(&config), 0);
        assert_int_equal(kvant_cells_create(&config, memory, &cells), KVANT_ERR_ARGUMENT);
        assert_null(cells);
        free(memory);
        kvant_codec_free(&a);
        kvant_codec_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_head_is_what_it_is_alone),
        cmocka_unit_test(heads_that_do_not_fit_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
