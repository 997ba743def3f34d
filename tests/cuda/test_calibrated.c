/* test_calibrated.c - codecs of a calibration on the GPU: centre, scale and matrix of each kv head.
 * Append and seal write the CPU's bytes, and decoding gives the CPU's numbers. Queries and
 * attention are compared with sums in binary64. */
#include "cuda_support.h"

#include <math.h>

#include "../../src/base/half.h"
#include "../unit/open_codec.h"
#include "../unit/calibrated.h"

enum { HEADS = 2, TOKENS = 150, BLOCKS = 3, MAX_D = 256 };

/* One role of one layer: a codec for each kv head, the codecs' arrays on the device, and pages on
 * the CPU and on the device. */
typedef struct role_cache {
    kvant_codec *codec[HEADS], *open_codec[HEADS];
    kvant_cuda_codec *gpu, *gpu_open;
    kvant_affine affine[HEADS];
    float *center, *scale, *key_transform, *inverse; /* on the device */
    uint32_t d;
    kvant_role role;
    size_t page_bytes, open_bytes;
    uint8_t *pool, *open_pool, *gpu_pool, *gpu_open_pool;
} role_cache;

/* Uploads the arrays of all kv heads, one after another; NULL if the codecs have none. */
static float *upload(const float *const *parts, size_t n)
{
    if (!parts[0])
        return NULL;
    float *all = malloc(HEADS * n * sizeof *all);
    for (size_t h = 0; h < HEADS; h++)
        memcpy(all + h * n, parts[h], n * sizeof *all);
    float *device = device_copy(all, HEADS * n * sizeof *all);
    free(all);
    return device;
}

static void upload_tables(role_cache *c)
{
    const float *parts[4][HEADS];
    size_t key_transform_size = 0;
    for (uint32_t h = 0; h < HEADS; h++) {
        kvant_cuda_tables tables = { .size = sizeof tables };
        assert_int_equal(kvant_cuda_codec_tables(c->codec[h], &tables), KVANT_OK);
        parts[0][h] = tables.center, parts[1][h] = tables.scale;
        parts[2][h] = tables.key_transform, parts[3][h] = tables.inverse_key_transform;
        c->affine[h] = (kvant_affine){ tables.center, tables.scale };
        key_transform_size = tables.key_transform_size;
    }
    c->center = upload(parts[0], c->d);
    c->scale = upload(parts[1], c->d);
    c->key_transform = upload(parts[2], key_transform_size);
    c->inverse = upload(parts[3], key_transform_size);
}

static void role_open(role_cache *c, const char *spec, uint32_t d, kvant_role role,
                      const kvant_calibration *calibration)
{
    char text[512] = "";
    kvant_codec_info info = { .size = sizeof info };
    *c = (role_cache){ .d = d, .role = role, .open_bytes = (size_t)64 * d * sizeof(uint16_t) };
    for (uint32_t h = 0; h < HEADS; h++) {
        if (kvant_codec_create_calibrated(spec, d, role, 7, calibration, 1, h, &c->codec[h], text,
                                          sizeof text) != KVANT_OK)
            fail_msg("%s, head_dim %u: %s", spec, d, text);
        assert_int_equal(open_codec_create(c->codec[h], &c->open_codec[h]), KVANT_OK);
    }
    if (kvant_cuda_codec_from(c->codec[0], &c->gpu, text, sizeof text) != KVANT_OK)
        fail_msg("%s, head_dim %u: %s", spec, d, text);
    assert_int_equal(kvant_cuda_codec_create_open(c->gpu, &c->gpu_open), KVANT_OK);
    assert_int_equal(kvant_codec_get_info(c->codec[0], &info), KVANT_OK);
    c->page_bytes = info.page_bytes;
    c->pool = calloc(BLOCKS * HEADS, c->page_bytes);
    c->open_pool = calloc(BLOCKS * HEADS, c->open_bytes);
    c->gpu_pool = device_new(BLOCKS * HEADS * c->page_bytes, 0);
    c->gpu_open_pool = device_new(BLOCKS * HEADS * c->open_bytes, 0);
    upload_tables(c);
}

static void role_close(role_cache *c)
{
    for (uint32_t h = 0; h < HEADS; h++) {
        open_codec_free(&c->open_codec[h]);
        kvant_codec_free(&c->codec[h]);
    }
    kvant_cuda_codec_free(&c->gpu);
    kvant_cuda_codec_free(&c->gpu_open);
    float *arrays[] = { c->center, c->scale, c->key_transform, c->inverse };
    for (size_t i = 0; i < 4; i++)
        cudaFree(arrays[i]);
    cudaFree(c->gpu_pool);
    cudaFree(c->gpu_open_pool);
    free(c->pool);
    free(c->open_pool);
}

static uint8_t *page_of(uint8_t *pool, size_t page_bytes, uint32_t block, uint32_t h)
{
    return pool + (block * HEADS + h) * page_bytes;
}

static kvant_cuda_pages gpu_pages(const role_cache *c, bool open)
{
    const size_t bytes = open ? c->open_bytes : c->page_bytes;
    return (kvant_cuda_pages){ open ? c->gpu_open_pool : c->gpu_pool, HEADS * bytes, bytes };
}

/* Rows that are distributed like the calibration's rows: channels of unequal size around a centre
 * that is not 0. */
static float *make_rows(uint32_t d)
{
    float *rows = malloc((size_t)TOKENS * HEADS * d * sizeof *rows);
    for (size_t i = 0; i < (size_t)TOKENS * HEADS * d; i++)
        rows[i] = random_normal() + (float)(i % d % 11) - (i % d == 3 ? 40.0f : 0.0f);
    return rows;
}

static void append_some(const role_cache *c, const float *rows, const int64_t *slots, uint32_t n,
                        bool open, kvant_status want, uint32_t want_refused)
{
    void *gpu_rows = device_copy(rows, (size_t)n * HEADS * c->d * sizeof *rows),
         *gpu_slots = device_copy(slots, n * sizeof *slots);
    uint32_t refused = 0, *gpu_refused = device_copy(&refused, sizeof refused);
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .n_tokens = n,
                                           .n_kv_heads = HEADS,
                                           .slots = gpu_slots,
                                           .refused = gpu_refused };
    *(c->role == KVANT_ROLE_K ? &args.k : &args.v) =
        (kvant_cuda_rows){ .codec = open ? c->gpu_open : c->gpu,
                           .pages = gpu_pages(c, open),
                           .rows = gpu_rows,
                           .token_stride = HEADS * c->d,
                           .head_stride = c->d,
                           .center = c->center,
                           .scale = c->scale,
                           .key_transform = c->key_transform };
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), want);
    device_read(&refused, gpu_refused, sizeof refused);
    assert_int_equal(refused, want_refused);
    cudaFree(gpu_rows);
    cudaFree(gpu_slots);
    cudaFree(gpu_refused);
}

/* Many tokens, some and one: kernels split such calls in different ways. */
static void append_on_gpu(const role_cache *c, const float *rows, bool open, kvant_status want)
{
    static const uint32_t ends[] = { 101, TOKENS - 1, TOKENS };
    int64_t slots[TOKENS];
    for (uint32_t t = 0; t < TOKENS; t++)
        slots[t] = t;
    for (uint32_t i = 0, first = 0; i < sizeof ends / sizeof *ends; first = ends[i++])
        append_some(c, rows + (size_t)first * HEADS * c->d, slots + first, ends[i] - first, open,
                    want, 0);
}

static void encode_on_cpu(const role_cache *c, const float *rows)
{
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t t = 0; t < TOKENS; t++) {
            const float *row = rows + ((size_t)t * HEADS + h) * c->d;
            if (c->codec[h]->info.block_tokens == 1)
                assert_int_equal(kvant_codec_encode(c->codec[h], &c->affine[h], row, c->d, t % 64,
                                                    1, page_of(c->pool, c->page_bytes, t / 64, h)),
                                 KVANT_OK);
            assert_int_equal(kvant_codec_encode(c->open_codec[h], &c->affine[h], row, c->d, t % 64,
                                                1, page_of(c->open_pool, c->open_bytes, t / 64, h)),
                             KVANT_OK);
        }
}

static void compare(const role_cache *c, const char *what, const uint8_t *want, const void *device,
                    size_t page_bytes)
{
    const size_t bytes = BLOCKS * HEADS * page_bytes;
    uint8_t *got = malloc(bytes);
    device_read(got, device, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != want[i])
            fail_msg("%s, head_dim %u, %s: byte %zu of page %zu (of block x kv head) is %02x, the "
                     "CPU's %02x",
                     c->codec[0]->info.spec, c->d, what, i % page_bytes, i / page_bytes, got[i],
                     want[i]);
    free(got);
}

/* Sealed blocks hold the codes of exact rows, which are rounded to fp16. The CPU's cache writes the
 * same. */
static void check_seal(const role_cache *c)
{
    int32_t numbers[BLOCKS] = { 0, 1, 2 }, tokens[BLOCKS] = { 64, 64, TOKENS - 128 };
    void *gpu_numbers = device_copy(numbers, sizeof numbers),
         *gpu_tokens = device_copy(tokens, sizeof tokens);
    uint8_t *want = calloc(BLOCKS * HEADS, c->page_bytes);
    float *rows = malloc(64 * (size_t)c->d * sizeof *rows);
    check_cuda(cudaMemset(c->gpu_pool, 0, BLOCKS * HEADS * c->page_bytes));
    kvant_cuda_seal_args args = { .size = sizeof args,
                                  .n_blocks = BLOCKS,
                                  .n_kv_heads = HEADS,
                                  .from = gpu_numbers,
                                  .to = gpu_numbers,
                                  .tokens = gpu_tokens };
    *(c->role == KVANT_ROLE_K ? &args.k : &args.v) =
        (kvant_cuda_seal_pages){ c->gpu, gpu_pages(c, true), gpu_pages(c, false) };
    assert_int_equal(kvant_cuda_seal(&args, NULL), KVANT_OK);
    for (uint32_t b = 0; b < BLOCKS; b++)
        for (uint32_t h = 0; h < HEADS; h++) {
            for (uint32_t t = 0; t < (uint32_t)tokens[b]; t++)
                kvant_codec_decode_transformed(c->open_codec[h], kvant_kernels_get(KVANT_CPU_AUTO),
                                               page_of(c->open_pool, c->open_bytes, b, h), t,
                                               rows + (size_t)t * c->d);
            const uint32_t group = c->codec[h]->info.block_tokens,
                           n = ((uint32_t)tokens[b] + group - 1) / group * group;
            for (uint32_t t = (uint32_t)tokens[b]; t < n;
                 t++) /* the rest of a group holds copies of its first row */
                memcpy(rows + (size_t)t * c->d, rows + (size_t)(t / group * group) * c->d,
                       c->d * sizeof *rows);
            assert_int_equal(seal_rows(c->codec[h], rows, 0, n, page_of(want, c->page_bytes, b, h)),
                             KVANT_OK);
        }
    compare(c, "sealed", want, c->gpu_pool, c->page_bytes);
    memcpy(c->pool, want, BLOCKS * HEADS * c->page_bytes);
    free(want);
    free(rows);
    cudaFree(gpu_numbers);
    cudaFree(gpu_tokens);
}

static void decode_on_gpu(const role_cache *c, bool open, float *rows)
{
    int32_t blocks[BLOCKS] = { 0, 1, 2 };
    const size_t bytes = (size_t)BLOCKS * 64 * HEADS * c->d * sizeof(float);
    void *gpu_blocks = device_copy(blocks, sizeof blocks), *out = device_new(bytes, 0xff);
    kvant_cuda_decode_args args = { .size = sizeof args,
                                    .codec = open ? c->gpu_open : c->gpu,
                                    .pages = gpu_pages(c, open),
                                    .blocks = gpu_blocks,
                                    .n_blocks = BLOCKS,
                                    .n_kv_heads = HEADS,
                                    .type = KVANT_CUDA_F32,
                                    .out = out,
                                    .token_stride = HEADS * c->d,
                                    .head_stride = c->d,
                                    .center = c->center,
                                    .scale = c->scale,
                                    .inverse_key_transform = c->inverse };
    assert_int_equal(kvant_cuda_decode(&args, NULL), KVANT_OK);
    device_read(rows, out, bytes);
    args.inverse_key_transform = c->inverse ? NULL : out; /* missing, or of no use */
    assert_int_equal(kvant_cuda_decode(&args, NULL), KVANT_ERR_ARGUMENT);
    cudaFree(gpu_blocks);
    cudaFree(out);
}

static void check_decode(const role_cache *c, bool open)
{
    float *got = malloc((size_t)BLOCKS * 64 * HEADS * c->d * sizeof *got), want[MAX_D];
    decode_on_gpu(c, open, got);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t h = 0; h < HEADS; h++) {
            const uint8_t *page = open ? page_of(c->open_pool, c->open_bytes, t / 64, h)
                                       : page_of(c->pool, c->page_bytes, t / 64, h);
            kvant_codec_decode(open ? c->open_codec[h] : c->codec[h], &c->affine[h], page, t % 64,
                               1, want, c->d);
            for (uint32_t j = 0; j < c->d; j++) {
                const float x = got[((size_t)t * HEADS + h) * c->d + j];
                if (!(x == want[j]))
                    fail_msg("%s, head_dim %u, %s: decoded %g, the CPU %g (token %u, kv head %u, "
                             "channel %u)",
                             c->codec[0]->info.spec, c->d, open ? "open" : "sealed", (double)x,
                             (double)want[j], t, h, j);
            }
        }
    free(got);
}

static void check_pages(const char *spec, uint32_t d, kvant_role role,
                        const kvant_calibration *calibration)
{
    role_cache c;
    role_open(&c, spec, d, role, calibration);
    float *rows = make_rows(d);
    encode_on_cpu(&c, rows);
    if (c.codec[0]->info.block_tokens == 1) {
        append_on_gpu(&c, rows, false, KVANT_OK);
        compare(&c, "appended", c.pool, c.gpu_pool, c.page_bytes);
        check_decode(&c, false);
    }
    append_on_gpu(&c, rows, true, KVANT_OK);
    compare(&c, "open", c.open_pool, c.gpu_open_pool, c.open_bytes);
    check_decode(&c, true);
    check_seal(&c);
    float *key_transform = c.key_transform;
    c.key_transform = key_transform ? NULL : c.center;
    if (key_transform || c.center)
        append_on_gpu(&c, rows, false, KVANT_ERR_ARGUMENT);
    c.key_transform = key_transform;
    role_close(&c);
    free(rows);
}

static void bytes_are_those_of_the_cpu(void **unused)
{
    static const uint32_t dims[] = { 64, 96, 128, 256, 80, 192 };
    static const struct {
        const char *spec;
        kvant_role role;
    } cases[] = {
        { "trellis-4:transform=file", KVANT_ROLE_K },
        { "trellis-3:transform=file", KVANT_ROLE_K },
        { "turboquant-4:transform=file", KVANT_ROLE_K },
        { "turboquant-3:transform=diagonal,rotate=hadamard", KVANT_ROLE_K },
        { "turboquant-6:transform=file", KVANT_ROLE_K },
        { "int-4:transform=file", KVANT_ROLE_K },
        { "int-4:transform=diagonal", KVANT_ROLE_K },
        { "bdr-8:transform=file", KVANT_ROLE_K },
        { "bdr-4:transform=diagonal", KVANT_ROLE_K },
        { "trellis-2:transform=diagonal,rotate=hadamard", KVANT_ROLE_K },
        { "int-4:center=file,norm=file", KVANT_ROLE_K },
        { "trellis-4:center=file,rotate=hadamard", KVANT_ROLE_V },
        { "turboquant-4:center=file,norm=file,rotate=hadamard", KVANT_ROLE_V },
        { "kivi-2:transform=file", KVANT_ROLE_K },
        { "octopus-3:transform=file", KVANT_ROLE_K },
        { "hqmq-s96r4:transform=diagonal", KVANT_ROLE_K },
        { "hqmq-s96r4:order=halves", KVANT_ROLE_K }, /* its matrix needs no calibration */
        { "int-4:group=32,order=dealt", KVANT_ROLE_K },
    };
    (void)unused;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        kvant_calibration *calibration = calibrate_fixed(dims[i]);
        assert_non_null(calibration);
        for (size_t s = 0; s < sizeof cases / sizeof *cases; s++)
            check_pages(cases[s].spec, dims[i], cases[s].role, calibration);
        kvant_calibration_free(&calibration);
    }
}

/* Rows with NaNs, or with numbers beyond fp16 after the transform, leave no trace. Their neighbours
 * are written. */
static void refused_rows_leave_no_trace(void **unused)
{
    static const uint32_t counts[] = { 8, 90 }; /* few tokens and many */
    kvant_calibration *calibration = calibrate_fixed(128);
    role_cache c;
    (void)unused;
    for (int open = 0; open < 2; open++)
        for (size_t i = 0; i < 2; i++) {
            role_open(&c, "turboquant-4:transform=file", 128, KVANT_ROLE_K, calibration);
            float *rows = make_rows(128), *bad = make_rows(128);
            int64_t slots[TOKENS];
            for (uint32_t t = 0; t < TOKENS; t++)
                slots[t] = t < counts[i] ? (int64_t)t : -1;
            encode_on_cpu(&c, rows);
            for (uint32_t b = 0; b < BLOCKS; b++) /* bytes that no call writes */
                for (uint32_t h = 0; h < HEADS; h++)
                    for (uint32_t t = 0; t < 64; t++)
                        if (64 * b + t >= counts[i] || (64 * b + t == 3 && h == 1) ||
                            (64 * b + t == 5 && h == 0))
                            memset(page_of(c.open_pool, c.open_bytes, b, h) + t * 256, 0, 256);
            memcpy(bad, rows, (size_t)TOKENS * HEADS * 128 * sizeof *rows);
            bad[(3 * HEADS + 1) * 128 + 77] = NAN;
            for (uint32_t j = 0; j < 128; j++)
                bad[(5 * HEADS + 0) * 128 + j] *= 1e30f;
            append_some(&c, bad, slots, counts[i], open, KVANT_OK,
                        KVANT_CUDA_ROW_NONFINITE | KVANT_CUDA_ROW_RANGE);
            if (open)
                compare(&c, "refused", c.open_pool, c.gpu_open_pool, c.open_bytes);
            role_close(&c);
            free(rows);
            free(bad);
        }
    kvant_calibration_free(&calibration);
}

/* Queries and attention: batch x QUERY_HEADS heads, where all sequences have the same blocks. */
enum { BATCH = 3, QUERY_HEADS = 22 };

typedef struct problem {
    role_cache k, v;
    float *rows_k, *rows_v, *q;
    float scale;
} problem;

/* out = softmax(scale <q, k>) v over the decoded rows. Keys lack their centre, which would change
 * all scores by the same amount. */
static void reference(const problem *p, const float *keys, const float *values, uint32_t sequence,
                      uint32_t head, double *out)
{
    const uint32_t d = p->k.d, h = head / (QUERY_HEADS / HEADS);
    double weight[TOKENS], most = -INFINITY, sum = 0;
    memset(out, 0, d * sizeof *out);
    for (uint32_t t = 0; t < TOKENS; t++) {
        weight[t] = 0;
        for (uint32_t j = 0; j < d; j++)
            weight[t] += (double)p->q[((size_t)sequence * QUERY_HEADS + head) * d + j] *
                         keys[((size_t)t * HEADS + h) * d + j];
        weight[t] *= p->scale;
        most = fmax(most, weight[t]);
    }
    for (uint32_t t = 0; t < TOKENS; t++)
        sum += weight[t] = exp(weight[t] - most);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            out[j] += weight[t] / sum * values[((size_t)t * HEADS + h) * d + j];
}

/* Compares numbers with d roundings of sums that cancel little. i: index of the row. */
static void compare_query(const float *got, const float *want, uint32_t d, size_t i)
{
    float largest = 0;
    for (uint32_t j = 0; j < d; j++)
        largest = fmaxf(largest, fabsf(want[j]));
    for (uint32_t j = 0; j < d; j++)
        if (!(fabsf(got[j] - want[j]) <= 2e-5f * largest))
            fail_msg("head_dim %u, query %zu, channel %u: %g, not %g", d, i, j, (double)got[j],
                     (double)want[j]);
}

static void compare_queries(const problem *p, const float *gpu)
{
    const uint32_t d = p->k.d;
    const size_t n = (size_t)BATCH * QUERY_HEADS * d;
    float *got = malloc(n * sizeof *got), want[MAX_D];
    device_read(got, gpu, n * sizeof *got);
    for (size_t i = 0; i < BATCH * QUERY_HEADS; i++) {
        assert_int_equal(
            kvant_codec_transform_query(p->k.codec[i % QUERY_HEADS / (QUERY_HEADS / HEADS)], NULL,
                                        p->q + i * d, want),
            KVANT_OK);
        compare_query(got + i * d, want, d, i);
    }
    free(got);
}

/* The same queries through a further matrix, whose results follow: the same bits as a separate
 * call. */
static void compare_further(const problem *p, const kvant_cuda_kernel_query_args *queries)
{
    const size_t bytes = (size_t)BATCH * QUERY_HEADS * p->k.d * sizeof(float);
    uint8_t *got = malloc(bytes), *want = malloc(bytes);
    kvant_cuda_kernel_query_args alone = *queries;
    alone.inverse_key_transform = queries->further[0];
    alone.n_further = 0;
    alone.out = device_new(bytes, 0xff);
    assert_int_equal(kvant_cuda_kernel_transform_queries(&alone, NULL), KVANT_OK);
    device_read(want, alone.out, bytes);
    device_read(got, (const uint8_t *)queries->out + bytes, bytes);
    assert_memory_equal(got, want, bytes);
    cudaFree(alone.out);
    free(got);
    free(want);
}

/* Many tokens, here one token repeated, have a separate kernel. */
static void transform_many_queries(const problem *p, const kvant_cuda_kernel_query_args *queries)
{
    enum { MANY = 203 };
    const size_t token = (size_t)QUERY_HEADS * p->k.d, part = MANY * token;
    float *got = malloc(2 * part * sizeof *got), *want = malloc(2 * BATCH * token * sizeof *want);
    kvant_cuda_kernel_query_args many = *queries;
    many.batch = MANY;
    many.q_batch_stride = 0;
    many.out = device_new(2 * part * sizeof *got, 0xff);
    assert_int_equal(kvant_cuda_kernel_transform_queries(&many, NULL), KVANT_OK);
    device_read(got, many.out, 2 * part * sizeof *got);
    device_read(want, queries->out, 2 * BATCH * token * sizeof *want);
    for (size_t i = 0; i < 2 * MANY * QUERY_HEADS; i++)
        compare_query(got + i * p->k.d,
                      want + i / (MANY * QUERY_HEADS) * BATCH * token + i % QUERY_HEADS * p->k.d,
                      p->k.d, i);
    cudaFree(many.out);
    free(got);
    free(want);
}

/* The same in the launch that also stores rows; none of these rows is stored. */
static void transform_queries_with_rows(const problem *p,
                                        const kvant_cuda_kernel_query_args *queries)
{
    const uint32_t d = p->k.d;
    const size_t part = (size_t)BATCH * QUERY_HEADS * d;
    const int64_t none[BATCH] = { -1, -1, -1 };
    for (int open = 0; open < 2; open++) {
        void *slots = device_copy(none, sizeof none),
             *rows = device_new((size_t)BATCH * HEADS * d * sizeof(float), 0);
        kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                               .k = { .codec = open ? p->k.gpu_open : p->k.gpu,
                                                      .pages = gpu_pages(&p->k, open),
                                                      .rows = rows,
                                                      .token_stride = HEADS * d,
                                                      .head_stride = d,
                                                      .center = p->k.center,
                                                      .scale = p->k.scale,
                                                      .key_transform = p->k.key_transform },
                                               .n_tokens = BATCH,
                                               .n_kv_heads = HEADS,
                                               .slots = slots,
                                               .queries = *queries };
        args.queries.further[0] = queries->inverse_key_transform;
        check_cuda(cudaMemset(queries->out, 0xff, 2 * part * sizeof(float)));
        assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
        compare_queries(p, queries->out);
        compare_queries(p, queries->out + part);
        args.queries.batch = BATCH - 1;
        assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_ERR_ARGUMENT);
        cudaFree(slots);
        cudaFree(rows);
    }
}

static float *transform_queries(const problem *p, const void *gpu_q)
{
    const uint32_t d = p->k.d;
    const size_t n = 2 * (size_t)BATCH * QUERY_HEADS * d;
    float *out = device_new(n * sizeof *out, 0xff);
    kvant_cuda_kernel_query_args args = { .size = sizeof args,
                                          .k_codec = p->k.gpu,
                                          .batch = BATCH,
                                          .n_heads = QUERY_HEADS,
                                          .n_kv_heads = HEADS,
                                          .q = gpu_q,
                                          .q_batch_stride = QUERY_HEADS * d,
                                          .q_head_stride = d,
                                          .inverse_key_transform = p->k.inverse,
                                          .out = out,
                                          .n_further = 1,
                                          .further = { p->k.key_transform } };
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_OK);
    compare_queries(p, out);
    compare_further(p, &args);
    transform_many_queries(p, &args);
    transform_queries_with_rows(p, &args);
    args.n_further = 2;
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_ERR_ARGUMENT);
    args.n_further = 0;
    args.k_codec = p->v.gpu;
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_ERR_ARGUMENT);
    return out;
}

/* Queries and probabilities are rounded to 11 bits. The bound 1e-2 of the largest value is ten
 * times that effect. A wrong matrix errs as much as values differ. */
static void check_attention(const problem *p, bool full)
{
    const uint32_t d = p->k.d;
    const size_t n = (size_t)BATCH * QUERY_HEADS * d, rows = (size_t)BLOCKS * 64 * HEADS * d;
    int32_t table[BATCH][BLOCKS] = { { 0, 1, 2 }, { 0, 1, 2 }, { 0, 1, 2 } },
            lengths[BATCH] = { TOKENS, TOKENS, TOKENS };
    void *gpu_table = device_copy(table, sizeof table),
         *gpu_lengths = device_copy(lengths, sizeof lengths);
    void *gpu_q = device_copy(p->q, n * sizeof(float)), *out = device_new(n * sizeof(float), 0xff);
    const size_t workspace = kvant_cuda_attention_workspace(d);
    void *gpu_workspace = device_new(workspace, 0);
    float *transformed = full ? transform_queries(p, gpu_q) : NULL;
    kvant_cuda_kernel_attention_args args = { .size = sizeof args,
                                              .k_codec = p->k.gpu,
                                              .v_codec = p->v.gpu,
                                              .k = gpu_pages(&p->k, false),
                                              .v = gpu_pages(&p->v, false),
                                              .block_table = gpu_table,
                                              .table_stride = BLOCKS,
                                              .blocks_per_row = BLOCKS,
                                              .lengths = gpu_lengths,
                                              .batch = BATCH,
                                              .n_heads = QUERY_HEADS,
                                              .n_kv_heads = HEADS,
                                              .q = full ? transformed : gpu_q,
                                              .q_batch_stride = QUERY_HEADS * d,
                                              .q_head_stride = d,
                                              .out = out,
                                              .out_batch_stride = QUERY_HEADS * d,
                                              .out_head_stride = d,
                                              .scale = p->scale,
                                              .k_scale = full ? NULL : p->k.inverse,
                                              .v_center = p->v.center,
                                              .workspace = gpu_workspace,
                                              .workspace_bytes = workspace };
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_OK);
    float *got = malloc(n * sizeof *got), *keys = malloc(rows * sizeof *keys),
          *values = malloc(rows * sizeof *values);
    double want[MAX_D], largest = 0;
    device_read(got, out, n * sizeof *got);
    decode_on_gpu(&p->k, false, keys);
    decode_on_gpu(&p->v, false, values);
    for (size_t i = 0; i < (size_t)TOKENS * HEADS * d; i++)
        largest = fmax(largest, fabs((double)values[i]));
    for (uint32_t i = 0; i < BATCH * QUERY_HEADS; i++) {
        reference(p, keys, values, i / QUERY_HEADS, i % QUERY_HEADS, want);
        for (uint32_t j = 0; j < d; j++)
            if (!(fabs(got[(size_t)i * d + j] - want[j]) <= 1e-2 * largest))
                fail_msg("%s, head_dim %u, query %u, channel %u: %g, not %g",
                         p->k.codec[0]->info.spec, d, i, j, (double)got[(size_t)i * d + j],
                         want[j]);
    }
    void *arrays[] = { gpu_table, gpu_lengths, gpu_q, out, gpu_workspace, transformed };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        cudaFree(arrays[i]);
    free(got);
    free(keys);
    free(values);
}

static void attention_through_weights(void **unused)
{
    static const uint32_t dims[] = { 64, 96, 128, 256, 80, 192 };
    static const struct {
        const char *k, *v;
        bool full;
    } cases[] = { { "trellis-4:transform=file", "trellis-4:center=file,rotate=hadamard", true },
                  { "int-4:transform=file", "int-4", true },
                  { "turboquant-4:transform=diagonal,rotate=hadamard",
                    "turboquant-4:rotate=hadamard", false } };
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t k = 0; k < sizeof dims / sizeof *dims; k++) {
            const uint32_t d = dims[k];
            problem p = { .scale = 0.02f / sqrtf((float)d) };
            kvant_calibration *calibration = calibrate_fixed(d);
            role_open(&p.k, cases[i].k, d, KVANT_ROLE_K, calibration);
            role_open(&p.v, cases[i].v, d, KVANT_ROLE_V, calibration);
            p.rows_k = make_rows(d), p.rows_v = make_rows(d);
            p.q = malloc((size_t)BATCH * QUERY_HEADS * d * sizeof *p.q);
            for (size_t n = 0; n < (size_t)BATCH * QUERY_HEADS * d; n++)
                p.q[n] = 8 * random_normal();
            append_on_gpu(&p.k, p.rows_k, false, KVANT_OK);
            append_on_gpu(&p.v, p.rows_v, false, KVANT_OK);
            check_attention(&p, cases[i].full);
            role_close(&p.k);
            role_close(&p.v);
            kvant_calibration_free(&calibration);
            free(p.rows_k);
            free(p.rows_v);
            free(p.q);
        }
}

int main(int argc, char **argv)
{
    if (!begin_tests(argc, argv))
        return 77; /* CTest: skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_those_of_the_cpu),
        cmocka_unit_test(refused_rows_leave_no_trace),
        cmocka_unit_test(attention_through_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
