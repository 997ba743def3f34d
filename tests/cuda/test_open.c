/* test_open.c - exact pages, bit for bit: append writes the CPU's bytes, sealing gives the CPU's
 * sealed bytes, decode gives the CPU's numbers. */
#include "cuda_support.h"

#include "../unit/open_codec.h"
#include "../unit/specs.h"

enum { HEADS = 3, BLOCKS = 5, MAX_D = 512 };

static float scale_of_rows[HEADS * MAX_D]; /* scale of the rows, which have a centre */

typedef struct fixture {
    const char *spec;
    uint32_t head_dim;
    test_cache cache;
    test_open_pool open;
} fixture;

static void fixture_open(fixture *f, const char *spec, uint32_t head_dim)
{
    *f = (fixture){ .spec = spec, .head_dim = head_dim };
    cache_open(&f->cache, spec, spec, head_dim, HEADS, BLOCKS, 0);
    open_pool_new(&f->open, &f->cache);
}

static void fixture_close(fixture *f)
{
    open_pool_free(&f->open);
    cache_close(&f->cache);
}

/* The largest numbers are about 14,500 with the smallest scale. Exact pages of any codec hold them
 * (up to 16,328). */
static float number(uint32_t kind, uint32_t channel)
{
    return kind == 0   ? 0.0f
           : kind == 1 ? -0.0f
           : kind == 2 ? 0.5f
           : kind == 3 ? random_normal() * 1e-7f
           : kind == 4 ? random_normal() * 350
           : kind == 5 ? (channel == 5 ? 40.0f : random_normal() * 0.01f)
                       : random_normal();
}

/* n rows of HEADS heads. A row has numbers of one kind, and in some channels the same number as all
 * rows. */
static float *make_rows(uint32_t n, uint32_t d, kvant_cuda_type type)
{
    float *rows = malloc((size_t)n * HEADS * d * sizeof *rows);
    for (uint32_t i = 0; i < n * HEADS; i++) {
        uint32_t kind = (uint32_t)(random_bits() % 20);
        for (uint32_t j = 0; j < d; j++)
            rows[(size_t)i * d + j] = round_to_type(j % 31 == 7 ? 1.5f : number(kind, j), type);
    }
    return rows;
}

static void compare(const char *what, const fixture *f, const uint8_t *want, const void *gpu,
                    size_t bytes)
{
    uint8_t *got = malloc(bytes);
    device_read(got, gpu, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != want[i])
            fail_msg("%s: %s, head_dim %u: byte %zu is %02x, the CPU's %02x", what, f->spec,
                     f->head_dim, i, got[i], want[i]);
    free(got);
}

static size_t open_bytes(const fixture *f)
{
    return 2 * f->open.page_bytes * HEADS * BLOCKS;
}

static void append_on_cpu(fixture *f, kvant_role role, const float *rows, uint32_t n,
                          const int64_t *slots, const float *center)
{
    uint32_t d = f->head_dim;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; slots[i] >= 0 && h < HEADS; h++) {
            kvant_affine affine = { .center = center ? center + h * d : NULL,
                                    .scale = center ? scale_of_rows + h * d : NULL };
            assert_int_equal(
                kvant_codec_encode(f->open.codec[role], &affine, rows + (i * HEADS + h) * d, d,
                                   (uint32_t)(slots[i] % 64), 1,
                                   open_page(&f->open, role, (uint32_t)(slots[i] / 64), h)),
                KVANT_OK);
        }
}

/* Appends n tokens to slots on both devices and compares all exact pages. */
static void append_rows(fixture *f, uint32_t n, const int64_t *slots, kvant_cuda_type type,
                        const float *center)
{
    uint32_t d = f->head_dim;
    void *gpu_rows[2], *gpu_slots = device_copy(slots, n * sizeof *slots);
    void *gpu_center = center ? device_copy(center, HEADS * d * sizeof *center) : NULL;
    void *gpu_scale = center ? device_copy(scale_of_rows, HEADS * d * sizeof *scale_of_rows) : NULL;
    kvant_cuda_append_args args = {
        .size = sizeof args, .type = type, .n_tokens = n, .n_kv_heads = HEADS, .slots = gpu_slots
    };
    for (int r = 0; r < 2; r++) {
        size_t bytes;
        float *rows = make_rows(n, d, type);
        void *typed = to_type(rows, (size_t)n * HEADS * d, type, &bytes);
        gpu_rows[r] = device_copy(typed, bytes);
        append_on_cpu(f, (kvant_role)r, rows, n, slots, center);
        *(r ? &args.v : &args.k) = (kvant_cuda_rows){ f->open.gpu_codec[r],
                                                      open_pages(&f->open, (kvant_role)r),
                                                      gpu_rows[r],
                                                      HEADS * d,
                                                      d,
                                                      gpu_center,
                                                      gpu_scale,
                                                      NULL };
        free(typed);
        free(rows);
    }
    assert_int_equal(kvant_cuda_append(&args, NULL), KVANT_OK);
    compare("append to open pages", f, f->open.pool, f->open.gpu_pool, open_bytes(f));
    for (int r = 0; r < 2; r++)
        cudaFree(gpu_rows[r]);
    cudaFree(gpu_slots);
    cudaFree(gpu_center);
    cudaFree(gpu_scale);
}

/* Seals on the CPU as its cache does: copies of a block's first token stand for tokens that were
 * not written. */
static void seal_on_cpu(fixture *f, kvant_role role, uint32_t from, uint32_t to, uint32_t n_tokens)
{
    static float rows[64 * MAX_D];
    uint32_t block = (role == KVANT_ROLE_K ? &f->cache.k_info : &f->cache.v_info)->block_tokens;
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t first = 0; first < n_tokens; first += block) {
            for (uint32_t t = 0; t < block; t++)
                kvant_codec_decode_transformed(
                    f->open.codec[role], kvant_kernels_get(KVANT_CPU_AUTO),
                    open_page(&f->open, role, from, h), first + t < n_tokens ? first + t : first,
                    rows + t * f->head_dim);
            assert_int_equal(seal_rows(role == KVANT_ROLE_K ? f->cache.k : f->cache.v, rows, first,
                                       block, cache_page(&f->cache, role, to, h)),
                             KVANT_OK);
        }
}

static void seal_blocks(fixture *f, bool all_written)
{
    /* block 1 is skipped because it has no sealed block, block 2 because it has no tokens */
    const int32_t from[] = { 0, 1, 3, 2, 4 }, to[] = { 4, -1, 0, 3, 2 };
    const int32_t tokens[] = { 64, 64, 17, 0, 1 };
    for (int i = 0; i < 5; i++)
        for (int r = 0; r < 2; r++)
            if (to[i] >= 0 && (all_written || tokens[i] > 0))
                seal_on_cpu(f, (kvant_role)r, (uint32_t)from[i], (uint32_t)to[i],
                            all_written ? 64 : (uint32_t)tokens[i]);
    void *gpu_from = device_copy(from, sizeof from), *gpu_to = device_copy(to, sizeof to),
         *gpu_tokens = device_copy(tokens, sizeof tokens);
    uint32_t refused = 0, *gpu_refused = device_copy(&refused, sizeof refused);
    kvant_cuda_seal_args args = { .size = sizeof args,
                                  .n_blocks = 5,
                                  .n_kv_heads = HEADS,
                                  .from = gpu_from,
                                  .to = gpu_to,
                                  .tokens = all_written ? NULL : gpu_tokens,
                                  .refused = gpu_refused };
    args.k = (kvant_cuda_seal_pages){ f->cache.gpu_k, open_pages(&f->open, KVANT_ROLE_K),
                                      cache_pages(&f->cache, KVANT_ROLE_K) };
    args.v = (kvant_cuda_seal_pages){ f->cache.gpu_v, open_pages(&f->open, KVANT_ROLE_V),
                                      cache_pages(&f->cache, KVANT_ROLE_V) };
    assert_int_equal(kvant_cuda_seal(&args, NULL), KVANT_OK);
    compare("seal", f, f->cache.pool, f->cache.gpu_pool, f->cache.block_bytes * BLOCKS);
    compare("seal leaves open pages", f, f->open.pool, f->open.gpu_pool, open_bytes(f));
    device_read(&refused, gpu_refused, sizeof refused);
    assert_int_equal(refused, 0);
    cudaFree(gpu_from);
    cudaFree(gpu_to);
    cudaFree(gpu_tokens);
    cudaFree(gpu_refused);
}

/* Seals n single rows of a list. The numbers behind them in the list are wrong. */
static void seal_list(fixture *f, uint32_t n)
{
    enum { ROWS = BLOCKS * 64, MOST = 300 };
    int64_t from[MOST], to[MOST];
    float row[MAX_D];
    for (uint32_t i = 0; i < MOST; i++) {
        from[i] = i < n ? (int64_t)(i * 71 % ROWS) : -7; /* 71, 53 and 320 have no common factor */
        to[i] = i < n ? (int64_t)((i * 53 + 5) % ROWS) : ROWS * 64;
        for (uint32_t k = 0; i < n && k < 2 * HEADS; k++) {
            const kvant_role role = (kvant_role)(k % 2);
            kvant_codec_decode_transformed(f->open.codec[role], kvant_kernels_get(KVANT_CPU_AUTO),
                                           open_page(&f->open, role, (uint32_t)from[i] / 64, k / 2),
                                           (uint32_t)from[i] % 64, row);
            assert_int_equal(seal_rows(k % 2 ? f->cache.v : f->cache.k, row, (uint32_t)to[i] % 64,
                                       1, cache_page(&f->cache, role, (uint32_t)to[i] / 64, k / 2)),
                             KVANT_OK);
        }
    }
    void *gpu_from = device_copy(from, sizeof from), *gpu_to = device_copy(to, sizeof to),
         *gpu_n = device_copy(&n, sizeof n);
    kvant_cuda_seal_rows_args args = { .size = sizeof args,
                                       .most_rows = MOST,
                                       .n_kv_heads = HEADS,
                                       .from = gpu_from,
                                       .to = gpu_to,
                                       .n_rows = gpu_n };
    args.k = (kvant_cuda_seal_pages){ f->cache.gpu_k, open_pages(&f->open, KVANT_ROLE_K),
                                      cache_pages(&f->cache, KVANT_ROLE_K) };
    args.v = (kvant_cuda_seal_pages){ f->cache.gpu_v, open_pages(&f->open, KVANT_ROLE_V),
                                      cache_pages(&f->cache, KVANT_ROLE_V) };
    assert_int_equal(kvant_cuda_seal_rows(&args, NULL), KVANT_OK);
    compare("seal a list", f, f->cache.pool, f->cache.gpu_pool, f->cache.block_bytes * BLOCKS);
    cudaFree(gpu_from);
    cudaFree(gpu_to);
    cudaFree(gpu_n);
}

/* Lists of rows can be sealed if every row has its own scale and kernels know the codes. */
static void seal_lists(fixture *f)
{
    static const char *const refused[] = { "octopus", "hqmq", "group", "kivi", "innerq" };
    kvant_cuda_seal_rows_args none = { .size = sizeof none, .n_kv_heads = HEADS };
    none.k.codec = f->cache.gpu_k;
    none.v.codec = f->cache.gpu_v;
    const kvant_status status = kvant_cuda_seal_rows(&none, NULL);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (strstr(f->spec, refused[i])) {
            assert_int_equal(status, KVANT_ERR_UNSUPPORTED);
            return;
        }
    assert_int_equal(status, KVANT_OK);
    static const uint32_t counts[] = { 0, 1, 9, 300, 40 };
    const size_t n = !small_tests() ? 5 : f->head_dim == 64 ? 4 : 3;
    for (size_t i = 0; i < n; i++)
        seal_list(f, counts[i]);
}

/* Decodes a block of the pages on both devices. */
static void check_decode(const fixture *f, const kvant_cuda_codec *gpu, kvant_cuda_pages pages,
                         const kvant_codec *codec, int32_t block,
                         void *(*page)(const void *, kvant_role, uint32_t, uint32_t),
                         const void *pool, kvant_role role)
{
    static float got[64 * HEADS * MAX_D], want[64 * MAX_D];
    uint32_t d = f->head_dim;
    void *gpu_block = device_copy(&block, sizeof block), *out = device_new(sizeof got, 0xff);
    kvant_cuda_decode_args args = { .size = sizeof args,
                                    .codec = gpu,
                                    .pages = pages,
                                    .blocks = gpu_block,
                                    .n_blocks = 1,
                                    .n_kv_heads = HEADS,
                                    .type = KVANT_CUDA_F32,
                                    .out = out,
                                    .token_stride = HEADS * d,
                                    .head_stride = d };
    assert_int_equal(kvant_cuda_decode(&args, NULL), KVANT_OK);
    device_read(got, out, sizeof got);
    for (uint32_t h = 0; h < HEADS; h++) {
        kvant_codec_decode(codec, NULL, page(pool, role, (uint32_t)block, h), 0, 64, want, d);
        for (uint32_t i = 0; i < 64 * d; i++)
            if (!(got[(i / d * HEADS + h) * d + i % d] == want[i]))
                fail_msg("%s, head_dim %u: decoded %g, the CPU %g", f->spec, d,
                         got[(i / d * HEADS + h) * d + i % d], want[i]);
    }
    cudaFree(gpu_block);
    cudaFree(out);
}

static void *page_of_cache(const void *cache, kvant_role role, uint32_t block, uint32_t head)
{
    return cache_page(cache, role, block, head);
}

static void *page_of_open(const void *open, kvant_role role, uint32_t block, uint32_t head)
{
    return open_page(open, role, block, head);
}

static void run(const char *spec, uint32_t head_dim, kvant_cuda_type type, bool center, bool lists)
{
    fixture f;
    int64_t slots[BLOCKS * 64];
    float centers[HEADS * MAX_D];
    fixture_open(&f, spec, head_dim);
    for (int i = 0; i < BLOCKS * 64; i++)
        /* 37 and 320 have no common factor, so every slot is written once */
        slots[i] = (i * 37) % (BLOCKS * 64);
    for (uint32_t j = 0; j < HEADS * head_dim; j++) {
        centers[j] = random_normal();
        scale_of_rows[j] = random_uniform(0.5f, 2);
    }
    append_rows(&f, BLOCKS * 64, slots, type, center ? centers : NULL);
    slots[1] = -5; /* some tokens once more, one of them skipped */
    append_rows(&f, 7, slots, type, NULL);
    seal_blocks(&f, true);
    seal_blocks(&f, false);
    if (lists)
        seal_lists(&f);
    for (int r = 0; r < 2; r++) {
        kvant_role role = (kvant_role)r;
        check_decode(&f, r ? f.cache.gpu_v : f.cache.gpu_k, cache_pages(&f.cache, role),
                     r ? f.cache.v : f.cache.k, 4, page_of_cache, &f.cache, role);
        check_decode(&f, f.open.gpu_codec[r], open_pages(&f.open, role), f.open.codec[r], 3,
                     page_of_open, &f.open, role);
    }
    fixture_close(&f);
}

static void open_and_seal(const char *const *specs, size_t n_specs)
{
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t s = 0; s < n_specs; s++)
        for (size_t i = small_tests() ? s % 4 : 0; i < (small_tests() ? s % 4 + 1 : 4); i++)
            run(specs[s], dims[i], (kvant_cuda_type)((s + i) % 3), (s + i) % 2 == 0, true);
}

CASE(test_open_and_seal)
{
    static const char *const specs[] = { "int-4",
                                         "int-8:sym",
                                         "int-2",
                                         "int-3:sym",
                                         "bdr-4",
                                         "turboquant-4:rotate=hadamard",
                                         "turboquant-3:rotate=hadamard",
                                         "turboquant-2:rotate=hadamard",
                                         "turboquant-6:rotate=hadamard",
                                         "trellis-2:rotate=hadamard",
                                         "trellis-4:rotate=hadamard",
                                         "trellis-3:rotate=hadamard",
                                         "int-2:group=32",
                                         "int-2:group=32,axis=channel",
                                         "int-2:group=32,sym",
                                         "int-2:group=32,axis=channel,sym",
                                         "int-3:group=32,sym",
                                         "int-3:group=32,axis=channel",
                                         "bdr-2:group=32,axis=channel",
                                         "kivi-2",
                                         "innerq-base",
                                         "innerq-small" };
    open_and_seal(specs, sizeof specs / sizeof *specs);
}

/* Cases of kernels of any head_dim, groups and chunks (src/cuda/any) have names from "any_" on. */
CASE(any_chunks)
{
    static const char *const specs[] = { "octopus-3:rotate=hadamard", "hqmq-s96r4" };
    open_and_seal(specs, sizeof specs / sizeof *specs);
}

CASE(any_head_dims)
{
    static const char *const specs[] = {
        "int-4",
        "int-6:sym",
        "turboquant-4:rotate=hadamard",
        "octopus-4:rotate=hadamard",
        "hqmq-s96r4",
        "trellis-3:rotate=hadamard",
        "int-2:group=32",
        "int-4:group=64,axis=channel",
        "int-2:group=16,axis=channel,sym",
        "int-3:group=32,axis=channel",
        "int-8:group=40",
        "kivi-2",
        "kivi-4",
        "innerq-base",
        "int-3:axis=channel,hybrid=code",
        "f16",
        PAPERS("turboquant-2.5", "turboquant-3.5:scale=norm,rotate=hadamard", "innerq-hybrid",
               "innerq-hybrid:group=64,hybrid=code", "turboquant-3:qjl,rotate=hadamard",
               "polar-3:rotate=hadamard", "octopus-5:rotate=hadamard", "hqmq-s341r6:med3",
               "spherical-r4jl4", "hqmq-s24r6:med3,median=page,slots=9", "naive-4", )
    };
    static const uint32_t dims[] = { 80, 512, 192, 112, 128, 64 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = small_tests() ? s % 3 : 0;
             i < (small_tests() ? s % 3 + 1 : sizeof dims / sizeof *dims); i++)
            run(specs[s], dims[i], (kvant_cuda_type)((s + i) % 3), (s + i) % 2 == 0, false);
}

CASE(test_refused_rows)
{
    static const float bad[] = { NAN, INFINITY, 3e38f, 1e5f };
    for (int i = 0; i < 4; i++) {
        fixture f;
        fixture_open(&f, "int-4", 128);
        float rows[2][HEADS * 128] = { 0 };
        int64_t slots[2] = { 3, 4 };
        rows[0][128 + 77] = bad[i]; /* in the second head */
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t t = 0; t < 2; t++)
                assert_int_equal(kvant_codec_encode(f.open.codec[0], NULL, rows[t] + h * 128, 128,
                                                    (uint32_t)slots[t], 1,
                                                    open_page(&f.open, KVANT_ROLE_K, 0, h)),
                                 t == 0 && h == 1 ? (i < 2 ? KVANT_ERR_NONFINITE : KVANT_ERR_RANGE)
                                                  : KVANT_OK);
        uint32_t refused = 0, *gpu_refused = device_copy(&refused, sizeof refused);
        void *gpu_rows = device_copy(rows, sizeof rows),
             *gpu_slots = device_copy(slots, sizeof slots);
        kvant_cuda_append_args args = { .size = sizeof args,
                                        .type = KVANT_CUDA_F32,
                                        .n_tokens = 2,
                                        .n_kv_heads = HEADS,
                                        .slots = gpu_slots,
                                        .refused = gpu_refused };
        args.k = (kvant_cuda_rows){ f.open.gpu_codec[0],
                                    open_pages(&f.open, KVANT_ROLE_K),
                                    gpu_rows,
                                    HEADS * 128,
                                    128,
                                    NULL,
                                    NULL,
                                    NULL };
        assert_int_equal(kvant_cuda_append(&args, NULL), KVANT_OK);
        device_read(&refused, gpu_refused, sizeof refused);
        assert_int_equal(refused, i < 2 ? KVANT_CUDA_ROW_NONFINITE : KVANT_CUDA_ROW_RANGE);
        compare("refused rows", &f, f.open.pool, f.open.gpu_pool, open_bytes(&f));
        cudaFree(gpu_rows);
        cudaFree(gpu_slots);
        cudaFree(gpu_refused);
        fixture_close(&f);
    }
}

/* Rows of sizes around the limit of exact pages. The GPU refuses and marks the rows that the CPU
 * refuses, and every accepted row can be sealed. n: tokens; up to 64 have a kernel of their own. */
static void append_large(fixture *f, uint32_t n, kvant_role role)
{
    const uint32_t d = f->head_dim;
    const kvant_codec *codec = role == KVANT_ROLE_K ? f->cache.k : f->cache.v;
    float *rows = malloc((size_t)n * HEADS * d * sizeof *rows);
    int64_t slots[BLOCKS * 64];
    uint32_t marks[1 + BLOCKS * 64 / 32] = { 0 }, want[1 + BLOCKS * 64 / 32] = { 0 }, refused = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool takes = true;
        slots[i] = i;
        for (uint32_t h = 0; h < HEADS; h++) {
            float *row = rows + (i * HEADS + h) * d;
            for (uint32_t j = 0; j < d; j++)
                row[j] = 2000 * powf(40, (float)((i + 7 * h) % n) / (float)n) * random_normal();
            takes =
                kvant_codec_check_rows(codec, &codec->transform, kvant_kernels_get(KVANT_CPU_AUTO),
                                       NULL, row, d, 1, true) == KVANT_OK &&
                takes;
        }
        if (!takes)
            want[0] = 1, want[1 + i / 32] |= 1u << i % 32;
    }
    assert_int_equal(want[0], 1);
    void *gpu_rows = device_copy(rows, (size_t)n * HEADS * d * sizeof *rows),
         *gpu_slots = device_copy(slots, n * sizeof *slots);
    uint32_t *gpu_marks = device_copy(marks, sizeof marks),
             *gpu_refused = device_copy(&refused, sizeof refused);
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .type = KVANT_CUDA_F32,
                                           .n_tokens = n,
                                           .n_kv_heads = HEADS,
                                           .slots = gpu_slots,
                                           .refused = gpu_refused,
                                           .marks = gpu_marks };
    *(role ? &args.v : &args.k) = (kvant_cuda_rows){ f->open.gpu_codec[role],
                                                     open_pages(&f->open, role),
                                                     gpu_rows,
                                                     HEADS * d,
                                                     d,
                                                     NULL,
                                                     NULL,
                                                     NULL };
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    device_read(marks, gpu_marks, sizeof marks);
    device_read(&refused, gpu_refused, sizeof refused);
    assert_int_equal(refused, KVANT_CUDA_ROW_RANGE);
    for (uint32_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (marks[i] != want[i])
            fail_msg("%s, head_dim %u, %u tokens: marks %u are %08x, the CPU refuses %08x", f->spec,
                     d, n, i, marks[i], want[i]);
    free(rows);
    cudaFree(gpu_rows);
    cudaFree(gpu_slots);
    cudaFree(gpu_marks);
    cudaFree(gpu_refused);
}

CASE(any_large_rows)
{
    static const char *const specs[] = { "int-4",
                                         "turboquant-4:rotate=hadamard",
                                         "turboquant-2:rotate=none",
                                         "octopus-3:rotate=hadamard",
                                         "hqmq-s96r4:rotate=none",
                                         "trellis-4:rotate=hadamard",
                                         "trellis-3:rotate=none",
                                         "f16" };
    static const uint32_t dims[] = { 128, 80, 64 }, counts[] = { 64, BLOCKS * 64 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = small_tests() ? s % 3 : 0; i < (small_tests() ? s % 3 + 1 : 3); i++) {
            fixture f;
            int64_t slots[BLOCKS * 64];
            fixture_open(&f, specs[s], dims[i]);
            for (int t = 0; t < BLOCKS * 64; t++)
                slots[t] = t;
            append_rows(&f, BLOCKS * 64, slots, KVANT_CUDA_F32, NULL);
            for (size_t k = 0; k < 2; k++)
                for (int r = 0; r < 2; r++)
                    append_large(&f, counts[k], (kvant_role)r);
            device_read(f.open.pool, f.open.gpu_pool, open_bytes(&f));
            seal_blocks(&f, true);
            fixture_close(&f);
        }
}

RUN_CASES_ON_GPU(NULL, NULL)
