/* test_calibration.c - statistics against their definitions, and input that calibrators refuse. */
#include "calibration_fixture.h"

#include "../../src/base/half.h"

CASE(statistics_follow_their_definitions)
{
    data *all = make_data();
    kvant_calibrator *calibrator = make_calibrator(NULL, 0, 1);
    add_all(calibrator, all);
    kvant_calibration *c = finish(calibrator);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t role = 0; role < 2; role++)
            for (uint32_t h = 0; h < HEADS; h++) {
                kvant_calibration_entry e = entry_of(c, l, h, (kvant_role)role);
                assert_int_equal(e.head_dim, DIM);
                assert_true((e.query_moment != NULL) == (role == KVANT_ROLE_K));
                for (uint32_t j = 0; j < DIM; j++) {
                    double sum = 0;
                    float min = INFINITY, max = -INFINITY;
                    for (uint32_t i = 0; i < ROWS; i++) {
                        float x = all->rows[l][role][(i * HEADS + h) * DIM + j];
                        sum += x;
                        min = fminf(min, x);
                        max = fmaxf(max, x);
                    }
                    assert_true(e.min[j] == min && e.max[j] == max &&
                                e.mean[j] == (float)(sum / ROWS));
                }
            }
    kvant_calibration_free(&c);
    free(all);
}

CASE(query_moments_follow_their_definition)
{
    data *all = make_data();
    kvant_calibration *c = make_calibration(0, 1);
    for (uint32_t h = 0; h < HEADS; h++) {
        const float *moment = entry_of(c, 1, h, KVANT_ROLE_K).query_moment;
        for (uint32_t i = 0; i < DIM; i++)
            for (uint32_t j = 0; j < DIM; j++) {
                double sum = 0;
                for (uint32_t g = 0; g < 2; g++)
                    for (uint32_t t = 0; t < ROWS; t++)
                        sum += (double)all->queries[1][2 * h + g][t * DIM + i] *
                               all->queries[1][2 * h + g][t * DIM + j];
                /* 400 products in another order, then a rounding to binary32 */
                assert_true(fabs(moment[i * DIM + j] - sum / (2 * ROWS)) <=
                            6e-8 * (fabs(sum / (2 * ROWS)) + 1e-6));
                assert_true(moment[i * DIM + j] == moment[j * DIM + i]);
            }
    }
    kvant_calibration_free(&c);
    free(all);
}

CASE(info_says_what_was_seen)
{
    kvant_calibration *c = make_calibration(2, 1);
    kvant_calibration_info info = { .size = sizeof info };
    assert_int_equal(kvant_calibration_get_info(c, &info), KVANT_OK);
    assert_string_equal(info.model, "a model");
    assert_true(info.model_fingerprint == 0x0123456789abcdefu && info.seed == 5 &&
                info.n_tokens == ROWS);
    assert_true(info.n_layers == LAYERS && info.n_kv_heads == HEADS && info.head_dim == DIM);
    assert_true(info.n_codebooks == 2 && info.clusters[0] == 4 && info.clusters[1] == 16);
    kvant_calibration_entry entry = { .size = sizeof entry };
    assert_int_equal(kvant_calibration_get_entry(c, LAYERS, 0, KVANT_ROLE_K, &entry),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibration_get_entry(c, 0, HEADS, KVANT_ROLE_K, &entry),
                     KVANT_ERR_ARGUMENT);
    entry.size = 1;
    assert_int_equal(kvant_calibration_get_entry(c, 0, 0, KVANT_ROLE_K, &entry),
                     KVANT_ERR_ARGUMENT);
    info.size = 1;
    assert_int_equal(kvant_calibration_get_info(c, &info), KVANT_ERR_ARGUMENT);
    kvant_calibration_free(&c);
    assert_null(c);
    kvant_calibration_free(&c);
}

/* Rows lie around 5 centres that are far apart, with deviation 0.2 per channel. With 16 clusters at
 * most the variance around a centre is left, 32 x 0.04. With 4 clusters more is left. */
CASE(clusters_are_found)
{
    data *all = make_data();
    kvant_calibration *c = make_calibration(2, 2);
    double error[2] = { 0 };
    for (uint32_t set = 0; set < 2; set++) {
        const float *centroids = entry_of(c, 2, 1, KVANT_ROLE_V).centroids[set];
        for (uint32_t i = 0; i < ROWS; i++) {
            double best = INFINITY;
            for (uint32_t k = 0; k < few_clusters[set]; k++)
                best = fmin(best, squared_distance(&all->rows[2][1][(i * HEADS + 1) * DIM],
                                                   centroids + k * DIM, DIM));
            error[set] += best / ROWS;
        }
    }
    assert_true(error[1] <= DIM * 0.04);
    assert_true(error[0] >= 2 * DIM * 0.04);
    kvant_calibration_free(&c);
    free(all);
}

CASE(threads_do_not_change_the_result)
{
    kvant_calibration *a = make_calibration(2, 1), *b = make_calibration(2, 3);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t h = 0; h < HEADS; h++)
            assert_memory_equal(entry_of(a, l, h, KVANT_ROLE_K).centroids[1],
                                entry_of(b, l, h, KVANT_ROLE_K).centroids[1],
                                16 * DIM * sizeof(float));
    kvant_calibration_free(&a);
    kvant_calibration_free(&b);
}

/* Sums in the order of columns. add_rows uses another order, so the sums differ in their last
 * bits. */
typedef struct sums {
    double sum[HEADS * DIM], spread[HEADS * DIM * DIM], moment[HEADS * DIM * DIM];
    float min[HEADS * DIM], max[HEADS * DIM];
} sums;

static void outer(double *out, const float *rows, size_t stride, size_t n)
{
    for (uint32_t i = 0; i < DIM; i++)
        for (uint32_t j = 0; j < DIM; j++)
            for (size_t r = n; r-- > 0;)
                out[i * DIM + j] += (double)rows[r * stride + i] * rows[r * stride + j];
}

static void sum_up(const data *all, uint32_t layer, uint32_t role, size_t first, size_t n,
                   sums *out)
{
    const size_t row = HEADS * DIM;
    const float *rows = all->rows[layer][role] + first * row;
    memset(out, 0, sizeof *out);
    for (size_t j = 0; j < row; j++) {
        out->min[j] = INFINITY, out->max[j] = -INFINITY;
        for (size_t r = n; r-- > 0;) {
            const float x = rows[r * row + j];
            out->sum[j] += x;
            out->min[j] = fminf(out->min[j], x), out->max[j] = fmaxf(out->max[j], x);
        }
    }
    for (uint32_t h = 0; h < HEADS; h++)
        outer(out->spread + h * DIM * DIM, rows + h * DIM, row, n);
    for (uint32_t h = 0; h < QUERY_HEADS; h++)
        outer(out->moment + h / (QUERY_HEADS / HEADS) * DIM * DIM,
              all->queries[layer][h] + first * DIM, DIM, n);
}

static kvant_calibrator_moments args_of(const data *all, uint32_t layer, uint32_t role,
                                        size_t first, size_t n, const sums *from)
{
    const bool keys = role == KVANT_ROLE_K;
    return (kvant_calibrator_moments){ .size = sizeof(kvant_calibrator_moments),
                                       .n_kv_heads = HEADS,
                                       .head_dim = DIM,
                                       .n_rows = n,
                                       .sum = from->sum,
                                       .min = from->min,
                                       .max = from->max,
                                       .rows = all->rows[layer][role] + first * HEADS * DIM,
                                       .stride = HEADS * DIM,
                                       .spread = keys ? from->spread : NULL,
                                       .moment = keys ? from->moment : NULL,
                                       .n_queries = keys ? n * QUERY_HEADS / HEADS : 0 };
}

static kvant_calibration *calibration_of_sums(const data *all)
{
    static sums made;
    kvant_calibrator *calibrator = make_calibrator(few_clusters, 2, 1);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t role = 0; role < 2; role++)
            for (size_t first = 0; first < ROWS; first += 50) {
                sum_up(all, l, role, first, 50, &made);
                const kvant_calibrator_moments args = args_of(all, l, role, first, 50, &made);
                assert_ok(kvant_calibrator_add_moments(calibrator, l, (kvant_role)role, &args));
            }
    return finish(calibrator);
}

/* One step of binary32: the most that sums which differ by 2^-40 of themselves can change. */
static bool near(float a, float b)
{
    return fabsf(a - b) <= fabsf(a) * 0x1p-23f + 0x1p-30f;
}

CASE(sums_give_what_rows_give)
{
    data *all = make_data();
    kvant_calibration *rows = make_calibration(2, 1), *found = calibration_of_sums(all);
    for (uint32_t i = 0; i < LAYERS * 2 * HEADS; i++) {
        const kvant_role role = (kvant_role)(i % 2);
        const kvant_calibration_entry a = entry_of(rows, i / 4, i / 2 % 2, role),
                                      b = entry_of(found, i / 4, i / 2 % 2, role);
        assert_memory_equal(a.min, b.min, DIM * sizeof(float));
        assert_memory_equal(a.max, b.max, DIM * sizeof(float));
        for (uint32_t set = 0; set < 2; set++) /* sets of the same sample */
            assert_memory_equal(a.centroids[set], b.centroids[set],
                                few_clusters[set] * DIM * sizeof(float));
        for (uint32_t j = 0; j < DIM; j++)
            assert_true(near(a.mean[j], b.mean[j]));
        for (uint32_t j = 0; role == KVANT_ROLE_K && j < DIM * DIM; j++)
            assert_true(near(a.query_moment[j], b.query_moment[j]));
        /* One step of binary16. Inverses amplify differences of moments by at most 1 / FLOOR of
         * moments.c, 2^12. */
        for (uint32_t j = 0; role == KVANT_ROLE_K && j < DIM * (DIM + 1) / 2; j++) {
            const float x = kvant_half_to_float(a.matrix[j]);
            assert_true(fabsf(x - kvant_half_to_float(b.matrix[j])) <=
                        fabsf(x) * 0x1p-10f + 0x1p-24f);
        }
    }
    kvant_calibration_free(&rows);
    kvant_calibration_free(&found);
    free(all);
}

CASE(bad_sums_are_refused)
{
    static sums made;
    data *all = make_data();
    kvant_calibrator *calibrator = make_calibrator(few_clusters, 2, 1);
    kvant_calibration *c;
    sum_up(all, 0, 0, 0, ROWS, &made);
    const kvant_calibrator_moments good = args_of(all, 0, 0, 0, ROWS, &made);
    kvant_calibrator_moments bad[9];
    for (size_t i = 0; i < COUNT(bad); i++)
        bad[i] = good;
    bad[0].size--, bad[1].n_rows = 0, bad[2].sum = NULL, bad[3].spread = NULL, bad[4].rows = NULL,
                   bad[5].n_queries = 0;
    bad[6].attended = made.spread, bad[7].head_dim = 513, bad[8].stride = HEADS * DIM - 1;
    for (size_t i = 0; i < COUNT(bad); i++)
        assert_int_equal(kvant_calibrator_add_moments(calibrator, 0, KVANT_ROLE_K, &bad[i]),
                         KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_moments(calibrator, 0, KVANT_ROLE_V, &good),
                     KVANT_ERR_ARGUMENT);
    made.spread[7 * DIM + 2] = NAN;
    assert_int_equal(kvant_calibrator_add_moments(calibrator, 0, KVANT_ROLE_K, &good),
                     KVANT_ERR_NONFINITE);
    assert_int_equal(kvant_calibrator_finish(calibrator, &c),
                     KVANT_ERR_ARGUMENT); /* nothing was added */
    kvant_calibrator_free(&calibrator);
    free(all);
}

/* A sample that is smaller than the text still holds as many different rows as it has room for. */
CASE(long_texts_are_sampled)
{
    kvant_calibrator_config config = {
        .size = sizeof config, .clusters = few_clusters, .n_codebooks = 2, .sample_rows = 16
    };
    kvant_calibrator *calibrator;
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    for (uint32_t i = 0; i < 1000; i++) {
        float x = (float)i;
        assert_ok(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_V, 1, 1, &x, 1, 1));
    }
    kvant_calibration *c = finish(calibrator);
    const float *centroids = entry_of(c, 0, 0, KVANT_ROLE_V).centroids[1];
    double sum = 0;
    for (uint32_t i = 0; i < 16; i++) {
        sum += centroids[i] / 16;
        for (uint32_t j = 0; j < i; j++)
            assert_true(centroids[i] != centroids[j]);
    }
    /* With 16 clusters of 16 rows, each cluster is a row. Rows are uniform on 0 to 999. So their
     * mean is 499.5. Its error is at most 3 x 288.7 / 4. */
    assert_true(fabs(sum - 499.5) <= 3 * 288.7 / 4);
    kvant_calibration_free(&c);
}

CASE(bad_input_is_refused)
{
    static const uint32_t unordered[] = { 16, 4 }, too_many[] = { 5000 };
    kvant_calibrator *calibrator;
    char err[256];
    kvant_calibrator_config config = { .size = sizeof config,
                                       .clusters = unordered,
                                       .n_codebooks = 2 };
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, err, sizeof err),
                     KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(err, "increasing"));
    config =
        (kvant_calibrator_config){ .size = sizeof config, .clusters = too_many, .n_codebooks = 1 };
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, err, sizeof err),
                     KVANT_ERR_ARGUMENT);
    config = (kvant_calibrator_config){
        .size = sizeof config, .clusters = few_clusters, .n_codebooks = 2, .sample_rows = 15
    };
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, err, sizeof err),
                     KVANT_ERR_ARGUMENT);
    calibrator = make_calibrator(few_clusters, 2, 1);
    kvant_calibration *c;
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_ERR_ARGUMENT);
    float x[2 * DIM] = { 0 };
    assert_int_equal(kvant_calibrator_add_queries(calibrator, 0, 0, DIM, x, DIM, 1),
                     KVANT_ERR_ARGUMENT);
    assert_ok(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, DIM, x, DIM, 2));
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 2, DIM, x, DIM, 1),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, 513, x, DIM, 1),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(
        kvant_calibrator_add_rows(calibrator, UINT32_MAX, KVANT_ROLE_K, 1, DIM, x, DIM, 1),
        KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_queries(calibrator, 0, 1, DIM, x, DIM, 1),
                     KVANT_ERR_ARGUMENT);
    x[DIM + 3] = NAN;
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, DIM, x, DIM, 2),
                     KVANT_ERR_NONFINITE);
    uint32_t left = 7;
    assert_int_equal(kvant_calibrator_cluster(calibrator, &left),
                     KVANT_ERR_ARGUMENT); /* 2 rows, 16 clusters */
    assert_int_equal(left, 7);            /* an error changes nothing */
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_ERR_ARGUMENT);
    assert_null(c);
    kvant_calibrator_free(&calibrator);
    kvant_calibrator_free(&calibrator);
}

RUN_CASES(NULL, NULL)
