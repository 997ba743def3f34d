/* test_attention.c - kvant_attention against a plain double-precision softmax over decoded rows. */
#include "testing.h"

#include <kvant/attention.h>

#include "../../src/base/half.h"
#include "../../src/codec/codec_internal.h"
#include "../attention_reference.h"

#define MAX_KV_HEADS 4

typedef struct setup {
    uint32_t k_dim, v_dim, n_kv_heads, n_heads, n_cells, n_tokens, n_streams;
    const char *k_spec, *v_spec;
    bool mask, sinks, affine, fp32;
    bool codec_per_head; /* of one spec, rotated by seeds of their own */
    float softcap, max_bias;
} setup;

typedef struct fixture {
    setup s;
    kvant_codec *k_codecs[MAX_KV_HEADS], *v_codecs[MAX_KV_HEADS];
    void *k_memory, *v_memory;
    kvant_cells *k, *v;
    float *q, *out, *sinks;
    uint16_t *mask;
    kvant_attention_args args;
} fixture;

static void fill_cells(const setup *s, kvant_cells *cells, uint32_t dim, uint64_t *rng)
{
    uint32_t n = s->n_streams * s->n_cells, width = s->n_kv_heads * dim;
    int64_t *index = malloc(n * sizeof *index);
    float *rows = malloc((size_t)n * width * sizeof *rows), *center = malloc(width * sizeof *center),
          *scale = malloc(width * sizeof *scale);
    fill_normal(center, width, rng);
    for (uint32_t j = 0; j < width; j++)
        scale[j] = 0.5f + (float)test_uniform(rng);
    fill_normal(rows, (size_t)n * width, rng);
    for (uint32_t i = 0; i < n; i++) {
        index[i] = i;
        for (uint32_t j = 0; j < width; j++)
            rows[(size_t)i * width + j] += 3 * center[j];
    }
    if (s->affine)
        assert_int_equal(kvant_cells_set_affine(cells, &(kvant_affine){ center, scale }), KVANT_OK);
    assert_int_equal(kvant_cells_write(cells, index, n, rows, width, 2), KVANT_OK);
    free(index);
    free(rows);
    free(center);
    free(scale);
}

static kvant_cells *make_cells(const setup *s, const char *spec, uint32_t dim, kvant_role role,
                               kvant_codec **codecs, void **memory)
{
    for (uint32_t h = 0; h < (s->codec_per_head ? s->n_kv_heads : 1); h++)
        assert_int_equal(kvant_codec_create(spec, dim, role, TEST_SEED + h, &codecs[h], NULL, 0), KVANT_OK);
    const kvant_codec *array[MAX_KV_HEADS];
    for (uint32_t h = 0; h < MAX_KV_HEADS; h++)
        array[h] = codecs[h];
    kvant_cells_config config = { .size = sizeof config,
                                  .codec = codecs[0],
                                  .codecs = s->codec_per_head ? array : NULL,
                                  .n_kv_heads = s->n_kv_heads,
                                  .n_streams = s->n_streams,
                                  .n_cells = s->n_cells };
    size_t bytes = kvant_cells_bytes(&config);
    assert_true(bytes > 0);
    *memory = aligned(bytes);
    kvant_cells *cells;
    assert_int_equal(kvant_cells_create(&config, *memory, &cells), KVANT_OK);
    return cells;
}

static void make_mask(fixture *f, uint64_t *rng)
{
    const setup *s = &f->s;
    f->mask = malloc((size_t)s->n_tokens * s->n_cells * sizeof *f->mask);
    for (uint32_t t = 0; t < s->n_tokens; t++)
        for (uint32_t j = 0; j < s->n_cells; j++) {
            bool hidden = j > s->n_cells - s->n_tokens + t || (t % 3 == 1 && j < 70) || test_random(rng) % 5 == 0;
            float bias = s->max_bias > 0 ? -(float)(s->n_cells - j) / 8 : 0;
            f->mask[(size_t)t * s->n_cells + j] = hidden ? 0xfc00 : kvant_half_from_float(bias);
        }
}

static fixture make_fixture(setup s)
{
    uint64_t rng = 99;
    if (!s.n_streams)
        s.n_streams = 1;
    fixture f = { .s = s };
    f.k = make_cells(&s, s.k_spec, s.k_dim, KVANT_ROLE_K, f.k_codecs, &f.k_memory);
    f.v = make_cells(&s, s.v_spec, s.v_dim, KVANT_ROLE_V, f.v_codecs, &f.v_memory);
    fill_cells(&s, f.k, s.k_dim, &rng);
    fill_cells(&s, f.v, s.v_dim, &rng);
    f.q = malloc((size_t)s.n_tokens * s.n_heads * s.k_dim * sizeof(float));
    fill_normal(f.q, (size_t)s.n_tokens * s.n_heads * s.k_dim, &rng);
    f.out = malloc((size_t)s.n_tokens * s.n_heads * s.v_dim * sizeof(float));
    f.sinks = malloc(s.n_heads * sizeof(float));
    fill_normal(f.sinks, s.n_heads, &rng);
    if (s.mask)
        make_mask(&f, &rng);
    f.args = (kvant_attention_args){ .size = sizeof f.args,
                                     .k = f.k,
                                     .v = f.v,
                                     .stream = s.n_streams - 1,
                                     .fp32 = s.fp32,
                                     .n_cells = s.n_cells,
                                     .n_tokens = s.n_tokens,
                                     .n_heads = s.n_heads,
                                     .q = f.q,
                                     .q_token_stride = (size_t)s.n_heads * s.k_dim,
                                     .q_head_stride = s.k_dim,
                                     .mask = f.mask,
                                     .mask_token_stride = s.n_cells,
                                     .sinks = s.sinks ? f.sinks : NULL,
                                     .scale = 1 / sqrtf((float)s.k_dim),
                                     .logit_softcap = s.softcap,
                                     .max_bias = s.max_bias,
                                     .out = f.out,
                                     .out_token_stride = (size_t)s.n_heads * s.v_dim,
                                     .out_head_stride = s.v_dim,
                                     .n_threads = 2 };
    return f;
}

static void free_fixture(fixture *f)
{
    kvant_cells_free(&f->k);
    kvant_cells_free(&f->v);
    for (uint32_t h = 0; h < MAX_KV_HEADS; h++) {
        kvant_codec_free(&f->k_codecs[h]);
        kvant_codec_free(&f->v_codecs[h]);
    }
    free(f->k_memory);
    free(f->v_memory);
    free(f->q);
    free(f->out);
    free(f->sinks);
    free(f->mask);
}

static void run(fixture *f)
{
    size_t bytes = kvant_attention_workspace(&f->args);
    assert_true(bytes > 0);
    void *workspace = aligned(bytes);
    memset(workspace, 0xff, bytes); /* NaNs: reading what was not written shows */
    for (size_t i = 0; i < (size_t)f->s.n_tokens * f->s.n_heads * f->s.v_dim; i++)
        f->out[i] = NAN;
    assert_int_equal(kvant_attention(&f->args, workspace, bytes), KVANT_OK);
    free(workspace);
}

/* What bounds the error of an output row. */
typedef struct sizes {
    double magnitude; /* sum of |weight x value| over cells and channels */
    double spread;    /* sum of weight x |value - output|, Euclidean lengths */
    double peaks;     /* sum over pages of the page's largest weight */
    double longest;   /* value */
} sizes;

static double distance(const float *value, const double *out, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += pow(value[i] - (out ? out[i] : 0), 2);
    return sqrt(sum);
}

static sizes measure(const setup *s, const float *values, const double *weights, double total, const double *out)
{
    sizes m = { 0 };
    double peak = 0;
    for (uint32_t j = 0; j < s->n_cells && total > 0; j++) {
        const float *value = values + (size_t)j * s->n_kv_heads * s->v_dim;
        for (uint32_t i = 0; i < s->v_dim; i++)
            m.magnitude += weights[j] * fabs(value[i]) / total;
        m.spread += weights[j] * distance(value, out, s->v_dim) / total;
        m.longest = fmax(m.longest, distance(value, NULL, s->v_dim));
        peak = j % 64 ? fmax(peak, weights[j]) : weights[j];
        if (j % 64 == 63 || j + 1 == s->n_cells)
            m.peaks += peak / total;
    }
    return m;
}

/* One output row in double from the decoded cache. */
static void reference(const fixture *f, const float *keys, const float *values, uint32_t token, uint32_t head,
                      double *out, sizes *size)
{
    const setup *s = &f->s;
    uint32_t kv = head / (s->n_heads / s->n_kv_heads);
    const float *head_values = values + (size_t)kv * s->v_dim;
    double *weights = malloc(s->n_cells * sizeof *weights), *bias = calloc(s->n_cells, sizeof *bias);
    for (uint32_t j = 0; f->mask && j < s->n_cells; j++)
        bias[j] = reference_slope(s->n_heads, s->max_bias, head) *
                  kvant_half_to_float(f->mask[(size_t)token * s->n_cells + j]);
    const reference_row row = { .q = f->q + ((size_t)token * s->n_heads + head) * s->k_dim,
                                .keys = keys + (size_t)kv * s->k_dim,
                                .values = head_values,
                                .key_stride = (size_t)s->n_kv_heads * s->k_dim,
                                .value_stride = (size_t)s->n_kv_heads * s->v_dim,
                                .n_cells = s->n_cells,
                                .k_dim = s->k_dim,
                                .v_dim = s->v_dim,
                                .scale = f->args.scale,
                                .softcap = s->softcap,
                                .bias = bias,
                                .sink = s->sinks ? &f->sinks[head] : NULL };
    double total = reference_attention(&row, weights, out);
    *size = measure(s, head_values, weights, total, out);
    free(weights);
    free(bias);
}

/* Bound on |out - reference|: a score's error is at most about (k_dim + 20) 2^-24 of sum |q k| scale (dot product, rotation of
 * query and keys: log2 steps each, and a few products), which is at most |q| |k| scale; it multiplies a weight by its
 * exponential. The sum over values adds (cells in a split + 20) 2^-24. All relative to the sum of |weight value|.
 * With factors a query (an output) grows by up to the largest and keys (values) by up to 1 / the smallest in the space where
 * this happens, and rows less their centre, some mean of rows, are at most twice as long as the longest row. */
static double growth(const kvant_cells *cells, uint32_t width)
{
    kvant_affine affine = kvant_cells_affine(cells);
    float smallest = INFINITY, largest = 0;
    for (uint32_t j = 0; affine.scale && j < width; j++) {
        smallest = fminf(smallest, affine.scale[j]);
        largest = fmaxf(largest, affine.scale[j]);
    }
    return (affine.scale ? largest / smallest : 1) * (affine.center ? 2 : 1);
}

/* The largest |q| |k| scale, with growth. */
static double largest_score(const fixture *f, const float *keys)
{
    const setup *s = &f->s;
    double q = 0, k = 0;
    for (uint32_t t = 0; t < s->n_tokens * s->n_heads; t++)
        q = fmax(q, distance(f->q + (size_t)t * s->k_dim, NULL, s->k_dim));
    for (uint32_t t = 0; t < s->n_cells * s->n_kv_heads; t++)
        k = fmax(k, distance(keys + (size_t)t * s->k_dim, NULL, s->k_dim));
    return q * k * f->args.scale * growth(f->k, s->n_kv_heads * s->k_dim);
}

static double rounding(const fixture *f, double score, const sizes *size)
{
    const setup *s = &f->s;
    double sum = growth(f->v, s->n_kv_heads * s->v_dim) * (s->n_cells + s->v_dim + 40);
    return (2 * (s->k_dim + 20) * score + sum) * pow(2, -24) * size->magnitude;
}

/* Half a step of a codebook's integers, in a codebook for numbers of variance 1 whose largest is below 3; 0 for levels, which
 * are integers. */
static double value_error(const kvant_codec *codec)
{
    /* Chunks: some steps times the token's scale, which for triplets is |row| / sqrt(d) and for four channels at most |row| / the
     * largest radius; that is KVANT_CODE_VALUE_MAX / chunk.step. */
    const kvant_code_numbers *numbers = codec->product.integers.chunk;
    if (codec->view.kind == KVANT_CODES_CHUNK)
        return numbers->error * numbers->step *
               (numbers->chunk.step ? sqrt(codec->info.head_dim) * numbers->chunk.step / KVANT_CODE_VALUE_MAX : 1);
    for (uint32_t c = 0; codec->view.kind == KVANT_CODES_CODEBOOK && c < 16; c++)
        if (abs(codec->product.integers.values[c]) == KVANT_CODE_VALUE_MAX)
            return 3.0 / (2 * KVANT_CODE_VALUE_MAX);
    return 0;
}

/* Attention on codes (src/attention/codes.h) also rounds queries, weights and codebooks to integers.
 * Scores: each of a query's d integers is off by up to half a step, |q| / limit at most, uniformly; so a score has a standard
 * deviation below |q| |k| / (limit sqrt(12)), a codebook's errors one below |q| (|k| / sqrt(d)) value_error. Six of both together are
 * exceeded by one score in 5e8; a score that is off by e moves the output by e times its weight's share of spread.
 * Where lines are by column, integers are of q x scale: off by up to half of max |q scale| / limit, times a value of at most m. With b bits m is
 * 2^(b-1) and scale at most 2 max |k| / (2^b - 1), together below 4/3 max |k|, so that each channel adds 4/3 |q| |k| / limit where it
 * added its part of |k| before: sqrt(d) 4/3 times as much in all.
 * Weights: up to half a step, the page's largest weight x scale / limit, in each of 64 cells, each moving the output by a row of
 * values; those of a page are at most 4 times as long as each other in these tests, and twice as long as seen from a zero point.
 * A codebook's values are off by value_error (|v| / sqrt(d)) in each channel. |v| of unbiased scales exceeds the row's by less than 1.2. */
static double integers(const fixture *f, double score, const sizes *size)
{
    const setup *s = &f->s;
    const kvant_codec *k = f->k_codecs[0], *v = f->v_codecs[0];
    if (s->fp32)
        return 0;
    double error = 0, values = growth(f->v, s->n_kv_heads * s->v_dim) * size->longest;
    if (k->product.lines) {
        double channels = k->product.by_row ? 1 : sqrt(s->k_dim) * 4 / 3;
        error += 6 * score * (channels / (k->product.limit * sqrt(12)) + 1.2 * value_error(k) / sqrt(s->k_dim)) *
                 size->spread;
    }
    if (v->product.lines)
        error += (64.0 / 2 / v->product.limit * size->peaks * 4 * 2 + 1.2 * value_error(v)) * values;
    return error;
}

static void check(const fixture *f)
{
    const setup *s = &f->s;
    uint32_t first = (s->n_streams - 1) * s->n_cells;
    size_t k_width = (size_t)s->n_kv_heads * s->k_dim, v_width = (size_t)s->n_kv_heads * s->v_dim;
    float *keys = malloc(s->n_cells * k_width * sizeof *keys),
          *values = malloc(s->n_cells * v_width * sizeof *values);
    double *want = malloc(s->v_dim * sizeof *want), score;
    sizes size;
    assert_int_equal(kvant_cells_read(f->k, first, s->n_cells, keys, k_width), KVANT_OK);
    assert_int_equal(kvant_cells_read(f->v, first, s->n_cells, values, v_width), KVANT_OK);
    score = largest_score(f, keys);
    for (uint32_t t = 0; t < s->n_tokens; t++)
        for (uint32_t h = 0; h < s->n_heads; h++) {
            reference(f, keys, values, t, h, want, &size);
            double bound = rounding(f, score, &size) + integers(f, score, &size);
            for (uint32_t i = 0; i < s->v_dim; i++) {
                double got = f->out[((size_t)t * s->n_heads + h) * s->v_dim + i];
                if (!(fabs(got - want[i]) <= bound + 1e-30))
                    fail_msg("%s/%s %s token %u head %u channel %u: %.9g, not %.9g (bound %.3g)", s->k_spec,
                             s->v_spec, kvant_cpu_level_name(kvant_get_cpu_level()), t, h, i, got, want[i], bound);
            }
        }
    free(keys);
    free(values);
    free(want);
}

static void check_setup(setup s)
{
    fixture f = make_fixture(s);
    for (size_t i = 0; i < COUNT(cpu_levels); i++) {
        if (!use_level(cpu_levels[i]))
            continue;
        run(&f);
        check(&f);
    }
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    free_fixture(&f);
}

static void every_codec(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(all_specs); i++)
        check_setup((setup){ .k_dim = 64,
                             .v_dim = 64,
                             .n_kv_heads = 2,
                             .n_heads = 6,
                             .n_cells = 150,
                             .n_tokens = 3,
                             .k_spec = all_specs[i],
                             .v_spec = all_specs[COUNT(all_specs) - 1 - i],
                             .mask = true });
}

/* Without the errors of integers, of decoding and of many query rows, in every page. */
static void fp32_rounds_no_integers(void **state)
{
    static const char *const specs[] = { "turboquant-4", "int-4:axis=channel,group=64", "octopus-4", "int-8" };
    (void)state;
    for (size_t i = 0; i < COUNT(specs); i++)
        for (uint32_t n_tokens = 1; n_tokens < 60; n_tokens += 49)
            check_setup((setup){ .k_dim = 64,
                                 .v_dim = 64,
                                 .n_kv_heads = 1,
                                 .n_heads = 3,
                                 .n_cells = 150,
                                 .n_tokens = n_tokens,
                                 .k_spec = specs[i],
                                 .v_spec = specs[COUNT(specs) - 1 - i],
                                 .mask = true,
                                 .fp32 = true });
}

static void head_dims(void **state)
{
    static const uint32_t dims[] = { 16, 40, 64, 80, 96, 112, 128, 192, 256, 512 };
    (void)state;
    for (size_t i = 0; i < COUNT(dims); i++) {
        check_setup((setup){ .k_dim = dims[i],
                             .v_dim = dims[COUNT(dims) - 1 - i],
                             .n_kv_heads = 1,
                             .n_heads = 2,
                             .n_cells = 130,
                             .n_tokens = 2,
                             .k_spec = "turboquant-4",
                             .v_spec = "int-4" });
        check_setup((setup){ .k_dim = dims[i],
                             .v_dim = dims[i],
                             .n_kv_heads = 1,
                             .n_heads = 1,
                             .n_cells = 64,
                             .n_tokens = 1,
                             .k_spec = "int-3:axis=channel",
                             .v_spec = "turboquant-3" });
    }
}

static void features(void **state)
{
    (void)state;
    setup base = { .k_dim = 64,
                   .v_dim = 64,
                   .n_kv_heads = 2,
                   .n_heads = 6,
                   .n_cells = 200,
                   .n_tokens = 5,
                   .k_spec = "turboquant-4",
                   .v_spec = "int-8" };
    check_setup(base);
    base.mask = true;
    check_setup(base);
    base.softcap = 5;
    check_setup(base);
    base.max_bias = 8;
    check_setup(base);
    base.sinks = true;
    check_setup(base);
    base.affine = true;
    check_setup(base);
    base.n_streams = 3;
    check_setup(base);
    base.v_spec = "int-4:axis=channel"; /* 200 cells: the last page group stays open */
    check_setup(base);
}

/* Open and sealed pages in one call, under one rotated query and one sum, for every kv head its own rotation. */
static void windows(void **state)
{
    static const char *const specs[][2] = {
        { "turboquant-4:sink=4,recent=96", "int-4:axis=channel,recent=64,sink=64" },
        { "turboquant-4:center=first", "int-4:rotate=hadamard,center=first,recent=30" },
        { "int-4:axis=channel,norm=first,rotate=dense", "turboquant-3:norm=first,center=first" },
        { "bdr-4:norm=first", "bdr-4:recent=200" },
        { "octopus-4:center=first",
          "octopus-4:center=first" }, /* values in an order of their own, open pages too */
        { "hqmq-s96r4:recent=64", "hqmq-s96r4:sink=4,recent=96" },
        { "octopus-3:qjl,recent=64", "spherical-r4jl4:recent=64" },
    };
    (void)state;
    for (size_t i = 0; i < COUNT(specs); i++)
        for (int per_head = 0; per_head < 2; per_head++) {
            setup s = { .k_dim = 64,
                        .v_dim = 64,
                        .n_kv_heads = 3,
                        .n_heads = 6,
                        .n_cells = 500,
                        .n_tokens = 4,
                        .n_streams = 2,
                        .k_spec = specs[i][0],
                        .v_spec = specs[i][1],
                        .mask = true,
                        .codec_per_head = per_head };
            check_setup(s);
            s.softcap = 5;
            check_setup(s);
            s.n_cells = 40; /* fewer than a page: centre and factors still wait in a stream of this size */
            s.n_streams = 1;
            check_setup(s);
        }
}

static void long_decode_is_split_and_prefill_is_tiled(void **state)
{
    (void)state;
    check_setup((setup){ .k_dim = 64,
                         .v_dim = 64,
                         .n_kv_heads = 1,
                         .n_heads = 7,
                         .n_cells = 2500,
                         .n_tokens = 1,
                         .k_spec = "bdr-4",
                         .v_spec = "turboquant-3",
                         .mask = true,
                         .sinks = true });
    check_setup((setup){ .k_dim = 64,
                         .v_dim = 64,
                         .n_kv_heads = 3,
                         .n_heads = 9,
                         .n_cells = 300,
                         .n_tokens = 100,
                         .k_spec = "turboquant-4",
                         .v_spec = "turboquant-4",
                         .mask = true });
    check_setup((setup){ .k_dim = 32,
                         .v_dim = 32,
                         .n_kv_heads = 1,
                         .n_heads = 128,
                         .n_cells = 70,
                         .n_tokens = 2,
                         .k_spec = "int-4",
                         .v_spec = "int-4" });
}

/* Units of many rows on codes, whole ones and the last, smaller one; every width of codes, levels with zero points and codebooks. */
static void prefill_on_codes(void **state)
{
    static const char *const specs[] = { "turboquant-1", "turboquant-2", "turboquant-3", "turboquant-4",
                                         "bdr-4",        "int-2",        "int-3",        "int-4" };
    static const uint32_t dims[] = { 64, 80, 128, 192 };
    (void)state;
    for (size_t i = 0; i < COUNT(specs); i++)
        check_setup((setup){ .k_dim = dims[i % COUNT(dims)],
                             .v_dim = 64,
                             .n_kv_heads = 2,
                             .n_heads = 6,
                             .n_cells = 400,
                             .n_tokens = 9 + 13 * (uint32_t)i,
                             .k_spec = specs[i],
                             .v_spec = specs[COUNT(specs) - 1 - i],
                             .mask = i % 4 != 3,
                             .sinks = i % 3 == 1,
                             .softcap = i % 3 == 2 ? 4 : 0,
                             .max_bias = i % 4 == 1 ? 8 : 0 });
}

/* Every way in which scales may lie, for every width and head_dims whose last row group is not whole, in units of few rows and of
 * many. */
static void groupings_on_codes(void **state)
{
    static const char *const specs[] = {
        "int-4:axis=channel,group=64",
        "int-4:axis=channel,group=32,sym",
        "int-2:axis=channel,group=16,hybrid",
        "int-8:axis=channel,group=64",
        "int-4:group=32",
        "int-3:group=16,sym",
        "int-2:group=64,hybrid=code",
        "int-5:group=48",
        "int-6:group=96,sym",
        "int-7",
        "bdr-8:group=128",
        "int-8:group=32,sym",
        "int-4:group=24",
    };
    static const uint32_t dims[] = { 128, 80, 64, 112, 96, 192, 40 };
    (void)state;
    for (size_t i = 0; i < COUNT(specs) * COUNT(dims); i++) {
        const char *k = specs[i % COUNT(specs)], *v = specs[(i + 5) % COUNT(specs)];
        setup s = { .k_dim = dims[i % COUNT(dims)],
                    .v_dim = dims[(i + 3) % COUNT(dims)],
                    .n_kv_heads = 2,
                    .n_heads = 6,
                    .n_cells = 64 * 3 + (uint32_t)(i % 64),
                    .n_tokens = 1 + (uint32_t)(i % 2),
                    .k_spec = k,
                    .v_spec = v };
        check_setup(s);
        s.n_tokens = 5;
        s.mask = i % 2;
        s.softcap = i % 3 ? 0 : 4;
        check_setup(s);
    }
}

/* Codes of chunks, of every family, with tables and without; some of them (7 bits a coordinate, sketches, outliers) unpacked. */
static void chunks_on_codes(void **state)
{
    static const char *const specs[] = { "octopus-2",           "octopus-3",     "octopus-4",  "octopus-5",
                                         "octopus-4:split=7.1", "octopus-3:qjl", "hqmq-s24r3", "hqmq-s96r4",
                                         "hqmq-s96r4:med3",     "hqmq-s170r4",   "hqmq-s24r8", "hqmq-s192r6",
                                         "spherical-r4jl4",     "addvq-k24r3",   "addvq-k48r4" };
    static const uint32_t dims[] = { 64, 80, 128, 96, 112, 32, 256 };
    (void)state;
    for (size_t i = 0; i < COUNT(specs); i++)
        for (uint32_t n_tokens = 1; n_tokens <= 40; n_tokens += 13)
            check_setup((setup){ .k_dim = dims[(i + n_tokens) % COUNT(dims)],
                                 .v_dim = dims[(2 * i + n_tokens) % COUNT(dims)],
                                 .n_kv_heads = 2,
                                 .n_heads = 6,
                                 .n_cells = 200,
                                 .n_tokens = n_tokens,
                                 .k_spec = specs[i],
                                 .v_spec = specs[(i + n_tokens) % COUNT(specs)],
                                 .mask = i % 4 != 3 });
}

static void threads_do_not_change_results(void **state)
{
    (void)state;
    setup shapes[] = {
        { .k_dim = 64, .v_dim = 64, .n_kv_heads = 3, .n_heads = 9, .n_cells = 3000, .n_tokens = 1 },
        { .k_dim = 64, .v_dim = 64, .n_kv_heads = 3, .n_heads = 9, .n_cells = 700, .n_tokens = 200, .mask = true },
    };
    for (size_t i = 0; i < COUNT(shapes); i++) {
        shapes[i].k_spec = shapes[i].v_spec = "turboquant-4";
        fixture f = make_fixture(shapes[i]);
        size_t bytes = (size_t)f.s.n_tokens * f.s.n_heads * f.s.v_dim * sizeof(float);
        float *first = malloc(bytes);
        for (uint32_t n = 1; n <= 5; n++) {
            f.args.n_threads = n;
            run(&f);
            if (n == 1)
                memcpy(first, f.out, bytes);
            assert_memory_equal(first, f.out, bytes);
        }
        free(first);
        free_fixture(&f);
    }
}

static void hidden_rows_and_empty_caches_give_zeros(void **state)
{
    (void)state;
    fixture f = make_fixture((setup){ .k_dim = 64,
                                      .v_dim = 64,
                                      .n_kv_heads = 1,
                                      .n_heads = 2,
                                      .n_cells = 80,
                                      .n_tokens = 2,
                                      .k_spec = "int-4",
                                      .v_spec = "int-4",
                                      .mask = true });
    for (uint32_t j = 0; j < 80; j++)
        f.mask[80 + j] = 0xfc00;
    run(&f);
    for (uint32_t i = 0; i < 128; i++)
        assert_true(f.out[128 + i] == 0);
    check(&f);
    f.args.n_cells = 0;
    run(&f);
    for (uint32_t i = 0; i < 256; i++)
        assert_true(f.out[i] == 0);
    free_fixture(&f);
}

static void bad_arguments(void **state)
{
    (void)state;
    fixture f = make_fixture((setup){ .k_dim = 64,
                                      .v_dim = 64,
                                      .n_kv_heads = 2,
                                      .n_heads = 4,
                                      .n_cells = 80,
                                      .n_tokens = 2,
                                      .k_spec = "int-4",
                                      .v_spec = "int-4" });
    kvant_attention_args good = f.args;
    size_t bytes = kvant_attention_workspace(&good);
    void *workspace = aligned(bytes);
#define REFUSED(change)                                                                                            \
    do {                                                                                                           \
        f.args = good;                                                                                             \
        change;                                                                                                    \
        assert_int_equal(kvant_attention(&f.args, workspace, bytes), KVANT_ERR_ARGUMENT);                          \
    } while (0)
    REFUSED(f.args.size = 8);
    REFUSED(f.args.k = NULL);
    REFUSED(f.args.k = f.v);
    REFUSED(f.args.n_heads = 3);
    REFUSED(f.args.n_heads = 0);
    REFUSED(f.args.n_cells = 81);
    REFUSED(f.args.stream = 1);
    REFUSED(f.args.n_threads = 0);
    REFUSED(f.args.n_tokens = 0);
    REFUSED(f.args.q = NULL);
    REFUSED(f.args.out = NULL);
    f.args = good;
    assert_int_equal(kvant_attention(&f.args, workspace, bytes - 64), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(&f.args, NULL, bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_attention(NULL, workspace, bytes), KVANT_ERR_ARGUMENT);
    free(workspace);
    free_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_codec),
        cmocka_unit_test(fp32_rounds_no_integers),
        cmocka_unit_test(head_dims),
        cmocka_unit_test(features),
        cmocka_unit_test(windows),
        cmocka_unit_test(long_decode_is_split_and_prefill_is_tiled),
        cmocka_unit_test(prefill_on_codes),
        cmocka_unit_test(chunks_on_codes),
        cmocka_unit_test(groupings_on_codes),
        cmocka_unit_test(threads_do_not_change_results),
        cmocka_unit_test(hidden_rows_and_empty_caches_give_zeros),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
