/* test_vectors.c - the library's bytes against the bytes of an independent implementation
 * (tests/vectors, NumPy).
 *
 * Codes, metadata and whole pages must be equal to the byte. Decoded numbers come from R^T, whose
 * order of operations is not part of the format. They may differ by the rounding of a sum of
 * head_dim products: at most head_dim 2^-24 times the length of the row, because a row of R has
 * length 1.
 *
 * With a W of the calibration, eigenvalues lie between 2 and 6. Rows of R W^-1 have length 1/2 at
 * most, and y is at most 6 times the row. The 32 channels are summed in 16 partial sums with 6
 * roundings. So the error is 3 times (6 + 1) 2^-24. This stays below 32 x 2^-24. */
#include "testing.h"

#include <inttypes.h>
#include <kvant/calibration.h>

enum { TOKENS = KVANT_PAGE_TOKENS, MAX_LINE = 1024 };
enum { PLAIN, SHIFTED, WITH_FILE }; /* settings of make.py */

/* splitmix64 and the rows of make.py, both written a second time: the test must not take its input
 * from the library. */
static uint64_t split_mix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void make_rows(float *x, uint32_t dim)
{
    uint64_t state = dim;
    for (uint32_t i = 0; i < TOKENS * dim; i++) {
        const uint64_t word = split_mix(&state);
        x[i] = ((float)(word >> 40 & 0xffff) - 32768.0f) / (float)(1u << (8 + (word >> 60)));
    }
    for (uint32_t c = 0; c < dim; c++) {
        x[5 * dim + c] = 0;
        x[6 * dim + c] *= 0x1p-100f;
        x[7 * dim + c] = 1.5f;
    }
}

static void make_affine(float *center, float *scale, uint32_t dim)
{
    for (uint32_t c = 0; c < dim; c++) {
        center[c] = (float)((int)(c % 7) - 3) / 4;
        scale[c] = ldexpf(1, (int)(c % 5) - 2);
    }
}

static uint64_t fnv1a(const uint8_t *data, size_t n)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ data[i]) * 0x100000001b3u;
    return hash;
}

typedef struct vector {
    char spec[128], role;
    unsigned dim, setting;
    uint64_t seed, code, metadata, page;
    size_t page_bytes;
    const char *samples;
} vector;

static vector parse(const char *line)
{
    vector v;
    int used = 0;
    const int n = sscanf(
        line, "%127s %u %c %" SCNu64 " %u %" SCNx64 " %" SCNx64 " %" SCNx64 " %zu%n", v.spec,
        &v.dim, &v.role, &v.seed, &v.setting, &v.code, &v.metadata, &v.page, &v.page_bytes, &used);
    if (n != 9 || v.dim == 0 || v.dim > KVANT_MAX_HEAD_DIM)
        fail_msg("not a vector: %s", line);
    v.samples = line + used;
    return v;
}

static bool same_bytes(const vector *v, const kvant_codec_info *info, const uint8_t *page)
{
    const bool sizes = info->page_bytes == v->page_bytes;
    const bool codes = fnv1a(page, info->metadata_offset) == v->code;
    const bool metadata = fnv1a(page + info->metadata_offset, info->metadata_bytes) == v->metadata;
    const bool all = fnv1a(page, info->page_bytes) == v->page;
    if (sizes && codes && metadata && all)
        return true;
    print_error("%s %u %c: other%s%s%s%s\n", v->spec, v->dim, v->role, sizes ? "" : " size",
                codes ? "" : " codes", metadata ? "" : " metadata",
                codes && metadata ? " padding" : "");
    return false;
}

static double length(const float *row, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)row[i] * row[i];
    return sqrt(sum);
}

static bool same_samples(const vector *v, const float *decoded)
{
    unsigned token, channel;
    float expected;
    int used, n = 0;
    bool same = true;
    for (const char *p = v->samples;
         sscanf(p, " %u:%u=%f%n", &token, &channel, &expected, &used) == 3; p += used, n++) {
        assert_in_range(token, 0, TOKENS - 1);
        assert_in_range(channel, 0, v->dim - 1);
        const float *row = decoded + token * v->dim;
        if (fabs((double)row[channel] - expected) <= v->dim * 0x1p-24 * length(row, v->dim))
            continue;
        print_error("%s %u %c: token %u channel %u decodes to %.9g, not %.9g\n", v->spec, v->dim,
                    v->role, token, channel, (double)row[channel], (double)expected);
        same = false;
    }
    assert_int_equal(n, 8);
    return same;
}

static bool check(const vector *v, const kvant_calibration *calibration)
{
    static float rows[TOKENS * KVANT_MAX_HEAD_DIM], decoded[TOKENS * KVANT_MAX_HEAD_DIM];
    float center[KVANT_MAX_HEAD_DIM], scale[KVANT_MAX_HEAD_DIM];
    const kvant_affine state = { center, scale }, *affine = v->setting == SHIFTED ? &state : NULL;
    const kvant_role role = v->role == 'K' ? KVANT_ROLE_K : KVANT_ROLE_V;
    kvant_codec *codec;
    char err[256] = "";
    const kvant_calibration *used = v->setting == WITH_FILE ? calibration : NULL;
    if (kvant_codec_create_calibrated(v->spec, v->dim, role, v->seed, used, 0, 1, &codec, err,
                                      sizeof err) != KVANT_OK) {
        print_error("%s %u %c: %s\n", v->spec, v->dim, v->role, err);
        return false;
    }
    const kvant_codec_info info = info_of(codec);
    uint8_t *page = aligned(info.page_bytes);
    make_rows(rows, v->dim);
    make_affine(center, scale, v->dim);
    assert_int_equal(kvant_codec_encode(codec, affine, rows, v->dim, 0, TOKENS, page), KVANT_OK);
    assert_int_equal(kvant_codec_decode(codec, affine, page, 0, TOKENS, decoded, v->dim), KVANT_OK);
    const bool bytes = same_bytes(v, &info, page), samples = same_samples(v, decoded);
    free(page);
    kvant_codec_free(&codec);
    return bytes && samples;
}

/* The families of src/codec/papers, by name. The test does not ask the library under test. */
static bool of_papers(const char *spec)
{
    static const char *const words[] = { "kivi",          "innerq",    "kmeans",  "hessian",
                                         "naive",         "polar",     "octopus", "hqmq",
                                         "addvq",         "spherical", "qjl",     "turboquant-2.5",
                                         "turboquant-3.5" };
    for (size_t i = 0; i < COUNT(words); i++)
        if (strstr(spec, words[i]) != NULL)
            return true;
    return false;
}

CASE(test_vectors)
{
    char line[MAX_LINE];
    size_t n = 0, different = 0;
    kvant_calibration *calibration;
    assert_ok(kvant_calibration_load(KVANT_VECTORS "/vectors.kvcal", &calibration, NULL, 0));
    FILE *file = fopen(KVANT_VECTORS "/vectors.txt", "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL)
        if (line[0] != '#') {
            const vector v = parse(line);
            if (!KVANT_PAPERS && of_papers(v.spec))
                continue;
            different += !check(&v, calibration);
            n++;
        }
    fclose(file);
    kvant_calibration_free(&calibration);
    assert_int_equal(different, 0);
    assert_true(n > 100); /* an empty file must not pass */
}

/* Without a vector, only a family's author would have checked its bytes. */
CASE(test_every_family_has_one)
{
    static char text[1 << 18];
    FILE *file = fopen(KVANT_VECTORS "/vectors.txt", "r");
    assert_non_null(file);
    text[0] = '\n';
    const size_t n = fread(text + 1, 1, sizeof text - 2, file);
    assert_true(n < sizeof text - 2);
    fclose(file);
    for (size_t i = 0; i < kvant_codec_family_count(); i++) {
        kvant_codec_family family = { .size = sizeof family };
        assert_int_equal(kvant_codec_family_get(i, &family), KVANT_OK);
        char dashed[64], bare[64];
        snprintf(dashed, sizeof dashed, "\n%s-", family.name);
        snprintf(bare, sizeof bare, "\n%s ", family.name);
        if (strstr(text, dashed) == NULL && strstr(text, bare) == NULL)
            fail_msg("%s has no vector in tests/vectors", family.name);
    }
}

RUN_CASES(NULL, NULL)
