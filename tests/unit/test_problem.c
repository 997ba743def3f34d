/* test_problem.c - every option of an attention problem, alone and together, on blocks of several
 * transforms and states, against double precision. */
#include "attend.h"

enum { BLOCKS = 12, TOKENS = 700 };

/* Errors of binary32 are below this part of the largest value and of 1 + |lse|. A score |q| |k|
 * scale is at most 13 x 200 x 0.1. It errs by (32 + 20) 2^-24 of itself, and by twice that with
 * centre and scale. */
#define EXACT 2e-3
/* With integers a query errs by half a step of 1 / limit. Limits are 500 and more, so scores of
 * these rows err by 0.01. */
#define ROUNDED 0.03

/* Rows of four kinds one after another, so that codecs with center=first make three transforms. */
static fixture use(const char *spec, kvant_role role)
{
    uint64_t rng = 100 + role;
    static float rows[TOKENS * WIDTH];
    fixture f = make_heads(spec, spec, role, 1, BLOCKS, 0);
    for (uint32_t i = 0; i < TOKENS; i++)
        for (uint32_t j = 0; j < WIDTH; j++) {
            uint32_t kind = i < 200 ? 0 : i < 330 ? 1 : 2;
            rows[i * WIDTH + j] =
                test_normal(&rng) * (j % 6 ? 1 : 3) + 6 * (float)((j * (kind + 1) + kind) % 7) - 12;
        }
    write_rows(&f, 0, 200, rows, 200, 2);
    write_rows(&f, 200, 130, rows + 200 * WIDTH, 130, 2);
    write_rows(&f, 330, TOKENS - 330, rows + 330 * WIDTH, TOKENS - 330, 2);
    return f;
}

typedef struct inputs {
    float q[MAX_QUERIES * N_HEADS * HEAD_DIM], sinks[N_HEADS];
    uint16_t mask[MAX_QUERIES * TOKENS];
} inputs;

static void fill_inputs(inputs *in)
{
    uint64_t rng = 8;
    fill_normal(in->q, COUNT(in->q), &rng);
    for (size_t i = 0; i < COUNT(in->sinks); i++)
        in->sinks[i] = 20 * test_normal(&rng); /* scores reach some tens */
    for (size_t i = 0; i < COUNT(in->mask); i++)
        in->mask[i] = test_random(&rng) % 4 == 0
                          ? 0xfc00
                          : kvant_half_from_float(-4 * (float)test_uniform(&rng));
}

static void check(const fixture *k, const fixture *v, kvant_attention_problem problem,
                  const inputs *in)
{
    static attended got, again;
    for (int exact = 0; exact < 2; exact++) {
        problem.exact = exact;
        assert_int_equal(attend(k, v, &problem, in->q, &got), KVANT_OK);
        check_attended(k, v, &problem, &got, exact ? EXACT : ROUNDED);
        problem.n_threads = 1; /* the number of threads changes nothing */
        assert_int_equal(attend(k, v, &problem, in->q, &again), KVANT_OK);
        assert_memory_equal(got.out, again.out, sizeof got.out);
        assert_memory_equal(got.lse, again.lse, sizeof got.lse);
        problem.n_threads = 3;
    }
}

static const char *const pairs[][2] = {
    { "turboquant-4:center=first,norm=first", "turboquant-4:center=first,norm=first" },
    { "trellis-4:center=first,norm=first,recent=64", "turboquant-3:center=first" },
    { "int-4:axis=channel,center=first,norm=first", "int-4:norm=first,recent=70" },
    { "turboquant-4:center=first,norm=first", "trellis-2:transform=first" },
    PAPERS({ "octopus-4:center=first", "octopus-4:center=first,norm=first" }, )
};

/* Features, one bit each. */
enum { CAUSAL = 1, WINDOW = 2, MASK = 4, SINKS = 8, ALIBI = 16, SOFTCAP = 32, ALL = 64 };

CASE(every_combination)
{
    static const uint32_t queries[] = { 1, 3, MAX_QUERIES };
    static inputs in;
    fill_inputs(&in);
    for (size_t p = 0; p < COUNT(pairs); p++) {
        fixture k = use(pairs[p][0], KVANT_ROLE_K), v = use(pairs[p][1], KVANT_ROLE_V);
        /* only codecs with matrices have more */
        assert_int_equal(tensor_info_of(&k).n_transforms, 4);
        for (uint32_t features = 0; features < ALL; features++)
            check(&k, &v,
                  (kvant_attention_problem){ .n_queries = queries[(features + p) % COUNT(queries)],
                                             .n_tokens = features % 5 ? TOKENS : 385,
                                             .causal = features & CAUSAL,
                                             .window = features & WINDOW ? 100 + features : 0,
                                             .mask = features & MASK ? in.mask : NULL,
                                             .mask_token_stride = TOKENS,
                                             .sinks = features & SINKS ? in.sinks : NULL,
                                             .max_bias = features & ALIBI ? 8.0f : 0.0f,
                                             .logit_softcap = features & SOFTCAP ? 15 : 0,
                                             .scale = 0.1f },
                  &in);
        drop(&k);
        drop(&v);
    }
}

/* Blocks in any order, repeated blocks and hidden blocks; tables that two sequences share. */
CASE(block_tables)
{
    static const int32_t tables[][BLOCKS] = {
        { 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0 },
        { 3, 3, 3, 5, 5, 0, 0, 9, 9, 3, 3 },
        { -1, -1, -7, 6, -1, 2, 1, INT32_MIN, 4, 8, 9 },
        { 0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1 },
    };
    static inputs in;
    fill_inputs(&in);
    for (size_t p = 0; p < COUNT(pairs); p++) {
        fixture k = use(pairs[p][0], KVANT_ROLE_K), v = use(pairs[p][1], KVANT_ROLE_V);
        for (size_t t = 0; t < COUNT(tables); t++)
            for (uint32_t features = 0; features < ALL; features += 7)
                check(&k, &v,
                      (kvant_attention_problem){ .n_queries = features % 2 ? 1 : 20,
                                                 .n_tokens = 64 * 9 + features % 60,
                                                 .block_table = tables[t],
                                                 .causal = features & CAUSAL,
                                                 .window = features & WINDOW ? 200 : 0,
                                                 .sinks = features & SINKS ? in.sinks : NULL,
                                                 .max_bias = features & ALIBI ? 4.0f : 0.0f,
                                                 .scale = 0.1f },
                      &in);
        check(
            &k, &v,
            (kvant_attention_problem){
                .n_queries = 2, .n_tokens = 200, .first_block = 3, .causal = true, .scale = 0.1f },
            &in);
        drop(&k);
        drop(&v);
    }
}

/* Hidden tokens may hold anything. A query that sees no token gives zeros, or the sink's logit. */
CASE(nothing_to_see)
{
    static const int32_t hidden[2] = { -1, -1 };
    static inputs in;
    static attended got;
    fill_inputs(&in);
    fixture k = use(pairs[0][0], KVANT_ROLE_K), v = use(pairs[0][1], KVANT_ROLE_V);
    kvant_attention_problem problems[] = {
        { .n_queries = 2, .n_tokens = 0, .scale = 1 },
        { .n_queries = 2, .n_tokens = 128, .block_table = hidden, .scale = 1 },
        { .n_queries = 2,
          .n_tokens = 128,
          .block_table = hidden,
          .causal = true,
          .max_bias = 8,
          .scale = 1 },
    };
    for (size_t i = 0; i < COUNT(problems); i++)
        for (int sinks = 0; sinks < 2; sinks++) {
            problems[i].sinks = sinks ? in.sinks : NULL;
            assert_int_equal(attend(&k, &v, &problems[i], in.q, &got), KVANT_OK);
            for (uint32_t row = 0; row < 2 * N_HEADS; row++) {
                if (sinks)
                    assert_true(got.lse[row] == in.sinks[row % N_HEADS]);
                else
                    assert_true(isinf(got.lse[row]) && got.lse[row] < 0);
                for (uint32_t j = 0; j < HEAD_DIM; j++)
                    assert_true(got.out[row * HEAD_DIM + j] == 0);
            }
        }
    drop(&k);
    drop(&v);
}

/* A query of NaNs gives NaNs, and its neighbours give the same outputs as without it. */
CASE(nans_stay_with_their_heads)
{
    static inputs in;
    static attended got, want;
    fill_inputs(&in);
    for (size_t p = 0; p < COUNT(pairs); p++)
        for (uint32_t n_queries = 1; n_queries <= MAX_QUERIES; n_queries += 18)
            for (int exact = 0; exact < 2; exact++) {
                fixture k = use(pairs[p][0], KVANT_ROLE_K), v = use(pairs[p][1], KVANT_ROLE_V);
                kvant_attention_problem problem = { .n_queries = n_queries,
                                                    .n_tokens = TOKENS,
                                                    .causal = true,
                                                    .scale = 0.1f,
                                                    .exact = exact };
                assert_int_equal(attend(&k, &v, &problem, in.q, &want), KVANT_OK);
                const float kept = in.q[HEAD_DIM + 3];
                in.q[HEAD_DIM + 3] = NAN; /* head 1 of query 0 */
                assert_int_equal(attend(&k, &v, &problem, in.q, &got), KVANT_OK);
                in.q[HEAD_DIM + 3] = kept;
                for (uint32_t j = 0; j < HEAD_DIM; j++)
                    assert_true(isnan(got.out[HEAD_DIM + j]));
                assert_true(isnan(got.lse[1]));
                for (uint32_t row = 0; row < n_queries * N_HEADS; row++)
                    if (row != 1)
                        assert_memory_equal(got.out + row * HEAD_DIM, want.out + row * HEAD_DIM,
                                            HEAD_DIM * sizeof(float));
                drop(&k);
                drop(&v);
            }
}

RUN_CASES(NULL, NULL)
