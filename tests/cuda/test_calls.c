/* test_calls.c - calls of attention on the GPU. A graph captures a call together with an append. A
 * call may have little scratch memory, new rows that no page has yet, or arguments of another
 * size. Wrong arguments are refused. test_problems.c tests the options of problems. */
#include "problem_cases.h"

/* Every codec is unpacked once for all rows; three sequences share scratch memory for two. */
CASE(test_scratch)
{
    static const struct {
        const char *k, *v;
    } specs[] = { { "int-4", "int-3" },
                  { "turboquant-4:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "kivi-2", "innerq-base" },
                  { "bdr-7", "turboquant-8:rotate=hadamard" },
                  { "octopus-4:rotate=hadamard", "octopus-3:rotate=hadamard" },
                  { "hqmq-s96r4", "hqmq-s192r6" },
                  { "trellis-4:rotate=hadamard", "trellis-3:rotate=hadamard" },
                  { "trellis-2:rotate=hadamard", "trellis-4:rotate=hadamard" } };
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

/* The append and attention that an engine captures once and replays for each token. Slots, lengths,
 * rows and queries change in place between replays. */
CASE(test_captured)
{
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
        append.k = cache_rows(&f.cache, KVANT_ROLE_K, gpu_rows[0]);
        append.v = cache_rows(&f.cache, KVANT_ROLE_V, gpu_rows[1]);
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
            forget_rows(&f);
            f.c = &now;
            for (uint32_t h = 0; h < Q && (t < 3 || t % 31 == 0 || t > 126); h++)
                check_head(&f, out, lse, 0, 0, h);
            forget_rows(&f);
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
        args.table_ready = rows.slots_ready = (uint32_t)i % 2;
        rows.next_early = (uint32_t)i / 2 % 2;
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

/* The size of cuda.h's struct is the caller's. Fields that an older version lacks are zero, and
 * fields that a newer version adds must be zero. Structs of cuda_kernels.h have one size. */
CASE(test_sizes)
{
    const attention_case c = case_of("int-4", "int-4", 128, 2, 8, 0);
    fixture f;
    fixture_open(&f, &c, NULL);
    kvant_cuda_kernel_attention_args kernel = attention_args(&f);
    struct {
        kvant_cuda_attention_args args;
        uint64_t later;
    } newer = { .later = 0 };
    /* The kernel's struct begins as the other one, and this case needs nothing behind that. */
    memcpy(&newer.args, &kernel, offsetof(kvant_cuda_kernel_attention_args, table_ready));
    newer.args.size = sizeof newer.args;
    uint8_t *first = malloc(f.out_bytes), *again = malloc(f.out_bytes);
    assert_int_equal(kvant_cuda_kernel_attention(&kernel, NULL), KVANT_OK);
    device_read(first, f.gpu_out, f.out_bytes);
    const size_t sizes[] = { sizeof newer.args, offsetof(kvant_cuda_attention_args, query_tokens),
                             offsetof(kvant_cuda_attention_args, mask), sizeof newer };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        newer.args.size = sizes[i];
        check_cuda(cudaMemset(f.gpu_out, 0xff, f.out_bytes));
        assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_OK);
        device_read(again, f.gpu_out, f.out_bytes);
        assert_memory_equal(again, first, f.out_bytes);
    }
    newer.later = 1;
    assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_ERR_ARGUMENT);
    newer.args.size = offsetof(kvant_cuda_attention_args, query_tokens) - 1;
    assert_int_equal(kvant_cuda_attention(&newer.args, NULL), KVANT_ERR_ARGUMENT);
    /* out_type may be missing; a smaller struct lacks more. */
    const size_t all = offsetof(kvant_cuda_kernel_attention_args, out_type),
                 refused[] = { all - 8, sizeof kernel + 8 };
    kernel.size = all;
    check_cuda(cudaMemset(f.gpu_out, 0xff, f.out_bytes));
    assert_int_equal(kvant_cuda_kernel_attention(&kernel, NULL), KVANT_OK);
    device_read(again, f.gpu_out, f.out_bytes);
    assert_memory_equal(again, first, f.out_bytes);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        kernel.size = refused[i];
        assert_int_equal(kvant_cuda_kernel_attention(&kernel, NULL), KVANT_ERR_ARGUMENT);
    }
    free(first);
    free(again);
    fixture_close(&f);
}

CASE(test_new_rows)
{
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

CASE(test_refused)
{
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

RUN_CASES_ON_GPU(NULL, NULL)
