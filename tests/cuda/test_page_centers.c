/* test_page_centers.c - attention over pages whose keys have their own centres: every kind of
 * kernel, with one matrix and with several, exact and hidden pages. The call
 * kvant_cuda_page_offsets computes the offsets. The reference in attention_bound.c uses the centres
 * themselves. */
#include "attention_fixture.h"

typedef struct spec_pair {
    const char *k, *v;
    uint32_t head_dim;
} spec_pair;

static const spec_pair specs[] = {
    { "trellis-4:rotate=hadamard", "trellis-4:rotate=hadamard", 128 },
    { "trellis-3:rotate=hadamard", "trellis-3:rotate=hadamard", 64 },
    { "turboquant-4:rotate=hadamard", "turboquant-4:rotate=hadamard", 128 },
    { "trellis-2:rotate=hadamard", "trellis-2:rotate=hadamard", 128 },
    { "int-8", "int-8", 64 },
    { "trellis-4:rotate=hadamard", "trellis-2:rotate=hadamard", 64 },
    { "int-8:sym", "turboquant-4:rotate=hadamard", 128 },
    { "int-5", "trellis-4:rotate=hadamard", 80 },
    { "kivi-2", "kivi-2", 128 },
    { "bf16", "bf16", 128 },
    { "turboquant-6:rotate=hadamard", "trellis-4:rotate=hadamard", 128 }
};
enum { N_SPECS = sizeof specs / sizeof *specs };

CASE(test_few_tokens)
{
    static const attention_problem problems[] = {
        { .query_tokens = 1 },
        { .query_tokens = 1, .sinks = true },
        { .query_tokens = 5, .causal = true },
        { .query_tokens = 1, .mask = true },
        { .query_tokens = 9, .causal = true, .sinks = true },
        { .query_tokens = 3, .causal = true, .window = 150 },
        { .query_tokens = 33, .causal = true, .max_bias = 8 },
        { .query_tokens = 70, .causal = true },
    };
    static const int32_t some[] = { 500, 20, 129, 0, 700 }, one[] = { 5000 };
    const size_t n_problems = sizeof problems / sizeof *problems;
    for (size_t s = 0; s < N_SPECS; s++)
        for (size_t i = 0; i < n_problems; i++) {
            const attention_case c = { specs[s].k,         specs[s].v,
                                       specs[s].head_dim,  2,
                                       s % 2 ? 8 : 4,      i == 1 ? 1 : i < 6 ? 5 : 3,
                                       KVANT_CUDA_F32,     i == 1 ? one : some,
                                       i % 2 == 1,         0.5f,
                                       (s + i) % 2 ? 3 : 0 };
            attention_problem p = problems[i];
            p.page_centers = p.hidden = true;
            p.matrices = (s + i) % 3 == 0
                             ? 0
                             : 2 + (uint32_t)(5 * s + 7 * i) % (KVANT_CUDA_MOST_MATRICES - 1);
            if (!small_tests() || (s + i) % 3 == 0)
                run_problem(&c, &p);
        }
}

/* As many query tokens as in a prefill, with room for unpacked pages and without. */
CASE(test_many_tokens)
{
    static const int32_t length[] = { 730 };
    for (size_t s = 0; s < N_SPECS; s++)
        for (uint32_t i = 0; i < 2; i++) {
            const attention_case c = { specs[s].k, specs[s].v, specs[s].head_dim,  1,
                                       i ? 1 : 2,  1,          KVANT_CUDA_BF16,    length,
                                       false,      0.5f,       (s + i) % 2 ? 3 : 0 };
            const attention_problem p = { .query_tokens = i ? 600 : 250,
                                          .causal = true,
                                          .window = s % 4 == 3 ? 250 : 0,
                                          .scratch = i || s % 2,
                                          .page_centers = true,
                                          .hidden = true,
                                          .matrices = s % 2 == i ? 4 : 0 };
            if (!small_tests() || s % 3 == i)
                run_problem(&c, &p);
        }
}

CASE(test_ragged_tokens)
{
    static const int32_t lengths[] = { 300, 64, 65, 200, 129 };
    static const uint32_t counts[] = { 1, 4, 0, 33, 2 };
    for (size_t s = 0; s < N_SPECS; s++) {
        const attention_case c = {
            specs[s].k, specs[s].v,     specs[s].head_dim, 2,    s % 2 ? 8 : 2,
            5,          KVANT_CUDA_F16, lengths,           true, 0.5f,
            3
        };
        const attention_problem p = { .query_tokens = 33,
                                      .counts = counts,
                                      .causal = s % 3 != 0,
                                      .page_centers = true,
                                      .matrices = s % 2 ? 3 : 0 };
        run_problem(&c, &p);
    }
}

/* Rows of a token minus its block's centre, then the offsets of pages for a query: a graph gives
 * the same results as the calls. */
CASE(test_captured)
{
    enum { D = 128, KV = 2, PAGES = 20, HEADS = 8 };
    const block_centers_shape shape = { D, KV, D, false };
    const int64_t slot = 64 * 7 + 5;
    const int32_t length = 64 * PAGES;
    float numbers[HEADS * D], want[KV * D + PAGES * HEADS], got[KV * D + PAGES * HEADS];
    test_block_centers_of block_centers;
    block_centers_open(&block_centers, &shape, PAGES, 1, NULL, 2);
    for (int i = 0; i < HEADS * D; i++)
        numbers[i] = random_normal();
    void *rows = device_copy(numbers, sizeof numbers), *slots = device_copy(&slot, sizeof slot),
         *lengths = device_copy(&length, sizeof length);
    float *out = device_new(sizeof want, 0xff);
    const kvant_cuda_center_rows_args center = { .size = sizeof center,
                                                 .rows = rows,
                                                 .type = KVANT_CUDA_F32,
                                                 .token_stride = KV * D,
                                                 .head_stride = D,
                                                 .n_tokens = 1,
                                                 .n_kv_heads = KV,
                                                 .head_dim = D,
                                                 .slots = slots,
                                                 .block_centers = gpu_block_centers(&block_centers),
                                                 .out = out };
    const kvant_cuda_page_offsets_args pages = { .size = sizeof pages,
                                                 .q = rows,
                                                 .type = KVANT_CUDA_F32,
                                                 .q_head_stride = D,
                                                 .batch = 1,
                                                 .n_heads = HEADS,
                                                 .n_kv_heads = KV,
                                                 .head_dim = D,
                                                 .lengths = lengths,
                                                 .table_stride = PAGES,
                                                 .block_centers = gpu_block_centers(&block_centers),
                                                 .offsets = out + KV * D };
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamCreate(&stream));
    for (int captured = 0; captured < 2; captured++) {
        if (captured)
            check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        assert_int_equal(kvant_cuda_center_rows(&center, stream), KVANT_OK);
        assert_int_equal(kvant_cuda_page_offsets(&pages, stream), KVANT_OK);
        if (captured)
            check_cuda(cudaStreamEndCapture(stream, &graph));
        check_cuda(cudaStreamSynchronize(stream));
        if (!captured)
            device_read(want, out, sizeof want);
        check_cuda(cudaMemset(out, 0xff, sizeof want));
    }
    check_cuda(cudaGraphInstantiate(&exec, graph, 0));
    check_cuda(cudaGraphLaunch(exec, stream));
    check_cuda(cudaStreamSynchronize(stream));
    device_read(got, out, sizeof got);
    assert_memory_equal(got, want, sizeof got);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    block_centers_close(&block_centers);
    cudaFree(rows), cudaFree(slots), cudaFree(lengths), cudaFree(out);
}

CASE(test_refused)
{
    static const int32_t length[] = { 100 };
    const attention_case c = { "int-4",        "int-4", 128,   2,    8, 1,
                               KVANT_CUDA_F32, length,  false, 0.5f, 0 };
    const attention_problem p = { .query_tokens = 1, .page_centers = true };
    fixture f;
    fixture_open(&f, &c, &p);
    kvant_cuda_kernel_attention_args args = attention_args(&f);
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_OK);
    args.logit_softcap = 30;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    args.logit_softcap = 0, args.k_center = f.gpu_q;
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_ERR_ARGUMENT);
    fixture_close(&f);
}

RUN_CASES_ON_GPU(NULL, NULL)
