/* test_calibration.c - statistics against their definitions, the file format against damage, and the codecs that live on it. */
#include "testing.h"

#include <kvant/calibration.h>

#include "../../src/base/half.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define LAYERS 3u
#define HEADS 2u
#define DIM 32u
#define ROWS 200u
#define QUERY_HEADS 4u

static const uint32_t few_clusters[] = { 4, 16 };

/* Rows around a few centres, some far from zero, as keys are. */
static void fill_rows(float *rows, size_t n, uint64_t *rng)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t kind = test_random(rng) % 5;
        for (uint32_t j = 0; j < HEADS * DIM; j++)
            rows[i * HEADS * DIM + j] = test_normal(rng) * 0.2f + (float)((kind * 7 + j) % 11) - (j == 3 ? 40 : 0);
    }
}

static kvant_calibrator *make_calibrator(const uint32_t *clusters, uint32_t n, uint32_t n_threads)
{
    kvant_calibrator_config config = { .size = sizeof config,
                                       .model = "a model",
                                       .model_fingerprint = 0x0123456789abcdefu,
                                       .seed = 5,
                                       .clusters = clusters,
                                       .n_codebooks = n,
                                       .n_threads = n_threads };
    kvant_calibrator *calibrator;
    char err[256] = "";
    if (kvant_calibrator_create(&config, &calibrator, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    return calibrator;
}

typedef struct data {
    float rows[LAYERS][2][ROWS * HEADS * DIM];
    float queries[LAYERS][QUERY_HEADS][ROWS * DIM];
} data;

static data *make_data(void)
{
    data *all = malloc(sizeof *all);
    uint64_t rng = 3;
    assert_non_null(all);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t role = 0; role < 2; role++)
            fill_rows(all->rows[l][role], ROWS, &rng);
        for (uint32_t h = 0; h < QUERY_HEADS; h++)
            fill_normal(all->queries[l][h], COUNT(all->queries[l][h]), &rng);
    }
    return all;
}

/* In two calls, as from two batches. */
static void add_all(kvant_calibrator *calibrator, const data *all)
{
    const size_t row = HEADS * DIM, cut = 77;
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t role = 0; role < 2; role++) {
            const float *rows = all->rows[l][role];
            assert_int_equal(kvant_calibrator_add_rows(calibrator, l, (kvant_role)role, HEADS, DIM, rows, row, cut),
                             KVANT_OK);
            assert_int_equal(kvant_calibrator_add_rows(calibrator, l, (kvant_role)role, HEADS, DIM,
                                                       rows + cut * row, row, ROWS - cut),
                             KVANT_OK);
        }
        for (uint32_t h = 0; h < QUERY_HEADS; h++)
            assert_int_equal(kvant_calibrator_add_queries(calibrator, l, h / (QUERY_HEADS / HEADS), DIM,
                                                          all->queries[l][h], DIM, ROWS),
                             KVANT_OK);
    }
}

static kvant_calibration *finish(kvant_calibrator *calibrator)
{
    uint32_t left = 1, steps = 0;
    kvant_calibration *calibration;
    for (; left; steps++)
        assert_int_equal(kvant_calibrator_cluster(calibrator, &left), KVANT_OK);
    assert_true(steps <= LAYERS);
    assert_int_equal(kvant_calibrator_finish(calibrator, &calibration), KVANT_OK);
    kvant_calibrator_free(&calibrator);
    assert_null(calibrator);
    return calibration;
}

static kvant_calibration *make_calibration(uint32_t n_codebooks, uint32_t n_threads)
{
    data *all = make_data();
    kvant_calibrator *calibrator = make_calibrator(few_clusters, n_codebooks, n_threads);
    add_all(calibrator, all);
    free(all);
    return finish(calibrator);
}

static kvant_calibration_entry entry_of(const kvant_calibration *c, uint32_t layer, uint32_t head, kvant_role role)
{
    kvant_calibration_entry entry = { .size = sizeof entry };
    assert_int_equal(kvant_calibration_get_entry(c, layer, head, role, &entry), KVANT_OK);
    return entry;
}

static void statistics_follow_their_definitions(void **state)
{
    (void)state;
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
                    assert_true(e.min[j] == min && e.max[j] == max && e.mean[j] == (float)(sum / ROWS));
                }
            }
    kvant_calibration_free(&c);
    free(all);
}

static void query_moments_follow_their_definition(void **state)
{
    (void)state;
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
                /* 400 products in another order, then binary32 */
                assert_true(fabs(moment[i * DIM + j] - sum / (2 * ROWS)) <= 6e-8 * (fabs(sum / (2 * ROWS)) + 1e-6));
                assert_true(moment[i * DIM + j] == moment[j * DIM + i]);
            }
    }
    kvant_calibration_free(&c);
    free(all);
}

static void info_says_what_was_seen(void **state)
{
    (void)state;
    kvant_calibration *c = make_calibration(2, 1);
    kvant_calibration_info info = { .size = sizeof info };
    assert_int_equal(kvant_calibration_get_info(c, &info), KVANT_OK);
    assert_string_equal(info.model, "a model");
    assert_true(info.model_fingerprint == 0x0123456789abcdefu && info.seed == 5 && info.n_tokens == ROWS);
    assert_true(info.n_layers == LAYERS && info.n_kv_heads == HEADS && info.head_dim == DIM);
    assert_true(info.n_codebooks == 2 && info.clusters[0] == 4 && info.clusters[1] == 16);
    kvant_calibration_entry entry = { .size = sizeof entry };
    assert_int_equal(kvant_calibration_get_entry(c, LAYERS, 0, KVANT_ROLE_K, &entry), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibration_get_entry(c, 0, HEADS, KVANT_ROLE_K, &entry), KVANT_ERR_ARGUMENT);
    entry.size = 1;
    assert_int_equal(kvant_calibration_get_entry(c, 0, 0, KVANT_ROLE_K, &entry), KVANT_ERR_ARGUMENT);
    info.size = 1;
    assert_int_equal(kvant_calibration_get_info(c, &info), KVANT_ERR_ARGUMENT);
    kvant_calibration_free(&c);
    assert_null(c);
    kvant_calibration_free(&c);
}

/* Rows lie at 5 centres with deviation 0.2 a channel and distances of many: 16 clusters leave at most the within-centre
 * variance of 32 x 0.04, while 4 cannot reach it. */
static void clusters_are_found(void **state)
{
    (void)state;
    data *all = make_data();
    kvant_calibration *c = make_calibration(2, 2);
    double error[2] = { 0 };
    for (uint32_t set = 0; set < 2; set++) {
        const float *centroids = entry_of(c, 2, 1, KVANT_ROLE_V).centroids[set];
        for (uint32_t i = 0; i < ROWS; i++) {
            double best = INFINITY;
            for (uint32_t k = 0; k < few_clusters[set]; k++)
                best =
                    fmin(best, squared_distance(&all->rows[2][1][(i * HEADS + 1) * DIM], centroids + k * DIM, DIM));
            error[set] += best / ROWS;
        }
    }
    assert_true(error[1] <= DIM * 0.04);
    assert_true(error[0] >= 2 * DIM * 0.04);
    kvant_calibration_free(&c);
    free(all);
}

static void threads_do_not_change_the_result(void **state)
{
    (void)state;
    kvant_calibration *a = make_calibration(2, 1), *b = make_calibration(2, 3);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t h = 0; h < HEADS; h++)
            assert_memory_equal(entry_of(a, l, h, KVANT_ROLE_K).centroids[1],
                                entry_of(b, l, h, KVANT_ROLE_K).centroids[1], 16 * DIM * sizeof(float));
    kvant_calibration_free(&a);
    kvant_calibration_free(&b);
}

/* A sample smaller than the text still holds as many different rows as it has places. */
/* --- sums --- */

/* In the order of columns, which add_rows has not: they differ in their last bits. */
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

static void sum_up(const data *all, uint32_t layer, uint32_t role, size_t first, size_t n, sums *out)
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
        outer(out->moment + h / (QUERY_HEADS / HEADS) * DIM * DIM, all->queries[layer][h] + first * DIM, DIM, n);
}

static kvant_calibrator_sums args_of(const data *all, uint32_t layer, uint32_t role, size_t first, size_t n, const sums *from)
{
    const bool keys = role == KVANT_ROLE_K;
    return (kvant_calibrator_sums){ .size = sizeof(kvant_calibrator_sums),
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
                const kvant_calibrator_sums args = args_of(all, l, role, first, 50, &made);
                assert_int_equal(kvant_calibrator_add_sums(calibrator, l, (kvant_role)role, &args), KVANT_OK);
            }
    return finish(calibrator);
}

/* One step of binary32: what sums that differ by 2^-40 of themselves can change. */
static bool near(float a, float b)
{
    return fabsf(a - b) <= fabsf(a) * 0x1p-23f + 0x1p-30f;
}

static void sums_give_what_rows_give(void **state)
{
    (void)state;
    data *all = make_data();
    kvant_calibration *rows = make_calibration(2, 1), *found = calibration_of_sums(all);
    for (uint32_t i = 0; i < LAYERS * 2 * HEADS; i++) {
        const kvant_role role = (kvant_role)(i % 2);
        const kvant_calibration_entry a = entry_of(rows, i / 4, i / 2 % 2, role), b = entry_of(found, i / 4, i / 2 % 2, role);
        assert_memory_equal(a.min, b.min, DIM * sizeof(float));
        assert_memory_equal(a.max, b.max, DIM * sizeof(float));
        for (uint32_t set = 0; set < 2; set++) /* of the same sample */
            assert_memory_equal(a.centroids[set], b.centroids[set], few_clusters[set] * DIM * sizeof(float));
        for (uint32_t j = 0; j < DIM; j++)
            assert_true(near(a.mean[j], b.mean[j]));
        for (uint32_t j = 0; role == KVANT_ROLE_K && j < DIM * DIM; j++)
            assert_true(near(a.query_moment[j], b.query_moment[j]));
        /* One step of binary16: inverses make differences at most 1 / FLOOR of moments.c, 2^12, as large. */
        for (uint32_t j = 0; role == KVANT_ROLE_K && j < DIM * (DIM + 1) / 2; j++) {
            const float x = kvant_half_to_float(a.matrix[j]);
            assert_true(fabsf(x - kvant_half_to_float(b.matrix[j])) <= fabsf(x) * 0x1p-10f + 0x1p-24f);
        }
    }
    kvant_calibration_free(&rows);
    kvant_calibration_free(&found);
    free(all);
}

static void bad_sums_are_refused(void **state)
{
    (void)state;
    static sums made;
    data *all = make_data();
    kvant_calibrator *calibrator = make_calibrator(few_clusters, 2, 1);
    kvant_calibration *c;
    sum_up(all, 0, 0, 0, ROWS, &made);
    const kvant_calibrator_sums good = args_of(all, 0, 0, 0, ROWS, &made);
    kvant_calibrator_sums bad[9];
    for (size_t i = 0; i < COUNT(bad); i++)
        bad[i] = good;
    bad[0].size--, bad[1].n_rows = 0, bad[2].sum = NULL, bad[3].spread = NULL, bad[4].rows = NULL, bad[5].n_queries = 0;
    bad[6].attended = made.spread, bad[7].head_dim = 513, bad[8].stride = HEADS * DIM - 1;
    for (size_t i = 0; i < COUNT(bad); i++)
        assert_int_equal(kvant_calibrator_add_sums(calibrator, 0, KVANT_ROLE_K, &bad[i]), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_sums(calibrator, 0, KVANT_ROLE_V, &good), KVANT_ERR_ARGUMENT);
    made.spread[7 * DIM + 2] = NAN;
    assert_int_equal(kvant_calibrator_add_sums(calibrator, 0, KVANT_ROLE_K, &good), KVANT_ERR_NONFINITE);
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_ERR_ARGUMENT); /* nothing was added */
    kvant_calibrator_free(&calibrator);
    free(all);
}

static void long_texts_are_sampled(void **state)
{
    (void)state;
    kvant_calibrator_config config = {
        .size = sizeof config, .clusters = few_clusters, .n_codebooks = 2, .sample_rows = 16
    };
    kvant_calibrator *calibrator;
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    for (uint32_t i = 0; i < 1000; i++) {
        float x = (float)i;
        assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_V, 1, 1, &x, 1, 1), KVANT_OK);
    }
    kvant_calibration *c = finish(calibrator);
    const float *centroids = entry_of(c, 0, 0, KVANT_ROLE_V).centroids[1];
    double sum = 0;
    for (uint32_t i = 0; i < 16; i++) {
        sum += centroids[i] / 16;
        for (uint32_t j = 0; j < i; j++)
            assert_true(centroids[i] != centroids[j]);
    }
    /* 16 clusters of 16 rows are the rows: uniform on 0 .. 999, so the mean is 499.5 +- 3 x 288.7 / 4 */
    assert_true(fabs(sum - 499.5) <= 3 * 288.7 / 4);
    kvant_calibration_free(&c);
}

static void bad_input_is_refused(void **state)
{
    static const uint32_t unordered[] = { 16, 4 }, too_many[] = { 5000 };
    (void)state;
    kvant_calibrator *calibrator;
    char err[256];
    kvant_calibrator_config config = { .size = sizeof config, .clusters = unordered, .n_codebooks = 2 };
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, err, sizeof err), KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(err, "increasing"));
    config = (kvant_calibrator_config){ .size = sizeof config, .clusters = too_many, .n_codebooks = 1 };
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, err, sizeof err), KVANT_ERR_ARGUMENT);
    config = (kvant_calibrator_config){
        .size = sizeof config, .clusters = few_clusters, .n_codebooks = 2, .sample_rows = 15
    };
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, err, sizeof err), KVANT_ERR_ARGUMENT);
    calibrator = make_calibrator(few_clusters, 2, 1);
    kvant_calibration *c;
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_ERR_ARGUMENT);
    float x[2 * DIM] = { 0 };
    assert_int_equal(kvant_calibrator_add_queries(calibrator, 0, 0, DIM, x, DIM, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, DIM, x, DIM, 2), KVANT_OK);
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 2, DIM, x, DIM, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, 513, x, DIM, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_rows(calibrator, UINT32_MAX, KVANT_ROLE_K, 1, DIM, x, DIM, 1),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_calibrator_add_queries(calibrator, 0, 1, DIM, x, DIM, 1), KVANT_ERR_ARGUMENT);
    x[DIM + 3] = NAN;
    assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, DIM, x, DIM, 2),
                     KVANT_ERR_NONFINITE);
    uint32_t left;
    assert_int_equal(kvant_calibrator_cluster(calibrator, &left), KVANT_ERR_ARGUMENT); /* 2 rows, 16 clusters */
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_ERR_ARGUMENT);
    assert_null(c);
    kvant_calibrator_free(&calibrator);
    kvant_calibrator_free(&calibrator);
}

/* --- files --- */

typedef struct file {
    char folder[64], path[96];
    uint8_t *bytes;
    size_t n;
} file;

static file make_file(void)
{
    file f = { .folder = "/tmp/kvant-test-XXXXXX" };
    assert_non_null(mkdtemp(f.folder));
    snprintf(f.path, sizeof f.path, "%s/model.kvcal", f.folder);
    kvant_calibration *c = make_calibration(2, 1);
    char err[256] = "";
    if (kvant_calibration_save(c, f.path, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    kvant_calibration_info info = { .size = sizeof info };
    assert_int_equal(kvant_calibration_get_info(c, &info), KVANT_OK);
    kvant_calibration_free(&c);
    f.bytes = malloc(info.bytes + 16);
    FILE *in = fopen(f.path, "rb");
    assert_non_null(in);
    f.n = fread(f.bytes, 1, info.bytes + 16, in);
    assert_int_equal(f.n, info.bytes);
    fclose(in);
    return f;
}

static void drop_file(file *f)
{
    unlink(f->path);
    assert_int_equal(rmdir(f->folder), 0); /* fails when a temporary file was left behind */
    free(f->bytes);
}

static void expect(const file *f, size_t n, kvant_status expected, const char *words)
{
    char err[256] = "";
    kvant_calibration *c = (kvant_calibration *)(uintptr_t)1;
    FILE *out = fopen(f->path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(f->bytes, 1, n, out), n);
    fclose(out);
    kvant_status status = kvant_calibration_load(f->path, &c, err, sizeof err);
    if (status != expected || !strstr(err, words))
        fail_msg("%s: \"%s\" for a file of %zu bytes, expected %s with \"%s\"", kvant_strerror(status), err, n,
                 kvant_strerror(expected), words);
    assert_true((c != NULL) == (status == KVANT_OK));
    kvant_calibration_free(&c);
}

static void files_come_back_as_they_were(void **state)
{
    (void)state;
    file f = make_file();
    kvant_calibration *a = make_calibration(2, 1), *b;
    assert_int_equal(kvant_calibration_load(f.path, &b, NULL, 0), KVANT_OK);
    for (uint32_t role = 0; role < 2; role++) {
        kvant_calibration_entry x = entry_of(a, 2, 1, (kvant_role)role), y = entry_of(b, 2, 1, (kvant_role)role);
        assert_memory_equal(x.mean, y.mean, DIM * sizeof(float));
        assert_memory_equal(x.min, y.min, DIM * sizeof(float));
        assert_memory_equal(x.max, y.max, DIM * sizeof(float));
        assert_memory_equal(x.centroids[0], y.centroids[0], 4 * DIM * sizeof(float));
        assert_memory_equal(x.centroids[1], y.centroids[1], 16 * DIM * sizeof(float));
        assert_true((x.matrix != NULL) == (role == KVANT_ROLE_K) && (x.diagonal != NULL) == (role == KVANT_ROLE_K));
        if (role == KVANT_ROLE_V)
            continue;
        assert_memory_equal(x.query_moment, y.query_moment, DIM * DIM * sizeof(float));
        assert_memory_equal(x.diagonal, y.diagonal, DIM * sizeof(float));
        assert_memory_equal(x.matrix, y.matrix, DIM * (DIM + 1) / 2 * sizeof(uint16_t));
    }
    assert_int_equal(kvant_calibration_save(b, f.path, NULL, 0), KVANT_OK); /* over the old file */
    kvant_calibration_free(&a);
    kvant_calibration_free(&b);
    drop_file(&f);
}

static void cut_files_are_refused(void **state)
{
    (void)state;
    file f = make_file();
    for (size_t n = 0; n < 64; n++)
        expect(&f, n, KVANT_ERR_FORMAT, "not a calibration file");
    for (size_t n = 64; n < f.n; n += n < 350 ? 1 : 4999)
        expect(&f, n, KVANT_ERR_FORMAT, "cut short");
    memset(f.bytes + f.n, 0, 16);
    expect(&f, f.n + 16, KVANT_ERR_FORMAT, "too long");
    expect(&f, f.n, KVANT_OK, "");
    drop_file(&f);
}

static const char *damage_at(size_t byte)
{
    return byte < 8 ? "not a calibration file" : byte < 12 ? "version" : byte < 16 || byte >= 24 ? "checksum" : "";
}

static void flipped_bits_are_refused(void **state)
{
    (void)state;
    file f = make_file();
    for (size_t byte = 0; byte < f.n; byte += byte < 350 ? 1 : 4999)
        for (uint32_t bit = 0; bit < 8; bit += byte < 64 ? 1 : 3) {
            f.bytes[byte] ^= (uint8_t)(1u << bit);
            expect(&f, f.n, KVANT_ERR_FORMAT, damage_at(byte));
            f.bytes[byte] ^= (uint8_t)(1u << bit);
        }
    drop_file(&f);
}

static void put(file *f, size_t at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        f->bytes[at + i] = (uint8_t)(value >> 8 * i);
}

/* FNV-1a with bytes 24 .. 31 taken as zero, written down again from calibration.md. */
static void sign(file *f)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < f->n; i++)
        hash = (hash ^ (i / 8 == 3 ? 0 : f->bytes[i])) * 1099511628211u;
    put(f, 24, hash, 8);
}

/* Of the first entry, which begins at 320: behind mean, min, max and the second moment. */
enum { FACTORS = 320 + 4 * (3 * HEADS * DIM + HEADS * DIM * DIM) };

/* With a valid checksum only the checks of the fields themselves are left. */
static void lying_fields_are_refused(void **state)
{
    static const struct {
        size_t at;
        uint64_t value;
        size_t bytes;
        const char *words;
    } lies[] = {
        { 12, 0, 4, "counts more" },
        { 12, 0xffffffff, 4, "counts more" },
        { 12, 5, 4, "damaged" },
        { 12, 7, 4, "damaged" },
        { 12, 8192, 4, "table does not fit" },
        { 56, 256, 4, "counts more" },
        { 56, 8, 4, "holds a zero" },
        { 60, 9, 4, "counts more" },
        { 60, 1, 4, "damaged" },
        { 64, 1, 4, "clusters" },
        { 64, 16, 4, "clusters" },
        { 68, 4097, 4, "clusters" },
        { 128, 4096, 4, "entry" },
        { 132, 2, 4, "entry" },
        { 136, 0, 4, "entry" },
        { 136, 4096, 4, "do not fit" },
        { 136, 0xffffffff, 4, "entry" },
        { 140, 0, 4, "entry" },
        { 140, 513, 4, "entry" },
        { 140, 512, 4, "do not fit" },
        { 144, 1, 8, "entry" },
        { 128, 1, 4, "order" },
        { 320, 0x7fc00000, 4, "not finite" },
        { 320, 0xff800000, 4, "not finite" },
        { FACTORS, 0, 4, "not above 0" },
        { FACTORS + 4, 0xbf800000, 4, "not above 0" },
        { FACTORS + 8, 0x7fc00000, 4, "not finite" },
        { FACTORS + 4 * HEADS * DIM, 0x7c00, 2, "not finite" },
        { FACTORS + 4 * HEADS * DIM + 2, 0xfe01, 2, "not finite" },
        { FACTORS + 4 * HEADS * DIM + HEADS * DIM * (DIM + 1), 0x7f800000, 4, "not finite" }, /* a centroid */
    };
    (void)state;
    file f = make_file();
    sign(&f);
    expect(&f, f.n, KVANT_OK, ""); /* the checksum above is the documented one */
    uint8_t *whole = malloc(f.n);
    memcpy(whole, f.bytes, f.n);
    for (size_t i = 0; i < COUNT(lies); i++) {
        put(&f, lies[i].at, lies[i].value, lies[i].bytes);
        sign(&f);
        expect(&f, f.n, KVANT_ERR_FORMAT, lies[i].words);
        memcpy(f.bytes, whole, f.n);
    }
    put(&f, 8, 1, 4);
    sign(&f);
    expect(&f, f.n, KVANT_ERR_FORMAT, "version 1, this library reads version 2; make it anew with kvant calibrate");
    free(whole);
    drop_file(&f);
}

/* --- checkpoints --- */

static kvant_calibrator *calibrator_of(uint64_t seed)
{
    kvant_calibrator_config config = {
        .size = sizeof config, .model = "a model", .seed = seed, .clusters = few_clusters, .n_codebooks = 2
    };
    kvant_calibrator *calibrator;
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    return calibrator;
}

/* One of several layers of keys and values, with attention on keys. */
static void add_some(kvant_calibrator *calibrator, const data *all, uint32_t layer)
{
    kvant_calibrator_attention attention = { .size = sizeof attention,
                                             .keys = all->rows[layer][0],
                                             .key_stride = HEADS * DIM,
                                             .n_keys = ROWS,
                                             .queries = all->queries[layer][0],
                                             .query_stride = DIM,
                                             .n_queries = 3,
                                             .scale = 0.1f };
    for (uint32_t role = 0; role < 2; role++)
        assert_int_equal(kvant_calibrator_add_rows(calibrator, layer, (kvant_role)role, HEADS, DIM,
                                                   all->rows[layer][role], HEADS * DIM, ROWS),
                         KVANT_OK);
    assert_int_equal(kvant_calibrator_add_queries(calibrator, layer, 1, DIM, all->queries[layer][1], DIM, ROWS),
                     KVANT_OK);
    assert_int_equal(kvant_calibrator_add_attention(calibrator, layer, 0, DIM, 64, &attention), KVANT_OK);
}

static void save_to(kvant_calibrator *calibrator, const char *path)
{
    kvant_calibration *c = finish(calibrator);
    assert_int_equal(kvant_calibration_save(c, path, NULL, 0), KVANT_OK);
    kvant_calibration_free(&c);
}

static uint8_t *read_whole(const char *path, size_t *n)
{
    uint8_t *bytes = malloc(1 << 22);
    FILE *in = fopen(path, "rb");
    assert_true(bytes && in);
    *n = fread(bytes, 1, 1 << 22, in);
    fclose(in);
    return bytes;
}

/* Interrupted while gathering and again between layers of k-means: the same file as without. */
static void work_goes_on_where_it_stopped(void **state)
{
    (void)state;
    data *all = make_data();
    file f = make_file();
    char part[128];
    snprintf(part, sizeof part, "%s/part", f.folder);
    kvant_calibrator *calibrator = calibrator_of(5);
    for (uint32_t l = 0; l < LAYERS; l++)
        add_some(calibrator, all, l);
    save_to(calibrator, f.path);
    size_t n, n_again;
    uint8_t *whole = read_whole(f.path, &n);
    calibrator = calibrator_of(5);
    add_some(calibrator, all, 0);
    for (uint32_t step = 0; step < 3; step++) {
        uint64_t position = 99;
        uint32_t left;
        assert_int_equal(kvant_calibrator_save(calibrator, 17, 100 + step, part, NULL, 0), KVANT_OK);
        kvant_calibrator_free(&calibrator);
        calibrator = calibrator_of(5);
        assert_int_equal(kvant_calibrator_restore(calibrator, 17, part, &position, NULL, 0), KVANT_OK);
        assert_true(position == 100 + step);
        if (step < 1)
            for (uint32_t l = 1; l < LAYERS; l++)
                add_some(calibrator, all, l);
        else
            assert_int_equal(kvant_calibrator_cluster(calibrator, &left), KVANT_OK);
    }
    save_to(calibrator, f.path);
    uint8_t *again = read_whole(f.path, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(whole, again, n);
    unlink(part);
    drop_file(&f);
    free(whole);
    free(again);
    free(all);
}

static void expect_no_restore(const char *path, const uint8_t *bytes, size_t n, uint64_t key, uint64_t seed,
                              kvant_status expected)
{
    char err[256] = "";
    uint64_t position = 99;
    kvant_calibration *c;
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(out);
    kvant_calibrator *calibrator = calibrator_of(seed);
    assert_int_equal(kvant_calibrator_restore(calibrator, key, path, &position, err, sizeof err), expected);
    assert_true(position == 0 && err[0]);
    assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_ERR_ARGUMENT); /* nothing was kept of it */
    kvant_calibrator_free(&calibrator);
}

/* Signed anew, so that what lies behind the checksum is looked at. */
static void sign_bytes(uint8_t *bytes, size_t n)
{
    file f = { .bytes = bytes, .n = n };
    put(&f, 16, n, 8);
    sign(&f);
}

static void checkpoints_of_other_work_are_refused(void **state)
{
    (void)state;
    data *all = make_data();
    file f = make_file();
    size_t n;
    kvant_calibrator *calibrator = calibrator_of(5);
    add_some(calibrator, all, 0);
    assert_int_equal(kvant_calibrator_save(calibrator, 17, 1, f.path, NULL, 0), KVANT_OK);
    uint8_t *bytes = read_whole(f.path, &n), *copy = malloc(n);
    expect_no_restore(f.path, bytes, n, 18, 5, KVANT_ERR_ARGUMENT);
    expect_no_restore(f.path, bytes, n, 17, 6, KVANT_ERR_ARGUMENT);
    expect_no_restore(f.path, f.bytes, f.n, 17, 5, KVANT_ERR_FORMAT); /* a calibration */
    for (size_t cut = 0; cut < n; cut += 1 + cut / 3) {
        expect_no_restore(f.path, bytes, cut, 17, 5, KVANT_ERR_FORMAT);
        memcpy(copy, bytes, n);
        if (cut >= sizeof(uint64_t) * 19 + 256) { /* shorter ones have no whole head */
            sign_bytes(copy, cut);
            expect_no_restore(f.path, copy, cut, 17, 5, KVANT_ERR_FORMAT);
        }
        memcpy(copy, bytes, n);
        copy[cut] ^= 4;
        expect_no_restore(f.path, copy, n, 17, 5, KVANT_ERR_FORMAT);
    }
    for (size_t at = sizeof(uint64_t) * 19 + 256; at < sizeof(uint64_t) * 22 + 256;
         at += 8) { /* index, heads, head_dim */
        static const uint64_t lies[] = { 0, 1 << 20, 1ull << 40, UINT64_MAX };
        for (size_t i = at == sizeof(uint64_t) * 19 + 256; i < COUNT(lies); i++) {
            file lying = { .bytes = copy, .n = n };
            memcpy(copy, bytes, n);
            put(&lying, at, lies[i], 8);
            sign_bytes(copy, n);
            expect_no_restore(f.path, copy, n, 17, 5, KVANT_ERR_FORMAT);
        }
    }
    assert_int_equal(kvant_calibrator_restore(calibrator, 17, f.path, &(uint64_t){ 0 }, NULL, 0),
                     KVANT_ERR_ARGUMENT);
    kvant_calibrator_free(&calibrator);
    drop_file(&f);
    free(bytes);
    free(copy);
    free(all);
}

static void files_that_cannot_be_used_say_why(void **state)
{
    (void)state;
    file f = make_file();
    kvant_calibration *c, *good;
    char err[256], path[128];
    assert_int_equal(kvant_calibration_load(f.path, &good, NULL, 0), KVANT_OK);
    snprintf(path, sizeof path, "%s/none", f.folder);
    assert_int_equal(kvant_calibration_load(path, &c, err, sizeof err), KVANT_ERR_IO);
    assert_non_null(strstr(err, path));
    assert_int_equal(kvant_calibration_load(f.folder, &c, err, sizeof err), KVANT_ERR_IO);
    assert_int_equal(kvant_calibration_load(NULL, &c, err, sizeof err), KVANT_ERR_ARGUMENT);
    snprintf(path, sizeof path, "%s/none/file", f.folder);
    assert_int_equal(kvant_calibration_save(good, path, err, sizeof err), KVANT_ERR_IO);
    assert_int_equal(kvant_calibration_save(good, f.folder, err, sizeof err),
                     KVANT_ERR_IO); /* cannot be renamed over */
    struct stat st;
    assert_int_equal(stat(f.path, &st), 0);
    assert_int_equal(st.st_size, f.n);
    kvant_calibration_free(&good);
    drop_file(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statistics_follow_their_definitions),
        cmocka_unit_test(query_moments_follow_their_definition),
        cmocka_unit_test(info_says_what_was_seen),
        cmocka_unit_test(clusters_are_found),
        cmocka_unit_test(threads_do_not_change_the_result),
        cmocka_unit_test(sums_give_what_rows_give),
        cmocka_unit_test(bad_sums_are_refused),
        cmocka_unit_test(long_texts_are_sampled),
        cmocka_unit_test(bad_input_is_refused),
        cmocka_unit_test(files_come_back_as_they_were),
        cmocka_unit_test(cut_files_are_refused),
        cmocka_unit_test(flipped_bits_are_refused),
        cmocka_unit_test(lying_fields_are_refused),
        cmocka_unit_test(work_goes_on_where_it_stopped),
        cmocka_unit_test(checkpoints_of_other_work_are_refused),
        cmocka_unit_test(files_that_cannot_be_used_say_why),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
