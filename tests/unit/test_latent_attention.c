/* test_latent_attention.c - attention on rows whose first numbers are also the values (MLA),
 * against a plain softmax in double precision on the rows that the tensor reads back. The cases are
 * codecs per part, lengths that do not fill a page, masks, sinks, block tables, threads and refused
 * arguments. */
#include "attention_data.h"

#include "../cpu_levels.h"

enum { PARTS = 5, VALUE_PARTS = 4, DIM = 64, ROW = PARTS * DIM, VALUES = VALUE_PARTS * DIM };

typedef struct setup {
    const char *latent, *rope;
    uint32_t n_heads, n_tokens, n_queries;
    bool mask, sinks, table, causal;
} setup;

typedef struct fixture {
    setup s;
    kvant_codec *codecs[2];
    void *memory;
    kvant_tensor *tensor;
    int32_t *table;
    attention_data data;
    kvant_attention_problem problem;
} fixture;

static void fill_tensor(const fixture *f, uint64_t *rng)
{
    const uint32_t n = f->s.n_tokens;
    int64_t *slots = malloc(n * sizeof *slots);
    float *rows = malloc((size_t)n * ROW * sizeof *rows);
    fill_normal(rows, (size_t)n * ROW, rng);
    for (uint32_t i = 0; i < n; i++)
        slots[i] = 64 * (int64_t)f->table[i / 64] + i % 64;
    assert_int_equal(kvant_tensor_write(f->tensor, slots, n, rows, ROW, 2), KVANT_OK);
    free(slots);
    free(rows);
}

static kvant_tensor *make_tensor(fixture *f, kvant_role role, uint32_t dim)
{
    const uint32_t blocks = (f->s.n_tokens + 63) / 64;
    const kvant_codec *codecs[PARTS];
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = codecs,
                                         .n_kv_heads = PARTS,
                                         .n_sequences = 1,
                                         .n_blocks = blocks + 1,
                                         .blocks_per_sequence = blocks + 1 };
    kvant_tensor *tensor;
    size_t bytes;
    assert_ok(kvant_codec_create(f->s.latent, dim, role, 3, &f->codecs[0], NULL, 0));
    assert_int_equal(kvant_codec_create(f->s.rope, dim, role, 3, &f->codecs[1], NULL, 0), KVANT_OK);
    for (uint32_t part = 0; part < PARTS; part++)
        codecs[part] = f->codecs[part >= VALUE_PARTS];
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    f->memory = aligned(bytes);
    assert_int_equal(kvant_tensor_create(&params, f->memory, &tensor), KVANT_OK);
    return tensor;
}

static fixture make_fixture(setup s)
{
    const uint32_t blocks = (s.n_tokens + 63) / 64;
    uint64_t rng = 7;
    fixture f = { .s = s, .table = malloc((blocks + 1) * sizeof *f.table) };
    for (uint32_t i = 0; i < blocks; i++)
        f.table[i] = (int32_t)(s.table ? blocks - i : i);
    f.tensor = make_tensor(&f, KVANT_ROLE_V, DIM);
    fill_tensor(&f, &rng);
    f.problem = (kvant_attention_problem){ .n_tokens = s.n_tokens,
                                           .n_queries = s.n_queries,
                                           .n_heads = s.n_heads,
                                           .causal = s.causal,
                                           .block_table = s.table ? f.table : NULL };
    f.data = make_data(&f.problem, ROW, VALUES, s.mask, s.sinks, &rng);
    return f;
}

static void free_fixture(fixture *f)
{
    kvant_tensor_free(&f->tensor);
    for (int i = 0; i < 2; i++)
        kvant_codec_free(&f->codecs[i]);
    free(f->memory);
    free(f->table);
    free_data(&f->data);
}

static kvant_status run(fixture *f)
{
    size_t bytes = 0;
    const kvant_status said =
        kvant_latent_attention_workspace(f->tensor, VALUES, &f->problem, &bytes);
    void *workspace = aligned(bytes ? bytes : 64);
    memset(workspace, 0xff, bytes); /* NaNs show a read of memory that was not written */
    for (size_t i = 0; i < (size_t)f->s.n_queries * f->s.n_heads * VALUES; i++)
        f->data.out[i] = NAN;
    const kvant_status status =
        kvant_latent_attention(f->tensor, VALUES, &f->problem, workspace, bytes);
    assert_int_equal(said, status);
    free(workspace);
    return status;
}

static float *read_all(const fixture *f)
{
    float *rows = malloc((size_t)f->s.n_tokens * ROW * sizeof *rows);
    for (uint32_t j = 0; j < f->s.n_tokens; j++)
        assert_ok(kvant_tensor_read(f->tensor, 64 * (size_t)f->table[j / 64] + j % 64, 1,
                                    rows + (size_t)j * ROW, ROW));
    return rows;
}

/* The largest error that binary32 may cause in a row. Rotations of the query, of the rows and of
 * the output round at most DIM times each. Scores round ROW products whose magnitudes sum to m, and
 * the exponential makes relative errors of weights from them. Sums round once per token. 2^-18 is
 * the error of the exponential. */
static double bound(const fixture *f, const float *rows, const float *q)
{
    double magnitude = 0, largest = 0;
    for (uint32_t j = 0; j < f->s.n_tokens; j++) {
        double m = 0;
        for (uint32_t part = 0; part < PARTS; part++) {
            double qq = 0, rr = 0; /* rotations keep lengths, not magnitudes */
            for (uint32_t i = 0; i < DIM; i++) {
                qq += pow(q[part * DIM + i], 2);
                rr += pow(rows[(size_t)j * ROW + part * DIM + i], 2);
            }
            m += sqrt(qq * rr);
            if (part < VALUE_PARTS)
                largest = fmax(largest, sqrt(rr));
        }
        magnitude = fmax(magnitude, m * f->problem.scale);
    }
    return 2 * largest *
           ((ROW + 3 * DIM) * magnitude * 0x1p-24 + f->s.n_tokens * 0x1p-24 + 0x1p-18);
}

static void check(setup s)
{
    fixture f = make_fixture(s);
    double want[VALUES], *weights = malloc(s.n_tokens * sizeof *weights);
    float *rows = read_all(&f);
    assert_int_equal(run(&f), KVANT_OK);
    for (uint32_t t = 0; t < s.n_queries; t++)
        for (uint32_t h = 0; h < s.n_heads; h++) {
            const reference_row cells = {
                .keys = rows, .values = rows, .key_stride = ROW, .value_stride = ROW
            };
            const size_t row = (size_t)t * s.n_heads + h;
            const double error = bound(&f, rows, f.data.q + row * ROW);
            data_row(&f.data, &f.problem, t, h, cells, weights, want);
            for (uint32_t i = 0; i < VALUES; i++)
                if (!(fabs(f.data.out[row * VALUES + i] - want[i]) <= error))
                    fail_msg("%s, token %u, head %u, channel %u: %g, exact %g, bound %g", s.latent,
                             t, h, i, f.data.out[row * VALUES + i], want[i], error);
        }
    free(weights);
    free(rows);
    free_fixture(&f);
}

CASE(outputs_are_exact_to_binary32)
{
    static const char *const specs[][2] = { { "f16", "f16" },
                                            { "int-8", "int-8" },
                                            { "trellis-4", "int-8" },
                                            { "trellis-3", "f16" },
                                            { "turboquant-6", "int-8" },
                                            { "int-4:recent=64", "int-8:recent=64" } };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        const char *latent = specs[i][0], *rope = specs[i][1];
        check((setup){ latent, rope, 16, 130, 1, .causal = true });
        check((setup){ latent, rope, 5, 1000, 2, .mask = true, .table = true });
        check((setup){ latent, rope, 20, 200, 37, .mask = true, .sinks = true });
        check((setup){ latent, rope, 128, 63, 2, .mask = false });
    }
}

CASE(every_level_is_exact_to_binary32)
{
    for (size_t i = 0; i < sizeof cpu_levels / sizeof *cpu_levels; i++) {
        if (!use_level(cpu_levels[i]))
            continue;
        check((setup){ "trellis-4", "int-8", 16, 130, 1, .causal = true });
        check((setup){ "trellis-2", "f16", 3, 200, 9, .mask = true });
    }
    assert_true(use_level(KVANT_CPU_AUTO));
}

/* Compares bits, for decode (whose context is split) and prefill. */
CASE(threads_change_nothing)
{
    for (uint32_t n_queries = 1; n_queries <= 41; n_queries += 40) {
        fixture f = make_fixture((setup){ "trellis-4", "int-8", 9, 2300, n_queries, .mask = true });
        const size_t bytes = (size_t)n_queries * 9 * VALUES * sizeof(float);
        float *first = malloc(bytes);
        for (uint32_t n = 1; n <= 4; n++) {
            f.problem.n_threads = n;
            assert_int_equal(run(&f), KVANT_OK);
            if (n == 1)
                memcpy(first, f.data.out, bytes);
            assert_memory_equal(first, f.data.out, bytes);
        }
        free(first);
        free_fixture(&f);
    }
}

/* A query with a NaN changes only the outputs of its heads. */
CASE(nan_queries_give_nan)
{
    fixture f = make_fixture((setup){ "trellis-4", "int-8", 2, 100, 1, .mask = false });
    f.data.q[ROW - 1] = NAN;
    assert_int_equal(run(&f), KVANT_OK);
    for (uint32_t i = 0; i < VALUES; i++) {
        assert_true(f.data.out[i] != f.data.out[i]);
        assert_false(f.data.out[VALUES + i] != f.data.out[VALUES + i]);
    }
    free_fixture(&f);
}

static void expect_refused(const kvant_tensor *tensor, uint32_t values,
                           const kvant_attention_problem *problem, const char *why)
{
    size_t bytes;
    assert_int_equal(kvant_latent_attention_workspace(tensor, values, problem, &bytes),
                     KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(kvant_error_message(), why));
    assert_int_equal(kvant_latent_attention(tensor, values, problem, NULL, 0), KVANT_ERR_ARGUMENT);
}

CASE(arguments_are_checked)
{
    const struct {
        const char *spec, *why;
        kvant_role role;
        uint32_t dim;
    } tensors[] = { { "int-8", "a tensor of keys", KVANT_ROLE_K, DIM },
                    { "int-8", "multiple of 16", KVANT_ROLE_V, 40 },
                    { "trellis-4:center=first", "learn", KVANT_ROLE_V, DIM } };
    fixture f = make_fixture((setup){ "int-8", "int-8", 4, 100, 1, .mask = false });
    size_t bytes;
    assert_int_equal(kvant_latent_attention_workspace(f.tensor, VALUES, &f.problem, NULL),
                     KVANT_ERR_ARGUMENT);
    expect_refused(NULL, VALUES, &f.problem, "rows is NULL");
    expect_refused(f.tensor, 0, &f.problem, "not a multiple of the head_dim");
    expect_refused(f.tensor, DIM + 1, &f.problem, "not a multiple of the head_dim");
    expect_refused(f.tensor, ROW + DIM, &f.problem, "not a multiple of the head_dim");
    expect_refused(f.tensor, VALUES, NULL, "problem");
    f.problem.first_block = 2;
    expect_refused(f.tensor, VALUES, &f.problem, "more blocks");
    f.problem.first_block = 0;
    assert_ok(kvant_latent_attention_workspace(f.tensor, VALUES, &f.problem, &bytes));
    void *workspace = aligned(bytes);
    assert_int_equal(kvant_latent_attention(f.tensor, VALUES, &f.problem, workspace, bytes - 64),
                     KVANT_ERR_ARGUMENT);
    free(workspace);
    free_fixture(&f);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        fixture other = { .s = { tensors[i].spec, tensors[i].spec, 4, 100, 1, .mask = false } };
        other.tensor = make_tensor(&other, tensors[i].role, tensors[i].dim);
        expect_refused(other.tensor, 4 * tensors[i].dim, &f.problem, tensors[i].why);
        free_fixture(&other);
    }
}

RUN_CASES(NULL, NULL)
