/* test_block_centers.c - centres of blocks on the GPU: rows minus their centre, bit for bit as on
 * the CPU, and rows that an append stores with centres. Offsets that centres add to scores of pages
 * (kvant_cuda_page_offsets) are compared with double precision. */
#include "../unit/calibrated.h"
#include "block_centers.h"

enum { KV = 3, TOKENS = 70, BLOCKS = 9, MOST_D = 512 };

static const block_centers_shape shapes[] = { { 64, KV, 64, false },  { 80, KV, 80, true },
                                              { 96, KV, 64, false },  { 128, KV, 128, false },
                                              { 128, KV, 32, true },  { 256, KV, 256, true },
                                              { 16, KV, 10, false },  { 512, KV, 512, false },
                                              { 250, KV, 100, false } };

static void random_numbers(uint8_t *numbers, size_t n, uint32_t below)
{
    for (size_t i = 0; i < n; i++)
        numbers[i] = (uint8_t)(i > 0 && random_bits() % 4 ? numbers[i - 1] : random_bits() % below);
}

/* Rows of a call: head after head, with room between tokens. */
typedef struct rows_case {
    const block_centers_shape *shape;
    kvant_cuda_type type;
    uint32_t n_tokens;
    test_block_centers_of block_centers;
    int64_t slots[TOKENS];
    /* as floats; `rows` with the type's rounding and the stride, `want` contiguous */
    float *rows, *want;
    size_t stride, bytes;
    kvant_cuda_center_rows_args args;
} rows_case;

static void open_rows(rows_case *c, uint32_t n_ids)
{
    const uint32_t d = c->shape->head_dim, width = KV * d;
    uint8_t numbers[BLOCKS];
    random_numbers(numbers, BLOCKS, n_ids);
    block_centers_open(&c->block_centers, c->shape, BLOCKS, n_ids, n_ids > 1 ? numbers : NULL, 2);
    c->stride = width + 2 * d;
    c->rows = malloc(c->n_tokens * c->stride * sizeof *c->rows);
    c->want = malloc(c->n_tokens * width * sizeof *c->want);
    for (size_t i = 0; i < c->n_tokens * c->stride; i++)
        c->rows[i] = round_to_type(random_normal(), c->type);
    for (uint32_t t = 0; t < c->n_tokens; t++)
        c->slots[t] = random_bits() % 5 == 0 ? -1 : (int64_t)(random_bits() % (64 * BLOCKS));
    void *typed = to_type(c->rows, c->n_tokens * c->stride, c->type, &c->bytes);
    c->args = (kvant_cuda_center_rows_args){ .size = sizeof c->args,
                                             .rows = device_copy(typed, c->bytes),
                                             .type = c->type,
                                             .token_stride = c->stride,
                                             .head_stride = d,
                                             .n_tokens = c->n_tokens,
                                             .n_kv_heads = KV,
                                             .head_dim = d,
                                             .slots = device_copy(c->slots, sizeof c->slots),
                                             .block_centers = gpu_block_centers(&c->block_centers),
                                             .out = device_new(c->n_tokens * width * sizeof(float),
                                                               0xff) };
    free(typed);
}

static void close_rows(rows_case *c)
{
    block_centers_close(&c->block_centers);
    free(c->rows);
    free(c->want);
    device_free(c->args.rows);
    device_free(c->args.slots);
    cudaFree(c->args.out);
}

/* rows: with the stride; NULL: the contiguous rows of `want`. */
static void want_rows(rows_case *c, const float *rows, bool add)
{
    const uint32_t d = c->shape->head_dim;
    float center[MOST_D];
    for (uint32_t t = 0; t < c->n_tokens; t++)
        for (uint32_t h = 0; h < KV; h++) {
            float *to = c->want + (t * KV + h) * d;
            const float *from = rows ? rows + t * c->stride + h * d : to;
            if (c->slots[t] >= 0)
                rotated_center(&c->block_centers, (size_t)c->slots[t] / 64, h, center);
            for (uint32_t j = 0; j < d; j++)
                to[j] = c->slots[t] < 0 ? from[j] : add ? from[j] + center[j] : from[j] - center[j];
        }
}

static void check_rows(const rows_case *c, const char *what)
{
    const size_t n = (size_t)c->n_tokens * KV * c->shape->head_dim;
    float *got = malloc(n * sizeof *got);
    device_read(got, c->args.out, n * sizeof *got);
    for (size_t i = 0; i < n; i++)
        if (got[i] != c->want[i])
            fail_msg("head_dim %u of which %u turn, type %d, %s: number %zu is %a, on the CPU %a",
                     c->shape->head_dim, c->shape->n_dims, c->type, what, i, got[i], c->want[i]);
    free(got);
}

/* Centres are subtracted from rows, then added to the result in place. */
CASE(test_rows)
{
    static const uint32_t tokens[] = { 1, TOKENS };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < 6; i++) {
            rows_case c = { .shape = &shapes[s],
                            .type = (kvant_cuda_type)(i % 3),
                            .n_tokens = tokens[i / 3] };
            open_rows(&c, i % 2 ? 5 : 1);
            want_rows(&c, c.rows, false);
            assert_int_equal(kvant_cuda_center_rows(&c.args, NULL), KVANT_OK);
            check_rows(&c, "subtracted");
            kvant_cuda_center_rows_args back = c.args;
            back.rows = c.args.out, back.type = KVANT_CUDA_F32,
            back.token_stride = KV * c.shape->head_dim, back.add = 1;
            want_rows(&c, NULL, true);
            assert_int_equal(kvant_cuda_center_rows(&back, NULL), KVANT_OK);
            check_rows(&c, "added again");
            close_rows(&c);
        }
}

CASE(test_refused_rows)
{
    rows_case c = { .shape = &shapes[0], .type = KVANT_CUDA_F32, .n_tokens = 1 };
    open_rows(&c, 1);
    kvant_cuda_center_rows_args args = c.args;
    args.head_dim = 63;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_ERR_ARGUMENT);
    args = c.args, args.head_dim = 514;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_ERR_ARGUMENT);
    args = c.args, args.block_centers.phases = NULL;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_ERR_ARGUMENT);
    args = c.args, args.slots = NULL;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_ERR_ARGUMENT);
    args = c.args, args.add = 2;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_ERR_ARGUMENT);
    args = c.args, args.n_tokens = 0;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_OK);
    args.size--;
    assert_int_equal(kvant_cuda_center_rows(&args, NULL), KVANT_ERR_ARGUMENT);
    close_rows(&c);
}

/* ---- stored rows ---- */

#define MOST_PAGE ((size_t)64 * 128 * sizeof(uint16_t)) /* an exact page of head_dim 128 */
#define PAGES_BYTES (2 * MOST_PAGE * KV * BLOCKS)

/* An append that subtracts the centres gives the same pages as an append after
 * kvant_cuda_center_rows. */
typedef struct stored_case {
    const char *spec;
    bool open, values;
    uint32_t n_tokens;
} stored_case;

/* A codec of both devices; the CPU's codec must outlive the GPU's. */
typedef struct stored_codec {
    kvant_codec *cpu;
    kvant_cuda_codec *sealed, *open;
} stored_codec;

static stored_codec stored_codec_new(const char *spec, uint32_t d, kvant_role role)
{
    kvant_calibration *calibration = calibrate_fixed(d);
    stored_codec c = { NULL, NULL, NULL };
    assert_int_equal(
        kvant_codec_create_calibrated(spec, d, role, 7, calibration, 1, 0, &c.cpu, NULL, 0),
        KVANT_OK);
    assert_int_equal(kvant_cuda_codec_from(c.cpu, &c.sealed, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_create_open(c.sealed, &c.open), KVANT_OK);
    kvant_calibration_free(&calibration);
    return c;
}

static void stored_codec_free(stored_codec *c)
{
    kvant_cuda_codec_free(&c->open);
    kvant_cuda_codec_free(&c->sealed);
    kvant_codec_free(&c->cpu);
}

static uint8_t *store_rows(const stored_case *s, const rows_case *c, const stored_codec codecs[2],
                           const float *key_transform, bool fused)
{
    const uint32_t d = c->shape->head_dim;
    const size_t head = MOST_PAGE, bytes = PAGES_BYTES;
    uint8_t *pool = device_new(bytes, 0);
    float *centered = device_new((size_t)c->n_tokens * KV * d * sizeof(float), 0xff);
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .type = KVANT_CUDA_F32,
                                           .n_tokens = c->n_tokens,
                                           .n_kv_heads = KV,
                                           .slots = c->args.slots,
                                           .k = { s->open ? codecs[0].open : codecs[0].sealed,
                                                  { pool, head * KV, head },
                                                  c->args.rows,
                                                  c->args.token_stride,
                                                  d,
                                                  NULL,
                                                  NULL,
                                                  key_transform } };
    if (s->values)
        args.v = (kvant_cuda_rows){ s->open ? codecs[1].open : codecs[1].sealed,
                                    { pool + bytes / 2, head * KV, head },
                                    c->args.rows,
                                    c->args.token_stride,
                                    d,
                                    NULL,
                                    NULL,
                                    NULL };
    if (fused) {
        args.k_block_centers = c->args.block_centers;
        args.center_slots = c->args.slots;
        args.centered = centered;
    } else {
        kvant_cuda_center_rows_args about = c->args;
        about.out = centered;
        assert_int_equal(kvant_cuda_center_rows(&about, NULL), KVANT_OK);
        args.k.rows = centered, args.k.token_stride = KV * d;
    }
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    uint8_t *pages = malloc(bytes);
    device_read(pages, pool, bytes);
    cudaFree(pool);
    cudaFree(centered);
    return pages;
}

static void check_stored(const stored_case *s)
{
    static const block_centers_shape shape = { 128, KV, 128, false };
    const uint32_t d = shape.head_dim;
    stored_codec codecs[2] = { stored_codec_new(s->spec, d, KVANT_ROLE_K),
                               stored_codec_new("turboquant-4", d, KVANT_ROLE_V) };
    float *key_transform = NULL;
    rows_case c = { .shape = &shape, .type = KVANT_CUDA_F32, .n_tokens = s->n_tokens };

    open_rows(&c, 3);
    for (uint32_t t = 0; t < c.n_tokens; t++) /* a slot is written once */
        c.slots[t] = t % 5 == 3 ? -1 : (int64_t)(t * 7 % (64 * BLOCKS));
    device_free(c.args.slots);
    c.args.slots = device_copy(c.slots, sizeof c.slots);
    if (strstr(s->spec, "transform=file")) {
        const size_t n = (size_t)KV * d * d;
        float *matrix = malloc(n * sizeof *matrix);
        for (size_t i = 0; i < n; i++)
            matrix[i] = random_normal() / 16;
        key_transform = device_copy(matrix, n * sizeof *matrix);
        free(matrix);
    }
    uint8_t *want = store_rows(s, &c, codecs, key_transform, false),
            *got = store_rows(s, &c, codecs, key_transform, true);
    size_t written = 0;
    for (size_t i = 0; i < PAGES_BYTES; i++) {
        written += want[i] != 0;
        if (got[i] != want[i])
            fail_msg("%s, %u tokens, %s: byte %zu is %02x, not %02x", s->spec, s->n_tokens,
                     s->open ? "open" : "sealed", i, got[i], want[i]);
    }
    assert_true(written > 0);
    free(want);
    free(got);
    device_free(key_transform);
    stored_codec_free(&codecs[0]);
    stored_codec_free(&codecs[1]);
    close_rows(&c);
}

/* ---- pages ---- */

typedef struct pages_case {
    const block_centers_shape *shape;
    uint32_t query_tokens, group, n_ids, stride; /* stride: positions of a sequence */
    const int32_t *lengths, *starts;             /* starts: of query rows, or NULL */
    uint32_t batch;
    kvant_cuda_type type;
} pages_case;

/* Products z = q a +- q b have two roundings each, the sum of head_dim terms with phases has one
 * for each term, and the reference's centre has two. Together they are below head_dim + 4 times
 * 2^-24 of the sum of magnitudes. */
static void check_pages(const pages_case *c, const test_block_centers_of *block_centers,
                        const float *q, const float *got)
{
    const uint32_t d = c->shape->head_dim, n_heads = KV * c->group,
                   rows = c->query_tokens * c->group;
    for (uint32_t b = 0; b < c->batch; b++)
        for (uint32_t kv = 0; kv < KV; kv++)
            for (uint32_t page = 0; (int32_t)page * 64 < c->lengths[b]; page++) {
                const uint32_t first = c->starts ? (uint32_t)c->starts[b] : b * c->query_tokens,
                               tokens = c->starts ? (uint32_t)(c->starts[b + 1] - c->starts[b])
                                                  : c->query_tokens;
                for (uint32_t r = 0; r < tokens * c->group; r++) {
                    double size;
                    const double want = centered_product(
                        block_centers, (size_t)b * c->stride + page, kv,
                        q + ((first + r / c->group) * n_heads + kv * c->group + r % c->group) *
                                (size_t)d,
                        &size);
                    const float is = got[(((size_t)b * KV + kv) * c->stride + page) * rows + r];
                    if (!(fabs(is - want) <= (d + 4) * 0x1p-24 * size))
                        fail_msg("head_dim %u, %u query tokens, group %u, sequence %u, kv head %u, "
                                 "page %u, row %u: %g, reference %g",
                                 d, c->query_tokens, c->group, b, kv, page, r, is, want);
                }
            }
}

static void run_pages(const pages_case *c)
{
    const uint32_t d = c->shape->head_dim, n_heads = KV * c->group;
    const size_t places = (size_t)c->batch * c->stride,
                 n_rows =
                     c->starts ? (size_t)c->starts[c->batch] : c->batch * (size_t)c->query_tokens,
                 n = n_rows * n_heads * d, n_offsets = places * KV * c->query_tokens * c->group;
    uint8_t *numbers = malloc(places);
    test_block_centers_of block_centers;
    size_t bytes;
    random_numbers(numbers, places, c->n_ids);
    block_centers_open(&block_centers, c->shape, places, c->n_ids, c->n_ids > 1 ? numbers : NULL,
                       2);
    float *q = malloc((n + 1) * sizeof *q), *got = malloc(n_offsets * sizeof *got);
    for (size_t i = 0; i < n; i++)
        q[i] = round_to_type(random_normal(), c->type);
    void *typed = to_type(q, n, c->type, &bytes);
    kvant_cuda_page_offsets_args args = {
        .size = sizeof args,
        .q = device_copy(typed, bytes),
        .type = c->type,
        .q_batch_stride = (size_t)c->query_tokens * n_heads * d,
        .q_token_stride = (size_t)n_heads * d,
        .q_head_stride = d,
        .batch = c->batch,
        .n_heads = n_heads,
        .n_kv_heads = KV,
        .head_dim = d,
        .query_tokens = c->query_tokens == 1 ? 0 : c->query_tokens,
        .query_starts =
            c->starts ? device_copy(c->starts, (c->batch + 1) * sizeof *c->starts) : NULL,
        .lengths = device_copy(c->lengths, c->batch * sizeof *c->lengths),
        .table_stride = c->stride,
        .block_centers = gpu_block_centers(&block_centers),
        .offsets = device_new(n_offsets * sizeof(float), 0xff)
    };
    assert_int_equal(kvant_cuda_page_offsets(&args, NULL), KVANT_OK);
    device_read(got, args.offsets, n_offsets * sizeof *got);
    check_pages(c, &block_centers, q, got);
    device_free(args.q);
    device_free(args.query_starts);
    device_free(args.lengths);
    cudaFree(args.offsets);
    block_centers_close(&block_centers);
    free(typed);
    free(q);
    free(got);
    free(numbers);
}

CASE(test_pages)
{
    static const int32_t lengths[] = { 700, 0, 64, 65, 4096, -1, 1 };
    static const uint32_t tokens[] = { 1, 5, 33 }, groups[] = { 1, 4, 7 };
    for (uint32_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (uint32_t i = 0; i < 9; i++) {
            const pages_case c = { .shape = &shapes[s],
                                   .query_tokens = tokens[i % 3],
                                   .group = groups[i / 3],
                                   .n_ids = (s + i) % 3 ? 1 + 2 * i : 1,
                                   .stride = 65,
                                   .lengths = lengths,
                                   .batch = 7,
                                   .type = (kvant_cuda_type)((s + i) % 3) };
            run_pages(&c);
        }
}

CASE(test_stored_rows)
{
    static const char *const specs[] = { "turboquant-4:transform=file", "turboquant-4",
                                         "trellis-4:transform=file" };
    static const uint32_t tokens[] = { 1, 8, TOKENS };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (int i = small_tests() ? (int)s : 0; i < 12; i += small_tests() ? 5 : 1)
            check_stored(&(stored_case){ .spec = specs[s],
                                         .open = i % 2 == 1,
                                         .values = i % 4 < 2,
                                         .n_tokens = tokens[i / 4] });
}

/* Centres need keys as floats, slots, and room for their own launches. */
CASE(test_refused_stored_rows)
{
    const block_centers_shape shape = { 64, KV, 64, false };
    rows_case c = { .shape = &shape, .type = KVANT_CUDA_F32, .n_tokens = 1 };
    stored_codec codec = stored_codec_new("turboquant-4", 64, KVANT_ROLE_K);

    open_rows(&c, 1);
    uint8_t *pool = device_new(MOST_PAGE * KV * BLOCKS, 0);
    const kvant_cuda_kernel_append_args good = { .size = sizeof good,
                                                 .type = KVANT_CUDA_F32,
                                                 .n_tokens = 1,
                                                 .n_kv_heads = KV,
                                                 .slots = c.args.slots,
                                                 .k = { .codec = codec.sealed,
                                                        .pages = { pool, MOST_PAGE * KV,
                                                                   MOST_PAGE },
                                                        .rows = c.args.rows,
                                                        .token_stride = c.args.token_stride,
                                                        .head_stride = 64 },
                                                 .k_block_centers = c.args.block_centers,
                                                 .center_slots = c.args.slots,
                                                 .centered = c.args.out };
    assert_int_equal(kvant_cuda_kernel_append(&good, NULL), KVANT_OK);
    kvant_cuda_kernel_append_args args = good;
    args.type = KVANT_CUDA_F16;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.center_slots = NULL;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.centered = NULL;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.k_block_centers.phases = NULL;
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_ERR_ARGUMENT);
    stored_codec_free(&codec);
    cudaFree(pool);
    close_rows(&c);
}

CASE(test_ragged_pages)
{
    static const int32_t lengths[] = { 700, 30, 64, 300 },
                         starts[][5] = { { 0, 1, 1, 5, 8 }, { 0, 40, 41, 41, 72 } };
    for (uint32_t i = 0; i < 4; i++) {
        const pages_case c = { .shape = &shapes[3 + i % 2],
                               .query_tokens = i < 2 ? 5 : 40,
                               .group = i % 2 ? 7 : 4,
                               .n_ids = 1 + 23 * (i % 2),
                               .stride = 11,
                               .lengths = lengths,
                               .starts = starts[i / 2],
                               .batch = 4,
                               .type = KVANT_CUDA_F32 };
        run_pages(&c);
    }
}

/* As many query rows as in a prefill. */
CASE(test_many_rows)
{
    const int32_t lengths[] = { small_tests() ? 500 : 1500 };
    for (uint32_t i = 0; i < 3; i++) {
        const pages_case c = { .shape = &shapes[i == 0   ? 3
                                                : i == 1 ? 1
                                                         : 5],
                               .query_tokens = 512,
                               .group = i == 1 ? 1 : 4,
                               .n_ids = i == 2 ? 3 : 1,
                               .stride = 24,
                               .lengths = lengths,
                               .batch = 1,
                               .type = KVANT_CUDA_BF16 };
        run_pages(&c);
    }
}

CASE(test_refused_pages)
{
    uint32_t there[2] = { 0, 1 };
    const kvant_cuda_page_offsets_args good = { .size = sizeof good,
                                                .q = there,
                                                .type = KVANT_CUDA_F32,
                                                .n_heads = 4,
                                                .n_kv_heads = 2,
                                                .head_dim = 64,
                                                .lengths = (int32_t *)there,
                                                .table_stride = 1,
                                                .offsets = (float *)there,
                                                .block_centers = { .pairs = (uint16_t *)there,
                                                                   .start = (float *)there,
                                                                   .phases = (float *)there } };
    kvant_cuda_page_offsets_args args = good;
    args.n_heads = 5, args.batch = 1;
    assert_int_equal(kvant_cuda_page_offsets(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.head_dim = 0;
    assert_int_equal(kvant_cuda_page_offsets(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.block_centers.start = NULL;
    assert_int_equal(kvant_cuda_page_offsets(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.offsets = NULL;
    assert_int_equal(kvant_cuda_page_offsets(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.table_stride = 0;
    assert_int_equal(kvant_cuda_page_offsets(&args, NULL), KVANT_ERR_ARGUMENT);
}

RUN_CASES_ON_GPU(NULL, NULL)
