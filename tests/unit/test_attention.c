/* test_attention.c - kvant_attention with every shape and option of a call, within the bounds of
 * attention_setup.h, and the calls that it refuses. test_attention_codes.c tests the codecs. */
#include "attention_setup.h"

CASE(head_dims)
{
    static const uint32_t dims[] = { 16, 40, 64, 80, 96, 112, 128, 192, 256, 512 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        check_setup((setup){ .k_dim = dims[i],
                             .v_dim = dims[COUNT(dims) - 1 - i],
                             .n_kv_heads = 1,
                             .n_heads = 2,
                             .n_tokens = 130,
                             .n_queries = 2,
                             .k_spec = "turboquant-4",
                             .v_spec = "int-4" });
        check_setup((setup){ .k_dim = dims[i],
                             .v_dim = dims[i],
                             .n_kv_heads = 1,
                             .n_heads = 1,
                             .n_tokens = 64,
                             .n_queries = 1,
                             .k_spec = "int-3:axis=channel",
                             .v_spec = "turboquant-3" });
    }
}

CASE(features)
{
    setup base = { .k_dim = 64,
                   .v_dim = 64,
                   .n_kv_heads = 2,
                   .n_heads = 6,
                   .n_tokens = 200,
                   .n_queries = 5,
                   .k_spec = "turboquant-4",
                   .v_spec = "int-8" };
    check_setup(base);
    base.mask = true;
    check_setup(base);
    base.softcap = 5;
    check_setup(base);
    base.max_bias = 8;
    check_setup(base);
    base.sinks = true;
    check_setup(base);
    /* the centre's part of a score comes before the bias */
    base.k_spec = "turboquant-4:center=first,norm=first";
    base.v_spec = "int-8:center=first,norm=first";
    check_setup(base);
    base.n_sequences = 3;
    check_setup(base);
    base.v_spec = "int-4:axis=channel"; /* 200 tokens: the last block stays exact */
    check_setup(base);
}

/* Exact and sealed pages in one call, with one rotated query and one sum, and another rotation for
 * every kv head. */
CASE(windows)
{
    static const char *const specs[][2] = {
        { "turboquant-4:sink=4,recent=96", "int-4:axis=channel,recent=64,sink=64" },
        { "turboquant-4:center=first", "int-4:rotate=hadamard,center=first,recent=30" },
        { "int-4:axis=channel,norm=first,rotate=dense", "turboquant-3:norm=first,center=first" },
        { "bdr-4:norm=first", "bdr-4:recent=200" },
        /* values have a channel order of their own, in exact pages too */
        PAPERS({ "octopus-4:center=first", "octopus-4:center=first" }, ){
            "int-4:group=16,order=dealt,recent=64", "int-4:order=halves" },
        PAPERS({ "hqmq-s96r4:order=halves,center=first,norm=first", "hqmq-s96r4:order=halves" }, )
            PAPERS({ "hqmq-s96r4:recent=64", "hqmq-s96r4:sink=4,recent=96" }, )
                PAPERS({ "octopus-3:qjl,recent=64", "spherical-r4jl4:recent=64" }, )
    };
    for (size_t i = 0; i < COUNT(specs); i++)
        for (int per_head = 0; per_head < 2; per_head++) {
            setup s = { .k_dim = 64,
                        .v_dim = 64,
                        .n_kv_heads = 3,
                        .n_heads = 6,
                        .n_tokens = 500,
                        .n_queries = 4,
                        .n_sequences = 2,
                        .k_spec = specs[i][0],
                        .v_spec = specs[i][1],
                        .mask = true,
                        .codec_per_head = per_head };
            check_setup(s);
            s.softcap = 5;
            check_setup(s);
            s.n_tokens = 40; /* fewer tokens than a page has: centre and scale are not known yet */
            s.n_sequences = 1;
            check_setup(s);
        }
}

CASE(long_decode_is_split_and_prefill_is_tiled)
{
    check_setup((setup){ .k_dim = 64,
                         .v_dim = 64,
                         .n_kv_heads = 1,
                         .n_heads = 7,
                         .n_tokens = 2500,
                         .n_queries = 1,
                         .k_spec = "bdr-4",
                         .v_spec = "turboquant-3",
                         .mask = true,
                         .sinks = true });
    check_setup((setup){ .k_dim = 64,
                         .v_dim = 64,
                         .n_kv_heads = 3,
                         .n_heads = 9,
                         .n_tokens = 300,
                         .n_queries = 100,
                         .k_spec = "turboquant-4",
                         .v_spec = "turboquant-4",
                         .mask = true });
    check_setup((setup){ .k_dim = 32,
                         .v_dim = 32,
                         .n_kv_heads = 1,
                         .n_heads = 128,
                         .n_tokens = 70,
                         .n_queries = 2,
                         .k_spec = "int-4",
                         .v_spec = "int-4" });
}

CASE(threads_do_not_change_results)
{
    setup shapes[] = {
        { .k_dim = 64,
          .v_dim = 64,
          .n_kv_heads = 3,
          .n_heads = 9,
          .n_tokens = 3000,
          .n_queries = 1 },
        { .k_dim = 64,
          .v_dim = 64,
          .n_kv_heads = 3,
          .n_heads = 9,
          .n_tokens = 700,
          .n_queries = 200,
          .mask = true },
    };
    for (size_t i = 0; i < COUNT(shapes); i++) {
        shapes[i].k_spec = shapes[i].v_spec = "turboquant-4";
        fixture f = make_fixture(shapes[i]);
        size_t bytes = (size_t)f.s.n_queries * f.s.n_heads * f.s.v_dim * sizeof(float);
        float *first = malloc(bytes);
        for (uint32_t n = 1; n <= 5; n++) {
            f.problem.n_threads = n;
            run(&f);
            if (n == 1)
                memcpy(first, f.data.out, bytes);
            assert_memory_equal(first, f.data.out, bytes);
        }
        free(first);
        free_fixture(&f);
    }
}

CASE(hidden_rows_and_empty_caches_give_zeros)
{
    fixture f = make_fixture((setup){ .k_dim = 64,
                                      .v_dim = 64,
                                      .n_kv_heads = 1,
                                      .n_heads = 2,
                                      .n_tokens = 80,
                                      .n_queries = 2,
                                      .k_spec = "int-4",
                                      .v_spec = "int-4",
                                      .mask = true });
    for (uint32_t j = 0; j < 80; j++)
        f.data.mask[80 + j] = 0xfc00;
    run(&f);
    for (uint32_t i = 0; i < 128; i++)
        assert_true(f.data.out[128 + i] == 0);
    check(&f);
    f.problem.n_tokens = 0;
    run(&f);
    for (uint32_t i = 0; i < 256; i++)
        assert_true(f.data.out[i] == 0);
    free_fixture(&f);
}

CASE(bad_arguments)
{
    fixture f = make_fixture((setup){ .k_dim = 64,
                                      .v_dim = 64,
                                      .n_kv_heads = 2,
                                      .n_heads = 4,
                                      .n_tokens = 80,
                                      .n_queries = 2,
                                      .k_spec = "int-4",
                                      .v_spec = "int-4" });
    kvant_attention_problem good = f.problem;
    int32_t table[2] = { 0, 2 };
    size_t bytes, other;
    assert_int_equal(kvant_attention_workspace(f.k, f.v, &good, &bytes), KVANT_OK);
    void *workspace = aligned(bytes);
    f.data.out[0] = NAN;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        f.problem = good;                                                                          \
        change;                                                                                    \
        assert_int_equal(kvant_attention(f.k, f.v, &f.problem, workspace, bytes),                  \
                         KVANT_ERR_ARGUMENT);                                                      \
        assert_int_equal(kvant_attention_workspace(f.k, f.v, &f.problem, &other),                  \
                         KVANT_ERR_ARGUMENT);                                                      \
    } while (0)
    REFUSED(f.problem.size = 8);
    REFUSED(f.problem.n_heads = 3);
    REFUSED(f.problem.n_heads = 0);
    REFUSED(f.problem.n_tokens = 129); /* 2 blocks */
    REFUSED(f.problem.first_block = 1);
    REFUSED(f.problem.first_block = UINT32_MAX);
    REFUSED(f.problem.block_table = table);
    REFUSED(f.problem.causal = true; f.problem.n_tokens = 1);
    REFUSED(f.problem.n_threads = 0);
    REFUSED(f.problem.n_queries = 0);
    REFUSED(f.problem.q = NULL);
    REFUSED(f.problem.out = NULL);
    f.problem = good;
    assert_int_equal(kvant_attention(f.k, f.v, &good, workspace, bytes - 64), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(f.k, f.v, &good, NULL, bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(f.k, f.v, &good, (char *)workspace + 32, bytes),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(f.k, f.v, NULL, workspace, bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(NULL, f.v, &good, workspace, bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(f.k, NULL, &good, workspace, bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(f.v, f.v, &good, workspace, bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(f.k, f.k, &good, workspace, bytes), KVANT_ERR_ARGUMENT);
    assert_true(isnan(f.data.out[0])); /* nothing was written */
    free(workspace);
    free_fixture(&f);
}

RUN_CASES(NULL, NULL)
