/* test_compact.c - matrices of keys in their compact form: keys and queries that go through it, and
 * the matrices that are made from it. Queries and matrices are compared with numbers that are
 * computed in binary64 from the triangles. Keys are compared with rows that a CPU transformed. */
#include <math.h>

#include "../../src/base/alloc.h"
#include "../../src/codec/codec_internal.h"
#include "../../src/cache/key_transform.h"
#include "../../src/math/compact.h"
#include "../../src/math/triangle.h"
#include "cuda_support.h"

enum { KV_HEADS = 3, GROUP = 5, HEADS = KV_HEADS * GROUP, TOKENS = 360, MOST_DIM = 256 };

typedef struct problem {
    uint32_t d, n; /* n: channels of a part */
    kvant_codec *codec;
    kvant_cuda_codec *gpu, *open;
    uint16_t *triangles; /* of all kv heads */
    double *w, *inverse; /* W and W^-T by kv head: row i is the image of channel i */
    float *matrices;     /* R W of all kv heads, then R W^-T */
    float *gpu_matrices; /* the same */
    void *compact;       /* on the device */
    float *room;         /* on the device: for matrices */
} problem;

static double number_of(const uint16_t *triangle, uint32_t n, uint32_t i, uint32_t j)
{
    const uint8_t byte = kvant_triangle_codes(triangle, n, i)[j / 2];
    const int bits = j % 2 ? byte >> 4 : byte & 15;
    return i == j ? (double)kvant_half_to_float(triangle[n + i])
                  : (double)kvant_half_to_float(triangle[i]) * (bits > 7 ? bits - 16 : bits);
}

/* Random triangles; their inverses are some ten times as large as they are. */
static void fill_triangles(problem *p)
{
    const size_t size = kvant_triangle_size(p->n);
    for (uint32_t part = 0; part < KV_HEADS * (p->d / p->n); part++)
        for (uint32_t i = 0; i < p->n; i++) {
            float row[MOST_DIM];
            for (uint32_t j = 0; j < i; j++)
                row[j] = random_normal() * 0.8f / sqrtf((float)p->n);
            row[i] = random_uniform(0.4f, 2);
            kvant_triangle_set_row(p->triangles + part * size, p->n, i, row);
        }
}

/* Reads the triangle of a part, and inverts it, in binary64. */
static void read_part(const problem *p, uint32_t head, uint32_t part)
{
    const uint32_t d = p->d, n = p->n;
    const uint16_t *triangle = p->triangles + (head * (d / n) + part) * kvant_triangle_size(n);
    for (uint32_t j = 0; j < n; j++) {
        double z[MOST_DIM];
        const size_t row = ((size_t)head * d + kvant_part_channel(d, n, part, j)) * d;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t channel = kvant_part_channel(d, n, part, i);
            z[i] = i == j;
            for (uint32_t k = j; k < i; k++)
                z[i] -= number_of(triangle, n, i, k) * z[k];
            z[i] = i < j ? 0 : z[i] / number_of(triangle, n, i, i);
            p->inverse[row + channel] = z[i];
            /* row j of the triangle is column j of W */
            p->w[row + channel] = i <= j ? number_of(triangle, n, j, i) : 0;
        }
    }
}

static void make_matrices(problem *p)
{
    const size_t size = (size_t)p->d * p->d;
    for (uint32_t head = 0; head < KV_HEADS; head++) {
        for (uint32_t part = 0; part < p->d / p->n; part++)
            read_part(p, head, part);
        kvant_transform t = p->codec->transform;
        assert_int_equal(
            kvant_transform_set_matrix(&t, p->w + head * size, p->inverse + head * size), KVANT_OK);
        memcpy(p->matrices + head * size, t.key_transform, size * sizeof *p->matrices);
        memcpy(p->matrices + (KV_HEADS + head) * size, t.key_transform + size,
               size * sizeof *p->matrices);
        if (head > 0)
            kvant_free(t.key_transform);
        else
            p->codec->transform = t; /* so that the codec has a full matrix */
    }
    kvant_codec_complete_view(p->codec);
}

/* Layers of one call have the bytes of calls of their own. The second layer begins with the second
 * kv head. */
static void compare_layers(const kvant_cuda_compact_args *all)
{
    enum { LAYERS = 2 };
    const size_t bytes = kvant_cuda_compact_bytes(all->head_dim, KV_HEADS - 1),
                 halves = kvant_cuda_triangle_halves(all->head_dim, 1);
    kvant_cuda_compact_args args = *all;
    kvant_cuda_compact_layer layers[LAYERS];
    char *want[LAYERS], *got = malloc(bytes);
    args.n_kv_heads = KV_HEADS - 1;
    for (int i = 0; i < LAYERS; i++) {
        args.triangles = all->triangles + (size_t)i * halves;
        args.compact = device_new(bytes, 0xff);
        assert_int_equal(kvant_cuda_compact(&args, NULL), KVANT_OK);
        want[i] = malloc(bytes);
        device_read(want[i], args.compact, bytes);
        device_free(args.compact);
        layers[i] = (kvant_cuda_compact_layer){ args.triangles, device_new(bytes, 0xff) };
    }
    args.triangles = NULL;
    args.compact = NULL;
    args.n_layers = LAYERS;
    assert_int_equal(kvant_cuda_compact(&args, NULL), KVANT_ERR_ARGUMENT);
    args.layers = device_copy(layers, sizeof layers);
    assert_int_equal(kvant_cuda_compact(&args, NULL), KVANT_OK);
    for (int i = 0; i < LAYERS; i++) {
        device_read(got, layers[i].compact, bytes);
        assert_memory_equal(got, want[i], bytes);
        device_free(layers[i].compact);
        free(want[i]);
    }
    device_free(args.layers);
    free(got);
}

static void problem_open(problem *p, const char *spec, uint32_t d)
{
    const size_t numbers = (size_t)KV_HEADS * d * d;
    char text[256] = "";
    *p = (problem){ .d = d, .n = kvant_key_transform_part(d) };
    const size_t halves = KV_HEADS * (d / p->n) * kvant_triangle_size(p->n);
    assert_int_equal(kvant_codec_create(spec, d, KVANT_ROLE_K, 7, &p->codec, text, sizeof text),
                     KVANT_OK);
    p->triangles = calloc(halves + KVANT_TRIANGLE_PADDING, sizeof *p->triangles);
    p->w = calloc(2 * numbers, sizeof *p->w);
    p->inverse = p->w + numbers;
    p->matrices = malloc(2 * numbers * sizeof *p->matrices);
    fill_triangles(p);
    /* the copy of the codec before it has a matrix has the rotation */
    make_matrices(p);
    if (kvant_cuda_codec_from(p->codec, &p->gpu, text, sizeof text) != KVANT_OK)
        fail_msg("%s, head_dim %u: %s", spec, d, text);
    assert_int_equal(kvant_cuda_codec_create_open(p->gpu, &p->open), KVANT_OK);
    p->gpu_matrices = device_copy(p->matrices, 2 * numbers * sizeof *p->matrices);
    p->room = device_new(2 * numbers * sizeof *p->room, 0xff);
    p->compact = device_new(kvant_cuda_compact_bytes(d, KV_HEADS), 0xff);
    uint16_t *triangles = device_copy(p->triangles, halves * sizeof *triangles);
    const kvant_cuda_compact_args args = { .size = sizeof args,
                                           .head_dim = d,
                                           .n_kv_heads = KV_HEADS,
                                           .triangles = triangles,
                                           .compact = p->compact };
    assert_int_equal(kvant_cuda_compact(&args, NULL), KVANT_OK);
    compare_layers(&args);
    device_free(triangles);
}

static void problem_close(problem *p)
{
    kvant_cuda_codec_free(&p->open);
    kvant_cuda_codec_free(&p->gpu);
    kvant_codec_free(&p->codec);
    device_free(p->gpu_matrices);
    device_free(p->room);
    device_free(p->compact);
    free(p->triangles);
    free(p->w);
    free(p->matrices);
}

/* ---- matrices ---- */

static float *random_numbers(size_t n)
{
    float *numbers = malloc(n * sizeof *numbers);
    for (size_t i = 0; i < n; i++)
        numbers[i] = random_normal();
    return numbers;
}

/* Compares R W c with a sum in double precision. */
static void check_key_center(const problem *p, const float *center, const float *got)
{
    for (size_t i = 0; i < KV_HEADS * p->d; i++) {
        const float *matrix = p->matrices + i / p->d * p->d * p->d + i % p->d;
        double sum = 0, size = 0;
        for (size_t j = 0; j < p->d; j++) {
            const double product = (double)matrix[j * p->d] * (double)center[i / p->d * p->d + j];
            sum += product;
            size += fabs(product);
        }
        /* numbers of W are sums of binary32, and so are those of the rotation */
        if (!(fabs((double)got[i] - sum) <= 1e-5 * size * sqrt(p->d)))
            fail_msg("head_dim %u, centre %zu: %g, not %g", p->d, i, (double)got[i], sum);
    }
}

/* The places of a layer's centres are in a row: two copies of its centre, one of the start, and
 * R W c. */
static void check_places(const problem *p, const float *centers, const float *places)
{
    const size_t width = KV_HEADS * p->d;
    float *got = malloc(4 * width * sizeof *got);
    device_read(got, places, 4 * width * sizeof *got);
    assert_memory_equal(got, centers, width * sizeof *got);
    assert_memory_equal(got + width, centers, width * sizeof *got);
    assert_memory_equal(got + 2 * width, centers + width, width * sizeof *got);
    check_key_center(p, centers, got + 3 * width);
    free(got);
}

/* The second of three layers wants R W c alone. */
static void compare_centers(const problem *p)
{
    enum { LAYERS = 3 };
    const size_t width = KV_HEADS * p->d;
    float *centers = random_numbers((LAYERS + 1) * width), *got = malloc(width * sizeof *got),
          *from = device_copy(centers, (LAYERS + 1) * width * sizeof *centers);
    kvant_cuda_center_layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        float *to = device_new(4 * width * sizeof *to, 0xff), *center = from + (size_t)i * width;
        layers[i] = (kvant_cuda_center_layer){ .center = center,
                                               .start = center + width,
                                               .centers = { to, to + width },
                                               .starts = to + 2 * width,
                                               .compact = p->compact,
                                               .key_center = to + 3 * width };
    }
    layers[1].centers[0] = layers[1].centers[1] = layers[1].starts = NULL;
    kvant_cuda_place_centers_args args = {
        .size = sizeof args, .codec = p->gpu, .n_kv_heads = KV_HEADS, .one = layers[0]
    };
    assert_int_equal(kvant_cuda_place_centers(&args, NULL), KVANT_OK);
    check_places(p, centers, layers[0].centers[0]);
    layers[0].key_center = NULL;
    args.n_layers = LAYERS;
    args.layers = device_copy(layers, sizeof layers);
    args.one = (kvant_cuda_center_layer){ 0 };
    assert_int_equal(kvant_cuda_place_centers(&args, NULL), KVANT_OK);
    device_read(got, layers[1].key_center, width * sizeof *got);
    check_key_center(p, centers + width, got);
    check_places(p, centers + 2 * width, layers[2].centers[0]);
    for (int i = 0; i < LAYERS; i++)
        device_free(i == 1 ? layers[i].key_center - 3 * width : layers[i].centers[0]);
    device_free(args.layers);
    device_free(from);
    free(centers);
    free(got);
}

static void compare_matrices(const problem *p)
{
    const size_t numbers = (size_t)KV_HEADS * p->d * p->d;
    float *got = malloc(2 * numbers * sizeof *got);
    const kvant_cuda_expand_args args = { .size = sizeof args,
                                          .codec = p->gpu,
                                          .n_kv_heads = KV_HEADS,
                                          .compact = p->compact,
                                          .key_transform = p->room,
                                          .inverse_key_transform = p->room + numbers };
    assert_int_equal(kvant_cuda_expand(&args, NULL), KVANT_OK);
    compare_centers(p);
    device_read(got, p->room, 2 * numbers * sizeof *got);
    assert_memory_equal(got, p->matrices, numbers * sizeof *got);
    /* Both inverses were rounded to binary32 and rotated, in at most 10 steps of a rounding each.
     * A solution in binary32 may err more: the mock's. */
    for (size_t row = 0; row < numbers / p->d; row++) {
        double sum = 0;
        for (size_t j = 0; j < p->d; j++)
            sum += fabs(p->inverse[row * p->d + j]);
        for (size_t j = row * p->d; j < (row + 1) * p->d; j++)
            if (!(fabs((double)got[numbers + j] - (double)p->matrices[numbers + j]) <=
                  64 * 0x1p-24 * sum))
                fail_msg("head_dim %u, number %zu: %g, not %g", p->d, j, (double)got[numbers + j],
                         (double)p->matrices[numbers + j]);
    }
    free(got);
}

/* ---- queries ---- */

/* W^-T q of a query head before the rotation, and the bound of a row's error: each number of the
 * inverse errs by half a unit of 2^-11 of at most twice its row's largest number, and the sum of
 * d products has d roundings. squares: the sum of the variances that roundings to fp16 cause. */
static double reference(const problem *p, uint32_t head, const float *q, double *z, double *squares)
{
    const size_t d = p->d, at = (size_t)(head / GROUP) * d * d;
    double error = 0, length = 0;
    for (size_t j = 0; j < d; j++)
        length += (double)q[j] * q[j];
    for (size_t i = 0; i < d; i++) {
        double largest = 0, sum = 0, products = 0;
        z[i] = 0;
        for (size_t j = 0; j < d; j++) {
            const double m = p->inverse[at + j * d + i];
            z[i] += m * q[j];
            products += fabs(m * q[j]);
            largest = fmax(largest, fabs(m));
            sum += m != 0 ? fabs((double)q[j]) : 0;
        }
        error += 0x1p-11 * largest * sum + (double)d * 0x1p-23 * products;
        *squares += 0x1p-22 * largest * largest * length;
    }
    return error;
}

/* The rotation's matrix is R W of a W that is the identity. */
static double rotated(const problem *p, const double *z, uint32_t channel)
{
    const kvant_transform *t = &p->codec->transform;
    const uint32_t block = t->rotate == KVANT_ROTATE_HADAMARD ? t->block : 1,
                   first = channel / block * block;
    double sum = 0;
    for (uint32_t i = first; i < first + block; i++) {
        const uint32_t both = (i - first) & (channel - first);
        const double sign = __builtin_popcount(both) % 2 ? -1 : 1;
        sum += sign * z[i] * (block > 1 ? (double)t->signs[i] : 1);
    }
    return sum / sqrt(block);
}

static void compare_queries(const problem *p, uint32_t batch, const float *q, const float *gpu,
                            uint32_t matrix)
{
    const uint32_t d = p->d;
    const size_t n = (size_t)batch * HEADS * d;
    float *got = malloc(n * sizeof *got);
    double expected = 0, squares = 0;
    device_read(got, gpu + matrix * n, n * sizeof *got);
    for (size_t row = 0; row < (size_t)batch * HEADS; row++) {
        double z[MOST_DIM];
        const double error = reference(p, (uint32_t)(row % HEADS), q + row * d, z, &expected);
        const uint32_t block =
            p->codec->transform.rotate == KVANT_ROTATE_HADAMARD ? p->codec->transform.block : 1;
        for (uint32_t j = 0; j < d; j++) {
            const double want = rotated(p, z, j), off = (double)got[row * d + j] - want;
            squares += off * off;
            if (!(fabs(off) <= (block > 1 ? error / sqrt(block) : error) + 1e-5 * fabs(want)))
                fail_msg("head_dim %u, batch %u, matrix %u, row %zu, channel %u: %g, not %g", d,
                         batch, matrix, row, j, (double)got[row * d + j], want);
        }
    }
    if (!(squares <= expected + 1e-8))
        fail_msg("head_dim %u, batch %u: the sum of squared errors is %g, roundings give %g", d,
                 batch, squares, expected);
    free(got);
}

/* Three matrices, of which the middle one is in binary32. */
static kvant_cuda_kernel_query_args queries_of(const problem *p, uint32_t batch, const float *q,
                                               float *out)
{
    const size_t numbers = (size_t)KV_HEADS * p->d * p->d;
    return (kvant_cuda_kernel_query_args){ .size = sizeof(kvant_cuda_kernel_query_args),
                                           .k_codec = p->gpu,
                                           .batch = batch,
                                           .n_heads = HEADS,
                                           .n_kv_heads = KV_HEADS,
                                           .type = KVANT_CUDA_F32,
                                           .q = q,
                                           .q_batch_stride = HEADS * p->d,
                                           .q_head_stride = p->d,
                                           .inverse_key_transform = p->compact,
                                           .out = out,
                                           .n_further = 2,
                                           .further = { p->gpu_matrices + numbers, p->compact },
                                           .compact = 5 };
}

static void check_queries(const problem *p, uint32_t batch)
{
    const size_t n = (size_t)batch * HEADS * p->d;
    float *q = random_numbers(n), *gpu_q = device_copy(q, n * sizeof *q),
          *out = device_new(3 * n * sizeof *out, 0xff);
    kvant_cuda_kernel_query_args args = queries_of(p, batch, gpu_q, out);
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_OK);
    for (uint32_t matrix = 0; matrix < 3; matrix++)
        compare_queries(p, batch, q, out, matrix);
    args.compact = 8;
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_ERR_ARGUMENT);
    free(q);
    device_free(gpu_q);
    device_free(out);
}

/* ---- rows ---- */

typedef struct rows {
    float *host, *gpu, *transformed;
    int64_t *slots;
    float *queries, *out;
} rows;

static kvant_cuda_kernel_append_args append_of(const problem *p, const rows *r, bool open,
                                               uint32_t n, void *pages)
{
    kvant_codec_info info = { .size = sizeof info };
    assert_int_equal(kvant_cuda_codec_get_info(open ? p->open : p->gpu, &info), KVANT_OK);
    return (kvant_cuda_kernel_append_args){ .size = sizeof(kvant_cuda_kernel_append_args),
                                            .k = { .codec = open ? p->open : p->gpu,
                                                   .pages = { pages, KV_HEADS * info.page_bytes,
                                                              info.page_bytes },
                                                   .rows = r->gpu,
                                                   .token_stride = KV_HEADS * p->d,
                                                   .head_stride = p->d },
                                            .type = KVANT_CUDA_F32,
                                            .n_tokens = n,
                                            .n_kv_heads = KV_HEADS,
                                            .slots = r->slots };
}

/* Transforms rows as a cache on a CPU does. */
static float *transformed_rows(const problem *p, const float *x, uint32_t n)
{
    float *to = malloc((size_t)n * KV_HEADS * p->d * sizeof *to);
    for (uint32_t i = 0; i < n * KV_HEADS; i++) {
        kvant_transform t = p->codec->transform;
        t.key_transform = NULL;
        t.part = p->n;
        t.triangles =
            p->triangles + (size_t)(i % KV_HEADS) * (p->d / p->n) * kvant_triangle_size(p->n);
        kvant_transform_apply_rows(&t, kvant_kernels_get(KVANT_CPU_AUTO), 1, x + (size_t)i * p->d,
                                   to + (size_t)i * p->d);
    }
    return to;
}

/* Appends rows through the compact form, or rows that a CPU transformed, and reads the pages. */
static uint8_t *append(const problem *p, const rows *r, bool open, uint32_t n, bool compact,
                       size_t *bytes)
{
    kvant_codec_info info = { .size = sizeof info };
    assert_int_equal(kvant_cuda_codec_get_info(open ? p->open : p->gpu, &info), KVANT_OK);
    *bytes = (TOKENS + 63) / 64 * KV_HEADS * info.page_bytes;
    void *pages = device_new(*bytes, 0);
    uint8_t *host = malloc(*bytes);
    kvant_cuda_kernel_append_args args = append_of(p, r, open, n, pages);
    args.transformed = !compact;
    const void *made_from = NULL;
    if (compact) {
        args.k_compact = p->compact;
        args.k_matrix = p->room;
        args.k_matrix_of = &made_from;
        args.queries = queries_of(p, n, r->queries, r->out);
        args.slots_ready = args.next_early = 1;
    } else
        args.k.rows = r->transformed;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    if (made_from) /* W is there, and gives the same bytes */
        assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    device_read(host, pages, *bytes);
    device_free(pages);
    return host;
}

static void check_rows(const problem *p, uint32_t n)
{
    const size_t width = KV_HEADS * p->d, numbers = n * width, queries = (size_t)n * HEADS * p->d;
    int64_t slots[TOKENS];
    rows r = { .host = random_numbers(numbers) };
    float *q = random_numbers(queries);
    size_t bytes;
    for (uint32_t i = 0; i < n; i++)
        slots[i] = i / 16 % 3 == 1 ? -1 : (int64_t)i; /* some thread blocks have no row */
    for (size_t i = 3 * width; i < 4 * width && i < numbers; i++)
        r.host[i] = -0.0f; /* sums begin at 0 */
    r.gpu = device_copy(r.host, numbers * sizeof(float));
    float *transformed = transformed_rows(p, r.host, n);
    r.transformed = device_copy(transformed, numbers * sizeof(float));
    r.slots = device_copy(slots, n * sizeof *slots);
    r.queries = device_copy(q, queries * sizeof(float));
    r.out = device_new(3 * queries * sizeof(float), 0xff);
    for (int open = 0; open < 2; open++) {
        uint8_t *want = append(p, &r, open, n, false, &bytes),
                *got = append(p, &r, open, n, true, &bytes);
        assert_memory_equal(got, want, bytes);
        for (uint32_t matrix = 0; matrix < 3; matrix++)
            compare_queries(p, n, q, r.out, matrix);
        free(want);
        free(got);
    }
    free(r.host);
    free(transformed);
    free(q);
    device_free(r.gpu);
    device_free(r.transformed);
    device_free(r.slots);
    device_free(r.queries);
    device_free(r.out);
}

static void check(const char *spec, uint32_t d)
{
    problem p;
    problem_open(&p, spec, d);
    compare_matrices(&p);
    check_queries(&p, 1);
    check_queries(&p, 3);
    check_queries(&p, small_tests() ? 2 : TOKENS);
    check_rows(&p, 1);
    check_rows(&p, 7);
    check_rows(&p, 33);
    for (uint32_t n = 90; n <= TOKENS && !small_tests(); n *= 2)
        check_rows(&p, n);
    problem_close(&p);
}

/* The second call would have to make W in its own room, but is told that W is there. */
CASE(matrix_that_is_there)
{
    problem p;
    problem_open(&p, "int-4:rotate=hadamard", 64);
    enum { N = 65 };
    float *x = random_numbers((size_t)N * KV_HEADS * 64), read[KV_HEADS * 64],
          untouched[KV_HEADS * 64];
    int64_t slots[N];
    for (int i = 0; i < N; i++)
        slots[i] = i;
    const rows r = { .gpu = device_copy(x, (size_t)N * KV_HEADS * 64 * sizeof *x),
                     .slots = device_copy(slots, sizeof slots) };
    void *pages = device_new(2 * KV_HEADS * 64 * 64 * sizeof(float), 0),
         *room = device_new((size_t)KV_HEADS * 64 * 64 * sizeof(float), 0x3c);
    kvant_cuda_kernel_append_args args = append_of(&p, &r, false, 1, pages);
    const void *made_from = NULL;
    memset(untouched, 0x3c, sizeof untouched);
    args.k_compact = p.compact;
    args.k_matrix = p.room;
    args.k_matrix_of = &made_from;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    assert_null(made_from); /* a single row needs no W */
    args.n_tokens = N;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    assert_ptr_equal(made_from, p.compact);
    args.k_matrix = room;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    device_read(read, room, sizeof read);
    assert_memory_equal(read, untouched, sizeof read);
    made_from = p.room; /* another layer's */
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    assert_ptr_equal(made_from, p.compact);
    device_read(read, room, sizeof read);
    assert_memory_not_equal(read, untouched, sizeof read);
    device_free(pages);
    device_free(room);
    device_free(r.gpu);
    device_free(r.slots);
    free(x);
    problem_close(&p);
}

CASE(known_head_dims)
{
    for (uint32_t d = 64; d <= 256; d += d == 128 ? 128 : 32)
        check("int-4:rotate=hadamard", d);
}

CASE(any_head_dims) /* by kernels of src/cuda/any */
{
    check("int-4:rotate=hadamard", 80);
    check("int-4:rotate=hadamard", 160);
}

CASE(other_codecs)
{
    check("int-8:rotate=none", 128);
    for (uint32_t d = 64; d <= (small_tests() ? 64u : 128u); d += 64)
        check("trellis-4:rotate=hadamard", d);
}

CASE(refused_arguments)
{
    problem p;
    problem_open(&p, "int-4:rotate=hadamard", 64);
    kvant_cuda_compact_args compact = { .size = sizeof compact,
                                        .head_dim = 64,
                                        .n_kv_heads = 1,
                                        .triangles = p.compact,
                                        .compact = NULL };
    assert_int_equal(kvant_cuda_compact(&compact, NULL), KVANT_ERR_ARGUMENT);
    compact.compact = p.compact; /* which are the triangles, too */
    assert_int_equal(kvant_cuda_compact(&compact, NULL), KVANT_ERR_ARGUMENT);
    compact.compact = p.room;
    compact.head_dim = 60;
    assert_int_equal(kvant_cuda_compact(&compact, NULL), KVANT_ERR_ARGUMENT);
    kvant_cuda_expand_args expand = {
        .size = sizeof expand, .codec = p.gpu, .n_kv_heads = 0, .compact = p.compact
    };
    assert_int_equal(kvant_cuda_expand(&expand, NULL), KVANT_ERR_ARGUMENT);
    kvant_cuda_place_centers_args centers = { .size = sizeof centers,
                                              .codec = p.gpu,
                                              .n_kv_heads = 0,
                                              .one = { .center = p.room, .start = p.room } };
    assert_int_equal(kvant_cuda_place_centers(&centers, NULL), KVANT_ERR_ARGUMENT);
    centers.n_kv_heads = 1;
    centers.n_layers = 1; /* which lie nowhere */
    assert_int_equal(kvant_cuda_place_centers(&centers, NULL), KVANT_ERR_ARGUMENT);
    problem_close(&p);
}

RUN_CASES_ON_GPU(NULL, NULL)
