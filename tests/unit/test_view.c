/* test_view.c - a codec's view is enough to read its pages. Numbers that are computed from the view
 * alone equal the decoded numbers. The GPU library knows only the view of a codec. */
#include "testing.h"

#include "../../src/base/half.h"
#include "../../src/codec/encode.h"
#include "../../src/math/octahedral.h"
#include "calibrated.h"
#include "specs.h"

typedef struct read_page {
    const kvant_codec *codec;
    const kvant_codec_view *view;
    const uint8_t *page;
    uint32_t token;
    float scale; /* scale of the token, if its codes have one */
    uint32_t codes[KVANT_MAX_HEAD_DIM];
} read_page;

static float half_at(const read_page *p, size_t i)
{
    return kvant_half_to_float(
        ((const uint16_t *)(const void *)(p->page + p->view->info->metadata_offset))[i]);
}

static void read_codes(read_page *p)
{
    const kvant_codec_info *info = p->view->info;
    if (p->view->kind !=
        KVANT_CODES_UNIFORM) /* its groups have scales, which may be fewer than 64 */
        p->scale = half_at(p, p->token);
    if (p->view->kind == KVANT_CODES_CHUNK) {
        const kvant_chunk_view *chunk = &p->view->of.chunk;
        kvant_chunk_layout layout;
        kvant_chunk_layout_init(&layout, info->role, chunk->n_chunks,
                                chunk->index_bits + chunk->length_bits);
        kvant_chunk_layout_get(&layout, p->page, p->token, p->codes);
        return;
    }
    kvant_layout layout;
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    kvant_layout_init(&layout, info->role, info->head_dim, info->bits);
    kvant_layout_get(&layout, p->page, p->token, codes);
    for (uint32_t j = 0; j < info->head_dim; j++)
        p->codes[j] = codes[j];
}

static double uniform_number(const read_page *p, uint32_t j)
{
    const kvant_uniform_view *u = &p->view->of.uniform;
    const uint32_t padded = (p->view->info->head_dim + 15) / 16 * 16;
    const size_t at = u->per_channel ? (size_t)(p->token / u->group) * padded + j
                                     : (size_t)(j / u->group) * 64 + p->token;
    const double zero = u->symmetric ? 0 : half_at(p, u->n_scales + at);
    return half_at(p, at) * ((double)p->codes[j] + (double)u->offset) + zero;
}

/* The level of a channel. It depends on the code's bits and on the subset, which trellis bits of
 * steps before it choose. */
static double trellis_number(const read_page *p, uint32_t j)
{
    const kvant_trellis_view *t = &p->view->of.trellis;
    const uint32_t dim = p->view->info->head_dim, n_steps = (dim + 15) / 16 * 16;
    uint8_t bits[KVANT_MAX_HEAD_DIM] = { 0 };
    for (uint32_t i = 0; i < dim; i++)
        bits[t->steps[i]] = p->codes[i] & 1;
    uint32_t before[7]; /* the trellis bits of up to 6 steps before, on a circle of n_steps steps */
    for (uint32_t back = 0; back <= 6; back++)
        before[back] = bits[(t->steps[j] + n_steps - back) % n_steps];
    const uint32_t level = 8 * (p->codes[j] / 2u) + before[3] + 2 * (before[0] ^ before[6]) +
                           4 * (before[1] ^ before[5]);
    assert_true(fabsf(t->values[level] - t->unit * (float)t->levels[level]) < 1e-6f);
    return (double)p->scale * t->values[level];
}

static double triplet_number(const kvant_chunk_view *chunk, uint32_t index, uint32_t component)
{
    const uint32_t bits = chunk->index_bits / 2;
    float point[3];
    kvant_octahedral_point(chunk->direction[index & ((1u << bits) - 1)],
                           chunk->direction[index >> bits], &point[0], &point[1], &point[2]);
    const double x = point[0], y = point[1], z = point[2];
    return point[component] / sqrt(x * x + y * y + z * z);
}

static double chunk_number(const read_page *p, uint32_t j)
{
    const kvant_chunk_view *chunk = &p->view->of.chunk;
    const bool triplets = chunk->kind == KVANT_CHUNK_TRIPLETS;
    const uint32_t size = triplets ? 3 : 4, code = p->codes[j / size],
                   index = code & ((1u << chunk->index_bits) - 1);
    const uint32_t length = code >> chunk->index_bits;
    if (triplets)
        return (double)p->scale * chunk->length[length] * triplet_number(chunk, index, j % size);
    return (double)p->scale * length * chunk->codewords[4 * (size_t)index + j % size];
}

static double number_of(const read_page *p, uint32_t j)
{
    switch (p->view->kind) {
    case KVANT_CODES_UNIFORM: return uniform_number(p, j);
    case KVANT_CODES_CODEBOOK: return (double)p->scale * p->view->of.codebook.values[p->codes[j]];
    case KVANT_CODES_TRELLIS: return trellis_number(p, j);
    case KVANT_CODES_CHUNK: return chunk_number(p, j);
    case KVANT_CODES_NONE: break;
    }
    return NAN;
}

/* Codewords are products of Hurwitz units and secondaries, rounded. Secondaries have length 1, and
 * one of the 24 units is 1. */
static void check_secondaries(const kvant_chunk_view *chunk)
{
    for (uint32_t s = 0; s < chunk->n_secondaries; s++) {
        const double *q = chunk->secondaries + (size_t)4 * s;
        const float *first = chunk->codewords + (size_t)4 * 24 * s; /* of the 24 units */
        double square = 0, nearest = 0;
        for (uint32_t i = 0; i < 4; i++)
            square += q[i] * q[i];
        assert_true(fabs(square - 1) < 1e-12);
        for (uint32_t unit = 0; unit < 24; unit++) {
            double same = 0;
            for (uint32_t i = 0; i < 4; i++)
                same += q[i] * first[4 * unit + i];
            nearest = same > nearest ? same : nearest;
        }
        assert_true(fabs(nearest - 1) < 1e-6);
    }
}

static bool readable(const kvant_codec_view *view)
{
    return view->kind != KVANT_CODES_NONE &&
           !(view->kind == KVANT_CODES_UNIFORM && view->of.uniform.hybrid) &&
           !(view->kind == KVANT_CODES_CHUNK && view->of.chunk.outliers);
}

/* Numbers are products of at most three binary32 roundings. The decoder's octahedral point has some
 * more. */
static void check_page(const kvant_codec *codec, uint64_t *rng)
{
    const kvant_codec_view *view = kvant_codec_get_view(codec);
    const uint32_t dim = view->info->head_dim;
    void *page = aligned(view->info->page_bytes);
    float *rows = malloc((size_t)64 * dim * sizeof *rows), y[KVANT_MAX_HEAD_DIM];
    read_page p = { .codec = codec, .view = view, .page = page };
    assert_non_null(rows);
    fill_normal(rows, (size_t)64 * dim, rng);
    assert_int_equal(kvant_codec_encode(codec, NULL, rows, dim, 0, 64, page), KVANT_OK);
    for (p.token = 0; p.token < 64; p.token++) {
        read_codes(&p);
        kvant_codec_decode_transformed(codec, kvant_kernels_get(KVANT_CPU_AUTO), page, p.token, y);
        for (uint32_t j = 0; j < dim;
             j++) /* rows have variance 1, scales and zero points are below 8 */
            if (!(fabs(number_of(&p, j) - y[j]) <= 4e-6))
                fail_msg("%s, head_dim %u, token %u, channel %u: %g, not %g", view->info->spec, dim,
                         p.token, j, number_of(&p, j), (double)y[j]);
    }
    if (view->kind == KVANT_CODES_CHUNK && view->of.chunk.kind == KVANT_CHUNK_QUATERNIONS)
        check_secondaries(&view->of.chunk);
    free(rows);
    free(page);
}

static bool has_octopus(void)
{
    return kvant_codec_check("octopus-3", KVANT_ROLE_K, NULL, NULL, 0) == KVANT_OK;
}

CASE(views_read_pages)
{
    static const uint32_t dims[] = { 16, 64, 80, 128 };
    uint32_t kinds[KVANT_CODES_CHUNK + 1] = { 0 };
    uint64_t rng = 5;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++) {
                kvant_codec *codec;
                if (kvant_codec_create(all_specs[s], dims[d], (kvant_role)role, 3, &codec, NULL,
                                       0) != KVANT_OK)
                    continue;
                const kvant_codec_view *view = kvant_codec_get_view(codec);
                assert_int_equal(view->size, sizeof *view);
                assert_string_equal(view->info->spec, info_of(codec).spec);
                kinds[view->kind]++;
                if (readable(view))
                    check_page(codec, &rng);
                kvant_codec_free(&codec);
            }
    for (size_t kind = 0; kind < COUNT(kinds); kind++) /* only papers' codecs have chunks */
        assert_true(kinds[kind] > 10 || (kind == KVANT_CODES_CHUNK && !has_octopus()));
}

CASE(kinds_are_those_of_families)
{
    static const struct {
        const char *spec;
        kvant_code_kind kind;
    } cases[] = { { "f32", KVANT_CODES_NONE },
                  { "f16", KVANT_CODES_NONE },
                  { "int-4", KVANT_CODES_UNIFORM },
                  { "bdr-4", KVANT_CODES_UNIFORM },
                  { "turboquant-4", KVANT_CODES_CODEBOOK },
                  { "turboquant-8", KVANT_CODES_CODEBOOK },
                  { "trellis-3", KVANT_CODES_TRELLIS } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        kvant_codec *codec;
        assert_ok(kvant_codec_create(cases[i].spec, 64, KVANT_ROLE_K, 0, &codec, NULL, 0));
        assert_int_equal(kvant_codec_get_view(codec)->kind, cases[i].kind);
        kvant_codec_free(&codec);
    }
}

static bool odd(uint32_t bits)
{
    bool parity = false;
    for (; bits; bits &= bits - 1)
        parity = !parity;
    return parity;
}

/* y = R W x from the view, as a device computes it for a row, in binary64. */
static void transform_by_view(const kvant_transform_view *t, uint32_t dim, bool query,
                              const float *x, double *y)
{
    const float *w = query ? t->inverse_key_transform : t->key_transform;
    double z[KVANT_MAX_HEAD_DIM];
    if (w && !t->diagonal) {
        memset(y, 0, dim * sizeof *y);
        for (uint32_t j = 0; j < dim; j++)
            for (uint32_t i = 0; i < dim; i++)
                y[j] += (double)w[(size_t)i * dim + j] * x[i];
        return;
    }
    for (uint32_t j = 0; j < dim; j++)
        y[j] = z[j] = (double)x[j] * (w ? w[j] : 1);
    for (uint32_t j = 0; t->rotate == KVANT_ROTATE_HADAMARD && j < dim; j++) {
        const uint32_t first = j / t->block * t->block;
        y[j] = 0;
        for (uint32_t i = 0; i < t->block; i++) {
            const double x_i = z[first + i] * (double)t->signs[first + i];
            y[j] += odd(i & (j - first)) ? -x_i : x_i;
        }
        y[j] /= sqrt(t->block);
    }
    for (uint32_t j = 0; t->rotate == KVANT_ROTATE_DENSE && j < dim; j++) {
        y[j] = 0;
        for (uint32_t i = 0; i < dim; i++)
            y[j] += (double)t->matrix[(size_t)j * dim + i] * z[i];
    }
}

static void check_transform(const kvant_codec *codec, uint64_t *rng)
{
    const kvant_codec_view *view = kvant_codec_get_view(codec);
    const uint32_t dim = view->info->head_dim;
    float x[KVANT_MAX_HEAD_DIM], got[KVANT_MAX_HEAD_DIM];
    double want[KVANT_MAX_HEAD_DIM] = { 0 }, largest = 0;
    fill_normal(x, dim, rng);
    for (int query = 0; query < 2; query++) {
        if (query)
            assert_int_equal(kvant_codec_transform_query(codec, NULL, x, got), KVANT_OK);
        else
            kvant_transform_forward(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, x,
                                    got);
        transform_by_view(&view->transform, dim, query, x, want);
        for (uint32_t j = 0; j < dim; j++)
            largest = fmax(largest, fabs(want[j]));
        for (uint32_t j = 0; j < dim; j++)
            if (!(fabs(got[j] - want[j]) <= 1e-5 * largest))
                fail_msg("%s, channel %u: %g, not %g", view->info->spec, j, (double)got[j],
                         want[j]);
    }
}

CASE(views_transform_rows_and_queries)
{
    static const char *const plain[] = { "int-4", "int-4:rotate=dense", "turboquant-4",
                                         "bdr-4:block=16,signs=seed" };
    uint64_t rng = 6;
    kvant_calibration *calibration = calibrate_fixed(32);
    uint32_t full = 0, diagonal = 0, feedback = 0, centred = 0;
    assert_non_null(calibration);
    for (size_t s = 0; s < COUNT(plain) + N_WEIGHTED_SPECS; s++) {
        kvant_codec *codec;
        const char *spec = s < COUNT(plain) ? plain[s] : weighted_specs[s - COUNT(plain)];
        if (kvant_codec_create_calibrated(spec, 32, KVANT_ROLE_K, 3, calibration, 1, 1, &codec,
                                          NULL, 0) != KVANT_OK)
            continue; /* a family that this build lacks */
        const kvant_codec_view *view = kvant_codec_get_view(codec);
        full += view->transform.key_transform && !view->transform.diagonal;
        diagonal += view->transform.key_transform && view->transform.diagonal;
        feedback += view->feedback.pivots != NULL;
        centred += view->transform.center != NULL;
        assert_true((view->transform.center != NULL) == (view->info->center == KVANT_CENTER_FILE));
        check_transform(codec, &rng);
        kvant_codec_free(&codec);
    }
    assert_true(full >= 3 && diagonal >= 3 && feedback == 2 && centred == full + diagonal);
    kvant_calibration_free(&calibration);
}

RUN_CASES(NULL, NULL)
