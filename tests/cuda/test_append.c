/* test_append.c - append on the GPU writes the same bytes as the CPU's encoder, and decode gives
 * the same numbers as the CPU's decoder, bit for bit. */
#include "cuda_support.h"

#include "../unit/specs.h"

enum { HEADS = 3, MOST_HEADS = 32, BLOCKS = 9 };

static float scale[MOST_HEADS * 512]; /* scale of the rows, which have a centre */

typedef struct append_case {
    const char *spec;
    uint32_t head_dim, n_tokens;
    kvant_cuda_type type;
    /* 0: in order from the middle of a page, 1: shuffled over all slots, 2: one token per block */
    int order;
    bool center;
    uint32_t heads; /* 0: HEADS */
    bool sparse;    /* one of 50 tokens has a slot */
} append_case;

static uint32_t heads_of(const append_case *c)
{
    return c->heads ? c->heads : HEADS;
}

static void choose_slots(const append_case *c, int64_t *slots)
{
    int64_t all[BLOCKS * 64];
    for (int i = 0; i < BLOCKS * 64; i++)
        all[i] = i;
    for (int i = BLOCKS * 64 - 1; c->order == 1 && i > 0; i--) {
        int j = (int)(random_bits() % (uint64_t)(i + 1));
        int64_t t = all[i];
        all[i] = all[j];
        all[j] = t;
    }
    for (uint32_t i = 0; i < c->n_tokens; i++)
        slots[i] = c->order == 2 ? (int64_t)(i % BLOCKS) * 64 + (i * 13 + 5) % 64
                                 : all[c->order == 0 ? i + 37 : i];
    if (c->n_tokens > 4)
        slots[3] = -1; /* this row is skipped */
    for (uint32_t i = 0; c->sparse && i < c->n_tokens; i++)
        if (i % 50 != 7)
            slots[i] = -1;
}

/* Rows of all kinds: usual rows, zeros, minus zeros, a constant, tiny, large, one large channel. */
static void fill_row(float *row, uint32_t d, uint32_t kind)
{
    for (uint32_t j = 0; j < d; j++) {
        float x = random_normal();
        row[j] = kind == 1   ? 0.0f
                 : kind == 2 ? -0.0f
                 : kind == 3 ? 0.375f
                 : kind == 4 ? x * 1e-7f
                 : kind == 5 ? x * 900
                 : kind == 6 ? (j == 5 ? 60.0f : x * 0.01f)
                 : kind == 7 ? (float)(j % 2) * -0.0f
                             : x;
    }
}

static void encode_on_cpu(test_cache *cache, const append_case *c, kvant_role role,
                          const float *rows, const float *center, const int64_t *slots)
{
    const kvant_codec *codec = role == KVANT_ROLE_K ? cache->k : cache->v;
    const uint32_t heads = heads_of(c);
    for (uint32_t i = 0; i < c->n_tokens; i++)
        for (uint32_t h = 0; slots[i] >= 0 && h < heads; h++) {
            uint32_t block = (uint32_t)(slots[i] / 64), at = (uint32_t)(slots[i] % 64),
                     d = c->head_dim;
            const kvant_affine affine = { .center = center ? center + h * d : NULL,
                                          .scale = center ? scale + h * d : NULL };
            assert_int_equal(kvant_codec_encode(codec, &affine, rows + (i * heads + h) * d, d, at,
                                                1, cache_page(cache, role, block, h)),
                             KVANT_OK);
        }
}

static void compare_pools(const test_cache *cache, const append_case *c)
{
    size_t bytes = cache->block_bytes * cache->n_blocks;
    uint8_t *got = malloc(bytes);
    device_read(got, cache->gpu_pool, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != cache->pool[i])
            fail_msg(
                "%s, head_dim %u, order %d, type %d: byte %zu of block %zu is %02x, the CPU's %02x",
                c->spec, c->head_dim, c->order, c->type, i % cache->block_bytes,
                i / cache->block_bytes, got[i], cache->pool[i]);
    free(got);
}

static void check_decode(const test_cache *cache, const append_case *c, kvant_role role,
                         const float *center)
{
    const kvant_codec *codec = role == KVANT_ROLE_K ? cache->k : cache->v;
    const uint32_t d = c->head_dim, heads = heads_of(c);
    size_t n = (size_t)BLOCKS * 64 * heads * d;
    int32_t blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = BLOCKS - 1 - i;
    void *gpu_blocks = device_copy(blocks, sizeof blocks),
         *out = device_new(n * sizeof(float), 0xff);
    void *gpu_center = center ? device_copy(center, heads * d * sizeof(float)) : NULL;
    void *gpu_scale = center ? device_copy(scale, heads * d * sizeof(float)) : NULL;
    kvant_cuda_decode_args args = { .size = sizeof args,
                                    .codec = role == KVANT_ROLE_K ? cache->gpu_k : cache->gpu_v,
                                    .pages = cache_pages(cache, role),
                                    .blocks = gpu_blocks,
                                    .n_blocks = BLOCKS,
                                    .n_kv_heads = heads,
                                    .type = KVANT_CUDA_F32,
                                    .out = out,
                                    .token_stride = heads * d,
                                    .head_stride = d,
                                    .center = gpu_center,
                                    .scale = gpu_scale };
    assert_int_equal(kvant_cuda_decode(&args, NULL), KVANT_OK);
    float *got = malloc(n * sizeof *got), *want = malloc(64 * d * sizeof *want);
    device_read(got, out, n * sizeof *got);
    for (uint32_t b = 0; b < BLOCKS; b++)
        for (uint32_t h = 0; h < heads; h++) {
            const kvant_affine affine = { .center = center ? center + h * d : NULL,
                                          .scale = center ? scale + h * d : NULL };
            kvant_codec_decode(codec, &affine, cache_page(cache, role, (uint32_t)blocks[b], h), 0,
                               64, want, d);
            for (uint32_t t = 0; t < 64; t++)
                for (uint32_t j = 0; j < d; j++) {
                    float x = got[((b * 64 + t) * heads + h) * d + j], y = want[t * d + j];
                    if (!(x == y))
                        fail_msg("%s, head_dim %u: decoded %g, the CPU %g (block %u, head %u, "
                                 "token %u, channel %u)",
                                 c->spec, d, x, y, b, h, t, j);
                }
        }
    free(got);
    free(want);
    cudaFree(gpu_blocks);
    cudaFree(out);
    cudaFree(gpu_center);
    cudaFree(gpu_scale);
}

static void run_append(const append_case *c)
{
    test_cache cache;
    const uint32_t d = c->head_dim, heads = heads_of(c);
    size_t n = (size_t)c->n_tokens * heads * d, bytes;
    cache_open(&cache, c->spec, c->spec, d, heads, BLOCKS, 0);
    float *rows[2], *center = malloc(heads * d * sizeof *center);
    void *gpu_rows[2], *gpu_center;
    int64_t *slots = malloc(c->n_tokens * sizeof *slots);
    for (uint32_t j = 0; j < heads * d; j++)
        center[j] = random_normal(), scale[j] = random_uniform(0.5f, 2);
    gpu_center = device_copy(center, heads * d * sizeof *center);
    void *gpu_scale = device_copy(scale, heads * d * sizeof *scale);
    choose_slots(c, slots);
    for (int r = 0; r < 2; r++) {
        rows[r] = malloc(n * sizeof(float));
        for (uint32_t i = 0; i < c->n_tokens * heads; i++)
            fill_row(rows[r] + (size_t)i * d, d, (uint32_t)(random_bits() % 24));
        for (size_t i = 0; i < n; i++)
            rows[r][i] = round_to_type(rows[r][i], c->type);
        void *typed = to_type(rows[r], n, c->type, &bytes);
        gpu_rows[r] = device_copy(typed, bytes);
        free(typed);
        encode_on_cpu(&cache, c, (kvant_role)r, rows[r], c->center ? center : NULL, slots);
    }
    void *gpu_slots = device_copy(slots, c->n_tokens * sizeof *slots);
    uint32_t refused = 0, *gpu_refused = device_copy(&refused, sizeof refused);
    kvant_cuda_append_args args = { .size = sizeof args,
                                    .type = c->type,
                                    .n_tokens = c->n_tokens,
                                    .n_kv_heads = heads,
                                    .slots = gpu_slots,
                                    .refused = gpu_refused };
    args.k = cache_rows(&cache, KVANT_ROLE_K, gpu_rows[0]);
    args.v = cache_rows(&cache, KVANT_ROLE_V, gpu_rows[1]);
    if (c->center) {
        args.k.center = args.v.center = gpu_center;
        args.k.scale = args.v.scale = gpu_scale;
    }
    assert_int_equal(kvant_cuda_append(&args, NULL), KVANT_OK);
    check_cuda(cudaDeviceSynchronize());
    device_read(&refused, gpu_refused, sizeof refused);
    assert_int_equal(refused, 0);
    compare_pools(&cache, c);
    check_decode(&cache, c, KVANT_ROLE_K, c->center ? center : NULL);
    check_decode(&cache, c, KVANT_ROLE_V, c->center ? center : NULL);
    for (int r = 0; r < 2; r++) {
        free(rows[r]);
        cudaFree(gpu_rows[r]);
    }
    free(center);
    free(slots);
    cudaFree(gpu_center);
    cudaFree(gpu_scale);
    cudaFree(gpu_slots);
    cudaFree(gpu_refused);
    cache_close(&cache);
}

static void append_roles(const test_cache *cache, void *const rows[2], const void *slots,
                         uint32_t n_tokens, bool keys, bool values)
{
    kvant_cuda_append_args args = { .size = sizeof args,
                                    .type = KVANT_CUDA_F32,
                                    .n_tokens = n_tokens,
                                    .n_kv_heads = HEADS,
                                    .slots = slots };
    if (keys)
        args.k = cache_rows(cache, KVANT_ROLE_K, rows[0]);
    if (values)
        args.v = cache_rows(cache, KVANT_ROLE_V, rows[1]);
    assert_int_equal(kvant_cuda_append(&args, NULL), KVANT_OK);
}

/* One launch takes a codebook of more than 4 bits and one of at most 4 bits. It writes the same
 * bytes as a launch for each of them. */
static void check_two_codebooks(const char *k, const char *v, uint32_t d, uint32_t n_tokens)
{
    test_cache cache, apart;
    void *rows[2];
    int64_t slots[BLOCKS * 64];
    cache_open(&cache, k, v, d, HEADS, BLOCKS, 0);
    cache_open(&apart, k, v, d, HEADS, BLOCKS, 0);
    for (uint32_t i = 0; i < n_tokens; i++)
        slots[i] = (int64_t)i + 37;
    for (int r = 0; r < 2; r++) {
        float *made = malloc((size_t)n_tokens * HEADS * d * sizeof *made);
        for (uint32_t i = 0; i < n_tokens * HEADS; i++)
            fill_row(made + (size_t)i * d, d, (uint32_t)(random_bits() % 24));
        rows[r] = device_copy(made, (size_t)n_tokens * HEADS * d * sizeof *made);
        free(made);
    }
    void *gpu_slots = device_copy(slots, n_tokens * sizeof *slots);
    append_roles(&cache, rows, gpu_slots, n_tokens, true, true);
    append_roles(&apart, rows, gpu_slots, n_tokens, true, false);
    append_roles(&apart, rows, gpu_slots, n_tokens, false, true);
    check_cuda(cudaDeviceSynchronize());
    const size_t bytes = cache.block_bytes * cache.n_blocks;
    uint8_t *got = malloc(bytes), *want = malloc(bytes);
    device_read(got, cache.gpu_pool, bytes);
    device_read(want, apart.gpu_pool, bytes);
    assert_memory_equal(got, want, bytes);
    free(got);
    free(want);
    cudaFree(rows[0]);
    cudaFree(rows[1]);
    cudaFree(gpu_slots);
    cache_close(&cache);
    cache_close(&apart);
}

CASE(test_two_codebooks)
{
    static const uint32_t dims[] = { 64, 96, 128, 256 }, counts[] = { 7, 64, 130 };
    for (size_t i = 0; i < (small_tests() ? 1 : 4); i++)
        for (size_t n = 0; n < 3; n++) {
            check_two_codebooks("turboquant-6:rotate=hadamard", "turboquant-4:rotate=hadamard",
                                dims[i], counts[n]);
            check_two_codebooks("turboquant-3:rotate=none",
                                "turboquant-7:rotate=hadamard,scale=norm", dims[i], counts[n]);
        }
}

static void check_same_bytes(const char *const *specs, size_t n_specs)
{
    static const uint32_t dims[] = { 64, 96, 128, 256 }, counts[] = { 300, 1, 7, 130 };
    for (size_t s = 0; s < n_specs; s++)
        for (size_t i = small_tests() ? s % 4 : 0; i < (small_tests() ? s % 4 + 1 : 4); i++) {
            if (dims[i] == 96 && strcmp(specs[s], "bdr-4:block=64") == 0)
                continue; /* 64 does not divide 96 */
            for (int order = small_tests() ? (int)(s % 3) : 0;
                 order < (small_tests() ? (int)(s % 3) + 1 : 3); order++) {
                append_case c = { .spec = specs[s],
                                  .head_dim = dims[i],
                                  .n_tokens = counts[(s + i + (size_t)order) % 4],
                                  .type = (kvant_cuda_type)((s + i + (size_t)order) % 3),
                                  .order = order,
                                  .center = (s + i) % 3 == 0 };
                if (order == 2)
                    c.n_tokens = BLOCKS;
                if (small_tests() && c.n_tokens > 80)
                    c.n_tokens = 80;
                run_append(&c);
            }
        }
}

CASE(test_same_bytes)
{
    static const char *const specs[] = { "int-4",
                                         "int-4:sym",
                                         "int-8",
                                         "int-8:sym",
                                         "int-5",
                                         "int-6:sym",
                                         "int-7",
                                         "turboquant-1:rotate=hadamard",
                                         "turboquant-5:rotate=hadamard",
                                         "turboquant-6:rotate=hadamard",
                                         "turboquant-7:scale=norm,rotate=hadamard",
                                         "turboquant-8:rotate=none",
                                         "bdr-4",
                                         "bdr-4:block=64",
                                         "bdr-4:block=16",
                                         "turboquant-2:rotate=hadamard",
                                         "turboquant-3:rotate=hadamard",
                                         "turboquant-4:rotate=hadamard",
                                         "turboquant-4:scale=norm,rotate=hadamard",
                                         "turboquant-4:rotate=none",
                                         "trellis-2:rotate=hadamard",
                                         "trellis-3:rotate=hadamard",
                                         "trellis-4:rotate=hadamard",
                                         "trellis-4:rotate=none,scale=norm" };
    check_same_bytes(specs, sizeof specs / sizeof *specs);
}

/* Cases of kernels of any head_dim, groups and chunks (src/cuda/any) have names from "any_" on. */
CASE(any_chunks)
{
    static const char *const specs[] = { "octopus-2:rotate=hadamard",
                                         "octopus-3:rotate=hadamard",
                                         "octopus-4:rotate=hadamard",
                                         "octopus-4:rotate=none,scale=norm",
                                         "octopus-3:rotate=hadamard,round=scalar",
                                         "octopus-3:rotate=none,round=2x2",
                                         "octopus-2:rotate=hadamard,round=full",
                                         "hqmq-s96r4",
                                         "hqmq-s192r6:rotate=hadamard",
                                         "hqmq-s96r4:book=random,scale=norm" };
    check_same_bytes(specs, sizeof specs / sizeof *specs);
}

/* Many rows of a trellis: a warp searches one row or four rows at once. A thread block has 4, 8, 16
 * or 32 rows, or several pages. */
CASE(test_many_rows)
{
    static const char *const specs[] = { "trellis-4:rotate=hadamard", "trellis-3:rotate=none",
                                         "trellis-2:rotate=hadamard,scale=norm" };
    static const uint32_t dims[] = { 128, 64, 96 };
    static const struct {
        uint32_t n_tokens, heads;
        bool sparse, quick;
    } shapes[] = { { 70, 3, false, true },
                   { 150, 3, true, true },
                   { BLOCKS * 64 - 37, 1, true, true },
                   { BLOCKS * 64 - 37, 4, true, true },
                   { BLOCKS * 64 - 37, MOST_HEADS, true, true },
                   { 150, 3, false, false },
                   { BLOCKS * 64 - 37, 1, false, false },
                   { BLOCKS * 64 - 37, 4, false, false },
                   { BLOCKS * 64 - 37, MOST_HEADS, false, false } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int order = 0; order < 2; order++)
            for (size_t s = 0; s < 3; s++)
                if (!small_tests() || (shapes[i].quick && s == i % 3 && (size_t)order == i / 3 % 2))
                    run_append(&(append_case){ specs[s], dims[s], shapes[i].n_tokens,
                                               KVANT_CUDA_BF16, order, s == 1, shapes[i].heads,
                                               shapes[i].sparse });
}

/* Any head_dim and any groups. */
CASE(any_head_dims)
{
    static const struct {
        const char *spec;
        uint32_t most; /* largest head_dim */
    } cases[] = { { "int-4", 512 },
                  { "int-8:sym", 512 },
                  { "int-7", 512 },
                  { "int-2:group=32", 512 },
                  { "int-4:group=32,sym", 512 },
                  { "int-5:group=16", 512 },
                  { "int-3:group=24", 512 },
                  { "bdr-4:group=64", 512 },
                  { "bdr-4", 512 },
                  { "turboquant-1:rotate=hadamard", 512 },
                  { "turboquant-4:rotate=hadamard", 512 },
                  { "turboquant-3:rotate=none,scale=norm", 512 },
                  { "turboquant-6:rotate=hadamard", 512 },
                  { "octopus-2:rotate=hadamard", 512 },
                  { "octopus-4:rotate=hadamard", 512 },
                  { "octopus-3:rotate=none,round=scalar", 512 },
                  { "octopus-3:rotate=none,round=2x2,scale=norm", 512 },
                  { "hqmq-s96r4", 512 },
                  { "hqmq-s192r6:rotate=hadamard", 512 },
                  { "hqmq-s24r3", 512 },
                  { "trellis-2:rotate=hadamard", 512 },
                  { "trellis-3:rotate=none", 512 },
                  { "trellis-4:rotate=hadamard", 512 },
                  { "trellis-4:rotate=hadamard,scale=norm", 512 } };
    static const uint32_t dims[] = { 80, 112, 192, 512, 48, 336, 64, 128, 16 },
                          counts[] = { 150, 1, 7, 80 };
    for (size_t s = 0; s < sizeof cases / sizeof *cases; s++)
        for (size_t i = small_tests() ? s % 3 : 0;
             i < (small_tests() ? s % 3 + 1 : sizeof dims / sizeof *dims); i++) {
            const append_case c = { cases[s].spec,
                                    dims[i],
                                    (s + i) % 3 == 2 ? BLOCKS : counts[(s + i) % 4],
                                    (kvant_cuda_type)((s + i) % 3),
                                    (int)((s + i) % 3),
                                    (s + i) % 4 == 0,
                                    0,
                                    false };
            if (dims[i] <= cases[s].most)
                run_append(&c);
        }
}

/* The general form (src/cuda/any/general.h). */
CASE(any_families)
{
    static const char *const specs[] = {
        "f32",
        "f16",
        "bf16",
        "int-3:group=32,hybrid",
        "int-4:group=24,hybrid=code",
        PAPERS("turboquant-4:qjl,rotate=hadamard", "turboquant-1:qjl,rotate=hadamard",
               "turboquant-3:qjl,sketch=gaussian,rotate=none", "octopus-1:rotate=hadamard",
               "octopus-5:rotate=none", "octopus-4:split=7.1,rotate=none,scale=norm",
               "octopus-3:split=5.2,round=full,rotate=none", "octopus-2:qjl,rotate=hadamard",
               "polar-2:rotate=hadamard", "polar-3:rotate=none,scale=norm",
               "polar-4:rotate=hadamard", "hqmq-s341r6", "hqmq-s96r4:med3",
               "hqmq-s24r3:med=1,slots=3,scale=norm", "spherical-r4jl4", "addvq-k24r3",
               "addvq-k48r4:search=greedy,scale=unbiased", )
    };
    static const uint32_t dims[] = { 64, 128, 80, 256, 512, 16 }, counts[] = { 150, 1, 7, 80 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = small_tests() ? s % 3 : 0;
             i < (small_tests() ? s % 3 + 1 : sizeof dims / sizeof *dims); i++)
            run_append(&(append_case){
                specs[s], dims[i], (s + i) % 3 == 2 ? BLOCKS : counts[(s + i) % 4],
                (kvant_cuda_type)((s + i) % 3), (int)((s + i) % 3), (s + i) % 4 == 0, 0, false });
}

/* Bytes around a written token do not change: pages of 0xa5 keep every bit that does not belong to
 * the token. */
static void check_neighbours(const char *const *specs, size_t n_specs)
{
    for (size_t s = 0; s < n_specs; s++) {
        test_cache cache;
        cache_open(&cache, specs[s], specs[s], 128, 1, 1, 0xa5);
        float rows[2][128];
        int64_t slots[2] = { 9, 62 };
        for (int i = 0; i < 2; i++) {
            fill_row(rows[i], 128, 0);
            kvant_codec_encode(cache.v, NULL, rows[i], 128, (uint32_t)slots[i], 1,
                               cache_page(&cache, KVANT_ROLE_V, 0, 0));
        }
        void *gpu_rows = device_copy(rows, sizeof rows),
             *gpu_slots = device_copy(slots, sizeof slots);
        kvant_cuda_append_args args = { .size = sizeof args,
                                        .type = KVANT_CUDA_F32,
                                        .n_tokens = 2,
                                        .n_kv_heads = 1,
                                        .slots = gpu_slots };
        args.v = cache_rows(&cache, KVANT_ROLE_V, gpu_rows);
        assert_int_equal(kvant_cuda_append(&args, NULL), KVANT_OK);
        compare_pools(&cache,
                      &(append_case){ specs[s], 128, 2, KVANT_CUDA_F32, 0, false, 0, false });
        cudaFree(gpu_rows);
        cudaFree(gpu_slots);
        cache_close(&cache);
    }
}

CASE(test_keeps_neighbours)
{
    static const char *const specs[] = { "int-4", "int-8", "turboquant-3", "trellis-3",
                                         "trellis-4" };
    check_neighbours(specs, sizeof specs / sizeof *specs);
}

CASE(any_keeps_neighbours)
{
    static const char *const specs[] = { "octopus-2", "octopus-4", "hqmq-s96r4", "hqmq-s192r6",
                                         PAPERS("polar-3", "turboquant-3:qjl",
                                                "hqmq-s96r4:med3", ) };
    check_neighbours(specs, sizeof specs / sizeof *specs);
}

static void check_refused_rows(const char *const *specs, size_t n_specs)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f, 1e6f };
    for (size_t s = 0; s < n_specs; s++)
        for (size_t i = 0; i < 5; i++) {
            test_cache cache;
            cache_open(&cache, specs[s], specs[s], 128, 1, 1, 0);
            float rows[3][128];
            int64_t slots[3] = { 0, 1, 2 };
            for (int t = 0; t < 3; t++)
                fill_row(rows[t], 128, 0);
            for (int j = 0; j < 128; j++)
                rows[1][j] = i == 4 ? (j % 2 ? bad[i] : -bad[i]) : j == 77 ? bad[i] : rows[1][j];
            kvant_status status[3];
            for (uint32_t t = 0; t < 3; t++)
                status[t] = kvant_codec_encode(cache.k, NULL, rows[t], 128, t, 1,
                                               cache_page(&cache, KVANT_ROLE_K, 0, 0));
            assert_int_not_equal(status[1], KVANT_OK);
            uint32_t refused = 0, *gpu_refused = device_copy(&refused, sizeof refused);
            void *gpu_rows = device_copy(rows, sizeof rows),
                 *gpu_slots = device_copy(slots, sizeof slots);
            kvant_cuda_append_args args = { .size = sizeof args,
                                            .type = KVANT_CUDA_F32,
                                            .n_tokens = 3,
                                            .n_kv_heads = 1,
                                            .slots = gpu_slots,
                                            .refused = gpu_refused };
            args.k = cache_rows(&cache, KVANT_ROLE_K, gpu_rows);
            assert_int_equal(kvant_cuda_append(&args, NULL), KVANT_OK);
            device_read(&refused, gpu_refused, sizeof refused);
            assert_int_equal(refused, status[1] == KVANT_ERR_NONFINITE ? KVANT_CUDA_ROW_NONFINITE
                                                                       : KVANT_CUDA_ROW_RANGE);
            compare_pools(&cache,
                          &(append_case){ specs[s], 128, 3, KVANT_CUDA_F32, 0, false, 0, false });
            cudaFree(gpu_rows);
            cudaFree(gpu_slots);
            cudaFree(gpu_refused);
            cache_close(&cache);
        }
}

CASE(test_refused_rows)
{
    static const char *const specs[] = { "int-4", "turboquant-4", "turboquant-6", "trellis-4" };
    check_refused_rows(specs, sizeof specs / sizeof *specs);
}

CASE(any_refused_rows)
{
    static const char *const specs[] = { "octopus-4", "hqmq-s96r4" };
    check_refused_rows(specs, sizeof specs / sizeof *specs);
}

RUN_CASES_ON_GPU(NULL, NULL)
