/* test_capture.c - captures are read as written and refused when anything in them does not fit; the error of a layer is what a plain
 * computation in binary64 says. */
#define _XOPEN_SOURCE 700
#include "testing.h"

#include <unistd.h>

#include "../../src/base/half.h"
#include "../../tools/layer_error.h"

enum { KV_HEADS = 2, HEADS = 4, DIM_K = 16, DIM_V = 32, CTX = 192, TOKENS = 320, STEP = 16, WINDOW = 100 };
enum { QUERIES = CTX / STEP + (TOKENS - CTX) / STEP };

llama_api ll; /* of it captures use the conversions alone */

static void to_floats(const ggml_fp16_t *in, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = kvant_half_to_float(in[i]);
}

/* What a test changes about a file before it is written; NULL or 0: nothing. */
typedef struct change {
    const char *key, *value; /* metadata, value NULL: left out */
    const char *tensor;      /* left out */
    uint64_t heads, tokens, dim_q;
} change;

static float numbers[3][HEADS * TOKENS * DIM_V];

static bool plan(safetensors *s, const char *name, const change *c, uint64_t heads, uint64_t rows, uint64_t dim)
{
    const uint64_t shape[3] = { heads, rows, dim };
    char err[256];
    return (c->tensor != NULL && strcmp(c->tensor, name) == 0) ||
           safetensors_plan(s, name, "F16", shape, 3, err, sizeof err);
}

static void put(safetensors *s, const char *name, float *values, uint64_t *state)
{
    const safetensors_tensor *t = safetensors_find(s, name);
    char err[256];
    for (uint64_t i = 0; t != NULL && i < t->bytes / 2; i++) {
        const uint16_t half = kvant_half_from_float((float)(4 * test_uniform(state) - 2));
        values[i] = kvant_half_to_float(half);
        assert_true(safetensors_write(s, t, 2 * i, &half, 2, err, sizeof err));
    }
}

static void write_file(const char *path, const change *c)
{
    static const char *const notes[][2] = { { "format", "kvant-capture-1" },
                                            { "model_fingerprint", "0123456789abcdef" },
                                            { "tokens", "320" },
                                            { "ctx", "192" },
                                            { "query_step", "16" },
                                            { "layers.1.attention", "0.25 0 0" } };
    const uint64_t n_layers = 2;
    safetensors s = { .n = 0 };
    uint64_t state = 3;
    char err[256];
    const unsigned char windows[8] = { 0, 0, 0, 0, WINDOW, 0, 0, 0 };
    const bool has_windows = c->tensor == NULL || strcmp(c->tensor, "windows") != 0;
    if (has_windows)
        assert_true(safetensors_plan(&s, "windows", "I32", &n_layers, 1, err, sizeof err));
    const uint64_t tokens = c->tokens > 0 ? c->tokens : TOKENS;
    assert_true(plan(&s, "layers.1.k", c, KV_HEADS, tokens, DIM_K));
    assert_true(plan(&s, "layers.1.v", c, c->heads > 0 ? c->heads : KV_HEADS, tokens, DIM_V));
    assert_true(plan(&s, "layers.1.q", c, HEADS, QUERIES, c->dim_q > 0 ? c->dim_q : DIM_K));
    for (size_t i = 0; i < COUNT(notes); i++) {
        const bool changed = c->key != NULL && strcmp(c->key, notes[i][0]) == 0;
        if (!changed || c->value != NULL)
            assert_true(safetensors_note(&s, notes[i][0], changed ? c->value : notes[i][1]));
    }
    assert_true(safetensors_create(&s, path, err, sizeof err));
    if (has_windows)
        assert_true(
            safetensors_write(&s, safetensors_find(&s, "windows"), 0, windows, sizeof windows, err, sizeof err));
    put(&s, "layers.1.k", numbers[0], &state);
    put(&s, "layers.1.v", numbers[1], &state);
    put(&s, "layers.1.q", numbers[2], &state);
    assert_true(safetensors_finish(&s, err, sizeof err));
    safetensors_close(&s);
}

static char folder[] = "/tmp/kvant-capture-XXXXXX", path[64];

static int set_up(void **state)
{
    (void)state;
    ll.ggml_fp16_to_fp32_row = to_floats;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof path, "%s/c", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

static capture *open_file(const change *c, char *err, size_t errlen, bool *ok)
{
    capture *read = calloc(1, sizeof *read);
    assert_non_null(read);
    write_file(path, c);
    *ok = capture_open(read, path, err, errlen);
    return read;
}

static void close_file(capture *c)
{
    capture_close(c);
    free(c);
}

static void test_rows_are_those_written(void **state)
{
    (void)state;
    char err[256] = "";
    bool ok;
    capture *c = open_file(&(change){ .key = NULL }, err, sizeof err, &ok);
    assert_true(ok);
    assert_int_equal(c->n_layers, 2);
    assert_int_equal(c->layers[0].n_kv_heads, 0);
    assert_int_equal(c->layers[1].n_heads, HEADS);
    assert_int_equal(c->layers[1].window, WINDOW);
    assert_true(c->model_fingerprint == 0x0123456789abcdefu);
    float rows[5 * DIM_V];
    assert_true(capture_rows(c, 1, CAPTURE_V, 1, 7, 5, rows, err, sizeof err));
    assert_memory_equal(rows, numbers[1] + (TOKENS + 7) * DIM_V, sizeof rows);
    assert_false(capture_rows(c, 1, CAPTURE_V, 2, 0, 1, rows, err, sizeof err));
    assert_false(capture_rows(c, 1, CAPTURE_V, 1, TOKENS - 1, 2, rows, err, sizeof err));
    assert_false(capture_rows(c, 1, CAPTURE_V, 1, SIZE_MAX, 2, rows, err, sizeof err));
    close_file(c);
}

static void test_what_does_not_fit_is_refused(void **state)
{
    (void)state;
    static const change changes[] = {
        { .key = "format" },
        { .key = "format", .value = "kvant-capture-2" },
        { .key = "tokens", .value = "319" },
        { .key = "tokens", .value = "-1" },
        { .key = "tokens", .value = "99999999999999999999" },
        { .key = "ctx", .value = "0" },
        { .key = "ctx", .value = "100" }, /* other queries would be kept */
        { .key = "query_step", .value = "16x" },
        { .key = "layers.1.attention" },
        { .key = "layers.1.attention", .value = "0.25 nan 0" },
        { .tensor = "windows" },
        { .tensor = "layers.1.v" },
        { .heads = 3 },
        { .tokens = 321 },
        { .dim_q = 8 },
    };
    for (size_t i = 0; i < COUNT(changes); i++) {
        char err[256] = "";
        bool ok;
        capture *c = open_file(&changes[i], err, sizeof err, &ok);
        assert_false(ok);
        assert_non_null(strstr(err, path));
        close_file(c);
    }
}

static void test_files_that_are_cut_short(void **state)
{
    (void)state;
    char err[256] = "";
    bool ok;
    close_file(open_file(&(change){ .key = NULL }, err, sizeof err, &ok));
    static const off_t lengths[] = { 0, 7, 8, 100, 2000, 40000 };
    for (size_t i = COUNT(lengths); i-- > 0;) {
        capture *c = calloc(1, sizeof *c);
        assert_int_equal(truncate(path, lengths[i]), 0);
        assert_non_null(c);
        assert_false(capture_open(c, path, err, sizeof err));
        close_file(c);
    }
}

/* One query's output; back replaces one role's rows. */
static void plain_attention(size_t query, uint32_t head, const float *k, const float *v, double *out)
{
    const size_t context = query < CTX / STEP ? 0 : CTX;
    const size_t position = context + (query - context / STEP + 1) * STEP - 1;
    const size_t first = position - context >= WINDOW ? position + 1 - WINDOW : context;
    const float *q = numbers[2] + (head * QUERIES + query) * DIM_K;
    const uint32_t h = head / (HEADS / KV_HEADS);
    double sum = 0;
    memset(out, 0, DIM_V * sizeof *out);
    for (size_t i = first; i <= position; i++) {
        double score = 0;
        for (size_t j = 0; j < DIM_K; j++)
            score += (double)q[j] * k[(h * TOKENS + i) * DIM_K + j];
        sum += exp(0.25 * score);
        for (size_t j = 0; j < DIM_V; j++)
            out[j] += exp(0.25 * score) * v[(h * TOKENS + i) * DIM_V + j];
    }
    for (size_t j = 0; j < DIM_V; j++)
        out[j] /= sum;
}

/* Every page of these codecs is encoded alone and token by token, so plain encode and decode give what the cache does. */
static void through_codec(const char *spec, kvant_role role, const float *rows, float *back)
{
    kvant_codec *codec;
    kvant_codec_info info = { .size = sizeof info };
    const size_t dim = role == KVANT_ROLE_K ? DIM_K : DIM_V;
    assert_int_equal(kvant_codec_create(spec, (uint32_t)dim, role, 0, &codec, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_codec_get_info(codec, &info), KVANT_OK);
    void *page = NULL;
    assert_int_equal(posix_memalign(&page, KVANT_PAGE_ALIGN, info.page_bytes), 0);
    for (size_t i = 0; i < KV_HEADS * TOKENS; i += KVANT_PAGE_TOKENS) {
        memset(page, 0, info.page_bytes);
        assert_int_equal(kvant_codec_encode(codec, NULL, rows + i * dim, dim, 0, KVANT_PAGE_TOKENS, page),
                         KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, KVANT_PAGE_TOKENS, back + i * dim, dim),
                         KVANT_OK);
    }
    free(page);
    kvant_codec_free(&codec);
}

static double plain_error(const char *spec, kvant_role role)
{
    static float back[KV_HEADS * TOKENS * DIM_V];
    double error = 0, size = 0;
    through_codec(spec, role, numbers[role], back);
    for (size_t query = 0; query < QUERIES; query++) {
        const size_t in_context = query < CTX / STEP ? query : query - CTX / STEP;
        const size_t length = query < CTX / STEP ? CTX : TOKENS - CTX;
        if ((in_context + 1) * STEP - 1 < length / 2)
            continue;
        for (uint32_t head = 0; head < HEADS; head++) {
            double exact[DIM_V], coded[DIM_V];
            plain_attention(query, head, numbers[0], numbers[1], exact);
            plain_attention(query, head, role == KVANT_ROLE_K ? back : numbers[0],
                            role == KVANT_ROLE_V ? back : numbers[1], coded);
            for (size_t j = 0; j < DIM_V; j++) {
                error += (coded[j] - exact[j]) * (coded[j] - exact[j]);
                size += exact[j] * exact[j];
            }
        }
    }
    return error / size;
}

static void test_errors_are_those_of_a_plain_computation(void **state)
{
    (void)state;
    static const char *const specs[] = { "int-2", "turboquant-4", "trellis-3", "f16" };
    char err[256] = "";
    bool ok;
    layer_rows rows;
    capture *c = open_file(&(change){ .key = NULL }, err, sizeof err, &ok);
    assert_true(ok);
    assert_true(layer_rows_load(&rows, c, 1, err, sizeof err));
    for (size_t i = 0; i < COUNT(specs); i++)
        for (int role = 0; role < 2; role++) {
            double errors[KV_HEADS], error = 0;
            assert_true(layer_error(&rows, (kvant_role)role, specs[i], NULL, 1, errors, err, sizeof err));
            for (size_t head = 0; head < KV_HEADS; head++)
                error += errors[head];
            const double plain = plain_error(specs[i], (kvant_role)role);
            /* fp32 sums of up to 100 terms: relative errors of outputs below 1e-5, which is all there is of f16's. */
            assert_true(fabs(sqrt(error) - sqrt(plain)) < 1e-5);
            assert_true(i == 3 ? error < 1e-10 : error > 1e-4);
        }
    double errors[KV_HEADS];
    assert_false(layer_error(&rows, KVANT_ROLE_K, "int-4:center=file", NULL, 1, errors, err, sizeof err));
    layer_rows_free(&rows);
    close_file(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_those_written),
        cmocka_unit_test(test_what_does_not_fit_is_refused),
        cmocka_unit_test(test_files_that_are_cut_short),
        cmocka_unit_test(test_errors_are_those_of_a_plain_computation),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
