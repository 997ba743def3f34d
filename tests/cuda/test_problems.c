/* test_problems.c - attention problems of engines over compressed pages: several query tokens,
 * ragged, causal, windows, masks, softcap, ALiBi, sinks. Options come one by one and at random. The
 * file attention_bound.c has the reference and derives the bound. test_calls.c tests the calls
 * themselves. */
#include "problem_cases.h"

/* Tile kernels read every codec, in any pair. The cases have one group of query rows or two, parts
 * of a context, and odd numbers of heads. */
CASE(test_tiles)
{
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
                  { "trellis-2:rotate=hadamard", "trellis-4:rotate=hadamard" } };
    static const uint32_t dims[] = { 128, 96, 256, 64 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = small_tests() ? s % 4 : 0; i < (small_tests() ? s % 4 + 1 : 4); i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[i], 2, s % 2 ? 6 : 2, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = (s + i) % 3 == 0   ? 20
                                                          : (s + i) % 3 == 1 ? 70
                                                                             : 33,
                                          .causal = (s + i) % 4 != 0 };
            run_problem(&c, &p);
        }
}

/* Kernels of any head_dim and of any groups (src/cuda/any), with few and many rows. */
CASE(test_any)
{
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-4" },
                  { "int-8:sym", "turboquant-4:rotate=hadamard" },
                  { "turboquant-6:rotate=hadamard", "int-5" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "hqmq-s96r4" },
                  { "hqmq-s192r6", "octopus-2:rotate=hadamard" },
                  { "kivi-2", "kivi-2" },
                  { "int-4:group=32", "int-4:group=64,axis=channel" },
                  { "innerq-base", "int-8:group=16,sym" },
                  { "hqmq-s24r3", "kivi-4" } };
    static const uint32_t dims[] = { 80, 112, 192, 512, 128 }, tokens[] = { 1, 5, 20, 70 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = small_tests() ? s % 3 : 0; i < (small_tests() ? s % 3 + 1 : 5); i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[i], 2, s % 2 ? 6 : 2, (s + i) % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[(s + i) % 4],
                                          .causal = i % 3 != 0,
                                          .window = (s + i) % 5 == 4 ? 100 : 0,
                                          .softcap = (s + i) % 5 == 3 ? 20 : 0,
                                          .max_bias = (s + i) % 7 == 2 ? 4 : 0,
                                          .mask = (s + i) % 5 == 1,
                                          .sinks = (s + i) % 6 == 0 };
            run_problem(&c, &p);
        }
    static const int32_t one_long[] = { 9000 };
    for (uint32_t i = 0; i < 5 && !small_tests(); i++) {
        const attention_case c = { "int-4",
                                   "trellis-4:rotate=hadamard",
                                   dims[i],
                                   2,
                                   8,
                                   1,
                                   KVANT_CUDA_BF16,
                                   one_long,
                                   true,
                                   0.5f,
                                   20 };
        if (dims[i] != 128)
            run_problem(&c, NULL);
    }
#if KVANT_PAPERS
    /* 16 query rows per thread block take 100 KB of shared memory. On GPUs with 99 KB a block has 8
     * rows. */
    const attention_case large = case_of("hqmq-s96r4", "hqmq-s96r4", 512, 2, 6, 0);
    run_problem(&large, &(attention_problem){ .query_tokens = 20, .causal = true });
#endif
}

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(random_bits() % limit);
}

static const char *one_of(const char *const *names, size_t n)
{
    return names[random_bits() % n];
}

/* The general form (src/cuda/any/general.h): pairs of its codecs, and pairs with usual codecs. */
CASE(test_families)
{
    static const struct {
        const char *k, *v;
    } specs[] = {
        { "bf16", "int-3:group=32,hybrid" },
#if KVANT_PAPERS
        { "turboquant-2.5", "turboquant-3.5" },
        { "turboquant-3:qjl,rotate=hadamard", "turboquant-4:rotate=hadamard" },
        { "turboquant-1:qjl,rotate=none", "turboquant-4:qjl,sketch=gaussian,rotate=none" },
        { "innerq-hybrid", "innerq-hybrid" },
        { "int-4", "innerq-hybrid:hybrid=code,group=16" },
        { "hqmq-s341r6:med3", "hqmq-s1024r4" },
        { "octopus-5:rotate=hadamard", "octopus-4:split=7.1,rotate=hadamard" },
        { "octopus-2:qjl,rotate=hadamard", "trellis-4:rotate=hadamard" },
        { "polar-4:rotate=hadamard", "polar-3:rotate=hadamard" },
        { "spherical-r4jl4", "addvq-k24r3" },
        { "hqmq-s96r4:med3,median=page", "naive-4" },
        { "kivi-4", "turboquant-2.5" },
#endif
    };
    static const uint32_t dims[] = { 128, 64, 80, 256, 512 }, tokens[] = { 1, 5, 20, 70 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = small_tests() ? s % 3 : 0; i < (small_tests() ? s % 3 + 1 : 5); i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[i], 2, s % 2 ? 6 : 2, (s + i) % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[(s + i) % 4],
                                          .causal = i % 3 != 0,
                                          .sinks = (s + i) % 6 == 0 };
            run_problem(&c, &p);
        }
}

/* No query sees any token: outputs are zeros, and the log-sum-exp is -infinity or the sink's logit.
 * Decode kernels, tile kernels and kernels of any head_dim, with a centre, which must not be added
 * then. */
CASE(test_nothing_seen)
{
    static const char *const specs[] = { "int-4", "turboquant-4:rotate=hadamard", "kivi-2" };
    static const uint32_t dims[] = { 128, 64, 256, 80 }, tokens[] = { 1, 5, 70 };
    for (size_t s = 0; s < 3; s++)
        for (size_t i = 0; i < 4; i++)
            for (size_t k = 0; k < 3; k++) {
                const attention_case c = case_of(specs[s], specs[s], dims[i], 2, 4, 3);
                const attention_problem p = { .query_tokens = tokens[k],
                                              .no_blocks = true,
                                              .sinks = (s + i + k) % 3 == 2 };
                run_problem(&c, &p);
            }
}

/* One kv head for more heads than a decode kernel supports, as in Falcon and MLA. */
CASE(test_many_heads)
{
    for (uint32_t i = 0; i < 4; i++) {
        const attention_case c = { "int-4",
                                   "turboquant-4:rotate=hadamard",
                                   i < 2 ? 64 : 80,
                                   1 + i % 2,
                                   71 * (1 + i % 2),
                                   10,
                                   KVANT_CUDA_F32,
                                   lengths,
                                   false,
                                   0.5f,
                                   i % 2 ? 3 : 0 };
        const attention_problem p = { .query_tokens = 1 + i, .causal = true };
        run_problem(&c, &p);
    }
}

/* From 2 to 66 columns for every kind of code, so that a tile, two tiles and several passes
 * occur. */
CASE(test_query_tokens)
{
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
                  { "innerq-base", "innerq-base" },
                  { "turboquant-6:rotate=hadamard", "trellis-4:rotate=hadamard" } };
    static const uint32_t dims[] = { 128, 64, 96, 256 }, tokens[] = { 1, 2, 3, 4, 5, 8, 16, 33 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 8; i++) {
            const attention_case c = case_of(specs[s].k, specs[s].v, dims[(s + i) % 4], 2,
                                             i % 3 == 0 ? 8 : 4, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[i], .causal = (s + i) % 4 != 0 };
            run_problem(&c, &p);
        }
}

/* Kernels of codes.cuh: 20 to 64 rows per kv head, whole and partial pages, exact blocks, and
 * options that change scores. */
CASE(test_codes)
{
    static const char *const specs[] = { "int-4", "turboquant-4:rotate=hadamard",
                                         "octopus-4:rotate=hadamard", "hqmq-s96r4",
                                         "trellis-4:rotate=hadamard" };
    static const int32_t few_lengths[] = { 64, 3, 190, 0, 700 };
    static const uint32_t tokens[] = { 5, 8, 9, 16 };
    static const attention_problem problems[] = { { .causal = true },
                                                  { .causal = false },
                                                  { .mask = true, .softcap = 20 },
                                                  { .window = 100, .causal = true, .sinks = true },
                                                  { .max_bias = 8, .causal = true } };
    for (uint32_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = 0; i < 8; i++) {
            attention_problem p = problems[(s + i) % 5];
            attention_case c = case_of(specs[s], specs[s], i < 4 ? 128 : 64, 2, 8, i % 2 ? 3 : 0);
            c.lengths = few_lengths;
            c.batch = sizeof few_lengths / sizeof *few_lengths;
            c.key_size = i == 2 ? 4 : 0.5f; /* references are raised often */
            p.query_tokens = tokens[i % 4];
            run_problem(&c, &p);
        }
}

/* One option at a time, with one query token and with several. */
CASE(test_one_by_one)
{
    static const attention_problem problems[] = {
        { .causal = true }, { .window = 1 },
        { .window = 64 },   { .window = 100, .causal = true },
        { .softcap = 5 },   { .max_bias = 8 },
        { .mask = true },   { .mask = true, .max_bias = 4 },
        { .sinks = true },  { .softcap = 30, .window = 65, .sinks = true, .causal = true },
    };
    static const char *const specs[] = { "int-4", "turboquant-4" };
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (uint32_t tokens = 1; tokens <= 6; tokens += 5) {
            attention_problem p = problems[i];
            const attention_case c =
                case_of(specs[i % 2], specs[i % 2], 128, 2, 6, i % 3 == 2 ? 3 : 0);
            p.query_tokens = tokens;
            run_problem(&c, &p);
        }
}

/* Decode steps of engines that number the rows of every call: at most one query token for each
 * sequence. Sequences without a query token write nothing. */
CASE(test_one_row_each)
{
    static const uint32_t counts[][10] = { { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 },
                                           { 0, 1, 1, 0, 0, 1, 1, 1, 0, 1 } };
    static const struct {
        const char *k, *v;
    } specs[] = { { "trellis-4", "trellis-4" },
                  { "int-8", "trellis-4" },
                  { "turboquant-4", "turboquant-4" },
                  { "octopus-4", "octopus-4" } };
    for (uint32_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = 0; i < 8; i++) {
            const attention_case c = case_of(specs[s].k, specs[s].v, i % 4 < 2 ? 128 : 64, 2,
                                             i < 6 ? 8 : 32, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = 1,
                                          .counts = counts[i / 2 % 2],
                                          .causal = i % 3 != 0,
                                          .window = i == 5 ? 70 : 0 };
            run_problem(&c, &p);
        }
}

CASE(test_ragged)
{
    static const uint32_t counts[][10] = { { 1, 2, 0, 4, 5, 1, 1, 16, 3, 0 },
                                           { 0, 0, 1, 0, 0, 33, 2, 1, 1, 1 } };
    for (uint32_t i = 0; i < 8; i++) {
        const attention_case c = case_of("turboquant-4", "turboquant-4", i % 4 < 2 ? 128 : 64, 2,
                                         i < 4 ? 8 : 2, i % 2 ? 3 : 0);
        const attention_problem p = { .query_tokens = 33,
                                      .counts = counts[i % 2],
                                      .causal = i % 3 != 0,
                                      .window = i > 5 ? 70 : 0 };
        run_problem(&c, &p);
    }
}

/* As many query tokens as in a prefill, after earlier tokens. */
CASE(test_prefill)
{
    static const int32_t past[] = { 5000, 130 };
    for (int i = 0; i < 2; i++) {
        const attention_case c = { "int-4",         "int-4", i ? 64 : 128, 1,    4, 2,
                                   KVANT_CUDA_BF16, past,    false,        0.5f, 3 };
        const attention_problem p = { .query_tokens = 130, .causal = true, .scratch = i == 0 };
        run_problem(&c, &p);
    }
}

/* Random problems, with all combinations that one call supports. */
CASE(test_random)
{
    static const char *const specs[] = {
        "int-4:sym",
        "bdr-4",
        "int-8",
        "int-5",
        "kivi-2",
        "innerq-base",
        "turboquant-4:scale=norm,rotate=none",
        "turboquant-4:rotate=hadamard",
        "trellis-4:rotate=hadamard",
        "trellis-2:rotate=hadamard",
        "octopus-4:rotate=hadamard",
        "hqmq-s192r6",
#if KVANT_PAPERS
        "turboquant-2.5",
        "turboquant-3:qjl,rotate=hadamard",
        "innerq-hybrid",
        "polar-4:rotate=hadamard",
        "octopus-5:rotate=hadamard",
#endif
    };
    static const uint32_t dims[] = { 64, 128, 256, 96, 80 };
    for (int i = 0; i < 80; i++) {
        int32_t own[8];
        uint32_t counts[8];
        const uint32_t n_kv_heads = 1 + below(3), batch = 1 + below(8),
                       most = 1 + below(below(3) ? 5 : 24);
        for (uint32_t b = 0; b < batch; b++) {
            own[b] = (int32_t)(random_bits() % 400);
            counts[b] = below(most + 1);
        }
        const char *spec = one_of(specs, sizeof specs / sizeof *specs);
        const attention_case c = { spec,
                                   random_bits() % 3 ? spec
                                                     : one_of(specs, sizeof specs / sizeof *specs),
                                   dims[random_bits() % 5],
                                   n_kv_heads,
                                   n_kv_heads * (1 + below(8)),
                                   batch,
                                   (kvant_cuda_type)(random_bits() % 3),
                                   own,
                                   random_bits() % 4 == 0,
                                   random_uniform(0.1f, 1),
                                   (uint32_t)(random_bits() % 4) };
        const attention_problem p = { .query_tokens = most,
                                      .counts = random_bits() % 2 ? counts : NULL,
                                      .causal = random_bits() % 4 != 0,
                                      .window = random_bits() % 3
                                                    ? 0
                                                    : 1 + (uint32_t)(random_bits() % 200),
                                      .softcap = random_bits() % 4 ? 0 : random_uniform(1, 60),
                                      .max_bias = random_bits() % 4 ? 0 : random_uniform(1, 8),
                                      .mask = random_bits() % 4 == 0,
                                      .sinks = random_bits() % 4 == 0 };
        run_problem(&c, &p);
    }
}

/* Keys of several matrices, or centres, or both: every kind of attention kernel, with exact and
 * hidden pages, sinks, a mask, several query tokens. */
CASE(test_matrices)
{
    static const struct {
        const char *k, *v;
        uint32_t head_dim;
    } specs[] = { { "trellis-4:rotate=hadamard", "trellis-4:rotate=hadamard", 128 },
                  { "trellis-3:rotate=hadamard", "trellis-3:rotate=hadamard", 64 },
                  { "turboquant-4:rotate=hadamard", "turboquant-4:rotate=hadamard", 128 },
                  { "int-4", "int-4", 128 },
                  { "int-8:sym", "turboquant-4:rotate=hadamard", 256 },
                  { "octopus-4:rotate=hadamard", "octopus-4:rotate=hadamard", 64 },
                  { "kivi-2", "kivi-2", 128 },
                  { "int-5", "trellis-4:rotate=hadamard", 80 },
                  { "turboquant-6:rotate=hadamard", "trellis-4:rotate=hadamard", 128 } };
    static const attention_problem problems[] = {
        { .query_tokens = 1 },
        { .query_tokens = 1, .sinks = true },
        { .query_tokens = 4, .causal = true },
        { .query_tokens = 1, .mask = true },
        { .query_tokens = 9, .causal = true, .sinks = true },
        { .query_tokens = 33, .causal = true, .max_bias = 8 },
        { .query_tokens = 70, .causal = true },
        { .query_tokens = 130, .causal = true, .window = 250, .scratch = true },
        { .query_tokens = 110, .mask = true, .scratch = true },
    };
    static const int32_t some[] = { 500, 20, 129, 0, 700 }, one[] = { 5000 };
    const size_t n_specs = sizeof specs / sizeof *specs,
                 n_problems = sizeof problems / sizeof *problems;
    for (size_t s = 0; s < n_specs; s++)
        for (size_t i = 0; i < n_problems; i++) {
            const attention_case c = { specs[s].k,         specs[s].v,
                                       specs[s].head_dim,  2,
                                       s % 2 ? 8 : 4,      i == 1 ? 1 : i < 6 ? 5 : 3,
                                       KVANT_CUDA_F32,     i == 1 ? one : some,
                                       i % 2 == 1,         0.5f,
                                       (s + i) % 2 ? 3 : 0 };
            attention_problem p = problems[i];
            p.matrices =
                i == 4 ? 0 : 2 + (uint32_t)(5 * s + 7 * i) % (KVANT_CUDA_MOST_MATRICES - 1);
            p.key_center = i != 2;
            if (!small_tests() || (s + i) % 3 == 0)
                run_problem(&c, &p);
        }
}

RUN_CASES_ON_GPU(NULL, NULL)
