/* test_calibrated.c - codecs of a calibration on the GPU: centre, scale and matrix of each kv head.
 * Append and seal write the CPU's bytes, and decoding gives the CPU's numbers.
 * test_calibrated_attention.c tests queries and attention. */
#ifndef CALIBRATED_TOKENS
/* A thread block of append_trellis.cu then has several whole pages. */
#define CALIBRATED_TOKENS 4500
#endif
#include "calibrated_roles.h"

static uint8_t *page_of(uint8_t *pool, size_t page_bytes, uint32_t block, uint32_t h)
{
    return pool + (block * HEADS + h) * page_bytes;
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
    int32_t numbers[BLOCKS], tokens[BLOCKS];
    for (int b = 0; b < BLOCKS; b++)
        numbers[b] = b, tokens[b] = b + 1 < BLOCKS ? 64 : TOKENS - 64 * b;
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

typedef struct page_case {
    const char *spec;
    kvant_role role;
} page_case;

/* Checks each case with each head_dim, or with one of them if the tests are small. */
static void check_cases(const page_case *cases, size_t n_cases, const uint32_t *dims, size_t n_dims)
{
    for (size_t i = 0; i < n_dims; i++) {
        kvant_calibration *calibration = calibrate_fixed(dims[i]);
        assert_non_null(calibration);
        for (size_t s = 0; s < n_cases; s++)
            if (!small_tests() || s % n_dims == i)
                check_pages(cases[s].spec, dims[i], cases[s].role, calibration);
        kvant_calibration_free(&calibration);
    }
}

static const page_case cases[] = {
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
    { "turboquant-4:center=file,norm=file,rotate=hadamard", KVANT_ROLE_V },
    { "trellis-4:center=file,rotate=hadamard", KVANT_ROLE_V },
};
enum { N_CASES = sizeof cases / sizeof *cases };

CASE(bytes_are_those_of_the_cpu)
{
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    check_cases(cases, N_CASES, dims, 4);
}

/* Kernels of src/cuda/any append these. */
CASE(any_bytes_are_those_of_the_cpu)
{
    static const uint32_t dims[] = { 64, 96, 128, 256, 80, 192 };
    static const page_case any_cases[] = {
        { "kivi-2:transform=file", KVANT_ROLE_K },
        { "octopus-3:transform=file", KVANT_ROLE_K },
        { "hqmq-s96r4:transform=diagonal", KVANT_ROLE_K },
        { "hqmq-s96r4:order=halves", KVANT_ROLE_K }, /* its matrix needs no calibration */
        { "int-4:group=32,order=dealt", KVANT_ROLE_K },
    };
    check_cases(any_cases, sizeof any_cases / sizeof *any_cases, dims, 6);
    check_cases(cases, N_CASES, dims + 4, 2);
}

/* Appends keys and values of n tokens, from `first` on, in one call. */
static void append_both(const role_cache *c, float *const *rows, uint32_t first, uint32_t n)
{
    void *gpu_rows[2];
    int64_t slots[TOKENS];
    const size_t width = HEADS * c[0].d;
    for (int r = 0; r < 2; r++)
        gpu_rows[r] = device_copy(rows[r] + first * width, n * width * sizeof(float));
    for (uint32_t i = 0; i < n; i++)
        slots[i] = first + i;
    void *gpu_slots = device_copy(slots, n * sizeof *slots);
    const kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                                 .n_tokens = n,
                                                 .n_kv_heads = HEADS,
                                                 .slots = gpu_slots,
                                                 .k = gpu_rows_of(&c[0], gpu_rows[0], false),
                                                 .v = gpu_rows_of(&c[1], gpu_rows[1], false) };
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    cudaFree(gpu_slots);
    cudaFree(gpu_rows[0]);
    cudaFree(gpu_rows[1]);
}

/* One kernel then appends rows with a matrix and rows without one. */
CASE(values_next_to_a_matrix)
{
    static const char *const specs[] = { "turboquant-6:transform=file",
                                         "turboquant-6:rotate=hadamard" };
    static const uint32_t ends[] = { 1, 41, TOKENS };
    kvant_calibration *calibration = calibrate_fixed(128);
    role_cache c[2];
    float *rows[2];
    for (int r = 0; r < 2; r++) {
        role_open(&c[r], specs[r], 128, (kvant_role)r, calibration);
        rows[r] = make_rows(128);
        encode_on_cpu(&c[r], rows[r]);
    }
    for (uint32_t i = 0, first = 0; i < sizeof ends / sizeof *ends; first = ends[i++])
        append_both(c, rows, first, ends[i] - first);
    for (int r = 0; r < 2; r++) {
        compare(&c[r], "both roles", c[r].pool, c[r].gpu_pool, c[r].page_bytes);
        role_close(&c[r]);
        free(rows[r]);
    }
    kvant_calibration_free(&calibration);
}

/* Rows with NaNs, or with numbers beyond fp16 after the transform, leave no trace. Their neighbours
 * are written. */
CASE(refused_rows_leave_no_trace)
{
    static const uint32_t counts[] = { 8, 40, 90 }; /* few tokens, several and many */
    kvant_calibration *calibration = calibrate_fixed(128);
    role_cache c;
    for (int open = 0; open < 2; open++)
        for (size_t i = 0; i < 3; i++) {
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

RUN_CASES_ON_GPU(NULL, NULL)
