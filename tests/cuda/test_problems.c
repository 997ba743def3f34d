/* test_problems.c - attention problems of engines over compressed pages: several query tokens, ragged,
 * causal, windows, masks, softcap, ALiBi, sinks; one by one and at random. attention_bound.c has the
 * reference and derives the bound. */
#include "attention_fixture.h"

#include <math.h>

static const int32_t lengths[] = { 1, 0, 64, 63, 65, 200, -3, 300, 7, 129 };

static attention_case case_of(const char *k, const char *v, uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_heads,
                              uint32_t open)
{
    return (attention_case){ k, v, head_dim, n_kv_heads, n_heads, 10, KVANT_CUDA_F32, lengths, open == 3, 0.5f, open };
}

/* Columns from 2 to 66 for every kind of code, so that a tile, two tiles and several passes occur. */
static void test_query_tokens(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-4" },
                  { "turboquant-4:rotate=hadamard", "turboquant-4:rotate=hadamard" },
                  { "turboquant-3:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "int-8:sym", "turboquant-4:rotate=hadamard" },
                  { "trellis-4:rotate=hadamard", "trellis-4:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-2:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-4:rotate=hadamard" },
                  { "hqmq-s192r6", "hqmq-s192r6" },
                  { "kivi-2", "kivi-2" },
                  { "innerq-base", "innerq-base" } };
    static const uint32_t dims[] = { 128, 64, 96, 256 }, tokens[] = { 1, 2, 3, 4, 5, 8, 16, 33 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 8; i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[(s + i) % 4], 2, i % 3 == 0 ? 8 : 4, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[i], .causal = (s + i) % 4 != 0 };
            run_problem(&c, &p);
        }
}

/* One thing at a time, with one query token and with several. */
static void test_one_by_one(void **unused)
{
    (void)unused;
    static const attention_problem problems[] = {
        { .causal = true },  { .window = 1 },      { .window = 64 },   { .window = 100, .causal = true },
        { .softcap = 5 },    { .max_bias = 8 },    { .mask = true },   { .mask = true, .max_bias = 4 },
        { .sinks = true },   { .softcap = 30, .window = 65, .sinks = true, .causal = true },
    };
    static const char *const specs[] = { "int-4", "turboquant-4" };
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (uint32_t tokens = 1; tokens <= 6; tokens += 5) {
            attention_problem p = problems[i];
            const attention_case c = case_of(specs[i % 2], specs[i % 2], 128, 2, 6, i % 3 == 2 ? 3 : 0);
            p.query_tokens = tokens;
            run_problem(&c, &p);
        }
}

static void test_ragged(void **unused)
{
    (void)unused;
    static const uint32_t counts[][10] = { { 1, 2, 0, 4, 5, 1, 1, 16, 3, 0 }, { 0, 0, 1, 0, 0, 33, 2, 1, 1, 1 } };
    for (uint32_t i = 0; i < 8; i++) {
        const attention_case c = case_of("turboquant-4", "turboquant-4", i % 4 < 2 ? 128 : 64, 2, i < 4 ? 8 : 2,
                                         i % 2 ? 3 : 0);
        const attention_problem p = { .query_tokens = 33, .counts = counts[i % 2], .causal = i % 3 != 0,
                                      .window = i > 5 ? 70 : 0 };
        run_problem(&c, &p);
    }
}

/* Tile kernels read every codec, in any pair: one and two groups of rows, parts of a context, odd heads. */
static void test_tiles(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-4" },
                  { "int-2", "int-3" },
                  { "int-8:sym", "turboquant-2:rotate=hadamard" },
                  { "turboquant-3:rotate=hadamard", "turboquant-4:rotate=hadamard" },
                  { "turboquant-2:rotate=hadamard", "int-8" },
                  { "kivi-2", "innerq-base" },
                  { "innerq-base", "kivi-2" },
                  { "int-5", "int-6:sym" },
                  { "bdr-7", "turboquant-8:rotate=hadamard" },
                  { "turboquant-1:rotate=hadamard", "turboquant-6:rotate=hadamard" },
                  { "octopus-2:rotate=hadamard", "octopus-3:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-4:rotate=hadamard" },
                  { "hqmq-s96r4", "hqmq-s192r6" },
                  { "hqmq-s192r6", "hqmq-s96r4" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-4:rotate=hadamard,states=1024" } };
    static const uint32_t dims[] = { 128, 96, 256, 64 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t d = dims[(s + 2 * i + s / 4) % 4];
            const attention_case c = case_of(specs[s].k, specs[s].v, d, 2, s % 2 ? 6 : 2, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = (s + i) % 3 == 0 ? 20 : (s + i) % 3 == 1 ? 70 : 33,
                                          .causal = (s + i) % 4 != 0 };
            run_problem(&c, &p);
        }
}

/* Every codec unpacked once for all rows; three sequences take turns in scratch for two. */
static void test_scratch(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-3" },
                  { "turboquant-4:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "kivi-2", "innerq-base" },
                  { "bdr-7", "turboquant-8:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-3:rotate=hadamard" },
                  { "hqmq-s96r4", "hqmq-s192r6" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-4:rotate=hadamard,states=1024" } };
    static const uint32_t dims[] = { 128, 96, 256, 64 };
    static const int32_t some[] = { 300, 20, 129 };
    for (uint32_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = 0; i < 2; i++) {
            const attention_case c = { specs[s].k, specs[s].v, dims[(s + 2 * i) % 4], 1, 16, 3, KVANT_CUDA_F32, some, i == 1,
                                       0.5f, i ? 3 : 0 };
            const attention_problem p = { .query_tokens = 25, .causal = s % 3 != 0, .window = s % 4 == 3 ? 90 : 0,
                                          .mask = s % 4 == 2, .scratch = true };
            run_problem(&c, &p);
        }
}

/* As many query tokens as a prefill has, over a past. */
static void test_prefill(void **unused)
{
    (void)unused;
    static const int32_t past[] = { 5000, 130 };
    for (int i = 0; i < 2; i++) {
        const attention_case c = { "int-4", "int-4", i ? 64 : 128, 1, 4, 2, KVANT_CUDA_BF16, past, false, 0.5f, 3 };
        const attention_problem p = { .query_tokens = 130, .causal = true, .scratch = i == 0 };
        run_problem(&c, &p);
    }
}

static const char *one_of(const char *const *names, size_t n)
{
    return names[random_bits() % n];
}

/* Problems at random: what one call may combine. */
static void test_random(void **unused)
{
    (void)unused;
    static const char *const same[] = { "int-4:sym", "bdr-4", "int-8", "turboquant-4:scale=norm,rotate=none",
                                        "trellis-4", "trellis-2", "octopus-4", "hqmq-s192r6", "turboquant-4" };
    static const char *const kinds[] = { "kivi-2", "innerq-base" };
    static const uint32_t dims[] = { 64, 128, 256 };
    for (int i = 0; i < 80; i++) {
        int32_t own[8];
        uint32_t counts[8];
        const uint32_t n_kv_heads = 1 + random_bits() % 3, batch = 1 + random_bits() % 8,
                       most = random_bits() % 3 ? 1 + random_bits() % 5 : 1 + random_bits() % 24;
        for (uint32_t b = 0; b < batch; b++) {
            own[b] = (int32_t)(random_bits() % 400);
            counts[b] = random_bits() % (most + 1);
        }
        const char *spec = random_bits() % 5 ? one_of(same, 9) : one_of(kinds, 2);
        const attention_case c = { spec,
                                   spec,
                                   dims[random_bits() % 3],
                                   n_kv_heads,
                                   n_kv_heads * (1 + random_bits() % 8),
                                   batch,
                                   (kvant_cuda_type)(random_bits() % 3),
                                   own,
                                   random_bits() % 4 == 0,
                                   random_uniform(0.1f, 1),
                                   (uint32_t)(random_bits() % 4) };
        const attention_problem p = { .query_tokens = most,
                                      .counts = random_bits() % 2 ? counts : NULL,
                                      .causal = random_bits() % 4 != 0,
                                      .window = random_bits() % 3 ? 0 : 1 + (uint32_t)(random_bits() % 200),
                                      .softcap = random_bits() % 4 ? 0 : random_uniform(1, 60),
                                      .max_bias = random_bits() % 4 ? 0 : random_uniform(1, 8),
                                      .mask = random_bits() % 4 == 0,
                                      .sinks = random_bits() % 4 == 0 };
        run_problem(&c, &p);
    }
}

/* The struct's size is the caller's: what an older version does not have is zero, what a newer one has must be. */
static void test_sizes(void **unused)
{
    (void)unused;
    const attention_case c = case_of("int-4", "int-4", 128, 2, 8, 0);
    fixture f;
    fixture_open(&f, &c, NULL);
    struct {
        kvant_cuda_attention_args args;
        uint64_t later;
    } newer = { attention_args(&f), 0 };
    uint8_t *first = malloc(f.out_bytes), *again = malloc(f.out_bytes);
    assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_OK);
    device_read(first, f.gpu_out, f.out_bytes);
    const size_t sizes[] = { offsetof(kvant_cuda_attention_args, query_tokens),
                             offsetof(kvant_cuda_attention_args, mask), sizeof newer };
    for (size_t i = 0; i < 3; i++) {
        newer.args.size = sizes[i];
        check_cuda(cudaMemset(f.gpu_out, 0xff, f.out_bytes));
        assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_OK);
        device_read(again, f.gpu_out, f.out_bytes);
        assert_memory_equal(again, first, f.out_bytes);
    }
    newer.later = 1;
    assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_ERR_ARGUMENT);
    newer.args.size = sizes[0] - 1;
    assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_ERR_ARGUMENT);
    free(first);
    free(again);
    fixture_close(&f);
}

static void test_refused(void **unused)
{
    (void)unused;
    const attention_case c = case_of("int-4", "int-4", 128, 2, 8, 0);
    fixture f;
    fixture_open(&f, &c, NULL);
    kvant_cuda_attention_args args = attention_args(&f);
    args.logit_softcap = -1;
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.logit_softcap = 0, args.max_bias = NAN;
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.max_bias = 0, args.query_tokens = 2, args.out_token_stride = 0;
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.query_tokens = UINT32_MAX, args.out_token_stride = 1;
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    /* no shape is as small as that: an error, not a result that nobody computed */
    args = attention_args(&f);
    kvant_cuda_limit_shared_memory(24 << 10);
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_ERR_UNSUPPORTED);
    fixture_close(&f);
}

/* With an argument: the tests that it names, with * for anything. */
int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    if (!have_device())
        return 77; /* CTest: skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiles),        cmocka_unit_test(test_scratch), cmocka_unit_test(test_query_tokens), cmocka_unit_test(test_one_by_one), cmocka_unit_test(test_ragged),
        cmocka_unit_test(test_prefill),      cmocka_unit_test(test_random),     cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
