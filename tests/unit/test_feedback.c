/* test_feedback.c - rounding with error feedback: its factorisation, how much it lowers the loss,
 * and where it is refused. test_vectors checks that its bytes are the bytes of format.md. */
#include "calibrated_fixture.h"

#include "../../src/base/half.h"
#include "../../src/math/spd.h"
#include "../../src/math/tridiagonal.h"

/* M^T D M must be the matrix again. Its entries are sums of d products whose sizes the diagonal
 * bounds, each rounded. */
CASE(unit_lower_factors_multiply_back)
{
    enum { N = 24 };
    static double a[N * N], m[N * N], lower[N * N], pivots[N];
    uint64_t rng = 5;
    for (uint32_t i = 0; i < N * N; i++)
        a[i] = test_normal(&rng);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j < N; j++) {
            m[i * N + j] = i == j ? 0.1 : 0;
            for (uint32_t k = 0; k < N; k++)
                m[i * N + j] += a[i * N + k] * a[j * N + k];
        }
    assert_int_equal(kvant_spd_unit_lower(N, m, lower, pivots), KVANT_OK);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j < N; j++) {
            double sum = 0;
            for (uint32_t k = 0; k < N; k++)
                sum += lower[k * N + i] * pivots[k] * lower[k * N + j];
            assert_true(fabs(sum - m[i * N + j]) <=
                        8 * N * 0x1p-53 * sqrt(m[i * N + i] * m[j * N + j]));
            assert_true(j <= i || lower[i * N + j] == 0);
            assert_true(j != i || lower[i * N + j] == 1);
        }
    m[0] = -1;
    assert_int_equal(kvant_spd_unit_lower(N, m, lower, pivots), KVANT_ERR_ARGUMENT);
}

/* A head whose keys and queries have correlated channels of very different sizes. */
typedef struct head {
    double mix[2][DIM * DIM];
    kvant_calibration *calibration;
} head;

static void draw(const head *h, uint32_t of_queries, uint64_t *rng, float *row)
{
    double x[DIM];
    for (uint32_t j = 0; j < DIM; j++)
        x[j] = test_normal(rng) * pow(8, (double)(of_queries ? j * 5 % DIM : j) / DIM);
    for (uint32_t i = 0; i < DIM; i++) {
        double sum = 0;
        for (uint32_t j = 0; j < DIM; j++)
            sum += h->mix[of_queries][i * DIM + j] * x[j];
        row[i] = (float)sum;
    }
}

static void make_head(head *h)
{
    enum { ROWS = 4000 };
    kvant_calibrator_config config = { .size = sizeof config, .model = "head" };
    kvant_calibrator *calibrator;
    float row[2 * DIM] = { 0 };
    uint64_t rng = 77;
    for (uint32_t i = 0; i < 2 * DIM * DIM; i++)
        h->mix[i / (DIM * DIM)][i % (DIM * DIM)] = test_normal(&rng);
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t layer = 0; layer < 2; layer++) {
            draw(h, 0, &rng, row);
            draw(h, 0, &rng, row + DIM);
            assert_ok(kvant_calibrator_add_rows(calibrator, layer, KVANT_ROLE_K, 2, DIM, row,
                                                2 * DIM, 1));
            draw(h, 1, &rng, row);
            for (uint32_t kv = 0; kv < 2; kv++)
                assert_ok(kvant_calibrator_add_queries(calibrator, layer, kv, DIM, row, DIM, 1));
        }
    assert_int_equal(kvant_calibrator_finish(calibrator, &h->calibration), KVANT_OK);
    kvant_calibrator_free(&calibrator);
}

/* Mean square of <q, k - decoded k>. */
static double loss_of(const head *h, const char *spec)
{
    enum { PAGES = 24, QUERIES = 16 };
    kvant_codec *codec = create(spec, DIM, KVANT_ROLE_K, h->calibration);
    kvant_codec_info info = info_of(codec);
    void *page = aligned(info.page_bytes);
    static float rows[TOKENS * DIM], back[TOKENS * DIM], q[DIM];
    const kvant_affine affine = { .center = entry_of(h->calibration, 1, KVANT_ROLE_K).mean };
    double sum = 0;
    uint64_t rng = 123;
    for (uint32_t p = 0; p < PAGES; p++) {
        for (uint32_t t = 0; t < TOKENS; t++)
            draw(h, 0, &rng, rows + t * DIM);
        assert_int_equal(kvant_codec_encode(codec, &affine, rows, DIM, 0, TOKENS, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, &affine, page, 0, TOKENS, back, DIM), KVANT_OK);
        for (uint32_t i = 0; i < QUERIES; i++) {
            draw(h, 1, &rng, q);
            for (uint32_t t = 0; t < TOKENS; t++) {
                double error = 0;
                for (uint32_t j = 0; j < DIM; j++)
                    error += q[j] * ((double)rows[t * DIM + j] - back[t * DIM + j]);
                sum += error * error;
            }
        }
    }
    free(page);
    kvant_codec_free(&codec);
    return sum / (PAGES * QUERIES * TOKENS);
}

/* The largest gain of feedback, on average over rotations and for fine quantisers. The loss is
 * tr(m^(1/2)) tr(m^(3/4))^2 / d. Without feedback it is tr(m)^2 (feedback.c). Here m is the
 * spectrum of W^-1 Q W^-1. */
static double expected_gain(const kvant_calibration *c)
{
    static double w[DIM * DIM], inverse[DIM * DIM], q[DIM * DIM], m[DIM * DIM], scratch[DIM * DIM],
        values[DIM];
    kvant_calibration_entry entry = entry_of(c, 1, KVANT_ROLE_K);
    const uint16_t *triangle = entry.matrix;
    for (uint32_t i = 0; i < DIM; i++)
        for (uint32_t j = 0; j <= i; j++)
            w[i * DIM + j] = w[j * DIM + i] = kvant_half_to_float(*triangle++);
    for (uint32_t i = 0; i < DIM * DIM; i++)
        q[i] = entry.query_moment[i];
    assert_int_equal(kvant_spd_inverse(DIM, w, inverse), KVANT_OK);
    kvant_spd_sandwich(DIM, inverse, q, scratch, m);
    assert_int_equal(kvant_tridiagonal_eigen(DIM, m, values, scratch), KVANT_OK);
    double halves = 0, three_quarters = 0, whole = 0;
    for (uint32_t i = 0; i < DIM; i++) {
        whole += values[i];
        halves += sqrt(values[i]);
        three_quarters += pow(values[i], 0.75);
    }
    return halves * three_quarters * three_quarters / (DIM * whole * whole);
}

CASE(scores_lose_less)
{
    static const char *const specs[][2] = {
        { "turboquant-4:transform=file", "turboquant-4:transform=file,feedback" },
        { "turboquant-3:transform=file", "turboquant-3:transform=file,feedback" },
        { "turboquant-4:transform=file,scale=norm",
          "turboquant-4:transform=file,feedback,scale=norm" },
    };
    head h;
    make_head(&h);
    const double gain = expected_gain(h.calibration);
    assert_true(gain < 0.7); /* otherwise there is little to test */
    for (size_t i = 0; i < COUNT(specs); i++) {
        double without = loss_of(&h, specs[i][0]), with = loss_of(&h, specs[i][1]);
        if (!(with <= gain * without))
            fail_msg("%s: %g, without feedback %g", specs[i][1], with, without);
    }
    kvant_calibration_free(&h.calibration);
}

/* A row of length zero, and rows on both sides of the limit that a scale of twice their length
 * allows. */
CASE(rows_at_the_limits)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    kvant_codec *codec = create("turboquant-4:transform=file,feedback", DIM, KVANT_ROLE_K, c);
    static float rows[TOKENS * DIM], back[TOKENS * DIM];
    void *page = encode(codec, rows);
    decode(codec, page, back);
    for (uint32_t i = 0; i < TOKENS * DIM; i++)
        assert_true(back[i] == 0);
    memset(rows, 0, sizeof rows);
    bool refused = false;
    for (float size = 1; size < 1e6f && !refused; size *= 2) {
        rows[0] = rows[1] = size;
        kvant_status status = kvant_codec_encode(codec, NULL, rows, DIM, 0, 1, page);
        refused = status == KVANT_ERR_RANGE;
        assert_true(refused || status == KVANT_OK);
        decode(codec, page, back);
        for (uint32_t j = 0; j < DIM; j++)
            assert_true(isfinite(back[j]));
    }
    assert_true(refused);
    free(page);
    kvant_codec_free(&codec);
    kvant_calibration_free(&c);
}

static void expect_refusal(const kvant_calibration *c, const char *spec, kvant_status expected,
                           const char *word)
{
    kvant_codec *codec;
    char err[256] = "";
    assert_int_equal(
        kvant_codec_create_calibrated(spec, DIM, KVANT_ROLE_K, 1, c, 1, 1, &codec, err, sizeof err),
        expected);
    assert_null(codec);
    assert_non_null(strstr(err, word));
}

CASE(only_where_it_means_something)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    expect_refusal(c, "turboquant-4:feedback", KVANT_ERR_SPEC, "transform=file");
    expect_refusal(c, "turboquant-4:transform=diagonal,feedback", KVANT_ERR_SPEC, "transform=file");
    expect_refusal(c, "turboquant-4:transform=file,feedback=2", KVANT_ERR_SPEC, "feedback");
    expect_refusal(c, "int-4:transform=file,feedback", KVANT_ERR_UNSUPPORTED, "turboquant");
    expect_refusal(c, "turboquant-4:transform=file,feedback,qjl",
                   KVANT_PAPERS ? KVANT_ERR_UNSUPPORTED : KVANT_ERR_SPEC, "turboquant");
    kvant_codec *codec = create("turboquant-4:transform=file,feedback", DIM, KVANT_ROLE_K, c);
    assert_non_null(strstr(info_of(codec).spec, ",transform=file,feedback"));
    kvant_codec *again = create(info_of(codec).spec, DIM, KVANT_ROLE_K, c);
    assert_string_equal(info_of(codec).spec, info_of(again).spec);
    kvant_codec_free(&again);
    kvant_codec_free(&codec);
    codec = create("turboquant-4:transform=file,feedback", DIM, KVANT_ROLE_V,
                   c); /* values have only the centre */
    assert_null(strstr(info_of(codec).spec, "feedback"));
    kvant_codec_free(&codec);
    kvant_calibration_free(&c);
}

RUN_CASES(NULL, NULL)
