/* test_cuda_learn.c - learning of key transforms on a GPU: results have the bits of the same code
 * on the CPU, and agree with the CPU's learning as far as sums in another order can. Triangles are
 * always valid, and their matrices have the CPU's bits. */
#include <math.h>

#include "../../src/base/half.h"
#include "../../src/kernels/kernels.h"
#include "cuda_support.h"
#include "learn/call.h"
#include "learn_reference.h"

#include <kvant/tensor_hooks.h>

enum { KV = 2, MOST_BATCH = 64, MOST_DIM = 256 };

/* What rows are like */
typedef enum rows_kind { PLAIN_ROWS, FEW_DIRECTIONS, SMALL_AND_LARGE, ZEROS, WITH_NAN } rows_kind;

typedef struct learn_case {
    uint32_t head_dim, group, n_rows, n_tokens, n_dims;
    kvant_cuda_type type;
    bool interleaved, knows_rope, block_centers, places;
    rows_kind kind;
} learn_case;

static const learn_case cases[] = {
    { 64, 3, 128, 64, 64, KVANT_CUDA_F32, false, true, true, false, PLAIN_ROWS },
    { 64, 1, 97, 64, 32, KVANT_CUDA_F16, true, true, true, true, PLAIN_ROWS },
    { 128, 4, 512, 256, 128, KVANT_CUDA_F16, false, true, true, true, PLAIN_ROWS },
    { 128, 2, 300, 128, 128, KVANT_CUDA_F32, true, true, false, false, SMALL_AND_LARGE },
    { 80, 2, 70, 64, 80, KVANT_CUDA_F32, false, true, true, false, PLAIN_ROWS },
    { 96, 1, 64, 0, 96, KVANT_CUDA_F16, false, true, true, false, PLAIN_ROWS },
    { 128, 2, 200, 64, 128, KVANT_CUDA_F32, false, false, false, false, FEW_DIRECTIONS },
    { 256, 2, 256, 64, 256, KVANT_CUDA_F16, false, true, true, true, PLAIN_ROWS },
    { 192, 1, 90, 64, 192, KVANT_CUDA_F32, false, true, true, false, PLAIN_ROWS },
    { 64, 2, 200, 64, 64, KVANT_CUDA_F32, false, true, true, false, WITH_NAN },
    { 64, 2, 64, 64, 64, KVANT_CUDA_F32, false, true, true, false, ZEROS },
    { 64, 2, 9, 64, 64, KVANT_CUDA_F32, false, true, true, false, PLAIN_ROWS },
    { 30, 2, 80, 64, 30, KVANT_CUDA_F32, false, true, true, false, FEW_DIRECTIONS },
};

/* Arrays of a problem in the computer's memory (own), and the arguments of a call. */
typedef struct problem {
    const learn_case *c;
    float *rows;
    void *typed;
    size_t typed_bytes, n_all;
    float *queries[KVANT_CUDA_LEARN_BATCHES];
    uint32_t places[512];
    int32_t positions[512], query_positions[4 * MOST_BATCH];
    float frequencies[MOST_DIM / 2];
    kvant_rope rope;
    uint32_t knows_rope;
    size_t halves, width;
    kvant_cuda_learn_args args;
} problem;

/* A row: mixed normal numbers, as channels of keys depend on one another, about a mean. */
static void fill_row(const learn_case *c, uint32_t i, uint32_t head, float *x)
{
    const uint32_t d = c->head_dim;
    for (uint32_t j = 0; j < d; j++) {
        const float size = c->kind == SMALL_AND_LARGE ? expf(-12.0f * (float)(j % 17) / 16) : 1;
        x[j] = c->kind == ZEROS ? 0 : random_normal() * size;
    }
    for (uint32_t j = 1; j < d && c->kind != ZEROS; j++)
        x[j] =
            c->kind == FEW_DIRECTIONS && j >= 7 ? x[j % 7] * 0.5f : 0.7f * x[j] + 0.5f * x[j - 1];
    for (uint32_t j = 0; j < d && c->kind != ZEROS; j += 5)
        x[j] += 2 * (float)(head + 1);
    if (c->kind == WITH_NAN && i % 9 == 4)
        x[i % d] = i % 2 ? NAN : INFINITY;
}

static void fill_positions(int32_t *positions, uint32_t n, uint32_t step)
{
    for (uint32_t i = 0; i < n; i++)
        positions[i] = i % 31 == 30 ? -1 : (int32_t)(i * step);
}

static void make_rows(problem *p)
{
    const learn_case *c = p->c;
    p->n_all = c->places ? c->n_rows * 2 + 3 : c->n_rows;
    p->rows = malloc(p->n_all * p->width * sizeof *p->rows);
    for (uint32_t i = 0; i < p->n_all; i++)
        for (uint32_t head = 0; head < KV; head++)
            fill_row(c, i, head, p->rows + i * p->width + head * c->head_dim);
    p->typed = to_type(p->rows, p->n_all * p->width, c->type, &p->typed_bytes);
    for (uint32_t i = 0; i < c->n_rows; i++)
        p->places[i] = 2 * i + i % 3;
    fill_positions(p->positions, c->n_rows, 2);
    fill_positions(p->query_positions, c->n_tokens, 5);
    for (uint32_t batch = 0; batch * MOST_BATCH < c->n_tokens; batch++) {
        const size_t n = (size_t)MOST_BATCH * c->group * p->width;
        p->queries[batch] = malloc(n * sizeof **p->queries);
        for (size_t at = 0; at < n; at += c->head_dim)
            fill_row(c, (uint32_t)(at / c->head_dim), 0, p->queries[batch] + at);
    }
}

static void problem_new(problem *p, const learn_case *c)
{
    memset(p, 0, sizeof *p);
    p->c = c;
    p->width = (size_t)KV * c->head_dim;
    make_rows(p);
    for (uint32_t i = 0; i < c->n_dims / 2; i++)
        p->frequencies[i] = expf(-9.2f * (float)i / (float)(c->n_dims / 2));
    p->rope = (kvant_rope){ .size = sizeof p->rope,
                            .n_dims = c->n_dims,
                            .interleaved = c->interleaved,
                            .frequencies = p->frequencies,
                            .n_positions = 3072,
                            .n_position_transforms = 1,
                            .block_centers = c->block_centers };
    p->args = (kvant_cuda_learn_args){ .size = sizeof p->args,
                                       .head_dim = c->head_dim,
                                       .n_kv_heads = KV,
                                       .group = c->group,
                                       .type = c->type,
                                       .n_rows = c->n_rows,
                                       .n_tokens = c->n_tokens,
                                       .batch_tokens = MOST_BATCH,
                                       .token_stride = p->width,
                                       .head_stride = c->head_dim,
                                       .query_stride = c->group * p->width };
    assert_int_equal(
        kvant_cuda_learn_plan(c->knows_rope ? &p->rope : NULL, &p->args, &p->knows_rope), KVANT_OK);
    assert_int_equal(p->knows_rope, c->knows_rope);
    if (c->knows_rope) {
        assert_int_equal(kvant_cuda_learn_span_add(&p->args, 2048, 8191), KVANT_OK);
        assert_int_equal(kvant_cuda_learn_span_add(&p->args, 131072, 262143), KVANT_OK);
    }
    p->halves = kvant_cuda_triangle_halves(c->head_dim, KV);
}

static void problem_free(problem *p)
{
    free(p->rows);
    free(p->typed);
    for (uint32_t i = 0; i < KVANT_CUDA_LEARN_BATCHES; i++)
        free(p->queries[i]);
}

typedef struct results {
    uint16_t *triangles;
    float *centers, *start;
} results;

static results results_new(const problem *p)
{
    const uint32_t n = p->args.n_transforms;
    return (results){ calloc(n * p->halves, sizeof(uint16_t)), calloc(n * p->width, sizeof(float)),
                      calloc(p->width, sizeof(float)) };
}

static void results_free(results *r)
{
    free(r->triangles);
    free(r->centers);
    free(r->start);
}

/* The CPU's results. */
static void learn_here(const problem *p, results *r)
{
    kvant_cuda_learn_args args = p->args;
    args.rows = p->typed;
    args.places = p->c->places ? p->places : NULL;
    args.positions = p->c->knows_rope ? p->positions : NULL;
    args.query_positions = p->c->knows_rope ? p->query_positions : NULL;
    for (uint32_t i = 0; i < KVANT_CUDA_LEARN_BATCHES; i++)
        args.queries[i] = p->queries[i];
    args.triangles = r->triangles;
    args.centers = r->centers;
    args.start = r->start;
    args.workspace_bytes = kvant_cuda_learn_bytes(&args);
    args.workspace = aligned_alloc(256, args.workspace_bytes);
    memset(args.workspace, 0xff, args.workspace_bytes);
    learn_reference(&args);
    free(args.workspace);
}

static kvant_cuda_learn_args on_device(const problem *p)
{
    kvant_cuda_learn_args args = p->args;
    const uint32_t n = args.n_transforms;
    args.rows = device_copy(p->typed, p->typed_bytes);
    args.places = p->c->places ? device_copy(p->places, sizeof p->places) : NULL;
    args.positions = p->c->knows_rope ? device_copy(p->positions, sizeof p->positions) : NULL;
    args.query_positions =
        p->c->knows_rope ? device_copy(p->query_positions, sizeof p->query_positions) : NULL;
    for (uint32_t i = 0; i < KVANT_CUDA_LEARN_BATCHES && p->queries[i]; i++)
        args.queries[i] = device_copy(p->queries[i], (size_t)MOST_BATCH * p->args.group * p->width *
                                                         sizeof(float));
    args.triangles = device_new(n * p->halves * sizeof(uint16_t), 0);
    args.centers = device_new(n * p->width * sizeof(float), 0xff);
    args.start = device_new(p->width * sizeof(float), 0xff);
    args.workspace_bytes = kvant_cuda_learn_bytes(&args);
    args.workspace = device_new(args.workspace_bytes, 0xff);
    return args;
}

static void device_done(const kvant_cuda_learn_args *args)
{
    device_free(args->rows);
    device_free(args->places);
    device_free(args->positions);
    device_free(args->query_positions);
    for (uint32_t i = 0; i < KVANT_CUDA_LEARN_BATCHES; i++)
        device_free(args->queries[i]);
    device_free(args->triangles);
    device_free(args->centers);
    device_free(args->start);
    device_free(args->workspace);
}

static void read_results(const problem *p, const kvant_cuda_learn_args *args, results *r)
{
    const uint32_t n = args->n_transforms;
    device_read(r->triangles, args->triangles, n * p->halves * sizeof(uint16_t));
    device_read(r->centers, args->centers, n * p->width * sizeof(float));
    device_read(r->start, args->start, p->width * sizeof(float));
}

static bool is_identity(const uint16_t *triangle, uint32_t n)
{
    bool same = true;
    for (uint32_t i = 0; i < n; i++)
        same = same && triangle[i] == 0 && triangle[n + i] == 0x3c00;
    return same;
}

static void check_bits(const learn_case *c)
{
    problem p;
    problem_new(&p, c);
    results want = results_new(&p), got = results_new(&p);
    const kvant_cuda_learn_args args = on_device(&p);
    learn_here(&p, &want);
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_OK);
    read_results(&p, &args, &got);
    assert_memory_equal(got.centers, want.centers, args.n_transforms * p.width * sizeof(float));
    assert_memory_equal(got.start, want.start, p.width * sizeof(float));
    assert_memory_equal(got.triangles, want.triangles,
                        args.n_transforms * p.halves * sizeof(uint16_t));
    assert_int_equal(is_identity(got.triangles, args.part),
                     c->kind == ZEROS || c->n_rows < KVANT_CUDA_LEARN_LEAST);
    device_done(&args);
    results_free(&want);
    results_free(&got);
    problem_free(&p);
}

/* Layers of one call have the bits of calls of their own. A layer has the rows of the layer before
 * it without the first row. */
static void check_layers(const learn_case *c)
{
    enum { LAYERS = 3 };
    problem p;
    kvant_cuda_learn_layer layers[LAYERS];
    kvant_cuda_learn_args on[LAYERS];
    problem_new(&p, c);
    const size_t row = p.typed_bytes / p.n_all;
    for (int i = 0; i < LAYERS; i++) {
        if (i > 0)
            memmove(p.typed, (char *)p.typed + row, p.typed_bytes - row);
        on[i] = on_device(&p);
        assert_int_equal(kvant_cuda_learn(&on[i], NULL), KVANT_OK);
        layers[i] = (kvant_cuda_learn_layer){
            .rows = on[i].rows,
            .triangles = device_new(p.args.n_transforms * p.halves * 2, 0),
            .centers = device_new(p.args.n_transforms * p.width * sizeof(float), 0),
            .start = device_new(p.width * sizeof(float), 0)
        };
        memcpy(layers[i].queries, on[i].queries, sizeof layers[i].queries);
    }
    kvant_cuda_learn_args args = on[0];
    args.rows = args.triangles = NULL;
    args.centers = args.start = NULL;
    args.n_layers = LAYERS;
    args.layers = device_copy(layers, sizeof layers);
    args.workspace_bytes = kvant_cuda_learn_bytes(&args);
    args.workspace = device_new(args.workspace_bytes, 0xff);
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_OK);
    for (int i = 0; i < LAYERS; i++) {
        results want = results_new(&p), got = results_new(&p);
        kvant_cuda_learn_args of = on[i];
        read_results(&p, &of, &want);
        of.triangles = layers[i].triangles;
        of.centers = layers[i].centers;
        of.start = layers[i].start;
        read_results(&p, &of, &got);
        assert_memory_equal(got.centers, want.centers, args.n_transforms * p.width * sizeof(float));
        assert_memory_equal(got.start, want.start, p.width * sizeof(float));
        assert_memory_equal(got.triangles, want.triangles, args.n_transforms * p.halves * 2);
        assert_false(is_identity(got.triangles, args.part));
        results_free(&want);
        results_free(&got);
        device_free(of.triangles);
        device_free(of.centers);
        device_free(of.start);
        device_done(&on[i]);
    }
    device_free(args.layers);
    device_free(args.workspace);
    problem_free(&p);
}

/* Transforms as a CPU learns them */

static void open_tensor(const problem *p, kvant_codec **codec, void **memory, kvant_tensor **tensor)
{
    const kvant_codec *codecs[KV];
    size_t bytes;
    assert_int_equal(kvant_codec_create("int-8:transform=first,rotate=none,sink=0", p->c->head_dim,
                                        KVANT_ROLE_K, 0, codec, NULL, 0),
                     KVANT_OK);
    for (uint32_t head = 0; head < KV; head++)
        codecs[head] = *codec;
    const kvant_tensor_params params = {
        .size = sizeof params, .codecs = codecs, .n_kv_heads = KV, .n_sequences = 1, .n_blocks = 4
    };
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    memset(*memory, 0, bytes);
    assert_int_equal(kvant_tensor_create(&params, *memory, tensor), KVANT_OK);
}

/* The number in row i, column j of a triangle. */
static double number_at(const uint16_t *triangle, uint32_t n, uint32_t i, uint32_t j)
{
    return i == j ? (double)kvant_half_to_float(triangle[n + i])
                  : (double)learn_number(triangle, (int)n, (int)i, (int)j);
}

/* Sums have another order, so numbers on the edge between two codes may get either. */
static void compare(const uint16_t *got, const uint16_t *want, uint32_t n)
{
    uint32_t other = 0;
    for (uint32_t i = 0; i < n; i++) {
        const double step = kvant_half_to_float(want[i]), diagonal = number_at(want, n, i, i);
        assert_true(fabs(number_at(got, n, i, i) - diagonal) <= diagonal * 0x1p-8);
        for (uint32_t j = 0; j < i; j++) {
            const double error = fabs(number_at(got, n, i, j) - number_at(want, n, i, j));
            assert_true(error <= 1.05 * step);
            other += error > 0.5 * step;
        }
    }
    assert_true(other <= n * n / 200);
}

/* Matrices */

static void check_matrices(const learn_case *c, const char *spec)
{
    problem p;
    kvant_codec *codec, *like, *made[KV];
    const kvant_codec *likes[KV];
    kvant_cuda_codec *on_gpu;
    void *memory;
    kvant_tensor *tensor;
    problem_new(&p, c);
    const size_t size = (size_t)c->head_dim * c->head_dim * KV;
    results r = results_new(&p);
    learn_here(&p, &r);
    open_tensor(&p, &codec, &memory, &tensor);
    void *bytes = malloc(kvant_tensor_transform_size(tensor));
    const kvant_matrix_numbers numbers = { r.centers, r.triangles,
                                           c->block_centers ? r.start : NULL, &p.rope };
    const size_t n_bytes = kvant_tensor_matrix_transform(tensor, &numbers, bytes);
    assert_int_equal(n_bytes, kvant_tensor_transform_bytes(tensor, bytes));
    assert_int_equal(kvant_tensor_set_transform(tensor, 0, bytes, 1), KVANT_OK);
    assert_int_equal(kvant_codec_create(spec, c->head_dim, KVANT_ROLE_K, 0, &like, NULL, 0),
                     KVANT_OK);
    likes[0] = likes[1] = like;
    assert_int_equal(kvant_tensor_mean_codecs(tensor, 0, likes, 1, made), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_from(like, &on_gpu, NULL, 0), KVANT_OK);
    const kvant_cuda_compact_args compact = {
        .size = sizeof compact,
        .head_dim = c->head_dim,
        .n_kv_heads = KV,
        .triangles = device_copy(r.triangles, p.halves * sizeof(uint16_t)),
        .compact = device_new(kvant_cuda_compact_bytes(c->head_dim, KV), 0xff)
    };
    const kvant_cuda_expand_args args = { .size = sizeof args,
                                          .codec = on_gpu,
                                          .n_kv_heads = KV,
                                          .compact = compact.compact,
                                          .key_transform = device_new(size * sizeof(float), 0xff) };
    assert_int_equal(kvant_cuda_compact(&compact, NULL), KVANT_OK);
    assert_int_equal(kvant_cuda_expand(&args, NULL), KVANT_OK);
    float *got = malloc(size * sizeof *got);
    device_read(got, args.key_transform, size * sizeof *got);
    for (uint32_t head = 0; head < KV; head++) {
        kvant_cuda_tables tables = { .size = sizeof tables };
        kvant_cuda_codec_tables(made[head], &tables);
        assert_memory_equal(got + head * size / KV, tables.key_transform, size / KV * sizeof *got);
    }
    free(got);
    device_free(compact.triangles);
    device_free(compact.compact);
    device_free(args.key_transform);
    kvant_cuda_codec_free(&on_gpu);
    for (uint32_t head = 0; head < KV; head++)
        kvant_codec_free(&made[head]);
    kvant_codec_free(&like);
    free(bytes);
    kvant_tensor_free(&tensor);
    kvant_codec_free(&codec);
    free(memory);
    results_free(&r);
    problem_free(&p);
}

/* A factor of the mean */

static double difference(int n, const double *a, const double *b)
{
    double error = 0, size = 0;
    for (int i = 0; i < n; i++)
        for (int j = i; j < n; j++) {
            error += (a[i * n + j] - b[i * n + j]) * (a[i * n + j] - b[i * n + j]);
            size += b[i * n + j] * b[i * n + j];
        }
    return sqrt(error / size);
}

/* A positive definite matrix, whose eigenvalues span about `span`. */
static void make_matrix(int n, double span, double *m)
{
    double *x = malloc((size_t)(2 * n * n) * sizeof *x);
    for (int i = 0; i < 2 * n * n; i++)
        x[i] = random_normal() * pow(span, -0.5 * (i % n) / n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int k = 0; k < 2 * n; k++)
                sum += x[k * n + i] * x[k * n + j];
            m[i * n + j] = sum / (2 * n);
        }
    free(x);
}

/* Both use the same approximation of a square root, so they differ by roundings. Eigenvalues of a
 * and of b span `span` each, and roundings of the root of a matrix whose eigenvalues span span^2
 * are enlarged by its condition: span^2 2^-53 in all, and n sums. */
CASE(factors_of_means_are_those_of_kernels)
{
    static const int dims[] = { 2, 6, 30, 64, 80, 127, 128 };
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        const double span = i % 2 ? 1e5 : 10;
        const int n = dims[i];
        double *a = malloc((size_t)n * (size_t)n * sizeof *a),
               *b = malloc((size_t)n * (size_t)n * sizeof *b),
               *work = malloc(kvant_learn_matrices((uint32_t)n) * sizeof *work),
               *kernel_room = malloc(KVANT_MEAN_ROOM((size_t)n) * sizeof *kernel_room);
        learn_shared shared;
        learn_tile w;
        const learn_space s = { &shared, work, work + n * n, work + 2 * n * n, work + 3 * n * n };
        make_matrix(n, span, a);
        make_matrix(n, span, b);
        memcpy(s.keys, a, (size_t)(n * n) * sizeof *a);
        memcpy(s.queries, b, (size_t)(n * n) * sizeof *b);
        const double trace = learn_mean_factor(n, &s, &w),
                     want = kvant_kernels_get(KVANT_CPU_AUTO)
                                ->mean_factor((size_t)n, a, b, kernel_room);
        tile_store(n, &w, s.other);
        print_message("n %d: trace %g, W %g\n", n, fabs(trace / want - 1),
                      difference(n, s.other, b));
        assert_true(fabs(trace / want - 1) < 1e-10);
        assert_true(difference(n, s.other, b) < n * span * span * 0x1p-53);
        free(a);
        free(b);
        free(work);
        free(kernel_room);
    }
}

CASE(results_have_the_bits_of_a_cpu)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        print_message("head_dim %u, %u keys, %u query tokens\n", cases[i].head_dim, cases[i].n_rows,
                      cases[i].n_tokens);
        check_bits(&cases[i]);
    }
}

CASE(layers_learn_together)
{
    check_layers(&cases[1]);
    check_layers(&cases[7]); /* heads of several parts, which are balanced */
}

CASE(transforms_are_those_of_a_cpu)
{
    static const learn_case c = { 64,    3,    128,  64,    64,        KVANT_CUDA_F32,
                                  false, true, true, false, PLAIN_ROWS };
    problem p;
    kvant_codec *codec;
    void *memory;
    kvant_tensor *tensor;
    int64_t slots[128];
    size_t used;
    problem_new(&p, &c);
    for (uint32_t i = 0; i < c.n_rows; i++) {
        slots[i] = 64 + i;
        p.positions[i] = (int32_t)(2 * i);
    }
    results r = results_new(&p);
    learn_here(&p, &r);
    open_tensor(&p, &codec, &memory, &tensor);
    assert_int_equal(kvant_tensor_set_rope(tensor, &p.rope), KVANT_OK);
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = p.queries[0],
                                    .token_stride = c.group * p.width,
                                    .head_stride = c.head_dim,
                                    .n_tokens = MOST_BATCH,
                                    .n_heads = KV * c.group,
                                    .positions = p.query_positions };
    assert_int_equal(kvant_tensor_note_queries(tensor, &queries, 1), KVANT_OK);
    kvant_tensor_next_positions(tensor, p.positions, c.n_rows);
    assert_int_equal(kvant_tensor_write(tensor, slots, c.n_rows, p.rows, p.width, 1), KVANT_OK);
    char *bytes = malloc(kvant_tensor_transform_size(tensor));
    assert_int_equal(kvant_tensor_get_transform(tensor, 1, bytes, &used), KVANT_OK);
    const uint16_t *triangles = (const uint16_t *)(const void *)(bytes + KVANT_TRANSFORM_HEAD +
                                                                 2 * p.width * sizeof(float));
    const float *center = (const float *)(const void *)(bytes + KVANT_TRANSFORM_HEAD);
    for (uint32_t head = 0; head < KV; head++)
        compare(r.triangles + head * p.halves / KV, triangles + head * p.halves / KV, c.head_dim);
    for (uint32_t i = 0; i < p.width; i++)
        assert_true(fabsf(center[i] - r.centers[i]) < 1e-4f);
    free(bytes);
    kvant_tensor_free(&tensor);
    kvant_codec_free(&codec);
    free(memory);
    results_free(&r);
    problem_free(&p);
}

/* Records take every triangle, also of rows from which nothing can be learned. */
CASE(matrices_have_the_bits_of_a_cpu)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (cases[i].head_dim % 8 == 0)
            check_matrices(&cases[i], "int-4:rotate=hadamard");
    check_matrices(&cases[0], "int-4:rotate=none");
}

CASE(wrong_arguments_are_refused)
{
    problem p;
    uint32_t knows;
    problem_new(&p, &cases[0]);
    const kvant_cuda_learn_args good = on_device(&p);
    kvant_cuda_learn_args args = good;
    args.rows = NULL;
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.workspace_bytes--;
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.start = NULL;
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.size = 8;
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.n_layers = 1; /* without layers */
    assert_int_equal(kvant_cuda_learn(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.head_dim = 31;
    assert_int_equal(kvant_cuda_learn_plan(&p.rope, &args, &knows), KVANT_ERR_UNSUPPORTED);
    args = good;
    while (args.n_transforms < KVANT_CUDA_LEARN_TRANSFORMS)
        assert_int_equal(kvant_cuda_learn_span_add(&args, 0, 10), KVANT_OK);
    assert_int_equal(kvant_cuda_learn_span_add(&args, 0, 10), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cuda_learn_span_add(&args, 5, 4), KVANT_ERR_ARGUMENT);
    device_done(&good);
    problem_free(&p);
}

RUN_CASES_ON_GPU(NULL, NULL)
