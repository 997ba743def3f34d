/* test_codec_per_head.c - tensors whose kv heads have different codecs. Each head must have the
 * bytes and the numbers that it has in a tensor with this head alone, whatever codec its neighbour
 * has. */
#include "testing.h"

#include <kvant/attention.h>

#include "calibrated.h"

enum { DIM = 32, N_HEADS = 2, N_SEQUENCES = 2, BLOCKS = 4, MAX_QUERIES = 33, GROUP = 3, LAYER = 1 };

/* The tensors of one role: one tensor of all kv heads, and one tensor for each head alone. */
typedef struct side {
    kvant_codec *codecs[N_HEADS];
    void *memory, *alone_memory[N_HEADS];
    kvant_tensor *tensor, *alone[N_HEADS];
    size_t bytes, alone_bytes[N_HEADS];
} side;

static kvant_tensor_params params_of(const kvant_codec *const *codecs, uint32_t n)
{
    return (kvant_tensor_params){ .size = sizeof(kvant_tensor_params),
                                  .codecs = codecs,
                                  .n_kv_heads = n,
                                  .n_sequences = N_SEQUENCES,
                                  .n_blocks = N_SEQUENCES * BLOCKS,
                                  .blocks_per_sequence = BLOCKS };
}

static kvant_tensor *make_tensor(const kvant_codec *const *codecs, uint32_t n, void **memory,
                                 size_t *bytes)
{
    const kvant_tensor_params params = params_of(codecs, n);
    kvant_tensor *tensor;
    assert_int_equal(kvant_tensor_size(&params, bytes), KVANT_OK);
    *memory = aligned(*bytes);
    assert_int_equal(kvant_tensor_create(&params, *memory, &tensor), KVANT_OK);
    return tensor;
}

static side make_side(const char *const specs[N_HEADS], kvant_role role,
                      const kvant_calibration *calibration)
{
    side s;
    const kvant_codec *codecs[N_HEADS];
    char err[256] = "";
    for (uint32_t h = 0; h < N_HEADS; h++) {
        if (kvant_codec_create_calibrated(specs[h], DIM, role, TEST_SEED, calibration, LAYER, h,
                                          &s.codecs[h], err, sizeof err) != KVANT_OK)
            fail_msg("%s: %s", specs[h], err);
        codecs[h] = s.codecs[h];
        s.alone[h] = make_tensor(&codecs[h], 1, &s.alone_memory[h], &s.alone_bytes[h]);
    }
    s.tensor = make_tensor(codecs, N_HEADS, &s.memory, &s.bytes);
    return s;
}

static void drop_side(side *s)
{
    kvant_tensor_free(&s->tensor);
    free(s->memory);
    for (uint32_t h = 0; h < N_HEADS; h++) {
        kvant_tensor_free(&s->alone[h]);
        kvant_codec_free(&s->codecs[h]);
        free(s->alone_memory[h]);
    }
}

static void write_slots(side *s, uint32_t first, uint32_t n, uint32_t n_threads, uint64_t *rng)
{
    static float rows[N_SEQUENCES * BLOCKS * 64 * N_HEADS * DIM];
    static int64_t slots[N_SEQUENCES * BLOCKS * 64];
    for (uint32_t i = 0; i < n; i++)
        slots[i] = first + i;
    fill_normal(rows, (size_t)n * N_HEADS * DIM, rng);
    for (size_t i = 0; i < (size_t)n * N_HEADS * DIM; i++)
        rows[i] += (float)(i % 7); /* channels with different means, so that centres matter */
    assert_ok(kvant_tensor_write(s->tensor, slots, n, rows, N_HEADS * DIM, n_threads));
    for (uint32_t h = 0; h < N_HEADS; h++)
        assert_ok(kvant_tensor_write(s->alone[h], slots, n, rows + h * DIM, N_HEADS * DIM, 1));
}

/* Writes a prompt, single tokens after it, a rewritten range and a copied sequence. */
static void use_slots(side *s, uint64_t *rng)
{
    write_slots(s, 0, 130, 2, rng);
    for (uint32_t i = 130; i < 150; i++)
        write_slots(s, i, 1, 1, rng);
    write_slots(s, 60, 10, 2, rng);
    assert_int_equal(kvant_tensor_copy(s->tensor, 0, s->tensor, BLOCKS, BLOCKS), KVANT_OK);
    for (uint32_t h = 0; h < N_HEADS; h++)
        assert_int_equal(kvant_tensor_copy(s->alone[h], 0, s->alone[h], BLOCKS, BLOCKS), KVANT_OK);
    write_slots(s, BLOCKS * 64 + 150, 20, 2, rng);
}

static void check_pages(const side *s)
{
    size_t sum = 0;
    for (uint32_t h = 0; h < N_HEADS; h++)
        sum += s->alone_bytes[h];
    assert_int_equal(s->bytes, sum);
    for (uint32_t block = 0; block < N_SEQUENCES * BLOCKS; block++)
        for (uint32_t h = 0; h < N_HEADS; h++) {
            kvant_block_info got = { .size = sizeof got }, want = { .size = sizeof want };
            assert_int_equal(kvant_tensor_get_block(s->tensor, block, h, &got), KVANT_OK);
            assert_int_equal(kvant_tensor_get_block(s->alone[h], block, 0, &want), KVANT_OK);
            assert_ptr_equal(got.codec, want.codec);
            assert_int_equal(got.state, want.state);
            assert_true(got.written == want.written);
            const bool open = want.state == KVANT_BLOCK_OPEN || want.state == KVANT_BLOCK_SINK;
            assert_memory_equal(got.page, want.page,
                                open ? 64 * DIM * sizeof(uint16_t)
                                     : info_of(want.codec).page_bytes);
        }
}

/* Compares numbers, not bits: a head without a centre gets a centre of zeros when its neighbour has
 * one, and -0 - 0 is 0. */
static void assert_equal_numbers(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        assert_true(a[i] == b[i]);
}

static void check_reading(const side *s)
{
    float all[N_HEADS * DIM], one[DIM];
    for (uint32_t slot = 0; slot < N_SEQUENCES * BLOCKS * 64; slot++)
        for (uint32_t h = 0; h < N_HEADS; h++) {
            assert_int_equal(kvant_tensor_read(s->tensor, slot, 1, all, 0), KVANT_OK);
            assert_int_equal(kvant_tensor_read(s->alone[h], slot, 1, one, 0), KVANT_OK);
            assert_equal_numbers(all + h * DIM, one, DIM);
        }
}

static void attend(const kvant_tensor *k, const kvant_tensor *v, const float *q, uint32_t n_heads,
                   uint32_t n_queries, uint32_t n_threads, float *out)
{
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .first_block = BLOCKS,
                                              .n_tokens = 170,
                                              .n_queries = n_queries,
                                              .n_heads = n_heads,
                                              .q = q,
                                              .q_token_stride = N_HEADS * GROUP * DIM,
                                              .q_head_stride = DIM,
                                              .scale = 0.2f,
                                              .logit_softcap =
                                                  20, /* so the centre's part of a score counts */
                                              .out = out,
                                              .out_token_stride = N_HEADS * GROUP * DIM,
                                              .out_head_stride = DIM,
                                              .n_threads = n_threads };
    size_t bytes;
    assert_int_equal(kvant_attention_workspace(k, v, &problem, &bytes), KVANT_OK);
    void *workspace = aligned(bytes);
    memset(workspace, 0xff, bytes); /* NaNs show a read of memory that was not written */
    assert_int_equal(kvant_attention(k, v, &problem, workspace, bytes), KVANT_OK);
    free(workspace);
}

static void check_attention(const side *k, const side *v, uint32_t n_queries, uint64_t *rng)
{
    static float q[MAX_QUERIES * N_HEADS * GROUP * DIM], all[MAX_QUERIES * N_HEADS * GROUP * DIM],
        one[MAX_QUERIES * N_HEADS * GROUP * DIM];
    fill_normal(q, COUNT(q), rng);
    attend(k->tensor, v->tensor, q, N_HEADS * GROUP, n_queries, 2, all);
    for (uint32_t h = 0; h < N_HEADS; h++)
        attend(k->alone[h], v->alone[h], q + h * GROUP * DIM, GROUP, n_queries, 1,
               one + h * GROUP * DIM);
    assert_equal_numbers(all, one, (size_t)n_queries * N_HEADS * GROUP * DIM);
}

/* Pairs of codecs with different sizes, different centres and different paths through attention:
 * codes by row, by column, trellis words, tiles. */
CASE(a_head_is_what_it_is_alone)
{
    static const struct {
        const char *k[N_HEADS], *v[N_HEADS];
    } mixes[] = {
        { { "turboquant-4", "turboquant-2" }, { "trellis-3", "turboquant-8" } },
        { { "trellis-4:transform=file", "turboquant-2:transform=file,feedback" },
          { "trellis-2:center=file", "turboquant-5:center=file" } },
        { { "f16", "trellis-2:transform=file,sink=0" },
          { "trellis-4:center=file,norm=file,sink=0", "f16" } },
        PAPERS({ { "int-4:transform=diagonal,sink=0", "octopus-3" }, { "polar-4", "int-3" } }, ){
            { "turboquant-3:center=first,norm=first", "trellis-4:center=first,norm=first" },
            { "trellis-3:center=first", "int-8:center=first" } },
        { { "int-2:axis=channel,group=32,recent=32", "int-4:axis=channel,group=32,recent=32" },
          { "turboquant-4:recent=70", "bdr-4:recent=70" } },
    };
    uint64_t rng = 5;
    kvant_calibration *calibration = calibrate_fixed(DIM);
    assert_non_null(calibration);
    for (size_t i = 0; i < COUNT(mixes); i++) {
        side k = make_side(mixes[i].k, KVANT_ROLE_K, calibration),
             v = make_side(mixes[i].v, KVANT_ROLE_V, calibration);
        use_slots(&k, &rng);
        use_slots(&v, &rng);
        check_pages(&k);
        check_pages(&v);
        check_reading(&k);
        check_reading(&v);
        check_attention(&k, &v, 1, &rng);
        check_attention(&k, &v, 11, &rng);
        check_attention(&k, &v, MAX_QUERIES, &rng);
        drop_side(&k);
        drop_side(&v);
    }
    kvant_calibration_free(&calibration);
}

/* A block is open or sealed for all kv heads, so codecs that disagree on it do not fit together. */
CASE(heads_that_do_not_fit_together)
{
    static const struct {
        const char *a, *b;
        uint32_t dim;
        kvant_role role;
    } cases[] = {
        { "turboquant-4:sink=4", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4:recent=32", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4", "int-4:axis=channel,group=32", DIM, KVANT_ROLE_K },
        { "turboquant-4:center=first,sink=0", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4:norm=first,sink=0", "turboquant-4", DIM, KVANT_ROLE_K },
        { "turboquant-4", "turboquant-4", 2 * DIM, KVANT_ROLE_K },
        { "turboquant-4", "turboquant-4", DIM, KVANT_ROLE_V },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        kvant_codec *a = make_codec(cases[i].a, DIM, KVANT_ROLE_K),
                    *b = make_codec(cases[i].b, cases[i].dim, cases[i].role);
        const kvant_codec *codecs[] = { a, b };
        const kvant_tensor_params params = params_of(codecs, 2);
        kvant_tensor *tensor = NULL;
        void *memory = aligned(1 << 16);
        size_t bytes;
        assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_tensor_create(&params, memory, &tensor), KVANT_ERR_ARGUMENT);
        assert_null(tensor);
        free(memory);
        kvant_codec_free(&a);
        kvant_codec_free(&b);
    }
}

RUN_CASES(NULL, NULL)
