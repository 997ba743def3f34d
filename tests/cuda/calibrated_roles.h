/* calibrated_roles.h - one role of one layer, with codecs of a calibration: its arrays and pages on
 * the CPU and on the device. */
#ifndef KVANT_TESTS_CALIBRATED_ROLES_H
#define KVANT_TESTS_CALIBRATED_ROLES_H

#include "cuda_support.h"

#include "../../src/base/half.h"
#include "../unit/open_codec.h"
#include "../unit/calibrated.h"

#ifndef CALIBRATED_TOKENS
#define CALIBRATED_TOKENS 150
#endif

enum { HEADS = 2, TOKENS = CALIBRATED_TOKENS, BLOCKS = (TOKENS + 63) / 64, MAX_D = 256 };

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
static inline float *upload(const float *const *parts, size_t n)
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

static inline void upload_tables(role_cache *c)
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

static inline void role_open(role_cache *c, const char *spec, uint32_t d, kvant_role role,
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

static inline void role_close(role_cache *c)
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

static inline kvant_cuda_pages gpu_pages(const role_cache *c, bool open)
{
    const size_t bytes = open ? c->open_bytes : c->page_bytes;
    return (kvant_cuda_pages){ open ? c->gpu_open_pool : c->gpu_pool, HEADS * bytes, bytes };
}

/* Rows on the device, one behind another, with the calibration's numbers. */
static inline kvant_cuda_rows gpu_rows_of(const role_cache *c, const void *rows, bool open)
{
    return (kvant_cuda_rows){ .codec = open ? c->gpu_open : c->gpu,
                              .pages = gpu_pages(c, open),
                              .rows = rows,
                              .token_stride = HEADS * c->d,
                              .head_stride = c->d,
                              .center = c->center,
                              .scale = c->scale,
                              .key_transform = c->key_transform };
}

/* Rows that are distributed like the calibration's rows: channels of unequal size around a centre
 * that is not 0. */
static inline float *make_rows(uint32_t d)
{
    float *rows = malloc((size_t)TOKENS * HEADS * d * sizeof *rows);
    for (size_t i = 0; i < (size_t)TOKENS * HEADS * d; i++)
        rows[i] = random_normal() + (float)(i % d % 11) - (i % d == 3 ? 40.0f : 0.0f);
    return rows;
}

static inline void append_some(const role_cache *c, const float *rows, const int64_t *slots,
                               uint32_t n, bool open, kvant_status want, uint32_t want_refused)
{
    void *gpu_rows = device_copy(rows, (size_t)n * HEADS * c->d * sizeof *rows),
         *gpu_slots = device_copy(slots, n * sizeof *slots);
    uint32_t refused = 0, *gpu_refused = device_copy(&refused, sizeof refused);
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .n_tokens = n,
                                           .n_kv_heads = HEADS,
                                           .slots = gpu_slots,
                                           .refused = gpu_refused };
    *(c->role == KVANT_ROLE_K ? &args.k : &args.v) = gpu_rows_of(c, gpu_rows, open);
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), want);
    device_read(&refused, gpu_refused, sizeof refused);
    assert_int_equal(refused, want_refused);
    cudaFree(gpu_rows);
    cudaFree(gpu_slots);
    cudaFree(gpu_refused);
}

/* Many tokens, 40, the rest and one: kernels split such calls in different ways. */
static inline void append_on_gpu(const role_cache *c, const float *rows, bool open,
                                 kvant_status want)
{
    static const uint32_t ends[] = { 101, 141, TOKENS - 1, TOKENS };
    int64_t slots[TOKENS];
    for (uint32_t t = 0; t < TOKENS; t++)
        slots[t] = t;
    for (uint32_t i = 0, first = 0; i < sizeof ends / sizeof *ends; first = ends[i++])
        append_some(c, rows + (size_t)first * HEADS * c->d, slots + first, ends[i] - first, open,
                    want, 0);
}

static inline void decode_on_gpu(const role_cache *c, bool open, float *rows)
{
    int32_t blocks[BLOCKS];
    for (int b = 0; b < BLOCKS; b++)
        blocks[b] = b;
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

#endif
