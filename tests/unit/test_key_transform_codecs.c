/* test_key_transform_codecs.c - codecs with transform=file and transform=diagonal.
 * test_key_transform.c tests how W is made. */
#include "calibrated_fixture.h"

#include <kvant/attention.h>

#include "../../src/base/half.h"
#include "../../src/codec/codec_internal.h"
#include "../../src/math/spd.h"

static const char *const transforms[] = {
    "turboquant-4:transform=file",       "turboquant-4:transform=diagonal",
    "int-8:transform=file,rotate=none",  "int-8:transform=diagonal,rotate=none",
    "int-4:transform=file,rotate=dense", "int-4:transform=diagonal,rotate=dense",
    "bdr-4:transform=file,block=8",      "turboquant-4:transform=file,signs=none",
};

/* |W| |W^-1| of the codec's kv head, Frobenius norms. */
static double condition(const kvant_codec *codec, const kvant_calibration *c)
{
    kvant_calibration_entry entry = entry_of(c, 1, KVANT_ROLE_K);
    double w[DIM * DIM] = { 0 }, inverse[DIM * DIM] = { 0 }, squares[2] = { 0 };
    const uint16_t *half = entry.matrix;
    for (uint32_t i = 0; i < DIM; i++)
        for (uint32_t j = 0; j <= i; j++)
            w[i * DIM + j] = w[j * DIM + i] = kvant_half_to_float(*half++);
    if (codec->transform.diagonal) {
        memset(w, 0, sizeof w);
        for (uint32_t i = 0; i < DIM; i++)
            w[i * DIM + i] = entry.diagonal[i];
    }
    assert_int_equal(kvant_spd_inverse(DIM, w, inverse), KVANT_OK);
    for (uint32_t i = 0; i < DIM * DIM; i++) {
        squares[0] += w[i] * w[i];
        squares[1] += inverse[i] * inverse[i];
    }
    return sqrt(squares[0] * squares[1]);
}

/* <R W x, R W^-1 q> = <x, q> and W^-1 R^T R W x = x. Entries of both matrices are rounded, and each
 * sum has up to DIM roundings. R adds up to DIM more (dense) or 2 log2 DIM + 2, and twice that
 * where it was multiplied into the matrix. In all that is 4 DIM 2^-24 for each of the two factors,
 * relative to |W| |W^-1| |x| |q|. (Frobenius norms bound the norms of matrices of magnitudes.) */
CASE(inner_products_stay)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 37;
    for (size_t i = 0; i < COUNT(transforms); i++) {
        kvant_codec *codec = create(transforms[i], DIM, KVANT_ROLE_K, c);
        double slack = 8 * DIM * 0x1p-24 * condition(codec, c);
        assert_true(slack < 0.5); /* otherwise the test shows nothing */
        for (int round = 0; round < 50; round++) {
            float x[DIM], q[DIM], y[DIM], p[DIM], back[DIM];
            double before = 0, after = 0, size_x = 0, size_q = 0;
            fill_normal(x, DIM, &rng);
            fill_normal(q, DIM, &rng);
            kvant_transform_forward(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, x,
                                    y);
            kvant_transform_inverse(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, y,
                                    back);
            assert_int_equal(kvant_codec_transform_query(codec, NULL, q, p), KVANT_OK);
            for (uint32_t j = 0; j < DIM; j++) {
                before += (double)x[j] * q[j];
                after += (double)y[j] * p[j];
                size_x += (double)x[j] * x[j];
                size_q += (double)q[j] * q[j];
            }
            assert_true(fabs(after - before) <= slack * sqrt(size_x * size_q));
            assert_true(sqrt(squared_distance(x, back, DIM)) <= slack * sqrt(size_x));
        }
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&c);
}

/* Mean squared error of scores, for queries with the second moment that W was made for: sum over
 * tokens of e^T Q e. */
static double score_error(const char *spec, const kvant_calibration *c)
{
    kvant_codec *codec = create(spec, DIM, KVANT_ROLE_K, c);
    kvant_calibration_entry entry = entry_of(c, 1, KVANT_ROLE_K);
    kvant_affine affine = { entry.mean, NULL };
    float rows[TOKENS * DIM], decoded[TOKENS * DIM];
    uint64_t rng = 38;
    double error = 0;
    fill_rows(rows, DIM, &rng);
    void *page = aligned(info_of(codec).page_bytes);
    assert_int_equal(kvant_codec_encode(codec, &affine, rows, DIM, 0, TOKENS, page), KVANT_OK);
    assert_int_equal(kvant_codec_decode(codec, &affine, page, 0, TOKENS, decoded, DIM), KVANT_OK);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < DIM * DIM; i++)
            error += entry.query_moment[i] *
                     ((double)decoded[t * DIM + i / DIM] - rows[t * DIM + i / DIM]) *
                     ((double)decoded[t * DIM + i % DIM] - rows[t * DIM + i % DIM]);
    free(page);
    kvant_codec_free(&codec);
    return error;
}

CASE(scores_err_less)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    double none = score_error("turboquant-4:center=file", c),
           diagonal = score_error("turboquant-4:transform=diagonal", c),
           matrix = score_error("turboquant-4:transform=file", c);
    assert_true(diagonal < 0.95 * none && matrix < diagonal);
    kvant_calibration_free(&c);
}

CASE(specs_say_what_they_do)
{
    static const struct {
        const char *spec, *key, *value;
    } cases[] = {
        { "turboquant-4:transform=file", ",transform=file,center=file,sink=4,seed=7",
          ",center=file,sink=4,seed=7" },
        { "turboquant-4:transform=diagonal,center=none", ",transform=diagonal,center=none,seed=7",
          "signs=seed,seed=7" },
        PAPERS({ "innerq-base:transform=file,recent=0,sink=0",
                 ",transform=file,center=file,sink=0,recent=0", ",center=file,sink=0,recent=0" }, ){
            "turboquant-4:transform=none", "signs=seed,seed=7", "signs=seed,seed=7" },
    };
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec = create(cases[i].spec, DIM, (kvant_role)role, c);
            const char *end = role ? cases[i].value : cases[i].key, *spec = info_of(codec).spec;
            if (strlen(spec) < strlen(end) || strcmp(spec + strlen(spec) - strlen(end), end) != 0)
                fail_msg("%s became %s, expected it to end in %s", cases[i].spec, spec, end);
            assert_true((codec->transform.key_transform != NULL) ==
                        (role == 0 && strstr(cases[i].spec, "transform=none") == NULL));
            /* canonical specs are equal to themselves */
            kvant_codec *again = create(spec, DIM, (kvant_role)role, c);
            assert_string_equal(info_of(again).spec, spec);
            kvant_codec_free(&again);
            kvant_codec_free(&codec);
        }
    kvant_calibration_free(&c);
}

static void expect_refusal(const char *spec, uint32_t dim, kvant_role role,
                           const kvant_calibration *c, kvant_status expected, const char *words)
{
    kvant_codec *codec;
    char err[512] = "";
    kvant_status status =
        kvant_codec_create_calibrated(spec, dim, role, 0, c, 1, 1, &codec, err, sizeof err);
    if (status != expected || !strstr(err, words))
        fail_msg("%s: %s: \"%s\", expected %s with \"%s\"", spec, kvant_strerror(status), err,
                 kvant_strerror(expected), words);
    assert_null(codec);
}

CASE(mistakes_are_named)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    for (int role = 0; role < 2; role++) {
        kvant_role r = (kvant_role)role;
        expect_refusal("turboquant-4:transform=file", DIM, r, NULL, KVANT_ERR_UNSUPPORTED,
                       "kvant calibrate");
        expect_refusal("turboquant-4:transform=file", 64, r, c, KVANT_ERR_ARGUMENT,
                       "made for another model");
        expect_refusal("turboquant-4:transform=matrix", DIM, r, c, KVANT_ERR_SPEC,
                       "none, diagonal, file");
        expect_refusal("int-4:transform=file,norm=first", DIM, r, c, KVANT_ERR_SPEC,
                       "replaces norm");
        PAPERS(expect_refusal("kmeans-4:c=4,transform=file", DIM, r, c, KVANT_ERR_SPEC,
                              "no option 'transform'");)
        expect_refusal("f16:transform=file", DIM, r, c, KVANT_ERR_SPEC, "no option 'transform'");
    }
    kvant_calibration_free(&c);
}

/* A valid file with a matrix that no calibrator would write. */
CASE(matrices_without_inverse_are_refused)
{
    for (uint32_t kind = 0; kind < 3; kind++) {
        kvant_calibration *c = calibrate_fixed(DIM);
        uint16_t *half = (uint16_t *)(uintptr_t)entry_of(c, 1, KVANT_ROLE_K).matrix;
        for (uint32_t i = 0; i < DIM; i++)
            for (uint32_t j = 0; j <= i; j++) /* zero; all ones; a condition of 2^17 */
                *half++ =
                    kind == 1 || (kind == 2 && i == j) ? (i || kind == 1 ? 0x3c00 : 0x0080) : 0;
        expect_refusal("turboquant-4:transform=file", DIM, KVANT_ROLE_K, c, KVANT_ERR_FORMAT,
                       "not accurate enough");
        kvant_codec *fine = create("turboquant-4:transform=diagonal", DIM, KVANT_ROLE_K, c);
        kvant_codec_free(&fine);
        kvant_calibration_free(&c);
    }
}

CASE(bad_rows_are_refused)
{
    static const float bad[] = { NAN, INFINITY, 3e38f, 60000 };
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t s = 0; s < COUNT(transforms); s++) {
        kvant_codec *codec = create(transforms[s], DIM, KVANT_ROLE_K, c);
        size_t bytes = info_of(codec).page_bytes;
        uint8_t *page = aligned(bytes), *zeros = aligned(bytes);
        float rows[TOKENS * DIM] = { 0 }, decoded[TOKENS * DIM];
        for (size_t i = 0; i < COUNT(bad); i++) {
            rows[60 * DIM + 7] = bad[i];
            kvant_status status = kvant_codec_encode(codec, NULL, rows, DIM, 0, TOKENS, page);
            assert_true(i == 3 ? status == KVANT_OK || status == KVANT_ERR_RANGE
                               : status == (i == 2 ? KVANT_ERR_RANGE : KVANT_ERR_NONFINITE));
            if (status != KVANT_OK)
                assert_memory_equal(page, zeros, bytes);
            assert_ok(kvant_codec_decode(codec, NULL, page, 0, TOKENS, decoded, DIM));
            for (size_t j = 0; j < COUNT(decoded); j++)
                assert_true(isfinite(decoded[j]));
        }
        free(page);
        free(zeros);
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&c);
}

CASE(pages_do_not_tell_the_level)
{
    static const uint32_t dims[] = { 32, 64, 80 };
    uint64_t rng = 39;
    for (size_t d = 0; d < COUNT(dims); d++) {
        kvant_calibration *c = calibrate_fixed(dims[d]);
        for (size_t s = 0; s < N_WEIGHTED_SPECS; s++) {
            kvant_codec *codec = create(weighted_specs[s], dims[d], KVANT_ROLE_K, c);
            size_t bytes = info_of(codec).page_bytes;
            static float rows[TOKENS * 80];
            uint8_t *page = aligned(bytes), *want = aligned(bytes);
            fill_normal(rows, TOKENS * dims[d], &rng);
            for (size_t l = 0; l < COUNT(cpu_levels); l++) { /* the first is portable C */
                if (!use_level(cpu_levels[l]))
                    continue;
                memset(page, 0, bytes);
                assert_ok(
                    kvant_codec_encode(codec, NULL, rows, dims[d], 0, TOKENS, l ? page : want));
                if (l && memcmp(page, want, bytes) != 0)
                    fail_msg("%s at %u: other bytes at level %s", weighted_specs[s],
                             (unsigned)dims[d], kvant_cpu_level_name(cpu_levels[l]));
            }
            kvant_set_cpu_level(KVANT_CPU_AUTO);
            free(page);
            free(want);
            kvant_codec_free(&codec);
        }
        kvant_calibration_free(&c);
    }
}

/* Attention on a tensor equals attention on the rows that the tensor reads back, for sealed and
 * exact pages, codes and tiles. */
CASE(attention_undoes_the_transform)
{
    enum { N = 300 };
    static const char *const specs[] = {
        "turboquant-4:transform=file", "turboquant-4:transform=diagonal",
        PAPERS("octopus-4:transform=file,recent=70", ) "int-4:axis=channel,transform=file"
    };
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 40;
    for (size_t s = 0; s < COUNT(specs); s++) {
        kvant_codec *codecs[2] = { create(specs[s], DIM, KVANT_ROLE_K, c),
                                   create(specs[s], DIM, KVANT_ROLE_V, c) };
        kvant_tensor *tensors[2];
        void *memory[2];
        static float rows[2][(N / 64 + 1) * 64 * DIM];
        int64_t slots[N];
        for (int64_t i = 0; i < N; i++)
            slots[i] = i;
        for (int role = 0; role < 2; role++) {
            const kvant_codec *one = codecs[role];
            const kvant_tensor_params params = { .size = sizeof params,
                                                 .codecs = &one,
                                                 .n_kv_heads = 1,
                                                 .n_sequences = 1,
                                                 .n_blocks = N / 64 + 1 };
            size_t size;
            for (uint32_t first = 0; first < N; first += TOKENS)
                fill_rows(rows[role] + (size_t)first * DIM, DIM, &rng);
            assert_int_equal(kvant_tensor_size(&params, &size), KVANT_OK);
            memory[role] = aligned(size);
            assert_int_equal(kvant_tensor_create(&params, memory[role], &tensors[role]), KVANT_OK);
            assert_ok(kvant_tensor_write(tensors[role], slots, N, rows[role], DIM, 1));
            assert_int_equal(kvant_tensor_read(tensors[role], 0, N, rows[role], DIM), KVANT_OK);
        }
        float q[DIM], out[DIM];
        fill_normal(q, DIM, &rng);
        const kvant_attention_problem problem = { .size = sizeof problem,
                                                  .q = q,
                                                  .q_token_stride = DIM,
                                                  .q_head_stride = DIM,
                                                  .n_queries = 1,
                                                  .n_heads = 1,
                                                  .n_tokens = N,
                                                  .scale = 0.05f,
                                                  .out = out,
                                                  .out_token_stride = DIM,
                                                  .out_head_stride = DIM,
                                                  .n_threads = 1 };
        size_t bytes;
        assert_ok(kvant_attention_workspace(tensors[0], tensors[1], &problem, &bytes));
        void *workspace = aligned(bytes);
        assert_ok(kvant_attention(tensors[0], tensors[1], &problem, workspace, bytes));
        double p[N], sum = 0, error = 0, size = 0;
        for (uint32_t t = 0; t < N; t++) {
            double score = 0;
            for (uint32_t j = 0; j < DIM; j++)
                score += (double)q[j] * rows[0][t * DIM + j];
            sum += p[t] = exp(0.05 * score);
        }
        for (uint32_t j = 0; j < DIM; j++) {
            double want = 0;
            for (uint32_t t = 0; t < N; t++)
                want += p[t] / sum * rows[1][t * DIM + j];
            error += (out[j] - want) * (out[j] - want);
            size += want * want;
        }
        /* Queries are rounded to 10 bits or more. Scores reach 0.05 |q| |k| = 0.05 x 6 x 60. So a
         * probability errs by at most 2 %, and a wrong transform errs by far more. Exact pages are
         * fp16. */
        assert_true(sqrt(error) <= 0.02 * sqrt(size));
        for (int role = 0; role < 2; role++) {
            kvant_tensor_free(&tensors[role]);
            kvant_codec_free(&codecs[role]);
            free(memory[role]);
        }
        free(workspace);
    }
    kvant_calibration_free(&c);
}

RUN_CASES(NULL, NULL)
