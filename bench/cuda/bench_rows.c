/* bench_rows.c - times attention of many query rows on an NVIDIA GPU, without Python: prefill over
 * a compressed past, and several query tokens per sequence. bench_rows.sh builds and runs it.
 *
 *     bench_rows PROBLEM [CODEC...]      PROBLEM: batch,heads,kv_heads,head_dim,tokens,query_tokens
 *
 * A figure is the median of replays of a CUDA graph that holds the one call, with the second-level
 * cache overwritten before each. Blocks are in random order; 16 blocks have different contents. */
#include <kvant/cuda_kernels.h>

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DISTINCT = 16, MOST_RUNS = 25 };

typedef struct problem {
    unsigned batch, heads, kv_heads, head_dim, tokens, queries;
} problem;

static void check(int good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "%s failed: %s\n", what, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

#define CUDA(call) check((call) == cudaSuccess, #call)
#define KVANT(call) check((call) == KVANT_OK, #call)

static float normal(void)
{
    float sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (float)rand() / (float)RAND_MAX;
    return sum - 6;
}

static void *new_device(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemset(p, 0, bytes));
    return p;
}

static void *copied(const void *from, size_t bytes)
{
    void *p = new_device(bytes);
    CUDA(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    return p;
}

/* The codecs of one role, and its pages in the pool: K pages of all kv heads of a block, then V
 * pages. */
typedef struct role {
    kvant_codec *codec;
    kvant_cuda_codec *gpu;
    size_t page_bytes;
} role;

static role make_role(const char *spec, const problem *p, kvant_role which)
{
    char text[256] = "";
    role r = { 0 };
    kvant_codec_info info = { .size = sizeof info };
    if (kvant_codec_create(spec, p->head_dim, which, 7, &r.codec, text, sizeof text) != KVANT_OK ||
        kvant_cuda_codec_from(r.codec, &r.gpu, text, sizeof text) != KVANT_OK) {
        fprintf(stderr, "%s: %s\n", spec, text);
        exit(1);
    }
    KVANT(kvant_codec_get_info(r.codec, &info));
    r.page_bytes = info.page_bytes;
    return r;
}

static void encode_page(const role *r, unsigned head_dim, unsigned char *page)
{
    float *rows = malloc(sizeof *rows * 64 * head_dim);
    for (unsigned i = 0; i < 64 * head_dim; i++)
        rows[i] = normal();
    KVANT(kvant_codec_encode(r->codec, NULL, rows, head_dim, 0, 64, page));
    free(rows);
}

static unsigned char *make_pool(const problem *p, const role *k, const role *v, size_t n_blocks,
                                size_t *block_bytes)
{
    *block_bytes = p->kv_heads * (k->page_bytes + v->page_bytes);
    unsigned char *host = calloc(DISTINCT, *block_bytes),
                  *pool = new_device(n_blocks * *block_bytes);
    for (int b = 0; b < DISTINCT; b++)
        for (unsigned h = 0; h < p->kv_heads; h++) {
            unsigned char *block = host + b * *block_bytes;
            encode_page(k, p->head_dim, block + h * k->page_bytes);
            encode_page(v, p->head_dim, block + p->kv_heads * k->page_bytes + h * v->page_bytes);
        }
    for (size_t b = 0; b < n_blocks; b += DISTINCT)
        CUDA(cudaMemcpy(pool + b * *block_bytes, host,
                        *block_bytes * (n_blocks - b < DISTINCT ? n_blocks - b : DISTINCT),
                        cudaMemcpyHostToDevice));
    free(host);
    return pool;
}

static int32_t *make_table(size_t n)
{
    int32_t *table = malloc(n * sizeof *table);
    for (size_t i = 0; i < n; i++) {
        const size_t j = (size_t)rand() % (i + 1);
        table[i] = table[j];
        table[j] = (int32_t)i;
    }
    int32_t *gpu = copied(table, n * sizeof *table);
    free(table);
    return gpu;
}

static uint16_t *make_queries(size_t n)
{
    uint16_t *q = malloc(n * sizeof *q);
    for (size_t i = 0; i < n; i++) {
        const float x = normal();
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        q[i] = (uint16_t)(bits >> 16);
    }
    uint16_t *gpu = copied(q, n * sizeof *q);
    free(q);
    return gpu;
}

static int compare(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median microseconds. */
static float time_call(const kvant_cuda_attention_args *args, int runs)
{
    static void *flush;
    const size_t flush_bytes = (size_t)256 << 20;
    flush = flush ? flush : new_device(flush_bytes);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    float times[MOST_RUNS];
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    KVANT(kvant_cuda_attention(args, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    KVANT(kvant_cuda_attention(args, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < runs; i++) {
        CUDA(cudaMemsetAsync(flush, i, flush_bytes, stream));
        CUDA(cudaEventRecord(begin, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&times[i], begin, end));
    }
    qsort(times, (size_t)runs, sizeof *times, compare);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return 1e3f * times[runs / 2];
}

static float bench(const problem *p, const char *spec, int runs)
{
    const role k = make_role(spec, p, KVANT_ROLE_K), v = make_role(spec, p, KVANT_ROLE_V);
    const size_t pages = (p->tokens + 63) / 64, n_blocks = p->batch * pages,
                 row = (size_t)p->heads * p->head_dim;
    size_t block_bytes;
    unsigned char *pool = make_pool(p, &k, &v, n_blocks, &block_bytes);
    int32_t *lengths = malloc(p->batch * sizeof *lengths);
    for (unsigned b = 0; b < p->batch; b++)
        lengths[b] = (int32_t)p->tokens;
    kvant_cuda_attention_args args = { .size = sizeof args };
    args.k_codec = k.gpu, args.v_codec = v.gpu;
    args.k = (kvant_cuda_pages){ pool, block_bytes, k.page_bytes };
    args.v = (kvant_cuda_pages){ pool + p->kv_heads * k.page_bytes, block_bytes, v.page_bytes };
    args.block_table = make_table(n_blocks);
    args.table_stride = args.blocks_per_row = (uint32_t)pages;
    args.lengths = copied(lengths, p->batch * sizeof *lengths);
    args.batch = p->batch, args.n_heads = p->heads, args.n_kv_heads = p->kv_heads;
    args.type = KVANT_CUDA_BF16;
    args.q = make_queries(p->batch * p->queries * row);
    args.out = new_device(p->batch * p->queries * row * 2);
    args.q_batch_stride = args.out_batch_stride = p->queries * row;
    args.q_head_stride = args.out_head_stride = p->head_dim;
    args.q_token_stride = args.out_token_stride = row;
    args.scale = 1 / sqrtf((float)p->head_dim);
    args.workspace_bytes = kvant_cuda_attention_workspace(p->head_dim) + KVANT_CUDA_SCRATCH_BYTES;
    args.workspace = new_device(args.workspace_bytes);
    args.query_tokens = p->queries, args.causal = 1;
    const float time = time_call(&args, runs);
    cudaFree(pool);
    cudaFree(args.out);
    cudaFree((void *)args.q);
    cudaFree((void *)args.block_table);
    cudaFree((void *)args.lengths);
    cudaFree(args.workspace);
    free(lengths);
    return time;
}

int main(int argc, char **argv)
{
    static const char *const usual[] = { "int-4", "turboquant-4", "octopus-4", "hqmq-s96r4",
                                         "trellis-4" };
    problem p;
    if (argc < 2 || sscanf(argv[1], "%u,%u,%u,%u,%u,%u", &p.batch, &p.heads, &p.kv_heads,
                           &p.head_dim, &p.tokens, &p.queries) != 6) {
        fprintf(stderr,
                "usage: bench_rows batch,heads,kv_heads,head_dim,tokens,query_tokens [CODEC...]\n");
        return 2;
    }
    if (getenv("KVANT_TEST_SHARED_KB"))
        kvant_cuda_limit_shared_memory((size_t)atoi(getenv("KVANT_TEST_SHARED_KB")) << 10);
    const int runs = getenv("KVANT_RUNS") ? atoi(getenv("KVANT_RUNS")) : 15;
    printf("%-26s", argv[1]);
    for (int i = 0; i < (argc > 2 ? argc - 2 : 5); i++) {
        const char *spec = argc > 2 ? argv[2 + i] : usual[i];
        printf("  %s %.1f", spec, bench(&p, spec, runs < MOST_RUNS ? runs : MOST_RUNS));
        fflush(stdout);
    }
    printf("\n");
    return 0;
}
