/* test_attention_codes.c - kvant_attention with every codec, on the codes of pages and on unpacked
 * tiles, within the bounds of attention_setup.h. */
#include "attention_setup.h"

CASE(every_codec)
{
    for (size_t i = 0; i < COUNT(all_specs); i++)
        check_setup((setup){ .k_dim = 64,
                             .v_dim = 64,
                             .n_kv_heads = 2,
                             .n_heads = 6,
                             .n_tokens = 150,
                             .n_queries = 3,
                             .k_spec = all_specs[i],
                             .v_spec = all_specs[COUNT(all_specs) - 1 - i],
                             .mask = true });
}

/* exact = true has no rounding to integers, in exact and sealed pages and with many query rows. */
CASE(exact_rounds_no_integers)
{
    static const char *const specs[] = { "turboquant-4", "int-4:axis=channel,group=64",
                                         PAPERS("octopus-4", ) "int-8" };
    for (size_t i = 0; i < COUNT(specs); i++)
        for (uint32_t n_queries = 1; n_queries < 60; n_queries += 49)
            check_setup((setup){ .k_dim = 64,
                                 .v_dim = 64,
                                 .n_kv_heads = 1,
                                 .n_heads = 3,
                                 .n_tokens = 150,
                                 .n_queries = n_queries,
                                 .k_spec = specs[i],
                                 .v_spec = specs[COUNT(specs) - 1 - i],
                                 .mask = true,
                                 .exact = true });
}

/* The cost of rounding to integers: the root mean square error of outputs relative to exact = true,
 * where nothing is rounded to integers.
 *
 * Rows have variance 1 and 64 channels. The scale is 1/8, so scores have standard deviation 1.
 * Weights are then e^score, sum p^2 = e / n, and an output's own size is sqrt(e / n).
 *
 * turboquant-4: a query's integers err by max |q| / 8192 / sqrt(12). With max |q| = 2.6 that is
 * 0.9e-4. Keys and values err by 2.73 / 4095 / sqrt(12) of a number. This is 1.9e-4. The page's
 * largest weight is 10 times the mean (e^2.3). So weights err by 10 / 8192 / sqrt(12) of the mean.
 * This is 3.5e-4. Relative to their root mean square that is 3.5e-4 / sqrt(e) = 2.1e-4. Together:
 * sqrt(.9^2 + 1.9^2 + 1.9^2 + 2.1^2) e-4 = 3.5e-4.
 *
 * int-8: levels are exact and operands reach 32639. Queries err by 0.23e-4 and weights by 0.53e-4,
 * together 0.6e-4.
 *
 * octopus-4: as turboquant-4, but numbers err by 4e-4. They have two roundings to a unit of 3.3 /
 * 4095, and a line in place of a square root, which adds half a unit. Together: sqrt(.9^2 + 4^2 +
 * 4^2 + 2.1^2) e-4 = 6.1e-4. With many queries its pages are unpacked, without integers. */
CASE(integers_cost_what_they_may)
{
    static const struct {
        const char *spec;
        double most;
    } figures[] = { { "turboquant-4", 3.5e-4 },
                    PAPERS({ "octopus-4", 6.1e-4 }, ){ "int-8", 0.6e-4 } };
    for (size_t i = 0; i < COUNT(figures); i++)
        for (uint32_t n_queries = 1; n_queries <= 33; n_queries += 32) {
            fixture f = make_fixture((setup){ .k_dim = 64,
                                              .v_dim = 64,
                                              .n_kv_heads = 1,
                                              .n_heads = 4,
                                              .n_tokens = 640,
                                              .n_queries = n_queries,
                                              .k_spec = figures[i].spec,
                                              .v_spec = figures[i].spec,
                                              .centred = true });
            const size_t n = (size_t)n_queries * f.s.n_heads * f.s.v_dim;
            float *exact = malloc(n * sizeof *exact);
            f.problem.exact = true;
            run(&f);
            memcpy(exact, f.data.out, n * sizeof *exact);
            f.problem.exact = false;
            run(&f);
            double size = 0;
            for (size_t j = 0; j < n; j++)
                size += (double)exact[j] * exact[j];
            const double error = sqrt(squared_distance(exact, f.data.out, n) / size);
            print_message("%s, %u queries: %.2g\n", figures[i].spec, n_queries, error);
            if (!(error <= figures[i].most))
                fail_msg("%s, %u queries: %.3g of an output, not at most %.3g", figures[i].spec,
                         n_queries, error, figures[i].most);
            assert_true(error > 0 || n_queries > 1); /* the error shows that integers were used */
            free(exact);
            free_fixture(&f);
        }
}

/* Work items of many rows on codes, full ones and the last, smaller one; every width of codes,
 * levels with zero points and codebooks. */
CASE(prefill_on_codes)
{
    static const char *const specs[] = { "turboquant-1", "turboquant-2", "turboquant-3",
                                         "turboquant-4", "bdr-4",        "int-2",
                                         "int-3",        "int-4" };
    static const uint32_t dims[] = { 64, 80, 128, 192 };
    for (size_t i = 0; i < COUNT(specs); i++)
        check_setup((setup){ .k_dim = dims[i % COUNT(dims)],
                             .v_dim = 64,
                             .n_kv_heads = 2,
                             .n_heads = 6,
                             .n_tokens = 400,
                             .n_queries = 9 + 13 * (uint32_t)i,
                             .k_spec = specs[i],
                             .v_spec = specs[COUNT(specs) - 1 - i],
                             .mask = i % 4 != 3,
                             .sinks = i % 3 == 1,
                             .softcap = i % 3 == 2 ? 4 : 0,
                             .max_bias = i % 4 == 1 ? 8 : 0 });
}

#if KVANT_PAPERS
/* Codes of chunks of every family, with and without tables. Some of them are unpacked: 7 bits a
 * coordinate, sketches, outliers. */
CASE(chunks_on_codes)
{
    static const char *const specs[] = {
        "octopus-2",           "octopus-3",     "octopus-4",   "octopus-5",
        "octopus-4:split=7.1", "octopus-3:qjl", "hqmq-s24r3",  "hqmq-s96r4",
        "hqmq-s96r4:med3",     "hqmq-s170r4",   "hqmq-s24r8",  "hqmq-s192r6",
        "spherical-r4jl4",     "addvq-k24r3",   "addvq-k48r4", "hqmq-s96r4:order=halves"
    };
    static const uint32_t dims[] = { 64, 80, 128, 96, 112, 32, 256 };
    for (size_t i = 0; i < COUNT(specs); i++)
        for (uint32_t n_queries = 1; n_queries <= 40; n_queries += 13)
            check_setup((setup){ .k_dim = dims[(i + n_queries) % COUNT(dims)],
                                 .v_dim = dims[(2 * i + n_queries) % COUNT(dims)],
                                 .n_kv_heads = 2,
                                 .n_heads = 6,
                                 .n_tokens = 200,
                                 .n_queries = n_queries,
                                 .k_spec = specs[i],
                                 .v_spec = specs[(i + n_queries) % COUNT(specs)],
                                 .mask = i % 4 != 3 });
}
#endif

/* Every layout of scales, for every width and for head_dims whose last row group is not full, in
 * work items of few rows and of many. */
CASE(groupings_on_codes)
{
    static const char *const specs[] = {
        "int-4:axis=channel,group=64",
        "int-4:axis=channel,group=32,sym",
        "int-2:axis=channel,group=16,hybrid",
        "int-8:axis=channel,group=64",
        "int-4:group=32",
        "int-3:group=16,sym",
        "int-2:group=64,hybrid=code",
        "int-5:group=48",
        "int-6:group=96,sym",
        "int-7",
        "bdr-8:group=128",
        "int-8:group=32,sym",
        "int-4:group=24",
    };
    static const uint32_t dims[] = { 128, 80, 64, 112, 96, 192, 40 };
    for (size_t i = 0; i < COUNT(specs) * COUNT(dims); i++) {
        const char *k = specs[i % COUNT(specs)], *v = specs[(i + 5) % COUNT(specs)];
        setup s = { .k_dim = dims[i % COUNT(dims)],
                    .v_dim = dims[(i + 3) % COUNT(dims)],
                    .n_kv_heads = 2,
                    .n_heads = 6,
                    .n_tokens = 64 * 3 + (uint32_t)(i % 64),
                    .n_queries = 1 + (uint32_t)(i % 2),
                    .k_spec = k,
                    .v_spec = v };
        check_setup(s);
        s.n_queries = 5;
        s.mask = i % 2;
        s.softcap = i % 3 ? 0 : 4;
        check_setup(s);
    }
}

RUN_CASES(NULL, NULL)
