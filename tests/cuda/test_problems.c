/* test_problems.c - attention problems of engines over compressed pages: several query tokens,
 * ragged, causal, windows, masks, softcap, ALiBi, sinks. Options come one by one and at random. The
 * file attention_bound.c has the reference and derives the bound. */
#include "attention_fixture.h"

#include <math.h>

#include "../unit/specs.h"

static const int32_t lengths[] = { 1, 0, 64, 63, 65, 200, -3, 300, 7, 129 };

static attention_case case_of(const char *k, const char *v, uint32_t head_dim, uint32_t n_kv_heads,
                              uint32_t n_heads, uint32_t open)
{
    return (attention_case){ k,       v,         head_dim, n_kv_heads, n_heads, 10, KVANT_CUDA_F32,
                             lengths, open == 3, 0.5f,     open };
}

/* From 2 to 66 columns for every kind of code, so that a tile, two tiles and several passes
 * occur. */
static void test_query_tokens(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-4" },
                  { "turboquant-4:rotate=hadamard", "turboquant-4:rotate=hadamard" },
                  { "turboquant-3:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "int-8:sym", "turboquant-4:rotate=hadamard" },
                  { "trellis-4:rotate=hadamard", "trellis-4:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-2:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-4:rotate=hadamard" },
                  { "hqmq-s192r6", "hqmq-s192r6" },
                  { "kivi-2", "kivi-2" },
                  { "innerq-base", "innerq-base" },
                  { "turboquant-6:rotate=hadamard", "trellis-4:rotate=hadamard" } };
    static const uint32_t dims[] = { 128, 64, 96, 256 }, tokens[] = { 1, 2, 3, 4, 5, 8, 16, 33 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 8; i++) {
            const attention_case c = case_of(specs[s].k, specs[s].v, dims[(s + i) % 4], 2,
                                             i % 3 == 0 ? 8 : 4, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[i], .causal = (s + i) % 4 != 0 };
            run_problem(&c, &p);
        }
}

/* Kernels of codes.cuh: 20 to 64 rows per kv head, whole and partial pages, exact blocks, and
 * options that change scores. */
static void test_codes(void **unused)
{
    (void)unused;
    static const char *const specs[] = { "int-4", "turboquant-4:rotate=hadamard",
                                         "octopus-4:rotate=hadamard", "hqmq-s96r4",
                                         "trellis-4:rotate=hadamard" };
    static const int32_t few_lengths[] = { 64, 3, 190, 0, 700 };
    static const uint32_t tokens[] = { 5, 8, 9, 16 };
    static const attention_problem problems[] = { { .causal = true },
                                                  { .causal = false },
                                                  { .mask = true, .softcap = 20 },
                                                  { .window = 100, .causal = true, .sinks = true },
                                                  { .max_bias = 8, .causal = true } };
    for (uint32_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = 0; i < 8; i++) {
            attention_problem p = problems[(s + i) % 5];
            attention_case c = case_of(specs[s], specs[s], i < 4 ? 128 : 64, 2, 8, i % 2 ? 3 : 0);
            c.lengths = few_lengths;
            c.batch = sizeof few_lengths / sizeof *few_lengths;
            c.key_size = i == 2 ? 4 : 0.5f; /* references are raised often */
            p.query_tokens = tokens[i % 4];
            run_problem(&c, &p);
        }
}

/* One option at a time, with one query token and with several. */
static void test_one_by_one(void **unused)
{
    (void)unused;
    static const attention_problem problems[] = {
        { .causal = true }, { .window = 1 },
        { .window = 64 },   { .window = 100, .causal = true },
        { .softcap = 5 },   { .max_bias = 8 },
        { .mask = true },   { .mask = true, .max_bias = 4 },
        { .sinks = true },  { .softcap = 30, .window = 65, .sinks = true, .causal = true },
    };
    static const char *const specs[] = { "int-4", "turboquant-4" };
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (uint32_t tokens = 1; tokens <= 6; tokens += 5) {
            attention_problem p = problems[i];
            const attention_case c =
                case_of(specs[i % 2], specs[i % 2], 128, 2, 6, i % 3 == 2 ? 3 : 0);
            p.query_tokens = tokens;
            run_problem(&c, &p);
        }
}

static void test_ragged(void **unused)
{
    (void)unused;
    static const uint32_t counts[][10] = { { 1, 2, 0, 4, 5, 1, 1, 16, 3, 0 },
                                           { 0, 0, 1, 0, 0, 33, 2, 1, 1, 1 } };
    for (uint32_t i = 0; i < 8; i++) {
        const attention_case c = case_of("turboquant-4", "turboquant-4", i % 4 < 2 ? 128 : 64, 2,
                                         i < 4 ? 8 : 2, i % 2 ? 3 : 0);
        const attention_problem p = { .query_tokens = 33,
                                      .counts = counts[i % 2],
                                      .causal = i % 3 != 0,
                                      .window = i > 5 ? 70 : 0 };
        run_problem(&c, &p);
    }
}

/* Tile kernels read every codec, in any pair. The cases have one group of query rows or two, parts
 * of a context, and odd numbers of heads. */
static void test_tiles(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-4" },
                  { "int-2", "int-3" },
                  { "int-8:sym", "turboquant-2:rotate=hadamard" },
                  { "turboquant-3:rotate=hadamard", "turboquant-4:rotate=hadamard" },
                  { "turboquant-2:rotate=hadamard", "int-8" },
                  { "kivi-2", "innerq-base" },
                  { "innerq-base", "kivi-2" },
                  { "int-5", "int-6:sym" },
                  { "bdr-7", "turboquant-8:rotate=hadamard" },
                  { "turboquant-1:rotate=hadamard", "turboquant-6:rotate=hadamard" },
                  { "octopus-2:rotate=hadamard", "octopus-3:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-4:rotate=hadamard" },
                  { "hqmq-s96r4", "hqmq-s192r6" },
                  { "hqmq-s192r6", "hqmq-s96r4" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-4:rotate=hadamard,states=1024" } };
    static const uint32_t dims[] = { 128, 96, 256, 64 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = small_tests() ? s % 4 : 0; i < (small_tests() ? s % 4 + 1 : 4); i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[i], 2, s % 2 ? 6 : 2, i % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = (s + i) % 3 == 0   ? 20
                                                          : (s + i) % 3 == 1 ? 70
                                                                             : 33,
                                          .causal = (s + i) % 4 != 0 };
            run_problem(&c, &p);
        }
}

/* Kernels of any head_dim and of any groups (src/cuda/any), with few and many rows. */
static void test_any(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-4" },
                  { "int-8:sym", "turboquant-4:rotate=hadamard" },
                  { "turboquant-6:rotate=hadamard", "int-5" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "hqmq-s96r4" },
                  { "hqmq-s192r6", "octopus-2:rotate=hadamard" },
                  { "kivi-2", "kivi-2" },
                  { "int-4:group=32", "int-4:group=64,axis=channel" },
                  { "innerq-base", "int-8:group=16,sym" },
                  { "hqmq-s24r3", "kivi-4" } };
    static const uint32_t dims[] = { 80, 112, 192, 512, 128 }, tokens[] = { 1, 5, 20, 70 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = small_tests() ? s % 3 : 0; i < (small_tests() ? s % 3 + 1 : 5); i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[i], 2, s % 2 ? 6 : 2, (s + i) % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[(s + i) % 4],
                                          .causal = i % 3 != 0,
                                          .window = (s + i) % 5 == 4 ? 100 : 0,
                                          .softcap = (s + i) % 5 == 3 ? 20 : 0,
                                          .max_bias = (s + i) % 7 == 2 ? 4 : 0,
                                          .mask = (s + i) % 5 == 1,
                                          .sinks = (s + i) % 6 == 0 };
            run_problem(&c, &p);
        }
    static const int32_t one_long[] = { 9000 };
    for (uint32_t i = 0; i < 5 && !small_tests(); i++) {
        const attention_case c = { "int-4",
                                   "trellis-4:rotate=hadamard",
                                   dims[i],
                                   2,
                                   8,
                                   1,
                                   KVANT_CUDA_BF16,
                                   one_long,
                                   true,
                                   0.5f,
                                   20 };
        if (dims[i] != 128)
            run_problem(&c, NULL);
    }
#if KVANT_PAPERS
    /* 16 query rows per thread block take 100 KB of shared memory. On GPUs with 99 KB a block has 8
     * rows. */
    const attention_case large = case_of("hqmq-s96r4", "hqmq-s96r4", 512, 2, 6, 0);
    run_problem(&large, &(attention_problem){ .query_tokens = 20, .causal = true });
#endif
}

/* One kv head for more heads than a decode kernel supports, as in Falcon and MLA. */
static void test_many_heads(void **unused)
{
    (void)unused;
    for (uint32_t i = 0; i < 4; i++) {
        const attention_case c = { "int-4",
                                   "turboquant-4:rotate=hadamard",
                                   i < 2 ? 64 : 80,
                                   1 + i % 2,
                                   71 * (1 + i % 2),
                                   10,
                                   KVANT_CUDA_F32,
                                   lengths,
                                   false,
                                   0.5f,
                                   i % 2 ? 3 : 0 };
        const attention_problem p = { .query_tokens = 1 + i, .causal = true };
        run_problem(&c, &p);
    }
}

/* No query sees any token: outputs are zeros, and the log-sum-exp is -infinity or the sink's logit.
 * Decode kernels, tile kernels and kernels of any head_dim, with a centre, which must not be added
 * then. */
static void test_nothing_seen(void **unused)
{
    (void)unused;
    static const char *const specs[] = { "int-4", "turboquant-4:rotate=hadamard", "kivi-2" };
    static const uint32_t dims[] = { 128, 64, 256, 80 }, tokens[] = { 1, 5, 70 };
    for (size_t s = 0; s < 3; s++)
        for (size_t i = 0; i < 4; i++)
            for (size_t k = 0; k < 3; k++) {
                const attention_case c = case_of(specs[s], specs[s], dims[i], 2, 4, 3);
                const attention_problem p = { .query_tokens = tokens[k],
                                              .no_blocks = true,
                                              .sinks = (s + i + k) % 3 == 2 };
                run_problem(&c, &p);
            }
}

/* The append and attention that an engine captures once and replays for each token. Slots, lengths,
 * rows and queries change in place between replays. */
static void test_captured(void **unused)
{
    (void)unused;
    enum { TOKENS = 130, D = 128, KV = 2, Q = 8 };
    static const char *const specs[] = { "int-4", "turboquant-4:rotate=hadamard",
                                         "trellis-4:rotate=hadamard" };
    for (size_t s = 0; s < 3; s++) {
        static const int32_t longest[] = { TOKENS };
        const attention_case c = { specs[s],       specs[s], D,     KV,   Q, 1,
                                   KVANT_CUDA_F32, longest,  false, 0.5f, 0 };
        fixture f;
        fixture_open(&f, &c, NULL);
        float *rows[2], *gpu_rows[2];
        for (int r = 0; r < 2; r++) {
            rows[r] = malloc(TOKENS * KV * D * sizeof(float));
            for (int j = 0; j < TOKENS * KV * D; j++)
                rows[r][j] = random_normal() * 0.5f;
            gpu_rows[r] = device_new(KV * D * sizeof(float), 0xff);
        }
        int64_t slot = -1, *gpu_slot = device_copy(&slot, sizeof slot);
        kvant_cuda_kernel_append_args append = { .size = sizeof append,
                                                 .type = KVANT_CUDA_F32,
                                                 .n_tokens = 1,
                                                 .n_kv_heads = KV,
                                                 .slots = gpu_slot };
        append.k = (kvant_cuda_rows){ .codec = f.cache.gpu_k,
                                      .pages = cache_pages(&f.cache, KVANT_ROLE_K),
                                      .rows = gpu_rows[0],
                                      .token_stride = KV * D,
                                      .head_stride = D };
        append.v = (kvant_cuda_rows){ .codec = f.cache.gpu_v,
                                      .pages = cache_pages(&f.cache, KVANT_ROLE_V),
                                      .rows = gpu_rows[1],
                                      .token_stride = KV * D,
                                      .head_stride = D };
        const kvant_cuda_kernel_attention_args args = attention_args(&f);
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        check_cuda(cudaStreamCreate(&stream));
        assert_int_equal(kvant_cuda_kernel_append(&append, stream),
                         KVANT_OK); /* engines load kernels before they capture */
        assert_int_equal(kvant_cuda_kernel_attention(&args, stream), KVANT_OK);
        check_cuda(cudaStreamSynchronize(stream));
        check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        assert_int_equal(kvant_cuda_kernel_append(&append, stream), KVANT_OK);
        assert_int_equal(kvant_cuda_kernel_attention(&args, stream), KVANT_OK);
        check_cuda(cudaStreamEndCapture(stream, &graph));
        check_cuda(cudaGraphInstantiate(&exec, graph, 0));
        check_cuda(cudaMemset(f.cache.gpu_pool, 0, f.cache.block_bytes * f.cache.n_blocks));
        memset(f.cache.pool, 0, f.cache.block_bytes * f.cache.n_blocks);
        float out[Q * D], lse[Q];
        for (int32_t t = 0; t < TOKENS; t++) {
            const int32_t length = t + 1;
            slot = 64 * (int64_t)f.table[t / 64] + t % 64;
            check_cuda(cudaMemcpy(gpu_slot, &slot, sizeof slot, cudaMemcpyHostToDevice));
            check_cuda(cudaMemcpy(f.gpu_lengths, &length, sizeof length, cudaMemcpyHostToDevice));
            for (int r = 0; r < 2; r++) {
                check_cuda(cudaMemcpy(gpu_rows[r], rows[r] + t * KV * D, KV * D * sizeof(float),
                                      cudaMemcpyHostToDevice));
                for (uint32_t h = 0; h < KV; h++)
                    assert_int_equal(kvant_codec_encode(r ? f.cache.v : f.cache.k, NULL,
                                                        rows[r] + (t * KV + (int)h) * D, D,
                                                        (uint32_t)t % 64, 1,
                                                        cache_page(&f.cache, (kvant_role)r,
                                                                   (uint32_t)f.table[t / 64], h)),
                                     KVANT_OK);
            }
            check_cuda(cudaGraphLaunch(exec, stream));
            check_cuda(cudaStreamSynchronize(stream));
            device_read(out, f.gpu_out, sizeof out);
            device_read(lse, f.gpu_lse, sizeof lse);
            attention_case now = c;
            now.lengths = &length;
            f.c = &now;
            for (uint32_t h = 0; h < Q && (t < 3 || t % 31 == 0 || t > 126); h++)
                check_head(&f, out, lse, 0, 0, h);
            f.c = &c;
        }
        uint8_t *pool = malloc(f.cache.block_bytes * f.cache.n_blocks);
        device_read(pool, f.cache.gpu_pool, f.cache.block_bytes * f.cache.n_blocks);
        assert_memory_equal(pool, f.cache.pool, f.cache.block_bytes * f.cache.n_blocks);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
        cudaStreamDestroy(stream);
        for (int r = 0; r < 2; r++) {
            free(rows[r]);
            cudaFree(gpu_rows[r]);
        }
        free(pool);
        cudaFree(gpu_slot);
        fixture_close(&f);
    }
}

/* Every codec is unpacked once for all rows; three sequences share scratch memory for two. */
static void test_scratch(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-3" },
                  { "turboquant-4:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "kivi-2", "innerq-base" },
                  { "bdr-7", "turboquant-8:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-3:rotate=hadamard" },
                  { "hqmq-s96r4", "hqmq-s192r6" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-4:rotate=hadamard,states=1024" } };
    static const uint32_t dims[] = { 128, 96, 256, 64 };
    static const int32_t some[] = { 300, 20, 129 };
    for (uint32_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = small_tests() ? s % 2 : 0; i < (small_tests() ? s % 2 + 1 : 2); i++) {
            const attention_case c = { specs[s].k,
                                       specs[s].v,
                                       dims[(s + 2 * i) % 4],
                                       1,
                                       16,
                                       3,
                                       KVANT_CUDA_F32,
                                       some,
                                       i == 1,
                                       0.5f,
                                       i ? 3 : 0 };
            const attention_problem p = { .query_tokens = 25,
                                          .causal = s % 3 != 0,
                                          .window = s % 4 == 3 ? 90 : 0,
                                          .mask = s % 4 == 2,
                                          .scratch = true };
            run_problem(&c, &p);
        }
}

/* As many query tokens as in a prefill, after earlier tokens. */
static void test_prefill(void **unused)
{
    (void)unused;
    static const int32_t past[] = { 5000, 130 };
    for (int i = 0; i < 2; i++) {
        const attention_case c = { "int-4",         "int-4", i ? 64 : 128, 1,    4, 2,
                                   KVANT_CUDA_BF16, past,    false,        0.5f, 3 };
        const attention_problem p = { .query_tokens = 130, .causal = true, .scratch = i == 0 };
        run_problem(&c, &p);
    }
}

/* Keys of several matrices, or centres, or both: every kind of attention kernel, with exact and
 * hidden pages, sinks, a mask, several query tokens. */
static void test_matrices(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
        uint32_t head_dim;
    } specs[] = { { "trellis-4:rotate=hadamard", "trellis-4:rotate=hadamard", 128 },
                  { "trellis-3:rotate=hadamard", "trellis-3:rotate=hadamard", 64 },
                  { "turboquant-4:rotate=hadamard", "turboquant-4:rotate=hadamard", 128 },
                  { "int-4", "int-4", 128 },
                  { "int-8:sym", "turboquant-4:rotate=hadamard", 256 },
                  { "octopus-4:rotate=hadamard", "octopus-4:rotate=hadamard", 64 },
                  { "kivi-2", "kivi-2", 128 },
                  { "int-5", "trellis-4:rotate=hadamard", 80 },
                  { "turboquant-6:rotate=hadamard", "trellis-4:rotate=hadamard", 128 } };
    static const attention_problem problems[] = {
        { .query_tokens = 1 },
        { .query_tokens = 1, .sinks = true },
        { .query_tokens = 4, .causal = true },
        { .query_tokens = 1, .mask = true },
        { .query_tokens = 9, .causal = true, .sinks = true },
        { .query_tokens = 33, .causal = true, .max_bias = 8 },
        { .query_tokens = 70, .causal = true },
        { .query_tokens = 130, .causal = true, .window = 250, .scratch = true },
        { .query_tokens = 110, .mask = true, .scratch = true },
    };
    static const int32_t some[] = { 500, 20, 129, 0, 700 }, one[] = { 5000 };
    const size_t n_specs = sizeof specs / sizeof *specs,
                 n_problems = sizeof problems / sizeof *problems;
    for (size_t s = 0; s < n_specs; s++)
        for (size_t i = 0; i < n_problems; i++) {
            const attention_case c = { specs[s].k,         specs[s].v,
                                       specs[s].head_dim,  2,
                                       s % 2 ? 8 : 4,      i == 1 ? 1 : i < 6 ? 5 : 3,
                                       KVANT_CUDA_F32,     i == 1 ? one : some,
                                       i % 2 == 1,         0.5f,
                                       (s + i) % 2 ? 3 : 0 };
            attention_problem p = problems[i];
            p.matrices =
                i == 4 ? 0 : 2 + (uint32_t)(5 * s + 7 * i) % (KVANT_CUDA_MOST_MATRICES - 1);
            p.key_center = i != 2;
            if (!small_tests() || (s + i) % 3 == 0)
                run_problem(&c, &p);
        }
}

static const char *one_of(const char *const *names, size_t n)
{
    return names[random_bits() % n];
}

/* Random problems, with all combinations that one call supports. */
static void test_random(void **unused)
{
    (void)unused;
    static const char *const specs[] = {
        "int-4:sym",
        "bdr-4",
        "int-8",
        "int-5",
        "kivi-2",
        "innerq-base",
        "turboquant-4:scale=norm,rotate=none",
        "turboquant-4:rotate=hadamard",
        "trellis-4:rotate=hadamard",
        "trellis-2:rotate=hadamard",
        "octopus-4:rotate=hadamard",
        "hqmq-s192r6",
#if KVANT_PAPERS
        "turboquant-2.5",
        "turboquant-3:qjl,rotate=hadamard",
        "innerq-hybrid",
        "polar-4:rotate=hadamard",
        "octopus-5:rotate=hadamard",
#endif
    };
    static const uint32_t dims[] = { 64, 128, 256, 96, 80 };
    for (int i = 0; i < 80; i++) {
        int32_t own[8];
        uint32_t counts[8];
        const uint32_t n_kv_heads = 1 + random_bits() % 3, batch = 1 + random_bits() % 8,
                       most = random_bits() % 3 ? 1 + random_bits() % 5 : 1 + random_bits() % 24;
        for (uint32_t b = 0; b < batch; b++) {
            own[b] = (int32_t)(random_bits() % 400);
            counts[b] = random_bits() % (most + 1);
        }
        const char *spec = one_of(specs, sizeof specs / sizeof *specs);
        const attention_case c = { spec,
                                   random_bits() % 3 ? spec
                                                     : one_of(specs, sizeof specs / sizeof *specs),
                                   dims[random_bits() % 5],
                                   n_kv_heads,
                                   n_kv_heads * (1 + random_bits() % 8),
                                   batch,
                                   (kvant_cuda_type)(random_bits() % 3),
                                   own,
                                   random_bits() % 4 == 0,
                                   random_uniform(0.1f, 1),
                                   (uint32_t)(random_bits() % 4) };
        const attention_problem p = { .query_tokens = most,
                                      .counts = random_bits() % 2 ? counts : NULL,
                                      .causal = random_bits() % 4 != 0,
                                      .window = random_bits() % 3
                                                    ? 0
                                                    : 1 + (uint32_t)(random_bits() % 200),
                                      .softcap = random_bits() % 4 ? 0 : random_uniform(1, 60),
                                      .max_bias = random_bits() % 4 ? 0 : random_uniform(1, 8),
                                      .mask = random_bits() % 4 == 0,
                                      .sinks = random_bits() % 4 == 0 };
        run_problem(&c, &p);
    }
}

/* The general form (src/cuda/any/general.h): pairs of its codecs, and pairs with usual codecs. */
static void test_families(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = {
        { "bf16", "int-3:group=32,hybrid" },
#if KVANT_PAPERS
        { "turboquant-2.5", "turboquant-3.5" },
        { "turboquant-3:qjl,rotate=hadamard", "turboquant-4:rotate=hadamard" },
        { "turboquant-1:qjl,rotate=none", "turboquant-4:qjl,sketch=gaussian,rotate=none" },
        { "innerq-hybrid", "innerq-hybrid" },
        { "int-4", "innerq-hybrid:hybrid=code,group=16" },
        { "hqmq-s341r6:med3", "hqmq-s1024r4" },
        { "octopus-5:rotate=hadamard", "octopus-4:split=7.1,rotate=hadamard" },
        { "octopus-2:qjl,rotate=hadamard", "trellis-4:rotate=hadamard" },
        { "polar-4:rotate=hadamard", "polar-3:rotate=hadamard" },
        { "spherical-r4jl4", "addvq-k24r3" },
        { "kivi-4", "turboquant-2.5" },
#endif
    };
    static const uint32_t dims[] = { 128, 64, 80, 256, 512 }, tokens[] = { 1, 5, 20, 70 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (uint32_t i = small_tests() ? s % 3 : 0; i < (small_tests() ? s % 3 + 1 : 5); i++) {
            const attention_case c =
                case_of(specs[s].k, specs[s].v, dims[i], 2, s % 2 ? 6 : 2, (s + i) % 2 ? 3 : 0);
            const attention_problem p = { .query_tokens = tokens[(s + i) % 4],
                                          .causal = i % 3 != 0,
                                          .sinks = (s + i) % 6 == 0 };
            run_problem(&c, &p);
        }
}

typedef struct row_arrays {
    int64_t *slots, *cells; /* and on the GPU: */
    void *gpu_slots, *gpu_cells, *gpu_rows[2];
} row_arrays;

enum { FIRST_CELL = 1000 };

/* The last token of every sequence once more, with other numbers. */
static row_arrays make_rows(const fixture *f, kvant_cuda_kernel_append_args *args)
{
    const attention_case *c = f->c;
    const size_t width = (size_t)c->n_kv_heads * c->head_dim,
                 stride = (size_t)f->blocks_per_row * 64;
    row_arrays r = {
        malloc(c->batch * sizeof(int64_t)), malloc(c->batch * sizeof(int64_t)), NULL, NULL, { NULL }
    };
    float *numbers = malloc(c->batch * width * sizeof *numbers);
    for (uint32_t b = 0; b < c->batch; b++) {
        const int32_t last = c->lengths[b] - 1,
                      entry = last < 0 ? 0 : f->table[b * f->blocks_per_row + (uint32_t)last / 64];
        r.slots[b] = last < 0 ? -1 : (int64_t)(entry < 0 ? -1 - entry : entry) * 64 + last % 64;
        r.cells[b] = (int64_t)(FIRST_CELL + b * stride) + last;
    }
    *args = (kvant_cuda_kernel_append_args){ .size = sizeof *args,
                                             .type = KVANT_CUDA_F32,
                                             .n_tokens = c->batch,
                                             .n_kv_heads = c->n_kv_heads };
    args->slots = r.gpu_slots = device_copy(r.slots, c->batch * sizeof(int64_t));
    r.gpu_cells = device_copy(r.cells, c->batch * sizeof(int64_t));
    for (int role = 0; role < 2; role++) {
        for (size_t i = 0; i < c->batch * width; i++)
            numbers[i] = random_normal();
        r.gpu_rows[role] = device_copy(numbers, c->batch * width * sizeof *numbers);
        *(role ? &args->v : &args->k) =
            (kvant_cuda_rows){ .codec = c->open ? f->open.gpu_codec[role]
                                        : role  ? f->cache.gpu_v
                                                : f->cache.gpu_k,
                               .pages = c->open ? open_pages(&f->open, (kvant_role)role)
                                                : cache_pages(&f->cache, (kvant_role)role),
                               .rows = r.gpu_rows[role],
                               .token_stride = width,
                               .head_stride = c->head_dim,
                               .center = f->gpu_center,
                               .scale = role ? f->gpu_v_scale : f->gpu_k_scale };
    }
    free(numbers);
    return r;
}

static void free_rows(row_arrays *r)
{
    free(r->slots);
    free(r->cells);
    cudaFree(r->gpu_slots);
    cudaFree(r->gpu_cells);
    cudaFree(r->gpu_rows[0]);
    cudaFree(r->gpu_rows[1]);
}

/* After an append, attention that knows the newest tokens gives the same outputs as attention that
 * does not. */
static void new_rows(const attention_case *c)
{
    fixture f;
    fixture_open(&f, c, NULL);
    kvant_cuda_kernel_append_args rows;
    row_arrays arrays = make_rows(&f, &rows);
    kvant_cuda_kernel_attention_args args = attention_args(&f);
    const size_t bytes = c->open ? 2 * f.open.page_bytes * c->n_kv_heads * f.open.n_blocks
                                 : f.cache.n_blocks * f.cache.block_bytes;
    void *pool = c->open ? f.open.gpu_pool : f.cache.gpu_pool;
    uint8_t *before = malloc(bytes), *out = malloc(f.out_bytes), *again = malloc(f.out_bytes);
    device_read(before, pool, bytes);
    for (int i = 0; i < 6; i++) {
        args.new_cells = i == 0 ? NULL : arrays.gpu_cells;
        args.new_first = FIRST_CELL;
        args.new_stride = (int64_t)f.blocks_per_row * 64;
        args.table_ready = rows.slots_ready = i % 2;
        check_cuda(cudaMemcpy(pool, before, bytes, cudaMemcpyHostToDevice));
        check_cuda(cudaMemset(f.gpu_out, 0xff, f.out_bytes));
        assert_int_equal(kvant_cuda_kernel_append(&rows, NULL), KVANT_OK);
        assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_OK);
        device_read(i == 0 ? out : again, f.gpu_out, f.out_bytes);
        if (i > 0 && memcmp(again, out, f.out_bytes) != 0)
            fail_msg("%s, head_dim %u, batch %u, open %u, run %d: outputs differ", c->k_spec,
                     c->head_dim, c->batch, c->open, i);
    }
    free(before), free(out), free(again);
    free_rows(&arrays);
    fixture_close(&f);
}

static void test_new_rows(void **unused)
{
    (void)unused;
    static const int32_t few[] = { 1, 64, 65, 700, 0, 128, 1000, 191 }, one[] = { 9000 };
    static const char *const specs[] = { "int-4", "turboquant-4", "trellis-4", "octopus-4" };
    for (int i = 0; i < (small_tests() ? 2 : 4); i++)
        for (uint32_t open = i < 2 ? 0 : 1; open < 4; open += open == 0 ? 1 : 2)
            for (uint32_t dim = 64; dim <= 128; dim += 64) {
                attention_case c = case_of(specs[i], specs[i], dim, 2, 8, open);
                new_rows(&c);
                c.lengths = few, c.batch = small_tests() ? 3 : 8, c.center = true;
                new_rows(&c);
                c.lengths = one, c.batch = 1, c.n_heads = 2;
                if (!small_tests())
                    new_rows(&c);
            }
}

/* The struct's size is the caller's. Fields that an older version lacks are zero, and fields that a
 * newer version adds must be zero. */
static void test_sizes(void **unused)
{
    (void)unused;
    const attention_case c = case_of("int-4", "int-4", 128, 2, 8, 0);
    fixture f;
    fixture_open(&f, &c, NULL);
    struct {
        kvant_cuda_kernel_attention_args args;
        uint64_t later;
    } newer = { attention_args(&f), 0 };
    uint8_t *first = malloc(f.out_bytes), *again = malloc(f.out_bytes);
    assert_int_equal(kvant_cuda_kernel_attention(&newer.args, NULL), KVANT_OK);
    device_read(first, f.gpu_out, f.out_bytes);
    const size_t sizes[] = { offsetof(kvant_cuda_kernel_attention_args, query_tokens),
                             offsetof(kvant_cuda_kernel_attention_args, mask), sizeof newer };
    for (size_t i = 0; i < 3; i++) {
        newer.args.size = sizes[i];
        check_cuda(cudaMemset(f.gpu_out, 0xff, f.out_bytes));
        assert_int_equal(kvant_cuda_kernel_attention(&newer.args, NULL), KVANT_OK);
        device_read(again, f.gpu_out, f.out_bytes);
        assert_memory_equal(again, first, f.out_bytes);
    }
    newer.later = 1;
    assert_int_equal(kvant_cuda_kernel_attention(&newer.args, NULL), KVANT_ERR_ARGUMENT);
    newer.args.size = sizes[0] - 1;
    assert_int_equal(kvant_cuda_kernel_attention(&newer.args, NULL), KVANT_ERR_ARGUMENT);
    free(first);
    free(again);
    fixture_close(&f);
}

static void test_refused(void **unused)
{
    (void)unused;
    const attention_case c = case_of("int-4", "int-4", 128, 2, 8, 0);
    fixture f;
    fixture_open(&f, &c, NULL);
    kvant_cuda_kernel_attention_args args = attention_args(&f);
    args.logit_softcap = -1;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.logit_softcap = 0, args.max_bias = NAN;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.max_bias = 0, args.query_tokens = 2, args.out_token_stride = 0;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.query_tokens = UINT32_MAX, args.out_token_stride = 1;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args = attention_args(&f);
    args.n_matrices = 2; /* matrices of no blocks */
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.n_matrices = KVANT_CUDA_MOST_MATRICES + 1, args.matrices = f.gpu_table;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    /* a softcap must see <q, c> */
    args.n_matrices = 0, args.k_center = f.gpu_q, args.logit_softcap = 30;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    /* no shape is as small as that: an error, not a result that was never computed */
    args = attention_args(&f);
    kvant_cuda_limit_shared_memory(4 << 10); /* less than 32 tokens of fp16 */
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_UNSUPPORTED);
    fixture_close(&f);
}

int main(int argc, char **argv)
{
    if (!begin_tests(argc, argv))
        return 77; /* CTest: skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiles),        cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_any),          cmocka_unit_test(test_families),
        cmocka_unit_test(test_nothing_seen), cmocka_unit_test(test_many_heads),
        cmocka_unit_test(test_captured),     cmocka_unit_test(test_query_tokens),
        cmocka_unit_test(test_codes),        cmocka_unit_test(test_one_by_one),
        cmocka_unit_test(test_ragged),       cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_random),       cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_new_rows),     cmocka_unit_test(test_matrices),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
