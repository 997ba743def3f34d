/* test_calibrated_codecs.c - kmeans against its formulas, and the properties that all calibrated
 * codecs share. */
#include "calibrated_fixture.h"

#include <kvant/tensor.h>

/* --- kmeans --- */

#if KVANT_PAPERS
static const float *centroids_of(const kvant_calibration *c, kvant_role role, uint32_t clusters)
{
    kvant_calibration_entry entry = entry_of(c, 1, role);
    return clusters == 1 ? entry.mean : entry.centroids[clusters == 4 ? 0 : 1];
}

static uint32_t nearest(const float *centroids, uint32_t clusters, const float *x)
{
    uint32_t best = 0;
    for (uint32_t k = 1; k < clusters; k++)
        if (squared_distance(x, centroids + k * DIM, DIM) <
            squared_distance(x, centroids + best * DIM, DIM))
            best = k;
    return best;
}

/* Equations 5 and 6: k^ = c_id + dequant(quant(k - c_id)), with the quantiser of int. */
CASE(kmeans_is_a_centroid_and_int_of_the_rest)
{
    static const struct {
        const char *spec, *rest;
        uint32_t clusters;
    } cases[] = {
        { "kmeans-4:c=1", "int-4", 1 },
        { "kmeans-4:c=4", "int-4", 4 },
        { "kmeans-4:c=257", "int-4", 257 },
        { "kmeans-3:c=4,group=8", "int-3:group=8", 4 },
        { "kmeans-4:c=257,block=8", "bdr-4:block=8", 257 },
        { "kmeans-4:c=4,block=32", "bdr-4", 4 },
    };
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 6;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *kmeans = create(cases[i].spec, DIM, (kvant_role)role, c);
            kvant_codec *plain = make_codec(cases[i].rest, DIM, (kvant_role)role);
            const float *centroids = centroids_of(c, (kvant_role)role, cases[i].clusters);
            bool rotated = strstr(cases[i].spec, "block") != NULL;
            float rows[TOKENS * DIM], rest[TOKENS * DIM], decoded[TOKENS * DIM],
                expected[TOKENS * DIM];
            uint32_t ids[TOKENS], different = 0;
            fill_rows(rows, DIM, &rng);
            for (uint32_t t = 0; t < TOKENS; t++) {
                ids[t] = nearest(centroids, cases[i].clusters, rows + t * DIM);
                different += ids[t] != ids[0];
                for (uint32_t j = 0; j < DIM; j++)
                    rest[t * DIM + j] = rows[t * DIM + j] - centroids[ids[t] * DIM + j];
            }
            assert_true(cases[i].clusters == 1 || different > 0);
            void *a = encode(kmeans, rows), *b = encode(plain, rest);
            decode(kmeans, a, decoded);
            decode(plain, b, expected);
            for (uint32_t t = 0; t < TOKENS; t++) {
                double largest = 0, error = 0;
                for (uint32_t j = 0; j < DIM; j++) {
                    largest = fmax(largest, fabsf(rest[t * DIM + j]));
                    float want = expected[t * DIM + j] + centroids[ids[t] * DIM + j];
                    if (!rotated)
                        assert_true(decoded[t * DIM + j] == want);
                    error = fmax(error, fabs((double)decoded[t * DIM + j] - want));
                }
                /* Rotating before or after subtracting moves y by rounding errors of numbers up to
                 * 40 sqrt(32). That can move a number to the next code. It adds one step of at most
                 * 2 sqrt(32) largest / 15, in one of the channels. */
                if (rotated)
                    assert_true(error <= 2 * sqrt(32) * largest / 15 + 1e-4);
            }
            free(a);
            free(b);
            kvant_codec_free(&kmeans);
            kvant_codec_free(&plain);
        }
    kvant_calibration_free(&c);
}

static double mean_error(const char *spec, const kvant_calibration *c)
{
    kvant_codec *codec = create(spec, DIM, KVANT_ROLE_K, c);
    uint64_t rng = 12;
    float rows[TOKENS * DIM], decoded[TOKENS * DIM];
    fill_rows(rows, DIM, &rng);
    void *page = encode(codec, rows);
    decode(codec, page, decoded);
    free(page);
    kvant_codec_free(&codec);
    return squared_distance(rows, decoded, COUNT(rows)) / COUNT(rows);
}

/* Rows of 5 centres share an outlier channel. The mean removes the outlier; centroids also remove
 * the centres. A step of the quantiser is (max - min) / 15 and its mean error is step^2 / 12. The
 * ranges are about 50 (plain), 14 (mean) and 6 (centroids). */
CASE(centroids_lower_the_error)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    double plain = mean_error("int-4", c), one = mean_error("kmeans-4:c=1", c),
           many = mean_error("kmeans-4:c=257", c);
    assert_true(one < plain / 4 && many < one / 2);
    kvant_calibration_free(&c);
}

/* A number has 4 bits, a token has 32 bits for scale and zero point, and a byte or two for the
 * index. Pages of 64 tokens are padded to multiples of 64 bytes, which needs no padding here. */
CASE(true_bits_count_the_index)
{
    static const struct {
        const char *spec;
        double bits;
    } rows[] = {
        { "kmeans-4:c=1", 4.5 },
        { "kmeans-4:c=4", 4.625 },
        { "kmeans-4:c=257", 4.75 },
        { "hessian-4", 4.5 },
    };
    kvant_calibration *c = calibrate_fixed(64);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec = create(rows[i].spec, 64, (kvant_role)role, c);
            kvant_codec_info info = info_of(codec);
            assert_true(info.true_bits == rows[i].bits && info.nominal_bits == 4);
            assert_true(8.0 * (double)info.page_bytes == info.true_bits * 64 * 64);
            kvant_codec_free(&codec);
        }
    kvant_calibration_free(&c);
}

CASE(rows_that_a_centroid_hits)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    kvant_codec *codec = create("kmeans-4:c=4", DIM, KVANT_ROLE_K, c);
    const float *centroids = centroids_of(c, KVANT_ROLE_K, 4);
    float rows[TOKENS * DIM], decoded[TOKENS * DIM];
    for (uint32_t t = 0; t < TOKENS; t++)
        memcpy(rows + t * DIM, centroids + t % 4 * DIM, DIM * sizeof *rows);
    void *page = encode(codec, rows);
    decode(codec, page, decoded);
    assert_memory_equal(rows, decoded, sizeof rows);
    free(page);
    kvant_codec_free(&codec);
    kvant_calibration_free(&c);
}
#endif

/* --- both --- */

static const uint32_t dims[] = { 8, 32, 64, 80 };

CASE(rows_come_back)
{
    uint64_t rng = 8;
    for (size_t d = 0; d < COUNT(dims); d++) {
        kvant_calibration *c = calibrate_fixed(dims[d]);
        for (size_t s = 0; s < N_CALIBRATED_SPECS; s++)
            for (int role = 0; role < 2; role++) {
                kvant_codec *codec = create(calibrated_specs[s], dims[d], (kvant_role)role, c);
                float rows[TOKENS * 80], decoded[TOKENS * 80];
                fill_rows(rows, dims[d], &rng);
                void *page = encode(codec, rows);
                decode(codec, page, decoded);
                double levels = pow(2, info_of(codec).bits) - 1;
                for (uint32_t t = 0; t < TOKENS; t++) {
                    /* Every rotated number errs by at most half a step, which is the range over the
                     * levels, and the range of a rotated row is at most 2 |row|. The row minus a
                     * centroid is smaller than the row and the centroid together. fp16 rounds the
                     * zero point by 2^-11 of itself. */
                    double size = 0, bound;
                    for (uint32_t j = 0; j < dims[d]; j++)
                        size += (double)rows[t * dims[d] + j] * rows[t * dims[d] + j];
                    bound = sqrt(size) * 2 * (1 / levels + pow(2, -11)) * sqrt(dims[d]);
                    double error =
                        sqrt(squared_distance(rows + t * dims[d], decoded + t * dims[d], dims[d]));
                    if (!(error <= bound))
                        fail_msg("%s at %u: error %g, at most %g", calibrated_specs[s], dims[d],
                                 error, bound);
                }
                free(page);
                kvant_codec_free(&codec);
            }
        kvant_calibration_free(&c);
    }
}

CASE(scores_agree_with_decode)
{
    uint64_t rng = 9;
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t s = 0; s < N_CALIBRATED_SPECS; s++) {
        kvant_codec *codec = create(calibrated_specs[s], DIM, KVANT_ROLE_K, c);
        float rows[TOKENS * DIM], decoded[TOKENS * DIM], q[DIM], y[DIM], scores[TOKENS];
        fill_rows(rows, DIM, &rng);
        fill_normal(q, DIM, &rng);
        void *page = aligned(info_of(codec).page_bytes);
        assert_int_equal(kvant_codec_encode(codec, NULL, rows, DIM, 0, 40, page), KVANT_OK);
        decode(codec, page, decoded);
        assert_int_equal(kvant_codec_transform_query(codec, NULL, q, y), KVANT_OK);
        assert_int_equal(kvant_codec_score(codec, page, y, DIM, 1, scores), KVANT_OK);
        for (uint32_t t = 0; t < TOKENS; t++) {
            double exact = 0, size = 0, length = 0;
            for (uint32_t j = 0; j < DIM; j++) {
                exact += (double)q[j] * decoded[t * DIM + j];
                size += (double)decoded[t * DIM + j] * decoded[t * DIM + j];
                length += (double)q[j] * q[j];
                assert_true(t < 40 || decoded[t * DIM + j] == 0);
            }
            /* three sums of 32 products, each with an error of at most 32 x 2^-24 of |q| |row|
             * sqrt(32) */
            assert_true(fabs(scores[t] - exact) <= 3 * 32 * pow(2, -24) * sqrt(32 * size * length));
        }
        free(page);
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&c);
}

CASE(tokens_are_independent)
{
    uint64_t rng = 10;
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t s = 0; s < N_CALIBRATED_SPECS; s++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec = create(calibrated_specs[s], DIM, (kvant_role)role, c);
            float rows[TOKENS * DIM];
            fill_rows(rows, DIM, &rng);
            void *whole = encode(codec, rows), *pieces = encode(codec, rows);
            /* encode other rows, then the first rows again, backwards */
            for (uint32_t t = 0; t < TOKENS; t++)
                assert_ok(
                    kvant_codec_encode(codec, NULL, rows + (63 - t) * DIM, DIM, t, 1, pieces));
            for (uint32_t t = TOKENS; t-- > 0;)
                assert_ok(kvant_codec_encode(codec, NULL, rows + t * DIM, DIM, t, 1, pieces));
            assert_memory_equal(whole, pieces, info_of(codec).page_bytes);
            free(whole);
            free(pieces);
            kvant_codec_free(&codec);
        }
    kvant_calibration_free(&c);
}

/* Rows of zeros, denormals and large numbers. */
CASE(extreme_rows)
{
    static const float sizes[] = { 0, 1e-45f, 1e-40f, 1e-8f, 1e3f, 6e4f };
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t s = 0; s < N_CALIBRATED_SPECS; s++) {
        kvant_codec *codec = create(calibrated_specs[s], DIM, KVANT_ROLE_K, c);
        float rows[TOKENS * DIM], decoded[TOKENS * DIM];
        for (size_t i = 0; i < COUNT(sizes); i++) {
            for (uint32_t j = 0; j < COUNT(rows); j++)
                rows[j] = j % 7 == 0 ? sizes[i] / sqrtf(DIM) : 0;
            void *page = encode(codec, rows);
            decode(codec, page, decoded);
            for (uint32_t j = 0; j < COUNT(rows); j++)
                assert_true(isfinite(decoded[j]));
            free(page);
        }
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&c);
}

CASE(bad_numbers_are_refused)
{
    static const float bad[] = { NAN, INFINITY, 3e38f };
    uint64_t rng = 11;
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t s = 0; s < N_CALIBRATED_SPECS; s++)
        for (size_t i = 0; i < COUNT(bad); i++) {
            kvant_codec *codec = create(calibrated_specs[s], DIM, KVANT_ROLE_V, c);
            size_t bytes = info_of(codec).page_bytes;
            float rows[TOKENS * DIM];
            fill_rows(rows, DIM, &rng);
            void *page = encode(codec, rows), *before = encode(codec, rows);
            rows[60 * DIM + 7] = bad[i];
            assert_int_equal(kvant_codec_encode(codec, NULL, rows, DIM, 0, TOKENS, page),
                             i == 2 ? KVANT_ERR_RANGE : KVANT_ERR_NONFINITE);
            assert_memory_equal(page, before, bytes);
            for (size_t j = 0; j < bytes; j++) /* damaged bytes decode to some numbers */
                ((uint8_t *)page)[j] = (uint8_t)test_random(&rng);
            decode(codec, page, rows);
            free(page);
            free(before);
            kvant_codec_free(&codec);
        }
    kvant_calibration_free(&c);
}

static void expect_error(const char *spec, uint32_t dim, const kvant_calibration *c, uint32_t layer,
                         uint32_t head, kvant_status expected, const char *words)
{
    kvant_codec *codec;
    char err[512] = "";
    kvant_status status = kvant_codec_create_calibrated(spec, dim, KVANT_ROLE_K, 0, c, layer, head,
                                                        &codec, err, sizeof err);
    if (status != expected || !strstr(err, words))
        fail_msg("%s: %s: \"%s\", expected %s with \"%s\"", spec, kvant_strerror(status), err,
                 kvant_strerror(expected), words);
    assert_null(codec);
}

CASE(errors_say_what_to_do)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    expect_error("int-4:center=file", DIM, NULL, 0, 0, KVANT_ERR_UNSUPPORTED,
                 "center=file needs a calibration");
    expect_error("int-4:norm=file", DIM, NULL, 0, 0, KVANT_ERR_UNSUPPORTED,
                 "norm=file needs a calibration");
    expect_error("int-4:norm=file", DIM, c, 2, 0, KVANT_ERR_ARGUMENT, "made for another model");
    expect_error("int-4:norm=file", 64, c, 0, 0, KVANT_ERR_ARGUMENT,
                 "2 layers, 2 kv heads, head_dim 32");
#if KVANT_PAPERS
    expect_error("kmeans-4", DIM, NULL, 0, 0, KVANT_ERR_UNSUPPORTED, "kvant calibrate");
    expect_error("hessian-4", DIM, NULL, 0, 0, KVANT_ERR_UNSUPPORTED, "kvant calibrate");
    expect_error("kmeans-4", DIM, c, 0, 0, KVANT_ERR_UNSUPPORTED,
                 "only c=1, 4, 257: make it again with kvant calibrate");
    expect_error("kmeans-4:c=4", DIM, c, 2, 0, KVANT_ERR_ARGUMENT, "made for another model");
    expect_error("kmeans-4:c=4", DIM, c, 0, 2, KVANT_ERR_ARGUMENT, "made for another model");
    expect_error("hessian-4", 64, c, 0, 0, KVANT_ERR_ARGUMENT, "2 layers, 2 kv heads, head_dim 32");
    expect_error("kmeans-4:c=0", DIM, c, 0, 0, KVANT_ERR_SPEC, "from 1 to 4096");
    expect_error("kmeans-4:c=4,center=first", DIM, c, 0, 0, KVANT_ERR_SPEC, "no option 'center'");
    expect_error("kmeans-4:c=4,axis=channel", DIM, c, 0, 0, KVANT_ERR_SPEC, "no option 'axis'");
    expect_error("hessian-4:order=last", DIM, c, 0, 0, KVANT_ERR_SPEC, "hadamard, eigen");
    expect_error("hessian-9", DIM, c, 0, 0, KVANT_ERR_SPEC, "2 to 8 bits");
#endif
    kvant_calibration_free(&c);
}

static kvant_tensor *tensor_of(const kvant_codec *const *codecs, uint32_t n, void **memory)
{
    const kvant_tensor_params params = {
        .size = sizeof params, .codecs = codecs, .n_kv_heads = n, .n_sequences = 1, .n_blocks = 1
    };
    kvant_tensor *tensor;
    size_t bytes;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    *memory = aligned(bytes);
    assert_int_equal(kvant_tensor_create(&params, *memory, &tensor), KVANT_OK);
    return tensor;
}

static kvant_affine affine_of(const kvant_tensor *tensor, uint32_t head)
{
    kvant_block_info info = { .size = sizeof info };
    assert_int_equal(kvant_tensor_get_block(tensor, 0, head, &info), KVANT_OK);
    return info.affine;
}

/* A tensor with such codecs starts with the file's mean as centre and with scales from the file.
 * The scales are square roots of the largest distances from the mean (from 0 without a centre). No
 * scale is below 1/256 of the largest. */
CASE(centre_and_factors_come_from_the_file)
{
    static const struct {
        const char *spec;
        bool center, norm;
    } cases[] = { { "turboquant-4:center=file", true, false },
                  { "int-4:norm=file", false, true },
                  { "trellis-4:center=file,norm=file", true, true } };
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codecs[2];
            for (uint32_t head = 0; head < 2; head++) {
                char err[256] = "";
                if (kvant_codec_create_calibrated(cases[i].spec, DIM, (kvant_role)role, 0, c, 1,
                                                  head, &codecs[head], err, sizeof err) != KVANT_OK)
                    fail_msg("%s: %s", cases[i].spec, err);
            }
            const kvant_codec *array[2] = { codecs[0], codecs[1] };
            void *memory;
            kvant_tensor *tensor = tensor_of(array, 2, &memory);
            for (uint32_t head = 0; head < 2; head++) {
                kvant_affine affine = affine_of(tensor, head);
                assert_true((affine.center != NULL) == cases[i].center &&
                            (affine.scale != NULL) == cases[i].norm);
                kvant_calibration_entry e = entry_of(c, head, (kvant_role)role);
                float largest = 0;
                for (uint32_t pass = 0; pass < 2; pass++)
                    for (uint32_t j = 0; j < DIM; j++) {
                        float mean = cases[i].center ? e.mean[j] : 0;
                        float scale = sqrtf(fmaxf(fabsf(e.max[j] - mean), fabsf(e.min[j] - mean)));
                        largest = fmaxf(largest, scale);
                        if (pass && cases[i].center)
                            assert_true(affine.center[j] == e.mean[j]);
                        if (pass && cases[i].norm)
                            assert_true(affine.scale[j] == fmaxf(scale, largest / 256));
                    }
            }
            kvant_tensor_free(&tensor);
            free(memory);
            for (uint32_t head = 0; head < 2; head++)
                kvant_codec_free(&codecs[head]);
        }
    kvant_calibration_free(&c);
}

/* Head 0 has one channel of size 100 and otherwise zeros; head 1 has only zeros. */
CASE(factors_are_never_zero)
{
    kvant_calibrator_config config = { .size = sizeof config };
    kvant_calibrator *calibrator;
    kvant_calibration *c;
    float row[16] = { 100 };
    uint32_t left;
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    assert_ok(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 2, 8, row, 16, 1));
    assert_int_equal(kvant_calibrator_cluster(calibrator, &left), KVANT_OK);
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_OK);
    for (uint32_t head = 0; head < 2; head++) {
        kvant_codec *codec;
        assert_ok(kvant_codec_create_calibrated("int-4:norm=file", 8, KVANT_ROLE_K, 0, c, 0, head,
                                                &codec, NULL, 0));
        const kvant_codec *array[1] = { codec };
        void *memory;
        kvant_tensor *tensor = tensor_of(array, 1, &memory);
        const float *scale = affine_of(tensor, 0).scale;
        assert_true(scale[0] == (head == 0 ? 10.0f : 1.0f));
        assert_true(scale[7] == (head == 0 ? 10.0f / 256 : 1.0f));
        kvant_tensor_free(&tensor);
        free(memory);
        kvant_codec_free(&codec);
    }
    kvant_calibrator_free(&calibrator);
    kvant_calibration_free(&c);
}

CASE(codecs_outlive_their_calibration)
{
    uint64_t rng = 13;
    for (size_t s = 0; s < N_CALIBRATED_SPECS; s++) {
        kvant_calibration *c = calibrate_fixed(DIM);
        kvant_codec *before = create(calibrated_specs[s], DIM, KVANT_ROLE_K, c);
        float rows[TOKENS * DIM];
        fill_rows(rows, DIM, &rng);
        void *a = encode(before, rows);
        kvant_calibration_free(&c);
        void *b = encode(before, rows);
        assert_memory_equal(a, b, info_of(before).page_bytes);
        free(a);
        free(b);
        kvant_codec_free(&before);
    }
}

RUN_CASES(NULL, NULL)
